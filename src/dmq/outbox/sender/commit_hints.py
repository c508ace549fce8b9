"""Send ids that were perhaps just committed, and when to look for each.

Pure code. What always holds: a hint that finds no row is looked for a few times more, since a commit may take its time,
and then forgotten; the relay's scan finds the row anyhow. There are never more hints than a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from dmq.clock import Clock

__all__ = ["Hints"]

_AGAIN_SECONDS: Final = (0.005, 0.02, 0.1, 0.5)
_HINTS_MAX: Final = 100_000


class Hints:
    """Not thread-safe: the relay guards it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._new: deque[str] = deque()
        self._again: deque[tuple[float, str, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._new or self._again)

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    @property
    def next_at(self) -> float | None:
        """When there is something to look for, by the monotonic clock."""
        if self._new:
            return self._clock.monotonic()
        return min((moment for moment, _, _ in self._again), default=None)

    def add(self, send_ids: Iterable[str]) -> None:
        for send_id in send_ids:
            if len(self._new) >= _HINTS_MAX:
                return
            self._new.append(send_id)

    def take(self, limit: int) -> dict[str, int]:
        """Up to `limit` that are due, each with how often it was looked for."""
        taken: dict[str, int] = {}
        while self._new and len(taken) < limit:
            taken[self._new.popleft()] = 0
        now = self._clock.monotonic()
        for _ in range(len(self._again)):
            moment, send_id, tries = self._again.popleft()
            if moment <= now and len(taken) < limit:
                taken.setdefault(send_id, tries)
            else:
                self._again.append((moment, send_id, tries))
        return taken

    def missed(self, asked: Mapping[str, int]) -> None:
        """These were not found: look again later, or no more."""
        now = self._clock.monotonic()
        for send_id, tries in asked.items():
            if tries < len(_AGAIN_SECONDS) and len(self._again) < _HINTS_MAX:
                self._again.append((now + _AGAIN_SECONDS[tries], send_id, tries + 1))
