"""A clock that moves only when told to."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Both readings of `dmq.clock.Clock`, held still.

    What always holds: `monotonic()` never runs backwards; only `advance` moves it, and moves the wall along;
    `set_wall_ms` moves the wall alone, either way.
    """

    def __init__(self, wall_ms: int = 1_700_000_000_000, monotonic: float = 1000.0) -> None:
        self._wall_ms = float(wall_ms)
        self._monotonic = monotonic

    def now_ms(self) -> int:
        return int(self._wall_ms)

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass, by both clocks."""
        if seconds < 0:
            raise ValueError("time passes forwards only; set_wall_ms turns the wall clock back")
        self._monotonic += seconds
        self._wall_ms += seconds * 1000

    def set_wall_ms(self, ms: int) -> None:
        """Jump the wall clock, forwards or back, as an operator or a time server would."""
        self._wall_ms = float(ms)
