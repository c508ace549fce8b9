"""Many records at once: every field as a numpy column, or where their bodies and keys stand.

What always holds: no byte outside the buffer is read, whatever the bytes say, since numpy checks every index and no
position can be negative; sums are made in 64 bits, where they cannot overflow. A span lies within its record; what has
no span (a body that is compressed or stands in a block, a key that is missing or not in its usual place, a record that
is none) is read through a `RecordView`, which also says what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.compiled import find
from dmq.errors import RecordCorrupt
from dmq.records import layout
from dmq.records.attributes import KEY
from dmq.records.layout import Buffer, Positions
from dmq.records.view import RecordView

__all__ = [
    "NOTHING",
    "NO_SPAN",
    "Columns",
    "Parts",
    "Spans",
    "decode_columns",
    "find_spans",
    "have_bodies",
    "key_in_place",
    "open_push",
    "open_records",
    "walk_parts",
]

NO_SPAN: Final = 0  # as an end: no body or key ends at a buffer's first byte
NOTHING: Final = -1  # as a key's start: there is certainly none
_KEY_HEAD: Final = struct.Struct(">BH")
_KEY_HEAD_BYTES: Final = _KEY_HEAD.size

open_records: Final[Callable[..., tuple[list[bytes], list[str | None]] | None] | None] = find("open_records")
"""Bodies and keys of some records, as two lists, taken out by a compiled loop; None where there is none.

It returns None for records that are not all read alike: one is none, has a body that is compressed, or a block that
cannot be expanded, or fails its checksum. Parameters: the buffer; where each record begins in it, and where the last
one ends; the first, and one past the last; `expand`, which gives the bytes of the block that begins at a place;
`is_checked`, whether to look at the checksums of bodies.
"""

have_bodies: Final[Callable[..., bool] | None] = find("have_bodies")
"""Whether each record has its body in itself, as it was sent, or in a block that can be expanded, which is done then;
by a compiled loop, None where there is none. Parameters: the buffer; where each record begins in it, and where the
last one ends; `expand`, as above.
"""

open_push: Final[Callable[[bytes, int], tuple[bytes, list[int], list[bytes], list[str | None]] | None] | None] = find(
    "open_push"
)
"""`open_records` for the body of a push, of which it is told how many records it has: the records, where each begins
and the last one ends, bodies and keys. None also if the records do not fill the body.
"""

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
        RecordCorrupt: one of them is not a record of that length within the buffer.
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


# --- spans ------------------------------------------------------------------------------------------------------------


class Spans(NamedTuple):
    """One entry for each record. A body begins `layout.BODY_AT` bytes after its record."""

    body_ends: Sequence[int]
    key_starts: Sequence[int]
    key_ends: Sequence[int]
    has_bodies: bool = False  # all of them


def find_spans(buffer: Buffer, bounds: Sequence[int] | npt.NDArray[np.int64]) -> Spans:
    """The spans of records that stand one behind the other.

    Parameters:
        buffer: contiguous bytes.
        bounds: where each record begins, rising, and where the last one ends.
    """
    edges = np.asarray(bounds, np.int64)
    starts, ends = edges[:-1], edges[1:]
    octets = np.frombuffer(buffer, np.uint8)
    try:
        head = layout.gather(buffer, starts, layout.LENGTH_AT, ">u4")
        body_ends = starts + layout.gather(buffer, starts, layout.BODY_SIZE_AT, ">u4")
        body_ends += layout.BODY_AT
        # Positions only ever grow on the way, so it is enough that the last of them meets the record's end.
        at = body_ends + octets[body_ends]  # the topic
        at += 1
        at += octets[at]  # the app
        at += 1
        at += octets[at]  # the business id
        at += 1
        sizes = layout.gather(buffer, at, 0, ">u2").astype(np.int64)
        at += 2
        if (at + sizes != ends).any() or (head != ends - starts).any():
            return _no_spans(len(starts))
        has_some = sizes >= _KEY_HEAD_BYTES
        if not has_some.all():
            at = np.where(has_some, at, starts)  # somewhere inside
        has_key = has_some & (octets[at] == KEY)
        key_starts = at + _KEY_HEAD_BYTES
        key_ends = key_starts + layout.gather(buffer, at, 1, ">u2")
        has_key &= key_ends <= ends
    except IndexError:
        return _no_spans(len(starts))
    is_plain = layout.gather(buffer, starts, layout.MAGIC_AT, ">u2") == layout.MAGIC
    is_plain &= (octets[starts + layout.FLAGS_AT] & (layout.COMPRESSED | layout.BLOCK)) == 0
    body_ends *= is_plain
    key_ends *= has_key
    key_starts[~has_some] = NOTHING
    return Spans(body_ends.tolist(), key_starts.tolist(), key_ends.tolist(), bool(is_plain.all()))


def key_in_place(buffer: Buffer, start: int, stop: int) -> str | None:
    """The key of a record, if it stands where it usually does; None if there is none there, or the record is none.

    Parameters:
        start, stop: where the record begins and ends.
    """
    try:
        at: int = start + layout.BODY_AT + layout.U32.unpack_from(buffer, start + layout.BODY_SIZE_AT)[0]
        at += buffer[at] + 1  # the topic
        at += buffer[at] + 1  # the app
        at += buffer[at] + 1  # the business id
        kind, size = _KEY_HEAD.unpack_from(buffer, at + 2)
        end = at + 2 + _KEY_HEAD_BYTES + size
        if kind != KEY or end > stop:
            return None
        return str(buffer[end - size : end], "utf-8")
    except (IndexError, struct.error, UnicodeDecodeError):
        return None


def _no_spans(count: int) -> Spans:
    nothing = [NO_SPAN] * count
    return Spans(nothing, nothing, nothing)
