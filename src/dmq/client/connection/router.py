"""The router: which broker a message goes to, and the connection to it (J-15).

A pool keeps one connection to one broker, over the addresses at which that broker answers
(`dmq.client.connection.pool`). The router has one pool for each broker that its route table names, for everything that
goes there. A URL names one broker: all topics are there, and all calls take the same connection.

What always holds:
- There is one pool for a set of addresses. It is made when the table first names it, and connects by itself from then
  on.
- Watchers are told what happens at each broker, also at those that the table names later.
- `interrupted` and `resumed` of the listeners alternate: the first broker that is lost interrupts, and the last one
  that comes back resumes. Listeners are called once for each event, in order, where they can block nobody; the last
  one set wins.
- Without `reconnect`, the first connection that breaks closes the router for good.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from dmq.client.arguments import check_function
from dmq.client.connection.connection import Connection
from dmq.client.connection.failover import CONNECT_SECONDS
from dmq.client.connection.link import Link
from dmq.client.connection.pool import Pool, PoolSettings
from dmq.client.connection.threads import Alarms, Notifier, end_in_children
from dmq.client.connection.url import Address
from dmq.errors import DMQError, NotConnected
from dmq.protocol import Header

__all__ = [
    "ANY",
    "AnyPool",
    "AnyRouter",
    "BrokerAddresses",
    "Listeners",
    "OnEvent",
    "OnException",
    "OneBroker",
    "RouteTable",
    "Router",
]

ANY: Final = -1  # whichever queue

BrokerAddresses: TypeAlias = tuple[Address, ...]  # the addresses at which one broker answers
OnException: TypeAlias = Callable[[DMQError], Any]
OnEvent: TypeAlias = Callable[[], Any]


class RouteTable(Protocol):
    """Which broker has which queue. A broker is named by its addresses. Called for every batch: must be quick."""

    @property
    def home(self) -> BrokerAddresses:
        """The broker that is connected first, and asked about everything that belongs to no topic."""
        ...

    def brokers(self, topic: str) -> Sequence[BrokerAddresses]:
        """All brokers that have queues of a topic, at least one."""
        ...

    def broker(self, topic: str, queue: int) -> BrokerAddresses:
        """The broker that has a queue."""
        ...


class OneBroker:
    """The table of a URL: everything is at one broker, under any of its addresses."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.home: Final = tuple(addresses)

    def brokers(self, topic: str) -> Sequence[BrokerAddresses]:
        return (self.home,)

    def broker(self, topic: str, queue: int) -> BrokerAddresses:
        return self.home


class Listeners:
    """The functions of a user that are told when a connection breaks and when it is back (A-09).

    A client without listeners works the same.
    """

    __slots__ = ("on_exception", "on_interrupted", "on_resumed")

    def __init__(
        self,
        on_exception: OnException | None = None,
        on_interrupted: OnEvent | None = None,
        on_resumed: OnEvent | None = None,
    ) -> None:
        self.on_exception = check_function("on_exception", on_exception)
        self.on_interrupted = check_function("on_interrupted", on_interrupted)
        self.on_resumed = check_function("on_resumed", on_resumed)

    def exception(self, reason: DMQError) -> Any:
        """The connection broke, for this reason. What the listener returns is awaited on an event loop."""
        return None if self.on_exception is None else self.on_exception(reason)

    def interrupted(self) -> Any:
        """There is no connection now."""
        return None if self.on_interrupted is None else self.on_interrupted()

    def resumed(self) -> Any:
        """There is one again, and everything goes on."""
        return None if self.on_resumed is None else self.on_resumed()


C = TypeVar("C", covariant=True)


class AnyPool(Protocol[C]):
    """The connection to one broker, of either kind."""

    @property
    def addresses(self) -> BrokerAddresses: ...

    @property
    def closed_by(self) -> DMQError | None: ...

    @property
    def current(self) -> Callable[[], C | None]:
        """Returns the connection in use; None while there is none."""
        ...

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    def start(self) -> None: ...

    def watch(self, watcher: Any) -> None: ...

    def unwatch(self, watcher: Any) -> None: ...

    def has_other(self, link: Link) -> bool: ...

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None: ...


P = TypeVar("P", bound=AnyPool[Any])
L = TypeVar("L")


class AnyRouter(Generic[P, L]):
    """A router of either kind.

    Parameters:
        table: says which broker has which queue.
        settings: of every pool.
        listeners: functions of the user.
    """

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners | None = None) -> None:
        self._table = table
        self._settings = settings
        self.timeout: Final = settings.timeout
        self.listeners = listeners or Listeners()
        self._lock = threading.Lock()  # guards what follows
        self._pools: dict[BrokerAddresses, P] = {}
        self._watchers: dict[int, Any] = {}
        self._missing: set[BrokerAddresses] = set()  # brokers that are lost and not back
        self.home: Final = self._pools.setdefault(table.home, self._make_pool(table.home))
        """The pool of the broker that is asked about everything that belongs to no topic."""
        self._only = self.home if isinstance(table, OneBroker) else None

    @abstractmethod
    def _make_pool(self, addresses: BrokerAddresses) -> P:
        """A pool of its own kind."""

    @abstractmethod
    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""

    @property
    def is_single(self) -> bool:
        """Whether everything is at one broker."""
        return self._only is not None

    @property
    def closed_by(self) -> DMQError | None:
        """Why there will be no connection any more; None as long as there may be."""
        return self.home.closed_by

    # --- where to ---------------------------------------------------------------------------------------------------

    def link_for(self, topic: str, queue: int = ANY) -> L | None:
        """The connection to the broker that has a queue; None while there is none.

        With any queue, a connection to a broker that has queues of the topic.
        """
        only = self._only
        if only is not None:
            return only.current()
        if queue >= 0:
            return self._pool_at(self._table.broker(topic, queue)).current()
        return next((link for pool in self.pools_of(topic) if (link := pool.current()) is not None), None)

    def pool_for(self, topic: str, queue: int = ANY) -> P:
        """The pool of the broker that has a queue; with any queue, of one that is connected, if there is any."""
        if self._only is not None:
            return self._only
        if queue >= 0:
            return self._pool_at(self._table.broker(topic, queue))
        pools = self.pools_of(topic)
        return next((pool for pool in pools if pool.current() is not None), pools[0])

    def pools_of(self, topic: str) -> list[P]:
        """The pools of all brokers that have queues of a topic."""
        return [self._pool_at(addresses) for addresses in self._table.brokers(topic)]

    def pool_asked(self, header: Header) -> P:
        """The pool of the broker that a request belongs to: that of its topic, if it names one."""
        topic = getattr(header, "topic", "")
        return self.pool_for(topic) if topic else self.home

    def reachable(self, topic: str, queues: int) -> Sequence[int]:
        """Which queues of a topic that has so many are at a broker that is connected."""
        if self._only is not None:
            return range(queues)
        return [queue for queue in range(queues) if self.link_for(topic, queue) is not None]

    @property
    def is_connected(self) -> bool:
        """Whether any broker is connected."""
        return any(pool.current() is not None for pool in [*self._pools.values()])

    def _pool_at(self, addresses: BrokerAddresses) -> P:
        return self._pools.get(addresses) or self._add(addresses)

    def _add(self, addresses: BrokerAddresses) -> P:
        with self._lock:
            known = self._pools.get(addresses)
            if known is not None:
                return known
            pool = self._pools[addresses] = self._make_pool(addresses)
            watchers = [*self._watchers.values()]
        for watcher in watchers:
            pool.watch(watcher)
        pool.start()
        return pool

    # --- another address --------------------------------------------------------------------------------------------

    def has_other(self, link: Link) -> bool:
        """Whether another address than this link's could be asked instead."""
        return self._pool_with(link).has_other(link)

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        """Have `found` called with a link to another address, or None if none answers. Does not block."""
        self._pool_with(link).find_other(link, found)

    def _pool_with(self, link: Link) -> P:
        pools = [*self._pools.values()]
        # A link that nobody names is that of a member which the URL does not name, and which led its shard before.
        named = next((pool for pool in pools if link.address in pool.addresses), self.home)
        return next((pool for pool in pools if pool.current() is link), named)

    # --- what happens -----------------------------------------------------------------------------------------------

    def watch(self, watcher: Any) -> None:
        """Have it told what happens at each broker, until `unwatch`; at once of the connections in use."""
        with self._lock:
            self._watchers[id(watcher)] = watcher
            pools = [*self._pools.values()]
        for pool in pools:
            pool.watch(watcher)

    def unwatch(self, watcher: Any) -> None:
        with self._lock:
            self._watchers.pop(id(watcher), None)
            pools = [*self._pools.values()]
        for pool in pools:
            pool.unwatch(watcher)

    def interrupted(self, addresses: BrokerAddresses, reason: DMQError) -> None:
        """A broker is lost."""
        with self._lock:
            is_first = not self._missing
            self._missing.add(addresses)
        self.notify(self.listeners.exception, reason)
        if is_first:
            self.notify(self.listeners.interrupted)

    def resumed(self, addresses: BrokerAddresses) -> None:
        """A broker is back."""
        with self._lock:
            self._missing.discard(addresses)
            is_last = not self._missing
        if is_last:
            self.notify(self.listeners.resumed)


class Router(AnyRouter[Pool, Connection]):
    """The router of a blocking program. Thread-safe. Parameters as of `AnyRouter`."""

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners | None = None) -> None:
        name = f"dmq-{settings.hello.app}"
        self.notifier: Final = Notifier(f"{name}-callbacks")
        self._alarms = Alarms(f"{name}-alarms", settings.clock)
        self.call_later: Final = self._alarms.call_later
        self.is_forked = False
        super().__init__(table, settings, listeners)
        end_in_children(self)

    def _make_pool(self, addresses: BrokerAddresses) -> Pool:
        return Pool(addresses, self._settings, self)

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""
        self.notifier.call(function, *arguments)

    def open(self) -> None:
        """Connect for the first time; errors as of `Pool.open`."""
        try:
            self.home.open()
        except DMQError:
            self.close()
            raise

    def ended(self, reason: DMQError) -> None:
        """A connection broke that is not to be replaced: nothing is connected any more."""
        self._alarms.close()
        for pool in [*self._pools.values()]:
            pool.close(reason)

    def forked(self, reason: NotConnected) -> None:
        """We are in a child: let go of the connections without a word, which are the parent's."""
        self.is_forked = True
        self._lock = threading.Lock()
        for pool in self._pools.values():
            pool.forked(reason)

    def close(self) -> None:
        """End all connections. No listener is called: it was asked for."""
        if self.is_forked:
            return
        for pool in [*self._pools.values()]:
            pool.close(NotConnected("the client is closed: connect again"))
        self._alarms.close()
        self.notifier.close(CONNECT_SECONDS)
