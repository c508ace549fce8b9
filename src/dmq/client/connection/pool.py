"""The pool: one connection to one broker, and another one when it breaks (A-08, A-09, A-11, D-09).

A broker has several addresses if it may be found at any of them. One connection carries everything (J-15). When it
breaks, a thread tries the addresses in rounds until one answers; watchers (producers, consumers) are told, and take up
their work. Where a refused send wants another address, a second connection is opened beside the first.

Where the addresses are those of members of a shard, the connection is the one to the leader. A member that answers
NOT_LEADER, or says so when it ends a subscription, is left as if the connection had broken.

What always holds:
- The router is told of `interrupted` and `resumed` in turns, and never with a lock held.
- In plain mode (`reconnect=False`) a connection that broke closes the pool for good.
- Watchers are told of a connection before the router is told that it is back, so that what was subscribed is so again
  by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from dmq.client.connection.connection import Connection
from dmq.client.connection.failover import CONNECT_SECONDS, Failover, Repeats, Standing
from dmq.client.connection.link import Link
from dmq.client.connection.session import Push
from dmq.client.connection.threads import FOREVER, Trace
from dmq.client.connection.url import Address
from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected, NotLeader
from dmq.event_log import EventLog
from dmq.protocol import Frame, Header, Status
from dmq.protocol.cluster.route import RouteChanged, RouteReply
from dmq.protocol.consume import SubscriptionEnded
from dmq.protocol.session import Hello, ServerHealth, ServerReboot

__all__ = ["BrokerAt", "Pool", "PoolOwner", "PoolSettings", "Watcher"]

log = EventLog(__name__)


TICK_SECONDS: Final = 0.5
DEPOSED_SECONDS: Final = 1.0  # that a member which does not lead any more has for its last answers

Ask: TypeAlias = Callable[[Connection, float | None], Frame]  # with how many seconds it may take
AskRoutes: TypeAlias = Callable[[Connection], RouteReply | None]
Found: TypeAlias = tuple[RouteReply, Connection]


class Watcher(Protocol):
    """What works over the connection. Called on the pool's threads: must not block."""

    def connected(self, connection: Connection) -> None:
        """This connection is in use from now on."""

    def lost(self, connection: Connection, reason: DMQError) -> None:
        """It broke; its requests have their answers."""

    def pushed(self, connection: Connection, push: Push) -> None:
        """The broker sent something by itself: messages of the watcher's own subscription, or anything else."""

    def unreachable(self, error: DMQError) -> None:
        """No broker was reached for as long as the client is willing to wait; it goes on trying."""

    def closed(self, error: DMQError) -> None:
        """There will be no connection any more."""

    def forked(self, reason: NotConnected) -> None:
        """We are in a child, and it is the parent's."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What all pools of a client share.

    Parameters:
        hello: who we are.
        reconnect: come back by itself.
        timeout: how long to wait for a connection; None is for ever.
        any_member: any member of a shard will do, for what does not need the leader.
        is_routed: members of a shard are asked for the other shards of the cluster; else there is only theirs.
    """

    hello: Hello
    clock: Clock
    reconnect: bool = True
    timeout: float | None = None
    any_member: bool = False
    is_routed: bool = True


class BrokerAt(NamedTuple):
    """A broker, and where it is.

    Attributes:
        number: of its shard; 0 is a lone broker.
        shard: the name of its shard; "" if that is not known.
    """

    number: int
    addresses: tuple[Address, ...]
    shard: str = ""


class PoolOwner(Protocol):
    """What a pool asks of the router that made it."""

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    def interrupted(self, broker: int, reason: DMQError) -> None:
        """There is no connection to it any more."""
        ...

    def resumed(self, broker: int) -> None:
        """There is one again."""
        ...

    def route_changed(self, changed: RouteChanged) -> None:
        """A broker says that routes have changed."""
        ...

    def ended(self, reason: DMQError) -> None:
        """A connection broke, and is not to be replaced."""
        ...


class Pool:
    """The connection of a blocking program to one broker. Thread-safe.

    Parameters:
        at: which broker, and the addresses at which it answers.
        owner: told when the connection breaks and when it is back.
    """

    def __init__(self, at: BrokerAt, settings: PoolSettings, owner: PoolOwner) -> None:
        self.shard: Final = at.number
        """The number of its shard; 0 of a lone broker."""
        self.addresses = at.addresses
        self._hello = settings.hello
        self._clock = settings.clock
        self.timeout: Final = settings.timeout
        self._owner = owner
        self.call_later: Final = owner.call_later
        self.standing: Final[Standing[Connection]] = Standing(
            Failover(at.addresses, shard=at.shard), settings.reconnect, any_member=settings.any_member
        )
        self._moves = settings.reconnect and not settings.any_member
        self.current: Final = self.standing.current
        """The connection in use; None while there is none."""
        self._lock = threading.RLock()  # guards the standing and the watchers; taken by itself, see `Alarms`
        self._changed = threading.Condition(self._lock)
        self._watchers: dict[int, Watcher] = {}
        self.consumers: Final[dict[int, Watcher]] = {}
        """Those of the watchers that take the messages of a subscription, by its number."""

    @property
    def closed_by(self) -> DMQError | None:
        """Why there will be no connection any more; None as long as there may be."""
        return self.standing.closed_by

    # --- connections ------------------------------------------------------------------------------------------------

    def open(self, seconds: float | None = None, routes: AskRoutes | None = None) -> Found | None:
        """Connect for the first time.

        Parameters:
            seconds: how long to try; the client's timeout if left out. All addresses are tried at least once.
            routes: asks the server that answers for the routes of its cluster, if it is in one.

        Returns:
            The routes that were found, and the connection over which, which is not in use then; None if there is no
            cluster, and the connection is in use.

        Raises:
            NotConnected: nobody answered: at once, or, with a timeout, after that long.
            DMQError: what a broker answered to the hello.
        """
        deadline = time.monotonic() + ((self.timeout or 0.0) if seconds is None else seconds)
        standing, is_first = self.standing, True
        while is_first or not standing.failover.is_round_over or time.monotonic() < deadline:
            attempt, is_first = standing.next_attempt(), False
            left = deadline - time.monotonic()
            if attempt.pause and left > 0:
                time.sleep(min(attempt.pause, left))
            limit = CONNECT_SECONDS if left <= 0 else min(left, CONNECT_SECONDS)
            try:
                connection = Connection.open(attempt.address, self._hello, self, timeout=limit, clock=self._clock)
                found = None if routes is None else routes(connection)
                if found is not None:
                    return found, connection
                self.take(connection)
            except DMQError as error:
                standing.failed(attempt.address, error)
                continue
            return None
        raise standing.nobody_answers()

    def take(self, connection: Connection) -> None:
        """Use a connection that was made elsewhere, as the first one.

        Raises:
            NotConnected, NotLeader: it does not lead to where it should, and is closed.
        """
        connection.adopt(self)
        self._use(self._checked(connection))
        self.call_later(TICK_SECONDS, self._tick)

    def aim(self, addresses: tuple[Address, ...], leader: str, epoch: int) -> None:
        """The broker answers at these addresses from now on, and is led from there, as far as is known."""
        with self._lock:
            self.addresses = addresses or self.addresses
            self.standing.failover.aim(addresses, leader, epoch)

    def start(self) -> None:
        """Connect for the first time, without waiting for it."""
        self._start_connecting()
        self.call_later(TICK_SECONDS, self._tick)

    def _connect(self, address: Address, timeout: float = CONNECT_SECONDS) -> Connection:
        return self._checked(Connection.open(address, self._hello, self, timeout=timeout, clock=self._clock))

    def _checked(self, connection: Connection) -> Connection:
        with self._lock:
            refusal = self.standing.refusal(connection.address, connection.reply.shard)
        if refusal is not None:
            connection.close(refusal)
            raise refusal
        return connection

    def connection(self, deadline: float | None = None) -> Connection:
        """The connection in use, waiting for one if need be.

        Parameters:
            deadline: on the monotonic clock; the client's timeout from now if left out.

        Raises:
            NotConnected: none came in time, or the pool is closed.
        """
        connection = self.current()
        if connection is not None:
            return connection
        start = time.monotonic()
        limit = FOREVER if self.timeout is None else start + self.timeout
        limit = min(limit, FOREVER if deadline is None else deadline)
        with self._lock:
            while self.closed_by is None:
                connection = self.current()
                if connection is not None:
                    return connection
                left = limit - time.monotonic()
                if left <= 0:
                    raise self.standing.unreached(limit - start)
                self._changed.wait(min(left, 1.0))
            raise _fresh(self.closed_by)

    def request(
        self,
        command: int,
        header: Header,
        *,
        timeout: float | None = None,
        answer_seconds: float | None = None,
        ask: Ask | None = None,
    ) -> Frame:
        """Ask the broker in use, waiting for a connection if need be, and again as `Repeats` says.

        Parameters:
            timeout: bounds the whole; if left out, the client's own bounds the wait for a connection.
            answer_seconds: bounds the wait for an answer, while there is a connection.
            ask: asks over one connection; for those who have more to say to it than the request.

        Raises:
            NotConnected: no connection in time, or it broke and the request is not safe to repeat.
            TimedOut: no answer in time.
        """
        ask = ask or (lambda connection, seconds: connection.request(command, header, timeout=seconds))
        deadline = FOREVER if timeout is None else time.monotonic() + timeout
        repeats = Repeats(command, header, moves=self._moves)
        while True:
            connection = self.connection(deadline)
            connection.take_ready()  # one that broke while nobody read is noticed before it is used
            if not connection.is_usable:
                continue
            left = max(0.001, deadline - time.monotonic())
            limit = min(left, FOREVER if answer_seconds is None else answer_seconds)
            try:
                frame = ask(connection, limit if limit < FOREVER else None)
            except NotConnected as error:
                if self.closed_by is not None:
                    raise _fresh(self.closed_by) from error
                pause = repeats.after_break(error)
            else:
                again = repeats.after_answer(frame)
                if again is None or time.monotonic() + again >= deadline:
                    return frame
                pause = again
            self._pause(min(pause, deadline - time.monotonic()))

    def _pause(self, seconds: float) -> None:
        """Let time pass, unless the pool is closed."""
        if seconds > 0:
            with self._lock:
                self._changed.wait_for(lambda: self.closed_by is not None, seconds)

    def watch(self, watcher: Watcher, subscription: int | None = None) -> None:
        """Have it told what happens, until `unwatch`. It is told of the connection in use at once.

        Parameters:
            subscription: the number of the one whose messages it takes, if it takes any.
        """
        with self._lock:
            self._watchers[id(watcher)] = watcher
            if subscription is not None:
                self.consumers[subscription] = watcher
        connection = self.current()
        if connection is not None:
            watcher.connected(connection)

    def unwatch(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.pop(id(watcher), None)
            for number in [number for number, consumer in self.consumers.items() if consumer is watcher]:
                del self.consumers[number]

    def _each(self, method: str, *arguments: Any) -> None:
        with self._lock:
            watchers = [*self._watchers.values()]
        for watcher in watchers:
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
        for address in self.standing.others(link.address):
            known = self.standing.known(address)
            if known is not None:
                found(known)
                return
        threading.Thread(target=self._find, args=(link.address, found), name="dmq-find", daemon=True).start()

    def _find(self, address: Address, found: Callable[[Link | None], None]) -> None:
        for other in self.standing.others(address):
            try:
                connection = self._connect(other)
            except DMQError:
                continue
            with self._lock:
                kept = self.standing.keep_beside(connection)
            if kept is not connection:
                connection.close(NotConnected("one connection to a broker is enough"))
            found(kept)
            return
        found(None)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _use(self, connection: Connection) -> None:
        was_interrupted = False
        with self._lock:
            closed_by = self.closed_by
            if closed_by is None:
                was_interrupted = self.standing.use(connection)
                self._changed.notify_all()
        if closed_by is not None:
            connection.close(closed_by)
            return
        self._each("connected", connection)
        if was_interrupted:
            self._owner.resumed(self.shard)
        if connection.is_closed:  # it broke before it was in use, and nobody has noticed
            self.lost(connection, NotConnected(f"the connection to {connection.address} broke at once"))

    def lost(self, connection: Connection, reason: DMQError) -> None:
        """A connection broke."""
        with self._lock:
            loss = self.standing.lost(connection, reason)
        if loss.is_interruption:
            self._owner.interrupted(self.shard, reason)
        self._each("lost", connection, reason)
        if loss.closed_by is not None:
            self._each("closed", loss.closed_by)
            with self._lock:
                self._changed.notify_all()
            self._owner.ended(loss.closed_by)
        elif loss.must_connect:
            self._start_connecting()

    def deposed(self, connection: Connection, error: NotLeader) -> None:
        """The broker does not lead its shard any more: look for the one that does."""
        with self._lock:
            loss = self.standing.deposed(connection, error)
        if loss.closed_by is not None:
            connection.close(loss.closed_by)
        elif loss.must_connect:
            self._owner.interrupted(self.shard, error)
            self._start_connecting()
            self._retire(connection, self._clock.monotonic() + DEPOSED_SECONDS)

    def _start_connecting(self) -> None:
        with self._lock:
            if not self.standing.begin_connecting():
                return
            search = self.standing.searches
        threading.Thread(target=self._keep_connecting, name="dmq-reconnect", daemon=True).start()
        if self.timeout is not None:
            self.call_later(self.timeout, lambda: self._check_reached(search))

    def _keep_connecting(self) -> None:
        while True:
            with self._lock:
                attempt = self.standing.next_attempt()
                if attempt.pause:
                    self._changed.wait_for(lambda: self.closed_by is not None, attempt.pause)
                if self.closed_by is not None:
                    return
            try:
                connection = self.standing.known(attempt.address) or self._connect(attempt.address, attempt.seconds)
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

    def pushed(self, connection: Connection, push: Push) -> None:
        """The broker sent something by itself, and not messages."""
        header = push.header
        if isinstance(header, ServerReboot):
            with self._lock:
                must_move = self.standing.rebooting(connection, header.reason)
            if must_move:
                self._start_connecting()
                self._retire(connection, self._clock.monotonic() + header.grace_ms / 1000)
        elif isinstance(header, ServerHealth):
            with self._lock:
                self.standing.failover.healthy(header.broker, header.address)
        elif isinstance(header, SubscriptionEnded) and header.status == Status.NOT_LEADER:
            self.deposed(connection, NotLeader(header.message))
        elif isinstance(header, RouteChanged):
            self._owner.route_changed(header)
        self._each("pushed", connection, push)

    def _retire(self, connection: Connection, deadline: float) -> None:
        """Close a connection that was moved away from, once what runs there has ended or its grace is over."""
        if connection.is_closed:
            return
        if self.standing.is_retired(connection, connection.outstanding, self._clock.monotonic() >= deadline):
            connection.close(NotConnected("the broker reboots, or does not lead its shard any more"))
        else:
            self.call_later(0.1, lambda: self._retire(connection, deadline))

    def _tick(self) -> None:
        with self._lock:
            self.standing.look()
            connections = self.standing.connections()
        for connection in connections:
            connection.tick()
        if self.closed_by is None:
            self.call_later(TICK_SECONDS, self._tick)

    def forked(self, reason: NotConnected) -> None:
        """We are in a child: let go of the connections without a word, which are the parent's."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        watchers = [*self._watchers.values()]
        for connection in self.standing.close(reason):
            connection.abandon()
        self.standing.closed_by = reason
        for watcher in watchers:
            watcher.forked(reason)

    def mend(self, trace: Trace) -> None:
        """An exception out of a signal's handler ended a call of this thread: end what it may have left half done."""
        with self._lock:
            connections = self.standing.connections()
        for connection in connections:
            connection.mend(trace)
        with self._lock:
            must_connect = self.closed_by is None and self.standing.current() is None
        if must_connect:
            self._start_connecting()

    def retire(self, reason: DMQError) -> None:
        """End all connections, and tell nobody: the broker is gone for good."""
        with self._lock:
            self._watchers.clear()
            self.consumers.clear()
        self.close(reason)

    def close(self, reason: DMQError) -> None:
        """End all connections; the first reason is the one that is told."""
        with self._lock:
            is_first = self.closed_by is None
            reason = self.closed_by or reason
            connections = self.standing.close(reason)
            self._changed.notify_all()
        if is_first:
            self._each("closed", reason)
        for connection in connections:
            connection.close(reason)


def _fresh(error: DMQError) -> DMQError:
    """The same error to raise once more: one object raised in many threads would gather their tracebacks."""
    return type(error)(error.message, **error.detail)
