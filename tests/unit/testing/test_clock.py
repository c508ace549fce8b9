"""The clock that moves only when told to."""

from __future__ import annotations

import pytest

from dmq.clock import Clock
from dmq.testing import FakeClock


def test_it_stands_still() -> None:
    clock: Clock = FakeClock(wall_ms=5000, monotonic=7.0)
    assert [clock.now_ms(), clock.now_ms()] == [5000, 5000]
    assert [clock.monotonic(), clock.monotonic()] == [7.0, 7.0]


def test_time_passes_by_both_clocks() -> None:
    clock = FakeClock(wall_ms=5000, monotonic=7.0)
    clock.advance(1.25)
    assert clock.now_ms() == 6250
    assert clock.monotonic() == 8.25


def test_small_steps_add_up() -> None:
    clock = FakeClock(wall_ms=5000)
    for _ in range(10):
        clock.advance(0.0005)
    assert clock.now_ms() == 5005


@pytest.mark.parametrize("wall_ms", [1, 9_000_000_000_000])
def test_the_wall_jumps_alone(wall_ms: int) -> None:
    clock = FakeClock(monotonic=7.0)
    clock.set_wall_ms(wall_ms)
    assert clock.now_ms() == wall_ms
    assert clock.monotonic() == 7.0


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="forwards"):
        FakeClock().advance(-1)
