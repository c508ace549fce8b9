"""The replica: a data directory that follows the journal of its shard's leader.

It writes nothing of its own. It takes the leader's units as they are, byte for byte, and applies them to what is
derived once they are committed, so that what is derived never has to be undone: what was taken and turns out not to be
part of the shard's history is cut. A member that becomes leader hands its replica to a `MessageStore`; a leader that is
deposed closes its store and opens the directory as a replica again.

One owner calls everything here, from one thread at a time; `FlushTicket.run` and `CheckpointPlan.write` alone may run
in another thread meanwhile, as with the store.

What always holds: applied <= committed, applied <= end; nothing below `applied` is ever cut, unless the shard was
promoted with loss; bytes below `end` are the leader's; a cut is durable, and what was cut is kept in `salvage/`, before
anything is taken again; after a failed flush nothing is taken any more. Units that were taken and wait to be committed
are kept in memory, up to a bound, so that they need not be read back.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from dmq.clock import Clock, SystemClock
from dmq.errors import Damaged, Diverged, InvalidSettings, RecordCorrupt, StorageError, StoreClosed
from dmq.event_log import EventLog
from dmq.settings import StoreSettings
from dmq.storage.disk_space import DiskSpace
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Buffer, Files
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.journal.journal import FOLDER as JOURNAL_FOLDER
from dmq.storage.journal.journal import FlushTicket, SegmentRead, list_segments
from dmq.storage.journal.scanner import Scanner, units_at
from dmq.storage.journal.unit import HEADER_BYTES, SNAPSHOT, Header, Unit, is_intact, parse_unit, read_header
from dmq.storage.state.derived import Derived
from dmq.storage.state.state import EpochTable
from dmq.storage.upkeep.checkpointer import CheckpointPlan
from dmq.storage.upkeep.damage import Damage
from dmq.storage.upkeep.directory import Disk, Opened, mark_running, open_replica, rebuild
from dmq.storage.upkeep.identity import (
    FORMAT,
    Identity,
    Membership,
    Residence,
    read_identity,
    write_identity,
    write_record,
)
from dmq.storage.upkeep.recovery import SALVAGE, Recovered, cut_journal, epochs_in, start_derived

__all__ = ["LastUnit", "Replica", "join"]

log = EventLog(__name__)

_KEPT_BYTES_MAX: Final = 16 << 20  # of units that are not applied; what is beyond that is read back
# A checkpoint flushes half a dozen files, and what is written meanwhile waits for the disk. One that fetches a long
# journal takes fewer: its next start reads so much more.
_FAR_TIMES: Final = 8
_FAR_UNITS_MAX: Final = 400_000  # whose index is in memory then


class LastUnit(NamedTuple):
    """What the next unit must follow: the epoch and the checksum of the one before it."""

    epoch: int
    crc: int


def _draw() -> int:
    return secrets.randbits(64)


def join(
    files: Files, *, cluster: str, shard: str, journal_id: int | None = None, draw: Callable[[], int] = _draw
) -> Identity:
    """Make a data directory a member of a shard, under a replica id of its own.

    A directory that has a journal brings it along: it is the first of its shard, or an earlier member of it.

    Parameters:
        files: the directory, which nobody has open.
        journal_id: of the shard's journal; None for the first member, which gives the shard its own.
        draw: a number of 64 bits that nobody has drawn before.

    Raises:
        InvalidSettings: the directory has another journal.
        WrongFormat, StorageError: it cannot be used.
    """
    try:
        before = read_identity(files)
    except ValueError as error:
        raise InvalidSettings(f"{files.describe('')} has an identity that {error}: mend it before it joins") from error
    if before is not None and journal_id is not None and before.journal_id != journal_id and not list_segments(files):
        before = None  # it has an id, and nothing that bears it
    if before is not None and journal_id is not None and before.journal_id != journal_id:
        raise InvalidSettings(
            f"{files.describe('')} holds journal {before.journal_id:016x}, and shard {shard!r} has {journal_id:016x}: "
            "choose an empty directory",
            path=files.describe(""),
        )
    own = before.journal_id if before is not None else journal_id or draw() or 1
    member = Membership(cluster=cluster, shard=shard, replica_id=draw() or 1)
    identity = Identity(FORMAT, own, member)
    write_identity(files, identity)
    return identity


class Replica:
    """The journal of a follower, and what is derived from its committed part.

    Attributes:
        end: where the journal ends; the next unit starts there.
        flushed: everything below would survive a power loss.
        last: of the last unit; None where that is not known, because the journal is empty.
        recovered: what opening found.
        damage: what of the committed part cannot be read.
    """

    def __init__(
        self,
        files: Files,
        settings: StoreSettings | None = None,
        clock: Clock | None = None,
        *,
        new_life: bool = True,
    ) -> None:
        """Open the directory of a member.

        Parameters:
            new_life: this begins another life of it; not where the same process opens it again.

        Raises:
            InvalidSettings: it does not belong to a shard; see `join`.
            DirectoryInUse, WrongFormat, ForeignFile, NoPermission, DiskFull, StorageError.
        """
        self.files = files
        self.settings = settings or StoreSettings()
        self._clock = clock or SystemClock()
        self._plan: CheckpointPlan | None = None
        self._is_checkpoint_wanted = False  # so that segments can go
        self._checkpointed_at = self._clock.monotonic()
        self._closed = False
        files.lock()
        self.disk = Disk(files, FilePool(files, self.settings.files_open_max), self.settings)
        try:
            self.space = DiskSpace(files, self.settings)
            self._open(new_life)
            self.space.begin()
        except BaseException:
            self.disk.pool.close()
            files.unlock()
            raise

    def _open(self, new_life: bool) -> None:
        self._identity, opened, tail = open_replica(self.disk)
        self.journal = opened.journal
        self.derived = opened.derived
        self.recovered = opened.recovered
        self._checkpointer = opened.checkpointer
        self.damage = Damage(self.journal, lambda: self.derived, self._rebuild_mended)
        self._scanner = Scanner(self.journal)
        self.flushed = self.journal.end
        self._stored_at_ms = opened.recovered.stored_at_ms
        self._tail_epochs = tail.epochs
        self._kept: deque[tuple[Header, memoryview]] = deque()  # units taken, checked and not applied, oldest first
        self._kept_bytes = 0
        self._is_blank = not self.journal.segments  # what is derived begins with the first unit's snapshot
        self.last = self._last_unit() if tail.last is None else LastUnit(tail.last.epoch, tail.last.crc)
        if new_life:
            place = Residence(self.files.place(JOURNAL_FOLDER))
            self._identity = msgspec.structs.replace(self._identity, place=place)
            self._note(life=self.membership.life + 1)
        mark_running(self.files)
        if self.journal.segments:
            self.journal.open_tail()

    # --- whose it is ------------------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """As what the directory belongs to its shard."""
        assert self._identity.member is not None
        return self._identity.member

    @property
    def journal_id(self) -> int:
        """The same in all members of a shard."""
        return self._identity.journal_id

    def _note(self, **changes: int | bool) -> None:
        """Change the directory's own record of its membership; durable when this returns."""
        member = msgspec.structs.replace(self.membership, **changes)
        if member != self.membership:
            identity = msgspec.structs.replace(self._identity, member=member)
            write_identity(self.files, identity)
            self._identity = identity

    def saw_record(self, revision: int, record: bytes) -> None:
        """The shard's record was read, or written, with this revision: an older one is an old copy of the registry.

        Parameters:
            record: what was read. It is kept, so that a registry that is lost can be built anew.
        """
        if revision > self.membership.revision:
            write_record(self.files, record)
            self._note(revision=revision)

    def caught_up(self) -> None:
        """It has everything that a leader has: there is no doubt any more about what a cut took away."""
        self._note(doubtful=False)

    # --- where it stands --------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The first journal offset kept; where the first unit will be, if there is none."""
        return self.journal.start if self.journal.segments else self.journal.end

    @property
    def end(self) -> int:
        return self.journal.end

    @property
    def applied(self) -> int:
        """Everything below is committed and applied to what is derived."""
        return self.derived.applied

    @property
    def epochs(self) -> EpochTable:
        """The newest epochs of the whole journal, the part included that is not committed."""
        table = EpochTable(self.derived.state.epochs)
        for row in self._tail_epochs:
            table.began(row)
        return table

    def journal_bytes(self, offset: int, max_bytes: int) -> Buffer:
        """As `MessageStore.journal_bytes`."""
        self._check_open()
        return units_at(self.journal, offset, max_bytes)

    def plan_read(self, offset: int, size: int) -> SegmentRead | None:
        """As `MessageStore.plan_read`."""
        self._check_open()
        return self.journal.plan_read(offset, size)

    def _last_unit(self) -> LastUnit | None:
        if self.journal.end <= self.journal.start:
            return None
        start = self.derived.lookup.unit_holding(self.journal.end - 1)
        header = read_header(self.journal.read_available(start, HEADER_BYTES))
        return None if header is None else LastUnit(header.epoch, header.crc)

    # --- following --------------------------------------------------------------------------------------------------

    def take(self, raw: Buffer) -> None:
        """Append whole units of the leader's journal; they are in the page cache when this returns.

        A unit that opens a segment there opens one here, too, once everything before it is durable.

        Raises:
            RecordCorrupt: a unit is not what the leader wrote, or does not follow here. Those before it were taken.
            DiskFull, StorageError: it could not be written. Those before it were taken.
        """
        self._check_open()
        view = memoryview(raw)
        headers: list[Header] = []
        fault: RecordCorrupt | None = None
        at = 0
        epoch = 0 if self.last is None else self.last.epoch
        while at < len(view) and fault is None:
            try:
                header = self._checked(view, at, self.journal.end + at, epoch)
            except RecordCorrupt as error:
                fault = error
            else:
                headers.append(header)
                epoch = header.epoch
                at += header.length
        self._append(view, headers)
        if fault is not None:
            raise fault

    def _append(self, view: memoryview, headers: list[Header]) -> None:
        """Write units that were checked, all between two snapshots at once."""
        at = 0
        run: list[Header] = []
        for header in headers:
            if header.flags & SNAPSHOT:
                at = self._write(view, at, run)
                run = []
                raw = view[at : at + header.length]
                self._roll(raw, header)
                self._keep(header, raw)
                at += header.length
                self._took(header)
            else:
                run.append(header)
        self._write(view, at, run)

    def _write(self, view: memoryview, at: int, run: list[Header]) -> int:
        """Write a run of units that stand together; returns where they end."""
        if not run:
            return at
        end = at + sum(header.length for header in run)
        self.journal.append(view[at:end])
        for header in run:
            raw = view[at : at + header.length]
            if header.records == 1:  # an epoch begins with a unit of one event; others need not be parsed yet
                self._tail_epochs += epochs_in(parse_unit(header, raw))
            self._keep(header, raw)
            at += header.length
        self._took(run[-1])
        return end

    def _keep(self, header: Header, raw: memoryview) -> None:
        if self._kept_bytes + header.length <= _KEPT_BYTES_MAX:
            self._kept.append((header, raw))
            self._kept_bytes += header.length

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    def _took(self, header: Header) -> None:
        self.last = LastUnit(header.epoch, header.crc)
        self._stored_at_ms = max(self._stored_at_ms, header.stored_at_ms)

    def _checked(self, view: memoryview, at: int, offset: int, epoch: int) -> Header:
        header = read_header(view, at)
        if header is None or not is_intact(header, view, at):
            raise RecordCorrupt(f"what the leader sent for journal offset {offset} fails its checksum", offset=offset)
        if header.journal_id != self.journal.id or header.start != offset or header.epoch < epoch:
            raise RecordCorrupt(
                f"the leader's unit at {header.start}, epoch {header.epoch}, of journal {header.journal_id:016x} does "
                f"not follow here at {offset}, epoch {epoch}, of journal {self.journal.id:016x}",
                offset=offset,
            )
        if not (self.journal.segments or at or header.flags & SNAPSHOT):
            raise RecordCorrupt(f"a journal begins with a snapshot, and the unit at {offset} is none", offset=offset)
        return header

    def _roll(self, raw: memoryview, header: Header) -> None:
        if self.journal.segments:
            self.flush()
        self.journal.roll(header.start, raw, header.stored_at_ms)
        self.flushed = self.journal.end

    def look(self) -> None:
        """Raises StoreFailed if the journal was removed or moved while it is in use; nothing is taken any more then."""
        if self.journal.segments:
            self.journal.look()

    def begin_flush(self) -> FlushTicket:
        """What to flush to make everything taken so far durable; `run` it, then call `finish_flush`."""
        self._check_open()
        return FlushTicket(self.journal)

    def finish_flush(self, ticket: FlushTicket, error: StorageError | None = None) -> None:
        """The flush is done, or has failed; then this raises StoreFailed."""
        if error is not None:
            raise self.journal.flush_failed(error) from error
        self.flushed = max(self.flushed, ticket.end)

    def flush(self) -> None:
        """Make everything taken so far durable.

        Raises:
            StoreFailed: it could not be; nothing is taken any more.
        """
        ticket = self.begin_flush()
        try:
            ticket.run()
        except StorageError as error:
            self.finish_flush(ticket, error)
        self.finish_flush(ticket)

    def commit(self, offset: int) -> None:
        """Everything below a journal offset is committed: apply what of it is here.

        Raises:
            Damaged: a unit cannot be read back.
        """
        self._check_open()
        target = min(offset, self.journal.end)
        derived = self.derived
        if derived.applied < target:
            self._begin_derived()
        while derived.applied < target:
            unit = self._unit_at(derived.applied)
            if unit is None:
                raise Damaged(
                    f"the unit at journal offset {derived.applied} cannot be read back: it is to be fetched again",
                    start=derived.applied,
                    end=target,
                )
            if unit.end > target:
                break
            derived.apply(unit, recovered=True)
        if self._tail_epochs and self._tail_epochs[0].start < derived.applied:
            self._tail_epochs = [row for row in self._tail_epochs if row.start >= derived.applied]

    def _unit_at(self, offset: int) -> Unit | None:
        """The unit that begins at an offset, as it was taken if it is still in memory, else from the disk."""
        kept = self._kept
        while kept and kept[0][0].start < offset:
            self._kept_bytes -= kept.popleft()[0].length
        if kept and kept[0][0].start == offset:
            return parse_unit(*kept[0])
        return self._scanner.unit_at(offset)

    def _begin_derived(self) -> None:
        """What is derived begins with the snapshot that the journal opens with."""
        if self._is_blank and self.journal.segments:
            start_derived(self.derived, self._scanner)
            self._is_blank = False

    def cut(self, end: int, *, accept_loss: bool = False) -> None:
        """End the journal at an offset where a unit begins: what follows is not part of the shard's history.

        Parameters:
            accept_loss: cut also what is committed here, because the shard was promoted with loss.

        Raises:
            Diverged: it would cut what is committed here.
        """
        self._check_open()
        if end >= self.journal.end:
            return
        if end < self.derived.applied and not accept_loss:
            raise Diverged(
                f"the leader's journal parts from this one at {end}, and everything up to {self.derived.applied} is "
                "committed here: nothing is cut; find out which of them is right",
                end=end,
                committed=self.derived.applied,
            )
        if self._plan is not None:
            self._plan.give_up()
        self.journal.close()
        cut = self.journal.end - end
        log.warning("journal cut", end=end, bytes=cut, committed=self.derived.applied, kept_in=SALVAGE)
        try:
            self._cut(end)
        except StorageError as error:  # the tail is closed, and where the journal ends is not known
            raise self.journal.flush_failed(error) from error

    def _cut(self, end: int) -> None:
        self._forget_kept()
        cut_journal(self.journal, end, Recovered())
        self._scanner = Scanner(self.journal)
        self.flushed = self.journal.end
        self._tail_epochs = [row for row in self._tail_epochs if row.start < end]
        if end < self.derived.applied:
            self._checkpointer.forget_all()
            self._rebuild(self.journal.end)
        if self.journal.segments:
            self.journal.open_tail()
        self.last = self._unit_before_end()

    def distrust_tail(self) -> None:
        """What is not committed cannot be read back: it is cut, to be fetched again, and the member is doubtful."""
        self._note(doubtful=True)
        self.cut(self.derived.applied)

    def _unit_before_end(self) -> LastUnit | None:
        """The last unit after a cut: among those that are not applied, or the last one that is."""
        if self.journal.end == self.derived.applied:
            return self._last_unit()
        at, header = self.derived.applied, None
        while at < self.journal.end:
            header = read_header(self.journal.read_available(at, HEADER_BYTES))
            if header is None:
                return None
            at += header.length
        return None if header is None else LastUnit(header.epoch, header.crc)

    def start_over(self, first: int) -> None:
        """Forget everything: the leader has nothing any more of what should follow here.

        Parameters:
            first: where the leader's journal begins; its first unit is the next to be taken.
        """
        self._check_open()
        if self._plan is not None:
            self._plan.give_up()
        log.warning("journal begun anew", first=first, start=self.start, end=self.end)
        self._note(doubtful=True)
        self._forget_kept()
        self.journal.close()
        self._checkpointer.forget_all()
        journal = self.journal
        for segment in reversed(journal.segments[:]):  # what a crash leaves is whole up to its end
            journal.forget_reads(segment)
            self.files.unlink(segment.path)
            self.files.sync_dir(JOURNAL_FOLDER)
            journal.forget(segment)
        journal.end = journal.flushed = self.flushed = first
        self._scanner = Scanner(journal)
        self._tail_epochs = []
        self.last = None
        self.derived = Derived(*self.disk, first)
        self._is_blank = True

    def _rebuild(self, end: int) -> None:
        self.derived, _ = rebuild(self.disk, self._scanner, self._checkpointer, Recovered(), end=end, known_durable=end)

    def _rebuild_mended(self) -> None:
        if self._plan is not None:
            self._plan.give_up()
        self._rebuild(self.derived.applied)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    def is_checkpoint_due(self, *, is_far_behind: bool = False) -> bool:
        """Whether enough was applied since the last checkpoint, or it keeps segments that the leader has dropped.

        Parameters:
            is_far_behind: much is still to come of what is committed; checkpoints are rarer then.
        """
        if self._is_blank:
            return False
        if self._is_checkpoint_wanted:
            return True
        in_force = self._checkpointer.in_force
        since = self.journal.start if in_force is None else in_force.offset
        derived = self.derived
        return (
            derived.applied - since >= self.settings.checkpoint_bytes * (_FAR_TIMES if is_far_behind else 1)
            or derived.queues.buffered >= self.settings.checkpoint_records
            or derived.lookup.units_buffered >= _FAR_UNITS_MAX
        )

    def begin_checkpoint(self) -> CheckpointPlan | None:
        """Set aside what a checkpoint of the committed part writes; None while another one is being written.

        None also while nothing is known to be committed of a journal that was begun anew: the state that its first
        snapshot has is not taken yet, and a checkpoint without it would stand for it after the next start.
        """
        self._check_open()
        if self._plan is not None or self._is_blank or not self.journal.segments:
            return None
        self._is_checkpoint_wanted = False
        epoch = self.recovered.epoch if self.last is None else self.last.epoch
        self._plan = self._checkpointer.begin(
            self.derived, self.journal.start, epoch, self._stored_at_ms, flush=self.begin_flush()
        )
        self.disk.pool.hold()
        return self._plan

    def finish_checkpoint(self, plan: CheckpointPlan, error: BaseException | None = None) -> None:
        """The plan was written, or could not be; where a derived file was found to be wrong, all are built anew.

        Raises:
            StoreFailed: the journal could not be flushed; nothing is taken any more.
        """
        self.disk.pool.release()
        self._plan = None
        if error is not None and not plan.is_stale:
            plan.abandon()
        if plan.flush is not None and (plan.is_flushed or plan.flush_error) and not plan.is_stale:
            self.finish_flush(plan.flush, plan.flush_error)
        if error is None and not plan.is_stale:
            self._checkpointer.finish(plan, self.derived)
        elif isinstance(error, DerivedDamaged) and not plan.is_stale:
            log.error("derived files damaged", error=error)
            self._rebuild(self.derived.applied)

    def checkpoint(self) -> None:
        """Write what is derived from the committed part.

        Raises:
            StorageError: it could not be written; the replica works on without it.
        """
        plan = self.begin_checkpoint()
        if plan is None:
            return
        failure: BaseException | None = None
        try:
            plan.write()
        except BaseException as error:
            failure = error
            raise
        finally:
            self.finish_checkpoint(plan, failure)

    def drop_before(self, first: int) -> int:
        """Drop the segments that the leader has dropped; returns how many.

        Parameters:
            first: where the leader's journal begins. Segments go only if what is derived covers them by then.
        """
        self._check_open()
        segments = self.journal.segments
        if not segments or segments[0].end > first:  # nearly always
            return 0
        count = sum(1 for segment in segments if segment.end <= min(first, self.derived.applied))
        count = min(count, len(segments) - 1)
        in_force = self._checkpointer.in_force
        if count <= 0:
            return 0
        if in_force is None or in_force.offset < segments[count].start:
            self._is_checkpoint_wanted = True
            return 0
        unit = self._scanner.unit_at(segments[count].start)
        if unit is None or not unit.header.flags & SNAPSHOT:
            return 0
        derived = self.derived
        derived.begin_at(segments[count].start, derived.firsts_of(derived.snapshot_in(unit)))
        self.journal.drop_first(count)
        return count

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the replica is closed: open it again")
        self.journal.check()

    def give_away(self) -> Opened:
        """A store takes it over: nothing may be asked of it any more, and it leaves files and lock alone.

        Everything taken must be flushed.
        """
        self._check_open()
        assert self.flushed == self.journal.end
        self._closed = True
        self._forget_kept()
        if self._plan is not None:
            self._plan.give_up()
        self._begin_derived()
        self.journal.close()  # the writer opens the tail for itself
        self.recovered.stored_at_ms = self._stored_at_ms
        return Opened(
            self.journal,
            self.derived,
            self._checkpointer,
            self.recovered,
            next_offset=self.journal.end,
            unclean=False,
        )

    def end_life(self) -> None:
        """Close it for good: a copy that is made from now on has everything, one that was made before has not."""
        if not self._closed:
            place = msgspec.structs.replace(self._identity.place, closed=True)
            with contextlib.suppress(StorageError):
                write_identity(self.files, msgspec.structs.replace(self._identity, place=place))
        self.close()

    def close(self) -> None:
        """Leave the directory as it is. Safe to call twice, and after `give_away`."""
        if self._closed:
            return
        self._closed = True
        self.journal.close()
        self.disk.pool.close()
        self.files.unlock()
