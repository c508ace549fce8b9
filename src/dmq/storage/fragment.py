"""One fragment of the delay wheel: the entries due next on a heap, the others in sorted columns.

Pure code. `near` is a heap of (due, offset, length); whatever is not in it, here or in a run on disk, comes at or after
`bound`. What is added later than that goes to `far`, unsorted columns that are sorted only when they are needed.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from dmq.storage.blocks import Table

__all__ = ["ENTRY", "LOAD", "Fragment", "Source", "sorted_table"]

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


class Fragment:
    """See the module."""

    __slots__ = ("_chunks", "_dues", "_lengths", "_offsets", "bound", "near")

    def __init__(self, *, everything_elsewhere: bool = False) -> None:
        self.near: list[tuple[int, int, int]] = []
        self.bound = _EVERYTHING_ELSEWHERE if everything_elsewhere else _NOTHING_ELSEWHERE
        self._chunks: list[Source] = []
        self._clear_far()

    def _clear_far(self) -> None:
        self._dues = array("Q")
        self._offsets = array("Q")
        self._lengths = array("I")

    def add(self, dues: Any, offsets: Any, lengths: Any) -> None:
        """Entries of a batch; columns are lists or arrays."""
        if isinstance(offsets, np.ndarray) and len(offsets) + len(self.near) > LOAD:
            if self.bound is _NOTHING_ELSEWHERE:
                self._spill()
            if int(dues.min()) > self.bound[0]:
                self._dues.frombytes(np.ascontiguousarray(dues, np.uint64).view(np.uint8).data)
                self._offsets.frombytes(np.ascontiguousarray(offsets, np.uint64).view(np.uint8).data)
                self._lengths.frombytes(np.ascontiguousarray(lengths, np.uint32).view(np.uint8).data)
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
            self._dues.append(due)
            self._offsets.append(offset)
            self._lengths.append(length)

    def _spill(self) -> None:
        """Move all of `near` to `far`, to be loaded again in order."""
        for due, offset, length in self.near:
            self._dues.append(due)
            self._offsets.append(offset)
            self._lengths.append(length)
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
        loaded = [(due, offset, length) for due, offset, length, _ in joined[order].tolist()]
        more = any(source.left for source in sources)
        self.bound = (loaded[-1][0], loaded[-1][1] + 1) if more else _NOTHING_ELSEWHERE
        return loaded

    def _sort_far(self) -> None:
        if self._dues:
            self._chunks.append(_in_memory(sorted_table(self._far_table(0))))
            self._clear_far()
        self._chunks = [chunk for chunk in self._chunks if chunk.left]
        if len(self._chunks) > _CHUNKS_MAX:
            joined = np.concatenate([table for chunk in self._chunks for table in chunk.pieces()])
            self._chunks = [_in_memory(sorted_table(joined))]

    def _far_table(self, number: int) -> Table:
        table = np.empty(len(self._dues), ENTRY)
        table["due"] = np.frombuffer(self._dues, np.uint64)
        table["offset"] = np.frombuffer(self._offsets, np.uint64)
        table["length"] = np.frombuffer(self._lengths, np.uint32)
        table["fragment"] = number
        return table

    def after(self, due: int, offset: int, count: int) -> list[Table]:
        """Entries held here that come behind (due, offset); the first `count` of them are among these."""
        loose = np.concatenate([np.array([(*entry, 0) for entry in self.near], ENTRY), self._far_table(0)])
        dues, offsets = loose["due"].astype(np.uint64), loose["offset"].astype(np.uint64)
        behind = (dues > np.uint64(due)) | (dues == np.uint64(due)) & (offsets > np.uint64(offset))
        return [loose[behind], *(chunk.after(due, offset, count) for chunk in self._chunks)]

    def table(self, number: int) -> Table:
        """Everything held here, in no order."""
        near = np.array([(*entry, number) for entry in self.near], ENTRY)
        chunks = [table for chunk in self._chunks for table in chunk.pieces()]
        return np.concatenate([near, self._far_table(number), *chunks])


def _in_memory(table: Table) -> Source:
    return Source(lambda start, stop: table[start:stop], 0, 0, len(table))


def _ints(column: Any) -> list[int]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
