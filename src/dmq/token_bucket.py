"""A token bucket: how much may happen in a second. Pure: the caller reads the clock, and locks if threads share it.

What always holds: over any time, no more than `per_second` of it and one burst is let through, and what is left of the
last request, since a request passes whole.
"""

from __future__ import annotations

__all__ = ["TokenBucket"]


class TokenBucket:
    """Tokens that come back with time.

    Parameters:
        per_second: tokens that come back in a second.
        now: the time in seconds, of a clock that never goes back.
        burst: tokens that a full bucket holds; one second's worth if left out. With 0 a request passes as soon as
            what was taken before it is paid for.
    """

    def __init__(self, per_second: float, now: float, burst: float | None = None) -> None:
        self._per_second = per_second
        self._burst = per_second if burst is None else burst
        self._level = self._burst
        self._at = now

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)

    def take(self, count: int, now: float) -> bool:
        """Take `count` tokens if the bucket has them, or if it is full and never will hold as many."""
        self._fill(now)
        if self._level < min(count, self._burst):
            return False
        self._level -= count
        return True

    def missing(self, count: int, now: float) -> float:
        """Seconds until `take` would succeed; 0 if it would now. Takes nothing."""
        self._fill(now)
        return max(0.0, (min(count, self._burst) - self._level) / self._per_second)

    def spend(self, count: int) -> None:
        """Take `count` tokens, even if the bucket does not have them."""
        self._level -= count

    def wait(self, count: int, now: float) -> float:
        """Take `count` tokens, even if the bucket does not have them; returns the seconds until it would have."""
        self._fill(now)
        self._level -= count
        return max(0.0, -self._level / self._per_second)

    def take_over(self, before: TokenBucket, now: float) -> None:
        """Begin with the level of another bucket, or with as much of it as fits."""
        before._fill(now)
        self._level = min(self._level, before._level)
