"""What a figure has to reach, and whether it does.

What always holds: the median decides; one that is nearer to its bar than the same code is to itself decides nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Bar", "Outcome"]


class Bar(NamedTuple):
    """At least so much, or at most so much; in plain Python, and with the extension."""

    plain: float | None = None
    extension: float | None = None
    is_most: bool = False

    def of(self, has_extension: bool) -> float | None:
        return self.extension if has_extension else self.plain

    def shown(self, has_extension: bool) -> str:
        limit = self.of(has_extension)
        return "" if limit is None else f"{'<=' if self.is_most else '>='} {limit:g}"


class Outcome(NamedTuple):
    """The ratios of all rounds, and of the same code to itself."""

    ratios: Sequence[float]
    to_itself: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """How far the same code is from itself, as a share; 0 if it was measured once."""
        return abs(statistics.median(self.to_itself) - 1) if self.to_itself else 0.0

    def verdict(self, bar: Bar, has_extension: bool) -> str:
        """`met`, `missed`, or `unsure` if the noise is larger than the way to the bar; empty without a bar."""
        limit = bar.of(has_extension)
        if limit is None:
            return ""
        if abs(self.median / limit - 1) < self.noise:
            return "unsure"
        return "met" if (self.median <= limit if bar.is_most else self.median >= limit) else "missed"
