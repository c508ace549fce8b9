"""The duplicate window: intervals against a plain set, and its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.client.consumer.leases import DuplicateWindow, Intervals

SPANS = st.tuples(st.integers(0, 60), st.integers(1, 10))


@given(st.lists(st.tuples(st.booleans(), SPANS), max_size=40), SPANS)
def test_intervals_behave_as_a_set_of_numbers(
    steps: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]
) -> None:
    intervals, numbers = Intervals(), set[int]()
    for is_added, (start, size) in steps:
        if is_added:
            intervals.add(start, start + size)
            numbers |= {*range(start, start + size)}
        else:
            intervals.remove(start, start + size)
            numbers -= {*range(start, start + size)}
    assert intervals.overlaps(asked[0], sum(asked)) == bool(numbers & {*range(asked[0], sum(asked))})
    assert len(intervals) == sum(number - 1 not in numbers for number in numbers)


def test_numbers_that_follow_each_other_take_one_interval() -> None:
    window = DuplicateWindow()
    for number in range(1000):
        window.add(1, 1, number, number + 1)
    assert len(window) == 1
    assert window.overlaps(1, 1, 999, 1000)
    assert not window.overlaps(1, 2, 999, 1000)
    assert not window.overlaps(2, 1, 999, 1000)


def test_the_window_is_bounded_and_forgets_the_oldest_of_the_quietest() -> None:
    window = DuplicateWindow(intervals_max=3)
    for producer in (1, 2):
        window.add(producer, 1, 0, 1)
        window.add(producer, 1, 10, 11)
    assert len(window) == 3
    assert not window.overlaps(1, 1, 0, 1)
    assert window.overlaps(1, 1, 10, 11)
    window.clear()
    assert len(window) == 0
    assert not window.overlaps(2, 1, 10, 11)


def test_what_is_taken_out_is_not_in_the_window() -> None:
    window = DuplicateWindow()
    window.add(1, 1, 0, 10)
    window.remove(1, 1, 3, 5)
    assert window.overlaps(1, 1, 0, 3)
    assert not window.overlaps(1, 1, 3, 5)
    window.remove(1, 1, 0, 10)
    assert len(window) == 0
