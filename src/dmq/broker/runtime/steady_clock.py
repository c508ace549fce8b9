"""Broker time: the wall clock at the start plus the monotonic clock since.

What always holds: `now_ms` never runs backwards, whatever happens to the machine's wall clock. Leases, delays and
expiries are measured with it; stamps in records are taken from `wall`.
"""

from __future__ import annotations

from dmq.clock import Clock

__all__ = ["SteadyClock"]


class SteadyClock:
    """The time of one broker.

    Parameters:
        wall: the machine's clocks.
    """

    __slots__ = ("_started_at", "_started_ms", "wall")

    def __init__(self, wall: Clock) -> None:
        self.wall = wall
        self._started_ms = wall.now_ms()
        self._started_at = wall.monotonic()

    @property
    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._started_ms + int((self.wall.monotonic() - self._started_at) * 1000)
