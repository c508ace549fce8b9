"""A plain model of the message store: everything ever written, in journal order, and what follows from a first part.

What always holds: a unit enters the model only if the test asked for what is in it (or it is the store's own upkeep,
which the model checks); a record's bytes, once seen, never change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dmq.model import Message, MessageId, TopicConfig
from dmq.records import RecordView
from dmq.records.block import BodyBlocks, plain
from dmq.records.layout import BLOCK, BODY_AT, FLAGS_AT, U32
from dmq.storage.journal.unit import DUE, MOVED, Row, Unit, is_intact, parse_unit, read_header
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.derived import event_of, message_id_of
from dmq.storage.state.events import (
    Archived,
    DelaysDone,
    EpochStarted,
    Event,
    PositionDropped,
    PositionSet,
    Settled,
    SnapshotTaken,
    TopicDropped,
    TopicPut,
    TransactionEnded,
    unpack_offsets,
)
from dmq.testing import MemoryFiles

SCHEDULE, SCHEDULE_ID = "%SCHEDULE%", 1
HALF, HALF_ID = "%HALF%", 2
REMEMBERED = 5

Key = tuple[int, int]  # topic id, queue


class Sent(NamedTuple):
    """A batch the test handed to the store, and what is in it."""

    batch: Batch
    messages: list[Message]
    ids: list[MessageId]


class Stored(NamedTuple):
    """A message where it stands in the journal."""

    offset: int
    raw: bytes
    id: MessageId
    key: str | None
    stored_at_ms: int
    topic_id: int


class Placed(NamedTuple):
    """A batch in a unit."""

    key: Key
    first: int
    messages: list[Stored]
    dues: list[int]
    batch: Batch | None  # None for a copy the store made
    unit: tuple[int, int]


Effect = Placed | Event


class Written(NamedTuple):
    """A unit of the journal."""

    start: int
    end: int
    crc: int
    effects: list[Effect]


@dataclass
class Spot:
    """A group in a queue: everything below the floor is settled, and these above it."""

    floor: int = 0
    above: set[int] = field(default_factory=set)

    def settle(self, offsets: set[int]) -> None:
        self.above |= {offset for offset in offsets if offset >= self.floor}
        while self.floor in self.above:
            self.above.discard(self.floor)
            self.floor += 1

    def holds(self, offset: int) -> bool:
        return offset < self.floor or offset in self.above


@dataclass
class Producer:
    epoch: int
    places: dict[Key, list[Placed]] = field(default_factory=dict)


class View:
    """What a first part of the journal says."""

    def __init__(self) -> None:
        self.topics: dict[int, tuple[str, TopicConfig]] = {}
        self.queues: dict[Key, list[Stored]] = {}
        self.positions: dict[str, dict[Key, Spot]] = {}
        self.producers: dict[int, Producer] = {}
        self.delays: dict[int, tuple[int, Stored]] = {}
        self.transactions: dict[MessageId, tuple[int, int]] = {}
        self.messages: list[Stored] = []

    def apply(self, unit: Written) -> None:
        for effect in unit.effects:
            if isinstance(effect, Placed):
                self._place(effect)
            else:
                self._happen(effect)

    def _place(self, placed: Placed) -> None:
        topic_id = placed.key[0]
        assert topic_id in (SCHEDULE_ID, HALF_ID) or topic_id in self.topics
        queue = self.queues.setdefault(placed.key, [])
        assert placed.first == len(queue), f"queue {placed.key} goes on at {placed.first}, not at {len(queue)}"
        queue += placed.messages
        self.messages += placed.messages
        if topic_id == SCHEDULE_ID:
            self.delays |= {m.offset: (due, m) for m, due in zip(placed.messages, placed.dues, strict=True)}
        if topic_id == HALF_ID:
            for message in placed.messages:
                began = self.transactions.get(message.id, (0, message.stored_at_ms))[1]
                self.transactions[message.id] = (message.offset, began)
        if placed.batch is not None and placed.batch.producer_id:
            self._remember(placed, placed.batch)

    def _remember(self, placed: Placed, batch: Batch) -> None:
        producer = self.producers.get(batch.producer_id)
        if producer is None or producer.epoch < batch.producer_epoch:
            producer = self.producers[batch.producer_id] = Producer(batch.producer_epoch)
        places = producer.places.setdefault(placed.key, [])
        places.append(placed)
        del places[:-REMEMBERED]

    def _happen(self, event: Event) -> None:
        match event:
            case TopicPut(topic_id, name, config):
                self.topics[topic_id] = (name, config)
            case TopicDropped(topic_id):
                self._drop(topic_id)
            case Settled(group, topic_id, queue):
                if topic_id in self.topics:
                    spot = self.positions.setdefault(group, {}).setdefault((topic_id, queue), Spot())
                    spot.settle(marked(event))
            case PositionSet(group, topic_id, queue, offset):
                if topic_id in self.topics:
                    self.positions.setdefault(group, {})[topic_id, queue] = Spot(offset)
            case PositionDropped(group):
                self.positions.pop(group, None)
            case DelaysDone(offsets):
                for offset in unpack_offsets(offsets).tolist():
                    del self.delays[offset]
            case TransactionEnded(message_id):
                self.transactions.pop(MessageId.from_bytes(message_id), None)
            case _:
                raise AssertionError(event)

    def _drop(self, topic_id: int) -> None:
        del self.topics[topic_id]
        self.queues = {key: queue for key, queue in self.queues.items() if key[0] != topic_id}
        self.messages = [message for message in self.messages if message.topic_id != topic_id]
        for group in list(self.positions):
            spots = {key: spot for key, spot in self.positions[group].items() if key[0] != topic_id}
            self.positions[group] = spots
            if not spots:
                del self.positions[group]
        for producer in self.producers.values():
            producer.places = {key: places for key, places in producer.places.items() if key[0] != topic_id}

    def first(self, key: Key, journal_start: int) -> int:
        """The oldest offset of a queue that is still in the journal."""
        return bisect_left(self.queues.get(key, []), journal_start, key=lambda message: message.offset)


def marked(event: Settled) -> set[int]:
    """The offsets an event settles, bit by bit."""
    return {
        event.start + i
        for i in range(event.count)
        if not event.bitmap or (i // 8 < len(event.bitmap) and event.bitmap[i // 8] >> i % 8 & 1)
    }


Expected = Sent | Event


class Model:
    """Everything written, and what the test has asked for that may yet turn up."""

    def __init__(self) -> None:
        self.units: list[Written] = []
        self.asked: list[deque[Expected]] = []  # one per call; what is in the journal was taken out
        self.written = View()
        self.seen = View()
        self._seen_units = 0
        self.ids: dict[MessageId, tuple[bytes, str | None, str | None, dict[str, str]]] = {}

    @property
    def end(self) -> int:
        return self.units[-1].end if self.units else 0

    def copy(self) -> Model:
        """Another one that knows the same, to see what becomes of another state of the disk; `survive` comes next."""
        twin = Model()
        twin.units = list(self.units)
        twin.asked = [deque(call) for call in self.asked]
        twin.ids = self.ids
        return twin

    def ask(self, items: list[Expected]) -> None:
        """A call is about to be made; its items, in order, may enter the journal."""
        self.asked.append(deque(items))
        for item in items:
            if isinstance(item, Sent):
                for message_id, m in zip(item.ids, item.messages, strict=True):
                    self.ids[message_id] = (m.body, m.key, m.tag, dict(m.properties or {}))

    def answered(self) -> None:
        """The call came back without an error, so all of it must have been found."""
        assert not self.asked[-1], f"{len(self.asked[-1])} items are said to be written, but not in the journal"
        self.asked.clear()

    def take_in(self, files: MemoryFiles, end: int) -> None:
        """Units written since the last time, as the running process sees them."""
        for piece in scan(files, self.end, end):
            written = self._explained(piece)
            self.units.append(written)
            self.written.apply(written)
        assert self.end == end, f"the journal's units end at {self.end}, the store says {end}"

    def see(self, visible: int) -> None:
        """Everything below may be seen now."""
        while self._seen_units < len(self.units) and self.units[self._seen_units].end <= visible:
            self.seen.apply(self.units[self._seen_units])
            self._seen_units += 1

    def survive(self, files: MemoryFiles, end: int, *, durable: int) -> int:
        """Match what a reopened store has with what was written; returns where the journal starts.

        Units may be missing only as a last part, none of it durable; what is new must be explained.
        """
        found = list(scan(files, None, end))
        known = {unit.start: unit for unit in self.units}
        same = 0
        while same < len(found):
            unit = known.get(found[same].start)
            if unit is None or (unit.end, unit.crc) != (found[same].end, found[same].crc):
                break
            same += 1
        kept_to = found[same].start if same < len(found) else found[-1].end
        assert kept_to >= min(durable, self.end), f"durable to {durable}, but kept to {kept_to} only"
        before = [unit for unit in self.units if unit.end <= kept_to]
        assert not self.units or not before or before[-1].end == kept_to
        assert not self.units or found[0].start in known or not before
        self.units = before
        self.written = View()
        for unit in before:
            self.written.apply(unit)
        for new in found[same:]:
            assert new.start == self.end
            written = self._explained(new)
            self.units.append(written)
            self.written.apply(written)
        self.asked.clear()
        self.seen = View()
        self._seen_units = 0
        self.see(self.end)
        return found[0].start

    # --- explaining -------------------------------------------------------------------------------------------------

    def _explained(self, piece: Piece) -> Written:
        header = read_header(piece.raw)
        assert header is not None
        unit = parse_unit(header, piece.raw)
        effects: list[Effect] = []
        at = due_at = 0
        for row in unit.rows:
            end = at + row.records
            if row.topic_id == 0:
                for index in range(at, end):
                    event = event_of(unit, index)
                    if isinstance(event, SnapshotTaken | EpochStarted | Archived):
                        continue
                    if self._next(lambda item, event=event: item == event) is None:  # type: ignore[misc]
                        self._check_upkeep(event)
                    effects.append(event)
            else:
                dues = [int(due) for due in unit.dues[due_at : due_at + row.records]] if row.flags & DUE else []
                due_at += len(dues)
                effects.append(self._explained_batch(unit, row, at, end, dues))
            at = end
        return Written(unit.start, unit.end, unit.header.crc, effects)

    def _next(self, fits: Callable[[Expected], bool]) -> Expected | None:
        for number, call in reversed(list(enumerate(self.asked))):
            if call and fits(call[0]):
                del self.asked[:number]  # calls that failed before it have left nothing
                return call.popleft()
        return None

    def _check_upkeep(self, event: Event) -> None:
        """Only these the store writes by itself, when it carries something forward."""
        assert (isinstance(event, DelaysDone) and event.reason == "carried") or (
            isinstance(event, Settled) and self.written.topics[event.topic_id][1].carry_for == event.group
        ), f"nobody asked for {event}"

    def _explained_batch(self, unit: Unit, row: Row, at: int, end: int, dues: list[int]) -> Placed:
        stored = []
        contents = []
        blocks = BodyBlocks(unit.buffer)
        for index in range(at, end):
            raw = bytes(unit.record(index))
            if raw[FLAGS_AT] & BLOCK:
                distance = U32.unpack_from(raw, BODY_AT)[0]
                raw = plain(raw, blocks.expanded(int(unit.offsets[index]) - unit.start + distance))
            record = RecordView(raw)
            record.verify()
            assert (record.journal_offset, record.queue) == (int(unit.offsets[index]), row.queue)
            assert record.queue_offset == row.first_queue_offset + index - at
            message_id = message_id_of(unit, row, index, index - at)
            contents.append((record.body, record.key, record.tag, record.properties))
            stored.append(
                Stored(int(unit.offsets[index]), raw, message_id, record.key, unit.header.stored_at_ms, row.topic_id)
            )
        name = self._name_of(row.topic_id)
        ids = [message.id for message in stored]

        def fits(item: Expected) -> bool:
            return (
                isinstance(item, Sent)
                and (item.batch.topic, item.batch.queue) == (name, row.queue)
                and item.ids == ids
                and list(item.batch.dues) == dues
            )

        item = self._next(fits)
        batch = None
        if isinstance(item, Sent):
            assert contents == [(m.body, m.key, m.tag, dict(m.properties or {})) for m in item.messages]
            batch = item.batch
        else:
            assert row.flags & MOVED, f"nobody sent {ids} to {name}"
            assert contents == [self.ids[message_id] for message_id in ids]
        return Placed((row.topic_id, row.queue), row.first_queue_offset, stored, dues, batch, (unit.start, unit.end))

    def _name_of(self, topic_id: int) -> str:
        return {SCHEDULE_ID: SCHEDULE, HALF_ID: HALF}.get(topic_id) or self.written.topics[topic_id][0]


class Piece(NamedTuple):
    """The bytes of a unit."""

    start: int
    end: int
    crc: int
    raw: bytes


def scan(files: MemoryFiles, start: int | None, end: int) -> Iterator[Piece]:
    """The units in the journal's files in [start, end), read without the store; None begins with the first file."""
    for path, size in files.paths().items():
        base = int(path[8:28]) if path.startswith("journal/") else end
        if base >= end or (start is not None and base + size <= start):
            continue
        data = files.read_file(path)
        at = 0 if start is None else max(0, start - base)
        while at < len(data) and base + at < end:
            header = read_header(data, at)
            assert header is not None, (path, at)
            assert header.start == base + at
            assert is_intact(header, data, at)
            yield Piece(base + at, base + at + header.length, header.crc, data[at : at + header.length])
            at += header.length
