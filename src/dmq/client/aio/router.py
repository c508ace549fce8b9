"""The router on an event loop: the twin of `dmq.client.connection.router`.

What always holds: as there. Listeners and callbacks run on the loop, each in a turn of its own, so that one that
raises harms nobody; coroutine functions are awaited.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from dmq.client.aio.connection import AioConnection
from dmq.client.aio.pool import AioPool
from dmq.client.connection.failover import CONNECT_SECONDS
from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import AnyRouter, BrokerAddresses, Listeners, RouteTable
from dmq.errors import DMQError, NotConnected
from dmq.event_log import EventLog

__all__ = ["AioRouter"]

log = EventLog(__name__)


class AioRouter(AnyRouter[AioPool, AioConnection]):
    """The router of one running loop. Parameters as of `dmq.client.connection.router.AnyRouter`."""

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        super().__init__(table, settings, listeners)

    def _make_pool(self, addresses: BrokerAddresses) -> AioPool:
        return AioPool(addresses, self._settings, self)

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call something of the user's in a turn of its own."""
        self.spawn(self._call(function, arguments))

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                await result
        except Exception:
            name = getattr(function, "__qualname__", repr(function))
            log.exception("a callback raised", once_for=name, callback=name)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it as a task of its own, until the router is closed."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have it called after so long; never after the close."""
        if self.closed_by is not None:
            return

        def run() -> None:
            self._timers.discard(handle)
            function()

        handle = self._loop.call_later(seconds, run)
        self._timers.add(handle)

    async def open(self) -> None:
        """Connect for the first time; errors as of `AioPool.open`."""
        try:
            await self.home.open()
        except DMQError:
            await self.close()
            raise

    def ended(self, reason: DMQError) -> None:
        """A connection broke that is not to be replaced: nothing is connected any more."""
        for pool in [*self._pools.values()]:
            pool.close(reason)

    async def close(self) -> None:
        """End all connections. No listener is called: it was asked for."""
        for pool in [*self._pools.values()]:
            pool.close(NotConnected("the client is closed: connect again"))
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CONNECT_SECONDS)
            for task in late:
                task.cancel()
