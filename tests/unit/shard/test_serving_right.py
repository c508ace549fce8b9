"""Whether a leader may answer, and a follower stand."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dmq.shard.serving_right import PROMISE_SECONDS, Promise, Right, right_to_serve

GONE = -math.inf


def test_a_session_that_surely_lives_is_enough() -> None:
    assert right_to_serve(10.0, 10.1, (2, 3), {}) is Right.SESSION
    assert right_to_serve(10.1, 10.1, (2, 3), {}) is Right.NONE


def test_the_promises_of_all_are_enough() -> None:
    assert right_to_serve(10.0, GONE, (2, 3), {2: 9.0, 3: 9.5}) is Right.PROMISES
    assert right_to_serve(10.0, GONE, (2, 3), {2: 9.0}) is Right.NONE
    assert right_to_serve(10.0, GONE, (2, 3), {2: 9.0, 3: 10.0 - 0.9 * PROMISE_SECONDS}) is Right.NONE
    assert right_to_serve(10.0, GONE, (2, 3), {2: 9.0, 3: 10.1 - 0.9 * PROMISE_SECONDS}) is Right.PROMISES


def test_alone_in_every_set_a_leader_needs_nobody() -> None:
    assert right_to_serve(10.0, GONE, (), {2: 9.0}) is Right.ALONE


def test_a_start_keeps_what_was_promised_before_it() -> None:
    promise = Promise(100.0)
    assert not promise.is_over(100.0 + PROMISE_SECONDS - 0.01)
    assert promise.is_over(100.0 + PROMISE_SECONDS)
    promise.give(103.0)
    assert not promise.is_over(106.9)
    assert promise.until == 107.0
    promise.give(102.0)
    assert promise.until == 107.0


@given(
    st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 3)), max_size=8),
    st.floats(0.95, 1.05),
    st.floats(0, 40),
)
def test_while_a_leader_trusts_a_promise_its_giver_does_not_stand(
    delay: float, frames: list[tuple[float, float]], rate: float, now: float
) -> None:
    """A frame is sent, taken some time later, and answered some time after that; clocks run up to 5 % apart."""
    promise = Promise(-100.0)
    echo = -math.inf
    for sent, way in sorted(frames):
        taken = sent + way
        if taken + delay > now:
            break
        promise.give(taken * rate)
        echo = max(echo, sent)  # the confirmation that echoes it has come by now
    if right_to_serve(now, GONE, (2,), {2: echo}) is Right.PROMISES:
        assert not promise.is_over(now * rate)


def test_a_promise_tells_since_when_no_leader_was_heard() -> None:
    promise = Promise(10.0, promise_seconds=4.0)
    assert promise.silent_seconds(11.0) == 1.0
    promise.give(20.0)
    assert promise.silent_seconds(20.0) == 0.0
    assert promise.silent_seconds(29.5) == 9.5
    promise.release()
    assert promise.silent_seconds(40.0) == 0.0
