"""A task that waits to be woken: what `dmq.client.connection.threads.Waiter` is for a thread."""

from __future__ import annotations

import asyncio

__all__ = ["TaskWaiter"]


class TaskWaiter:
    """One task that waits, once."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """End the waiting; safe to call twice."""
        if not self._future.done():
            self._future.set_result(True)

    async def wait(self, seconds: float | None) -> bool:
        """Wait until woken, at most for so many seconds; False if nobody woke us."""
        if seconds is None:
            return await self._future
        # Half the price of asyncio.timeout, which could also cancel what it waits for.
        timer = self._future.get_loop().call_later(max(0.0, seconds), self._expire)
        try:
            return await self._future
        finally:
            timer.cancel()

    def _expire(self) -> None:
        if not self._future.done():
            self._future.set_result(False)
