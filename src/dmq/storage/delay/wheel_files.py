"""Run files of the delay wheel, and the writing of what was set aside for a checkpoint.

A run holds entries of all fragments, fragment after fragment, each sorted. Runs never change; how far a fragment was
read from one (`taken`) stands in the checkpoint.

What always holds: `FrozenWheel.write` may run in another thread while the wheel goes on: it touches nothing the wheel
changes. If it raises, nothing has changed but for files that nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from dmq.storage.delay.fragment import ENTRY, Held, Source, sorted_table
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

__all__ = ["FOLDER", "FrozenWheel", "WheelFile", "WheelFiles", "WheelRun", "without"]

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
