"""Recovery: from whatever a crash left to a journal that can be written to, and everything derived from it.

The checkpoint, if it is good, tells where to begin; units from there on are verified and applied. A unit that fails its
check is a torn tail (cut, kept in `salvage/`) or damage (passed over, reported, never cut): see `journal.scanner`. If
the checkpoint or a file it names is wrong, everything derived is built anew from the journal's first snapshot.

What always holds: the bytes recovery keeps are durable when it returns, even if an fsync failed before the crash,
because the part not known to be durable is written again before it is flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from dmq.errors import StorageError
from dmq.storage.files import Files, read_readable, write_whole
from dmq.storage.journal.journal import FOLDER, Journal, Segment
from dmq.storage.journal.scanner import Scanner
from dmq.storage.journal.unit import SNAPSHOT, Header, Unit
from dmq.storage.state.derived import Checkpoint, Derived, event_of
from dmq.storage.state.events import EpochStarted
from dmq.storage.state.state import EpochRow

__all__ = [
    "SALVAGE",
    "JournalTail",
    "Recovered",
    "cut_journal",
    "epochs_in",
    "own_durable",
    "recover_journal",
    "replay",
    "scan_tail",
    "start_derived",
    "units_from",
    "usable",
]

SALVAGE: Final = "salvage"
_COPY: Final = 4 << 20


class Recovered:
    """What recovery found, for logs, statistics and tests."""

    def __init__(self) -> None:
        self.units = 0
        self.bytes_read = 0
        self.cut_bytes = 0
        self.salvaged: list[str] = []  # files with what was cut
        self.rebuilt = False
        self.epoch = 0
        self.stored_at_ms = 0
        self.flushed_through = 0

    def saw(self, unit: Unit) -> None:
        """A unit checked out."""
        header = unit.header
        self.units += 1
        self.bytes_read += header.length
        self.epoch = max(self.epoch, header.epoch)
        self.stored_at_ms = max(self.stored_at_ms, header.stored_at_ms)
        self.flushed_through = max(self.flushed_through, header.flushed_through)


def start_derived(derived: Derived, scanner: Scanner) -> None:
    """Begin a rebuild: take the state from the snapshot the journal opens with.

    Raises:
        StorageError: the disk refuses a snapshot, and may give it a moment later.
    """
    journal = scanner.journal
    while derived.applied < journal.end:
        segment = journal.segment_at(derived.applied)
        unit = None if segment is None else scanner.unit_at(segment.start)
        if unit is not None and unit.header.flags & SNAPSHOT:
            derived.state.restore(derived.snapshot_in(unit))
            derived.state.start_at_snapshot()
            derived.applied = unit.start
            derived.incomplete = False
            return
        # Without its snapshot a segment's records cannot be placed; the next segment has one.
        following = next((s.start for s in journal.segments if s.start > derived.applied), journal.end)
        scanner.check_passing(derived.applied, following)
        derived.pass_damage(derived.applied, following)


def replay(
    derived: Derived,
    scanner: Scanner,
    recovered: Recovered,
    *,
    end: int | None,
    known_durable: int,
    checkpoint: Callable[[], None],
) -> int | None:
    """Apply the units from `derived.applied` on.

    Parameters:
        end: stop there, for a rebuild of a live store; None goes on to the end of the journal.
        known_durable: an offset below which everything is known to have been durable.
        checkpoint: called after every unit; may write what has gathered in memory.

    Returns the offset of a torn tail, None if the journal ends well.

    Raises:
        StorageError: the disk refuses bytes of which nobody knows whether they were durable.
    """
    limit = scanner.journal.end if end is None else end
    while derived.applied < limit:
        unit = scanner.unit_at(derived.applied)
        if unit is not None:
            derived.apply(unit, recovered=True)
            recovered.saw(unit)
            checkpoint()
            continue
        bad = derived.applied
        if end is None and bad >= known_durable and not scanner.was_durable(bad):
            check_tail(scanner, bad)
            return bad
        following = scanner.next_valid(bad + 1)
        resume = limit if following is None else min(following.start, limit)
        scanner.check_passing(bad, resume)
        derived.pass_damage(bad, max(resume, min(known_durable, limit)) if following is None else resume)
    return None


def check_tail(scanner: Scanner, bad: int) -> None:
    """A tail that the disk refuses may be whole, and is not cut: it may have messages that were acknowledged.

    Raises:
        StorageError: this is one.
    """
    refusal = scanner.refusal(bad, scanner.journal.end)
    if refusal is None:
        return
    path = scanner.journal.files.describe(scanner.journal.tail.path)
    raise StorageError(
        f"the disk cannot read {path} behind journal offset {bad}, where acknowledged messages may stand "
        f"({refusal.message}): start again, since that may pass; if it stays, copy the directory to a good disk "
        "with a tool that leaves zeros for what cannot be read (ddrescue, dd conv=noerror,sync), and start there",
        path=path,
    ) from refusal


class JournalTail:
    """The units of a member's journal that are not applied yet, as far as they are sound.

    Attributes:
        end: where they end.
        last: the header of the last of them; None where there is none.
        epochs: those that begin among them.
    """

    def __init__(self, start: int) -> None:
        self.end = start
        self.last: Header | None = None
        self.epochs: list[EpochRow] = []

    def add(self, unit: Unit) -> None:
        """Another unit follows."""
        self.end = unit.end
        self.last = unit.header
        self.epochs += epochs_in(unit)


def epochs_in(unit: Unit) -> list[EpochRow]:
    """The epochs that a unit begins: one at most, and its first event says so."""
    rows = unit.rows
    if not rows or rows[0].topic_id or unit.header.flags & SNAPSHOT:
        return []
    event = event_of(unit, 0)
    return [EpochRow(event.epoch, event.leader, unit.start)] if isinstance(event, EpochStarted) else []


def scan_tail(scanner: Scanner, start: int, recovered: Recovered) -> JournalTail:
    """Look through the units from an offset on, up to the first that does not check out, and apply none."""
    tail = JournalTail(start)
    for unit in units_from(scanner, start):
        tail.add(unit)
        recovered.saw(unit)
    return tail


def own_durable(scanner: Scanner, epochs: Iterable[EpochRow], bad: int, own: int) -> int:
    """Up to where the journal was durable here, by the units behind a bad one that this replica wrote as a leader.

    Parameters:
        epochs: those that began before the bad unit.
        own: the replica.
    """
    led = {row.epoch for row in epochs if row.leader == own}
    durable, at = 0, bad + 1
    while (header := scanner.next_valid(at)) is not None:
        at = header.start + header.length
        unit = scanner.unit_at(header.start)
        if unit is not None:
            led.update(row.epoch for row in epochs_in(unit) if row.leader == own)
        if header.epoch in led:
            durable = max(durable, min(header.flushed_through, header.start))
    return durable


def units_from(scanner: Scanner, start: int) -> Iterator[Unit]:
    """The units from an offset on, up to the first that does not check out."""
    while (unit := scanner.unit_at(start)) is not None:
        yield unit
        start = unit.end


def recover_journal(journal: Journal, torn_at: int | None, recovered: Recovered, known_durable: int) -> None:
    """Cut a torn tail, and make what is kept durable.

    Parameters:
        torn_at: what `replay` returned.
        known_durable: no byte below this is written again.
    """
    files = journal.files
    if torn_at is not None:
        cut_journal(journal, torn_at, recovered)
    if not journal.segments:
        return
    segment = journal.tail
    file = files.open(segment.path, write=True)
    try:
        # After a failed fsync the page cache may show bytes the disk never got and will not get by itself.
        at = max(0, min(max(recovered.flushed_through, known_durable), segment.end) - segment.start)
        while at < segment.size:
            chunk = file.read(at, min(_COPY, segment.size - at))
            if not chunk:
                break
            file.write(at, (chunk,))
            at += len(chunk)
        file.sync()
    finally:
        file.close()
    files.sync_dir(FOLDER)
    journal.end = journal.flushed = segment.end


def cut_journal(journal: Journal, end: int, recovered: Recovered) -> None:
    """Move everything from an offset on into `salvage/`, and end the journal there, durably.

    The newest segment goes first, so that a crash on the way leaves a journal that is whole up to its end.
    """
    files = journal.files
    files.mkdir(SALVAGE)
    files.sync_dir("")
    for segment in reversed([s for s in journal.segments if s.end > end or s.start >= end]):
        keep = max(0, end - segment.start)
        recovered.cut_bytes += _salvage(files, segment, keep, recovered)
        journal.forget_reads(segment)
        if keep:
            file = files.open(segment.path, write=True)
            try:
                file.truncate(keep)
                file.sync()
            finally:
                file.close()
            journal.shorten(segment, keep)
        else:
            files.unlink(segment.path)
            journal.forget(segment)
    files.sync_dir(FOLDER)


def _salvage(files: Files, segment: Segment, keep: int, recovered: Recovered) -> int:
    """Copy a segment from byte `keep` on into the salvage folder; returns how many bytes there were but for zeros."""
    source, size = files.open(segment.path), segment.size
    try:
        data = bytearray()
        at = keep
        while at < size:
            chunk = read_readable(source.read, at, min(_COPY, size - at))
            if not chunk:
                break
            data += chunk
            at += len(chunk)
    finally:
        source.close()
    data = data.rstrip(b"\0")
    if not data:
        return 0
    name = f"{SALVAGE}/{segment.start + keep:020d}"
    number = 0
    while files.exists(f"{name}-{number}.cut"):
        number += 1
    path = f"{name}-{number}.cut"
    recovered.salvaged.append(files.describe(path))
    write_whole(files, path, data)
    files.sync_dir(SALVAGE)
    return len(data)


def usable(checkpoint: Checkpoint | None, journal: Journal) -> bool:
    """Whether a checkpoint can be the start of recovery for this journal."""
    return (
        checkpoint is not None
        and checkpoint.journal_id == journal.id
        and (checkpoint.offset >= journal.start or not journal.segments)
    )
