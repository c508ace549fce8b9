"""The clock seam: everything that asks for the time asks one of these, so that tests can hold time still."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Two readings: the wall, for stamps a person reads, and the monotonic, for durations."""

    def now_ms(self) -> int:
        """Milliseconds since 1970 by the wall clock; may jump either way."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never runs backwards."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)  # without a function of ours around it: it is asked for at every request
