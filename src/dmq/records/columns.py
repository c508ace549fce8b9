"""Many records at once: every field as a numpy column, and the broker's check of a whole batch.

What always holds: no byte outside the buffer is read, whatever the bytes say, since numpy checks every index and no
position can be negative; sums are made in 64 bits, where they cannot overflow. The numpy path and the plain path agree:
what one refuses, the other refuses, for the same first record and reason.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.errors import InvalidMessage, MessageTooLarge, RecordCorrupt
from dmq.records import layout
from dmq.records.layout import Buffer, Positions
from dmq.records.view import RecordView

__all__ = ["BatchRules", "Columns", "batch_rules", "check_batch", "decode_columns"]

# From this many records on the numpy path is the faster one (bench/records.py).
VERIFY_MANY_MIN: Final = 16

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
_HEAD_DTYPE: Final = np.dtype([("length", ">u4"), ("magic", ">u2"), ("flags", "u1"), ("tag", "V2"), ("priority", "u1")])
_HEAD_BYTES: Final = np.dtype(f"V{_HEAD_DTYPE.itemsize}")
_MAGIC: Final = layout.U16.pack(layout.MAGIC)
# Length, magic, flags, priority and the size of the body: what the plain check looks at first, in one call.
_CHECKED: Final = struct.Struct(f">IHB2xB{layout.BODY_SIZE_AT - layout.JOURNAL_OFFSET_AT}xI")
assert _CHECKED.size == layout.BODY_AT
_ALL_FLAGS: Final = 0xFF & ~layout.RESERVED_FLAGS
_LONE: Final = (0,)  # where a record begins that is alone


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


class _Parts(msgspec.Struct, gc=False):
    """Where the parts of each record begin, at their lengths; true only of records that are not `bad`."""

    body_size: Positions
    topic_at: Positions
    app_at: Positions
    business_at: Positions
    attributes_at: Positions
    attributes_size: Positions
    bad: npt.NDArray[np.bool_]


def _walk(buffer: Buffer, starts: Positions, ends: Positions) -> _Parts:
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
    return _Parts(
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
        parts = _walk(buffer, begins, ends)
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


def _columns(fixed: npt.NDArray[Any], starts: Positions, parts: _Parts) -> Columns:
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
_NO_PARTS: Final = _Parts(*(np.empty(0, np.int64),) * 6, np.empty(0, np.bool_))


def check_batch(buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules) -> None:
    """Check a batch that a client sent: `buffer` holds the records, one after another, and nothing else.

    Parameters:
        lengths: how long each record is, as the sender says.

    Raises:
        InvalidMessage: the first record at fault, by its index, and what is wrong with it.
    """
    count = len(lengths)
    if count == 1 and len(buffer) == lengths[0] >= layout.RECORD_BYTES_MIN and not rules.check_crc:
        sizes_of_one = (int(lengths[0]),)
        if _any_bad_few(buffer, _LONE, sizes_of_one, rules):
            verify_few(buffer, _LONE, sizes_of_one, rules)
        return
    if count < VERIFY_MANY_MIN:
        few = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
        places = list(accumulate(few, initial=0))
        _check_sum(len(buffer), count, places.pop(), min(few, default=layout.RECORD_BYTES_MIN))
        if rules.check_crc or _any_bad_few(buffer, places, few, rules):
            verify_few(buffer, places, few, rules)
        return
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=bounds[1:])
    sizes = np.asarray(lengths, np.int64)
    starts, total = bounds[:-1], int(bounds[-1])
    # A length over the whole buffer could make the sums wrap: the true sum is then no less wrong.
    if int(sizes.max()) > len(buffer):
        total = -1
    _check_sum(len(buffer), count, total, int(sizes.min()))
    if rules.check_crc or _any_bad(buffer, starts, sizes, rules):
        verify_few(buffer, starts.tolist(), sizes.tolist(), rules)


def _check_sum(size: int, count: int, total: int, smallest: int) -> None:
    if total != size or smallest < layout.RECORD_BYTES_MIN:
        raise InvalidMessage(
            f"the batch of {count} records has {size} bytes, which is not what its lengths add up to, "
            f"or one of them is under {layout.RECORD_BYTES_MIN}, the smallest record"
        )


class BatchRules(msgspec.Struct, frozen=True, gc=False):
    """What holds for the records of a batch; see `batch_rules`."""

    topic: bytes
    named: bytes  # the topic as records have it, behind its length; empty if no record can
    body_bytes_max: int
    flags_forbidden: int
    attributes_bytes_max: int
    check_crc: bool

    @property
    def flags_allowed(self) -> int:
        return ~self.flags_forbidden & 0xFF


def batch_rules(
    topic: str,
    *,
    body_bytes_max: int = layout.BODY_BYTES_MAX,
    flags_allowed: int = _ALL_FLAGS,
    attributes_bytes_max: int = layout.CLIENT_ATTRIBUTES_BYTES_MAX,
    check_crc: bool = False,
) -> BatchRules:
    """The rules for batches of a topic.

    Parameters:
        topic: the topic all records must name.
        body_bytes_max: the largest body, as stored.
        flags_allowed: the system flags this sender may set.
        attributes_bytes_max: the most attributes may take.
        check_crc: also check both checksums of each record.
    """
    name = topic.encode()
    named = bytes((len(name),)) + name if len(name) <= layout.NAME_BYTES_MAX else b""
    return BatchRules(
        name,
        named,
        body_bytes_max,
        ~(flags_allowed & _ALL_FLAGS) & 0xFF,
        attributes_bytes_max=attributes_bytes_max,
        check_crc=check_crc,
    )


def _any_bad_few(buffer: Buffer, starts: Sequence[int], sizes: Sequence[int], rules: BatchRules) -> bool:
    """`_any_bad` without numpy."""
    named, forbidden = rules.named, rules.flags_forbidden
    body_bytes_max, attributes_bytes_max = rules.body_bytes_max, rules.attributes_bytes_max
    try:
        for start, size in zip(starts, sizes, strict=True):
            length, magic, flags, priority, body_size = _CHECKED.unpack_from(buffer, start)
            topic_at = start + layout.BODY_AT + body_size
            at = topic_at + len(named)
            if buffer[topic_at:at] != named:
                return True
            at += 1 + buffer[at]  # behind the app
            at += 1 + buffer[at]  # behind the business id
            attributes_size = buffer[at] << 8 | buffer[at + 1]
            if (
                at + 2 + attributes_size != start + size
                or length != size
                or magic != layout.MAGIC
                or flags & forbidden
                or priority > layout.PRIORITY_MAX
                or body_size > body_bytes_max
                or attributes_size > attributes_bytes_max
            ):
                return True
    except (IndexError, struct.error):
        return True
    return not named


def _any_bad(buffer: Buffer, starts: Positions, sizes: Positions, rules: BatchRules) -> bool:
    """Whether any record breaks a rule; which one and why, the plain path finds out."""
    expected = rules.named
    if not expected:
        return True
    head = layout.gather(buffer, starts, 0, _HEAD_BYTES).view(_HEAD_DTYPE)
    try:
        parts = _walk(buffer, starts, starts + sizes)
    except IndexError:
        return True
    if (
        parts.bad.any()
        or (head["length"] != sizes).any()
        or head["magic"].tobytes() != _MAGIC * len(starts)
        or int(np.bitwise_or.reduce(head["flags"])) & rules.flags_forbidden
        or int(head["priority"].max()) > layout.PRIORITY_MAX
        or int(parts.body_size.max()) > rules.body_bytes_max
        or int(parts.attributes_size.max()) > rules.attributes_bytes_max
    ):
        return True
    # A topic shorter than ours may stand so close to the buffer's end that ours would reach past it.
    if int(parts.topic_at[-1]) > len(buffer) - len(expected):
        return True
    # Two byte strings compare at once; numpy would compare the elements one by one, ten times as long.
    topics = layout.gather(buffer, parts.topic_at, 0, f"V{len(expected)}")
    return topics.tobytes() != expected * len(starts)


def verify_few(buffer: Buffer, starts: Sequence[int], sizes: Sequence[int], rules: BatchRules) -> None:
    """`verify_batch` record by record."""
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        try:
            record = RecordView(buffer, start, start + size)
            body_size = record.parts()[4]
            if rules.check_crc:
                record.verify()
        except RecordCorrupt as error:
            raise InvalidMessage(f"record {index} of the batch: {error.message}", index=index) from error
        if body_size > rules.body_bytes_max:
            raise MessageTooLarge(
                f"record {index} of the batch: the body takes {body_size} bytes; the limit is {rules.body_bytes_max}",
                index=index,
                size=body_size,
                limit=rules.body_bytes_max,
            )
        fault = _fault(record, size, rules)
        if fault:
            raise InvalidMessage(f"record {index} of the batch: {fault}", index=index)


def _fault(record: RecordView, size: int, rules: BatchRules) -> str | None:
    topic_at, app_at, _, attributes_at, _ = record.parts()
    attributes_size = record.start + record.length - attributes_at - 2
    if record.length != size:
        return f"it has {record.length} bytes, and {size} were announced"
    if record.flags & rules.flags_forbidden:
        return f"system flags {record.flags:#04x} are not allowed, only those in {rules.flags_allowed:#04x}"
    if record.priority > layout.PRIORITY_MAX:
        return f"priority is 0 to {layout.PRIORITY_MAX}, not {record.priority}"
    if attributes_size > rules.attributes_bytes_max:
        return f"attributes take {attributes_size} bytes; the limit is {rules.attributes_bytes_max}"
    if bytes(record.buffer[topic_at + 1 : app_at]) != rules.topic:
        return "it names another topic than its batch"
    return None
