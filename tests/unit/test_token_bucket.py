"""A cap on how much happens in a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.token_bucket import TokenBucket


def test_a_second_s_worth_passes_at_once_and_the_rest_with_time() -> None:
    bucket = TokenBucket(8, 100.0)
    assert bucket.take(8, 100.0)
    assert not bucket.take(1, 100.0)
    assert not bucket.take(1, 100.0625)
    assert bucket.take(1, 100.125)
    assert not bucket.take(5, 100.25)
    assert bucket.take(8, 102.0)


def test_more_than_the_bucket_holds_passes_when_it_is_full() -> None:
    bucket = TokenBucket(10, 0.0)
    assert bucket.take(25, 0.0)
    assert not bucket.take(1, 1.0)
    assert bucket.take(1, 1.7)


def test_who_waits_is_told_how_long() -> None:
    bucket = TokenBucket(10, 0.0)
    assert bucket.wait(10, 0.0) == 0.0
    assert bucket.wait(5, 0.0) == 0.5
    assert bucket.wait(5, 0.5) == 0.5
    assert bucket.wait(5, 100.0) == 0.0


def test_a_burst_of_its_own_passes_at_once_and_then_the_rate() -> None:
    bucket = TokenBucket(10, 0.0, burst=2)
    assert [bucket.wait(1, 0.0), bucket.wait(1, 0.0)] == [0.0, 0.0]
    assert bucket.wait(1, 0.0) == pytest.approx(0.1)
    assert bucket.wait(1, 0.0) == pytest.approx(0.2)
    assert bucket.wait(1, 10.0) == 0.0


def test_without_a_burst_a_request_passes_when_the_one_before_is_paid_for() -> None:
    bucket = TokenBucket(10, 100.0, burst=0)
    assert bucket.take(5, 100.0)
    assert bucket.missing(0, 100.0) == 0.5
    assert bucket.missing(5, 100.0) == 0.5
    assert not bucket.take(5, 100.4)
    assert bucket.take(5, 100.5)
    assert bucket.take(1, 110.0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10, 10.0)
    assert bucket.take(10, 10.0)
    assert not bucket.take(1, 5.0)
    assert not bucket.take(1, 10.05)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 2)), max_size=60))
def test_never_more_than_the_rate_and_a_second_s_worth_passes(steps: list[tuple[int, float]]) -> None:
    bucket = TokenBucket(10, 0.0)
    now, passed, largest = 0.0, 0, 0
    for count, pause in steps:
        now += pause
        if bucket.take(count, now):
            passed += count
            largest = max(largest, count)
        assert passed <= 10 * now + 10 + largest + 1e-6
