"""A cap on how much happens in a second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.token_bucket import Pace


def test_a_second_s_worth_passes_at_once_and_the_rest_with_time() -> None:
    pace = Pace(8, 100.0)
    assert pace.take(8, 100.0)
    assert not pace.take(1, 100.0)
    assert not pace.take(1, 100.0625)
    assert pace.take(1, 100.125)
    assert not pace.take(5, 100.25)
    assert pace.take(8, 102.0)


def test_more_than_the_bucket_holds_passes_when_it_is_full() -> None:
    pace = Pace(10, 0.0)
    assert pace.take(25, 0.0)
    assert not pace.take(1, 1.0)
    assert pace.take(1, 1.7)


def test_who_waits_is_told_how_long() -> None:
    pace = Pace(10, 0.0)
    assert pace.wait(10, 0.0) == 0.0
    assert pace.wait(5, 0.0) == 0.5
    assert pace.wait(5, 0.5) == 0.5
    assert pace.wait(5, 100.0) == 0.0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    pace = Pace(10, 10.0)
    assert pace.take(10, 10.0)
    assert not pace.take(1, 5.0)
    assert not pace.take(1, 10.05)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 2)), max_size=60))
def test_never_more_than_the_rate_and_a_second_s_worth_passes(steps: list[tuple[int, float]]) -> None:
    pace = Pace(10, 0.0)
    now, passed, largest = 0.0, 0, 0
    for count, pause in steps:
        now += pause
        if pace.take(count, now):
            passed += count
            largest = max(largest, count)
        assert passed <= 10 * now + 10 + largest + 1e-6
