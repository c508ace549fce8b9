"""A histogram with fixed buckets: how long things took, at the cost of a few additions for a whole batch."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

__all__ = ["SECONDS", "Histogram"]

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0, 3600.0)


class Histogram:
    """Counts by bucket.

    Parameters:
        bounds: the upper bounds of the buckets, rising; beyond the last there is one more.

    Attributes:
        counts: by bucket, not cumulative.
        sum: of everything observed.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many things took so long each."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, int]]:
        """By upper bound as Prometheus writes it, how many were not above it."""
        found, below = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, below))
        return found
