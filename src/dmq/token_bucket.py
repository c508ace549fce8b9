"""A cap on how much happens in a second. Pure code.

What always holds: over any time, no more than `per_second` of it and one second's worth on top is let through.
"""

from __future__ import annotations

__all__ = ["Pace"]


class Pace:
    """A bucket that fills with time.

    Parameters:
        per_second: how many are let through in a second; a bucket holds as many.
    """

    def __init__(self, per_second: float, now: float) -> None:
        self._per_second = per_second
        self._level = per_second
        self._at = now

    def _fill(self, now: float) -> None:
        self._level = min(self._per_second, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)

    def take(self, count: int, now: float) -> bool:
        """Take so many if there are as many now, or if the bucket is full and never will hold more."""
        self._fill(now)
        if self._level < min(count, self._per_second):
            return False
        self._level -= count
        return True

    def missing(self, count: int, now: float) -> float:
        """Seconds until so many could be taken; 0 if they can be now. Nothing is taken."""
        self._fill(now)
        return max(0.0, (min(count, self._per_second) - self._level) / self._per_second)

    def spend(self, count: int) -> None:
        """Take so many, whether they are there or not."""
        self._level -= count

    def take_over(self, before: Pace, now: float) -> None:
        """Hold what another one holds, or as much of it as fits."""
        before._fill(now)
        self._level = min(self._level, before._level)

    def wait(self, count: int, now: float) -> float:
        """Take so many, now or later; returns how many seconds to wait before going on."""
        self._fill(now)
        self._level -= count
        return max(0.0, -self._level / self._per_second)
