"""An ordered group after a broker's restart: what is handed out again waits for the handler that still runs."""

from __future__ import annotations

from dmq.client.consumer.message import ReceivedMessage
from dmq.protocol.consume import LeaseRef, SubscribeReply
from dmq.testing import FakeClock
from tests.unit.client.deliveries import bodies, book, core, frame, said, taken


def test_in_an_ordered_group_a_lease_waits_for_an_earlier_one_of_its_queue() -> None:
    """After a restart the broker hands a queue out again while a handler still runs."""
    made = core(ordered=True)
    freed: list[bool] = []
    made.on_free = lambda: freed.append(True)
    made.received(book(made), *frame(1, bodies("a", "b", "c")))
    first = made.take(100)
    made.subscribed(book(made), SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)]))
    made.received(book(made), *frame(2, bodies("a", "b", "c", "d", "e")))
    made.received(book(made), *frame(3, bodies("x"), first=50, queue=1))
    assert taken(made) == [b"x"]  # another queue's
    assert (taken(made), made.waiting) == ([], 0)
    for delivery, index in first[:2]:
        made.ack(delivery, index)
        made.reports(book(made))
    assert (taken(made), freed) == ([], [])
    made.ack(*first[2])
    assert taken(made) == []  # nothing is known of the twins before it is reported
    made.reports(book(made))
    assert freed == [True]
    assert taken(made) == [b"d", b"e"]


def test_in_an_ordered_group_a_failure_takes_what_came_again_behind_it_back_too() -> None:
    made = core(ordered=True)
    made.received(book(made), *frame(1, bodies("a", "b", "c")))
    first = made.take(100)
    made.subscribed(book(made), SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)]))
    made.received(book(made), *frame(2, bodies("a", "b", "c", "d")))
    ReceivedMessage(*first[0]).nack()
    made.forget(first[1:])
    assert taken(made) == []
    assert (2, "NACK", [(0, 1)]) in said(made.reports(book(made)))
    assert (taken(made), made.waiting) == ([], 0)


def test_in_an_ordered_group_what_came_again_is_handed_out_in_its_place() -> None:
    made = core(ordered=True)
    made.received(book(made), *frame(1, bodies("a", "b", "c")))
    first = made.take(100)
    made.subscribed(book(made), SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)]))
    made.received(book(made), *frame(2, bodies("a", "b", "c", "d")))
    made.ack(*first[0])
    made.forget(first[1:])
    made.reports(book(made))
    assert taken(made) == [b"b", b"c", b"d"]


def test_in_an_ordered_group_a_queue_is_one_handlers_until_its_turn_ends_whatever_becomes_of_the_lease() -> None:
    clock = FakeClock()
    made = core(clock, ordered=True, lease=10.0)
    freed: list[bool] = []
    made.on_free = lambda: freed.append(True)
    made.received(book(made), *frame(1, bodies("a", "b")))
    turn = made.begin_turn(100)
    assert turn is not None
    for _ in range(8):  # the handler of `a` takes long, and the process may have stood still: the lease is forgotten
        clock.advance(7.5)
        made.tick()
    assert made.holding(book(made)) == []
    made.received(book(made), *frame(2, bodies("a", "b"), attempt=2))
    assert (made.begin_turn(100), made.waiting) == (None, 0)
    assert made.without_expired(turn.rest[1:]) == []
    made.end_turn(turn)
    assert (freed, taken(made)) == ([True], [b"a", b"b"])


def test_in_an_ordered_group_what_is_over_leaves_its_place_to_what_came_again() -> None:
    """A word about the first of two would be taken for one about both, and what lies behind would pass them by."""
    made = core(ordered=True)
    made.received(book(made), *frame(1, bodies("a", "b", "c")))
    turn = made.begin_turn(100)
    assert turn is not None
    turn.done = 1
    made.subscribed(book(made), SubscribeReply(1, 1, 1, 1, 1, lost=[LeaseRef("orders", 0, 1, 1)]))
    made.received(book(made), *frame(2, bodies("a", "b", "c", "d")))
    assert made.without_expired(turn.rest) == []
    made.reports(book(made))
    made.end_turn(turn)
    assert taken(made) == [b"b", b"c", b"d"]
