"""Positions: how far each group has come in each queue.

Pure code. A position is a floor (everything below is settled) and the settled ranges above it, sorted, apart from each
other. What always holds: floor <= the first range's start; ranges neither touch nor overlap; a settled offset never
becomes unsettled except by `set`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import islice
from typing import Final

__all__ = ["Position", "PositionTable"]

_FEW: Final = 8  # ranges; so many are settled one by one


class Position:
    """One group in one queue.

    Attributes:
        settled: how many offsets are settled, those below the floor as well.
    """

    __slots__ = ("_ends", "_starts", "floor", "settled")

    def __init__(self, floor: int, ranges: list[tuple[int, int]] | None = None) -> None:
        self.floor = floor
        self._starts = [start for start, _ in ranges or ()]
        self._ends = [end for _, end in ranges or ()]
        self.settled = floor + (sum(self._ends) - sum(self._starts) if ranges else 0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Settled ranges above the floor, as (start, end)."""
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def has_ranges(self) -> bool:
        return bool(self._starts)

    def settle(self, start: int, end: int) -> bool:
        """Mark [start, end) as settled; returns whether anything changed."""
        start = max(start, self.floor)
        if end <= start:
            return False
        if start == self.floor and (not self._starts or end < self._starts[0]):
            self.settled += end - start
            self.floor = end  # the usual case: acks come in order
            return True
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            if self._starts[first] <= start and end <= self._ends[first]:
                return False
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
            self.settled -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self.settled += end - start
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        if self._starts[0] <= self.floor:
            self.floor = self._ends.pop(0)
            self._starts.pop(0)
        return True

    def settle_all(self, ranges: list[tuple[int, int]]) -> None:
        """Mark many ranges as settled; they rise, and are apart from each other."""
        first = bisect_left(self._ends, ranges[0][0])
        last = bisect_right(self._starts, ranges[-1][1])
        starts: list[int] = []
        ends: list[int] = []
        reached = -1
        for start, end in sorted([*ranges, *zip(self._starts[first:last], self._ends[first:last], strict=True)]):
            if start > reached:
                starts.append(start)
                ends.append(end)
                reached = end
            elif end > reached:
                ends[-1] = reached = end
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        passed = bisect_right(self._starts, self.floor)
        if passed:
            self.floor = max(self.floor, self._ends[passed - 1])
            del self._starts[:passed], self._ends[:passed]
        self.settled = self.floor + sum(self._ends) - sum(self._starts)

    def is_settled(self, offset: int) -> bool:
        if offset < self.floor:
            return True
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Position) and self.floor == other.floor and self.ranges == other.ranges

    def __repr__(self) -> str:
        return f"Position({self.floor}, {self.ranges})"

    __hash__ = None  # type: ignore[assignment]


QueueKey = tuple[int, int]  # topic id, queue


class PositionTable:
    """All positions of all groups, by group, then by (topic id, queue)."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[QueueKey, Position]] = {}

    def get(self, group: str, topic_id: int, queue: int) -> Position | None:
        return self._groups.get(group, {}).get((topic_id, queue))

    def settle(self, group: str, topic_id: int, queue: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Settle ranges, which rise and are apart from each other.

        A group seen here for the first time begins at 0, however old what is kept may be.
        """
        positions = self._groups.setdefault(group, {})
        position = positions.get((topic_id, queue))
        if position is None:
            position = positions[topic_id, queue] = Position(0)
        rest = iter(ranges)
        for start, end in islice(rest, _FEW):
            position.settle(start, end)
        if many := list(rest):
            position.settle_all(many)

    def set(self, group: str, topic_id: int, queue: int, offset: int) -> None:
        self._groups.setdefault(group, {})[topic_id, queue] = Position(offset)

    def drop_group(self, group: str, topic_id: int | None) -> None:
        """Forget a group, or only what it had in one topic."""
        if topic_id is None:
            self._groups.pop(group, None)
            return
        positions = self._groups.get(group, {})
        for key in [key for key in positions if key[0] == topic_id]:
            del positions[key]
        if not positions:
            self._groups.pop(group, None)

    def drop_topic(self, topic_id: int) -> None:
        for group in list(self._groups):
            self.drop_group(group, topic_id)

    def groups(self) -> dict[str, dict[QueueKey, Position]]:
        return self._groups

    def floors(self, topic_id: int, queue: int) -> list[int]:
        """The floor of every group that has a position in the queue."""
        key = (topic_id, queue)
        return [positions[key].floor for positions in self._groups.values() if key in positions]

    def dump(self) -> list[tuple[str, list[tuple[int, int, int, list[tuple[int, int]]]]]]:
        """Everything, as plain data, in no order: the loop waits for it."""
        none: list[tuple[int, int]] = []
        return [
            (group, [(*key, p.floor, p.ranges if p.has_ranges else none) for key, p in positions.items()])
            for group, positions in self._groups.items()
        ]

    def load(self, dumped: list[tuple[str, list[tuple[int, int, int, list[tuple[int, int]]]]]]) -> None:
        self._groups = {
            group: {(topic, queue): Position(floor, ranges) for topic, queue, floor, ranges in rows}
            for group, rows in dumped
        }
