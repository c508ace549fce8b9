"""The router on an event loop: the twin of `dmq.client.connection.router`.

What always holds: as there. Listeners and callbacks run on the loop, each in a turn of its own, so that one that
raises harms nobody; coroutine functions are awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from dmq.client.aio.connection import AioConnection, check_loop
from dmq.client.aio.pool import AioPool
from dmq.client.connection.failover import CONNECT_SECONDS, Backoff
from dmq.client.connection.pool import BrokerAt, PoolSettings
from dmq.client.connection.router import (
    LEARN_SECONDS,
    LEARN_TRIES,
    NAME_SERVER,
    SCOUT_SECONDS,
    AnyRouter,
    Listeners,
    RouteTable,
    has_routes,
    not_routed,
    own_pool,
    routes_in,
)
from dmq.errors import DMQError, NotConnected
from dmq.event_log import EventLog
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.cluster.route import Route, RouteReply, TopicRoute

__all__ = ["AioRouter"]

log = EventLog(__name__)


class AioRouter(AnyRouter[AioPool, AioConnection]):
    """The router of one running loop. Parameters as of `dmq.client.connection.router.AnyRouter`."""

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners | None = None) -> None:
        self.loop: Final = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_closed = False
        super().__init__(table, settings, listeners)

    def check_loop(self) -> None:
        """Refuse to work on another event loop than one's own; see `dmq.client.aio.connection.check_loop`."""
        check_loop(self.loop)

    def _make_pool(self, at: BrokerAt) -> AioPool:
        return AioPool(at, self._settings, self)

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
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]:
        return self._call_later

    def _call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have it called after so long; never after the close."""
        if self._is_closed:
            return

        def run() -> None:
            self._timers.discard(handle)
            function()

        handle = self.loop.call_later(seconds, run)
        self._timers.add(handle)

    async def open(self) -> None:
        """Connect for the first time; as `dmq.client.connection.router.Router.open`."""
        deadline = self.loop.time() + (self.timeout or 0.0)
        routes_of = _routes_past if self._settings.any_member else _routes_of
        try:
            found = await self.home.open(routes=None if self._only is None else routes_of)
            if found is not None and self._settings.any_member:
                self._go_past(found[0], self.home)
                found[1].close(NotConnected("the brokers are known"))
                await self.home.open()
            elif found is not None:
                await self._open_any(self._join(found[0], found[1].reply), found[1], deadline)
        except DMQError:
            await self.close()
            raise

    async def _open_any(self, pools: list[AioPool], connection: AioConnection, deadline: float) -> None:
        """Connect to the leader of any shard, and start to connect to the others."""
        assert self._keeper is not None
        opened, backoff = _taken(pools, connection), Backoff()
        while opened is None:
            problems: list[DMQError] = []
            for pool in pools:
                try:
                    await pool.open(0.0)
                except DMQError as error:
                    problems.append(error)
                else:
                    opened = pool
                    break
            if opened is None and self.loop.time() >= deadline:
                raise problems[0]
            if opened is None:
                await asyncio.sleep(min(backoff.take(), max(0.0, deadline - self.loop.time())))
        for pool in pools:
            if pool is not opened:
                pool.start()
        self._keeper.begin()

    async def learn(self, topic: str, seconds: float | None = None) -> TopicRoute:
        """The route of a topic in a cluster; as `dmq.client.connection.router.Router.learn`."""
        known = self._known(topic)
        deadline = math.inf if seconds is None else self.loop.time() + seconds
        tries = 0
        while known is None:
            left = None if seconds is None else max(0.001, deadline - self.loop.time())
            asked = Route([topic], is_watched=True)
            known = self._known(topic, await self.home.request(Command.ROUTE, asked, timeout=left))
            if known is not None:
                break
            if not tries:  # it says that there is none, or creates it
                decode_response(await self.home.request(Command.TOPIC_DESCRIBE, TopicDescribe(topic), timeout=left))
            elif tries > LEARN_TRIES or self.loop.time() >= deadline:
                raise not_routed(topic)
            else:
                await asyncio.sleep(LEARN_SECONDS)
            tries += 1
        return known

    def scout(self, asked: Route) -> None:
        """Ask the addresses of the URL for routes, beside all connections."""
        self.spawn(self._scout(asked))

    async def _scout(self, asked: Route) -> None:
        keeper = self._keeper
        assert keeper is not None
        url = await asyncio.to_thread(self._look_up)
        pool = AioPool(BrokerAt(0, url), self._settings, self)
        for address in url:
            if self._is_closed:
                return
            try:
                connection = await AioConnection.open(
                    address, self._settings.hello, pool, timeout=SCOUT_SECONDS, clock=self._settings.clock
                )
                try:
                    reply = await _routes_of(connection, asked)
                finally:
                    connection.close(NotConnected("the routes are known"))
            except DMQError:
                continue
            if reply is not None:
                keeper.took(reply, asked.topics)
                return
        keeper.missed(asked)

    def ended(self, reason: DMQError) -> None:
        """A connection broke that is not to be replaced: nothing is connected any more."""
        self._is_closed = True
        for pool in [*self._pools.values()]:
            pool.close(reason)

    async def close(self) -> None:
        """End all connections. No listener is called: it was asked for.

        Raises:
            NotConnected: it belongs to another event loop.
        """
        self.check_loop()
        self._is_closed = True
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


def _taken(pools: Sequence[AioPool], connection: AioConnection) -> AioPool | None:
    """The pool that can use the connection over which the routes were found; if none can, it is closed."""
    own = own_pool(pools, connection.reply)
    try:
        if own is not None:
            own.take(connection)
            return own
    except DMQError:
        return None  # it does not lead any more
    connection.close(NotConnected("the routes are known"))
    return None


async def _routes_of(connection: AioConnection, asked: Route | None = None) -> RouteReply | None:
    """The routes that a server answers with; as of the blocking router."""
    if not has_routes(connection.reply):
        return None
    try:
        frame = await connection.request(Command.ROUTE, asked or Route(), timeout=CONNECT_SECONDS)
        return routes_in(connection.reply, frame)
    except DMQError as error:
        connection.close(error)
        raise


async def _routes_past(connection: AioConnection) -> RouteReply | None:
    """The routes that a name server answers with; as of the blocking router."""
    return await _routes_of(connection) if connection.reply.broker == NAME_SERVER else None
