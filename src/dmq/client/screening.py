"""Screening: which messages of a delivery are for the user (R-07, D-10). Pure.

Not for the user are strangers, whose tag only shares its hash with a wanted one, and duplicates: messages that were
acked before, and twins of messages that are in hand. A twin gets no handler of its own: it shares the first one's fate.

What always holds: a message is in hand from when it was chosen until it is settled, dropped or forgotten; every twin
leads to a settlement or is chosen in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from dmq.client.delivery import TAKEN, Delivery
from dmq.client.duplicates import DuplicateWindow
from dmq.protocol.consuming import Outcome

__all__ = ["Screened", "Screening"]

_NO_LIMIT: Final = 1 << 62

_Run: TypeAlias = tuple[int, int, int, int]  # producer, attempt, first sequence, one past the last
_Place: TypeAlias = tuple[Delivery, int]


class Screened(NamedTuple):
    """What came out: messages for the user, those to ack in silence, and those that wait for their twins."""

    chosen: Sequence[int]
    unwanted: Sequence[int] = ()
    twins: Sequence[int] = ()


class Screening:
    """See the module.

    Parameters:
        tags: the tags that are wanted; None for all.
    """

    def __init__(self, tags: frozenset[str | None] | None) -> None:
        self._tags = tags
        self._done = DuplicateWindow()
        self._in_hand = DuplicateWindow(_NO_LIMIT)  # bounded by what is out
        self._twins: dict[tuple[int, int, int], list[_Place]] = {}

    def screen(self, delivery: Delivery) -> Screened:
        """Look through a delivery that came. What is chosen is in hand then."""
        chosen: Sequence[int] = range(delivery.count)
        strangers: list[int] = []
        if self._tags is not None:
            tags = self._tags
            chosen = [index for index in chosen if delivery.record(index).tag in tags]
            if len(chosen) != delivery.count:
                wanted = set(chosen)
                strangers = [index for index in range(delivery.count) if index not in wanted]
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
