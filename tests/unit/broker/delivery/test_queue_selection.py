"""Which queue is served next."""

from __future__ import annotations

from collections import Counter

from dmq.broker.delivery.group import RETRY_QUEUES, QueueSelection, with_retries


def marked(*queues: int, by_priority: bool = False) -> QueueSelection:
    selection = QueueSelection(by_priority=by_priority)
    for queue in queues:
        selection.mark(queue)
    return selection


def test_queues_that_have_something_are_served_in_turn() -> None:
    selection = marked(0, 2, 254)
    assert [selection.pick() for _ in range(6)] == [0, 2, 254, 0, 2, 254]
    selection.unmark(2)
    assert not selection.is_marked(2)
    assert [selection.pick() for _ in range(3)] == [0, 254, 0]
    assert len(selection) == 2


def test_nothing_marked_is_nothing_picked() -> None:
    selection = marked(3)
    selection.unmark(3)
    selection.unmark(4)
    assert selection.pick() is None


def test_only_allowed_queues_are_picked() -> None:
    selection = marked(0, 1, 2, 3)
    assert [selection.pick(0b1010) for _ in range(4)] == [1, 3, 1, 3]
    assert selection.pick(0b10000) is None


def test_a_priority_topic_prefers_the_highest_and_starves_none() -> None:
    """A-02: every tenth pick goes round."""
    selection = marked(*range(10), by_priority=True)
    picks = [selection.pick() for _ in range(100)]
    assert Counter(picks) == Counter({9: 91, **dict.fromkeys(range(9), 1)})
    assert picks[:9] == [9] * 9
    assert picks[9::10] == list(range(10))


def test_retries_take_turns_with_the_others_and_go_with_their_queue() -> None:
    selection = marked(0, 3, RETRY_QUEUES + 3)
    assert [selection.pick() for _ in range(4)] == [0, 3, RETRY_QUEUES + 3, 0]
    assert [selection.pick(with_retries(1 << 3)) for _ in range(3)] == [3, RETRY_QUEUES + 3, 3]
    assert selection.pick(with_retries(1 << 2)) is None


def test_of_one_priority_retries_come_first_and_a_higher_priority_comes_before_them() -> None:
    selection = marked(4, 9, RETRY_QUEUES + 4, RETRY_QUEUES + 7, by_priority=True)
    order = []
    while (queue := selection.pick()) is not None:
        order.append(queue)
        selection.unmark(queue)
    assert order == [9, RETRY_QUEUES + 7, RETRY_QUEUES + 4, 4]
