"""One fragment of the delay wheel: the entries due next on a heap, the others in sorted columns.

Pure code. `near` is a heap of (due, offset, length); whatever is not in it, here or in a run on disk, comes at or after
`bound`. What is added later than that goes to `far`, unsorted columns that are sorted only when they are needed.

What always holds: what `freeze` gives never changes, whatever the fragment does meanwhile.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from dmq.storage.index.block_file import Table

__all__ = ["ENTRY", "LOAD", "Fragment", "Held", "Source", "sorted_table"]

ENTRY: Final = np.dtype([("due", ">u8"), ("offset", ">u8"), ("length", ">u4"), ("fragment", ">u4")])
# How many entries are loaded at a time; with four times as many near, all go back.
LOAD: Final = 4096
_CHUNKS_MAX: Final = 8
_PIECE: Final = 1 << 16
_NOTHING_ELSEWHERE: Final = (1 << 64, 0)
_EVERYTHING_ELSEWHERE: Final = (0, 0)


def sorted_table(table: Table) -> Table:
    """By due time, then offset."""
    return table[np.lexsort((table["offset"].astype(np.uint64), table["due"].astype(np.uint64)))]


class Source:
    """A sorted stretch of entries, in a file or in memory, taken from its front."""

    __slots__ = ("_end", "_read", "_start", "at")

    def __init__(self, read: Callable[[int, int], Table], start: int, at: int, end: int) -> None:
        self._read = read
        self._start = start
        self._end = end
        self.at = at

    def copy(self) -> Source:
        """The same entries as they stand now, wherever this one is taken from later."""
        return Source(self._read, self._start, self.at, self._end)

    def reads_from(self, other: Source) -> bool:
        """Whether both read from the same place."""
        return self._read is other._read

    @property
    def taken(self) -> int:
        return self.at - self._start

    @property
    def left(self) -> int:
        return self._end - self.at

    def peek(self, count: int) -> Table:
        return self._read(self.at, min(self._end, self.at + count))

    def after(self, due: int, offset: int, count: int) -> Table:
        """The first entries of what is left that come behind (due, offset)."""
        low, high = self.at, self._end
        while low < high:
            middle = (low + high) // 2
            entry = self._read(middle, middle + 1)[0]
            if (int(entry["due"]), int(entry["offset"])) <= (due, offset):
                low = middle + 1
            else:
                high = middle
        return self._read(low, min(self._end, low + count))

    def pieces(self) -> Iterator[Table]:
        """What is left, in pieces."""
        for at in range(self.at, self._end, _PIECE):
            yield self._read(at, min(self._end, at + _PIECE))


class _Columns:
    """Entries in the order they came."""

    __slots__ = ("dues", "lengths", "offsets")

    def __init__(self) -> None:
        self.dues = array("Q")
        self.offsets = array("Q")
        self.lengths = array("I")

    def append(self, due: int, offset: int, length: int) -> None:
        self.dues.append(due)
        self.offsets.append(offset)
        self.lengths.append(length)

    def extend(self, dues: Any, offsets: Any, lengths: Any) -> None:
        """Entries as arrays."""
        self.dues.frombytes(np.ascontiguousarray(dues, np.uint64).view(np.uint8).data)
        self.offsets.frombytes(np.ascontiguousarray(offsets, np.uint64).view(np.uint8).data)
        self.lengths.frombytes(np.ascontiguousarray(lengths, np.uint32).view(np.uint8).data)

    def table(self, number: int) -> Table:
        table = np.empty(len(self.dues), ENTRY)
        table["due"] = np.frombuffer(self.dues, np.uint64)
        table["offset"] = np.frombuffer(self.offsets, np.uint64)
        table["length"] = np.frombuffer(self.lengths, np.uint32)
        table["fragment"] = number
        return table


class Held(NamedTuple):
    """What a fragment has in memory."""

    near: list[tuple[int, int, int]]
    far: list[_Columns]
    chunks: list[Source]

    def table(self, number: int) -> Table:
        """All of it, in no order."""
        near = np.array([(*entry, number) for entry in self.near], ENTRY)
        chunks = [table for chunk in self.chunks for table in chunk.pieces()]
        return np.concatenate([near, *(columns.table(number) for columns in self.far), *chunks])


class Fragment:
    """The entries of one fragment that are in memory."""

    __slots__ = ("_aside", "_chunks", "_far", "bound", "near")

    def __init__(self, *, everything_elsewhere: bool = False) -> None:
        self.near: list[tuple[int, int, int]] = []
        self.bound = _EVERYTHING_ELSEWHERE if everything_elsewhere else _NOTHING_ELSEWHERE
        self._chunks: list[Source] = []
        self._aside: list[_Columns] = []  # columns that a freeze gave out: nothing is added to them any more
        self._far = _Columns()

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing, here or elsewhere, as far as was looked."""
        return not self.near and self.bound is _NOTHING_ELSEWHERE

    def add(self, dues: Any, offsets: Any, lengths: Any) -> None:
        """Entries of a batch; columns are lists or arrays."""
        if isinstance(offsets, np.ndarray) and len(offsets) + len(self.near) > LOAD:
            if self.bound is _NOTHING_ELSEWHERE:
                self._spill()
            if int(dues.min()) > self.bound[0]:
                self._far.extend(dues, offsets, lengths)
                return
        for due, offset, length in zip(_ints(dues), _ints(offsets), _ints(lengths), strict=True):
            self.insert(due, offset, length)

    def insert(self, due: int, offset: int, length: int) -> None:
        """One entry."""
        if (due, offset) < self.bound:
            heapq.heappush(self.near, (due, offset, length))
            if len(self.near) > 4 * LOAD:
                self._spill()
        else:
            self._far.append(due, offset, length)

    def _spill(self) -> None:
        """Move all of `near` to `far`, to be loaded again in order."""
        for due, offset, length in self.near:
            self._far.append(due, offset, length)
        self.near = []
        self.bound = _EVERYTHING_ELSEWHERE

    def load(self, sources: list[Source]) -> list[tuple[int, int, int]] | None:
        """Take the earliest entries from the sources and from here, and set the bound behind them.

        Returns them in order, for the caller to put those still wanted into the empty `near`; None if there are none.
        """
        self._sort_far()
        sources = [source for source in (*sources, *self._chunks) if source.left]
        if not sources:
            self.bound = _NOTHING_ELSEWHERE
            self._chunks = []
            return None
        # The LOAD first of all are among the LOAD first of each.
        tables = [source.peek(LOAD) for source in sources]
        joined = np.concatenate(tables)
        order = np.lexsort((joined["offset"].astype(np.uint64), joined["due"].astype(np.uint64)))[:LOAD]
        start = 0
        for source, table in zip(sources, tables, strict=True):
            source.at += int(((order >= start) & (order < start + len(table))).sum())
            start += len(table)
        first = joined[order]
        loaded = list(zip(*(first[name].tolist() for name in ("due", "offset", "length")), strict=True))
        more = any(source.left for source in sources)
        self.bound = (loaded[-1][0], loaded[-1][1] + 1) if more else _NOTHING_ELSEWHERE
        return loaded

    def _sort_far(self) -> None:
        far = [columns for columns in (*self._aside, self._far) if columns.dues]
        if far:
            self._chunks.append(_in_memory(sorted_table(np.concatenate([columns.table(0) for columns in far]))))
            self._aside, self._far = [], _Columns()
        self._chunks = [chunk for chunk in self._chunks if chunk.left]
        if len(self._chunks) > _CHUNKS_MAX:
            joined = np.concatenate([table for chunk in self._chunks for table in chunk.pieces()])
            self._chunks = [_in_memory(sorted_table(joined))]

    def after(self, due: int, offset: int, count: int) -> list[Table]:
        """Entries held here that come behind (due, offset); the first `count` of them are among these."""
        loose = Held(self.near, [*self._aside, self._far], []).table(0)
        dues, offsets = loose["due"].astype(np.uint64), loose["offset"].astype(np.uint64)
        behind = (dues > np.uint64(due)) | (dues == np.uint64(due)) & (offsets > np.uint64(offset))
        return [loose[behind], *(chunk.after(due, offset, count) for chunk in self._chunks)]

    def table(self, number: int) -> Table:
        """Everything held here, in no order."""
        return Held(self.near, [*self._aside, self._far], self._chunks).table(number)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def freeze(self) -> Held:
        """What is held now, for somebody else to read while this goes on."""
        if self._far.dues:
            self._aside.append(self._far)
            self._far = _Columns()
        return Held(list(self.near), list(self._aside), [chunk.copy() for chunk in self._chunks])

    def forget(self, held: Held, before: int) -> Fragment:
        """What is left without the entries at offsets below `before`, which are elsewhere now.

        Parameters:
            held: what `freeze` gave: all of it is below, and need not be looked at.
        """
        frozen = {id(columns) for columns in held.far}
        far = [columns for columns in (*self._aside, self._far) if id(columns) not in frozen]
        chunks = [chunk for chunk in self._chunks if not any(chunk.reads_from(one) for one in held.chunks)]
        table = Held([entry for entry in self.near if entry[1] >= before], far, chunks).table(0)
        table = table[table["offset"].astype(np.uint64) >= np.uint64(before)]
        left = Fragment(everything_elsewhere=True)
        left._far.extend(*(table[name].astype(np.uint64) for name in ("due", "offset", "length")))
        return left


def _in_memory(table: Table) -> Source:
    return Source(lambda start, stop: table[start:stop], 0, 0, len(table))


def _ints(column: Any) -> list[int]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
