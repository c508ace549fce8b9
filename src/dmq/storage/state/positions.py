"""Positions: how far each group has come in each queue.

Pure code. A position is a floor (everything below is settled) and the settled ranges above it, sorted, apart from each
other. What always holds: floor <= the first range's start; ranges neither touch nor overlap; a settled offset never
becomes unsettled except by `set`.

Running sums from which the lag of every group in every topic follows, without looking at each of them.

The lag of a group in a topic is what the topic's queues have given out in offsets, less what the group no longer waits
for: what it settled, and what retention dropped before it was settled. Both sums are kept for every pair of topic and
group, in arrays, so that the largest of 100,000 lags are found in a millisecond.

What always holds: `State` tells every change of queues and positions; sums are those of a recount, except for pairs of
topics whose first messages were just dropped (`is_behind`), whose lag is too large until `catch_up` has looked at them.
A queue in which a group has no position yet counts from its first message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["LagTable", "Pair", "Position", "PositionTable", "passed"]

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


_TOPIC_SHIFT: Final = 8  # of a queue's key


class Pair(NamedTuple):
    """A group at a topic."""

    topic_id: int
    group: str


def passed(position: Position | None, first: int) -> int:
    """How many offsets of a queue a group no longer waits for: those it settled, and those below the first kept."""
    if position is None:
        return first
    if position.floor >= first:
        return position.settled
    return first + sum(end - max(start, first) for start, end in position.ranges if end > first)


class QueueState(Protocol):
    """What lags follow from: by the key of a queue its first and its next offset, and the positions of all groups."""

    first: dict[int, int]
    next: dict[int, int]
    positions: PositionTable

    def queue_count(self, topic_id: int) -> int:
        """How many queues a topic has; 0 if there is none."""
        ...


class LagTable:
    """The lags of one store.

    Parameters:
        state: what they follow from; it tells of its changes from now on.
    """

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._slots: dict[Pair, int] = {}
        self._pairs: list[Pair | None] = []  # by slot
        self._free: list[int] = []
        self._passed = array("q")  # by slot
        self._topic_slots = array("q")  # by slot
        self._stored = array("q")  # by topic slot: the sum of the next offsets of its queues
        self._topics: dict[int, int] = {}  # topic slots by topic id
        self._topic_ids = array("q")  # by topic slot
        self._topics_free: list[int] = []
        self._groups: dict[int, dict[str, int]] = {}  # slots by topic id and group
        self._behind: dict[Pair, None] = {}
        for key, following in state.next.items():
            self.stored(key, following)
        for group, positions in state.positions.groups().items():
            for topic_id in {topic_id for topic_id, _ in positions}:
                self._add(Pair(topic_id, group))

    # --- what the state tells ---------------------------------------------------------------------------------------

    def stored(self, key: int, count: int) -> None:
        """A queue has given out more offsets."""
        try:
            self._stored[self._topics[key >> 8]] += count  # for every batch: no call on the way
        except KeyError:
            self._stored[self._topic(key >> _TOPIC_SHIFT)] += count

    def moved(self, group: str, topic_id: int, by: int) -> None:
        """A group no longer waits for so many offsets; below 0 it waits for them again."""
        slot = self._slots.get((topic_id, group))  # type: ignore[call-overload]
        if slot is None:
            self._add(Pair(topic_id, group))
        else:
            self._passed[slot] += by

    def dropped(self, topic_id: int, group: str | None = None) -> None:
        """A topic is gone, or only a group in it."""
        groups = self._groups.get(topic_id, {})
        for name in [*groups] if group is None else [group]:
            slot = groups.pop(name, None)
            if slot is not None:
                pair = Pair(topic_id, name)
                del self._slots[pair]
                self._behind.pop(pair, None)
                self._pairs[slot] = None
                self._passed[slot] = self._topic_slots[slot] = 0
                self._free.append(slot)
        if not groups:
            self._groups.pop(topic_id, None)
        if group is None and (topic_slot := self._topics.pop(topic_id, None)) is not None:
            self._stored[topic_slot] = self._topic_ids[topic_slot] = 0
            self._topics_free.append(topic_slot)

    def begun_at(self, firsts: Mapping[int, int]) -> None:
        """Retention dropped what was below these offsets of queues."""
        for topic_id in {key >> _TOPIC_SHIFT for key in firsts}:
            self._behind.update(dict.fromkeys(Pair(topic_id, group) for group in self._groups.get(topic_id, ())))

    # --- what is behind ---------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether some lags are still too large."""
        return bool(self._behind)

    def catch_up(self, pairs: int) -> None:
        """Look at so many pairs whose first messages were dropped."""
        for pair in list(islice(self._behind, pairs)):
            del self._behind[pair]
            self._passed[self._slots[pair]] = self._recount(pair)

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[Pair | None]:
        """The pairs, each in the place it keeps for life; places of pairs that are gone are None, and given again."""
        return self._pairs

    @property
    def topic_slots(self) -> array[int]:
        """The same for topics, by id; 0 for a place that is free."""
        return self._topic_ids

    def __contains__(self, pair: object) -> bool:
        return pair in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._slots)

    def stored_in(self, topic_id: int) -> int:
        """How many offsets the queues of a topic have given out."""
        slot = self._topics.get(topic_id)
        return 0 if slot is None else self._stored[slot]

    def groups_in(self, topic_id: int) -> int:
        """How many groups consume a topic."""
        return len(self._groups.get(topic_id, ()))

    def of(self, pair: Pair) -> int:
        """The lag of a group in a topic."""
        slot = self._slots[pair]
        return self._stored[self._topic_slots[slot]] - self._passed[slot]

    def total(self) -> int:
        """All lags together."""
        return int(self._lags().sum())

    def largest(self, count: int) -> list[Pair]:
        """The pairs with the largest lags, the largest first."""
        lags = self._lags()
        return [pair for slot in _largest(lags, count) if (pair := self._pairs[slot]) is not None]

    def fullest(self, count: int) -> list[int]:
        """The ids of the topics whose queues have given out the most offsets, the most first."""
        slots = _largest(np.frombuffer(self._stored, np.int64), count)
        return [topic_id for slot in slots if (topic_id := self._topic_ids[slot])]

    def recount(self) -> dict[Pair, int]:
        """The same lags, by looking at every position: for tests."""
        return {pair: self.stored_in(pair.topic_id) - self._recount(pair) for pair in self._slots}

    def _lags(self) -> npt.NDArray[np.int64]:
        # A slot that is free has no topic slot of its own: what it shows of another topic is taken out again.
        stored, slots = np.frombuffer(self._stored, np.int64), np.frombuffer(self._topic_slots, np.int64)
        if not len(slots):
            return np.zeros(0, np.int64)
        lags: npt.NDArray[np.int64] = stored[slots] - np.frombuffer(self._passed, np.int64)
        if self._free:
            lags[self._free] = 0
        return lags

    def _topic(self, topic_id: int) -> int:
        if self._topics_free:
            slot = self._topics_free.pop()
        else:
            slot = len(self._stored)
            self._stored.append(0)
            self._topic_ids.append(0)
        self._topic_ids[slot] = topic_id
        self._topics[topic_id] = slot
        return slot

    def _add(self, pair: Pair) -> None:
        topic_slot = self._topics.get(pair.topic_id)
        if topic_slot is None:
            topic_slot = self._topic(pair.topic_id)
        if self._free:
            slot = self._free.pop()
            self._pairs[slot] = pair
            self._topic_slots[slot] = topic_slot
        else:
            slot = len(self._pairs)
            self._pairs.append(pair)
            self._topic_slots.append(topic_slot)
            self._passed.append(0)
        self._slots[pair] = slot
        self._groups.setdefault(pair.topic_id, {})[pair.group] = slot
        self._passed[slot] = self._recount(pair)

    def _recount(self, pair: Pair) -> int:
        queues = range(self._state.queue_count(pair.topic_id))
        key, first, get = pair.topic_id << _TOPIC_SHIFT, self._state.first, self._state.positions.get
        return sum(passed(get(pair.group, pair.topic_id, queue), first.get(key | queue, 0)) for queue in queues)


def _largest(values: npt.NDArray[np.int64], count: int) -> list[int]:
    """Where the largest values stand, the largest first."""
    if len(values) > count:
        # The bound is sought by halves: where many values are the same, as lags are, a partition takes much longer.
        low, high = -1, int(values.max(initial=0))
        while low + 1 < high:
            middle = (low + high) // 2
            if np.count_nonzero(values > middle) > count:
                low = middle
            else:
                high = middle
        places = np.flatnonzero(values > high)
        places = np.concatenate((places, np.flatnonzero(values == high)[: count - len(places)]))
    else:
        places = np.arange(len(values))
    found: list[int] = places[np.argsort(-values[places], kind="stable")].tolist()
    return found
