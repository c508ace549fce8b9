"""A request whose answer is waited for by the very thread that reads. Pure but for its lock.

What always holds: the answer goes to exactly one place: to the thread that waits, or, once that handed over, to
whoever it named.
"""

from __future__ import annotations

import threading

from dmq.client.session import OnAnswer, Pending
from dmq.errors import DMQError
from dmq.protocol import Frame

__all__ = ["Exchange"]


class Exchange:
    """See the module."""

    __slots__ = ("_late", "_lock", "answer", "pending")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: OnAnswer | None = None
        self.answer: Frame | DMQError | None = None
        self.pending: Pending | None = None

    def take(self, answer: Frame | DMQError) -> None:
        """Here it is."""
        with self._lock:
            self.answer = answer
            late = self._late
        if late is not None:
            late(answer)

    def hand_over(self, late: OnAnswer) -> bool:
        """Have somebody else told the answer; False if it is here already."""
        with self._lock:
            if self.answer is not None:
                return False
            self._late = late
            return True
