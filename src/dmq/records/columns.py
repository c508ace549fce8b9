"""Many records at once: every field as a numpy column.

What always holds: no byte outside the buffer is read, whatever the bytes say, since numpy checks every index and no
position can be negative; sums are made in 64 bits, where they cannot overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.errors import RecordCorrupt
from dmq.records import layout
from dmq.records.layout import Buffer, Positions
from dmq.records.view import RecordView

__all__ = ["Columns", "Parts", "decode_columns", "walk_parts"]

_FIXED_DTYPE: Final = np.dtype(
    [
        ("length", ">u4"),
        ("magic", ">u2"),
        ("flags", "u1"),
        ("tag_hash", ">u2"),
        ("priority", "u1"),
        *((name, layout.STAMP_DTYPE[name].str) for name in layout.STAMP_DTYPE.names or ()),
        ("send_time_ms", ">u8"),
        ("receive_ms", ">u4"),
        ("store_ms", ">u4"),
        ("crc", ">u8"),
    ]
)


class Columns(msgspec.Struct, frozen=True, gc=False):
    """The fields of many records. Times after sending are in `receive_ms` and `store_ms`.

    A position `*_at` is that of the first byte of the part itself in the buffer, behind its length.
    """

    length: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint8]
    tag_hash: npt.NDArray[np.uint16]
    priority: npt.NDArray[np.uint8]
    journal_offset: npt.NDArray[np.uint64]
    queue: npt.NDArray[np.uint8]
    queue_offset: npt.NDArray[np.uint64]
    client: npt.NDArray[np.void]
    server: npt.NDArray[np.void]
    send_time_ms: npt.NDArray[np.uint64]
    receive_ms: npt.NDArray[np.uint32]
    store_ms: npt.NDArray[np.uint32]
    crc: npt.NDArray[np.uint64]
    body_at: Positions
    body_size: Positions
    topic_at: Positions
    topic_size: Positions
    app_at: Positions
    app_size: Positions
    business_id_at: Positions
    business_id_size: Positions
    attributes_at: Positions
    attributes_size: Positions


class Parts(msgspec.Struct, gc=False):
    """Where the parts of each record begin, at their lengths; true only of records that are not `bad`."""

    body_size: Positions
    topic_at: Positions
    app_at: Positions
    business_at: Positions
    attributes_at: Positions
    attributes_size: Positions
    bad: npt.NDArray[np.bool_]


def walk_parts(buffer: Buffer, starts: Positions, ends: Positions) -> Parts:
    """Follow the sizes from the body to the attributes.

    Positions only ever grow along the way. So if the last of them meets the record's end, all before it were inside the
    record, and checking that one sum is enough; one that strays may read a neighbour's byte, and then the sum is wrong.

    Raises:
        IndexError: a size leads out of the buffer.
    """
    octets = np.frombuffer(buffer, np.uint8)
    body_size = layout.gather(buffer, starts, layout.BODY_SIZE_AT, ">u4").astype(np.int64)
    topic_at = starts + layout.BODY_AT
    topic_at += body_size
    app_at = topic_at + octets[topic_at]
    app_at += 1
    business_at = app_at + octets[app_at]
    business_at += 1
    attributes_at = business_at + octets[business_at]
    attributes_at += 1
    attributes_size = layout.gather(buffer, attributes_at, 0, ">u2").astype(np.int64)
    bad = attributes_at + attributes_size != ends - 2
    return Parts(
        body_size, topic_at, app_at, business_at, attributes_at=attributes_at, attributes_size=attributes_size, bad=bad
    )


def decode_columns(
    buffer: Buffer, starts: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
) -> Columns:
    """Decode the fixed part of many records, and where their other parts stand.

    Parameters:
        buffer: contiguous bytes.
        starts: where each record begins in it.
        lengths: how long each is.

    Raises:
        RecordCorrupt: one of them is no record of that length within the buffer.
    """
    count = len(starts)
    if len(lengths) != count:
        raise ValueError(f"{count} starts and {len(lengths)} lengths do not belong together")
    begins: Positions = starts.astype(np.int64)
    ends: Positions = begins + lengths.astype(np.int64)
    if count == 0:
        return _columns(_NO_RECORDS, begins, _NO_PARTS)
    if int(begins.min()) < 0:
        raise RecordCorrupt("a record cannot begin before its buffer")
    try:
        fixed = layout.gather(buffer, begins, 0, f"V{layout.FIXED_BYTES}").view(_FIXED_DTYPE)
        parts = walk_parts(buffer, begins, ends)
        bad = parts.bad | (fixed["length"] != lengths) | (fixed["magic"] != layout.MAGIC)
        index = int(bad.argmax()) if bad.any() else -1
    except IndexError:
        index = 0
    if index >= 0:
        _complain(buffer, begins[index:].tolist(), ends[index:].tolist(), index)
    return _columns(fixed, begins, parts)


def _complain(buffer: Buffer, starts: Sequence[int], ends: Sequence[int], first: int) -> NoReturn:
    """Say what is wrong with the first bad record from this one on."""
    for index, (start, end) in enumerate(zip(starts, ends, strict=True), first):
        try:
            record = RecordView(buffer, start, end)
            record.parts()
        except RecordCorrupt as error:
            raise RecordCorrupt(f"record {index}: {error.message}", index=index) from error
        if start + record.length != end:
            raise RecordCorrupt(f"record {index} has {record.length} bytes, not {end - start}", index=index)
    raise AssertionError("a record that the columns refuse is one that the view refuses")


def _columns(fixed: npt.NDArray[Any], starts: Positions, parts: Parts) -> Columns:
    native = {name: _native(fixed[name]) for name in _FIXED_DTYPE.names or () if name != "magic"}
    return Columns(
        **native,
        body_at=starts + layout.BODY_AT,
        body_size=parts.body_size,
        topic_at=parts.topic_at + 1,
        topic_size=parts.app_at - parts.topic_at - 1,
        app_at=parts.app_at + 1,
        app_size=parts.business_at - parts.app_at - 1,
        business_id_at=parts.business_at + 1,
        business_id_size=parts.attributes_at - parts.business_at - 1,
        attributes_at=parts.attributes_at + 2,
        attributes_size=parts.attributes_size,
    )


def _native(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column.astype(column.dtype.newbyteorder("="))


_NO_RECORDS: Final = np.empty(0, _FIXED_DTYPE)
_NO_PARTS: Final = Parts(*(np.empty(0, np.int64),) * 6, np.empty(0, np.bool_))
