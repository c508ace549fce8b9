"""Decoded units into Arrow: the archive's `message` and `copy` rows, or any of their columns.

Values that stand in the records are copied once, all of a column in one call; texts that many rows share (topics,
addresses) are made once and taken as often as needed. Bodies are given as their senders gave them: copied where they
are stored so, expanded where not, one by one or by the block.

What always holds: columns have exactly the types of `dmq.pipeline.tables`. Texts are valid UTF-8, whatever a client
stored: what is none is replaced. A body is expanded once, whatever columns are made of it; one that cannot be expanded
is null: the client that sent it spoilt it, and nobody can read it. Only a record marked as moved speaks for its origin.
A record that a client spoilt gives nulls, and does not end the reading of a journal.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from typing import Final

import lz4.block
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from dmq.errors import RecordCorrupt
from dmq.event_log import EventLog
from dmq.model import HALF_TOPIC, SCHEDULE_TOPIC, SYSTEM_PREFIX
from dmq.pipeline.decode.arrow import (
    Bits,
    Positions,
    chosen_texts,
    id_texts,
    numbers,
    packed,
    spread,
    texts,
    times,
)
from dmq.pipeline.decode.units import Found, UnitRows
from dmq.pipeline.tables import COPY, MESSAGE, SCHEMAS
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.attributes import COMPRESSION
from dmq.records.block import BLOCK_BYTES_MAX, BodyBlocks, read_pointers
from dmq.records.compression import CODEC_LZ4, decompress
from dmq.records.layout import gather
from dmq.records.move import DeadReason
from dmq.storage.state.state import HALF_ID, SCHEDULE_ID

__all__ = [
    "COLUMNS",
    "COPY_COLUMNS",
    "MESSAGE_COLUMNS",
    "bodies",
    "body_crcs",
    "copy_batch",
    "is_ours",
    "keys",
    "message_batch",
    "raw_sizes",
]

log = EventLog(__name__)

_ARROW_MAX: Final = (1 << 31) - 1  # bytes of one array
_ENTRY_BYTES: Final = 5  # codec u8 · size u32
_LZ4_BYTES_MAX: Final = 64 << 10  # that a record may claim without being looked at: the library allocates as much


def _codecs(rows: UnitRows) -> tuple[Positions, Positions, Positions]:
    """Of those rows that say how they are compressed: their numbers, codecs and full sizes."""
    record, at, end = rows.entries(COMPRESSION)
    is_good = end - at == _ENTRY_BYTES
    is_good &= rows.is_compressed()[record]
    record, at = record[is_good], at[is_good]
    codec = gather(rows.buffer, at, 0, "u1").astype(np.int64)
    return record, codec, gather(rows.buffer, at, 1, ">u4").astype(np.int64)


def raw_sizes(rows: UnitRows) -> Positions:
    """How long each body is once it is expanded, by what its record says."""
    at, end = rows.stored_bodies()
    sizes = end - at
    record, _, size = _codecs(rows)
    sizes[record] = np.minimum(size, layout.RAW_BYTES_MAX)
    in_block = rows.in_block()
    if in_block.any():
        sizes[in_block] = np.minimum(read_pointers(rows.buffer, rows.starts[in_block]).size, BLOCK_BYTES_MAX)
    return sizes


def _expanded(rows: UnitRows) -> list[bytes | None]:
    """The bodies of the compressed rows, in their order."""
    if rows.expanded is None:
        starts, ends = rows.stored_bodies()
        record, codecs, sizes = _codecs(rows)
        compressed = np.flatnonzero(rows.is_compressed())
        columns = [column.tolist() for column in (codecs, sizes, starts[record], ends[record])]
        found = _all_of_lz4(rows.buffer, *columns) or _one_by_one(rows.buffer, *columns)
        if len(record) != len(compressed):  # some do not say how
            known = dict(zip(record.tolist(), found, strict=True))
            found = [known.get(row) for row in compressed.tolist()]
        rows.expanded = found
    return rows.expanded


def _all_of_lz4(
    buffer: memoryview, codecs: list[int], sizes: list[int], starts: list[int], ends: list[int]
) -> list[bytes | None]:
    """The common case, bodies of a few hundred bytes, at half the price; nothing if anything is wrong with one."""
    if set(codecs) != {CODEC_LZ4} or max(sizes) > _LZ4_BYTES_MAX:
        return []
    expand = lz4.block.decompress
    places = zip(starts, ends, sizes, strict=True)
    try:
        found = [expand(buffer[start:end], uncompressed_size=size) for start, end, size in places]
    except (lz4.block.LZ4BlockError, ValueError):
        return []
    return found if [*map(len, found)] == sizes else []


def _one_by_one(
    buffer: memoryview, codecs: list[int], sizes: list[int], starts: list[int], ends: list[int]
) -> list[bytes | None]:
    found: list[bytes | None] = []
    for codec, size, start, end in zip(codecs, sizes, starts, ends, strict=True):
        try:
            found.append(decompress(codec, size, bytes(buffer[start:end]), layout.RAW_BYTES_MAX))
        except RecordCorrupt as error:
            log.warning("a body cannot be expanded", reason=error.message)
            found.append(None)
    return found


def bodies(rows: UnitRows) -> pa.Array:
    """The bodies, uncompressed."""
    is_compressed, in_block = rows.is_compressed(), rows.in_block()
    is_plain = ~(is_compressed | in_block)
    starts, ends = rows.stored_bodies()
    if is_plain.all():
        return packed(rows.buffer, starts, ends)
    if in_block.all():
        return _out_of_blocks(rows, in_block)
    arrays = [packed(rows.buffer, starts[is_plain], ends[is_plain]), _out_of_blocks(rows, in_block)]
    masks = [is_plain, in_block & ~is_compressed]
    if is_compressed.any():
        expanded = pa.array(_expanded(rows), pa.binary())
        if is_compressed.all():
            return expanded
        arrays.append(expanded)
        masks.append(is_compressed)
    index = np.empty(len(rows), np.int64)
    at = 0
    for mask in masks:
        count = int(mask.sum())
        index[mask] = np.arange(at, at + count)
        at += count
    return pa.concat_arrays(arrays).take(pa.array(index))


def _out_of_blocks(rows: UnitRows, in_block: Bits) -> pa.Array:
    """The bodies that stand in blocks, null where one cannot be expanded.

    The blocks are expanded one behind the other, and that is the buffer of the array: bodies that are all wanted are
    not copied once more.
    """
    starts = rows.starts[in_block & ~rows.is_compressed()]
    if not len(starts):
        return pa.array([], pa.binary())
    pointers = read_pointers(rows.buffer, starts)
    blocks = BodyBlocks(rows.buffer)
    places, number = np.unique(pointers.block_at, return_inverse=True)
    expanded: list[bytes] = []
    for place in places.tolist():
        try:
            expanded.append(blocks.expanded(place))
        except RecordCorrupt as error:
            log.warning("a body block cannot be expanded", once_for=__name__, reason=error.message)
            expanded.append(b"")
    sizes = np.array([*map(len, expanded)], np.int64)
    base = (np.cumsum(sizes) - sizes)[number]
    valid = pointers.place + pointers.size <= sizes[number]
    at = np.where(valid, base + pointers.place, base)
    end = np.where(valid, at + pointers.size, base)
    values = b"".join(expanded)
    if valid.all() and len(values) <= _ARROW_MAX:
        if not int(at[0]) and int(end[-1]) == len(values) and not (at[1:] != end[:-1]).any():
            offsets = np.concatenate((at[:1], end)).astype(np.int32)
            return pa.Array.from_buffers(pa.binary(), len(at), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
        return packed(memoryview(values), at, end)
    bodies = [values[a:b] if ok else None for a, b, ok in zip(at.tolist(), end.tolist(), valid.tolist(), strict=True)]
    return pa.array(bodies, pa.binary())


def body_crcs(rows: UnitRows) -> pa.Array:
    """CRC-32C of each body, uncompressed. That of a body in a block stands in its record."""
    crcs = rows.body_crc()
    is_compressed = rows.is_compressed()
    if not is_compressed.any():
        return numbers(crcs, pa.int64())
    expanded = _expanded(rows)
    valid = np.ones(len(rows), np.bool_)
    valid[is_compressed] = [body is not None for body in expanded]
    crcs[is_compressed] = [0 if body is None else crc32c(body) for body in expanded]
    return numbers(crcs, pa.int64(), valid)


MESSAGE_COLUMNS: Final = tuple(SCHEMAS[MESSAGE].names)
COPY_COLUMNS: Final = tuple(SCHEMAS[COPY].names)

_HEADERS: Final = SCHEMAS[MESSAGE].field("headers").type
_DAY_MS: Final = 86_400_000
_MAPPED: Final = bytes(10) + b"\xff\xff"
_NO_ADDRESS: Final = bytes(16)
BUILT_IN: Final = {SCHEDULE_ID: SCHEDULE_TOPIC, HALF_ID: HALF_TOPIC}  # topics that keep messages for later
_TIME_MAX_MS: Final = np.uint64(253_402_300_799_999)


def message_batch(rows: UnitRows, columns: Collection[str] = MESSAGE_COLUMNS) -> pa.RecordBatch:
    """The messages of users' topics among the rows, as rows of the archive's table or with some of its columns."""
    ours = is_ours(rows)
    return _batch(rows.select(~ours) if ours.any() else rows, MESSAGE, columns)


def copy_batch(rows: UnitRows, columns: Collection[str] = COPY_COLUMNS) -> pa.RecordBatch:
    """The copies that the broker made among the rows: what stands in topics of ours."""
    return _batch(rows.select(is_ours(rows)), COPY, columns)


def _batch(rows: UnitRows, table: str, columns: Collection[str]) -> pa.RecordBatch:
    schema = pa.schema([SCHEMAS[table].field(name) for name in columns])
    return pa.RecordBatch.from_arrays([COLUMNS[name](rows) for name in columns], schema=schema)


def is_ours(rows: UnitRows) -> Bits:
    """Which rows stand in topics of DMQ's own: their names begin with a percent sign."""
    names, index = _topics(rows)
    mask: Bits = np.array([name.startswith(SYSTEM_PREFIX) for name in names] or [False], np.bool_)[index]
    return mask


# --- columns ----------------------------------------------------------------------------------------------------------


def _topics(rows: UnitRows) -> tuple[list[str], Positions]:
    """The names of the topics, and which of them each row has.

    All records of a topic id name the same topic, but for those that wait: they name the one that they were sent to.
    """
    ids = rows.topic_id()
    if not len(ids):
        return [], np.empty(0, np.int64)
    firsts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
    found, first, index = np.unique(ids[firsts], return_index=True, return_inverse=True)
    names = [
        BUILT_IN.get(topic_id) or _topic_of(rows, row)
        for topic_id, row in zip(found.tolist(), firsts[first].tolist(), strict=True)
    ]
    return names, np.repeat(index, np.diff(np.append(firsts, len(ids))))


def _topic_of(rows: UnitRows, row: int) -> str:
    start, end = int(rows.starts[row]), int(rows.ends[row])
    at = start + layout.BODY_AT + layout.U32.unpack_from(rows.buffer, start + layout.BODY_SIZE_AT)[0]
    name_end = at + 1 + rows.buffer[at] if at < end else end
    return bytes(rows.buffer[at + 1 : min(name_end, end)]).decode("utf-8", "replace")


def _topic(rows: UnitRows) -> pa.Array:
    names, index = _topics(rows)
    return chosen_texts([*names], index)


def _broker(rows: UnitRows) -> pa.Array:
    return chosen_texts([f"{rows.journal_id:016x}"], np.zeros(len(rows), np.int8))


def _message_id(rows: UnitRows) -> pa.Array:
    producer_id, sequence = rows.producer_id(), rows.sequence()
    record, at = _sized(_moved(rows, attrs.MESSAGE_ID), 16)
    if len(record):
        producer_id[record] = gather(rows.buffer, at, 0, ">u8")
        sequence[record] = gather(rows.buffer, at, 8, ">u8")
    return id_texts(producer_id, sequence)


def _sent_at(rows: UnitRows) -> pa.Array:
    sent_at_ms = rows.send_time_ms()
    record, at = _sized(_moved(rows, attrs.ORIGINAL_SEND_TIME), 8)
    if len(record):
        sent_at_ms[record] = np.minimum(gather(rows.buffer, at, 0, ">u8"), _TIME_MAX_MS)
    return times(sent_at_ms)


def _client(rows: UnitRows) -> pa.Array:
    """Host and port, one text for each address that occurs; null where the broker itself was it."""
    addresses, index = np.unique(rows.batches.address.view("S18"), return_inverse=True)
    choices = [_address(bytes(address).ljust(18, b"\0")) for address in addresses.tolist()]
    return chosen_texts(choices, index[rows.batch])


def _address(raw: bytes) -> str | None:
    host, port = raw[:16], int.from_bytes(raw[16:], "big")
    if host == _NO_ADDRESS:
        return None
    if host.startswith(_MAPPED):
        return f"{ipaddress.IPv4Address(host[12:])}:{port}"
    return f"[{ipaddress.IPv6Address(host)}]:{port}"


def _business_id(rows: UnitRows) -> pa.Array:
    at, end = rows.business_ids()
    return texts(packed(rows.buffer, at, end, at < end))


def keys(rows: UnitRows) -> pa.Array:
    """The keys as bytes."""
    return packed(rows.buffer, *spread(rows.entries(attrs.KEY), rows.starts))


def _text_of(kind: int) -> Callable[[UnitRows], pa.Array]:
    return lambda rows: texts(packed(rows.buffer, *spread(rows.entries(kind), rows.starts)))


def _headers(rows: UnitRows) -> pa.Array:
    """The properties; null where there is none, as Kafka's connector has it."""
    record, at, end = rows.entries(attrs.PROPERTY)
    if not len(record):
        return pa.nulls(len(rows), _HEADERS)
    size = np.frombuffer(rows.buffer, np.uint8)[np.minimum(at, len(rows.buffer) - 1)].astype(np.int64)
    is_good = (size > 0) & (at + 1 + size <= end)
    record, at, end, size = record[is_good], at[is_good], end[is_good], size[is_good]
    cut = at + 1 + size
    pairs = pa.StructArray.from_arrays(
        [texts(packed(rows.buffer, at + 1, cut)), packed(rows.buffer, cut, end)], fields=[*_HEADERS.value_type]
    )
    counts = np.bincount(record, minlength=len(rows))
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    bitmap = np.packbits(counts > 0, bitorder="little")
    return pa.Array.from_buffers(_HEADERS, len(rows), [pa.py_buffer(bitmap), pa.py_buffer(offsets)], children=[pairs])


def _dt(rows: UnitRows) -> pa.Array:
    days = (rows.stored_at_ms() // _DAY_MS).astype(np.int32)
    return pa.Array.from_buffers(pa.date32(), len(days), [None, pa.py_buffer(days)])


# --- columns of copies ------------------------------------------------------------------------------------------------


def _moved(rows: UnitRows, kind: int) -> Found:
    """Attributes of a kind, of those records alone that are marked as moved."""
    found = rows.entries(kind)
    if not len(found.record):
        return found
    is_moved = rows.is_moved()[found.record]
    return found if is_moved.all() else Found(*(column[is_moved] for column in found))


def _sized(found: Found, size: int) -> tuple[Positions, Positions]:
    """Whose attributes have the right size, and where."""
    is_good = found.end - found.at == size
    return found.record[is_good], found.at[is_good]


def _number_of(rows: UnitRows, kind: int, dtype: str) -> tuple[Positions, Bits]:
    """The values of a kind of attribute, and which rows have it."""
    record, at = _sized(rows.entries(kind), np.dtype(dtype).itemsize)
    values = np.zeros(len(rows), np.int64)
    valid = np.zeros(len(rows), np.bool_)
    values[record] = np.minimum(gather(rows.buffer, at, 0, dtype), _TIME_MAX_MS).astype(np.int64)
    valid[record] = True
    return values, valid


def _origin_topic(rows: UnitRows) -> pa.Array:
    """Where it came from, or else where it goes; of what waits under the name it was sent to, that name."""
    starts, ends = rows.topic_names()
    valid = np.isin(rows.topic_id(), [*BUILT_IN]) & ((rows.flags() & layout.MOVED) == 0)
    at, end = np.where(valid, starts, rows.starts), np.where(valid, ends, rows.starts)
    for found in (rows.entries(attrs.TARGET_TOPIC), _moved(rows, attrs.ORIGINAL_TOPIC)):
        at[found.record], end[found.record], valid[found.record] = found.at, found.end, True
    return texts(packed(rows.buffer, at, end, valid))


def _attempt(rows: UnitRows) -> pa.Array:
    """Those before it was a dead letter and was resent count, too; in a dead letter's own number they are."""
    values, valid = _number_of(rows, attrs.ATTEMPT, ">u4")
    before, was_resent = _number_of(rows, attrs.ATTEMPTS_BEFORE, ">u4")
    _, is_dead = _number_of(rows, attrs.REASON_CODE, "u1")
    values += np.where(is_dead, 0, before)
    return numbers(np.minimum(values, np.iinfo(np.int32).max), pa.int32(), valid | (was_resent & ~is_dead))


def _reason(rows: UnitRows) -> pa.Array:
    values, valid = _number_of(rows, attrs.REASON_CODE, "u1")
    names = [reason.name for reason in DeadReason]
    known = valid & (values >= 1) & (values <= len(names))
    return chosen_texts([None, *names], np.where(known, values, 0))


COLUMNS: Final[dict[str, Callable[[UnitRows], pa.Array]]] = {
    "message_id": _message_id,
    "broker": _broker,
    "journal_offset": lambda rows: numbers(rows.journal_offset(), pa.int64()),
    "topic": _topic,
    "topic_id": lambda rows: numbers(rows.topic_id(), pa.int64()),
    "queue": lambda rows: numbers(rows.queue(), pa.int32()),
    "queue_offset": lambda rows: numbers(rows.queue_offset(), pa.int64()),
    "key": lambda rows: texts(keys(rows)),
    "business_id": _business_id,
    "tag": _text_of(attrs.TAG),
    "app": lambda rows: texts(packed(rows.buffer, *rows.apps())),
    "priority": lambda rows: numbers(rows.priority(), pa.int32()),
    "flags": lambda rows: numbers(rows.flags() & np.uint8(0xFF & ~layout.BLOCK), pa.int32()),  # the body is taken out
    "client": _client,
    "sent_at": _sent_at,
    "received_at": lambda rows: times(rows.received_at_ms()),
    "stored_at": lambda rows: times(rows.stored_at_ms()),
    "body_crc": body_crcs,
    "headers": _headers,
    "body": bodies,
    "dt": _dt,
    "origin_topic": _origin_topic,
    "group": _text_of(attrs.GROUP),
    "attempt": _attempt,
    "due_at": lambda rows: times(*_number_of(rows, attrs.DUE_AT, ">u8")),
    "reason": _reason,
    "error": _text_of(attrs.REASON),
}
assert [reason.value for reason in DeadReason] == [*range(1, len(DeadReason) + 1)]
