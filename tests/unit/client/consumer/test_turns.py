"""Turns of handlers: what they are done with is counted, and told by many at a time."""

from __future__ import annotations

import pytest

from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.message import OpenedMessage, ReceivedMessage, messages_of
from dmq.client.consumer.prefetch import Turn
from dmq.testing import FakeClock
from tests.unit.client.deliveries import bodies, book, core, frame, said, taken

LETTERS = "abcdefgh"


def begun(made: ConsumerCore, limit: int = 100) -> Turn:
    turn = made.begin_turn(limit)
    assert turn is not None
    return turn


def names(made: ConsumerCore, turn: Turn) -> list[bytes]:
    return [message.body for message in messages_of(turn.delivery, turn.indexes, ReceivedMessage, OpenedMessage)]


def made_of(texts: str = LETTERS, **options: object) -> ConsumerCore:
    made = core(**options)  # type: ignore[arg-type]
    made.received(book(made), *frame(1, bodies(*texts)))
    return made


def test_what_a_handler_is_done_with_is_acked_when_reports_leave_and_when_the_turn_ends() -> None:
    made = made_of()
    turn = begun(made)
    assert said(made.reports(book(made))) == []
    turn.done = 3
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 3)])]
    turn.done = 8
    made.end_turn(turn)
    assert said(made.reports(book(made))) == [(1, "ACK", [(3, 5)])]
    assert made.in_hand() == 0


def test_a_turn_is_of_one_delivery_and_not_longer_than_its_limit() -> None:
    made = made_of()
    made.received(book(made), *frame(2, bodies("x", "y"), first=8))
    assert [names(made, begun(made, 5)) for _ in range(3)] == [
        [b"a", b"b", b"c", b"d", b"e"],
        [b"f", b"g", b"h"],
        [b"x", b"y"],
    ]
    assert made.begin_turn(5) is None


def test_the_handlers_return_is_the_first_word_and_no_later_one_counts() -> None:
    made = made_of()
    turn = begun(made)
    turn.done = 1
    message = ReceivedMessage(turn.delivery, 0)
    assert message.is_settled
    message.reject("too late")
    assert not ReceivedMessage(turn.delivery, 1).is_settled
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 1)])]


def test_what_a_handler_said_itself_counts() -> None:
    made = made_of()
    turn = begun(made)
    ReceivedMessage(turn.delivery, 0).ack()
    turn.done = 1
    ReceivedMessage(turn.delivery, 1).reject("no")
    turn.done = 8
    made.end_turn(turn)
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 1), (2, 6)]), (1, "REJECT", [(1, 1)])]


def test_a_close_gives_back_only_what_handlers_are_not_done_with() -> None:
    made = made_of("abcd")
    turn = begun(made)
    turn.done = 3
    made.release_all()
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 3)]), (1, "RELEASE", [(3, 1)])]


def test_what_is_behind_a_message_that_takes_long_goes_to_others() -> None:
    made = made_of()
    freed: list[bool] = []
    made.on_free = lambda: freed.append(True)
    turn = begun(made)
    turn.done = 2
    made.look()
    assert made.begin_turn(100) is None  # it may just have got there
    made.look()
    assert freed == [True]
    assert turn.stop == 3
    other = begun(made)
    assert names(made, other) == [b"d", b"e", b"f", b"g", b"h"]
    turn.done = 3
    other.done = 5
    made.end_turn(turn)
    made.end_turn(other)
    assert said(made.reports(book(made))) == [(1, "ACK", [(0, 8)])]


def test_a_handler_that_gets_on_keeps_its_turn() -> None:
    made = made_of()
    turn = begun(made)
    for done in range(7):
        turn.done = done
        made.look()
    assert (turn.stop, made.begin_turn(100)) == (8, None)


def test_in_an_ordered_group_nothing_leaves_a_turn() -> None:
    made = made_of(ordered=True)
    turn = begun(made)
    made.look()
    made.look()
    assert (turn.stop, made.begin_turn(100)) == (8, None)


def test_a_turn_that_ends_early_leaves_the_rest_to_others_in_its_place() -> None:
    made = made_of()
    made.received(book(made), *frame(2, bodies("x"), first=8))
    turn = begun(made)
    turn.done = 6
    made.end_turn(turn)
    assert taken(made) == [b"g", b"h", b"x"]


def test_reports_are_asked_for_while_a_turn_has_several_messages() -> None:
    made = made_of()
    asked: list[bool] = []
    made.on_reports = asked.append
    turn = begun(made)
    assert asked == [False]
    made.look()
    assert asked == [False, False]
    turn.done = 7
    made.look()
    assert asked == [False, False]  # with the last one it ends anyway
    made.is_report_due = True
    made.end_turn(turn)
    assert asked == [False, False]  # somebody asks for them soon


class Quick(Turn):
    """A turn whose handler goes on to the next message the moment that somebody looks."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "stop" and self.done == 2:
            self.done = 3


def test_a_cut_that_comes_too_late_takes_nothing() -> None:
    made = made_of()
    delivery: Delivery = begun(made).delivery
    turn = Quick(delivery, range(8))
    turn.done = 2
    assert (turn.cut(), turn.stop, turn.indexes) == ((), 8, range(8))
    assert (turn.cut(), turn.stop, turn.indexes) == (range(4, 8), 4, range(4))


def test_a_lease_that_is_over_leaves_nothing_of_a_turn_to_others() -> None:
    clock = FakeClock()
    made = core(clock)
    made.received(book(made), *frame(1, bodies(*LETTERS)))
    turn = begun(made)
    clock.advance(31.0)
    made.look()
    made.look()
    assert turn.stop == 1
    assert made.begin_turn(100) is None


@pytest.mark.parametrize(("pace", "count", "hands"), [(1, 5, 5), (100, 5, 1), (100, 250, 3)])
def test_quick_handlers_need_no_company(pace: int, count: int, hands: int) -> None:
    made = core()
    made.pace = pace
    assert made.hands_for(count) == hands
