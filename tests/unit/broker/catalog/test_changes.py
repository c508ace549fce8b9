"""Changes that are under way, and who waits for them."""

from __future__ import annotations

import pytest

from dmq.broker.catalog.changes import Changes, Later
from dmq.errors import Busy, DiskFull, DMQError

ORDERS = ("topic", "orders")


def test_requests_that_wait_are_served_in_order_when_the_change_is_done() -> None:
    changes = Changes(10, 1000)
    change = changes.begin(ORDERS)
    served: list[tuple[int, DMQError | None]] = []
    for number in range(3):
        changes.wait(change, lambda error, number=number: served.append((number, error)), 5)  # type: ignore[misc]
    assert (changes.waiting, changes.waiting_bytes, served) == (3, 15, [])
    changes.end(change)
    assert served == [(0, None), (1, None), (2, None)]
    assert (changes.waiting, changes.waiting_bytes, changes.under_way) == (0, 0, {})


def test_a_name_is_changed_by_one_at_a_time() -> None:
    changes = Changes(10, 1000)
    change = changes.begin(ORDERS)
    changes.check(("group", "orders"), ("topic", "others"))
    for ask in (lambda: changes.check(("topic", ""), ORDERS), lambda: changes.begin(ORDERS)):
        with pytest.raises(Later) as caught:
            ask()
        assert caught.value.change is change
    changes.end(change)
    changes.check(ORDERS)
    changes.end(changes.begin(ORDERS))


def test_one_that_begins_another_change_lets_those_behind_it_wait_for_that() -> None:
    changes = Changes(10, 1000)
    change = changes.begin(ORDERS)
    served: list[str] = []
    again = []

    def begins(_: DMQError | None) -> None:
        again.append(changes.begin(ORDERS))

    def follows(_: DMQError | None) -> None:
        try:
            changes.check(ORDERS)
            served.append("served")
        except Later as later:
            changes.wait(later.change, follows, 0)

    changes.wait(change, begins, 0)
    changes.wait(change, follows, 0)
    changes.end(change)
    assert served == []
    changes.end(again[0])
    assert served == ["served"]


def test_those_who_waited_for_what_failed_are_told_why() -> None:
    changes = Changes(10, 1000)
    change = changes.begin(ORDERS)
    told: list[DMQError | None] = []
    changes.wait(change, told.append, 0)
    error = DiskFull("no space")
    changes.end(change, error)
    assert told == [error]


def test_what_waits_is_bounded_in_number_and_bytes() -> None:
    few = Changes(1, 1000)
    change = few.begin(ORDERS)
    few.wait(change, lambda _: None, 1)
    with pytest.raises(Busy, match="orders"):
        few.wait(change, lambda _: None, 1)
    small = Changes(10, 100)
    change = small.begin(ORDERS)
    small.wait(change, lambda _: None, 500)  # one may be as large as it likes
    with pytest.raises(Busy) as caught:
        small.wait(change, lambda _: None, 1)
    assert caught.value.retry_after
