"""Lookup: from a key, a message id, a time or a journal offset to the unit that holds it.

Each checkpoint writes one table file for the range of the journal it covers, `index/<from>-<to>.index`, with three
sorted sections: units (start, store time), hashes (hash, record offset) and batches (producer, first sequence, count,
offset of the first record). Neighbouring files are merged up to a span, so a lookup searches a few files per gigabyte,
a few blocks in each.

What always holds: hashes only propose; the caller compares the record itself. Files cover the journal without a gap
from its start (or before) to the checkpoint; the rest is in memory.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index.block_file import (
    PIECE_ENTRIES,
    BlockCache,
    BlockFile,
    DerivedDamaged,
    Section,
    SectionDraft,
    Table,
    merge_from,
    write_blocks,
)
from dmq.storage.journal.unit import Row, Unit

__all__ = ["FOLDER", "IndexFile", "Lookup"]

FOLDER: Final = "index"
_MAGIC: Final = b"DMQI"
_UNITS: Final = np.dtype([("start", ">u8"), ("time", ">u8")])
_HASHES: Final = np.dtype([("hash", ">u8"), ("offset", ">u8")])
_BATCHES: Final = np.dtype([("producer", ">u8"), ("sequence", ">u8"), ("count", ">u8"), ("offset", ">u8")])
_DTYPES: Final = (_UNITS, _HASHES, _BATCHES)
_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.index")
_FILES_MAX: Final = 8


class _Pending:
    """What units since the last checkpoint say.

    Attributes:
        blocks: hashes and offsets of many records each, as their units have them: an array that grows is copied again
            and again, and a batch of 500 would pay more for that than for all the rest of its index.
    """

    __slots__ = ("batches", "blocks", "hash_offsets", "hashes", "starts", "times")

    def __init__(self) -> None:
        self.starts = array("Q")
        self.times = array("Q")
        self.hashes = array("Q")
        self.hash_offsets = array("Q")
        self.batches = array("Q")  # four numbers a batch
        self.blocks: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]] = []

    def gather(self) -> None:
        """Put the hashes of all blocks with the others."""
        if self.blocks:
            blocks, self.blocks = self.blocks, []
            self.hashes.frombytes(b"".join([hashes for hashes, _ in blocks]))  # type: ignore[misc]
            self.hash_offsets.frombytes(b"".join([offsets for _, offsets in blocks]))  # type: ignore[misc]

    def tables(self) -> tuple[Table, Table, Table]:
        units = np.empty(len(self.starts), _UNITS)
        units["start"], units["time"] = np.frombuffer(self.starts, np.uint64), np.frombuffer(self.times, np.uint64)
        values = np.frombuffer(self.hashes, np.uint64)
        # The caller sorts what one hash proposes, so equal ones may stand in any order.
        order = np.argsort(values)
        hashes = np.empty(len(values), _HASHES)
        hashes["hash"] = values[order]
        hashes["offset"] = np.frombuffer(self.hash_offsets, np.uint64)[order]
        rows = np.frombuffer(self.batches, np.uint64).reshape(-1, 4)
        batches = np.empty(len(rows), _BATCHES)
        for column, name in enumerate(_BATCHES.names or ()):
            batches[name] = rows[:, column]
        return units, hashes, _sorted_batches(batches)


def _sorted_hashes(table: Table) -> Table:
    # Several sorted stretches one after another, which is what a stable sort is good at.
    return table[np.argsort(table["hash"].astype(np.uint64), kind="stable")]


def _sorted_batches(table: Table) -> Table:
    return table[np.lexsort((table["sequence"].astype(np.uint64), table["producer"].astype(np.uint64)))]


def _hashes_through(table: Table, last: Any) -> int:
    """How many entries of a sorted table are no greater than one."""
    return int(np.searchsorted(table["hash"].astype(np.uint64), np.uint64(last["hash"]), side="right"))


def _batches_through(table: Table, last: Any) -> int:
    """How many entries of a sorted table are no greater than one."""
    low, high = (
        int(np.searchsorted(table["producer"].astype(np.uint64), np.uint64(last["producer"]), side=side))
        for side in ("left", "right")
    )
    sequences = table["sequence"][low:high].astype(np.uint64)
    return low + int(np.searchsorted(sequences, np.uint64(last["sequence"]), side="right"))


def _merged(
    sections: Sequence[Section], piece: int, order: Callable[[Table], Table], through: Callable[[Table, Any], int]
) -> Iterator[Table]:
    """The entries of several sorted sections in one order, some at a time, so that only so much is in memory.

    Parameters:
        piece: how many, more or less.
        order: sorts some entries.
        through: how many entries of a sorted table are no greater than one.
    """
    size = max(1, piece // max(1, len(sections)))
    ways = [_Way(section, size) for section in sections]
    while ways := [way for way in ways if way.has_more()]:
        # Up to the least of the last entries at hand, all that there is of every section is at hand.
        ends = np.concatenate([way.table[-1:] for way in ways if not way.is_last] or [order(_ends(ways))[-1:]])
        last = order(ends)[0]
        yield order(np.concatenate([way.take(through(way.table, last)) for way in ways]))


def _ends(ways: Sequence[_Way]) -> Table:
    ends: Table = np.concatenate([way.table[-1:] for way in ways])
    return ends


class _Way:
    """A section on its way into a merge: what of it is at hand."""

    def __init__(self, section: Section, size: int) -> None:
        self._section = section
        self._size = size
        self._at = 0
        self.table: Table = section.slice(0, 0)

    def has_more(self) -> bool:
        """Whether any is left; some of it is at hand then."""
        if not len(self.table):
            self.table = self._section.slice(self._at, self._at + self._size)
            self._at += len(self.table)
        return len(self.table) > 0

    @property
    def is_last(self) -> bool:
        """Whether all that is left is at hand."""
        return self._at >= self._section.count

    def take(self, count: int) -> Table:
        """The first so many."""
        taken, self.table = self.table[:count], self.table[count:]
        return taken


def _kept(pieces: Iterable[Table], field: str, start: int) -> Iterator[Table]:
    """Some entries without those below a journal offset."""
    for piece in pieces:
        gone = piece[field].astype(np.uint64) < np.uint64(start)
        yield piece[~gone] if gone.any() else piece


def _in_pieces(table: Table) -> Iterator[Table]:
    """A table as it is, for what copies a piece at a time."""
    return (table[at : at + PIECE_ENTRIES] for at in range(0, len(table), PIECE_ENTRIES))


class IndexFile:
    """One table file and the range of the journal it covers."""

    __slots__ = ("batches", "end", "hashes", "path", "start", "units")

    def __init__(self, pool: FilePool, cache: BlockCache, path: str) -> None:
        match = _NAME.fullmatch(path.rpartition("/")[2])
        if match is None:
            raise DerivedDamaged(f"{path} is not an index file")
        self.path = path
        self.start, self.end = int(match[1]), int(match[2])
        file = BlockFile(pool, cache, path, _MAGIC, dtypes=_DTYPES)
        self.units, self.hashes, self.batches = file.sections

    @property
    def sections(self) -> tuple[Section, Section, Section]:
        return self.units, self.hashes, self.batches


class Lookup:
    """The lookup of one journal.

    Parameters:
        piece: how many entries a merge has in memory at a time, more or less.

    Attributes:
        units_buffered: how many units wait for the next checkpoint.
    """

    def __init__(
        self, files: Files, pool: FilePool, cache: BlockCache, span_max: int, *, piece: int = PIECE_ENTRIES
    ) -> None:
        self._piece = piece
        self._files = files
        self._pool = pool
        self._cache = cache
        self._span_max = span_max
        self._active = _Pending()
        self._frozen: _Pending | None = None
        self.units_buffered = 0
        self.files: list[IndexFile] = []
        self._near: list[int] = []  # where some units start that follow each other: those asked for last

    def add(self, unit: Unit, offsets: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Take in a unit; `offsets` are those of its records, in the form that suits its rows."""
        pending = self._active
        pending.starts.append(unit.start)
        pending.times.append(unit.header.stored_at_ms)
        self.units_buffered += 1
        if isinstance(unit.offsets, np.ndarray):
            if len(unit.hashes):
                # A record has none, one or two hashes, so their number says nothing about whose they are.
                pending.blocks.append((unit.hashes, unit.offsets[unit.hash_index]))  # type: ignore[arg-type]
        else:
            if unit.hashes:
                pending.hashes.extend(unit.hashes)
                pending.hash_offsets.extend([unit.offsets[i] for i in unit.hash_index])
        at = 0
        batches: list[int] = []
        for producer_id, _, first_sequence, records, _, _, _, _, _, _, _, _ in unit.rows:
            if producer_id:
                batches += (producer_id, first_sequence, records, int(offsets[at]))
            at += records
        pending.batches.extend(batches)

    def add_one(self, unit: Unit, row: Row) -> None:
        """`add` for a unit with one message."""
        pending, offset = self._active, int(unit.offsets[0])
        pending.starts.append(unit.start)
        pending.times.append(unit.header.stored_at_ms)
        self.units_buffered += 1
        for value in unit.hashes:
            pending.hashes.append(int(value))
            pending.hash_offsets.append(offset)
        if row[0]:
            pending.batches.extend((row[0], row[2], 1, offset))

    # --- asking -----------------------------------------------------------------------------------------------------

    def offsets_of_hash(self, value: int, start: int) -> list[int]:
        """Journal offsets, from `start` on and in order, of the records a hash was given for."""
        found: list[int] = []
        for file in self.files:
            if file.end > start:
                found += _matching(file.hashes, value)
        self._active.gather()
        for pending in self._pending():
            hits = np.flatnonzero(np.frombuffer(pending.hashes, np.uint64) == np.uint64(value)).tolist()
            found += [pending.hash_offsets[hit] for hit in hits]
        return sorted(offset for offset in found if offset >= start)

    def batches_of_id(self, producer_id: int, sequence: int, start: int) -> list[tuple[int, int]]:
        """(first sequence, offset of the first record) of batches that hold a sequence of a producer."""
        found: list[tuple[int, int]] = []
        wanted = (producer_id, sequence)
        for file in self.files:
            if file.end <= start:
                continue
            at = file.batches.lower_bound(lambda entry: (int(entry[0]), int(entry[1])) <= wanted) - 1
            nearest = None
            while at >= 0:
                producer, first, count, offset = file.batches.entry(at).item()
                # A batch sent again after its producer was forgotten stands beside the first one.
                if producer != producer_id or first != (first if nearest is None else nearest):
                    break
                nearest = first
                if sequence < first + count:
                    found.append((first, offset))
                at -= 1
        for pending in self._pending():
            rows = np.frombuffer(pending.batches, np.uint64).reshape(-1, 4)
            mine = rows[rows[:, 0] == np.uint64(producer_id)]
            within = mine[(mine[:, 1] <= np.uint64(sequence)) & (np.uint64(sequence) < mine[:, 1] + mine[:, 2])]
            found += [(int(row[1]), int(row[3])) for row in within]
        return [(first, offset) for first, offset in found if offset >= start]

    def unit_holding(self, offset: int) -> int:
        """The start of the unit a journal offset lies in (or, in a gap, of the one before).

        Raises:
            DerivedDamaged: the files do not cover the offset.
        """
        return self.units_from(offset, 0)[0]

    def units_from(self, offset: int, size: int) -> tuple[int, int | None]:
        """Which units to read for an offset: from the one that holds it on, as many as fit, at least that one.

        Returns the first one's start, and where the one after the last starts; None where that is not at hand.

        Raises:
            DerivedDamaged: the files do not cover the offset.
        """
        starts = self._starts_around(offset)
        at = bisect_right(starts, offset) - 1
        start = starts[at]
        after = max(bisect_right(starts, start + size) - 1, at + 1)
        return start, starts[after] if after < len(starts) else None

    def _starts_around(self, offset: int) -> Sequence[int]:
        """Where the units around an offset start, from at or before it."""
        for pending in reversed(self._pending()):
            if pending.starts and offset >= pending.starts[0]:
                return pending.starts
        if self._near and self._near[0] <= offset < self._near[-1]:
            return self._near
        for file in reversed(self.files):
            if file.start <= offset:
                at = file.units.lower_bound(lambda entry: int(entry[0]) <= offset) - 1
                if at >= 0:
                    self._near = file.units.neighbours(at)["start"].tolist()
                    return self._near
        raise DerivedDamaged(f"no index file covers journal offset {offset}")

    def first_unit_since(self, time_ms: int, start: int) -> int | None:
        """The start of the first unit, at `start` or later, stored at or after a time; None if there is none."""
        for file in self.files:
            if file.end <= start or not file.units.count or int(file.units.entry(file.units.count - 1)[1]) < time_ms:
                continue
            at = file.units.lower_bound(lambda entry: int(entry[1]) < time_ms or int(entry[0]) < start)
            if at < file.units.count:
                return int(file.units.entry(at)[0])
        for pending in self._pending():
            at = max(bisect_left(pending.times, time_ms), bisect_left(pending.starts, start))
            if at < len(pending.starts):
                return pending.starts[at]
        return None

    def _pending(self) -> list[_Pending]:
        return [self._active] if self._frozen is None else [self._frozen, self._active]

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Set aside what a checkpoint is about to write."""
        assert self._frozen is None
        self._active.gather()  # here: a thread writes what is frozen, while it is still asked
        self._frozen, self._active, self.units_buffered = self._active, _Pending(), 0

    def unfreeze(self) -> None:
        """The checkpoint failed; what was set aside waits for the next one."""
        if self._frozen is None:
            return
        for name in _Pending.__slots__:
            getattr(self._frozen, name).extend(getattr(self._active, name))
        self._active, self._frozen = self._frozen, None
        self.units_buffered = len(self._active.starts)

    def write_frozen(self, start: int, end: int, journal_start: int) -> list[IndexFile]:
        """Write what was set aside as covering [start, end) of the journal, and merge where it is time to.

        Returns the files that now make up the index, oldest first, for `adopt`.
        """
        assert self._frozen is not None
        kept = [file for file in self.files if file.end > journal_start]
        if not self._frozen.starts:
            return kept
        tables = self._frozen.tables()
        path = f"{FOLDER}/{start:020d}-{end:020d}.index"
        drafts = [
            SectionDraft(dtype, len(table), _in_pieces(table)) for dtype, table in zip(_DTYPES, tables, strict=True)
        ]
        kept.append(self._write(path, drafts))
        del tables, drafts
        near = [file for file in kept if end - file.start <= self._span_max]
        first = merge_from([sum(section.count for section in file.sections) for file in near], _FILES_MAX)
        if first is not None:
            merged = self._merge(near[first:], journal_start)
            kept = [*kept[: len(kept) - len(near) + first], merged]
        return kept

    def _merge(self, files: list[IndexFile], journal_start: int) -> IndexFile:
        """Write what several files have as one, a piece at a time."""
        fields = ("start", "offset", "offset")
        sections = [*zip(*(file.sections for file in files), strict=True)]
        counts = [sum(section.count for section in column) for column in sections]
        if files[0].start < journal_start:  # what retention took is left out, and has to be counted first
            counts = [
                sum(len(piece) for section in column for piece in _kept(section.pieces(), field, journal_start))
                for column, field in zip(sections, fields, strict=True)
            ]
        units, hashes, batches = sections
        merged: list[Iterable[Table]] = [
            (piece for section in units for piece in section.pieces()),
            _merged(hashes, self._piece, _sorted_hashes, _hashes_through),
            _merged(batches, self._piece, _sorted_batches, _batches_through),
        ]
        path = f"{FOLDER}/{files[0].start:020d}-{files[-1].end:020d}.index"
        drafts = [
            SectionDraft(dtype, count, _kept(pieces, field, journal_start))
            for dtype, count, pieces, field in zip(_DTYPES, counts, merged, fields, strict=True)
        ]
        return self._write(path, drafts)

    def _write(self, path: str, sections: Sequence[SectionDraft]) -> IndexFile:
        write_blocks(self._files, path, _MAGIC, b"", sections=sections)
        self._pool.drop(path)
        return IndexFile(self._pool, self._cache, path)

    def restore(self, paths: list[str]) -> None:
        """Become what a checkpoint says; called on a new index only."""
        self.files = [IndexFile(self._pool, self._cache, path) for path in paths]

    def adopt(self, files: list[IndexFile]) -> None:
        """Use the files of a checkpoint that is now in force."""
        self.files = files
        self._frozen = None


def _matching(section: Section, value: int) -> list[int]:
    at = section.lower_bound(lambda entry: int(entry[0]) < value, guess=value / (1 << 64))
    found = []
    while at < section.count:
        entry = section.entry(at)
        if int(entry[0]) != value:
            break
        found.append(int(entry[1]))
        at += 1
    return found
