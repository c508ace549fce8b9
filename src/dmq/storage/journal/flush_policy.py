"""The flush policy: whether the event loop flushes for a lone request itself, or a thread does.

The way to a thread and back costs a lone request as much as a flush on a quick disk, and there is nothing to gather
meanwhile. But the loop must not wait long: heartbeats and all other clients wait with it.

Pure code. What always holds: the loop flushes only while flushes took less than a millisecond on average, the last ones
counting most, so that one that is late now and then changes nothing; after one that took the loop over 20 ms, threads
flush for fifty times as long, so that the loop spends at most a fiftieth of its time in such flushes.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FlushPolicy"]

_QUICK_SECONDS: Final = 0.001
_VERY_QUICK_SECONDS: Final = 0.0003
_WEIGHT: Final = 1 / 8  # of the last flush in the average
_COUNTED_SECONDS_MAX: Final = 0.1  # what a flush counts at most: after one, threads take about twenty
_UNKNOWN_SECONDS: Final = 0.008  # the average to begin with: sixteen quick flushes show that a disk is quick
_STALL_SECONDS: Final = 0.02
_REST: Final = 50
_REST_SECONDS_MAX: Final = 10.0


class FlushPolicy:
    """The policy of one journal; a disk has to show first that it is quick."""

    __slots__ = ("_average", "_rests_until")

    def __init__(self) -> None:
        self._average = _UNKNOWN_SECONDS
        self._rests_until = 0.0

    def is_for_loop(self, now: float, *, is_lone: bool = True) -> bool:
        """Whether the loop may flush, at a moment of a monotonic clock.

        Parameters:
            is_lone: for one request; if others wait meanwhile, the disk has to be quicker.
        """
        return self._average <= (_QUICK_SECONDS if is_lone else _VERY_QUICK_SECONDS) and now >= self._rests_until

    def flushed(self, seconds: float, now: float, *, on_loop: bool) -> None:
        """A flush took so long."""
        self._average += (min(seconds, _COUNTED_SECONDS_MAX) - self._average) * _WEIGHT
        if on_loop and seconds > _STALL_SECONDS:
            self._rests_until = now + min(_REST * seconds, _REST_SECONDS_MAX)
