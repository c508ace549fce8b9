"""The machine's clock reads what the machine says."""

from __future__ import annotations

import time

from dmq.clock import Clock, SystemClock


def test_the_wall_clock_counts_milliseconds_since_1970() -> None:
    clock: Clock = SystemClock()
    before = time.time()
    now = clock.now_ms()
    after = time.time()
    assert int(before * 1000) - 1 <= now <= after * 1000 + 1


def test_the_monotonic_clock_never_runs_backwards() -> None:
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(100)]
    assert readings == sorted(readings)
