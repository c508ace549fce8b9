"""The clock seam: everything that asks for the time asks one of these, so that tests can hold time still."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Three readings: the wall, for stamps a person reads, the monotonic, for durations, and the one since boot, for
    what ends somewhere else while this machine is suspended."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the wall clock; may jump either way."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never runs backwards."""
        ...

    def boottime(self) -> float:
        """Seconds since another fixed moment; as `monotonic`, and runs on while the machine is suspended."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)  # without a function of ours around it: it is asked for at every request
    # A lease ends at the broker while a virtual machine is suspended, and the monotonic clock stands still then.
    boottime = staticmethod(
        partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
    )
