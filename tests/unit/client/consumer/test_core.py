"""The core of a consumer: hand-out, words about messages, duplicates, time."""

from __future__ import annotations

from typing import Any

import pytest

from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.message import ReceivedMessage
from dmq.errors import InvalidSettings
from dmq.model import Message
from dmq.protocol.consume import LeaseRef, Outcome, SubscribeReply
from dmq.testing import FakeClock
from tests.unit.client.deliveries import bodies, book, core, frame, one, said, taken, ticked


def received(made: ConsumerCore) -> ReceivedMessage:
    return ReceivedMessage(*one(made))


# --- hand-out ---------------------------------------------------------------------------------------------------------


def test_the_highest_priority_comes_first_and_equals_in_their_order() -> None:
    made = core()
    made.received(book(made), *frame(1, [Message(b"a"), Message(b"b", priority=9), Message(b"c", priority=0)]))
    made.received(book(made), *frame(2, [Message(b"d"), Message(b"e", priority=9)], first=10))
    assert taken(made, 1) == [b"b"]
    assert taken(made) == [b"e", b"a", b"d", b"c"]
    assert made.prefetched == (0, 0)


def test_an_ordered_group_gets_one_lease_at_a_time_whatever_the_priority() -> None:
    made = core(ordered=True)
    made.received(book(made), *frame(1, [Message(b"a", priority=0), Message(b"b", priority=9)]))
    made.received(book(made), *frame(2, bodies("c"), first=10, queue=1))
    assert taken(made) == [b"a", b"b"]
    assert taken(made) == [b"c"]


def test_nothing_is_handed_out_while_paused() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    made.is_paused = True
    assert taken(made) == []
    assert made.waiting == 0
    made.is_paused = False
    assert taken(made) == [b"a"]


def test_what_waited_longer_than_its_lease_is_not_handed_out() -> None:
    clock = FakeClock()
    made = core(clock)
    made.received(book(made), *frame(1, bodies("late")))
    clock.advance(31)
    made.received(book(made), *frame(2, bodies("fresh"), first=1))
    assert taken(made) == [b"fresh"]


def test_what_waited_while_the_machine_slept_is_not_handed_out() -> None:
    clock = FakeClock()
    made = core(clock)
    made.received(book(made), *frame(1, bodies("a", "b")))
    first = made.take(1)
    clock.suspend(31)
    assert (taken(made), made.waiting, made.without_expired(first)) == ([], 0, [])
    # The broker counts no attempt that nobody began: it comes again as it was, and is no twin of what is gone.
    made.received(book(made), *frame(2, bodies("a", "b")))
    assert taken(made) == [b"a", b"b"]


def test_a_full_pool_refuses_what_it_has_no_room_for() -> None:
    made = core()
    made.room = lambda: 2
    made.received(book(made), *frame(1, bodies("a", "b", "c", "d")))
    assert taken(made) == [b"a", b"b"]
    assert said(made.reports(book(made))) == [(1, "RELEASE", [(2, 2)])]


# --- words ------------------------------------------------------------------------------------------------------------


def test_acks_of_one_lease_are_one_settlement() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies(*"abcdef"), first=100))
    messages = [received(made) for _ in range(6)]
    for index in (3, 0, 1, 5):
        messages[index].ack()
    assert said(made.reports(book(made))) == [(1, "ACK", [(100, 2), (103, 1), (105, 1)])]
    messages[2].nack(delay=1.5, reason="x")
    messages[4].nack(delay=1.5, reason="x")
    (report,) = made.reports(book(made))
    (settlement,) = report.settlements
    assert (settlement.outcome, settlement.ranges) == (Outcome.NACK, [(102, 1), (104, 1)])
    assert (settlement.delay_ms, settlement.reason) == (1500, "x")
    assert made.reports(book(made)) == []
    assert made.holding(book(made)) == []


def test_the_first_word_counts() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    message = received(made)
    message.reject("no")
    message.ack()
    message.nack()
    assert message.is_settled
    assert said(made.reports(book(made))) == [(1, "REJECT", [(0, 1)])]


def test_a_lone_word_is_urgent_and_one_of_many_is_not() -> None:
    made = core()
    urgent: list[bool] = []
    made.on_reports = urgent.append
    made.received(book(made), *frame(1, bodies("a", "b")))
    messages = [received(made), received(made)]
    messages[0].ack()
    messages[1].ack()
    assert urgent == [False, True]


def test_a_quarter_of_the_prefetch_is_urgent() -> None:
    made = core(prefetch=8)
    urgent: list[bool] = []
    made.on_reports = urgent.append
    made.received(book(made), *frame(1, bodies(*"abcdefgh")))
    for _ in range(2):
        received(made).ack()
    assert urgent == [False, True]


def test_what_could_not_be_sent_goes_first_the_next_time() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a", "b")))
    received(made).ack()
    made.not_sent(book(made), made.reports(book(made)))
    assert made.has_reports
    received(made).ack()
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 1)]), (1, "ACK", [(1, 1)])]


def test_a_reason_that_is_too_long_is_cut() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    received(made).reject("x" * 10_000 + "\ud800")
    assert len(made.reports(book(made))[0].settlements[0].reason) == 4096


def test_a_failed_message_of_an_ordered_group_takes_the_rest_of_its_lease_along() -> None:
    made = core(ordered=True)
    made.received(book(made), *frame(1, bodies("a", "b", "c")))
    (delivery, index), *rest = made.take(2)
    ReceivedMessage(delivery, index).nack()
    assert delivery.failed == {index}
    made.forget(rest)
    assert taken(made) == []
    assert said(made.reports(book(made))) == [(1, "NACK", [(0, 1)])]
    assert made.holding(book(made)) == []


# --- filters and duplicates -------------------------------------------------------------------------------------------


def test_a_stranger_among_the_tags_is_acked_in_silence() -> None:
    made = core(tags="a || b")
    made.received(
        book(made), *frame(1, [Message(b"1", tag="a"), Message(b"2", tag="c"), Message(b"3"), Message(b"4", tag="b")])
    )
    assert taken(made) == [b"1", b"4"]
    assert said(made.reports(book(made))) == [(1, "ACK", [(1, 2)])]


def test_what_was_done_is_not_handed_out_again() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a", "b"), ids=[(2, 7, 40)]))
    received(made).ack()
    received(made).nack()
    made.reports(book(made))
    # The same two, stored twice or handed out again after a restart.
    made.received(book(made), *frame(2, bodies("a", "b"), first=50, ids=[(2, 7, 40)]))
    assert taken(made) == [b"b"]
    assert said(made.reports(book(made))) == [(2, "ACK", [(50, 1)])]
    assert made.suppressed == 1


def test_a_redelivery_is_no_duplicate() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    received(made).ack()
    made.reports(book(made))
    made.received(book(made), *frame(2, bodies("a"), attempt=2))
    assert taken(made) == [b"a"]


@pytest.mark.parametrize("word", ["ack", "nack", "reject"])
def test_the_twin_of_a_message_in_hand_shares_its_fate(word: str) -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    message = received(made)
    made.received(book(made), *frame(2, bodies("a"), first=9, ids=[(1, 7, 0)]))
    assert taken(made) == []
    getattr(message, word)()
    # Whatever it is: of the two leases the first may be lost, and then nothing counts but what is said of the second.
    assert said(made.reports(book(made))) == [(1, word.upper(), [(0, 1)]), (2, word.upper(), [(9, 1)])]


def test_a_twin_takes_the_place_of_one_that_was_lost() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    made.received(book(made), *frame(2, bodies("a"), first=9, ids=[(1, 7, 0)]))
    made.subscribed(book(made), SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)]))
    assert [delivery.lease.lease for delivery, _ in made.take(10)] == [2]


def test_a_seek_makes_old_messages_new() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a")))
    received(made).ack()
    made.reports(book(made))
    made.received(book(made), *frame(5, bodies("a"), sought=4))
    assert taken(made) == [b"a"]


# --- connections ------------------------------------------------------------------------------------------------------


def test_leases_that_are_lost_are_dropped_unless_they_are_in_hand() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a", "b")))
    made.received(book(made), *frame(2, bodies("c"), first=2))
    in_hand = received(made)
    assert made.holding(book(made)) == [LeaseRef("orders", 0, 1, 1), LeaseRef("orders", 0, 1, 2)]
    made.subscribed(book(made), SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)]))
    assert taken(made) == [b"c"]
    in_hand.ack()
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 1)])]


def test_a_broker_that_drains_gets_back_what_nobody_has_begun() -> None:
    made = core()
    made.received(book(made), *frame(1, bodies("a", "b", "c")))
    received(made)
    made.release_waiting()
    assert said(made.reports(book(made))) == [(1, "RELEASE", [(1, 2)])]


# --- time -------------------------------------------------------------------------------------------------------------


def test_what_is_worked_on_is_extended_and_what_is_not_goes_back() -> None:
    clock = FakeClock()
    made = core(clock, lease=30.0)
    made.is_running = True
    made.received(book(made), *frame(1, bodies("a", "b")))
    received(made)
    made.received(book(made), *frame(2, bodies("c"), first=2))
    clock.advance(14)
    assert ticked(made) == []
    clock.advance(2)
    assert said(ticked(made)) == [(1, "EXTEND", [])]
    assert said(made.reports(book(made))) == [(2, "RELEASE", [(2, 1)])]


def test_an_iterator_that_goes_on_keeps_what_waits() -> None:
    clock = FakeClock()
    made = core(clock, lease=30.0)
    made.received(book(made), *frame(1, bodies("a", "b")))
    for _ in range(2):
        clock.advance(16)
        if made.waiting == 2:
            received(made).ack()
            made.reports(book(made))
            assert said(ticked(made)) == [(1, "EXTEND", [])]
        else:
            assert ticked(made) == []  # nobody came for more
    assert said(made.reports(book(made))) == [(1, "RELEASE", [(1, 1)])]


def test_a_message_that_is_never_settled_is_forgotten_in_the_end() -> None:
    clock = FakeClock()
    made = core(clock, lease=30.0)
    made.received(book(made), *frame(1, bodies("a")))
    received(made)
    clock.advance(100)
    ticked(made)
    assert made.holding(book(made)) == []


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"batch": "many"},
        {"parallel": 0},
        {"lease": 0},
        {"max_attempts": 0},
        {"version": -1},
        {"tags": 7},
        {"start_from": "somewhere"},
        {"prefetch_bytes": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        core(**options)


def test_the_batch_counts_where_leases_count() -> None:
    assert core(batch=10, parallel=20).options.batch == 10
    assert core(batch=10, ordered=True).options.batch == 10
    assert core(batch=10, prefetch=1000).options.batch == 250
    assert core(batch=10, prefetch=5).options.batch == 5
