"""The message store: one journal, and everything derived from it, behind one door.

One owner calls everything here, from one thread at a time; `FlushTicket.run` and `CheckpointPlan.write` alone may run
in another thread meanwhile. `group_commit.GroupCommit` is an owner for callers from many threads. The store writes;
`MessageStore.queries` answers questions.

What always holds: `append` puts units into the page cache and gives every batch its place; a batch may be acknowledged
once `visible` has reached its `unit_end`; for `FLUSHED` that takes a `flush`. After a failed flush nothing is written,
nothing more becomes visible, and every call says `StoreFailed`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from dmq.clock import Clock, SystemClock
from dmq.errors import Damaged, DiskFull, DMQError, InvalidSettings, StorageError, StoreClosed, TopicExists
from dmq.event_log import EventLog
from dmq.model import QUEUES_MAX, Durability, TopicConfig, check_name
from dmq.settings import StoreSettings
from dmq.storage.delay.wheel import Delay
from dmq.storage.disk_space import DiskSpace
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Buffer, Files, is_refusal
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.journal.journal import FlushTicket, SegmentRead
from dmq.storage.journal.scanner import Scanner, UnitsRead, units_at
from dmq.storage.journal.unit import HEADER_BYTES, Unit, read_header
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.journal.unit_writer import Beginning, Lone, Writer
from dmq.storage.queries import Queries
from dmq.storage.read.read_failures import ReadFailures
from dmq.storage.read.reader import Reader
from dmq.storage.replica import LastUnit, Replica
from dmq.storage.state.events import EpochStarted, Event, PositionSet, TopicDropped, TopicPut
from dmq.storage.state.state import EpochTable, Topic
from dmq.storage.upkeep import retention
from dmq.storage.upkeep.checkpointer import CheckpointPlan
from dmq.storage.upkeep.damage import Damage
from dmq.storage.upkeep.directory import Disk, Opened, mark_running, open_directory, rebuild, unmark_running
from dmq.storage.upkeep.recovery import Recovered, epochs_in, units_from
from dmq.storage.upkeep.retention import Retention

__all__ = ["FlushTicket", "Leading", "MessageStore"]

log = EventLog(__name__)

_UNITS_BUFFERED_MAX: Final = 50_000
_NO_SERVER: Final = bytes(6)


class Leading(NamedTuple):
    """What a member leads with: its replica, and the epoch it has won."""

    replica: Replica
    epoch: int


class MessageStore:
    """A data directory that is open for writing. `queries` is what can be asked of it, `damage` what cannot be read."""

    def __init__(
        self,
        source: Files | Leading,
        settings: StoreSettings | None = None,
        clock: Clock | None = None,
        *,
        server: bytes = _NO_SERVER,
        checkpoint_inline: bool = True,
        new_epoch: bool = False,
    ) -> None:
        """Open a data directory, recovering it if need be; or take over a replica of a shard, to lead it.

        Parameters:
            source: the directory; or the replica to take over, and the epoch that its member has won. Nothing that is
                written becomes visible before `confirm_replicated` then, whatever durability is asked for.
            settings: defaults if left out.
            clock: the machine's if left out.
            server: this broker's IPv4 address and port, six bytes, stamped into records.
            checkpoint_inline: take checkpoints within `append` when they are due; without it the owner asks
                `checkpoint_due` and calls `checkpoint`, or its three steps, when it suits.
            new_epoch: begin a new epoch also after a clean end, as a broker must, whose leases do not outlive it.

        Raises:
            DirectoryInUse, WrongFormat, ForeignFile, NoPermission, DiskFull, StorageError.
        """
        self.settings = settings or StoreSettings()
        self._clock = clock or SystemClock()
        self.files = files = source.replica.files if isinstance(source, Leading) else source
        self._inline = checkpoint_inline
        self._plan: CheckpointPlan | None = None  # a checkpoint being written
        self._topic_id = 0  # the last one given to a topic in this run
        self._closed = False
        self._quiet_for_retention = False
        if isinstance(source, Leading):
            self._take_over(source, server)
            return
        self._pool = FilePool(files, self.settings.files_open_max)
        self._disk = Disk(files, self._pool, self.settings)
        files.lock()
        try:
            self.space = DiskSpace(files, self.settings)
            self._open_full(server, new_epoch)
            self.space.begin()
        except BaseException:
            self._pool.close()
            files.unlock()
            raise

    def _open_full(self, server: bytes, new_epoch: bool) -> None:
        """Open the directory, also on a full disk: what recovery has to write may take the room of the ballast."""
        try:
            self._open(server, new_epoch)
        except DiskFull:
            if not self.space.ran_out():
                raise
            self._pool.close()
            self._pool = FilePool(self.files, self.settings.files_open_max)
            self._disk = Disk(self.files, self._pool, self.settings)
            self._open(server, new_epoch)

    def _open(self, server: bytes, new_epoch: bool) -> None:
        began = time.monotonic()
        opened = open_directory(self._disk)
        try:
            self._start(opened, server, opened.unclean or new_epoch)
        except BaseException:
            opened.journal.close()
            raise
        _tell_opened(self.files, opened, time.monotonic() - began)

    def _take_over(self, leading: Leading, server: bytes) -> None:
        """Begin an epoch on top of a replica; its whole journal is the truth now, committed or not."""
        replica = leading.replica
        self._disk, self._pool, self.space = replica.disk, replica.disk.pool, replica.space
        opened = replica.give_away()
        try:
            begin = Beginning(
                server=server,
                epoch=leading.epoch,
                stored_at_ms=opened.recovered.stored_at_ms,
                next_offset=opened.next_offset,
                needs_segment=opened.needs_segment,
                space=self.space,
                replicates=True,
                tail=units_from(Scanner(opened.journal), opened.derived.applied),
            )
            self._begin(opened, begin)
            self.append([EpochStarted(leading.epoch, replica.membership.replica_id)])
            self._derived.state.keep_lags()
        except BaseException:
            self.abandon()
            raise

    def _start(self, opened: Opened, server: bytes, new_epoch: bool) -> None:
        mark_running(self.files)
        begin = Beginning(
            server=server,
            epoch=max(1, opened.recovered.epoch + new_epoch),
            stored_at_ms=opened.recovered.stored_at_ms,
            next_offset=opened.next_offset,
            needs_segment=opened.needs_segment,
            space=self.space,
        )
        self._begin(opened, begin)
        if new_epoch:
            try:
                self.append([EpochStarted(self._writer.epoch)])
                self.flush()
            except DiskFull as error:
                log.warning("disk full at start", error=error)
        if self._checkpointed != self._journal.end:
            self._try_checkpoint()
        self._derived.state.keep_lags()

    def _begin(self, opened: Opened, begin: Beginning) -> None:
        self._journal = opened.journal
        self._derived = opened.derived
        self._checkpointer = opened.checkpointer
        self.recovered = opened.recovered
        self._flushed_at = self._checkpointed_at = self._clock.monotonic()
        self.retention = Retention(self._journal, self.settings)
        self._delays_left: list[Delay] = []  # of segments about to go, still to be carried forward
        self.is_retaining = False  # segments are about to go, and not all of what is wanted of them is carried
        self.read_failures = ReadFailures(self._clock.monotonic)
        self._reader = Reader(self._journal, self._derived, self.settings.read_cache_bytes, failures=self.read_failures)
        self._writer = Writer(
            self._journal, self._derived, self._reader.cache, self.settings, clock=self._clock, begin=begin
        )
        self.visibility = self._writer.visibility
        self.queries = Queries(
            self._pool,
            self._journal,
            self._derived,
            writer=self._writer,
            reader=self._reader,
            rebuild=self._rebuild,
        )
        self.damage = Damage(
            self._journal,
            lambda: self._derived,
            lambda: self._rebuild(DerivedDamaged("damage was passed over")),
            failures=self.read_failures,
        )
        self.queries.may_be_mended = self.damage.may_be_mended
        self._checkpointed = -1 if self._checkpointer.in_force is None else self._checkpointer.in_force.offset

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed: open it again")
        self._journal.check()

    def look(self) -> None:
        """See to the disk: how full it is, and whether the journal is still there. Costs some microseconds.

        Raises:
            StoreFailed: the journal is gone; the store takes no more writes.
        """
        self._journal.look()
        self.space.look()

    @property
    def has_failed(self) -> bool:
        """Whether a flush failed or the journal is gone, so that nothing is written any more."""
        return self._journal.failure is not None

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring."""
        state, visibility = self._derived.state, self._writer.visibility
        return {
            "journal_start": self._journal.start,
            "journal_end": self._journal.end,
            "visible": visibility.visible,
            "flushed": visibility.flushed,
            "archived": state.archived,
            "epoch": self._writer.epoch,
            "segments": len(self._journal.segments),
            "topics": len(state.topics_by_id) - 2,
            "queues": len(state.next),
            "producers": len(state.producers),
            "transactions": len(state.transactions),
            "delays": self._derived.wheel.pending,
            "damage": len(self._derived.damage),
            "read_failures": self.read_failures.count,
            "doubtful": len(self.read_failures),
            "refusing": self.space.is_refusing,
            "failed": self.has_failed,
        }

    # --- topics -----------------------------------------------------------------------------------------------------

    def create_topic(self, name: str, config: TopicConfig | None = None, *, system: bool = False) -> Topic:
        """Create a topic; durable when this returns.

        Raises:
            TopicExists, InvalidName, StorageError.
        """
        self._append_flushed([self.creation(name, config, system=system)])
        return self.queries.topic(name)

    def creation(self, name: str, config: TopicConfig | None = None, *, system: bool = False) -> TopicPut:
        """The event that creates a topic, for an owner that writes it with others; until then there is none.

        Raises:
            TopicExists, InvalidName, InvalidSettings.
        """
        config = config or TopicConfig()
        check_name(name, "topic", system=system)
        if not 1 <= config.queues <= QUEUES_MAX:
            raise InvalidSettings(f"a topic has 1 to {QUEUES_MAX} queues, not {config.queues}", topic=name)
        if name in self._derived.state.topics:
            raise TopicExists(f"topic {name!r} already exists: choose another name or update it", topic=name)
        # One that was given out may be on its way to the disk, or never get there; no other topic gets its number.
        self._topic_id = max(self._topic_id + 1, self._derived.state.next_topic_id)
        return TopicPut(self._topic_id, name, config)

    def change(self, name: str, config: TopicConfig) -> TopicPut:
        """The event that changes a topic's settings; queues can only be added. See `creation`."""
        topic = self.queries.topic(name)
        if not topic.config.queues <= config.queues <= QUEUES_MAX:
            raise InvalidSettings(
                f"topic {name!r} has {topic.config.queues} queues: it can get more, up to {QUEUES_MAX}, but not fewer",
                topic=name,
            )
        slot = (topic.incarnation, topic.slots_version, topic.is_removed)
        return TopicPut(topic.id, name, config, *slot)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its messages and positions; durable when this returns."""
        self._append_flushed([TopicDropped(self.queries.topic(name).id)])

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
            UnknownTopic, InvalidMessage, SequenceConflict, OutOfOrder, StaleEpoch, LimitReached: nothing was written.
            DiskFull, StorageError: units before the failing one were written, nothing of the others;
                `detail["placed"]` has the placement of each item that was, by its index. StoreFailed has none.
        """
        self._check_open()
        placements = self._writer.append(items, durability, atomic=atomic)
        if self._inline and self.checkpoint_due:
            self._try_checkpoint()
        return placements

    def append_each(self, items: Sequence[Batch | Event], durability: Durability) -> list[Placement | DMQError]:
        """As `append`, for items that have nothing to do with each other: one at fault harms no other.

        Returns where each went, or why it was not written.

        Raises:
            DiskFull, StorageError: as `append`.
        """
        self._check_open()
        outcomes = self._writer.append_each(items, durability)
        if self._inline and self.checkpoint_due:
            self._try_checkpoint()
        return outcomes

    def append_lone(
        self, lones: list[Lone], durability: Durability, written: Callable[[Unit], None] | None = None
    ) -> Unit:
        """`append_each` for messages that came one by one, all in one unit, where nothing is unusual.

        Parameters:
            written: called with the unit once it is in the journal, before it is applied, so that an answer is on its
                way meanwhile. It must not look at the store.

        Raises:
            Unusual, StaleEpoch, SequenceConflict: nothing was changed: `append_each` decides.
            DiskFull, StorageError: nothing was written.
        """
        if self._closed:
            self._check_open()  # the writer asks whether it has failed
        assert not self._inline, "a checkpoint may be due"
        return self._writer.append_lone(lones, durability, written)

    def append_batch(self, batch: Batch, durability: Durability, written: Callable[[Unit], None] | None = None) -> Unit:
        """`append_each` for one batch, where nothing is unusual. As `append_lone`; raises OutOfOrder as well."""
        if self._closed:
            self._check_open()
        assert not self._inline, "a checkpoint may be due"
        return self._writer.append_batch(batch, durability, written)

    def _append_flushed(self, items: Sequence[Batch | Event], *, atomic: bool = False) -> None:
        self.append(items, Durability.FLUSHED, atomic=atomic)
        self.flush()

    def begin_flush(self) -> FlushTicket:
        """What to flush to make everything written so far durable; `run` it, then call `finish_flush`."""
        if self._closed:
            self._check_open()  # the journal says whether it has failed
        return FlushTicket(self._journal)

    def finish_flush(self, ticket: FlushTicket, error: StorageError | None = None) -> None:
        """The flush is done, or has failed; then this raises StoreFailed."""
        self._writer.finish_flush(ticket, error)
        self._flushed_at = self._clock.monotonic()

    def flush(self) -> None:
        """Make everything written so far durable.

        Raises:
            StoreFailed: it could not be; the store takes no more writes.
        """
        self._check_open()
        self._writer.flush()
        self._flushed_at = self._clock.monotonic()

    @property
    def epochs(self) -> EpochTable:
        """The newest epochs of the whole journal, the part included that is not committed."""
        table = EpochTable(self._derived.state.epochs)
        for unit in self._writer.visibility.pending:
            for row in epochs_in(unit):
                table.began(row)
        return table

    def journal_bytes(self, offset: int, max_bytes: int) -> Buffer:
        """Whole units of one segment, verbatim, committed or not, from one that starts at an offset: at least one.

        Empty at the end of the journal.

        Raises:
            Damaged: no unit can be read there.
        """
        self._check_open()
        return units_at(self._journal, offset, max_bytes)

    def plan_read(self, offset: int, size: int) -> SegmentRead | None:
        """Journal bytes of one segment that another thread is to read, not verified; None where there are none."""
        self._check_open()
        return self._journal.plan_read(offset, size)

    def units_in_memory(self, offset: int, max_bytes: int) -> list[Buffer]:
        """Whole units from one that starts at an offset on, without a disk; none if they are not in memory."""
        self._check_open()
        return self._reader.cache.units_from(offset, max_bytes)

    def plan_units(self, offset: int, max_bytes: int, *, is_checked: bool) -> UnitsRead:
        """What `journal_bytes` reads, for another thread.

        Raises:
            Damaged: no segment has the offset.
        """
        read = self.plan_read(offset, max_bytes)
        if read is None:
            raise Damaged(f"no segment has journal offset {offset}", start=offset, end=offset)
        return UnitsRead(read, offset, self._journal.id, is_checked)

    def check_unit(self, start: int) -> None:
        """Look at a visible unit on disk: if it cannot be read, `damage` has it afterwards."""
        if self._journal.start <= start < self._writer.visibility.visible:
            with contextlib.suppress(Damaged):
                self.queries.healed(lambda: self._reader.unit_at(start))

    def unit_before(self, offset: int) -> LastUnit | None:
        """The unit that ends at a journal offset; None if none is known to."""
        for unit in reversed(self._writer.visibility.pending):
            if unit.end == offset:
                return LastUnit(unit.header.epoch, unit.header.crc)
        if not self._journal.start < offset <= self._derived.applied:
            return None
        start = self.queries.healed(lambda: self._derived.lookup.unit_holding(offset - 1))
        try:
            header = read_header(self._journal.read_available(start, HEADER_BYTES))
        except StorageError as error:
            if not is_refusal(error):
                raise
            return None
        return None if header is None or start + header.length != offset else LastUnit(header.epoch, header.crc)

    def confirm_replicated(self, offset: int) -> None:
        """Every in-sync replica has everything below a journal offset, flushed."""
        self._writer.confirm_replicated(offset)

    def set_position(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Put a group at an offset; written with the next flush."""
        self.append([PositionSet(group, self.queries.queue(topic, queue)[0].id, queue, offset)])

    # --- delays -----------------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int, fragments: Iterable[int] | None = None) -> list[Delay]:
        """Delayed records that are due; the caller's until a DelaysDone event names them or they are released."""
        return self.queries.healed(lambda: self._derived.wheel.take(now_ms, limit, fragments))

    def claim_delay(self, due_ms: int, offset: int) -> bool:
        """Take one pending delayed record, due or not, as `take_due` does; False if it is not to be had."""
        return self.queries.healed(lambda: self._derived.wheel.claim(due_ms, offset))

    def release_due(self, offsets: Iterable[int]) -> None:
        """Delayed records that could not be delivered; they stay pending."""
        self._derived.wheel.release(offsets)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    @property
    def wants_quiet(self) -> bool:
        """Whether a segment has to end, or segments to go, which waits until everything written is committed.

        In a shard under load that is never so by itself: the owner holds further writes until it is, calls `retain`,
        and goes on.
        """
        return self._is_catching_up and (self._quiet_for_retention or self._writer.is_segment_over)

    @property
    def is_ahead_of_checkpoint(self) -> bool:
        """Whether anything was written since the last checkpoint."""
        return self._checkpointed != self._journal.end

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
        try:
            self._write_checkpoint()
        except DerivedDamaged as error:
            self._rebuild(error)

    def _write_checkpoint(self) -> None:
        plan = self.begin_checkpoint()
        if plan is None:
            return
        try:
            plan.write()
        except BaseException as error:
            self._end_checkpoint(plan, error)
            raise
        else:
            self._end_checkpoint(plan, None)

    @property
    def _is_catching_up(self) -> bool:
        """Whether units were written that are not visible yet."""
        return self._writer.visibility.visible != self._journal.end

    def begin_checkpoint(self) -> CheckpointPlan | None:
        """Set aside what a checkpoint writes, the flush of the journal included; in a shard, of what is committed.

        None while another checkpoint is being written.
        """
        self._check_open()
        if self._plan is not None:
            return None
        if self._is_catching_up and not self._writer.replicates:
            self.flush()
        self._derived.state.forget_producers(self._clock.now_ms())
        self._checkpointed_at = self._clock.monotonic()
        writer = self._writer
        plan = self._checkpointer.begin(
            self._derived, self._journal.start, writer.epoch, writer.stored_at_ms, flush=FlushTicket(self._journal)
        )
        self._pool.hold()
        self._plan = plan
        return plan

    def finish_checkpoint(self, plan: CheckpointPlan, error: BaseException | None = None) -> None:
        """The plan was written, or could not be; where a derived file was found to be wrong, all are built anew.

        Raises:
            StoreFailed: the journal could not be flushed; the store takes no more writes.
        """
        self._end_checkpoint(plan, error)
        if isinstance(error, DerivedDamaged) and not plan.is_stale:
            self._rebuild(error)

    def _end_checkpoint(self, plan: CheckpointPlan, error: BaseException | None) -> None:
        self._pool.release()
        self._plan = None
        if error is not None and not plan.is_stale:
            plan.abandon()
            # Each try has files of its own: those of one that failed would fill what is left of a full disk.
            with contextlib.suppress(StorageError):
                self._checkpointer.remove_strays(self._derived)
        if plan.flush is not None and (plan.is_flushed or plan.flush_error):
            self.finish_flush(plan.flush, plan.flush_error)
        if error is None and not plan.is_stale:  # stale: everything was built anew meanwhile
            self._checkpointer.finish(plan, self._derived)
            self._checkpointed = plan.checkpoint.offset

    def _try_checkpoint(self, *, rebuilt: bool = False) -> None:
        try:
            # What was just built anew is not built anew again, or a bad disk would keep us at it for ever.
            self._write_checkpoint() if rebuilt else self.checkpoint()
        except StorageError as error:
            # Nothing is lost: the journal has it all, and the next checkpoint covers this one's part.
            self._checkpointed = self._derived.applied
            log.error("checkpoint failed", once_for=(), error=error)

    def _rebuild(self, error: DerivedDamaged) -> None:
        """A derived file is wrong: build all of them anew, and go on."""
        log.error("derived files damaged", error=error)
        if self._plan is not None:
            self._plan.give_up()
        old, visible = self._derived, self._writer.visibility.visible
        scanner = Scanner(self._journal, passes=self.damage.ranges)
        derived, _ = rebuild(self._disk, scanner, self._checkpointer, Recovered(), end=visible, known_durable=visible)
        for unit in self._writer.visibility.pending:
            derived.state.remember_producers(unit)
        derived.wheel.take_over_flights(old.wheel)
        derived.state.keep_lags()
        self._derived = self._reader.derived = self._writer.derived = self.queries.derived = derived
        self._try_checkpoint(rebuilt=True)

    def tick(self) -> None:
        """What time alone makes due: flush what was only stored, checkpoint, retention. Call it every second or so."""
        now = self._clock.monotonic()
        if (
            self._writer.visibility.flushed < self._journal.end
            and now - self._flushed_at >= self.settings.flush_seconds
        ):
            self.flush()
        if self.is_ahead_of_checkpoint and now - self._checkpointed_at >= self.settings.checkpoint_seconds:
            self._try_checkpoint()
        self.space.look()
        self.retain()

    def retain(self, carried_max: int = sys.maxsize) -> int:
        """Drop segments that are not wanted any more; returns how many.

        Parameters:
            carried_max: how much that is still wanted of them may be written again now. If that is not all of it, none
                goes, `is_retaining` is true afterwards, and the next call goes on.
        """
        if self.is_retaining and self._is_catching_up:
            self.flush()  # what was carried before is not to be carried again
        self.is_retaining = False
        try:
            return self._retain(carried_max)
        except DerivedDamaged as error:
            self._rebuild(error)
            return 0  # the next call goes on

    def _retain(self, carried_max: int) -> int:
        now_ms = self._clock.now_ms()
        if self.space.is_crowded and self.retention.is_past(self._writer.stored_at_ms, now_ms):
            self._end_segment()
        going = self.retention.going(self._derived, self.space.usage, now_ms)
        if going is None:
            return 0
        if self._is_catching_up:
            # What was ended by a unit that is not visible yet must not be carried forward behind it.
            self.flush()
            if self._is_catching_up:
                self._quiet_for_retention = True
                return 0
        self._quiet_for_retention = False
        end = self._journal.end
        lost: list[int] = []
        if not self._carry(going, carried_max, lost):
            self.is_retaining = True
            return 0
        if any(self.damage.may_be_mended(offset, offset + 1) for offset in lost):
            log.warning(
                "retention waits: messages that it carries forward cannot be read for now", once_for=(), count=len(lost)
            )
            return 0
        if self._writer.replicates and self._journal.end != end:
            # The next leader may not have what was carried: it must not be gone from where it was.
            self._quiet_for_retention = self.is_retaining = True
            return 0
        # The checkpoint in force should not need what goes, or the next start must build everything anew.
        in_force = self._checkpointer.in_force
        if in_force is None or in_force.offset < going.kept_from:
            try:
                self.checkpoint()
            except DiskFull as error:
                log.warning("no space for a checkpoint before segments go", once_for=(), error=error)
        self.flush()
        self.retention.tell(going, self._derived, now_ms)
        self._derived.begin_at(going.kept_from, going.firsts)
        self._reader.cache.clear()
        self._journal.drop_first(going.segments)
        self.space.look()
        return going.segments

    def _end_segment(self) -> None:
        """All of the last segment is past the retention: while it is the last one, it cannot go."""
        tail, newest_ms = self._journal.tail, self._writer.stored_at_ms
        with contextlib.suppress(DiskFull):
            self._writer.end_segment()
        if self._journal.tail is not tail:
            tail.newest_ms = newest_ms

    def _carry(self, going: retention.Going, carried_max: int, lost: list[int]) -> bool:
        """Write again what is still wanted of segments about to go; returns whether that was all but what is `lost`."""
        is_all = not self._delays_left
        if is_all:
            found = self._derived.wheel.pending_between(going.start, going.kept_from, retention.DELAYS_AT_ONCE)
            is_all = len(found) < retention.DELAYS_AT_ONCE
            self._delays_left = found[::-1]
        now_ms = self._clock.now_ms()
        wanted = retention.carried_forward(
            self._derived, self._reader, going, self._delays_left, lost=lost, now_ms=now_ms
        )
        try:
            for count, items in enumerate(wanted, 1):
                self._writer.append(items, Durability.FLUSHED, atomic=True, upkeep=True)
                if count == carried_max:
                    return False
        except DMQError:
            self._delays_left = []  # the one that was not written is to be found again
            raise
        return is_all

    def close(self) -> None:
        """Flush, checkpoint, and leave; the next start has nothing to recover. Safe to call twice."""
        if self._closed:
            return
        try:
            if self._journal.failure is None:
                self._leave()
        finally:
            self._closed = True
            self.queries.close()
            self._journal.close()
            self._pool.close()
            self.files.unlock()

    def abandon(self) -> None:
        """Leave the directory as it is: a leader that was deposed writes nothing any more. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._plan is not None:
            self._plan.give_up()
        self.queries.close()
        self._journal.close()
        self._pool.close()
        self.files.unlock()

    def _leave(self) -> None:
        try:
            self.checkpoint()
        except (StorageError, OSError) as error:
            if self.has_failed:
                raise
            # The next start replays the journal from the checkpoint in force, as after a crash.
            log.warning("the last checkpoint could not be written: the next start reads more", error=error)
            self.flush()
            return
        self._journal.close()
        unmark_running(self.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tell_opened(files: Files, opened: Opened, seconds: float) -> None:
    found = opened.recovered
    facts: dict[str, Any] = {
        "data": files.describe(""),
        "journal_bytes": opened.journal.end - opened.journal.start,
        "units_checked": found.units,
        "bytes_checked": found.bytes_read,
        "seconds": round(seconds, 3),
    }
    if opened.unclean:
        log.warning(
            "store recovered after a crash",
            **facts,
            bytes_cut=found.cut_bytes,
            salvage=",".join(found.salvaged) or None,
            rebuilt=found.rebuilt,
            damaged_ranges=len(opened.derived.damage),
        )
    else:
        log.info("store opened", **facts)
