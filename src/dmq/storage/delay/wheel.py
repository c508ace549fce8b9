"""The delay wheel: which stored records are due when.

Entries (due time, journal offset, length) live in sorted runs on disk, one file per checkpoint, merged from time to
time; only the few that are due next are in memory, so millions pending cost little. Each entry belongs to a fragment
(the queue of the schedule topic it was stored in), and fragments are independent of each other, so that workers can
share them out. A run holds entries of all fragments, fragment after fragment, each sorted. Runs never change; how far a
fragment was read from one (`taken`) stands in the checkpoint.

What always holds: an entry is handed out by `take` at most once until it is `done` or given back by `release`, and not
any more once a DelaysDone event that names it is written; it is pending until that event is visible, whatever happens
in between; in a fragment, everything outside `near` comes at or after `bound`. Only the store's owner calls anything
here. A checkpoint has three steps: `freeze`, the writing of what that gave, and `adopt` (or `unfreeze`, if it could not
be written). Between the first and the last the wheel goes on with what it had: `FrozenWheel.write` may run in another
thread meanwhile, since it touches nothing the wheel changes. If it raises, nothing has changed but for files that
nobody needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from dmq.storage.delay.fragment import ENTRY, Fragment, Held, Source, sorted_table
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index.block_file import (
    BlockCache,
    BlockFile,
    DerivedDamaged,
    Section,
    SectionDraft,
    Table,
    merge_from,
    write_blocks,
)

__all__ = ["FOLDER", "Delay", "FrozenWheel", "Wheel", "WheelFile", "WheelFiles", "WheelRun", "without"]


class Delay(NamedTuple):
    """One pending record."""

    due_ms: int
    offset: int
    length: int


class _Flight:
    """An entry that was handed out. `copied`: a run has it too, in a part not yet loaded."""

    __slots__ = ("copied", "due_ms", "fragment", "length")

    def __init__(self, due_ms: int, length: int, fragment: int) -> None:
        self.due_ms = due_ms
        self.length = length
        self.fragment = fragment
        self.copied = False


class Wheel:
    """Which records are pending, due and handed out."""

    def __init__(self, files: Files, pool: FilePool, cache: BlockCache, fragments: int) -> None:
        self.files = WheelFiles(files, pool, cache)
        self._fragments = [Fragment() for _ in range(fragments)]
        self._runs: list[WheelRun] = []
        self._flights: dict[int, _Flight] = {}
        self._done: set[int] = set()  # done, but still to be met where entries are loaded from
        self._ending: set[int] = set()  # their end is written, but not visible yet
        self._frozen: FrozenWheel | None = None  # what a checkpoint is writing
        self.pending = 0

    # --- taking in --------------------------------------------------------------------------------------------------

    def add(self, fragment: int, dues: Any, offsets: Any, lengths: Any) -> None:
        """Records of one batch of the schedule topic; columns are lists or arrays."""
        self.pending += len(offsets)
        self._fragments[fragment % len(self._fragments)].add(dues, offsets, lengths)

    def done(self, offsets: Iterable[int]) -> None:
        """Records that were delivered, cancelled or carried forward."""
        frozen = self._frozen
        for offset in offsets:
            self.pending -= 1
            self._ending.discard(offset)
            if frozen is not None:
                frozen.ended.add(offset)
            flight = self._flights.pop(offset, None)
            if flight is None or flight.copied:
                self._done.add(offset)

    def ending(self, offsets: Iterable[int]) -> None:
        """Records whose end is written and becomes visible soon: they are not handed out meanwhile."""
        self._ending.update(offsets)

    # --- handing out ------------------------------------------------------------------------------------------------

    def take(self, now_ms: int, limit: int, fragments: Iterable[int] | None = None) -> list[Delay]:
        """Records due by now, at most `limit`, each fragment's earliest first; they are the caller's until done."""
        taken: list[Delay] = []
        for number in range(len(self._fragments)) if fragments is None else fragments:
            mine = self._fragments[number]
            if mine.is_empty:
                continue
            while len(taken) < limit:
                if not mine.near and not self._load(number):
                    break
                near = mine.near
                if near[0][0] > now_ms:
                    break
                # Sorted it is a heap as well, and what was loaded in order is sorted already: no popping one by one.
                near.sort()
                count = min(bisect_right(near, now_ms, key=_due_of), limit - len(taken))
                due_now = near[:count]
                del near[:count]
                for due, offset, length in due_now:
                    if offset in self._done:
                        self._done.discard(offset)
                        continue
                    if offset in self._flights:  # handed out before a rebuild, or claimed
                        self._flights[offset].copied = False
                        continue
                    self._flights[offset] = _Flight(due, length, number)
                    if offset not in self._ending:
                        taken.append(Delay(due, offset, length))
        return taken

    def release(self, offsets: Iterable[int]) -> None:
        """Records that could not be delivered: they are pending again."""
        for offset in offsets:
            flight = self._flights.pop(offset, None)
            if flight is not None and not flight.copied:
                self._fragments[flight.fragment].insert(flight.due_ms, offset, flight.length)

    def claim(self, due_ms: int, offset: int) -> bool:
        """Take one record, due or not, to end it otherwise; False if it is not pending or somebody has it already."""
        found = self._find(due_ms, offset)
        if found is None:
            return False
        # It stays where it is, and is passed over when it is met there.
        flight = self._flights[offset] = found
        flight.copied = True
        return True

    def is_pending(self, due_ms: int, offset: int) -> bool:
        """Whether a record waits, and nobody has it."""
        return self._find(due_ms, offset) is not None

    def _find(self, due_ms: int, offset: int) -> _Flight | None:
        if offset in self._done or offset in self._ending or offset in self._flights:
            return None
        for number, mine in enumerate(self._fragments):
            sources = [run.sources[number] for run in self._runs]
            tables = [*mine.after(due_ms, offset - 1, 1), *(source.after(due_ms, offset - 1, 1) for source in sources)]
            for table in tables:
                for due, _, length, _ in table[table["offset"].astype(np.uint64) == np.uint64(offset)].tolist():
                    return _Flight(due, length, number)
        return None

    def take_over_flights(self, other: Wheel) -> None:
        """After a rebuild: what the replaced wheel had handed out stays handed out, what was ending is ending."""
        self._ending = other._ending
        for offset, flight in other._flights.items():
            self._flights[offset] = flight
            flight.copied = True

    def _load(self, number: int) -> bool:
        """Fill an empty `near` with the earliest entries from everywhere; False if there are none."""
        mine = self._fragments[number]
        sources = [run.sources[number] for run in self._runs]
        while not mine.near:
            loaded = mine.load(sources)
            if loaded is None:
                return False
            if not self._done and not self._flights:
                mine.near += loaded
                continue
            for due, offset, length in loaded:
                if offset in self._done:
                    self._done.discard(offset)
                elif offset in self._flights:
                    self._flights[offset].copied = False
                else:
                    mine.near.append((due, offset, length))  # loaded in order, so it is a heap
        return True

    # --- looking ----------------------------------------------------------------------------------------------------

    def each(self) -> Iterator[Table]:
        """All pending entries, in pieces and in no order."""
        gone = self._done | self._flights.keys()
        for number, mine in enumerate(self._fragments):
            yield self._flying(number, self._flights)
            yield without(gone, mine.table(number))
            for run in self._runs:
                for table in run.sources[number].pieces():
                    yield without(gone, table)

    def after(self, due_ms: int, offset: int, limit: int) -> list[Delay]:
        """Pending records behind (due, offset), in order, at most `limit`; only a few of each part are looked at."""
        gone = self._done | self._flights.keys()
        count = limit
        while True:
            horizon = None  # beyond it, entries may be missing: a part was not looked at to its end
            tables = [self._flying(number, self._flights) for number in range(len(self._fragments))]
            for number, mine in enumerate(self._fragments):
                loose, *chunks = mine.after(due_ms, offset, count)
                tables.append(without(gone, loose))
                for part in (*chunks, *(run.sources[number].after(due_ms, offset, count) for run in self._runs)):
                    tables.append(without(gone, part))
                    if len(part) >= count:
                        last = (int(part["due"][-1]), int(part["offset"][-1]))
                        horizon = last if horizon is None else min(horizon, last)
            found = [
                Delay(due, at, length)
                for due, at, length, _ in sorted_table(np.concatenate(tables)).tolist()
                if (due_ms, offset) < (due, at) and (horizon is None or (due, at) <= horizon)
            ]
            if len(found) >= limit or horizon is None:
                return found[:limit]
            count *= 4

    def pending_between(self, start: int, end: int, limit: int) -> list[Delay]:
        """Pending records whose journal offset lies in [start, end), by offset, at most so many of the first."""
        hits = [np.empty(0, ENTRY)]
        for table in self.each():
            offsets = table["offset"].astype(np.uint64)
            hits.append(table[(offsets >= np.uint64(start)) & (offsets < np.uint64(end))])
        found = np.concatenate(hits)
        first = np.argsort(found["offset"].astype(np.uint64), kind="stable")[:limit]
        return [Delay(due, offset, length) for due, offset, length, _ in found[first].tolist()]

    def oldest_handed_out(self) -> int | None:
        """The lowest journal offset of a record that was handed out and is not done."""
        return min(self._flights, default=None)

    @staticmethod
    def _flying(number: int, flights: dict[int, _Flight]) -> Table:
        flying = [
            (flight.due_ms, offset, flight.length, number)
            for offset, flight in flights.items()
            if flight.fragment == number
        ]
        return np.array(flying, ENTRY)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def freeze(self, sequence: int, before: int) -> FrozenWheel:
        """Set aside what a checkpoint writes.

        Parameters:
            sequence: the checkpoint's number, for the names of new files.
            before: the journal offset below which everything lies that was added so far, and nothing added later.
        """
        assert self._frozen is None
        flying = [
            (flight.due_ms, offset, flight.length, flight.fragment)
            for offset, flight in self._flights.items()
            if not flight.copied
        ]
        held = [mine.freeze() for mine in self._fragments]
        runs = [run.copy() for run in self._runs]
        self._frozen = FrozenWheel(f"{sequence:020d}", before, held, flying, done=set(self._done), runs=runs)
        return self._frozen

    def unfreeze(self) -> None:
        """The checkpoint failed; nothing has changed."""
        self._frozen = None

    def adopt(self, frozen: FrozenWheel) -> None:
        """Go on with the files of a checkpoint that is now in force.

        They have all that was pending when it was set aside. What came later stays in memory; what was handed out or
        done since is passed over when it is met in the files.
        """
        assert frozen is self._frozen
        before = frozen.before
        self._fragments = [mine.forget(held, before) for mine, held in zip(self._fragments, frozen.held, strict=True)]
        for offset, flight in self._flights.items():
            if offset < before:
                flight.copied = True
        later = {offset for offset in self._done if offset >= before}
        self._done = later | frozen.done | {offset for offset in frozen.ended if offset < before}
        self._runs = frozen.runs
        self._frozen = None

    def restore(self, files: list[WheelFile], done: list[int]) -> None:
        """Become what a checkpoint says; called on a new wheel only."""
        runs = [self.files.open(file) for file in files]
        self._done = set(done)
        self.pending = sum(run.left for run in runs) - len(done)
        if all(len(run.sources) == len(self._fragments) for run in runs):
            self._runs = runs
            self._fragments = [Fragment(everything_elsewhere=True) for _ in self._fragments]
            return
        # The number of fragments was changed: spread everything anew.
        for run in runs:
            for number, source in enumerate(run.sources):
                for table in source.pieces():
                    columns = (table[name].astype(np.uint64) for name in ("due", "offset", "length"))
                    self._fragments[number % len(self._fragments)].add(*columns)


_due_of: Final = itemgetter(0)

FOLDER: Final = "delay"
_MAGIC: Final = b"DMQW"
_NONE: Final = np.empty(0, ENTRY)


class WheelFile(msgspec.Struct, frozen=True, array_like=True):
    """A run file and, for every fragment, how many of its entries were loaded before the checkpoint."""

    path: str
    taken: list[int]


class WheelRun:
    """A run file: for each fragment, its entries in order."""

    __slots__ = ("path", "sources")

    def __init__(self, path: str, sources: list[Source]) -> None:
        self.path = path
        self.sources = sources

    @staticmethod
    def of(path: str, counts: list[int], taken: list[int], section: Section) -> WheelRun:
        """A run with so many entries of each fragment, of which so many were taken."""
        sources: list[Source] = []
        start = 0
        for count, gone in zip(counts, taken, strict=True):
            sources.append(Source(section.slice, start, start + gone, start + count))
            start += count
        return WheelRun(path, sources)

    @property
    def left(self) -> int:
        return sum(source.left for source in self.sources)

    def copy(self) -> WheelRun:
        """The same file as it stands now, wherever this one is taken from later."""
        return WheelRun(self.path, [source.copy() for source in self.sources])

    def as_file(self) -> WheelFile:
        return WheelFile(self.path, [source.taken for source in self.sources])


class WheelFiles:
    """Writes and opens run files."""

    def __init__(self, files: Files, pool: FilePool, cache: BlockCache) -> None:
        self._files = files
        self._pool = pool
        self._cache = cache

    def open(self, file: WheelFile) -> WheelRun:
        """A run that was written before.

        Raises:
            DerivedDamaged: it is not what it was.
        """
        table = BlockFile(self._pool, self._cache, file.path, _MAGIC, dtypes=(ENTRY,))
        counts = msgspec.msgpack.decode(table.note, type=list[int])
        if sum(counts) != table.sections[0].count or len(counts) != len(file.taken):
            raise DerivedDamaged(f"{file.path} contradicts itself")
        return WheelRun.of(file.path, counts, file.taken, table.sections[0])

    def write(self, path: str, counts: list[int], pieces: Iterable[Table]) -> WheelRun:
        """Write a run, flushed; `pieces` are its entries, fragment after fragment."""
        note = msgspec.msgpack.encode(counts)
        write_blocks(self._files, path, _MAGIC, note, sections=[SectionDraft(ENTRY, sum(counts), pieces)])
        self._pool.drop(path)
        return self.open(WheelFile(path, [0] * len(counts)))

    def merge(self, path: str, runs: list[WheelRun]) -> WheelRun:
        """Write what is left of several runs as one."""
        fragments = range(len(runs[0].sources))

        def merged(number: int) -> Table:
            return sorted_table(np.concatenate([t for run in runs for t in run.sources[number].pieces()] or [_NONE]))

        # A fragment at a time, counted first and written second, to keep only one fragment in memory.
        counts = [sum(run.sources[number].left for run in runs) for number in fragments]
        return self.write(path, counts, (merged(number) for number in fragments))


class FrozenWheel:
    """What a wheel held when a checkpoint was begun; `write` makes files of it.

    Parameters:
        name: of the files to write, without their ends.
        before: the journal offset below which everything lies that is set aside here.
        held: what each fragment had in memory.
        flying: entries that were handed out and stand in no run.
        done: offsets that are done but may still stand in runs or in memory.
        runs: as they stood.
    """

    def __init__(
        self,
        name: str,
        before: int,
        held: list[Held],
        flying: list[tuple[int, int, int, int]],
        done: set[int],
        runs: list[WheelRun],
    ) -> None:
        self._name = name
        self.before = before
        self.held = held
        self._flying = flying
        self.done = done
        self.runs = runs
        self.ended: set[int] = set()  # what was done since; the wheel's to fill

    def write(self, files: WheelFiles) -> None:
        """Write what was only in memory as a run, and merge runs where it is time to; all flushed.

        Afterwards `runs` are those that make up the wheel, and `done` the offsets that may still stand in them.
        """
        gone = np.fromiter(self.done, np.uint64, len(self.done))
        flying = np.array(self._flying, ENTRY)
        tables = []
        for number, held in enumerate(self.held):
            mine = held.table(number)
            if len(gone):
                offsets = mine["offset"].astype(np.uint64)
                # What is left out here need not be remembered as done any more.
                self.done = self.done - set(gone[np.isin(gone, offsets)].tolist())
                mine = mine[~np.isin(offsets, gone)]
            tables.append(sorted_table(np.concatenate([flying[flying["fragment"] == number], mine])))
        runs = list(self.runs)
        counts = [len(table) for table in tables]
        if sum(counts):
            runs.append(files.write(f"{FOLDER}/{self._name}.wheel", counts, tables))
        del tables
        runs = [run for run in runs if run.left]
        first = merge_from([run.left for run in runs])
        if first is not None:
            merged = files.merge(f"{FOLDER}/{self._name}.merged", runs[first:])
            runs = [*runs[:first], merged]
        self.runs = runs

    def as_files(self) -> list[WheelFile]:
        """The files that make up the wheel, for the checkpoint."""
        return [run.as_file() for run in self.runs]


def without(gone: set[int], table: Table) -> Table:
    """A table without the entries at these offsets."""
    if not gone or not len(table):
        return table
    return table[~np.isin(table["offset"].astype(np.uint64), np.fromiter(gone, np.uint64, len(gone)))]
