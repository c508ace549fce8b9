"""The window cache: journal ranges known to be good, units just written and units read and verified.

What always holds: a window holds whole units, one after another without a gap; all windows together take at most
`bytes_max` of memory, with what it costs to keep a buffer as such, but for the one used last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dmq.storage.files import Buffer

__all__ = ["WindowCache"]

_WINDOW_BYTES: Final = 1 << 20
_PASSING_MAX: Final = 3
_NOTHING: Final[Mapping[int, str]] = MappingProxyType({})
# What a buffer takes beside its bytes: the object, its place in the lists, rounding. A lone message is a unit of some
# 200 bytes, so a cache that counted only those would take twice its bound.
_BUFFER_BYTES: Final = 160


class _Window:
    __slots__ = ("buffers", "corrupt", "end", "has_blocks", "start", "starts")

    def __init__(self, start: int, buffer: Buffer, corrupt: Mapping[int, str] = _NOTHING) -> None:
        self.start = start
        self.corrupt = corrupt
        self.has_blocks = False
        self.end = start + len(buffer)
        self.starts = [start]
        self.buffers: list[Buffer] = [buffer]

    @property
    def cost(self) -> int:
        """How many bytes of memory it takes."""
        return self.end - self.start + _BUFFER_BYTES * len(self.buffers)

    def get(self, start: int, end: int) -> memoryview | None:
        at = bisect_right(self.starts, start) - 1
        buffer = self.buffers[at]
        base = self.starts[at]
        if end - base > len(buffer):
            return None
        return memoryview(buffer)[start - base : end - base]


class WindowCache:
    """Keeps windows of the journal, the longest unused dropped first.

    Attributes:
        gave_blocks: whether bytes that `get` gave since this was set to False are of a window with body blocks.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._starts: list[int] = []
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._tail: _Window | None = None
        self._passing: deque[int] = deque()
        self._corrupt = 0  # windows that have some
        self.gave_blocks = False

    @property
    def has_corrupt(self) -> bool:
        """Whether any window has records that cannot be read."""
        return self._corrupt > 0

    def corrupt(self, start: int, end: int) -> Mapping[int, str]:
        """The records in [start, end), which lies within one window, that cannot be read, by journal offset, and why.

        To be asked right after the bytes: the window may go with the next ones that come.
        """
        if not self._corrupt:
            return _NOTHING
        at = bisect_right(self._starts, start) - 1
        found = self._windows[self._starts[at]].corrupt if at >= 0 else _NOTHING
        return {offset: why for offset, why in found.items() if start <= offset < end}

    def get(self, start: int, end: int) -> memoryview | None:
        """The bytes [start, end) of the journal, which lie within one unit, if they are here."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        window = self._windows[self._starts[at]]
        if end > window.end:
            return None
        self._windows.move_to_end(window.start)
        if window.has_blocks:
            self.gave_blocks = True
        return window.get(start, end)

    def units_from(self, offset: int, max_bytes: int) -> list[Buffer]:
        """Whole units from one that starts at an offset on, as far as one window has them: none if it is not here.

        At least one, and no more than so many bytes beyond that. Looking changes nothing of how long they stay.
        """
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return []
        window = self._windows[self._starts[at]]
        if offset >= window.end:
            return []
        at = bisect_right(window.starts, offset) - 1
        buffer, base = window.buffers[at], window.starts[at]
        if base == offset and len(window.buffers) == at + 1:  # the last one, as most are
            return [buffer]
        found: list[Buffer] = [buffer if base == offset else memoryview(buffer)[offset - base :]]
        size = len(found[0])
        for buffer in window.buffers[at + 1 :]:
            size += len(buffer)
            if size > max_bytes:
                break
            found.append(buffer)
        return found

    def around(self, start: int, end: int) -> tuple[int, memoryview] | None:
        """The whole buffer that has the bytes [start, end), and where it begins, if it is here."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        window = self._windows[self._starts[at]]
        if end > window.end:
            return None
        self._windows.move_to_end(window.start)
        at = bisect_right(window.starts, start) - 1
        return window.starts[at], memoryview(window.buffers[at])

    def put(
        self,
        start: int,
        buffer: Buffer,
        *,
        passing: bool = False,
        corrupt: Mapping[int, str] = _NOTHING,
        has_blocks: bool = False,
    ) -> None:
        """Whole, verified units that begin at an offset.

        Parameters:
            corrupt: the records in them that cannot be read, by journal offset, and why.
            has_blocks: bodies of some of them may stand in blocks.
            passing: they are read one after another, so earlier ones of this kind will hardly be wanted again: only
                the last few stay. Thus reading a backlog leaves what was just written where it is, and takes the same
                memory again and again, which the processor still has at hand.
        """
        if start in self._windows:
            self._drop(start)
        window = _Window(start, buffer, corrupt)
        window.has_blocks = has_blocks
        self._insert(window)
        if passing:
            self._passing.append(start)
            if len(self._passing) > _PASSING_MAX:
                gone = self._passing.popleft()
                if gone in self._windows and gone not in self._passing:
                    self._drop(gone)

    def put_tail(self, start: int, buffer: Buffer, *, has_blocks: bool = False) -> None:
        """A unit that was just written; small ones gather in one window."""
        tail = self._tail
        if tail is not None and tail.end == start and tail.end - tail.start < _WINDOW_BYTES:
            tail.starts.append(start)
            tail.buffers.append(buffer)
            tail.end += len(buffer)
            self._bytes += len(buffer) + _BUFFER_BYTES
            self._windows.move_to_end(tail.start)
            if self._bytes > self._bytes_max:
                self._shrink()
        else:
            tail = self._tail = _Window(start, buffer)
            self._insert(tail)
        if has_blocks:
            tail.has_blocks = True

    def _insert(self, window: _Window) -> None:
        self._starts.insert(bisect_right(self._starts, window.start), window.start)
        self._windows[window.start] = window
        self._corrupt += bool(window.corrupt)
        self._bytes += window.cost
        self._shrink()

    def _shrink(self) -> None:
        while self._bytes > self._bytes_max and len(self._windows) > 1:
            self._drop(next(iter(self._windows)))

    def _drop(self, start: int) -> None:
        window = self._windows.pop(start)
        self._corrupt -= bool(window.corrupt)
        self._starts.remove(start)
        self._bytes -= window.cost
        if window is self._tail:
            self._tail = None

    def clear(self) -> None:
        self._starts.clear()
        self._windows.clear()
        self._tail = None
        self._passing.clear()
        self._bytes = 0
        self._corrupt = 0
