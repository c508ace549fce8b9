"""Unit drafts, and the bytes that are built of them.

A draft says which batches and events go into which unit, and where each batch will stand in its queue. The unit builder
makes of a unit's parts the bytes that one write appends; `unit` draws them.

What always holds: nothing is assigned or remembered before its unit is written, so a failed write leaves no trace; a
batch that was written before gets its first place and is not written again; the items of one call keep their order,
and with `atomic` they share one unit. One record, few and many are built by three pieces of code that give the same
bytes; every byte of a record is touched once on its way, and not even copied where its batch came with room before it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.compiled import find
from dmq.errors import (
    DMQError,
    InvalidMessage,
    LimitReached,
    MessageTooLarge,
    OutOfOrder,
    SequenceConflict,
    UnknownTopic,
)
from dmq.model import EVENT_TOPIC
from dmq.records import layout
from dmq.records.builder import BLANK_STAMP, BLANK_TIMES, HEAD, LENGTH_MAX, name_bytes, record_head
from dmq.records.layout import ADDRESSES_DTYPE, Stamp, StampColumns, stamp_columns, stamp_few
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import (
    BLOCKS_VERSION,
    CRC_FROM,
    DUE,
    EXPIRING,
    FEW,
    HEADER,
    HEADER_BYTES,
    MOVED,
    NAMED,
    NO_ADDRESS,
    ROW,
    ROW_BYTES,
    UNIT_MAGIC,
    UNIT_VERSION,
    Columns,
    Header,
    Part,
    Row,
    Unit,
    ints,
    shift_few,
    shift_many,
)
from dmq.storage.state.events import Event, Settled, encode_event
from dmq.storage.state.producers import Place
from dmq.storage.state.state import HALF_ID, State, queue_key

__all__ = ["Batch", "Draft", "Drafter", "Placement", "UnitBuilder", "event_part", "sender_of", "was_written"]


class Batch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Records for one queue, encoded, with the broker's fields blank.

    `previous_sequence`: the producer's last message in the queue must have this number; None leaves that open.
    `moved` records carry their message id in their attributes; others get theirs from producer id and sequence.
    `dues`, one per record, makes sense for the schedule topic only. `expiring`: some record may carry an expiry.
    `block_bytes` at the end of the data are the blocks that bodies of its records stand in.
    """

    topic: str
    queue: int
    data: Buffer
    lengths: Sequence[int] | npt.NDArray[np.uint32]
    hash_index: Sequence[int] | npt.NDArray[np.uint32] = ()
    hashes: Sequence[int] | npt.NDArray[np.uint64] = ()
    dues: Sequence[int] | npt.NDArray[np.uint64] = ()
    producer_id: int = 0
    producer_epoch: int = 0
    first_sequence: int = 0
    previous_sequence: int | None = None
    named: bool = False
    moved: bool = False
    expiring: bool = False
    address: bytes = NO_ADDRESS
    port: int = 0
    received_at_ms: int = 0
    block_bytes: int = 0
    room: memoryview | None = None
    """A view that ends with the records, has hashes and dues before them as a request has them, and room before these,
    and may be overwritten: a batch with such a view gets a unit to itself, made in place where the room suffices."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Where an item went. It is visible once the store's visible offset has reached `unit_end`."""

    topic: str
    queue: int
    first_offset: int
    count: int
    unit_start: int
    unit_end: int
    duplicate: bool = False


class Draft:
    """A unit to be: its parts, which items of the call each of them has, and the events among them."""

    __slots__ = ("events", "items", "parts", "size")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.items: list[Sequence[int]] = []
        self.events: list[Event] = []
        self.size = HEADER_BYTES

    def add(self, part: Part, size: int, items: Sequence[int]) -> None:
        self.parts.append(part)
        self.items.append(items)
        self.size += size


_EVENTS_MAX: Final = 256  # of one batch
_EVENT_HEAD: Final = record_head(layout.SYSTEM, 0, 0)
_EVENT_HEAD_CRC: Final = crc32c(_EVENT_HEAD)
_EVENT_TAIL: Final = name_bytes("topic", EVENT_TOPIC) + bytes(4)  # no app, no business id, no attributes
_EVENT_BYTES: Final = HEAD.size + len(_EVENT_TAIL)  # of a record without its body
_EVENT_BODY_MAX: Final = LENGTH_MAX - _EVENT_BYTES
# By producer and queue: the items of a call that are written.
_Fresh: TypeAlias = dict[tuple[int, int], list[int]]
_NONE_FRESH: Final[_Fresh] = {}


def event_part(events: Iterable[Event], now_ms: int) -> Part:
    """Events as a part of a unit: one batch, a record each, which differ in nothing but their bodies."""
    bodies = [encode_event(event) for event in events]
    if (largest := max(map(len, bodies))) > _EVENT_BODY_MAX:
        raise MessageTooLarge(f"an event takes {largest} bytes; at most {_EVENT_BODY_MAX} are possible", size=largest)
    sent = layout.U64.pack(now_ms)
    others = crc32c(_EVENT_TAIL, crc32c(sent, _EVENT_HEAD_CRC)) << 32  # as of `dmq.records.builder.others_crc`
    head, pack = _EVENT_HEAD + BLANK_STAMP + sent + BLANK_TIMES, HEAD.pack
    records = [
        pack(_EVENT_BYTES + len(body), head, others | crc32c(body), len(body)) + body + _EVENT_TAIL for body in bodies
    ]
    row = Row._make((0, 0, 0, len(records), 0, 0, 0, 0, 0, NO_ADDRESS, 0, 0))
    return Part(row, records[0] if len(records) == 1 else b"".join(records), tuple(map(len, records)), now_ms)


class Drafter:
    """Decides what goes into which unit.

    `assigned` is the next offset of queues for which units were written that are not applied yet.
    """

    def __init__(self, unit_bytes_max: int, transactions_max: int) -> None:
        self._unit_bytes_max = unit_bytes_max
        self._transactions_max = transactions_max
        self.assigned: dict[int, int] = {}

    def draft(
        self,
        items: Sequence[Batch | Event],
        state: State,
        now_ms: int,
        *,
        atomic: bool,
        refused: dict[int, DMQError] | None = None,
    ) -> tuple[list[Draft], dict[int, Place | int]]:
        """Decide which units to write, and where each batch will stand in its queue.

        Parameters:
            atomic: all items go into one unit.
            refused: gets the errors of items at fault, which are left out; without it the first of them is raised.

        Returns the drafts, and for items that need no writing their first place, or the item of this call they repeat.

        Raises:
            UnknownTopic, InvalidMessage, SequenceConflict, OutOfOrder, StaleEpoch, LimitReached: nothing was changed.
        """
        assigned = self.assigned
        drafts = [Draft()]
        draft = drafts[0]
        duplicates: dict[int, Place | int] = {}
        following: dict[int, int] = {}
        fresh: _Fresh = {}
        is_full = False  # what comes next begins a unit
        taken = 0  # what is before this item has its part
        for index, item in enumerate(items):
            if index < taken:
                continue
            taken = index + 1
            if isinstance(item, Batch):
                try:
                    topic_id, key = _queue_of(item, state)
                    place = _earlier_place(items, item, key, fresh, state=state) if item.producer_id else None
                    if place is not None:
                        duplicates[index] = place
                        continue
                    if topic_id == HALF_ID:
                        self._check_transactions(item, state, following)
                except DMQError as error:
                    if refused is None:
                        raise
                    refused[index] = error
                    continue
                if item.producer_id:
                    fresh.setdefault((item.producer_id, key), []).append(index)
                first = following.get(key)
                if first is None:
                    first = assigned[key] if key in assigned else state.next.get(key, 0)
                following[key] = first + len(item.lengths)
                part = _part(item, topic_id, first, now_ms, anything_expires=bool(state.expiring))
            else:
                events = _events_from(items, index)
                taken = index + len(events)
                part = event_part(events, now_ms)
            row, data, _, _, _, hashes, dues, room = part
            # What it adds to the length of its unit.
            size = ROW_BYTES + 4 * row[3] + 12 * len(hashes) + 8 * len(dues) + len(data)
            has_room = room is not None
            if draft.parts and not atomic and (draft.size + size > self._unit_bytes_max or has_room or is_full):
                draft = Draft()
                drafts.append(draft)
            is_full = has_room
            draft.add(part, size, range(index, taken))
            if row[4] == 0:
                draft.events += events
        return (drafts if draft.parts else []), duplicates

    def part(self, batch: Batch, state: State, now_ms: int) -> Part | None:
        """The part of a unit that a new batch of plain messages is; None if it was written before.

        Raises:
            UnknownTopic, InvalidMessage, SequenceConflict, OutOfOrder, StaleEpoch: as `draft`.
        """
        topic_id, key = _queue_of(batch, state)
        if batch.producer_id and _earlier_place((), batch, key, _NONE_FRESH, state=state) is not None:
            return None
        first = self.assigned[key] if key in self.assigned else state.next.get(key, 0)
        return _part(batch, topic_id, first, now_ms, anything_expires=bool(state.expiring))

    def _check_transactions(self, batch: Batch, state: State, following: dict[int, int]) -> None:
        """Raises LimitReached if a batch of half messages is too much, with those that are written or about to be."""
        if batch.moved:
            return
        ends = {**self.assigned, **following}
        coming = sum(end - state.next.get(key, 0) for key, end in ends.items() if key >> 8 == HALF_ID)
        count, limit = len(state.transactions) + coming, self._transactions_max
        if count + len(batch.lengths) > limit:
            raise LimitReached(
                f"{count} transactions are open, and store.transactions_max is {limit}: end some, or raise it",
                limit=limit,
            )


def _events_from(items: Sequence[Batch | Event], first: int) -> list[Event]:
    """The events that follow each other from an item on, as many as one batch takes."""
    events: list[Event] = []
    for item in items[first : first + _EVENTS_MAX]:
        if isinstance(item, Batch):
            break
        events.append(item)
        if not isinstance(item, Settled) or item.bitmap or item.error:
            break  # it may be large
    return events


def was_written(batch: Batch, state: State) -> bool:
    """Whether a batch is the resend of one that stands in the journal."""
    try:
        _, key = _queue_of(batch, state)
        return batch.producer_id != 0 and _earlier_place((), batch, key, {}, state=state) is not None
    except DMQError:
        return False


def _earlier_place(
    items: Sequence[Batch | Event], batch: Batch, key: int, fresh: _Fresh, *, state: State
) -> Place | int | None:
    """Where a batch stands if it was written before; or the index of the item of this call that it is a resend of."""
    producer = batch.producer_id
    place = state.producers.look(producer, batch.producer_epoch, key, batch.first_sequence, count=len(batch.lengths))
    if place is not None:
        return place
    earlier = fresh.get((producer, key))
    repeated = None if earlier is None else _repeats(items, batch, earlier)
    if repeated is None and batch.previous_sequence is not None:
        _check_order(batch, state.producers.last_sequence(producer, batch.producer_epoch, key), items, earlier)
    return repeated


def _check_order(batch: Batch, last: int | None, items: Sequence[Batch | Event], earlier: Sequence[int] | None) -> None:
    """Raises OutOfOrder if a new batch does not follow the last one of its producer in its queue."""
    if earlier:
        before = items[earlier[-1]]
        assert isinstance(before, Batch)
        last = before.first_sequence + len(before.lengths) - 1
    if batch.previous_sequence != last:
        raise OutOfOrder(
            f"producer {batch.producer_id:016x} names {batch.previous_sequence} as the message before its batch, and "
            f"the last one stored is {last}: send that one first",
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
            last_sequence=last,
        )


def _repeats(items: Sequence[Batch | Event], batch: Batch, earlier: list[int]) -> int | None:
    """The index of the item of this call that a batch is a resend of; `earlier` have rising sequences."""
    last = items[earlier[-1]]
    assert isinstance(last, Batch)
    if batch.first_sequence >= last.first_sequence + len(last.lengths):
        return None
    for index in earlier:
        other = items[index]
        assert isinstance(other, Batch)
        if batch.first_sequence >= other.first_sequence + len(other.lengths):
            continue
        if batch.first_sequence == other.first_sequence and len(batch.lengths) == len(other.lengths):
            return index
        raise SequenceConflict(
            f"producer {batch.producer_id:016x} sent overlapping sequences in two batches at once; "
            "a batch must be sent again with the same bounds",
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
        )
    return None


def _queue_of(batch: Batch, state: State) -> tuple[int, int]:
    topic = state.topics.get(batch.topic)
    if topic is None:
        raise UnknownTopic(f"there is no topic {batch.topic!r}: create it first", topic=batch.topic)
    if not 0 <= batch.queue < topic.config.queues:
        raise UnknownTopic(
            f"topic {batch.topic!r} has queues 0-{topic.config.queues - 1}, not {batch.queue}",
            topic=batch.topic,
            queue=batch.queue,
        )
    if not len(batch.lengths):
        raise InvalidMessage("a batch without messages cannot be stored")
    if len(batch.dues) not in (0, len(batch.lengths)):
        raise InvalidMessage(f"{len(batch.dues)} due times were given for {len(batch.lengths)} messages")
    return topic.id, queue_key(topic.id, batch.queue)


def _part(batch: Batch, topic_id: int, first_offset: int, now_ms: int, *, anything_expires: bool) -> Part:
    flags = (DUE if len(batch.dues) else 0) | (NAMED if batch.named else 0) | (MOVED if batch.moved else 0)
    # The code that moves records does not look at what they carry: once anything expires, what is moved may.
    if batch.expiring or (anything_expires and batch.moved):
        flags |= EXPIRING
    # Made as the tuples they are: a call of the class costs twice as much, and this is done for every batch.
    row = _new(
        Row,
        (
            batch.producer_id,
            batch.producer_epoch,
            batch.first_sequence,
            len(batch.lengths),
            topic_id,
            batch.queue,
            flags,
            0,
            first_offset,
            batch.address,
            batch.port,
            batch.block_bytes,
        ),
    )
    received = batch.received_at_ms or now_ms
    columns = batch.hash_index, batch.hashes, batch.dues
    return _new(Part, (row, batch.data, batch.lengths, received, *columns, batch.room))


_new: Final = tuple.__new__

_CRC_AT: Final = 4
_U32: Final = struct.Struct(">I")
_U16: Final = struct.Struct(">H")
_V4_PREFIX: Final = bytes(10) + b"\xff\xff"
_BLANK: Final = bytes(6)

# Header, the one length, the one row.
_LONE: Final = struct.Struct(HEADER.format + "I" + ROW.format[1:])
_KEYED: Final = struct.Struct(">IQ")


class UnitBuilder:
    """Builds the units of one journal.

    Parameters:
        server: this broker's IPv4 address and port, six bytes.
        epoch: the leader's epoch.
    """

    def __init__(self, journal_id: int, server: bytes, epoch: int) -> None:
        self._journal_id = journal_id
        self.server = server
        self.epoch = epoch

    def build(
        self, parts: Sequence[Part], *, start: int, stored_at_ms: int, flushed_through: int, flags: int = 0
    ) -> Unit:
        """Lay the parts out as one unit, stamp its records, and checksum it.

        Parameters:
            parts: what goes in; `row.first_queue_offset` already assigned.
            start: the journal offset of the unit.
            stored_at_ms: the store time.
            flushed_through: the journal offset below which everything is known to be durable by now.
            flags: of the unit, CHECKED and SNAPSHOT.
        """
        # A moved record has two hashes, of its id and its key.
        if len(parts) == 1 and parts[0].row.records == 1 and not len(parts[0].dues) and len(parts[0].hashes) < 2:
            return self._build_lone(parts[0], start, stored_at_ms, flushed_through, flags=flags)
        if len(parts) == 1 and parts[0].room is not None and parts[0].row.records >= FEW:
            unit = self._build_in_place(parts[0], start, stored_at_ms, flushed_through, flags=flags)
            if unit is not None:
                return unit
        records = hashes = dues = 0
        rows: list[Row] = []
        packed: list[bytes] = []
        datas: list[Buffer] = []
        length = HEADER_BYTES
        for row, data, _, _, _, part_hashes, part_dues, _ in parts:
            rows.append(row)
            packed.append(ROW.pack(*row))
            datas.append(data)
            records += row[3]
            length += len(data)
            hashes += len(part_hashes)
            dues += len(part_dues)
        tables = HEADER_BYTES + 4 * records + ROW_BYTES * len(rows) + 12 * hashes + 8 * dues
        length += tables - HEADER_BYTES
        version = BLOCKS_VERSION if any(row[11] for row in rows) else UNIT_VERSION
        head = HEADER.pack(
            UNIT_MAGIC, 0, version, flags, self.epoch, start, length, records, len(rows), hashes, dues, 0,
            stored_at_ms, flushed_through, self._journal_id,
        )  # fmt: skip
        tags: Any
        buffer: bytearray | memoryview
        if records < FEW:
            columns, lengths, others = _columns_few(parts, start + tables, hashes, dues)
            if version == BLOCKS_VERSION and isinstance(columns[0], list):
                shift_few(rows, columns[0])
            # Joined and not filled in: every byte is touched once.
            buffer = bytearray().join((head, lengths, *packed, others, *datas))
            tags = _stamp(buffer, parts, columns[0], start, origin=(self.server, stored_at_ms))
        else:
            columns, more = _columns_many(parts, start + tables, hashes, dues)
            if version == BLOCKS_VERSION and len(parts) > 1:
                columns = (columns[0] + shift_many(rows), *columns[1:])
            buffer = bytearray().join((head, more[0], *packed, *more[1:], *datas))
            tags = _stamp(buffer, parts, columns[0], start, origin=(self.server, stored_at_ms))
        crc = crc32c(memoryview(buffer)[CRC_FROM:])
        _U32.pack_into(buffer, _CRC_AT, crc)
        header = _new(Header, (
            UNIT_MAGIC, crc, version, flags, self.epoch, start, length, records, len(rows), hashes, dues, 0,
            stored_at_ms, flushed_through, self._journal_id,
        ))  # fmt: skip
        return Unit(header, buffer, rows, columns, tags=tags)

    def _build_in_place(
        self, part: Part, start: int, stored_at_ms: int, flushed_through: int, *, flags: int
    ) -> Unit | None:
        """`build` for a batch where it was received: records, hashes and dues stay where they are, and no byte of them
        is copied on its way to the disk. None if the room does not suffice."""
        row, data, lengths, received_at_ms, hash_index, hashes, dues, room = part
        assert room is not None
        records = row[3]
        row_at = HEADER_BYTES + 4 * records
        tables = row_at + ROW_BYTES + 12 * len(hashes) + 8 * len(dues)
        length = tables + len(data)
        if length > len(room):
            return None
        unit = room[len(room) - length :]
        version = BLOCKS_VERSION if row[11] else UNIT_VERSION
        fields = (
            version, flags, self.epoch, start, length, records, 1, len(hashes), len(dues), 0,
            stored_at_ms, flushed_through, self._journal_id,
        )  # fmt: skip
        HEADER.pack_into(unit, 0, UNIT_MAGIC, 0, *fields)
        ROW.pack_into(unit, row_at, *row)
        # The lengths are not taken from where the request had them: after a write that failed, this is done once more.
        if _stamp_run is None:
            sizes = np.asarray(lengths, np.uint32)
            unit[HEADER_BYTES:row_at] = sizes.astype(">u4").tobytes()
            offsets = np.cumsum(sizes, dtype=np.int64) - sizes + (start + tables)
            tags = stamp_parts_many(unit, (part,), offsets, start, origin=(self.server, stored_at_ms))
        else:
            client, ipv6 = sender_of(row[9], row[10])
            stamp = _new(Stamp, (row[5], row[8], client, self.server, received_at_ms, stored_at_ms, ipv6))
            made = _stamp_run(unit, tables, lengths, start + tables, stamp=stamp, table_at=HEADER_BYTES)
            tags, offsets = np.frombuffer(made[0], np.uint16), np.frombuffer(made[1], np.int64)
        crc = crc32c(unit[CRC_FROM:])
        _U32.pack_into(unit, _CRC_AT, crc)
        columns = (
            offsets, np.asarray(lengths, np.uint32), np.asarray(hash_index, np.uint32), np.asarray(hashes, np.uint64),
            np.asarray(dues, np.uint64),
        )  # fmt: skip
        return Unit(_new(Header, (UNIT_MAGIC, crc, *fields)), unit, [row], columns, tags=tags)

    def _build_lone(self, part: Part, start: int, stored_at_ms: int, flushed_through: int, *, flags: int) -> Unit:
        """`build` for one record: a producer that sends one at a time waits for it."""
        row, data, _, received_at_ms, _, hashes, _, _ = part
        values = list(ints(hashes))
        size = len(data)
        at = _LONE.size + 12 * len(values)
        length = at + size
        head = _LONE.pack(
            UNIT_MAGIC, 0, UNIT_VERSION, flags, self.epoch, start, length, 1, 1, len(values), 0, 0,
            stored_at_ms, flushed_through, self._journal_id, size, *row,
        )  # fmt: skip
        if not values:
            buffer = bytearray().join((head, data))
        elif len(values) == 1:
            buffer = bytearray().join((head, _KEYED.pack(0, values[0]), data))
        else:  # a moved record has its id's beside its key's
            buffer = bytearray().join((head, bytes(4 * len(values)), struct.pack(f">{len(values)}Q", *values), data))
        client, ipv6 = sender_of(row[9], row[10])
        offsets = [start + at]
        stamp = _new(Stamp, (row[5], row[8], client, self.server, received_at_ms, stored_at_ms, ipv6))
        if _stamp_run is None:
            tags = stamp_few(buffer, (at,), offsets, stamp)
        else:
            tags = [int.from_bytes(_stamp_run(buffer, at, (size,), offsets[0], stamp=stamp)[0], sys.byteorder)]
        crc = crc32c(memoryview(buffer)[CRC_FROM:])
        _U32.pack_into(buffer, _CRC_AT, crc)
        header = _new(Header, (
            UNIT_MAGIC, crc, UNIT_VERSION, flags, self.epoch, start, length, 1, 1, len(values), 0, 0,
            stored_at_ms, flushed_through, self._journal_id,
        ))  # fmt: skip
        return Unit(header, buffer, [row], (offsets, [size], [0] * len(values), values, []), tags=tags)


def _columns_few(parts: Sequence[Part], offset: int, hashes: int, dues: int) -> tuple[Columns, bytes, bytes]:
    """The columns as lists, and the bytes of the lengths and of the others; `offset` is the first record's."""
    lengths: list[int] = []
    offsets: list[int] = []
    for part in parts:
        for length in ints(part.lengths):
            lengths.append(length)
            offsets.append(offset)
            offset += length
    packed = _U32S[len(lengths)].pack(*lengths)
    if not (hashes or dues):
        return (offsets, lengths, [], [], []), packed, b""
    hash_index: list[int] = []
    values: list[int] = []
    due_values: list[int] = []
    base = 0
    for part in parts:
        if len(part.hashes):
            hash_index += [base + index for index in ints(part.hash_index)]
            values += ints(part.hashes)
        if len(part.dues):
            due_values += ints(part.dues)
        base += part.row.records
    others = struct.pack(f">{hashes}I{hashes}Q{dues}Q", *hash_index, *values, *due_values)
    return (offsets, lengths, hash_index, values, due_values), packed, others


_U32S: Final = tuple(struct.Struct(f">{count}I") for count in range(FEW))


def _columns_many(parts: Sequence[Part], offset: int, hashes: int, dues: int) -> tuple[Columns, list[Any]]:
    """The columns as arrays, and those of the tables as they stand in the unit, the lengths first."""
    lengths = _joined([part.lengths for part in parts], np.uint32)
    offsets = np.cumsum(lengths, dtype=np.int64)
    offsets -= lengths
    offsets += offset
    hash_index, values, due_values = _NO_INDEX, _NO_VALUES, _NO_VALUES
    packed = [lengths.astype(">u4")]
    if hashes:
        hash_index = _joined([part.hash_index for part in parts], np.uint32)
        if len(parts) > 1:
            counts = [part.row.records for part in parts]
            bases = np.cumsum(counts, dtype=np.uint32) - np.array(counts, np.uint32)
            hash_index = hash_index + np.repeat(bases, [len(part.hashes) for part in parts])
        values = _joined([part.hashes for part in parts], np.uint64)
        packed += (hash_index.astype(">u4"), values.astype(">u8"))
    if dues:
        due_values = _joined([part.dues for part in parts if len(part.dues)], np.uint64)
        packed.append(due_values.astype(">u8"))
    return (offsets, lengths, hash_index, values, due_values), packed


_NO_INDEX: Final = np.empty(0, np.uint32)
_NO_VALUES: Final = np.empty(0, np.uint64)


def _joined(columns: Sequence[Any], dtype: Any) -> npt.NDArray[Any]:
    if len(columns) == 1:
        return np.asarray(columns[0], dtype)
    if not any(isinstance(column, np.ndarray) for column in columns):  # many small batches: one array for all
        return np.array([*chain.from_iterable(columns)], dtype)
    return np.concatenate([np.asarray(column, dtype) for column in columns])


@lru_cache(4096)
def sender_of(address: bytes, port: int) -> tuple[bytes, bool]:
    """The sender's address as records carry it, and whether it is one of IPv6, which does not fit."""
    if address == NO_ADDRESS:
        return _BLANK, False
    if address.startswith(_V4_PREFIX):
        return address[12:] + _U16.pack(port), False
    return _BLANK, True


_stamp_run: Final = find("stamp_run")


def _stamp(
    buffer: bytearray | memoryview, parts: Sequence[Part], offsets: Any, start: int, origin: tuple[bytes, int]
) -> list[int] | npt.NDArray[np.uint16]:
    """Stamp all records; returns their tag hashes, as a list if `offsets` is one.

    Parameters:
        offsets: where each record will stand in the journal.
        start: where the unit will.
        origin: this broker's address and the store time.
    """
    is_few = isinstance(offsets, list)
    if _stamp_run is None:
        stamp = stamp_parts_few if is_few else stamp_parts_many
        return stamp(buffer, parts, offsets, start, origin=origin)
    tags = stamp_parts(_stamp_run, buffer, parts, offsets, start=start, origin=origin)
    return tags.tolist() if is_few else tags


def stamp_parts(
    loop: Callable[..., tuple[bytearray, bytearray]],
    buffer: bytearray | memoryview,
    parts: Sequence[Part],
    offsets: Any,
    start: int,
    origin: tuple[bytes, int],
) -> npt.NDArray[np.uint16]:
    """`_stamp` by the compiled loop."""
    server, stored_at_ms = origin
    tags = bytearray()
    at = 0
    for part in parts:
        row = part.row
        if not row[3]:
            continue
        client, ipv6 = sender_of(row[9], row[10])
        offset = int(offsets[at])
        stamp = _new(Stamp, (row[5], row[8], client, server, part.received_at_ms, stored_at_ms, ipv6))
        tags += loop(buffer, offset - start, part.lengths, offset, stamp=stamp)[0]
        at += row[3]
    return np.frombuffer(tags, np.uint16)


def stamp_parts_few(
    buffer: bytearray | memoryview, parts: Sequence[Part], offsets: Any, start: int, origin: tuple[bytes, int]
) -> list[int]:
    """`_stamp` record by record."""
    server, stored_at_ms = origin
    positions = [offset - start for offset in offsets]
    tags: list[int] = []
    at = 0
    for part in parts:
        row = part.row
        client, ipv6 = sender_of(row.address, row.port)
        end = at + row.records
        stamp = _new(Stamp, (row[5], row[8], client, server, part.received_at_ms, stored_at_ms, ipv6))
        tags += stamp_few(buffer, positions[at:end], offsets[at:end], stamp)
        at = end
    return tags


def stamp_parts_many(
    buffer: bytearray | memoryview,
    parts: Sequence[Part],
    offsets: Any,
    start: int,
    origin: tuple[bytes, int],
) -> npt.NDArray[np.uint16]:
    """`_stamp` for all records of all parts at once."""
    server, stored_at_ms = origin
    positions = offsets - start
    received = parts[0].received_at_ms
    if len(parts) == 1:
        row = parts[0].row
        client, ipv6 = sender_of(row.address, row.port)
        numbers = np.arange(row.first_queue_offset, row.first_queue_offset + row.records)
        addresses = np.frombuffer(client + server, ADDRESSES_DTYPE)
        lone = StampColumns(
            row.queue, numbers, addresses, received_at_ms=received, stored_at_ms=stored_at_ms, ipv6=ipv6
        )
        return stamp_columns(buffer, positions, offsets, lone)
    rows = [part.row for part in parts]
    clients = [sender_of(row.address, row.port) for row in rows]
    addresses = np.frombuffer(b"".join([client + server for client, _ in clients]), ADDRESSES_DTYPE)
    counts = np.array([row.records for row in rows])
    ends = np.cumsum(counts)
    # A record's queue offset less its index in the unit is the same for all records of a batch.
    bases = np.array([row.first_queue_offset for row in rows]) - (ends - counts)
    same = len({part.received_at_ms for part in parts}) == 1
    columns = StampColumns(
        np.repeat(np.array([row.queue for row in rows], np.uint8), counts),
        np.repeat(bases, counts) + np.arange(len(offsets)),
        np.repeat(addresses, counts),
        received_at_ms=received
        if same
        else np.repeat(np.array([part.received_at_ms for part in parts], np.uint64), counts),
        stored_at_ms=stored_at_ms,
        ipv6=np.repeat([ipv6 for _, ipv6 in clients], counts) if any(ipv6 for _, ipv6 in clients) else False,
    )
    return stamp_columns(buffer, positions, offsets, columns)
