"""Waiting for a group's acks."""

from __future__ import annotations

import pytest

from dmq.broker.delivery.waiters import ConsumedWatch, Watches
from dmq.errors import Busy
from dmq.storage.state.events import Outcome, Settled


def settled(start: int, count: int, outcome: Outcome = Outcome.ACKED, bitmap: bytes = b"") -> Settled:
    return Settled("g", 1, 0, start, count, int(outcome), bitmap, "m", 1, 0, 0, "")


def watching(first: int, count: int, deadline_ms: int = 100) -> tuple[Watches, list[bool]]:
    watches = Watches(2)
    answers: list[bool] = []
    watches.add(ConsumedWatch(0, first, count, deadline_ms, answers.append))
    return watches, answers


def test_a_watch_is_answered_when_the_last_message_is_acked() -> None:
    watches, answers = watching(10, 4)
    watches.settled(0, [settled(12, 9)])
    watches.settled(1, [settled(0, 100)])
    assert answers == []
    watches.settled(0, [settled(5, 6, bitmap=b"\x20"), settled(11, 1)])
    assert answers == [True]
    assert not watches.count


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome != Outcome.ACKED])
def test_only_acks_count(outcome: Outcome) -> None:
    watches, answers = watching(0, 1)
    watches.settled(0, [settled(0, 1, outcome)])
    assert answers == []
    watches.expire(99)
    assert answers == []
    watches.expire(100)
    assert answers == [False]
    watches.settled(0, [settled(0, 1)])
    assert answers == [False]


def test_there_are_only_so_many() -> None:
    watches, answers = watching(0, 1)
    watches.check_room()
    watches.add(ConsumedWatch(1, 0, 1, 50, answers.append))
    with pytest.raises(Busy):
        watches.check_room()
    watches.expire()
    assert answers == [False, False]
    watches.check_room()


def test_a_message_that_failed_counts_once_a_later_attempt_is_acked() -> None:
    """D-20: its move to the retry topic does not."""
    watches, answers = watching(10, 2)
    watches.settled(0, [settled(10, 2, Outcome.RETRIED)])
    watches.acked(0, 11)
    watches.acked(0, 12)
    watches.acked(1, 10)
    assert answers == []
    watches.acked(0, 10)
    assert answers == [True]
    assert not watches.count
