"""Duplicates: which messages of a delivery are for the user, so that none is handled twice (R-07, D-10). Pure.

A message may come twice with one id: its producer moved to another address and both had stored it, or an ack got lost
with its connection. The window of what was handled is keyed by message id and attempt, so that a redelivery after a
failure is not a duplicate. Ids of one producer are numbers that follow each other, and are kept as intervals: a
consumer that keeps up with its producers needs a handful of them for millions of messages.

Not for the user are messages whose tag only shares its hash with a wanted one, and duplicates: messages that were acked
before, and twins of messages that are in hand. A twin gets no handler of its own: it shares the outcome of the first.

What always holds: only acked messages count as done; at most `intervals_max` intervals are kept, and the oldest numbers
of the producer heard of least recently go first; a message is in hand from when it was chosen until it is settled,
dropped or forgotten; every twin is settled or chosen in the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from dmq.client.consumer.delivery import TAKEN, Delivery
from dmq.protocol.consume import Outcome

__all__ = ["DuplicateWindow", "Intervals", "Screened", "Screening"]


INTERVALS_MAX: Final = 10_000
_EMPTY_MAX: Final = 64  # producers that are remembered though nothing of theirs is in


class Intervals:
    """A set of numbers, as sorted intervals that do not touch."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        """How many intervals there are."""
        return len(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def extend(self, start: int, stop: int) -> bool:
        """Add [start, stop) to the last interval if it begins where that one ends; else False, and nothing is done."""
        stops = self._stops
        if not stops or stops[-1] != start:
            return False
        stops[-1] = stop
        return True

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop)."""
        if self.extend(start, stop):
            return
        starts, stops = self._starts, self._stops
        low = bisect_left(stops, start)
        high = bisect_right(starts, stop)
        if low < high:
            start, stop = min(start, starts[low]), max(stop, stops[high - 1])
        starts[low:high] = [start]
        stops[low:high] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out, as far as it is in."""
        starts, stops = self._starts, self._stops
        if starts and starts[0] == start and stops[0] >= stop:  # the usual case: the oldest ones
            if stops[0] == stop:
                del starts[0], stops[0]
            else:
                starts[0] = stop
            return
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
        stops = self._stops
        if not stops or stops[-1] <= start:  # the usual case: later ones
            return False
        at = bisect_right(stops, start)
        return at < len(self._starts) and self._starts[at] < stop

    def drop_first(self) -> None:
        """Forget the lowest interval."""
        del self._starts[0], self._stops[0]


class DuplicateWindow:
    """The messages that were handled, or are in hand."""

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
            if known.extend(start, stop):  # the usual case: the next ones
                return
        before = len(known)
        known.add(start, stop)
        self._count += len(known) - before
        while self._count > self._intervals_max:
            oldest, numbers = next(iter(self._sets.items()))
            if numbers:
                numbers.drop_first()
                self._count -= 1
            if not numbers:
                del self._sets[oldest]

    def remove(self, producer: int, attempt: int, start: int, stop: int) -> None:
        """They are not, after all."""
        key = (producer, attempt)
        known = self._sets.get(key)
        if known is not None:
            before = len(known)
            known.remove(start, stop)
            self._count += len(known) - before
            if not known and len(self._sets) > _EMPTY_MAX:  # the next ones of this producer come soon
                del self._sets[key]

    def overlaps(self, producer: int, attempt: int, start: int, stop: int) -> bool:
        """Whether any of them is done."""
        known = self._sets.get((producer, attempt))
        return known is not None and known.overlaps(start, stop)

    def clear(self) -> None:
        """Forget everything."""
        self._sets.clear()
        self._count = 0


_NO_LIMIT: Final = 1 << 62

_Run: TypeAlias = tuple[int, int, int, int]  # producer, attempt, first sequence, one past the last
_Place: TypeAlias = tuple[Delivery, int]


class Screened(NamedTuple):
    """What came out: messages for the user, those to ack in silence, and those that wait for their twins."""

    chosen: Sequence[int]
    unwanted: Sequence[int] = ()
    twins: Sequence[int] = ()


class Screening:
    """Which messages of one broker are for the user.

    Parameters:
        tags: the tags that are wanted; None for all.
    """

    def __init__(self, tags: frozenset[str | None] | None) -> None:
        self._tags = tags
        self._done = DuplicateWindow()
        self._in_hand = DuplicateWindow(_NO_LIMIT)  # bounded by what is out
        self._twins: dict[tuple[int, int, int], list[_Place]] = {}

    def screen(self, delivery: Delivery) -> Screened:
        """Look through a delivery that came, but for what cannot be read. What is chosen is in hand then."""
        chosen: Sequence[int] = range(delivery.count)
        strangers: list[int] = []
        if delivery.corrupt:
            chosen = [index for index in chosen if index not in delivery.corrupt]
        if self._tags is not None:
            tags, readable = self._tags, chosen
            chosen = [index for index in readable if delivery.record(index).tag in tags]
            if len(chosen) != len(readable):
                wanted = set(chosen)
                strangers = [index for index in readable if index not in wanted]
        added: list[_Run] = []
        for run in delivery.id_runs(chosen):
            if self._done.overlaps(*run) or self._in_hand.overlaps(*run):
                for earlier in added:
                    self._in_hand.remove(*earlier)
                return self._one_by_one(delivery, chosen, strangers)
            self._in_hand.add(*run)
            added.append(run)
        return Screened(chosen, strangers)

    def _one_by_one(self, delivery: Delivery, indexes: Sequence[int], unwanted: list[int]) -> Screened:
        chosen: list[int] = []
        twins: list[int] = []
        for index in indexes:
            place = chosen
            for run in delivery.id_runs((index,)):
                if self._done.overlaps(*run):
                    place = unwanted
                elif self._in_hand.overlaps(*run):
                    self._twins.setdefault(run[:3], []).append((delivery, index))
                    place = twins
                else:
                    self._in_hand.add(*run)
            place.append(index)
        return Screened(chosen, unwanted, twins)

    def conclude(self, delivery: Delivery) -> Iterable[tuple[Delivery, int, Outcome, int, str]]:
        """Messages of a delivery are settled: done, or they may come again. Yields what to say of their twins."""
        delivery.acks.sort()
        for run in delivery.id_runs(delivery.acks):
            self._in_hand.remove(*run)
            self._done.add(*run)
            for twin in self._twins_of(run):
                yield *twin, Outcome.ACK, -1, ""
        for index, outcome, delay_ms, reason in [*delivery.others]:
            for run in delivery.id_runs((index,)):
                self._in_hand.remove(*run)
                for twin in self._twins_of(run):
                    # Also a reject: the first one's lease may be lost, and then the word about the twin is what counts.
                    # Should both count, they are one dead letter, of one id, group and attempt.
                    yield *twin, Outcome(outcome), delay_ms, reason

    def _twins_of(self, run: _Run) -> Iterable[_Place]:
        if self._twins:
            producer, attempt, start, stop = run
            for sequence in range(start, stop):
                yield from self._twins.pop((producer, attempt, sequence), ())

    def drop(self, delivery: Delivery, indexes: Sequence[int]) -> list[_Place]:
        """Messages are not in hand any more; twins that take their place."""
        heirs: list[_Place] = []
        for run in delivery.id_runs(indexes):
            self._in_hand.remove(*run)
            if not self._twins:
                continue
            for sequence in range(run[2], run[3]):
                waiting = self._twins.pop((run[0], run[1], sequence), [])
                while waiting:
                    twin, index = waiting.pop(0)
                    if twin.states[index] == TAKEN:
                        heirs.append((twin, index))
                        self._in_hand.add(run[0], run[1], sequence, sequence + 1)
                        if waiting:
                            self._twins[run[0], run[1], sequence] = waiting
                        break
        return heirs

    def begin_anew(self) -> None:
        """What was done or is in hand may be wanted again."""
        self._done.clear()
        self._in_hand.clear()
        self._twins.clear()
