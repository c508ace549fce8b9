"""When a thread beside the event loop takes a member for dead."""

from __future__ import annotations

from dmq.shard.heart import Heart
from dmq.testing import FakeClock


def beats(heart: Heart) -> bool:
    return heart.is_beating


def test_a_loop_that_stands_still_is_noticed_after_half_a_session() -> None:
    clock = FakeClock()
    heart = Heart(clock, 3.0)
    clock.advance(100)
    assert beats(heart), "it has not begun"
    heart.beat()
    clock.advance(3)
    assert beats(heart)
    clock.suspend(1)
    assert not beats(heart)
    heart.beat()
    assert beats(heart)
    clock.advance(10)
    heart.rest()
    assert beats(heart), "it has stopped"


def test_a_flush_that_does_not_end_is_noticed_though_the_loop_turns() -> None:
    clock = FakeClock()
    heart = Heart(clock, 3.0)
    heart.flush_waits(clock.boottime())
    clock.advance(4)
    heart.beat()
    assert heart.is_flush_stuck
    assert not beats(heart)
    heart.flush_waits(None)
    assert beats(heart)
