"""Messages set aside while what settles them is written, and cursors that learn that they are ordered."""

from __future__ import annotations

import pytest

from dmq.errors import LeaseLost
from dmq.storage.state.events import Outcome
from tests.unit.broker.delivery.test_cursor import lease_of, make

DEAD = Outcome.DEAD


def test_what_is_set_aside_is_settled_only_when_that_is_durable() -> None:
    cursor = make()
    lease = lease_of(cursor, 4)
    aside = cursor.set_aside(1, lease.number, [(1, 3)], DEAD, 0, "bad")
    assert aside is not None
    entry, (event,) = aside
    assert (event.start, event.count, event.outcome, event.error) == (1, 2, DEAD, "bad")
    assert (cursor.out, cursor.floor, cursor.lag(4)) == (2, 0, 4)
    cursor.ack(1, lease.number, None, 0)
    assert cursor.floor == 1
    assert cursor.propose(10, 1 << 40, 4) is None, "it is not handed out meanwhile, however long that takes"
    cursor.conclude(entry, 0)
    assert (cursor.floor, cursor.lag(4)) == (4, 0)


def test_what_could_not_be_settled_comes_again_in_time_as_another_attempt() -> None:
    cursor = make()
    lease = lease_of(cursor, 2)
    aside = cursor.set_aside(1, lease.number, None, DEAD, 0)
    assert aside is not None
    cursor.conclude(aside[0], 10, 1000)
    assert cursor.propose(10, 999, 2) is None
    again = lease_of(cursor, 10, now_ms=1000, visible=2)
    assert (again.start, again.stop, again.attempt) == (0, 2, 2)


def test_in_an_ordered_group_everything_waits_behind_what_is_set_aside() -> None:
    cursor = make(ordered=True)
    lease = lease_of(cursor, 1)
    aside = cursor.set_aside(1, lease.number, None, DEAD, 0)
    assert aside is not None
    assert cursor.propose(10, 0, 10) is None
    cursor.conclude(aside[0], 0)
    assert lease_of(cursor, 1).start == 1


@pytest.mark.parametrize("how", ["seek", "ack"])
def test_what_is_set_aside_may_be_overtaken(how: str) -> None:
    cursor = make()
    lease = lease_of(cursor, 2)
    aside = cursor.set_aside(1, lease.number, None, DEAD, 0)
    assert aside is not None
    if how == "seek":
        cursor.seek(0)
    else:
        cursor.ack(1, lease.number, [(0, 2)], 0)
    floor = cursor.floor
    cursor.conclude(aside[0], 0)
    cursor.conclude(aside[0], 0, 5)
    assert (cursor.floor, cursor.redelivering) == (floor, 0)


def test_nothing_is_set_aside_of_a_lease_that_is_gone_or_of_messages_that_are_not_out() -> None:
    cursor = make()
    lease = lease_of(cursor, 2)
    assert cursor.set_aside(1, lease.number, [(5, 6)], DEAD, 0) is None
    cursor.ack(1, lease.number, None, 0)
    with pytest.raises(LeaseLost):
        cursor.set_aside(1, lease.number, None, DEAD, 0)


def test_a_cursor_that_becomes_ordered_hands_out_one_lease_at_a_time_lowest_first() -> None:
    cursor = make()
    first, second = lease_of(cursor, 2), lease_of(cursor, 2)
    cursor.nack(1, second.number, None, 0)
    cursor.nack(1, first.number, None, 0, delay_ms=100)
    cursor.set_ordered(True, 0)
    assert cursor.propose(10, 50, 10) is None, "the lowest one waits for its time, and all wait behind it"
    assert lease_of(cursor, 1, now_ms=100, visible=10).start == 0
    assert cursor.propose(10, 100, 10) is None
    cursor.set_ordered(False, 100)
    assert cursor.propose(10, 100, 10) is not None
    assert cursor.out == 1
