"""Damage: which ranges of a member's journal cannot be read, and putting the right bytes back from another member.

A range is mended in place: the bytes that stand there are kept in `salvage/`, the right ones are written over them and
flushed. A crash on the way leaves a range that still fails its checksum and is mended again; no byte outside of it is
written. Writing the segment anew beside the old one would need the room and the time of all of it for one bad unit.

What always holds: only whole units are written that check out, bear this journal's id and their own offset, and belong
to the epoch that the journal has there; nothing is written beyond the range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from dmq.errors import DMQError, RecordCorrupt
from dmq.event_log import EventLog
from dmq.storage.files import Buffer, read_readable, write_whole
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.journal.journal import FOLDER, Journal, Segment, segment_path
from dmq.storage.journal.unit import SNAPSHOT, is_intact, read_header
from dmq.storage.read.read_failures import ReadFailures
from dmq.storage.state.derived import Derived
from dmq.storage.upkeep.recovery import SALVAGE
from dmq.storage.upkeep.scrub import Range, Scrub

__all__ = ["Damage", "Mending"]

log = EventLog(__name__)

_GIVEN_UP_MAX: Final = 10_000  # ranges; what was given up before these is asked for once more
_EPOCH_MAX: Final = (1 << 32) - 1
_NEW_SEGMENT: Final = f"{SALVAGE}/segment.tmp"


class Mending:
    """The right bytes of one range; `write` them, in any thread, then call `Damage.finish` in that of the journal."""

    def __init__(self, journal: Journal, start: int, raw: Buffer, stored_at_ms: int) -> None:
        self.start = start
        self.end = start + len(raw)
        self.raw = raw
        self.stored_at_ms = stored_at_ms
        self._files = journal.files
        segment = journal.segment_at(start)
        if segment is None:  # its end is missing, or all of it
            before = [s for s in journal.segments if s.end == start]
            segment = before[-1] if before and not _opens_segment(raw) else None
        self.segment = segment

    def write(self) -> None:
        """Put the bytes in their place, durably.

        Raises:
            FileNotFoundError: the segment has gone meanwhile, and with it the damage.
            StorageError: they could not be written; the range is as damaged as before.
        """
        files = self._files
        files.mkdir(SALVAGE)
        files.sync_dir("")
        if self.segment is None:
            write_whole(files, _NEW_SEGMENT, self.raw)
            return
        file = files.open(self.segment.path, write=True)
        try:
            position = self.start - self.segment.start
            self._salvage(read_readable(file.read, position, len(self.raw)))
            file.write(position, (self.raw,))
            file.sync()
        finally:
            file.close()

    def put_segment(self) -> None:
        """Put a segment that was missing where it belongs: it is there whole, or not at all."""
        self._files.rename(_NEW_SEGMENT, segment_path(self.start))
        self._files.sync_dir(FOLDER)
        self._files.sync_dir(SALVAGE)

    def discard(self) -> None:
        """The range is no longer part of the journal."""
        if self.segment is None:
            self._files.unlink(_NEW_SEGMENT)

    def _salvage(self, damaged: bytes) -> None:
        if not damaged:
            return
        number = 0
        while self._files.exists(path := f"{SALVAGE}/{self.start:020d}-{number}.damaged"):
            number += 1
        write_whole(self._files, path, damaged)
        self._files.sync_dir(SALVAGE)


def _opens_segment(raw: Buffer) -> bool:
    header = read_header(raw)
    return header is not None and bool(header.flags & SNAPSHOT)


class Damage:
    """What is known to be damaged in the journal of a store or a replica.

    Parameters:
        derived: what is derived from the journal, at this moment.
        rebuild: builds that anew, because a range was passed over when it was built.
        failures: what the disk refuses to those who read; none are known of a replica, which nobody reads.
    """

    def __init__(
        self,
        journal: Journal,
        derived: Callable[[], Derived],
        rebuild: Callable[[], None],
        failures: ReadFailures | None = None,
    ) -> None:
        self._journal = journal
        self._failures = failures
        self._derived = derived
        self._rebuild = rebuild
        self._given_up: list[Range] | None = None  # None: nobody else has a copy

    def expect_mending(self) -> None:
        """Other members have copies: what is damaged is not lost before `give_up` says so."""
        self._given_up = []
        if self._failures is not None:
            self._failures.is_patient = False

    def give_up(self, start: int, end: int) -> None:
        """No member has these bytes any more."""
        if self._given_up is not None:
            self._given_up = [*self._given_up[1 - _GIVEN_UP_MAX :], (start, end)]

    def may_be_mended(self, start: int, end: int) -> bool:
        """Whether another member may still have a range, or the disk may still give it: nobody passes over its
        messages yet."""
        if self._failures is not None and self._failures.may_pass(start, end):
            return True
        given_up = self._given_up
        return given_up is not None and not any(first <= start and end <= last for first, last in given_up)

    @property
    def ranges(self) -> list[Range]:
        """Those that are still part of the journal, in order, and as one where they touch."""
        first = self._journal.start
        ranges: list[Range] = []
        for start, end in sorted(self._derived().damage):
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
            elif end > first:
                ranges.append((max(start, first), end))
        return ranges

    @property
    def has_holes(self) -> bool:
        """Whether something was passed over when everything derived was built, so that what is derived lacks it."""
        return any(start < self._derived().applied and not self._is_unit(start) for start, _ in self.ranges)

    def add(self, start: int, end: int) -> None:
        """A range was found to be damaged."""
        if end > self._journal.start:
            self._derived().add_damage(start, end)

    def scrub(self, at: int = 0) -> Scrub:
        """Looks through the journal, from an offset on; what it finds is to be added by its owner."""
        return Scrub(self._journal, at)

    def segment_of(self, offset: int) -> str:
        """The path of the segment that has an offset, or should have it."""
        segment = self._journal.segment_at(offset)
        return segment_path(offset) if segment is None else segment.path

    def topics(self, ids: Iterable[int]) -> list[str]:
        """The names of those of some topics that there are."""
        known = self._derived().state.topics_by_id
        return sorted(known[one].name for one in ids if one in known)

    def begin(self, start: int, end: int, raw: Buffer) -> Mending:
        """What to write to mend a range, or the first units of it: those of one segment.

        Raises:
            RecordCorrupt: these are not its bytes.
        """
        size, stored_at_ms = self._check(start, end, raw)
        return Mending(self._journal, start, memoryview(raw)[:size], stored_at_ms)

    def _check(self, start: int, end: int, raw: Buffer) -> tuple[int, int]:
        """Returns how many bytes belong to the first segment, and the time at which the first unit was stored."""
        if not 0 < len(raw) <= end - start:
            raise RecordCorrupt(f"{len(raw)} bytes came for journal range {start}-{end}", start=start, end=end)
        at, stored_at_ms = 0, 0
        while at < len(raw):
            header = read_header(raw, at)
            if header is None or not is_intact(header, raw, at):
                raise RecordCorrupt(f"what came for journal offset {start + at} fails its checksum", offset=start + at)
            low, high = self._epochs_at(start + at, is_snapshot=bool(header.flags & SNAPSHOT))
            if header.journal_id != self._journal.id or header.start != start + at or not low <= header.epoch <= high:
                raise RecordCorrupt(
                    f"a unit at {header.start}, epoch {header.epoch}, of journal {header.journal_id:016x} came for "
                    f"journal offset {start + at}",
                    offset=start + at,
                )
            if at and header.flags & SNAPSHOT:
                break
            stored_at_ms = stored_at_ms or header.stored_at_ms
            at += header.length
        return at, stored_at_ms

    def _epochs_at(self, offset: int, *, is_snapshot: bool) -> Range:
        """The epochs that a unit may have there: that in force, or the next one, which may begin with a segment."""
        low = 0
        for row in self._derived().state.epochs:
            if row.start > offset:
                return low, row.epoch
            low = row.epoch
        return low, _EPOCH_MAX if is_snapshot or not low else low

    def finish(self, mending: Mending) -> bool:
        """The bytes were written: forget that they were not there.

        A range that retention took meanwhile stays gone: put back, it would leave a hole behind it.

        Returns whether they were passed over when everything derived was built: `rebuild` is to follow.

        Raises:
            StorageError: a segment could not be put in its place.
        """
        journal, derived = self._journal, self._derived()
        if mending.start < journal.start:
            mending.discard()
            return False
        if mending.segment is None:
            mending.put_segment()
            journal.put_back(Segment(mending.start, len(mending.raw), mending.stored_at_ms))
        elif mending.end > mending.segment.end:
            journal.grew(mending.segment, mending.end - mending.segment.start)
        log.warning("journal mended", start=mending.start, end=mending.end)
        mended = (mending.start, mending.end)
        derived.damage = [piece for known in derived.damage for piece in _without(known, mended)]
        return mending.start < derived.applied and not self._is_indexed(mending)

    def rebuild(self) -> None:
        """Build everything derived anew.

        Raises:
            DMQError: it could not be.
        """
        self._rebuild()

    def _is_indexed(self, mending: Mending) -> bool:
        """Whether its units were applied before they were damaged; else they were passed over."""
        at = mending.start
        while at < mending.end:
            header = read_header(mending.raw, at - mending.start)
            if header is None or not self._is_unit(at):
                return False
            at += header.length
        return True

    def _is_unit(self, start: int) -> bool:
        """Whether the index knows a unit that starts there."""
        try:
            return self._derived().lookup.unit_holding(start) == start
        except (DerivedDamaged, DMQError):
            return False


def _without(known: Range, gone: Range) -> list[Range]:
    """What is left of a range."""
    pieces = [(known[0], min(known[1], gone[0])), (max(known[0], gone[1]), known[1])]
    return [(start, end) for start, end in pieces if start < end]
