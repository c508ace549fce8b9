"""Hints: looked for a few times, then forgotten, and never too many."""

from __future__ import annotations

from dmq.outbox.sender import relay as module
from dmq.outbox.sender.relay import Hints
from dmq.testing import FakeClock


def test_hints_are_taken_once_in_their_order() -> None:
    hints = Hints(FakeClock())
    assert (bool(hints), hints.next_at, hints.take(5)) == (False, None, {})
    hints.add(["a", "b", "c"])
    assert hints.has_new
    assert [*hints.take(2)] == ["a", "b"]
    assert [*hints.take(2)] == ["c"]
    assert not hints


def test_a_hint_that_finds_nothing_is_looked_for_later_and_then_no_more() -> None:
    clock = FakeClock()
    hints = Hints(clock)
    hints.add(["a"])
    looks = 0
    while hints:
        taken = hints.take(10)
        if taken:
            looks += 1
            hints.missed(taken)
            assert hints.take(10) == {}  # not at once
        clock.advance(1.0)
    assert looks == 1 + len(module._AGAIN_SECONDS)


def test_there_are_never_more_hints_than_a_bound() -> None:
    hints = Hints(FakeClock())
    hints.add(str(number) for number in range(module._HINTS_MAX + 10))
    assert len(hints.take(10 * module._HINTS_MAX)) == module._HINTS_MAX
