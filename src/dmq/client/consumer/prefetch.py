"""The prefetch: messages that are here and wait for their handler, the highest priority first (A-02, A-03). Pure.

What always holds: messages of one priority leave in the order they came; in an ordered group whole leases leave one
after another, whatever their priority, each when it is free to, and within a lease messages leave in order, also those
that came to wait again; `count` and `bytes` are those of the messages that wait. The broker's credit bounds both: what
is here or in hand is never more than was asked for, but for the one message that is larger than all of it.

The prefetch that a program asks for is the ceiling of that credit. The credit itself is a window (`CreditWindow`) that
follows what handlers finish, so that members share by need: a slow one has little that an idle one could do. At
several brokers each has a window, and a share of the prefetch as its ceiling; `loans` says how shares move to where
messages are.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Final, TypeAlias

from dmq.client.consumer.delivery import SETTLED, TAKEN, WAITING, Delivery, is_all

__all__ = ["LOOK_SECONDS", "CreditWindow", "Part", "Prefetch", "Turn", "loans"]

Part: TypeAlias = tuple[Delivery, Sequence[int]]  # a delivery, and some of its messages
_PRIORITIES: Final = 10
_TAKEN: Final = bytes((TAKEN,))
_ROUNDS: Final = 2  # one message that a handler works on, and one that waits for it
_GROW_SECONDS: Final = 0.25  # a window that is finished sooner is too small
LOOK_SECONDS: Final = 0.5
"""How often to look whether what waits is more than handlers get done; also how much work may wait, in seconds."""
_CLAIM_SECONDS: Final = 0.05  # what others need is counted by half a second: much sooner it is the same


class CreditWindow:
    """How many messages one broker may have out with a consumer.

    It begins with two for each handler. It doubles whenever as many messages as it holds were finished within a quarter
    of a second, and when handlers wait though all of it is in hand; in a few round trips fast handlers have it all. A
    look every half second makes it as small as handlers are slow.

    Parameters:
        ceiling: what the program asked for at most.
        is_shared: other members could do what waits here; else it is at its ceiling from the beginning.
    """

    __slots__ = (
        "_begun",
        "_claimed",
        "_finished",
        "_lately",
        "_lately_before",
        "_lately_since",
        "_looked",
        "_seen",
        "_since",
        "ceiling",
        "is_shared",
        "size",
    )

    def __init__(self, ceiling: int, *, is_shared: bool = True) -> None:
        self.ceiling = ceiling
        self.is_shared = is_shared
        self.size = 1 if is_shared else ceiling
        self._since: float | None = None
        self._claimed = float("-inf")  # when it last said that its ceiling is too low
        self._begun = self._looked = 0.0
        self._finished = self._seen = 0
        # What was finished in this half second, and in the one before.
        self._lately = self._lately_before = 0
        self._lately_since = 0.0

    def begin(self, handlers: float, now: float) -> None:
        """Have room for so many handlers."""
        self.size = min(self.ceiling, max(self.size, self._floor(handlers)))
        self._begun, self._finished = now, 0
        if self._since is None:
            self._since = now
        self.watch(now)

    def _floor(self, handlers: float) -> int:
        return max(1, ceil(_ROUNDS * handlers))

    def limit(self, ceiling: int) -> None:
        """There is another ceiling."""
        self.size = min(self.size, ceiling) if self.is_shared else ceiling
        self.ceiling = ceiling

    def grow(self) -> None:
        """It is too small."""
        self.size = min(self.ceiling, 2 * self.size)

    def finished(self, count: int, now: float) -> bool:
        """Handlers are done with so many more messages; returns now and then whether its ceiling is too low."""
        self._seen += count
        self._finished += count
        self._age(now)
        self._lately += count
        if self._finished < self.size:
            return False
        is_quick = now - self._begun <= _GROW_SECONDS
        # At first all are small, and the one that is quickest would get what the others are about to need.
        is_low = is_quick and self.size >= self.ceiling and now - (self._since or 0.0) >= LOOK_SECONDS
        is_low = is_low and now - self._claimed >= _CLAIM_SECONDS
        if is_quick:
            self.grow()
        self._begun, self._finished = now, 0
        if is_low:
            self._claimed = now
        return is_low

    def _age(self, now: float) -> None:
        passed = now - self._lately_since
        if passed >= LOOK_SECONDS:
            self._lately_before = self._lately if passed < 2 * LOOK_SECONDS else 0
            self._lately, self._lately_since = 0, now

    def needed(self, in_hand: int, now: float) -> int:
        """How much of its ceiling it makes use of: what is in hand, and what handlers finish in half a second."""
        self._age(now)
        return max(1, in_hand + max(self._lately, self._lately_before))

    def watch(self, now: float) -> None:
        """Messages wait: a look follows."""
        self._looked, self._seen = now, 0

    def look(self, handlers: float, taken: float, now: float) -> None:
        """Handlers were at it since the last look: shrink to what they get done.

        Parameters:
            taken: how many messages they have now; a program may keep many before it acks the first.
        """
        rate = self._seen / max(now - self._looked, 1e-3)
        needed = max(self._floor(handlers), ceil(taken + handlers)) + ceil(rate * LOOK_SECONDS)
        if self.is_shared and self.size > 2 * needed:
            self.size = needed
            self._begun, self._finished = now, 0
        self.watch(now)


def loans(windows: Sequence[CreditWindow], needed: Sequence[int], to: int, even: int) -> list[tuple[int, int]]:
    """How much of their ceilings others can give to a window that is too small, so that it doubles: (who, how much).

    They give what they do not need. A window below an even share gets that much also of others that are above theirs
    and need it.

    Parameters:
        needed: how much each of them makes use of.
        to: which one is too small.
        even: what each has if all have alike.
    """
    ceiling, wanted = windows[to].ceiling, windows[to].ceiling
    found: list[tuple[int, int]] = []
    for at in sorted(range(len(windows)), key=lambda at: -windows[at].ceiling):
        spare = windows[at].ceiling - max(1, needed[at])
        due = min(even - ceiling, windows[at].ceiling - even)
        lent = min(wanted, max(spare, due))
        if at != to and lent > 0:
            found.append((at, lent))
            ceiling += lent
            wanted -= lent
    return found


class Turn:
    """A part that one handler works on, one message after the other.

    Its owner, who runs the handler, only counts what it is done with. The core makes acks of that, for many messages at
    a time: when the turn ends, when reports leave, and before anything else is said of any message.

    Attributes:
        done: how many messages the handler is done with; written by the owner alone.
        stop: the owner looks before each message whether it is the last one, and then ends the turn.
    """

    __slots__ = ("_looked", "acked", "delivery", "done", "indexes", "stop")

    def __init__(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        self.delivery = delivery
        self.indexes = indexes
        self.done = 0
        self.stop = len(indexes)
        self.acked = 0
        self._looked = -1

    @classmethod
    def of_all(cls, delivery: Delivery) -> Turn:
        """A turn of all messages of a delivery, none of which waited for anybody."""
        count = delivery.count
        delivery.states[:], delivery.waiting = _TAKEN * count, 0
        return cls(delivery, range(count))

    def is_stuck(self) -> bool:
        """Whether the handler is at the same message as when this was asked last, with others behind it."""
        looked, self._looked = self._looked, self.done
        return looked == self._looked and looked + 1 < self.stop

    def cut(self) -> Sequence[int]:
        """Take what is behind the message that the handler is at out of the turn; nothing if it gets on just now."""
        done, stop = self.done, self.stop
        self.stop = done + 1
        # The owner writes `done` and then reads `stop`. If it has not written by now, it reads what was written here.
        if self.done != done:
            self.stop = stop
            return ()
        behind, self.indexes = self.indexes[done + 1 :], self.indexes[: done + 1]
        return behind

    @property
    def rest(self) -> list[tuple[Delivery, int]]:
        """What no handler is done with."""
        return [(self.delivery, index) for index in self.indexes[self.done :]]


class _Lane:
    """What waits of one delivery in one priority."""

    __slots__ = ("at", "delivery", "indexes")

    def __init__(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        self.delivery = delivery
        self.indexes = indexes
        self.at = 0


class Prefetch:
    """The messages of one consumer that wait.

    Parameters:
        is_ordered: of an ordered group.
        is_free: of such a group, whether a delivery may be taken from now.
        is_over: told of a delivery whose lease is over, to `drop` it.
    """

    def __init__(
        self,
        *,
        is_ordered: bool = False,
        is_free: Callable[[Delivery], bool] = lambda _: True,
        is_over: Callable[[Delivery], object] | None = None,
    ) -> None:
        self._is_ordered = is_ordered
        self._is_free = is_free
        self._is_over = is_over or self.drop
        self._lanes: list[deque[_Lane]] = [deque() for _ in range(_PRIORITIES)]
        self._filled = 0  # a bit for each priority that may have something
        self.count = 0
        self.bytes = 0

    def emptied(self) -> Prefetch:
        """Another one in which nothing waits."""
        return Prefetch(is_ordered=self._is_ordered, is_free=self._is_free, is_over=self._is_over)

    def __len__(self) -> int:
        return self.count

    def put(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        """Let messages of a delivery wait; all of them are `WAITING`."""
        if not indexes:
            return
        count, starts = len(indexes), delivery.starts
        self.count += count
        self.bytes += starts[-1] - starts[0] if count == delivery.count else _size(delivery, indexes)
        lanes = self._lanes
        if self._is_ordered:
            self._put_in_order(delivery, indexes)
            return
        priorities = delivery.priorities()
        if priorities.count(priorities[0]) == len(priorities):
            priority = min(priorities[0], _PRIORITIES - 1)
            lanes[priority].append(_Lane(delivery, indexes))
            self._filled |= 1 << priority
            return
        apart: dict[int, list[int]] = {}
        for index in indexes:
            apart.setdefault(_bounded(priorities[index]), []).append(index)
        for priority, some in apart.items():
            lanes[priority].append(_Lane(delivery, some))
            self._filled |= 1 << priority

    def _put_in_order(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        for lane in self._lanes[0]:
            if lane.delivery is delivery:
                lane.indexes, lane.at = sorted([*lane.indexes[lane.at :], *indexes]), 0
                return
        self._lanes[0].append(_Lane(delivery, indexes))

    @property
    def has_free(self) -> bool:
        """Whether anything may be taken now."""
        if not self._is_ordered:
            return self.count > 0
        return any(lane.delivery.waiting and self._is_free(lane.delivery) for lane in [*self._lanes[0]])

    def take(self, limit: int, now: float) -> list[tuple[Delivery, int]]:
        """The next messages, at most so many; they are `TAKEN` then.

        Of an ordered group, messages of one delivery only. What waited longer than its lease is dropped: the broker
        hands it out again.
        """
        found: list[tuple[Delivery, int]] = []
        if self._is_ordered:
            self._take_in_order(limit, now, found)
            return found
        while self._filled:
            priority = self._filled.bit_length() - 1
            lanes = self._lanes[priority]
            while lanes:
                lane = lanes[0]
                delivery = lane.delivery
                if delivery.deadline <= now:
                    self._is_over(delivery)
                if self._take_from(lane, limit, found):
                    lanes.popleft()
                if len(found) >= limit:
                    return found
            self._filled ^= 1 << priority
        return found

    def _take_in_order(self, limit: int, now: float, found: list[tuple[Delivery, int]]) -> None:
        lanes = self._lanes[0]
        for lane in [*lanes]:
            if lane.delivery.deadline <= now:
                self._is_over(lane.delivery)
            if self._is_free(lane.delivery) and self._take_from(lane, limit, found):
                with contextlib.suppress(ValueError):  # dropping the last message drops the lanes as well
                    lanes.remove(lane)
            if found:
                return

    def take_part(self, limit: int, now: float) -> Part | None:
        """The next messages of one delivery, at most so many; they are `TAKEN` then."""
        if self._is_ordered:
            return self._part_in_order(limit, now)
        while self._filled:
            priority = self._filled.bit_length() - 1
            lanes = self._lanes[priority]
            while lanes:
                lane = lanes[0]
                delivery = lane.delivery
                if delivery.deadline <= now:
                    self._is_over(delivery)
                chosen = self._part_of(lane, limit)
                if lane.at >= len(lane.indexes):
                    lanes.popleft()
                if chosen:
                    return delivery, chosen
            self._filled ^= 1 << priority
        return None

    def _part_in_order(self, limit: int, now: float) -> Part | None:
        lanes = self._lanes[0]
        for lane in [*lanes]:
            if lane.delivery.deadline <= now:
                self._is_over(lane.delivery)
            if self._is_free(lane.delivery):
                chosen = self._part_of(lane, limit)
                if lane.at >= len(lane.indexes):
                    with contextlib.suppress(ValueError):  # dropping the last message drops the lanes as well
                        lanes.remove(lane)
                if chosen:
                    return lane.delivery, chosen
        return None

    def take_parts(self, limit: int, now: float) -> list[Part]:
        """The next messages by deliveries, at most so many; they are `TAKEN` then. For a group that is not ordered."""
        parts: list[Part] = []
        while limit > 0 and (part := self.take_part(limit, now)) is not None:
            parts.append(part)
            limit -= len(part[1])
        return parts

    def _part_of(self, lane: _Lane, limit: int) -> Sequence[int]:
        """Take what still waits among the next ones of a lane."""
        delivery, states = lane.delivery, lane.delivery.states
        chosen = lane.indexes[lane.at : lane.at + limit]
        count = len(chosen)
        lane.at += count
        if count == delivery.waiting == delivery.count:  # the usual case: all of it, and all of it waits
            states[:] = _TAKEN * count
            self.count -= count
            self.bytes -= delivery.starts[-1] - delivery.starts[0]
            delivery.waiting = 0
            return chosen
        if not is_all(states, WAITING, chosen):
            chosen = [index for index in chosen if states[index] == WAITING]
        if isinstance(chosen, range):
            states[chosen.start : chosen.stop] = bytes((TAKEN,)) * len(chosen)
        else:
            for index in chosen:
                states[index] = TAKEN
        self.count -= len(chosen)
        self.bytes -= _size(delivery, chosen)
        delivery.waiting -= len(chosen)
        return chosen

    def _take_from(self, lane: _Lane, limit: int, found: list[tuple[Delivery, int]]) -> bool:
        """Take what still waits of a lane; whether that was all."""
        delivery, indexes, at = lane.delivery, lane.indexes, lane.at
        states, starts, count = delivery.states, delivery.starts, len(found)
        size, end = 0, len(indexes)
        while at < end and len(found) < limit:
            index = indexes[at]
            at += 1
            if states[index] == WAITING:
                states[index] = TAKEN
                size += starts[index + 1] - starts[index]
                found.append((delivery, index))
        lane.at = at
        taken = len(found) - count
        self.count -= taken
        self.bytes -= size
        delivery.waiting -= taken
        return at >= end

    def put_back(self, delivery: Delivery, indexes: Sequence[int]) -> None:
        """Let messages that were taken last wait again, before others of their priority. Not of an ordered group."""
        for index in indexes:
            delivery.states[index] = WAITING
        self.count += len(indexes)
        self.bytes += _size(delivery, indexes)
        delivery.waiting += len(indexes)
        priority = _bounded(delivery.priority(indexes[0]))
        self._lanes[priority].appendleft(_Lane(delivery, indexes))
        self._filled |= 1 << priority

    def give_back(self, count: int) -> list[Part]:
        """Take the messages out that would be handed out last, as settled without a word. Not of an ordered group."""
        parts: list[Part] = []
        for lanes in self._lanes:
            while lanes and count > 0:
                lane = lanes[-1]
                delivery, end = lane.delivery, len(lane.indexes)
                last = lane.indexes[max(lane.at, end - count) :]
                lane.indexes = lane.indexes[: end - len(last)]
                if lane.at >= len(lane.indexes):
                    lanes.pop()
                gone = [index for index in last if delivery.states[index] == WAITING]
                self._take_out(delivery, gone)
                count -= len(gone)
                if gone:
                    parts.append((delivery, gone))
        return parts

    def drop(self, delivery: Delivery) -> list[int]:
        """Take all that waits of a delivery out, as settled without a word; which they were."""
        states = delivery.states
        gone = [index for index, state in enumerate(states) if state == WAITING]
        self._take_out(delivery, gone)
        if not self.count:
            self._empty()  # or what was dropped while nobody takes would pile up
        return gone

    def _take_out(self, delivery: Delivery, gone: Sequence[int]) -> None:
        for index in gone:
            delivery.states[index] = SETTLED
        self.count -= len(gone)
        self.bytes -= _size(delivery, gone)
        delivery.waiting -= len(gone)
        delivery.left -= len(gone)

    def _empty(self) -> None:
        # Only what lies behind the first one of each priority: that may be what is being taken from right now.
        for lanes in self._lanes:
            while len(lanes) > 1:
                lanes.pop()


def _bounded(priority: int) -> int:
    return min(priority, _PRIORITIES - 1)


def _size(delivery: Delivery, indexes: Iterable[int]) -> int:
    starts = delivery.starts
    if isinstance(indexes, range):
        return starts[indexes.stop] - starts[indexes.start] if indexes else 0
    return sum(starts[index + 1] - starts[index] for index in indexes)
