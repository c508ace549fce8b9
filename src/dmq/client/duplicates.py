"""Duplicates: which messages a consumer has done, so that the same one is not done again (D-10).

A message may come twice with one id: its producer moved to another broker and both had stored it, or an ack got lost
with its connection. The window is keyed by message id and attempt, so that a redelivery after a failure is none. Pure.

Ids of one producer are numbers that follow each other, and are kept as intervals: a consumer that keeps up with its
producers needs a handful of them for millions of messages.

What always holds: only what was acked counts as done; at most `intervals_max` intervals are kept, and the oldest
numbers of the producer heard of least recently go first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final

__all__ = ["DuplicateWindow", "Intervals"]

INTERVALS_MAX: Final = 10_000


class Intervals:
    """A set of numbers, as sorted intervals that do not touch."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        """How many intervals there are."""
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop)."""
        starts, stops = self._starts, self._stops
        if stops and stops[-1] == start:  # the usual case: the next ones
            stops[-1] = stop
            return
        low = bisect_left(stops, start)
        high = bisect_right(starts, stop)
        if low < high:
            start, stop = min(start, starts[low]), max(stop, stops[high - 1])
        starts[low:high] = [start]
        stops[low:high] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out, as far as it is in."""
        starts, stops = self._starts, self._stops
        low = bisect_right(stops, start)
        high = bisect_left(starts, stop)
        if low >= high:
            return
        left, right = starts[low], stops[high - 1]
        kept = [(left, start)] if left < start else []
        if right > stop:
            kept.append((stop, right))
        starts[low:high] = [first for first, _ in kept]
        stops[low:high] = [last for _, last in kept]

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any number of [start, stop) is in."""
        at = bisect_right(self._stops, start)
        return at < len(self._starts) and self._starts[at] < stop

    def drop_first(self) -> None:
        """Forget the lowest interval."""
        del self._starts[0], self._stops[0]


class DuplicateWindow:
    """See the module."""

    def __init__(self, intervals_max: int = INTERVALS_MAX) -> None:
        self._intervals_max = intervals_max
        self._sets: OrderedDict[tuple[int, int], Intervals] = OrderedDict()  # by producer and attempt
        self._count = 0

    def __len__(self) -> int:
        """How many intervals are kept."""
        return self._count

    def add(self, producer: int, attempt: int, start: int, stop: int) -> None:
        """The messages [start, stop) of a producer are done."""
        key = (producer, attempt)
        known = self._sets.get(key)
        if known is None:
            known = self._sets[key] = Intervals()
        else:
            self._sets.move_to_end(key)
        before = len(known)
        known.add(start, stop)
        self._count += len(known) - before
        while self._count > self._intervals_max:
            oldest, numbers = next(iter(self._sets.items()))
            numbers.drop_first()
            self._count -= 1
            if not len(numbers):
                del self._sets[oldest]

    def remove(self, producer: int, attempt: int, start: int, stop: int) -> None:
        """They are not, after all."""
        key = (producer, attempt)
        known = self._sets.get(key)
        if known is not None:
            before = len(known)
            known.remove(start, stop)
            self._count += len(known) - before
            if not len(known):
                del self._sets[key]

    def overlaps(self, producer: int, attempt: int, start: int, stop: int) -> bool:
        """Whether any of them is done."""
        known = self._sets.get((producer, attempt))
        return known is not None and known.overlaps(start, stop)

    def clear(self) -> None:
        """Forget everything."""
        self._sets.clear()
        self._count = 0
