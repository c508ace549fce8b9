"""Derived: everything that is built by applying the journal's units in order, in one place.

The live store, recovery and a rebuild from nothing all go through `apply`, so they cannot disagree.

What always holds: `applied` is a journal offset; all units below it have been applied and none above, except that
batches are remembered as their producers' (so that a resend is recognised) already when they are written.

The checkpoint: how far the derived files are good, and which they are.

Written in this order: the derived files, flushed, then their folders, then this file under another name, flushed, then
the rename, then the data directory. So whichever checkpoint a crash leaves in force, everything it names is whole.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

import msgspec

from dmq.errors import RecordCorrupt
from dmq.event_log import EventLog
from dmq.model import MessageId
from dmq.records.layout import BODY_AT, BODY_SIZE_AT
from dmq.records.view import RecordView
from dmq.settings import StoreSettings
from dmq.storage.delay.wheel import Wheel, WheelFile
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index.block_file import BlockCache, DerivedDamaged, read_framed, write_framed
from dmq.storage.index.lookup import Lookup
from dmq.storage.index.queue_index import QueueIndex
from dmq.storage.journal.unit import DUE, MOVED, SNAPSHOT, Row, Unit
from dmq.storage.state.events import DelaysDone, Event, SnapshotTaken, TopicDropped, decode_event, unpack_offsets
from dmq.storage.state.producers import ProducerTable
from dmq.storage.state.state import HALF_ID, SCHEDULE_ID, State, Topic

__all__ = [
    "POSITIONS_FOLDER",
    "Checkpoint",
    "Derived",
    "event_of",
    "folder_name",
    "message_id_of",
    "read_checkpoint",
    "read_positions",
    "write_checkpoint",
]

log = EventLog(__name__)

_CACHED_BLOCKS = 1024
_FOLDER_BYTES_MAX = 200
_SPAN_MAX = 1 << 30


class Derived:
    """The state, the index and the delay wheel, all at the same journal offset."""

    def __init__(self, files: Files, pool: FilePool, settings: StoreSettings, origin: int) -> None:
        expiry_ms = int(settings.producer_expiry_hours * 3_600_000)
        self.state = State(ProducerTable(settings.producers_max, expiry_ms))
        cache = BlockCache(_CACHED_BLOCKS)
        self.queues = QueueIndex(files, pool, self.folder_of)
        self.lookup = Lookup(files, pool, cache, _SPAN_MAX)
        self.wheel = Wheel(files, pool, cache, settings.fragment)
        self.applied = origin
        self.newest: Unit | None = None  # the last one applied, unless it was read back
        self.damage: list[tuple[int, int]] = []
        self._origin = origin  # nothing before this was ever applied here
        self.incomplete = False  # damage was passed, so events may be missing until the next snapshot

    # --- applying ---------------------------------------------------------------------------------------------------

    def apply(self, unit: Unit, *, recovered: bool = False) -> None:
        """Take in the next unit.

        Parameters:
            recovered: the unit was read back rather than just written, so its producers are not remembered yet.
        """
        if self.incomplete and unit.header.flags & SNAPSHOT:
            self._resume(self.snapshot_in(unit))
        if recovered:
            self.state.remember_producers(unit)
        rows = unit.rows
        if len(rows) == 1 and rows[0][3] == 1 and rows[0][4] > HALF_ID:
            self._apply_one(unit, rows[0])
        else:
            self._apply_rows(unit)
        self.applied = self.state.producers.applied = unit.end
        self.newest = None if recovered else unit

    def _apply_one(self, unit: Unit, row: Row) -> None:
        """A unit with one message, as they come while few are sent."""
        _, _, _, _, topic_id, queue, _, _, first, _, _, _ = row
        expected = self.state.apply_batch(row)
        if expected is not None:
            key = topic_id << 8 | queue
            if first != expected:
                self._lose(key, expected, first)
            self.queues.add_one(key, first, unit.offsets[0], unit.lengths[0], tag=unit.tags[0])
        self.lookup.add_one(unit, row)

    def _apply_rows(self, unit: Unit) -> None:
        at = due_at = 0
        columns = unit.columns_by_row()
        events = None if unit.events is None else iter(unit.events)
        for row in unit.rows:
            _, _, _, records, topic_id, _, flags, _, _, _, _, _ = row
            end = at + records
            if topic_id == 0:
                for index in range(at, end):
                    self._apply_event(event_of(unit, index) if events is None else next(events), unit.start)
            else:
                self._apply_batch(unit, row, columns, at, due_at=due_at)
            if flags & DUE:
                due_at += records
            at = end
        self.lookup.add(unit, columns[0])

    def _apply_event(self, event: Event, at: int) -> None:
        self.state.apply_event(event, at)
        if isinstance(event, DelaysDone):
            offsets = unpack_offsets(event.offsets).tolist()
            self.wheel.done(offset for offset in offsets if offset >= self._origin)
        elif isinstance(event, TopicDropped):
            self.queues.drop_topic(event.topic_id)

    def _apply_batch(self, unit: Unit, row: Row, columns: tuple[Any, Any, Any], at: int, due_at: int) -> None:
        _, _, _, records, topic_id, queue, _, _, first, _, _, _ = row
        expected = self.state.apply_batch(row)
        if expected is None:
            return
        key = topic_id << 8 | queue
        if first != expected:
            self._lose(key, expected, first)
        if records == 1 and topic_id > HALF_ID:
            self.queues.add_one(key, first, columns[0][at], columns[1][at], tag=columns[2][at])
            return
        end = at + records
        offsets, lengths, tags = columns[0][at:end], columns[1][at:end], columns[2][at:end]
        self.queues.add(key, first, offsets, lengths, tags=tags)
        if topic_id == SCHEDULE_ID and row.flags & DUE:
            self.wheel.add(row.queue, unit.dues[due_at : due_at + row.records], offsets, lengths)
        elif row.topic_id == HALF_ID:
            for index in range(at, end):
                message_id = message_id_of(unit, row, index, index - at)
                self.state.open_transaction(
                    message_id, int(unit.offsets[index]), int(unit.lengths[index]), unit.header.stored_at_ms
                )

    def _lose(self, key: int, start: int, end: int) -> None:
        """Index entries for messages whose units are gone: they can be counted and skipped, but not read."""
        if end < start or not self.damage:
            raise RecordCorrupt(
                f"queue {key & 255} of topic {key >> 8} continues at {end} instead of {start} without known damage"
            )
        where = self.damage[-1][0]
        self.queues.add(key, start, [where] * (end - start), [0] * (end - start), tags=[0] * (end - start))

    def pass_damage(self, start: int, end: int) -> None:
        """Go on after a range of the journal nothing can be read from."""
        self.add_damage(start, end)
        self.applied = end
        self.incomplete = True

    def add_damage(self, start: int, end: int) -> None:
        """Remember a range as unreadable."""
        if not any(s <= start and end <= e for s, e in self.damage):
            log.error("journal damaged", start=start, end=end)
            self.damage = sorted({*self.damage, (start, end)})

    def _resume(self, snapshot: bytes) -> None:
        """Take the state from a snapshot, because events before it were lost."""
        before = self.state
        after = State(before.producers)
        after.restore(snapshot)
        for key, following in after.next.items():
            expected = before.next.get(key, after.first.get(key, 0))
            if following > expected:
                self._lose(key, expected, following)
            after.first[key] = min(before.first.get(key, after.first.get(key, 0)), following)
        for topic_id in before.topics_by_id.keys() - after.topics_by_id.keys():
            self.queues.drop_topic(topic_id)
        self.state = after
        self.incomplete = False

    def begin_at(self, journal_start: int, firsts: dict[int, int]) -> None:
        """The journal begins there now, and its queues at these offsets, those not named at 0."""
        before = self.state.first
        self.state.first = {key: first for key, first in firsts.items() if first}
        if self.state.lags is not None:
            self.state.lags.begun_at({k: first for k, first in self.state.first.items() if first != before.get(k)})
        self.damage = [(start, end) for start, end in self.damage if end > journal_start]

    def firsts_of(self, snapshot: bytes) -> dict[int, int]:
        """Per queue that is still there, the first offset if the journal began with this snapshot."""
        there = State(ProducerTable(1, 1))
        there.restore(snapshot)
        return {key: first for key, first in there.next.items() if key in self.state.next}

    @staticmethod
    def snapshot_in(unit: Unit) -> bytes:
        """The state a snapshot unit carries."""
        parts = [event_of(unit, index) for index in range(unit.header.records)]
        return b"".join(event.state for event in parts if isinstance(event, SnapshotTaken))

    # --- names ------------------------------------------------------------------------------------------------------

    def folder_of(self, topic_id: int) -> str | None:
        """The folder of a topic's queue files; None when the topic is gone."""
        topic = self.state.topics_by_id.get(topic_id)
        return None if topic is None else folder_name(topic)

    def folders(self) -> set[str]:
        return {folder for topic_id in self.state.topics_by_id if (folder := self.folder_of(topic_id))}

    def first_kept(self, key: int) -> int | None:
        """The oldest queue offset the journal still has; None where the topic is gone."""
        if key >> 8 not in self.state.topics_by_id:
            return None
        return self.state.first.get(key, 0)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint, positions: Any) -> None:
        """Become what a checkpoint says; called on a new object only.

        Raises:
            DerivedDamaged, RecordCorrupt: the files it names are not what they were.
        """
        self.state.restore(checkpoint.state)
        self.state.positions.load(positions)
        self.queues.restore(checkpoint.runs, dict(checkpoint.filed))
        self.lookup.restore(checkpoint.index)
        self.wheel.restore(checkpoint.wheel, unpack_offsets(checkpoint.wheel_done).tolist())
        self.damage = list(checkpoint.damage)
        self.applied = self.state.producers.applied = checkpoint.offset
        self._origin = 0


def folder_name(topic: Topic) -> str:
    """The folder of a topic's queue files: its name for people, its id to be unique."""
    return f"{quote(topic.name, safe='%')[:_FOLDER_BYTES_MAX]}@{topic.id}"


def event_of(unit: Unit, index: int) -> Event:
    """The event a system record of a unit holds."""
    record = unit.record(index)
    size = int.from_bytes(record[BODY_SIZE_AT:BODY_AT], "big")
    return decode_event(record[BODY_AT : BODY_AT + size])


def message_id_of(unit: Unit, row: Row, index: int, within: int) -> MessageId:
    """The id of a record: from its attributes if it was moved, from its batch otherwise."""
    if row.flags & MOVED:
        message_id = RecordView(unit.buffer, int(unit.offsets[index]) - unit.start).message_id
        if message_id is None:
            raise RecordCorrupt(f"the moved record at journal offset {unit.offsets[index]} carries no id")
        return message_id
    return MessageId(row.producer_id, row.first_sequence + within)


PATH: Final = "checkpoint"
_TEMPORARY: Final = "checkpoint.tmp"
_MAGIC: Final = b"DMQC"
POSITIONS_FOLDER: Final = "offset"
_POSITIONS_MAGIC: Final = b"DMQP"

Positions = list[tuple[str, list[tuple[int, int, int, list[tuple[int, int]]]]]]


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """Everything needed to open without reading the journal before `offset`."""

    sequence: int
    journal_id: int
    journal_start: int
    offset: int
    epoch: int
    stored_at_ms: int
    state: bytes
    positions: str
    runs: list[str]
    filed: list[tuple[int, int]]
    index: list[str]
    wheel: list[WheelFile]
    wheel_done: bytes
    damage: list[tuple[int, int]]

    def paths(self) -> set[str]:
        """Every derived file it needs, but for queue files."""
        return {self.positions, *self.runs, *self.index, *(run.path for run in self.wheel)}


_decoder = msgspec.msgpack.Decoder(Checkpoint)
_positions_decoder = msgspec.msgpack.Decoder(Positions)


def write_checkpoint(files: Files, checkpoint: Checkpoint) -> None:
    """Put a checkpoint in force; what it names must be durable."""
    write_framed(files, _TEMPORARY, _MAGIC, msgspec.msgpack.encode(checkpoint))
    files.rename(_TEMPORARY, PATH)
    files.sync_dir("")


def read_checkpoint(files: Files, pool: FilePool) -> Checkpoint | None:
    """The checkpoint in force; None if there is none.

    Raises:
        DerivedDamaged: it cannot be read.
    """
    if not files.exists(PATH):
        return None
    try:
        checkpoint: Checkpoint = _decoder.decode(read_framed(pool, PATH, _MAGIC))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DerivedDamaged(f"{PATH} cannot be read: {error}") from error
    finally:
        pool.drop(PATH)
    return checkpoint


def write_positions(files: Files, sequence: int, positions: Positions) -> str:
    """Write all positions, flushed; returns the path."""
    path = f"{POSITIONS_FOLDER}/{sequence:020d}.positions"
    in_order = [(group, sorted(rows)) for group, rows in sorted(positions)]
    write_framed(files, path, _POSITIONS_MAGIC, msgspec.msgpack.encode(in_order))
    return path


def read_positions(pool: FilePool, path: str) -> Positions:
    """What `write_positions` wrote.

    Raises:
        DerivedDamaged: it is not that any more.
    """
    try:
        positions: Positions = _positions_decoder.decode(read_framed(pool, path, _POSITIONS_MAGIC))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DerivedDamaged(f"{path} cannot be read: {error}") from error
    return positions
