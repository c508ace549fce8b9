"""The loop flushes on a quick disk, and is never held up for long by a slow one."""

from __future__ import annotations

import random

from dmq.storage.journal.journal import FlushPolicy


def quick(flushes: int = 40) -> FlushPolicy:
    """The policy after some quick flushes."""
    policy = FlushPolicy()
    for _ in range(flushes):
        policy.flushed(0.0001, 0.0, on_loop=False)
    return policy


def test_a_disk_has_to_show_that_it_is_quick() -> None:
    policy = FlushPolicy()
    assert not policy.is_for_loop(0.0)
    assert not quick(16).is_for_loop(0.0)
    assert quick().is_for_loop(0.0)


def test_a_disk_has_to_be_quicker_if_several_wait() -> None:
    policy = quick()
    assert policy.is_for_loop(0.0, is_lone=False)
    for _ in range(20):
        policy.flushed(0.0008, 0.0, on_loop=True)
    assert policy.is_for_loop(0.0)
    assert not policy.is_for_loop(0.0, is_lone=False)


def test_a_flush_that_is_late_now_and_then_changes_nothing() -> None:
    policy = quick()
    for number in range(100):
        policy.flushed(0.005 if number % 20 == 0 else 0.0001, 0.0, on_loop=True)
        assert policy.is_for_loop(0.0)


def test_a_disk_that_is_slow_is_left_to_threads_until_it_is_quick_again() -> None:
    policy = quick()
    for _ in range(3):
        policy.flushed(0.008, 0.0, on_loop=policy.is_for_loop(0.0))
    assert not policy.is_for_loop(1000.0)
    for _ in range(10):
        policy.flushed(0.0001, 0.0, on_loop=False)
    assert policy.is_for_loop(0.0)


def test_the_loop_spends_at_most_a_fiftieth_of_its_time_in_long_flushes() -> None:
    rng = random.Random(7)
    policy = quick()
    now = stalled = 0.0
    for _ in range(20_000):
        on_loop = policy.is_for_loop(now)
        seconds = rng.choice([0.03, 0.1, 0.19]) if rng.random() < 0.02 else 0.0001
        now += seconds + 0.0005
        if on_loop and seconds > 0.02:
            stalled += seconds
        policy.flushed(seconds, now, on_loop=on_loop)
    assert 0 < stalled <= now / 50 + 0.2
