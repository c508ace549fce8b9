"""What brokers are told of leases, and again if it may have been lost."""

from __future__ import annotations

from dmq.client.consumer.leases import TOLD_MAX, Told
from dmq.protocol.consume import Outcome, Settle, Settlement
from tests.unit.client.links import FakeLink


def acks(lease: int, count: int = 1) -> Settle:
    return Settle("orders", "billing", [Settlement(0, 1, lease, Outcome.ACK)] * count)


def test_what_was_told_over_a_link_before_is_lost_with_it() -> None:
    told, first, second = Told(), FakeLink(), FakeLink()
    told.add(first, [acks(1), acks(2)], 10.0)
    assert told.take_lost(first) == []
    assert told.take_lost(second) == [acks(1), acks(2)]
    assert told.take_lost(second) == []


def test_what_an_answer_shows_to_have_arrived_is_not_lost() -> None:
    told, first, second = Told(), FakeLink(), FakeLink()
    told.add(first, [acks(1)], 10.0)
    told.add(first, [acks(2)], 11.0)
    first.answered_since = 10.5
    second.answered_since = 99.0  # says nothing of what went over the other one
    assert told.take_lost(second) == [acks(2)]


def test_what_is_told_over_the_next_link_first_forgets_nothing_of_the_last() -> None:
    told, first, second, third = Told(), FakeLink(), FakeLink(), FakeLink()
    second.answered_since = third.answered_since = 50.0
    told.add(first, [acks(1)], 10.0)
    told.add(second, [acks(2)], 51.0)
    assert told.take_lost(third) == [acks(1), acks(2)]


def test_it_is_bounded_and_asks_for_a_sign_once_in_a_while() -> None:
    told, link = Told(), FakeLink()
    asked = sum(told.add(link, [acks(number, 1000)], 10.0) for number in range(128))
    assert asked == 2
    lost = told.take_lost(FakeLink())
    assert sum(len(frame.settlements) for frame in lost) == TOLD_MAX
    assert lost[-1] == acks(127, 1000)
