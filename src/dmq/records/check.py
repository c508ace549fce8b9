"""The check of records: of a batch that a client sent, and of records that an earlier version stored unchecked.

Always looked at: the layout, the sizes and kinds of attributes, and that every text is UTF-8. The checksums of a record
only where nothing else vouches for its bytes. A batch is looked at as columns: all first entries of the attributes,
then all second ones. Texts that are ASCII, as most are, are known to be UTF-8 all at once; records with others are
looked at one by one. Of a batch with blocks, these are looked at as well, without expanding them.

What always holds: what passes is read by every reader (`RecordView`, `Columns`, a move) without an error, but for a
body that does not expand. The paths agree: what one refuses, the other refuses, for the same first record and reason.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.compiled import choose, find
from dmq.errors import InvalidMessage, MessageTooLarge, RecordCorrupt
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.block import POINTER_BYTES, BodyBlocks, block_flags, check_blocks, lone_block_size
from dmq.records.columns import Parts, walk_parts
from dmq.records.layout import Buffer, Positions
from dmq.records.view import RecordView

__all__ = [
    "BatchRules",
    "are_right_plain",
    "batch_rules",
    "check_batch",
    "find_corrupt",
    "many_bodies",
    "may_be_bad",
    "verify_few",
]

# From this many records on the numpy path is the faster one (bench/records.py).
VERIFY_MANY_MIN: Final = 32

_HEAD_DTYPE: Final = np.dtype([("length", ">u4"), ("magic", ">u2"), ("flags", "u1"), ("tag", "V2"), ("priority", "u1")])
_HEAD_BYTES: Final = np.dtype(f"V{_HEAD_DTYPE.itemsize}")
_MAGIC: Final = layout.U16.pack(layout.MAGIC)
# Length, magic, flags, priority and the size of the body: what the plain check looks at first, in one call.
_CHECKED: Final = struct.Struct(f">IHB2xB{layout.BODY_SIZE_AT - layout.JOURNAL_OFFSET_AT}xI")
assert _CHECKED.size == layout.BODY_AT
# For the plain check of a lone message: a name of another module is looked up twice.
_unpack_checked: Final = _CHECKED.unpack_from
_BODY_AT: Final = layout.BODY_AT
_MAGIC_NUMBER: Final = layout.MAGIC
_PRIORITY_MAX: Final = layout.PRIORITY_MAX
_PACKED: Final = layout.COMPRESSED | layout.BLOCK  # flags of a body that is not there as it was sent
_ALL_FLAGS: Final = 0xFF & ~(layout.RESERVED_FLAGS | layout.BLOCK)
_BODY_CRC_AT: Final = layout.CRC_AT + 4  # the low half
_BODY_CRC_AND_SIZE: Final = struct.Struct(">II")
_LONE: Final = (0,)  # where a record begins that is alone
_ENTRY_BYTES: Final = attrs.ENTRY.size

_NO_ATTRIBUTES: Final = layout.U16.pack(0)
# The beginning of attributes that are one text: their size, its kind and its size.
_LONE_TEXT: Final = np.dtype([("attributes", ">u2"), ("kind", "u1"), ("text", ">u2")])
_LONE_TEXT_BYTES: Final = np.dtype(f"V{_LONE_TEXT.itemsize}")

# Attributes of more bytes are looked at one by one: windows over all records would be mostly empty.
_WINDOW_MAX: Final = 512
_PROPERTIES_MAX: Final = 8  # of one record that are compared as columns
_BITS: Final = 64  # kinds below have a bit each, to see one that comes twice
_TEXT_KINDS: Final = frozenset(kind for kind in range(256) if attrs.shape_of(kind) == attrs.TEXT_SHAPE)
_SHAPES: Final = tuple(attrs.shape_of(kind) for kind in range(256))


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

    def with_blocks(self) -> BatchRules:
        """The same, for records that may have their bodies in blocks."""
        return msgspec.structs.replace(self, flags_forbidden=self.flags_forbidden & ~layout.BLOCK)


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


def check_batch(
    buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules, block_bytes: int = 0
) -> None:
    """Check a batch that a client sent: `buffer` holds the records, one after another, their blocks, and nothing else.

    Parameters:
        lengths: how long each record is, as the sender says.
        block_bytes: how many bytes at the end of the buffer are blocks; without any, no record may point to one.

    Raises:
        RecordCorrupt: the first record at fault, by its index, cannot be read or fails its checksums.
        InvalidMessage: it can be read, and breaks a rule.
    """
    if block_bytes:
        _check_with_blocks(buffer, lengths, rules, block_bytes)
        return
    if are_right(buffer, lengths, rules):
        return
    few = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
    places = list(accumulate(few, initial=0))
    _check_sum(len(buffer), len(few), places.pop(), min(few, default=layout.RECORD_BYTES_MIN))
    verify_few(buffer, places, few, rules)


def are_right_plain(buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules) -> bool:
    """Whether all records of a batch are certainly right. If not, `check_batch` looks at them one by one."""
    count = len(lengths)
    if count == 1 and len(buffer) == lengths[0] >= layout.RECORD_BYTES_MIN:
        return not (rules.check_crc or may_be_bad(buffer, 0, int(lengths[0]), rules))
    if count < VERIFY_MANY_MIN:
        few = lengths.tolist() if isinstance(lengths, np.ndarray) else lengths
        places = list(accumulate(few, initial=0))
        if places.pop() != len(buffer) or min(few, default=layout.RECORD_BYTES_MIN) < layout.RECORD_BYTES_MIN:
            return False
        return not (rules.check_crc or _may_be_bad_few(buffer, places, few, rules))
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=bounds[1:])
    sizes = np.asarray(lengths, np.int64)
    # A length over the whole buffer could make the sums wrap.
    if int(sizes.max()) > len(buffer) or int(sizes.min()) < layout.RECORD_BYTES_MIN or int(bounds[-1]) != len(buffer):
        return False
    return not _any_bad(buffer, bounds[:-1], sizes, rules)


are_right: Final = choose(are_right_plain, "are_right")
_are_right: Final = find("are_right")


def _check_with_blocks(
    buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], rules: BatchRules, block_bytes: int
) -> None:
    """`check_batch` for a batch that has blocks."""
    blocks_at = len(buffer) - block_bytes
    if _are_right is not None and not rules.check_crc and blocks_at > 0:
        raw_size = lone_block_size(buffer, blocks_at)  # as a rule there is one
        if raw_size and _are_right(memoryview(buffer)[:blocks_at], lengths, rules.with_blocks(), raw_size):
            return
    sizes = np.asarray(lengths, np.int64)
    total = -1 if blocks_at < 0 or int(sizes.max()) > blocks_at else int(sizes.sum())
    _check_sum(blocks_at, len(sizes), total, int(sizes.min()))
    starts = np.cumsum(sizes) - sizes
    rules = rules.with_blocks()
    if _are_right is not None:
        is_right = _are_right(memoryview(buffer)[:blocks_at], lengths, rules)
    else:
        is_right = len(sizes) >= VERIFY_MANY_MIN and not _any_bad(buffer, starts, sizes, rules)
    if not is_right:
        verify_few(buffer, starts.tolist(), sizes.tolist(), rules)
    check_blocks(buffer, starts, blocks_at, rules.body_bytes_max, check_crc=rules.check_crc)


def _check_sum(size: int, count: int, total: int, smallest: int) -> None:
    if total != size or smallest < layout.RECORD_BYTES_MIN:
        raise RecordCorrupt(
            f"the batch of {count} records has {size} bytes, which is not what its lengths add up to, "
            f"or one of them is under {layout.RECORD_BYTES_MIN}, the smallest record"
        )


def verify_few(buffer: Buffer, starts: Sequence[int], sizes: Sequence[int], rules: BatchRules) -> None:
    """Check record by record, as `check_batch` says."""
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        try:
            record = RecordView(buffer, start, start + size)
            _read_all(record, size, rules.check_crc)
        except RecordCorrupt as error:
            raise RecordCorrupt(
                f"record {index} of the batch: {error.message}: nothing of the batch was stored; send it again",
                index=index,
            ) from error
        body_size = record.parts()[4]
        if body_size > rules.body_bytes_max:
            raise MessageTooLarge(
                f"record {index} of the batch: the body takes {body_size} bytes; the limit is {rules.body_bytes_max}",
                index=index,
                size=body_size,
                limit=rules.body_bytes_max,
            )
        fault = _fault(record, rules)
        if fault:
            raise InvalidMessage(f"record {index} of the batch: {fault}", index=index)


def find_corrupt(
    buffer: Buffer, starts: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
) -> dict[int, str]:
    """Which of some stored records cannot be read or fail their checksums, by index, and why.

    Parameters:
        starts, lengths: where they stand in the buffer, in which their blocks stand as well.
    """
    begins, sizes = starts.astype(np.int64), lengths.astype(np.int64)
    if len(begins) >= VERIFY_MANY_MIN:
        head = layout.gather(buffer, begins, 0, _HEAD_BYTES).view(_HEAD_DTYPE)
        try:
            parts = walk_parts(buffer, begins, begins + sizes)
        except IndexError:
            parts = None
        if (
            parts is not None
            and not parts.bad.any()
            and not (head["length"] != sizes).any()
            and head["magic"].tobytes() == _MAGIC * len(begins)
            and not int(np.bitwise_or.reduce(head["flags"])) & layout.RESERVED_FLAGS
            and not _any_pointer_bad(buffer, begins, head["flags"])
            and not _any_unreadable(buffer, parts, begins + sizes, head["flags"])
            and not _any_text_bad(buffer, parts.topic_at, parts.app_at)
            and not _any_text_bad(buffer, parts.app_at, parts.business_at)
            and not _any_crc_wrong(buffer, begins, parts, begins + sizes)
        ):
            return {}
    found: dict[int, str] = {}
    blocks = BodyBlocks(buffer)
    for index, (start, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
        try:
            record = RecordView(bytes(buffer[start : start + size]))
            _read_all(record, size, True)
            if record.in_block and crc32c(blocks.body(start)) != record.crc & 0xFFFF_FFFF:
                raise RecordCorrupt("the body of the record does not match its CRC")
        except RecordCorrupt as error:
            found[index] = error.message.replace(" at byte 0", "", 1)  # a place that means nothing to others
    return found


def checked_bodies(
    buffer: bytes, bounds: Sequence[int] | npt.NDArray[np.int64], blocks: BodyBlocks | None = None
) -> list[bytes] | None:
    """The bodies of some records, as they are stored, or out of their blocks; None if one fails its checksum.

    For records whose frame came as it was sent: their producer may have sealed what was damaged already.

    Parameters:
        buffer: the records, and the blocks behind them.
        bounds: where each record begins, and where the last one ends.
        blocks: of the buffer; None if no body stands in one.
    """
    if not isinstance(bounds, np.ndarray):
        few: list[bytes] = []
        for start in bounds[:-1]:
            crc, size = _BODY_CRC_AND_SIZE.unpack_from(buffer, start + _BODY_CRC_AT)
            if blocks is not None and buffer[start + layout.FLAGS_AT] & layout.BLOCK:
                try:
                    body = blocks.body(start)
                except RecordCorrupt:
                    return None
            else:
                body = buffer[start + layout.BODY_AT : start + layout.BODY_AT + size]
            few.append(body)
            if crc32c(body) != crc:
                return None
        return few
    starts = bounds[:-1]
    bodies = many_bodies(buffer, starts, blocks)
    if bodies is None:
        return None
    return bodies if [*map(crc32c, bodies)] == layout.gather(buffer, starts, _BODY_CRC_AT, ">u4").tolist() else None


def many_bodies(buffer: bytes, starts: Positions, blocks: BodyBlocks | None) -> list[bytes] | None:
    """The bodies of many records, as they are stored, or out of their blocks; None if a block cannot be expanded."""
    in_block = None if blocks is None else block_flags(buffer, starts)
    try:
        if blocks is not None and in_block is not None and in_block.all():
            return blocks.bodies(starts)
        begins = starts + layout.BODY_AT
        ends = begins + layout.gather(buffer, starts, layout.BODY_SIZE_AT, ">u4")
        bodies = [buffer[at:end] for at, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        if blocks is not None and in_block is not None:
            _put_block_bodies(bodies, blocks, starts, in_block)
    except RecordCorrupt:
        return None
    return bodies


def _put_block_bodies(
    bodies: list[bytes], blocks: BodyBlocks, starts: Positions, in_block: npt.NDArray[np.bool_]
) -> None:
    """Put the bodies that stand in blocks in their places; raises RecordCorrupt if a block cannot be expanded."""
    mine = blocks.bodies(starts[in_block])
    for index, body in zip(np.flatnonzero(in_block).tolist(), mine, strict=True):
        bodies[index] = body


def _read_all(record: RecordView, size: int, check_crc: bool) -> None:
    """Read all that can be read of a record but its body.

    Raises:
        RecordCorrupt: something cannot be read.
    """
    record.parts()
    if record.length != size:
        raise RecordCorrupt(f"it has {record.length} bytes, and {size} were announced")
    if check_crc:
        record.verify()
    record.names()
    if record.attributes.raw_size is None and record.flags & layout.COMPRESSED:
        raise RecordCorrupt("it is marked as compressed, and does not say how")


def _fault(record: RecordView, rules: BatchRules) -> str | None:
    topic_at, app_at, _, attributes_at, _ = record.parts()
    attributes_size = record.start + record.length - attributes_at - 2
    if record.flags & rules.flags_forbidden:
        return f"system flags {record.flags:#04x} are not allowed, only those in {rules.flags_allowed:#04x}"
    if record.in_block:
        record.check_pointer()
    if record.priority > layout.PRIORITY_MAX:
        return f"priority is 0 to {layout.PRIORITY_MAX}, not {record.priority}"
    if attributes_size > rules.attributes_bytes_max:
        return f"attributes take {attributes_size} bytes; the limit is {rules.attributes_bytes_max}"
    if bytes(record.buffer[topic_at + 1 : app_at]) != rules.topic:
        return "it names another topic than its batch"
    return None


# --- a few records ----------------------------------------------------------------------------------------------------


def _may_be_bad_few(buffer: Buffer, starts: Sequence[int], sizes: Sequence[int], rules: BatchRules) -> bool:
    """Whether a record is bad or has to be looked at closely, without numpy."""
    for start, size in zip(starts, sizes, strict=True):  # noqa: SIM110 - `any` makes it a third slower
        if may_be_bad(buffer, start, size, rules):
            return True
    return False


def may_be_bad(buffer: Buffer, start: int, size: int, rules: BatchRules) -> bool:
    """Whether one record has to be looked at closely; never of its checksums."""
    named, end = rules.named, start + size
    try:
        length, magic, flags, priority, body_size = _unpack_checked(buffer, start)
        topic_at = start + _BODY_AT + body_size
        app_at = at = topic_at + len(named)
        if buffer[topic_at:at] != named or not named:
            return True
        at += 1 + buffer[at]  # behind the app
        at += 1 + buffer[at]  # behind the business id
        attributes_size = buffer[at] << 8 | buffer[at + 1]
        if (
            at + 2 + attributes_size != end
            or length != size
            or magic != _MAGIC_NUMBER
            or flags & rules.flags_forbidden
            or priority > _PRIORITY_MAX
            or body_size > rules.body_bytes_max
            or attributes_size > rules.attributes_bytes_max
        ):
            return True
        tail = bytes(buffer[app_at:end])
        if tail.isascii() and not flags & _PACKED:
            # Mostly a key and nothing else. Less than the head of an entry leaves a size below 0, which no text has.
            if not attributes_size or (
                buffer[at + 3] << 8 | buffer[at + 4] == attributes_size - _ENTRY_BYTES and buffer[at + 2] in _TEXT_KINDS
            ):
                return False
        elif not tail[: at - app_at].isascii():
            return True
        kinds = kinds_of(tail[at + 2 - app_at :])
        if flags & layout.BLOCK and (body_size != POINTER_BYTES or flags & layout.COMPRESSED):
            return True
        return kinds < 0 or bool(flags & layout.COMPRESSED and not kinds >> attrs.COMPRESSION & 1)
    except (IndexError, struct.error):
        return True


def kinds_of(raw: bytes) -> int:
    """The kinds of attributes below `PROPERTY` as bits; -1 if they cannot be read: `decode_attributes` says why."""
    at, end, seen = 0, len(raw), 0
    keys: set[bytes] = set()
    while at < end:
        if end - at < _ENTRY_BYTES:
            return -1
        kind = raw[at]
        value_at = at + _ENTRY_BYTES
        at = value_at + (raw[value_at - 2] << 8 | raw[value_at - 1])
        if at > end:
            return -1
        if kind < attrs.PROPERTY:
            if seen >> kind & 1:
                return -1
            seen |= 1 << kind
        shape = _SHAPES[kind]
        if shape == attrs.TEXT_SHAPE:
            if not is_text(raw[value_at:at]):
                return -1
        elif shape == attrs.PROPERTY_SHAPE:
            cut = value_at + 1 + raw[value_at] if at > value_at else at + 1
            key = raw[value_at + 1 : cut]
            if not key or cut > at or key in keys or not (is_text(key) and is_text(raw[cut:at])):
                return -1
            keys.add(key)
        elif shape >= 0 and at - value_at != shape:
            return -1
    return seen


def is_text(raw: bytes) -> bool:
    if raw.isascii():
        return True
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- many records -----------------------------------------------------------------------------------------------------


def _any_bad(buffer: Buffer, starts: Positions, sizes: Positions, rules: BatchRules) -> bool:
    """Whether any record breaks a rule; which one and why, the plain path finds out."""
    if not rules.named:
        return True
    head = layout.gather(buffer, starts, 0, _HEAD_BYTES).view(_HEAD_DTYPE)
    flags = int(np.bitwise_or.reduce(head["flags"]))
    if (
        bool((head["length"] != sizes).any())
        or head["magic"].tobytes() != _MAGIC * len(starts)
        or bool(flags & rules.flags_forbidden)
        or int(head["priority"].max()) > layout.PRIORITY_MAX
    ):
        return True
    ends = starts + sizes
    if flags & layout.BLOCK and _any_pointer_bad(buffer, starts, head["flags"]):
        return True
    try:
        if not (flags & layout.COMPRESSED or rules.check_crc) and _are_alike(buffer, starts, ends, rules):
            return False
        parts = walk_parts(buffer, starts, ends)
    except IndexError:
        return True
    return (
        bool(parts.bad.any())
        or int(parts.body_size.max()) > rules.body_bytes_max
        or int(parts.attributes_size.max()) > rules.attributes_bytes_max
        or _any_name_bad(buffer, parts, rules.named)
        or _any_unreadable(buffer, parts, ends, head["flags"])
        or (rules.check_crc and _any_crc_wrong(buffer, starts, parts, ends))
    )


def _any_pointer_bad(buffer: Buffer, starts: Positions, flags: npt.NDArray[np.uint8]) -> bool:
    """Whether a body that stands in a block is not a pointer, or is said to be compressed by itself as well."""
    in_block = flags & np.uint8(layout.BLOCK) != 0
    sizes = layout.gather(buffer, starts[in_block], layout.BODY_SIZE_AT, ">u4")
    return bool((sizes != POINTER_BYTES).any() or (flags[in_block] & np.uint8(layout.COMPRESSED)).any())


def _are_alike(buffer: Buffer, starts: Positions, ends: Positions, rules: BatchRules) -> bool:
    """Whether all records are right, and made alike: of one app, without a business id, with a key or another ASCII
    text for all attributes, or without any. So most batches are, and then their sizes need not be followed one by one.

    Raises:
        IndexError: a size leads out of the buffer.
    """
    body_sizes = layout.gather(buffer, starts, layout.BODY_SIZE_AT, ">u4").astype(np.int64)
    topic_at = starts + layout.BODY_AT
    topic_at += body_sizes
    app_at = int(topic_at[0]) + len(rules.named)
    business_at = app_at + 1 + buffer[app_at]
    app = bytes(buffer[app_at + 1 : business_at])
    if buffer[business_at] or not app.isascii():
        return False
    names = rules.named + bytes(buffer[app_at : business_at + 1])
    attributes_at = topic_at + len(names)
    spaces = ends - attributes_at
    widest = int(spaces.max()) - 2
    if (
        int(body_sizes.max()) > rules.body_bytes_max
        or widest > min(_WINDOW_MAX, rules.attributes_bytes_max)
        or not _are_all(buffer, topic_at, names)
    ):
        return False
    if int(spaces[0]) == 2:
        return not widest and _are_all(buffer, attributes_at, _NO_ATTRIBUTES) and not (spaces != 2).any()
    if int(spaces[-1]) < _LONE_TEXT.itemsize:
        return False
    texts = layout.gather(buffer, attributes_at, 0, _LONE_TEXT_BYTES).view(_LONE_TEXT)
    kind = int(texts["kind"][0])
    return (
        kind in _TEXT_KINDS
        and texts["kind"].tobytes() == bytes((kind,)) * len(starts)
        and not (texts["attributes"] != spaces - 2).any()
        and not (texts["text"] != spaces - (2 + _ENTRY_BYTES)).any()
        and _windows(buffer, ends, widest)[0].tobytes().isascii()
    )


def _any_name_bad(buffer: Buffer, parts: Parts, named: bytes) -> bool:
    """Whether a record names another topic than this, or an app that is not text."""
    # The records of a batch are of one app: its name is looked at once, and all others compared with it.
    app_at = int(parts.app_at[0])
    names = named + bytes(buffer[app_at : int(parts.business_at[0])])
    if not is_text(names[len(named) + 1 :]):
        return True
    if _are_all(buffer, parts.topic_at, names):
        return False
    return not _are_all(buffer, parts.topic_at, named) or _any_text_bad(buffer, parts.app_at, parts.business_at)


def _are_all(buffer: Buffer, starts: Positions, expected: bytes) -> bool:
    """Whether the same bytes stand at all places."""
    # A name shorter than ours may stand so close to the buffer's end that ours would reach past it.
    if int(starts[-1]) > len(buffer) - len(expected):
        return False
    # Two byte strings compare at once; numpy would compare the elements one by one, ten times as long.
    return layout.gather(buffer, starts, 0, f"V{len(expected)}").tobytes() == expected * len(starts)


def _any_text_bad(buffer: Buffer, starts: Positions, ends: Positions) -> bool:
    """Whether one of the names between these places, the first byte being its size, is not text."""
    sizes = ends - starts
    widest = int(sizes.max()) - 1
    if not widest:
        return False
    windows = _windows(buffer, ends, widest)[0]
    if windows.tobytes().isascii():
        return False
    others = np.flatnonzero((windows > 0x7F).any(axis=1))
    places = zip(starts[others].tolist(), ends[others].tolist(), strict=True)
    return not all(is_text(bytes(buffer[start + 1 : end])) for start, end in places)


def _windows(buffer: Buffer, ends: Positions, width: int) -> tuple[npt.NDArray[np.uint8], Positions]:
    """A copy of so many bytes before each end as rows, and where each begins: more than is wanted of shorter parts."""
    at = ends - width
    if int(at[0]) < 0:
        at = np.maximum(at, 0)  # the first records: their parts are inside of it all the same
    rows = layout.gather(buffer, at, 0, f"V{width}").view(np.uint8).reshape(len(ends), width)
    return rows, at


def _any_unreadable(buffer: Buffer, parts: Parts, ends: Positions, flags: npt.NDArray[np.uint8]) -> bool:
    """Whether a business id or the attributes of a record cannot be read."""
    if _any_text_bad(buffer, parts.business_at, parts.attributes_at):
        return True
    is_compressed = int(np.bitwise_or.reduce(flags)) & layout.COMPRESSED
    if not is_compressed and _are_lone_texts(buffer, parts):
        return False
    table = _AttributeTable(buffer, parts.attributes_at + 2, ends)
    if not table.walk():
        return True
    close = table.closely
    if is_compressed:
        close |= (flags & layout.COMPRESSED != 0) & ~table.has(attrs.COMPRESSION)
    for index in np.flatnonzero(close).tolist():
        at, end = int(parts.attributes_at[index]) + 2, int(ends[index])
        kinds = kinds_of(bytes(buffer[at:end]))
        if kinds < 0 or (int(flags[index]) & layout.COMPRESSED and not kinds >> attrs.COMPRESSION & 1):
            return True
    return False


def _are_lone_texts(buffer: Buffer, parts: Parts) -> bool:
    """Whether the attributes of all records are one ASCII text of the same kind, mostly a key; or all are empty."""
    sizes = parts.attributes_size
    widest = int(sizes.max())
    if not widest:
        return True
    at = parts.attributes_at
    kinds = np.frombuffer(buffer, np.uint8).take(at + 2, mode="clip")
    kind = int(kinds[0])
    if kind not in _TEXT_KINDS or widest > _WINDOW_MAX or kinds.tobytes() != bytes((kind,)) * len(at):
        return False
    try:
        texts = layout.gather(buffer, at, 3, ">u2")
    except IndexError:
        return False
    if (texts != sizes - _ENTRY_BYTES).any():
        return False
    return _windows(buffer, at + sizes + 2, widest)[0].tobytes().isascii()


class _AttributeTable:
    """The attributes of many records, looked at side by side.

    Attributes:
        closely: which records have to be looked at one by one.
    """

    def __init__(self, buffer: Buffer, starts: Positions, ends: Positions) -> None:
        self._buffer = buffer
        self._octets = np.frombuffer(buffer, np.uint8)
        self._starts = starts
        self._ends = ends
        sizes = ends - starts
        self.closely: npt.NDArray[np.bool_] = sizes > _WINDOW_MAX
        self._seen: npt.NDArray[np.uint64] = np.zeros(len(starts), np.uint64)
        self._properties: list[npt.NDArray[np.uint64]] = []
        # What is not text is blanked in the windows: what then remains above 0x7F is text, and not ASCII.
        self._windows: npt.NDArray[np.uint8] | None = None
        self._shift: Positions = starts
        width = min(int(sizes.max()), _WINDOW_MAX)
        if width:
            windows, at = _windows(buffer, ends, width)
            if not windows.tobytes().isascii():
                self._windows = windows
                self._shift = np.arange(0, windows.size, width) - at

    def has(self, kind: int) -> npt.NDArray[np.bool_]:
        """Which records have an attribute."""
        found: npt.NDArray[np.bool_] = (self._seen >> np.uint64(kind) & np.uint64(1)) != 0
        return found

    def walk(self) -> bool:
        """Go through all entries; False if one is certainly wrong."""
        rows = np.flatnonzero((self._ends > self._starts) & ~self.closely)
        at, ends = self._starts[rows], self._ends[rows]
        while len(rows):
            if len(rows) < VERIFY_MANY_MIN:
                self.closely[rows] = True
                break
            if (ends - at < _ENTRY_BYTES).any():
                return False
            value_at = at + _ENTRY_BYTES
            stops = value_at + layout.gather(self._buffer, at, 1, ">u2")
            if (stops > ends).any() or not self._look_at(rows, at, value_at, stops):
                return False
            is_open = stops < ends
            if not is_open.any():
                break
            if is_open.all():
                at = stops
            else:
                rows, at, ends = rows[is_open], stops[is_open], ends[is_open]
        self._look_at_texts()
        return True

    def _look_at(self, rows: Positions, at: Positions, value_at: Positions, stops: Positions) -> bool:
        """The next entry of some records; False if one is certainly wrong."""
        kinds = self._octets[at]
        first = int(kinds[0])
        if kinds.tobytes() == bytes((first,)) * len(kinds):
            return self._look_at_kind(first, rows, value_at, stops)
        for kind in np.unique(kinds).tolist():
            mine = kinds == kind
            if not self._look_at_kind(kind, rows[mine], value_at[mine], stops[mine]):
                return False
        return True

    def _look_at_kind(self, kind: int, rows: Positions, value_at: Positions, stops: Positions) -> bool:
        shape = _SHAPES[kind]
        if kind < _BITS:
            bit = np.uint64(1 << kind)
            seen = self._seen[rows]
            if (seen & bit).any():
                return False
            self._seen[rows] = seen | bit
        elif kind < attrs.PROPERTY:
            self.closely[rows] = True
        if shape >= 0 and (stops - value_at != shape).any():
            return False
        if shape == attrs.PROPERTY_SHAPE and not self._look_at_properties(rows, value_at, stops):
            return False
        if self._windows is not None:
            self._blank(rows, value_at, shape)
            if shape == attrs.ANY_SHAPE:
                self.closely[rows] = True
        return True

    def _blank(self, rows: Positions, value_at: Positions, shape: int) -> None:
        """Take what is not text out of the windows: the heads of entries, the sizes of keys, and numbers."""
        assert self._windows is not None
        flat = self._windows.reshape(-1)
        places = value_at + self._shift[rows]
        for before in range(-_ENTRY_BYTES, max(shape, 0) + (shape == attrs.PROPERTY_SHAPE)):
            flat[places + before] = 0

    def _look_at_properties(self, rows: Positions, value_at: Positions, stops: Positions) -> bool:
        sizes = stops - value_at
        if int(sizes.min()) < 2:
            return False
        key_sizes = self._octets[value_at]
        if not key_sizes.all() or (key_sizes >= sizes).any():
            return False
        # The first 7 bytes of a key with its size, and the last 8 of a long one: alike for the same key.
        is_short = np.minimum(key_sizes, 7).astype(np.uint64)
        at = np.minimum(value_at, len(self._octets) - 8)
        first = layout.gather(self._buffer, at, 0, ">u8").astype(np.uint64) << ((value_at - at) * 8).astype(np.uint64)
        digests = first >> (np.uint64(56) - is_short * np.uint64(8))
        last_at = value_at + key_sizes - 7
        last = layout.gather(self._buffer, last_at, 0, ">u8").astype(np.uint64)
        digests ^= np.where(key_sizes >= 8, last, np.uint64(0)) * np.uint64(0x9E37_79B9_7F4A_7C15)
        column = np.zeros(len(self._starts), np.uint64)
        column[rows] = digests | np.uint64(1)
        for earlier in self._properties:
            self.closely |= (earlier == column) & (column != 0)
        if len(self._properties) < _PROPERTIES_MAX:
            self._properties.append(column)
        else:
            self.closely[rows] = True
        return True

    def _look_at_texts(self) -> None:
        """Find the records that have texts beyond ASCII."""
        windows = self._windows
        if windows is None:
            return
        width = windows.shape[1]
        # Where the window of one of the first records was moved, its part ends before the window does.
        at = np.arange(0, windows.size, width) - self._shift
        behind = self._ends - at
        before = self._starts - at
        columns = np.arange(width)
        is_mine = (columns >= before[:, None]) & (columns < behind[:, None])
        self.closely |= ((windows > 0x7F) & is_mine).any(axis=1)


def _any_crc_wrong(buffer: Buffer, starts: Positions, parts: Parts, ends: Positions) -> bool:
    """Whether a checksum of a record is wrong."""
    raw = buffer if isinstance(buffer, bytes) else bytes(buffer)
    crcs = layout.gather(buffer, starts, layout.CRC_AT, ">u8").astype(np.uint64)
    bodies_at, tails_at = (starts + layout.BODY_AT).tolist(), parts.topic_at.tolist()
    bodies = [raw[at:end] for at, end in zip(bodies_at, tails_at, strict=True)]
    if (in_block := block_flags(raw, starts)).any():
        try:
            _put_block_bodies(bodies, BodyBlocks(raw), starts, in_block)
        except RecordCorrupt:
            return True
    if [*map(crc32c, bodies)] != (crcs & np.uint64(0xFFFF_FFFF)).tolist():
        return True
    signed = np.empty(len(starts), _SIGNED)
    signed["head"] = layout.gather(buffer, starts, layout.MAGIC_AT, _SIGNED["head"])
    signed["sent"] = layout.gather(buffer, starts, layout.SEND_TIME_AT, "V8")
    flags = signed.view(np.uint8).reshape(len(starts), _SIGNED.itemsize)[:, layout.FLAGS_AT - layout.MAGIC_AT]
    flags &= 0xFF & ~layout.UNSIGNED_FLAGS
    heads = signed.tobytes()
    step = _SIGNED.itemsize
    others = [
        heads[at : at + step] + raw[tail_at:end]
        for at, tail_at, end in zip(range(0, len(heads), step), tails_at, ends.tolist(), strict=True)
    ]
    return bool([*map(crc32c, others)] != (crcs >> np.uint64(32)).tolist())


_SIGNED: Final = np.dtype([("head", f"V{layout.JOURNAL_OFFSET_AT - layout.MAGIC_AT}"), ("sent", "V8")])
