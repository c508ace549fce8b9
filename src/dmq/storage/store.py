"""The message store: one journal, and everything derived from it, behind one door.

One owner calls everything here, from one thread at a time; `FlushTicket.run` and `CheckpointPlan.write` alone may run
in another thread meanwhile. `commit.GroupCommit` is an owner for callers from many threads.

What always holds: `append` puts units into the page cache and gives every batch its place; a batch may be acknowledged
once `visible` has reached its `unit_end`; for `FLUSHED` that takes a `flush`. After a failed flush nothing is written,
nothing more becomes visible, and every call says `StoreFailed`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from dmq.clock import Clock, SystemClock
from dmq.errors import DiskFull, StorageError, StoreClosed, TopicExists, UnknownTopic
from dmq.model import QUEUES_MAX, MessageId, TopicConfig, check_name
from dmq.settings import StoreSettings
from dmq.storage import retention, units
from dmq.storage.appending import Batch, Draft, Placement, draft_units, event_part
from dmq.storage.checkpointing import CheckpointPlan
from dmq.storage.events import Archived, EpochStarted, Event, PositionSet, SnapshotTaken, TopicDropped, TopicPut
from dmq.storage.files import File, Files
from dmq.storage.frames import DerivedDamaged
from dmq.storage.opening import mark_running, open_directory, rebuild, unmark_running
from dmq.storage.pool import FilePool
from dmq.storage.positions import Position
from dmq.storage.reading import Found, Reader, Slice
from dmq.storage.recovery import Recovered
from dmq.storage.scanning import Scanner
from dmq.storage.state import OpenTransaction, Topic, queue_key
from dmq.storage.units import SNAPSHOT, Unit
from dmq.storage.visibility import Durability, Visibility
from dmq.storage.wheel import Delay

__all__ = ["FlushTicket", "MessageStore"]

log = logging.getLogger(__name__)

_SNAPSHOT_PART: Final = 1 << 20
_UNITS_BUFFERED_MAX: Final = 50_000
_DISK_CHECK_BYTES: Final = 16 << 20
_NO_SERVER: Final = bytes(6)


class FlushTicket:
    """A flush under way: `run` blocks for the disk and touches nothing else."""

    __slots__ = ("_file", "end")

    def __init__(self, file: File, end: int) -> None:
        self._file = file
        self.end = end

    def run(self) -> None:
        self._file.sync()


class MessageStore:
    """See the module."""

    def __init__(
        self,
        files: Files,
        settings: StoreSettings | None = None,
        clock: Clock | None = None,
        *,
        server: bytes = _NO_SERVER,
        checkpoint_inline: bool = True,
    ) -> None:
        """Open a data directory, recovering it if need be.

        Parameters:
            files: the directory.
            settings: defaults if left out.
            clock: the machine's if left out.
            server: this broker's IPv4 address and port, six bytes, stamped into records.
            checkpoint_inline: take checkpoints within `append` when they are due; without it the owner asks
                `checkpoint_due` and calls `checkpoint`, or its three steps, when it suits.

        Raises:
            DirectoryInUse, WrongFormat, ForeignFile, NoPermission, DiskFull, StorageError.
        """
        self.settings = settings or StoreSettings()
        self._clock = clock or SystemClock()
        self._files = files
        self._pool = FilePool(files, self.settings.files_open_max)
        self._server = server
        self._inline = checkpoint_inline
        self._closed = False
        files.lock()
        try:
            self._open()
        except BaseException:
            self._pool.close()
            files.unlock()
            raise

    def _open(self) -> None:
        opened = open_directory(self._files, self._pool, self.settings)
        self._journal = opened.journal
        self._journal_id = opened.journal_id
        self._derived = opened.derived
        self._checkpointer = opened.checkpointer
        self.recovered = opened.recovered
        self.epoch = max(1, opened.recovered.epoch + opened.unclean)
        self._stored_at_ms = opened.recovered.stored_at_ms
        self._assigned: dict[int, int] = {}
        self._refusing = False
        self._written_since_disk_check = 0
        self._flushed_at = self._checkpointed_at = self._clock.monotonic()
        self._reader = Reader(self._journal, self._journal_id, self._derived, self.settings.read_cache_bytes)
        self._visibility = Visibility(opened.next_offset)
        mark_running(self._files)
        if opened.next_offset > self._journal.end or not self._journal.segments:
            self._begin_segment(opened.next_offset)
        else:
            self._journal.open_tail()
        self._checkpointed = -1 if self._checkpointer.in_force is None else self._checkpointer.in_force.offset
        if opened.unclean:
            try:
                self.append([EpochStarted(self.epoch)])
                self.flush()
            except DiskFull as error:
                log.warning("disk full at start", extra={"error": str(error)})
        if self._checkpointed != self._journal.end:
            self._try_checkpoint()

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The first journal offset kept."""
        return self._journal.start

    @property
    def end(self) -> int:
        """The journal offset the next unit gets."""
        return self._journal.end

    @property
    def visible(self) -> int:
        """Everything below this journal offset may be seen."""
        return self._visibility.visible

    @property
    def flushed(self) -> int:
        """Everything below this journal offset would survive a power loss."""
        return self._visibility.flushed

    @property
    def journal_id(self) -> int:
        return self._journal_id

    @property
    def damage(self) -> list[tuple[int, int]]:
        """Journal ranges that cannot be read."""
        return list(self._derived.damage)

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring."""
        state = self._derived.state
        return {
            "journal_start": self.start,
            "journal_end": self.end,
            "visible": self.visible,
            "flushed": self.flushed,
            "epoch": self.epoch,
            "segments": len(self._journal.segments),
            "topics": len(state.topics_by_id) - 2,
            "queues": len(state.next),
            "producers": len(state.producers),
            "transactions": len(state.transactions),
            "delays": self._derived.wheel.pending,
            "damage": len(self._derived.damage),
            "refusing": self._refusing,
            "failed": self._journal.failure is not None,
        }

    # --- topics -----------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, config: TopicConfig | None = None, *, system: bool = False) -> Topic:
        """Create a topic; durable when this returns.

        Raises:
            TopicExists, InvalidName, StorageError.
        """
        config = config or TopicConfig()
        check_name(name, "topic", system=system)
        if not 1 <= config.queues <= QUEUES_MAX:
            raise UnknownTopic(f"a topic has 1 to {QUEUES_MAX} queues, not {config.queues}", topic=name)
        if name in self._derived.state.topics:
            raise TopicExists(f"topic {name!r} is already there: choose another name or update it", topic=name)
        return self._put_topic(TopicPut(self._derived.state.next_topic_id, name, config))

    def update_topic(self, name: str, config: TopicConfig) -> Topic:
        """Change a topic's settings; queues can only be added."""
        topic = self.topic(name)
        if not topic.config.queues <= config.queues <= QUEUES_MAX:
            raise UnknownTopic(
                f"topic {name!r} has {topic.config.queues} queues: it can get more, up to {QUEUES_MAX}, but not fewer",
                topic=name,
            )
        return self._put_topic(TopicPut(topic.id, name, config))

    def _put_topic(self, event: TopicPut) -> Topic:
        self._append_flushed([event])
        return self.topic(event.name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages and positions; durable when this returns."""
        self._append_flushed([TopicDropped(self.topic(name).id)])

    def topic(self, name: str) -> Topic:
        """Raises UnknownTopic if there is none of that name."""
        topic = self._derived.state.topics.get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {name!r}: create it first", topic=name)
        return topic

    def topics(self) -> list[Topic]:
        """All topics, the built-in ones included."""
        return sorted(self._derived.state.topics.values(), key=lambda topic: topic.name)

    # --- writing ----------------------------------------------------------------------------------------------------

    def append(
        self,
        items: Sequence[Batch | Event],
        durability: Durability = Durability.FLUSHED,
        *,
        atomic: bool = False,
    ) -> list[Placement]:
        """Write batches and events, in order, in as few units as fit; returns where each went.

        Parameters:
            items: what to write; a batch sent before is not written again.
            durability: what must be reached before they become visible. Flushing is a separate call, so that one
                flush serves many appends.
            atomic: all in one unit, however large: they happen together or not at all.

        Raises:
            UnknownTopic, InvalidMessage, SequenceConflict, StaleEpoch, LimitReached: nothing was written.
            DiskFull, StorageError: units before the failing one were written, nothing of the others.
        """
        self._check_open()
        self._check_space()
        now_ms = self._clock.now_ms()
        settings = self.settings
        drafts, repeated = draft_units(
            items,
            self._derived.state,
            self._assigned,
            now_ms,
            settings.unit_bytes_max,
            settings.transactions_max,
            atomic=atomic,
        )
        placements: list[Placement | None] = [None] * len(items)
        for draft in drafts:
            unit = self._write(draft, durability, now_ms)
            for index, row in zip(draft.items, unit.rows, strict=True):
                item = items[index]
                topic = item.topic if isinstance(item, Batch) else ""
                placements[index] = Placement(topic, row.queue, row.first_queue_offset, row.records, unit.start, unit.end)
        for index, place in repeated.items():
            placements[index] = _repeated(items, placements, index, place)
        if self._inline and self.checkpoint_due:
            self._try_checkpoint()
        return placements  # type: ignore[return-value]

    def _append_flushed(self, items: Sequence[Batch | Event], *, atomic: bool = False) -> None:
        self.append(items, Durability.FLUSHED, atomic=atomic)
        self.flush()

    def _write(self, draft: Draft, durability: Durability, now_ms: int) -> Unit:
        tail = self._journal.tail
        if tail.size + draft.size > self.settings.segment_bytes and self._tail_in_use:
            self._roll()
        self._stored_at_ms = max(self._stored_at_ms, now_ms)
        unit = self._build(draft.parts)
        self._journal.append(unit.buffer)
        self._tail_in_use = True
        self._written_since_disk_check += unit.header.length
        for row in unit.rows:
            if row.topic_id:
                self._assigned[queue_key(row.topic_id, row.queue)] = row.first_queue_offset + row.records
                self._derived.state.remember_producer(unit, row)
        self._reader.cache.put_tail(unit.start, unit.buffer)
        self._visibility.wrote(unit, durability)
        self._advance()
        return unit

    def _build(self, parts: Sequence[units.Part], *, start: int | None = None, flags: int = 0) -> Unit:
        return units.build(
            parts,
            start=self._journal.end if start is None else start,
            epoch=self.epoch,
            journal_id=self._journal_id,
            stored_at_ms=self._stored_at_ms,
            flushed_through=self._visibility.flushed,
            server=self._server,
            flags=flags,
        )

    def _advance(self) -> None:
        for unit in self._visibility.advance():
            self._derived.apply(unit)
        if self._visibility.visible == self._journal.end:
            self._assigned.clear()

    def begin_flush(self) -> FlushTicket:
        """What to flush to make everything written so far durable; `run` it, then call `finish_flush`."""
        self._check_open()
        return FlushTicket(*self._journal.flush_target())

    def finish_flush(self, ticket: FlushTicket, error: StorageError | None = None) -> None:
        """The flush is done, or has failed; then this raises StoreFailed."""
        if error is not None:
            raise self._journal.flush_failed(error) from error
        self._visibility.flushed = max(self._visibility.flushed, ticket.end)
        self._journal.flushed = self._visibility.flushed
        self._flushed_at = self._clock.monotonic()
        self._advance()

    def flush(self) -> None:
        """Make everything written so far durable.

        Raises:
            StoreFailed: it could not be; the store takes no more writes.
        """
        ticket = self.begin_flush()
        try:
            ticket.run()
        except StorageError as error:
            self.finish_flush(ticket, error)
        self.finish_flush(ticket)

    def confirm_replicated(self, offset: int) -> None:
        """Every in-sync replica has everything below a journal offset, flushed."""
        self._visibility.replicated = max(self._visibility.replicated, offset)
        self._advance()

    def _roll(self) -> None:
        """Begin a new segment, unless units still wait for replicas: then the old one may grow on."""
        self.flush()
        if self.visible == self.end:
            self._begin_segment(self.end)

    def _begin_segment(self, start: int) -> None:
        """Open a segment with a snapshot of the state, so that older ones can go."""
        state = self._derived.state.snapshot(start)
        pieces = [state[at : at + _SNAPSHOT_PART] for at in range(0, len(state), _SNAPSHOT_PART)]
        now_ms = self._clock.now_ms()
        parts = [event_part(SnapshotTaken(i, len(pieces), piece), now_ms) for i, piece in enumerate(pieces)]
        self._stored_at_ms = max(self._stored_at_ms, now_ms)
        unit = self._build(parts, start=start, flags=SNAPSHOT)
        self._journal.roll(start, unit.buffer, self._stored_at_ms)
        self._tail_in_use = False
        self._visibility.flushed = unit.end
        self._visibility.visible = unit.end
        self._derived.apply(unit)

    _tail_in_use = True  # the last segment holds more than its snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed: open it again")
        self._journal.check()

    def _check_space(self) -> None:
        if self._refusing or self._written_since_disk_check >= _DISK_CHECK_BYTES:
            self._written_since_disk_check = 0
            disk = self._files.disk_usage()
            self._refusing = disk.total - disk.free > self.settings.disk_refuse * disk.total
        if self._refusing:
            raise DiskFull(
                f"the disk of {self._files.describe('')} is over {self.settings.disk_refuse:.0%} full, so nothing is "
                "written: free some space or shorten the retention; writing goes on by itself then"
            )

    # --- reading ----------------------------------------------------------------------------------------------------

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        """(first offset kept, next offset) of a queue."""
        key = self._queue(topic, queue)[1]
        state = self._derived.state
        return state.first.get(key, 0), state.next.get(key, 0)

    def read(
        self,
        topic: str,
        queue: int,
        offset: int,
        max_messages: int = 1000,
        max_bytes: int = 1 << 20,
        tags: Sequence[int] | None = None,
    ) -> Slice:
        """Visible messages of a queue from an offset on; see `Reader.read`.

        Parameters:
            tags: hashes of the tags wanted (`dmq.records.tag_hash`); None takes all. Different tags may share a
                hash, so the caller compares the tag itself.
        """
        found, _ = self._queue(topic, queue)
        try:
            return self._reader.read(found, queue, offset, max_messages, max_bytes, tags)
        except DerivedDamaged as error:
            self._rebuild(error)
            return self._reader.read(found, queue, offset, max_messages, max_bytes, tags)

    def read_units(self, offset: int, max_bytes: int = 8 << 20) -> tuple[bytes, int]:
        """Whole visible units, verbatim, from a unit's start on, and the offset to go on with."""
        return self._reader.raw_units(offset, self.visible, max_bytes)

    def offset_since(self, topic: str, queue: int, time_ms: int) -> int:
        """The first offset of a queue stored at or after a time; the next one if there is none."""
        found, _ = self._queue(topic, queue)
        try:
            return self._reader.offset_since(found.id, queue, time_ms)
        except DerivedDamaged as error:
            self._rebuild(error)
            return self._reader.offset_since(found.id, queue, time_ms)

    def find(
        self, *, key: str | None = None, message_id: MessageId | None = None, topic: str | None = None
    ) -> list[Found]:
        """Messages by key, or one message, as first stored and as moved since, by id; oldest first."""
        try:
            return self._find(key, message_id, topic)
        except DerivedDamaged as error:
            self._rebuild(error)
            return self._find(key, message_id, topic)

    def _find(self, key: str | None, message_id: MessageId | None, topic: str | None) -> list[Found]:
        if message_id is not None:
            return [found for found in self._reader.find_id(message_id) if topic in (None, found.topic)]
        assert key is not None, "a key or an id is needed"
        return list(self._reader.find_key(key, topic))

    def record_at(self, journal_offset: int) -> Found | None:
        """The message that stands at a journal offset; None if its topic is gone."""
        return self._reader.record_at(journal_offset)

    def _queue(self, topic: str, queue: int) -> tuple[Topic, int]:
        found = self.topic(topic)
        if not 0 <= queue < found.config.queues:
            raise UnknownTopic(
                f"topic {topic!r} has queues 0-{found.config.queues - 1}, not {queue}", topic=topic, queue=queue
            )
        return found, queue_key(found.id, queue)

    # --- positions, delays, transactions ----------------------------------------------------------------------------

    def position(self, group: str, topic: str, queue: int) -> Position | None:
        """How far a group has come in a queue; None if it never was there."""
        return self._derived.state.positions.get(group, self._queue(topic, queue)[0].id, queue)

    def groups(self) -> list[str]:
        return sorted(self._derived.state.positions.groups())

    def set_position(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Put a group at an offset; written with the next flush."""
        self.append([PositionSet(group, self._queue(topic, queue)[0].id, queue, offset)])

    def take_due(self, now_ms: int, limit: int, fragments: Iterable[int] | None = None) -> list[Delay]:
        """Delayed records that are due; the caller's until a DelaysDone event names them or they are released."""
        try:
            return self._derived.wheel.take(now_ms, limit, fragments)
        except DerivedDamaged as error:
            self._rebuild(error)
            return self._derived.wheel.take(now_ms, limit, fragments)

    def release_due(self, offsets: Iterable[int]) -> None:
        """Delayed records that could not be delivered; they stay pending."""
        self._derived.wheel.release(offsets)

    def next_due_ms(self, fragments: Iterable[int] | None = None) -> int | None:
        return self._derived.wheel.next_due_ms(fragments)

    @property
    def delays_pending(self) -> int:
        return self._derived.wheel.pending

    def transactions(self) -> dict[MessageId, OpenTransaction]:
        """Half messages that are neither committed nor rolled back."""
        return {MessageId.from_bytes(raw): half for raw, half in self._derived.state.transactions.items()}

    def archived(self, offset: int) -> None:
        """The archive has everything below a journal offset; written with the next flush."""
        self.append([Archived(offset)])

    # --- upkeep -----------------------------------------------------------------------------------------------------

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough was written since the last checkpoint."""
        return (
            self._derived.applied - self._checkpointed >= self.settings.checkpoint_bytes
            or self._derived.queues.buffered >= self.settings.checkpoint_records
            or self._derived.lookup.units_buffered >= _UNITS_BUFFERED_MAX
        )

    def checkpoint(self) -> None:
        """Write what is derived, so that opening need not read the journal so far.

        Raises:
            StorageError: it could not be written; the store works on without it.
        """
        plan = self.begin_checkpoint()
        if plan is None:
            return
        try:
            plan.write()
        except DerivedDamaged as error:
            self.finish_checkpoint(plan, error)
            self._rebuild(error)
        except BaseException as error:
            self.finish_checkpoint(plan, error)
            raise
        else:
            self.finish_checkpoint(plan)

    def begin_checkpoint(self) -> CheckpointPlan | None:
        """Set aside what a checkpoint writes; None while units wait for replicas. Flushes first."""
        self.flush()
        if self.visible != self.end:
            return None
        self._derived.state.producers.expire(self._clock.now_ms())
        self._checkpointed_at = self._clock.monotonic()
        return self._checkpointer.begin(self._derived, self.start, self.epoch, self._stored_at_ms)

    def finish_checkpoint(self, plan: CheckpointPlan, error: BaseException | None = None) -> None:
        """The plan was written, or could not be."""
        if error is not None:
            plan.abandon()
            return
        self._checkpointer.finish(plan, self._derived)
        self._checkpointed = plan.checkpoint.offset

    def _try_checkpoint(self) -> None:
        try:
            self.checkpoint()
        except StorageError as error:
            # Nothing is lost: the journal has it all, and the next checkpoint covers this one's part.
            self._checkpointed = self._derived.applied
            log.error("checkpoint failed", extra={"error": str(error)})

    def _rebuild(self, error: DerivedDamaged) -> None:
        """A derived file is wrong: build all of them anew, and go on."""
        log.error("derived files damaged", extra={"error": str(error)})
        scanner = Scanner(self._journal, self._journal_id)
        old = self._derived
        derived, _ = rebuild(
            self._files,
            self._pool,
            self.settings,
            self._journal,
            scanner,
            Recovered(),
            self._checkpointer,
            self.visible,
            self.visible,
        )
        for unit in self._visibility.pending:
            for row in unit.rows:
                derived.state.remember_producer(unit, row)
        derived.wheel.take_over_flights(old.wheel)
        self._derived = self._reader.derived = derived
        self._try_checkpoint()

    def tick(self) -> None:
        """What time alone makes due: flush what was only stored, checkpoint, retention. Call it every second or so."""
        now = self._clock.monotonic()
        if self.flushed < self.end and now - self._flushed_at >= self.settings.flush_seconds:
            self.flush()
        if self._checkpointed != self.end and now - self._checkpointed_at >= self.settings.checkpoint_seconds:
            self._try_checkpoint()
        self._refusing = self._refusing or self._written_since_disk_check > 0
        try:
            self._check_space()
        except DiskFull as error:
            log.warning("disk nearly full", extra={"error": str(error)})
        self.retain()

    def retain(self) -> int:
        """Drop segments that are not wanted any more; returns how many."""
        segments = self._journal.segments
        ages = [
            retention.SegmentAge(before.start, after.start, after.stored_at_ms)
            for before, after in itertools.pairwise(segments)
        ]
        if not ages:
            return 0
        count = retention.segments_to_drop(
            ages,
            segments[-1].size,
            self._clock.now_ms(),
            self.settings,
            self._files.disk_usage(),
            retention.protected_offset(self._derived, self.settings, self.end),
        )
        return self._drop(count) if count else 0

    def _drop(self, count: int) -> int:
        kept = self._journal.segments[count].start
        unit = Scanner(self._journal, self._journal_id).unit_at(kept)
        if unit is None or not unit.header.flags & SNAPSHOT:
            log.error("retention stopped: the next segment's snapshot is damaged", extra={"offset": kept})
            return 0
        snapshot = self._derived.snapshot_in(unit)
        first_after = self._derived.firsts_of(snapshot)
        now_ms = self._clock.now_ms()
        for items in retention.carried_forward(self._derived, self._reader, self.start, kept, first_after, now_ms):
            self.append(items, Durability.FLUSHED, atomic=True)
        # The checkpoint in force must not need what goes; taking one also flushes what was carried forward.
        self.checkpoint()
        if self._checkpointed < kept:
            return 0
        self._journal.drop_first(count)
        self._derived.start_from(snapshot)
        self._reader.cache.clear()
        log.info("segments dropped", extra={"count": count, "journal_start": self.start})
        return count

    def close(self) -> None:
        """Flush, checkpoint, and leave; the next start has nothing to recover. Safe to call twice."""
        if self._closed:
            return
        try:
            if self._journal.failure is None:
                self.checkpoint()
                self._journal.close()
                unmark_running(self._files)
        finally:
            self._closed = True
            self._journal.close()
            self._pool.close()
            self._files.unlock()


def _repeated(items: Sequence[Batch | Event], placements: list[Placement | None], index: int, place: Any) -> Placement:
    """The answer for a batch that was written before."""
    batch = items[index]
    assert isinstance(batch, Batch)
    if isinstance(place, int):
        first = placements[place]
        assert first is not None
        return Placement(
            batch.topic, batch.queue, first.first_offset, first.count, first.unit_start, first.unit_end, True
        )
    return Placement(
        batch.topic, batch.queue, place.first_queue_offset, place.count, place.unit_start, place.unit_end, True
    )
