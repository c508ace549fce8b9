"""Broker time: the wall clock at the start plus the time since, also that in which the machine was suspended.

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

    __slots__ = ("_boottime", "_started_at", "_started_ms", "wall")

    def __init__(self, wall: Clock) -> None:
        self.wall = wall
        self._boottime = wall.boottime
        self._started_ms = wall.now_ms()
        self._started_at = wall.boottime()

    @property
    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._started_ms + int((self._boottime() - self._started_at) * 1000)

    @property
    def behind_ms(self) -> int:
        """How far it is behind the wall clock, which was set since the start; below 0 if it is ahead."""
        return self.wall.now_ms() - self.now_ms

    @property
    def suspended(self) -> float:
        """For how many seconds the machine was suspended, since some fixed moment."""
        return self._boottime() - self.wall.monotonic()
