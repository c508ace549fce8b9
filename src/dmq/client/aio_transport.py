"""The transport on an event loop: the twin of `dmq.client.transport`, over the same failover.

What always holds: as there. Listeners and callbacks run on the loop, each in a turn of its own, so that one that
raises harms nobody; coroutine functions are awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from dmq.client.aio_connection import AioConnection
from dmq.client.failover import Failover, nobody_answers
from dmq.client.listeners import Listeners
from dmq.client.sender import Link
from dmq.client.session import Push
from dmq.client.transport import CONNECT_SECONDS, TICK_SECONDS
from dmq.client.url import Address
from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected
from dmq.protocol import Buffer, Frame, Header
from dmq.protocol.session import Hello, ServerHealth, ServerReboot

__all__ = ["AioTransport"]

log = logging.getLogger(__name__)


class AioTransport:
    """See the module. Parameters as of `dmq.client.transport.Transport`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        hello: Hello,
        clock: Clock,
        *,
        reconnect: bool = True,
        timeout: float | None = None,
        listeners: Listeners | None = None,
    ) -> None:
        self._hello = hello
        self._clock = clock
        self._reconnect = reconnect
        self.timeout: Final = timeout
        self.listeners = listeners or Listeners()
        self._failover = Failover(addresses)
        self._loop = asyncio.get_running_loop()
        self._current: AioConnection | None = None
        self._others: dict[Address, AioConnection] = {}
        self._watchers: dict[int, Any] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_interrupted = False
        self._is_connecting = False
        self.closed_by: DMQError | None = None

    # --- connections ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect for the first time.

        Raises:
            NotConnected: nobody answered: at once, or, with a timeout, after that long.
            DMQError: what a broker answered to the hello.
        """
        deadline = self._clock.monotonic() + (self.timeout or 0.0)
        errors: dict[Address, DMQError] = {}
        while True:
            attempt = self._failover.next_attempt()
            left = deadline - self._clock.monotonic()
            if attempt.pause:
                if left <= 0:
                    break
                await asyncio.sleep(min(attempt.pause, left))
            try:
                self._use(await self._connect(attempt.address))
            except DMQError as error:
                errors[attempt.address] = error
                continue
            self.call_later(TICK_SECONDS, self._tick)
            return
        self.closed_by = NotConnected("the client never was connected")
        raise nobody_answers(errors)

    async def _connect(self, address: Address) -> AioConnection:
        return await AioConnection.open(
            address,
            self._hello,
            timeout=CONNECT_SECONDS,
            clock=self._clock,
            on_push=self._pushed,
            on_closed=self._lost,
        )

    def current(self) -> AioConnection | None:
        """The connection in use; None while there is none."""
        connection = self._current
        return connection if connection is not None and connection.is_usable else None

    async def connection(self, timeout: float | None = None) -> AioConnection:
        """The connection in use, waiting for one if need be, at most as long as this or as the client waits.

        Raises:
            NotConnected: none came in time, or the transport is closed.
        """
        limits = [limit for limit in (timeout, self.timeout) if limit is not None]
        limit = min(limits) if limits else None
        try:
            async with asyncio.timeout(limit):
                while self.closed_by is None:
                    connection = self.current()
                    if connection is not None:
                        return connection
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NotConnected(f"no broker could be reached within {limit:g} s") from None
        raise type(self.closed_by)(self.closed_by.message, **self.closed_by.detail)

    async def request(
        self, command: int, header: Header, body: Sequence[Buffer] = (), *, timeout: float | None = None
    ) -> Frame:
        """Ask the broker in use, waiting for a connection if need be.

        Raises:
            DMQError: no connection or no answer in time.
        """
        connection = await self.connection(timeout)
        return await connection.request(command, header, body, timeout=timeout)

    def watch(self, watcher: Any) -> None:
        """Have it told what happens, until `unwatch`; see `dmq.client.transport.Watcher`."""
        self._watchers[id(watcher)] = watcher
        connection = self.current()
        if connection is not None:
            watcher.connected(connection)

    def unwatch(self, watcher: Any) -> None:
        self._watchers.pop(id(watcher), None)

    def _each(self, method: str, *arguments: Any) -> None:
        for watcher in [*self._watchers.values()]:
            try:
                getattr(watcher, method)(*arguments)
            except Exception:
                log.exception("a watcher raised", extra={"method": method})

    # --- later and elsewhere ----------------------------------------------------------------------------------------

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have it called after so long; never after the close."""
        if self.closed_by is not None:
            return

        def run() -> None:
            self._timers.discard(handle)
            function()

        handle = self._loop.call_later(seconds, run)
        self._timers.add(handle)

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call something of the user's in a turn of its own."""
        self._spawn(self._call(function, arguments))

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            result = function(*arguments)
            if inspect.isawaitable(result):
                await result
        except Exception:
            log.exception("a callback raised", extra={"callback": getattr(function, "__qualname__", repr(function))})

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def has_other(self, link: Link) -> bool:
        """Whether another broker than this link's could be asked."""
        return self._reconnect and bool(self._failover.others(link.address))

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        """Have `found` called with a connection to another broker, or None if none answers."""
        self._spawn(self._find(link.address, found))

    async def _find(self, address: Address, found: Callable[[Link | None], None]) -> None:
        for other in self._failover.others(address):
            try:
                connection = self._known(other) or await self._connect(other)
            except DMQError:
                continue
            if connection is not self._current:
                self._others[other] = connection
            found(connection)
            return
        found(None)

    def _known(self, address: Address) -> AioConnection | None:
        for connection in (self._current, self._others.get(address)):
            if connection is not None and connection.address == address and connection.is_usable:
                return connection
        return None

    # --- what happens -----------------------------------------------------------------------------------------------

    def _use(self, connection: AioConnection) -> None:
        if self.closed_by is not None:
            connection.close(self.closed_by)
            return
        self._failover.connected(connection.address, connection.broker)
        self._current = connection
        self._others.pop(connection.address, None)
        self._is_connecting = False
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        self._changed.set()
        self._each("connected", connection)
        if was_interrupted:
            self.notify(self.listeners.resumed)

    def _lost(self, connection: AioConnection, reason: DMQError) -> None:
        if self._others.get(connection.address) is connection:
            del self._others[connection.address]
        if self._current is connection:
            self._current = None
            self._failover.lost(connection.address)
        is_event = self._current is None and self.closed_by is None and not self._is_interrupted
        if is_event:
            self._is_interrupted = True
            self.notify(self.listeners.exception, reason)
            self.notify(self.listeners.interrupted)
        self._each("lost", connection, reason)
        if is_event and not self._reconnect:
            self.closed_by = NotConnected(
                f"the connection is closed ({reason.message}), and reconnect=False: connect again"
            )
            self._changed.set()
            self._each("closed", self.closed_by)
        elif is_event:
            self._start_connecting()

    def _start_connecting(self) -> None:
        if self._is_connecting or self.closed_by is not None:
            return
        self._is_connecting = True
        self._spawn(self._keep_connecting())
        if self.timeout is not None:
            self.call_later(self.timeout, self._check_reached)

    async def _keep_connecting(self) -> None:
        while self.closed_by is None:
            attempt = self._failover.next_attempt()
            await asyncio.sleep(attempt.pause)
            try:
                connection = self._known(attempt.address) or await self._connect(attempt.address)
            except DMQError as error:
                log.debug("no connection", extra={"address": str(attempt.address), "reason": error.message})
                continue
            self._use(connection)
            return

    def _check_reached(self) -> None:
        if self.current() is None:
            self._each("unreachable", NotConnected(f"no broker could be reached within {self.timeout:g} s"))

    def _pushed(self, connection: AioConnection, push: Push) -> None:
        header = push.header
        if isinstance(header, ServerReboot):
            if self._failover.rebooting(connection.address) and self._reconnect and self._current is connection:
                self._current = None
                self._others[connection.address] = connection
                self._start_connecting()
                self._retire(connection, self._clock.monotonic() + header.grace_ms / 1000)
        elif isinstance(header, ServerHealth):
            self._failover.healthy(header.broker, header.address)
        self._each("pushed", connection, push)

    def _retire(self, connection: AioConnection, deadline: float) -> None:
        if connection.is_closed or connection is self._current:
            return
        if (connection.outstanding == 0 or self._clock.monotonic() >= deadline) and self.current() is not None:
            connection.close(NotConnected("the broker reboots"))
            return
        self.call_later(0.1, lambda: self._retire(connection, deadline))

    def _tick(self) -> None:
        for connection in [*self._others.values(), *([self._current] if self._current else [])]:
            connection.tick()
        self.call_later(TICK_SECONDS, self._tick)

    async def close(self) -> None:
        """End all connections. No listener is called: it was asked for."""
        if self.closed_by is None:
            self.closed_by = NotConnected("the client is closed: connect again")
            self._each("closed", self.closed_by)
        connections = [*self._others.values(), *([self._current] if self._current else [])]
        self._current = None
        self._others.clear()
        self._changed.set()
        for connection in connections:
            connection.close(self.closed_by)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CONNECT_SECONDS)
            for task in late:
                task.cancel()
