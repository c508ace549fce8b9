"""Callers that wait for more of the journal to become visible.

What always holds: no more wait than may; all of them are woken by every unit, and now and then without one, so that
they can look at the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from dmq.errors import Busy

__all__ = ["Arrivals"]


class Arrivals:
    """The callers that wait for one journal.

    Attributes:
        waiting: one for each that waits now.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._count = 0
        self.waiting: list[asyncio.Future[None]] = []

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Within this, the caller counts as one that waits.

        Raises:
            Busy: too many wait already.
        """
        if self._count >= self._waiting_max:
            raise Busy(f"{self._count} wait for the journal already: try again shortly", retry_after_ms=100)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    async def more(self) -> None:
        """Wait until more has become visible, or some time has passed."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(waiting)
        await waiting

    def wake(self) -> None:
        """Have all look again."""
        if not self.waiting:
            return
        woken, self.waiting = self.waiting, []
        for waiting in woken:
            if not waiting.done():
                waiting.set_result(None)
