"""The pool on an event loop: the twin of `dmq.client.connection.pool`, over the same failover.

What always holds: as there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Protocol, TypeAlias

from dmq.client.aio.connection import AioConnection, check_loop
from dmq.client.connection.failover import CONNECT_SECONDS, Failover, Repeats, Standing
from dmq.client.connection.link import Link
from dmq.client.connection.pool import DEPOSED_SECONDS, TICK_SECONDS, BrokerAt, PoolOwner, PoolSettings
from dmq.client.connection.session import Push
from dmq.client.connection.url import Address
from dmq.errors import DMQError, NotConnected, NotLeader
from dmq.event_log import EventLog
from dmq.protocol import Frame, Header, Status
from dmq.protocol.cluster.route import RouteChanged, RouteReply
from dmq.protocol.consume import SubscriptionEnded
from dmq.protocol.session import ServerHealth, ServerReboot

__all__ = ["AioPool", "AioPoolOwner"]

log = EventLog(__name__)

Ask: TypeAlias = Callable[[AioConnection, float | None], Awaitable[Frame]]  # with how many seconds it may take
AskRoutes: TypeAlias = Callable[[AioConnection], Awaitable[RouteReply | None]]
Found: TypeAlias = tuple[RouteReply, AioConnection]


class AioPoolOwner(PoolOwner, Protocol):
    """What a pool asks of the router that made it."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it as a task of its own, until the router is closed."""
        ...


class AioPool:
    """The connection of an event loop to one broker. Parameters as of `dmq.client.connection.pool.Pool`."""

    def __init__(self, at: BrokerAt, settings: PoolSettings, owner: AioPoolOwner) -> None:
        self.shard: Final = at.number
        """The number of its shard; 0 of a lone broker."""
        self.addresses = at.addresses
        self._hello = settings.hello
        self._clock = settings.clock
        self.timeout: Final = settings.timeout
        self._owner = owner
        self.call_later: Final = owner.call_later
        self._spawn: Final = owner.spawn
        self.standing: Final[Standing[AioConnection]] = Standing(
            Failover(at.addresses, shard=at.shard), settings.reconnect, any_member=settings.any_member
        )
        self._moves = settings.reconnect and not settings.any_member
        self.current: Final = self.standing.current
        """The connection in use; None while there is none."""
        self._loop = asyncio.get_running_loop()
        self._watchers: dict[int, Any] = {}
        self.consumers: Final[dict[int, Any]] = {}
        """Those of the watchers that take the messages of a subscription, by its number."""
        self._changed = asyncio.Event()

    @property
    def closed_by(self) -> DMQError | None:
        """Why there will be no connection any more; None as long as there may be."""
        return self.standing.closed_by

    # --- connections ------------------------------------------------------------------------------------------------

    async def open(self, seconds: float | None = None, routes: AskRoutes | None = None) -> Found | None:
        """Connect for the first time; as `dmq.client.connection.pool.Pool.open`."""
        deadline = self._clock.monotonic() + ((self.timeout or 0.0) if seconds is None else seconds)
        standing, is_first = self.standing, True
        while is_first or not standing.failover.is_round_over or self._clock.monotonic() < deadline:
            attempt, is_first = standing.next_attempt(), False
            left = deadline - self._clock.monotonic()
            if attempt.pause and left > 0:
                await asyncio.sleep(min(attempt.pause, left))
            limit = CONNECT_SECONDS if left <= 0 else min(left, CONNECT_SECONDS)
            try:
                connection = await AioConnection.open(
                    attempt.address, self._hello, self, timeout=limit, clock=self._clock
                )
                found = None if routes is None else await routes(connection)
                if found is not None:
                    return found, connection
                self.take(connection)
            except DMQError as error:
                standing.failed(attempt.address, error)
                continue
            return None
        raise standing.nobody_answers()

    def take(self, connection: AioConnection) -> None:
        """Use a connection that was made elsewhere, as the first one.

        Raises:
            NotConnected, NotLeader: it does not lead to where it should, and is closed.
        """
        connection.adopt(self)
        self._use(self._checked(connection))
        self.call_later(TICK_SECONDS, self._tick)

    def aim(self, addresses: tuple[Address, ...], leader: str, epoch: int) -> None:
        """The broker answers at these addresses from now on, and is led from there, as far as is known."""
        self.addresses = addresses or self.addresses
        self.standing.failover.aim(addresses, leader, epoch)

    def start(self) -> None:
        """Connect for the first time, without waiting for it."""
        self._start_connecting()
        self.call_later(TICK_SECONDS, self._tick)

    async def _connect(self, address: Address, timeout: float = CONNECT_SECONDS) -> AioConnection:
        return self._checked(await AioConnection.open(address, self._hello, self, timeout=timeout, clock=self._clock))

    def _checked(self, connection: AioConnection) -> AioConnection:
        refusal = self.standing.refusal(connection.address, connection.reply.shard)
        if refusal is not None:
            connection.close(refusal)
            raise refusal
        return connection

    async def connection(self, timeout: float | None = None) -> AioConnection:
        """The connection in use, waiting for one if need be, at most as long as this or as the client waits.

        Raises:
            NotConnected: none came in time, or the pool is closed.
        """
        check_loop(self._loop)
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
            raise self.standing.unreached(limit or 0.0) from None
        raise type(self.closed_by)(self.closed_by.message, **self.closed_by.detail)

    async def request(
        self,
        command: int,
        header: Header,
        *,
        timeout: float | None = None,
        answer_seconds: float | None = None,
        ask: Ask | None = None,
    ) -> Frame:
        """Ask the broker in use; as `dmq.client.connection.pool.Pool.request`."""
        ask = ask or (lambda connection, seconds: connection.request(command, header, timeout=seconds))
        deadline = math.inf if timeout is None else self._loop.time() + timeout
        repeats = Repeats(command, header, moves=self._moves)
        while True:
            left = max(0.001, deadline - self._loop.time())
            connection = await self.connection(left if timeout is not None else None)
            left = max(0.001, deadline - self._loop.time())
            limit = min(left, math.inf if answer_seconds is None else answer_seconds)
            try:
                frame = await ask(connection, limit if limit < math.inf else None)
            except NotConnected as error:
                if self.closed_by is not None:
                    raise type(self.closed_by)(self.closed_by.message, **self.closed_by.detail) from error
                pause = repeats.after_break(error)
            else:
                again = repeats.after_answer(frame)
                if again is None or self._loop.time() + again >= deadline:
                    return frame
                pause = again
            await asyncio.sleep(max(0.0, min(pause, deadline - self._loop.time())))

    def watch(self, watcher: Any, subscription: int | None = None) -> None:
        """Have it told what happens, until `unwatch`; see `dmq.client.connection.pool.Pool.watch`."""
        self._watchers[id(watcher)] = watcher
        if subscription is not None:
            self.consumers[subscription] = watcher
        connection = self.current()
        if connection is not None:
            watcher.connected(connection)

    def unwatch(self, watcher: Any) -> None:
        self._watchers.pop(id(watcher), None)
        for number in [number for number, consumer in self.consumers.items() if consumer is watcher]:
            del self.consumers[number]

    def _each(self, method: str, *arguments: Any) -> None:
        for watcher in [*self._watchers.values()]:
            try:
                getattr(watcher, method)(*arguments)
            except Exception:
                log.exception("a watcher raised", once_for=method, method=method)

    # --- another broker ---------------------------------------------------------------------------------------------

    def has_other(self, link: Link) -> bool:
        """Whether another broker than this link's could be asked."""
        return bool(self.standing.others(link.address))

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        """Have `found` called with a connection to another broker, or None if none answers."""
        self._spawn(self._find(link.address, found))

    async def _find(self, address: Address, found: Callable[[Link | None], None]) -> None:
        for other in self.standing.others(address):
            try:
                connection = self.standing.known(other) or await self._connect(other)
            except DMQError:
                continue
            kept = self.standing.keep_beside(connection)
            if kept is not connection:
                connection.close(NotConnected("one connection to a broker is enough"))
            found(kept)
            return
        found(None)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _use(self, connection: AioConnection) -> None:
        if self.closed_by is not None:
            connection.close(self.closed_by)
            return
        was_interrupted = self.standing.use(connection)
        self._changed.set()
        self._each("connected", connection)
        if was_interrupted:
            self._owner.resumed(self.shard)
        if connection.is_closed:  # it broke before it was in use, and nobody has noticed
            self.lost(connection, NotConnected(f"the connection to {connection.address} broke at once"))

    def lost(self, connection: AioConnection, reason: DMQError) -> None:
        """A connection broke."""
        loss = self.standing.lost(connection, reason)
        if loss.is_interruption:
            self._owner.interrupted(self.shard, reason)
        self._each("lost", connection, reason)
        if loss.closed_by is not None:
            self._changed.set()
            self._each("closed", loss.closed_by)
            self._owner.ended(loss.closed_by)
        elif loss.must_connect:
            self._start_connecting()

    def deposed(self, connection: AioConnection, error: NotLeader) -> None:
        """The broker does not lead its shard any more: look for the one that does."""
        loss = self.standing.deposed(connection, error)
        if loss.closed_by is not None:
            connection.close(loss.closed_by)
        elif loss.must_connect:
            self._owner.interrupted(self.shard, error)
            self._start_connecting()
            self._retire(connection, self._clock.monotonic() + DEPOSED_SECONDS)

    def _start_connecting(self) -> None:
        if self.standing.begin_connecting():
            search = self.standing.searches
            self._spawn(self._keep_connecting())
            if self.timeout is not None:
                self.call_later(self.timeout, lambda: self._check_reached(search))

    async def _keep_connecting(self) -> None:
        while self.closed_by is None:
            attempt = self.standing.next_attempt()
            await asyncio.sleep(attempt.pause)
            try:
                known = self.standing.known(attempt.address)
                connection = known or await self._connect(attempt.address, attempt.seconds)
            except DMQError as error:
                self.standing.failed(attempt.address, error)
                log.debug("no connection", address=str(attempt.address), reason=error.message)
                continue
            self._use(connection)
            return

    def _check_reached(self, search: int) -> None:
        """The client's time for a search is over. A later one has a time of its own."""
        if self.standing.is_searching(search) and self.closed_by is None:
            self._each("unreachable", self.standing.unreached(self.timeout or 0.0))

    def pushed(self, connection: AioConnection, push: Push) -> None:
        """The broker sent something by itself, and not messages."""
        header = push.header
        if isinstance(header, ServerReboot):
            if self.standing.rebooting(connection, header.reason):
                self._start_connecting()
                self._retire(connection, self._clock.monotonic() + header.grace_ms / 1000)
        elif isinstance(header, ServerHealth):
            self.standing.failover.healthy(header.broker, header.address)
        elif isinstance(header, SubscriptionEnded) and header.status == Status.NOT_LEADER:
            self.deposed(connection, NotLeader(header.message))
        elif isinstance(header, RouteChanged):
            self._owner.route_changed(header)
        self._each("pushed", connection, push)

    def _retire(self, connection: AioConnection, deadline: float) -> None:
        if connection.is_closed:
            return
        if self.standing.is_retired(connection, connection.outstanding, self._clock.monotonic() >= deadline):
            connection.close(NotConnected("the broker reboots, or does not lead its shard any more"))
        else:
            self.call_later(0.1, lambda: self._retire(connection, deadline))

    def _tick(self) -> None:
        self.standing.look()
        for connection in self.standing.connections():
            connection.tick()
        self.call_later(TICK_SECONDS, self._tick)

    def retire(self, reason: DMQError) -> None:
        """End all connections, and tell nobody: the broker is gone for good."""
        self._watchers.clear()
        self.consumers.clear()
        self.close(reason)

    def close(self, reason: DMQError) -> None:
        """End all connections; the first reason is the one that is told."""
        is_first = self.closed_by is None
        reason = self.closed_by or reason
        connections = self.standing.close(reason)
        self._changed.set()
        if is_first:
            self._each("closed", reason)
        for connection in connections:
            connection.close(reason)
