"""A cap on how fast messages are sent.

What always holds: over any stretch of time no more is let through than the rate allows and one batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """See the module. Thread-safe.

    Parameters:
        rate: messages a second; None is no cap.
        now: seconds that never go back.
    """

    def __init__(self, rate: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()  # when all that was let through is paid for

    def delay(self, count: int) -> float:
        """Seconds until so many may go; they are counted as gone."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._now()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
            return begin - now

    def take(self, count: int, stop: threading.Event) -> bool:
        """Wait until so many may go; False if there is no point any more."""
        delay = self.delay(count)
        return not (stop.wait(delay) if delay else stop.is_set())
