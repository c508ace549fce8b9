"""The router: which broker a message goes to, and the connection to it (J-15).

A pool keeps one connection to one broker, over the addresses at which that broker answers
(`dmq.client.connection.pool`). The router has one pool for each broker that its route table names, for everything that
goes there. A broker is named by the number of its shard, whichever member leads it; a lone broker is number 0.

A URL is where the search begins. If a lone broker answers, it has all topics, and all calls take the same connection.
If a member of a cluster or a name server answers, it is asked for the routes, and from then on a route book is the
table (`dmq.client.connection.route_book`).

What always holds:
- There is one pool for a broker. It is made when the table first names it, and connects by itself from then on; that
  its members move makes no other pool.
- Watchers are told what happens at each broker, also at those that the table names later.
- `interrupted` and `resumed` of the listeners alternate: the first broker that is lost interrupts, and the last one
  that comes back resumes. Listeners are called once for each event, in order, where they can block nobody; the last
  one set wins.
- Without `reconnect`, the first connection that breaks closes the router for good.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from dmq.client.arguments import check_function
from dmq.client.connection.connection import Connection
from dmq.client.connection.failover import CONNECT_SECONDS, Backoff
from dmq.client.connection.link import Link, ShardHealth
from dmq.client.connection.pool import BrokerAt, Pool, PoolSettings
from dmq.client.connection.route_book import ANY, BrokerAddresses, PlaceChoice, RouteBook, RouteChange, RouteKeeper
from dmq.client.connection.threads import FOREVER, Alarms, Notifier, Trace, end_in_children
from dmq.client.connection.url import OneBroker, parsed_address
from dmq.errors import Busy, DMQError, NotConnected, ShardConflict, TimedOut, UnknownTopic
from dmq.event_log import EventLog
from dmq.protocol import Command, Frame, Header, decode_response
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.cluster.route import Route, RouteChanged, RouteReply, TopicRoute
from dmq.protocol.session import HelloReply

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

log = EventLog(__name__)

NAME_SERVER: Final = "nameserver"  # how one calls itself in the hello
LEARN_TRIES: Final = 20  # of a topic that a broker has just created, and another broker may not know of yet
LEARN_SECONDS: Final = 0.1
WHEEL_SECONDS: Final = 0.1
WHEELS_MAX: Final = 4096
SCOUT_SECONDS: Final = 2.0  # that an address of the URL has to answer while no shard is connected

OnException: TypeAlias = Callable[[DMQError], Any]
OnEvent: TypeAlias = Callable[[], Any]
OnRoutes: TypeAlias = Callable[[frozenset[str]], None]


class RouteTable(Protocol):
    """Which broker has which place. A broker is named by a number. Called for every batch: must be quick."""

    @property
    def home(self) -> int:
        """The broker that is connected first, and asked about everything that belongs to no topic."""
        ...

    def brokers(self, topic: str) -> Sequence[int]:
        """All brokers that have queues of a topic, at least one."""
        ...

    def broker(self, topic: str, place: int) -> int:
        """The broker that has a place."""
        ...

    def addresses(self, broker: int) -> BrokerAddresses:
        """Where a broker answers."""
        ...


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


class LinkStanding(Protocol[C]):
    """The connections of a pool, as far as those see them who need one for every message."""

    @property
    def in_use(self) -> C | None:
        """The one in use, which may have broken a moment ago: it says itself whether it is usable."""
        ...


class AnyPool(Protocol[C]):
    """The connection to one broker, of either kind."""

    @property
    def shard(self) -> int: ...

    @property
    def addresses(self) -> BrokerAddresses: ...

    @property
    def closed_by(self) -> DMQError | None: ...

    @property
    def standing(self) -> LinkStanding[C]:
        """For those who ask for the connection at every message: `current` costs them a call more."""
        ...

    @property
    def current(self) -> Callable[[], C | None]:
        """Returns the connection in use; None while there is none."""
        ...

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    def start(self) -> None: ...

    def aim(self, addresses: BrokerAddresses, leader: str, epoch: int) -> None: ...

    def retire(self, reason: DMQError) -> None: ...

    def watch(self, watcher: Any, subscription: int | None = ...) -> None: ...

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
        self._first = table if isinstance(table, OneBroker) else None
        self._url = table.addresses(table.home)
        self._keeper: RouteKeeper | None = None  # in a cluster
        self._choice = PlaceChoice()
        self._wheels: dict[tuple[str, int], tuple[float, int, Sequence[int]]] = {}  # until when, of which health
        self.health: Final = ShardHealth()
        """What senders have met at the shards."""
        self._lock = threading.Lock()  # guards what follows
        self._pools: dict[int, P] = {}
        self._watchers: dict[int, Any] = {}
        self._route_watchers: dict[int, OnRoutes] = {}
        self._missing: set[int] = set()  # brokers that are lost and not back
        first = self._pools[table.home] = self._make_pool(self._at(table.home))
        self._only = first if isinstance(table, OneBroker) else None

    @abstractmethod
    def _make_pool(self, at: BrokerAt) -> P:
        """A pool of its own kind."""

    @abstractmethod
    def scout(self, asked: Route) -> None:
        """Ask the addresses of the URL for routes, beside all connections."""

    @property
    @abstractmethod
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    @abstractmethod
    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""

    @property
    def is_single(self) -> bool:
        """Whether everything is at one broker."""
        return self._only is not None

    @property
    def home(self) -> P:
        """The pool of the broker that is asked about everything that belongs to no topic. In a cluster any will do: the
        first one that is connected, if there is any."""
        only = self._only
        if only is not None:
            return only
        home = self._pools[self._table.home]
        if self._keeper is None or home.current() is not None:
            return home
        return next((pool for pool in [*self._pools.values()] if pool.current() is not None), home)

    @property
    def closed_by(self) -> DMQError | None:
        """Why there will be no connection any more; None as long as there may be."""
        return self._pools[self._table.home].closed_by

    # --- a cluster --------------------------------------------------------------------------------------------------

    @property
    def book(self) -> RouteBook | None:
        """What is known of the cluster; None with a lone broker."""
        return None if self._keeper is None else self._keeper.book

    def _join(self, reply: RouteReply, hello: HelloReply) -> list[P]:
        """It is a cluster: the pools of all its shards, which are not started, the one that was asked first."""
        book = RouteBook(reply, 0 if hello.shard is None else hello.shard.number)
        with self._lock:
            self._table, self._only = book, None
            self._keeper = RouteKeeper(book, self)
            self._pools = {number: self._make_pool(self._at(number)) for number in book.shards}
            return [*self._pools.values()]

    def _at(self, broker: int) -> BrokerAt:
        """Where a broker is. One of which no member is known is looked for where the URL says."""
        row = None if self._keeper is None else self._keeper.book.shard(broker)
        return BrokerAt(broker, self._table.addresses(broker) or self._url, "" if row is None else row.name)

    def _look_up(self) -> BrokerAddresses:
        """The addresses of the URL as they are now; where a registry names them, this blocks for a while."""
        if self._first is not None:
            self._url = self._first.look_up()
        return self._url

    def _go_past(self, reply: RouteReply, pool: P) -> None:
        """A name server answered who is to stay with any member: look for one where it says."""
        named = [address for row in reply.shards for text in row.members if (address := parsed_address(text))]
        if not named:
            raise NotConnected("the name server knows of no broker that runs: start one with dmq broker --registry")
        pool.aim(tuple(dict.fromkeys(named)), "", 0)

    def any_link(self) -> Link | None:
        """A connection to any broker; None while there is none."""
        link: Link | None = self.home.current()
        return link

    @property
    def is_whole(self) -> bool:
        """Whether every broker is connected."""
        return all(pool.current() is not None for pool in [*self._pools.values()])

    def route_changed(self, changed: RouteChanged) -> None:
        """A broker says that routes have changed."""
        if self._keeper is not None:
            self._keeper.changed(changed.topics)

    def stale(self, topic: str) -> None:
        """A broker says that what is known of a topic is old: have it asked for."""
        if self._keeper is not None:
            self._keeper.want([topic])

    def routes_taken(self, change: RouteChange) -> None:
        """The book has changed: pools follow, and watchers hear of topics."""
        book = self.book
        assert book is not None
        self._wheels.clear()
        for number in change.shards:
            row = book.shard(number)
            if row is None:
                self._drop(number)
            elif number in self._pools:
                self._pools[number].aim(book.addresses(number), row.leader, row.epoch)
            else:
                self._add(number)
        with self._lock:
            watchers = [getattr(watcher, "routes_changed", None) for watcher in self._watchers.values()]
            watchers += self._route_watchers.values()
        for told in watchers:
            if told is not None:
                try:
                    told(change.topics)
                except Exception:
                    log.exception("a watcher raised", once_for="routes_changed", method="routes_changed")

    def _drop(self, number: int) -> None:
        """A shard is not in the cluster any more."""
        with self._lock:
            if number == self._table.home:
                return  # it is kept for what it may still answer
            pool = self._pools.pop(number, None)
            self._missing.discard(number)
        if pool is not None:
            pool.retire(NotConnected(f"shard {number} is not in the cluster any more"))

    def _known(self, topic: str, frame: Frame | None = None) -> TopicRoute | None:
        """What is known of a topic, after this answer."""
        assert self._keeper is not None
        if frame is not None:
            self._keeper.learned(decode_response(frame), [topic])
        return self._keeper.book.topic(topic)

    # --- where to ---------------------------------------------------------------------------------------------------

    def link_for(self, topic: str, queue: int = ANY) -> L | None:
        """The connection to the broker that has a place; None while there is none.

        With any, a connection to a broker that has queues of the topic.
        """
        only = self._only
        if only is not None:
            link = only.standing.in_use
        elif queue >= 0:
            link = self._pool_at(self._table.broker(topic, queue)).standing.in_use
        else:
            return next((link for pool in self.pools_of(topic) if (link := pool.current()) is not None), None)
        return link if link is not None and link.is_usable else None

    def pool_for(self, topic: str, queue: int = ANY) -> P:
        """The pool of the broker that has a place; with any, of one that is connected, if there is any."""
        if self._only is not None:
            return self._only
        if queue >= 0:
            return self._pool_at(self._table.broker(topic, queue))
        pools = self.pools_of(topic)
        return next((pool for pool in pools if pool.current() is not None), pools[0])

    def pools_of(self, topic: str) -> list[P]:
        """The pools of all brokers that have queues of a topic. One that is not known is asked for: watchers hear of it
        (`routes_changed`)."""
        if self._keeper is not None and self._keeper.book.topic(topic) is None:
            self._keeper.want([topic])
        return [self._pool_at(broker) for broker in self._table.brokers(topic)]

    def pools_asked(self, topic: str = "") -> list[P]:
        """The pools of all brokers that may know something of a topic; all there are without one."""
        if topic and (self.book is None or self.topic_route(topic) is not None):
            return self.pools_of(topic)
        return [self._pools[number] for number in sorted(self._pools)]

    def shard_name(self, number: int) -> str:
        """What people call a shard."""
        row = None if self.book is None else self.book.shard(number)
        return str(number) if row is None else row.name

    def away(self, topic: str, queue: int = ANY) -> list[str]:
        """The names of the shards that have a place, or any of the topic, and are not connected; none of a lone
        broker."""
        if self._only is not None or self._keeper is None:
            return []
        pools = [self._pool_at(self._table.broker(topic, queue))] if queue >= 0 else self.pools_of(topic)
        return [self.shard_name(pool.shard) for pool in pools if pool.current() is None]

    def closed(self, topic: str) -> DMQError | None:
        """Why no shard takes messages of a topic, by what is known of it; None if one does, connected or not."""
        row = None if self._keeper is None else self._keeper.book.topic(topic)
        if row is None or self._keeper is None:
            return None
        shards = [self._keeper.book.shard(slot.shard) for slot in row.slots if slot.is_writable]
        if any(shard is None or shard.is_writable for shard in shards):
            return None
        names = [shard.name for shard in shards if shard is not None]
        why = f": shard {', '.join(names)} is read-only (`dmq shard set {names[0]} --state open`)" if names else ""
        return ShardConflict(
            f"no shard takes messages of topic {topic!r} now{why}; `dmq topic place {topic} --add SHARD` puts it on "
            "another"
        )

    def pool_asked(self, header: Header) -> P:
        """The pool of the broker that a request belongs to: that of its topic, if it names one."""
        topic = getattr(header, "topic", "")
        return self.pool_for(topic) if topic else self.home

    def reachable(self, topic: str, queues: int, wanted: int = ANY) -> Sequence[int]:
        """The places that a message of a topic with so many queues may be sent to now, to be taken in turn.

        They are at brokers that are connected and take messages; in a cluster each shard has as many as its weight
        says, and those that fail or are slow have none, as long as there are others.

        Parameters:
            wanted: ANY, or one queue of whichever shard (`dmq.client.connection.route_book.any_shard`).
        """
        if self._only is not None:
            return range(queues)
        if self._keeper is not None:
            return self._wheel(self._keeper.book, topic, wanted)
        return [queue for queue in range(queues) if self.link_for(topic, queue) is not None]

    def _wheel(self, book: RouteBook, topic: str, wanted: int) -> Sequence[int]:
        """The places of a topic by the weights of their shards; what was found is good for a moment."""
        now = self._settings.clock.monotonic()
        found = self._wheels.get((topic, wanted))
        if found is not None and now < found[0] and self.health.changes == found[1]:
            return found[2]
        if len(self._wheels) >= WHEELS_MAX:
            self._wheels.clear()
        row, changes = book.topic(topic), self.health.changes
        wheel = () if row is None else self._choice.wheel(row.slots, wanted, self._weights(book, row, now))
        self._wheels[topic, wanted] = (now + WHEEL_SECONDS, changes, wheel)
        return wheel

    def _weights(self, book: RouteBook, row: TopicRoute, now: float) -> dict[int, int]:
        """The shards that new messages of a topic may go to now, with their weights."""
        weights = {}
        for slot in row.slots:
            shard = book.shard(slot.shard)
            if shard is not None and shard.is_writable and self._pool_at(slot.shard).current() is not None:
                weights[slot.shard] = shard.weight
        avoided = self.health.avoided(weights, now) if len(weights) > 1 else ()
        if avoided and len(avoided) < len(weights):
            for number in avoided:
                del weights[number]
        return weights

    def topic_route(self, topic: str) -> TopicRoute | None:
        """What is known of a topic in a cluster."""
        book = self.book
        return None if book is None else book.topic(topic)

    @property
    def is_connected(self) -> bool:
        """Whether any broker is connected."""
        return any(pool.current() is not None for pool in [*self._pools.values()])

    def _pool_at(self, broker: int) -> P:
        return self._pools.get(broker) or self._add(broker)

    def _add(self, broker: int) -> P:
        with self._lock:
            known = self._pools.get(broker)
            if known is not None:
                return known
            pool = self._pools[broker] = self._make_pool(self._at(broker))
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

    def watch_routes(self, owner: object, told: OnRoutes) -> None:
        """Have a function called with topics whose routes have changed, until `unwatch_routes`."""
        with self._lock:
            self._route_watchers[id(owner)] = told

    def unwatch_routes(self, owner: object) -> None:
        with self._lock:
            self._route_watchers.pop(id(owner), None)

    def interrupted(self, broker: int, reason: DMQError) -> None:
        """A broker is lost."""
        with self._lock:
            is_first = not self._missing
            self._missing.add(broker)
        self._wheels.clear()
        if self._keeper is not None:
            self._keeper.want()
        self.notify(self.listeners.exception, reason)
        if is_first:
            self.notify(self.listeners.interrupted)

    def resumed(self, broker: int) -> None:
        """A broker is back."""
        self._wheels.clear()
        with self._lock:
            self._missing.discard(broker)
            is_last = not self._missing
        if is_last:
            self.notify(self.listeners.resumed)


class Mendable(Protocol):
    """What an exception out of a signal's handler may leave half done."""

    def mend(self, trace: Trace) -> None:
        """A call of this thread was ended by one."""


class Routed(Protocol):
    """What works over a router of a blocking program."""

    _router: Router


O = TypeVar("O", bound=Routed)  # noqa: E741
A = ParamSpec("A")
R = TypeVar("R")


def mended(method: Callable[Concatenate[O, A], R]) -> Callable[Concatenate[O, A], R]:
    """A method that a program calls, after which things are as they should be whatever a signal's handler raises."""

    @wraps(method)
    def call(owner: O, /, *arguments: A.args, **named: A.kwargs) -> R:
        try:
            return method(owner, *arguments, **named)
        except BaseException as error:
            owner._router.mend(error)
            raise

    return call


class Router(AnyRouter[Pool, Connection]):
    """The router of a blocking program. Thread-safe. Parameters as of `AnyRouter`."""

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners | None = None) -> None:
        name = f"dmq-{settings.hello.app}"
        self.notifier: Final = Notifier(f"{name}-callbacks")
        self._alarms = Alarms(f"{name}-alarms", settings.clock)
        self.is_forked = False
        self.parts: Final[WeakSet[Mendable]] = WeakSet()
        """Of producers and consumers, what has to be seen to after an exception out of a signal's handler."""
        super().__init__(table, settings, listeners)
        end_in_children(self)

    def _make_pool(self, at: BrokerAt) -> Pool:
        return Pool(at, self._settings, self)

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]:
        return self._alarms.call_later

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""
        self.notifier.call(function, *arguments)

    def open(self) -> None:
        """Connect for the first time: to a lone broker, or to the leader of any shard and, by and by, of the others.

        Raises:
            DMQError: as of `Pool.open`.
        """
        deadline = time.monotonic() + (self.timeout or 0.0)
        is_asked = self._only is not None and self._settings.is_routed
        try:
            routes_of = _routes_past if self._settings.any_member else _routes_of
            found = self.home.open(routes=routes_of if is_asked else None)
            if found is not None and self._settings.any_member:
                self._go_past(found[0], self.home)
                found[1].close(NotConnected("the brokers are known"))
                self.home.open()
            elif found is not None:
                self._open_any(self._join(found[0], found[1].reply), found[1], deadline)
        except DMQError:
            self.close()
            raise

    def _open_any(self, pools: list[Pool], connection: Connection, deadline: float) -> None:
        """Connect to the leader of any shard, and start to connect to the others."""
        assert self._keeper is not None
        opened, backoff = _taken(pools, connection), Backoff()
        while opened is None:
            problems: list[DMQError] = []
            for pool in pools:
                try:
                    pool.open(0.0)
                except DMQError as error:
                    problems.append(error)
                else:
                    opened = pool
                    break
            if opened is None and time.monotonic() >= deadline:
                raise problems[0]
            if opened is None:
                time.sleep(min(backoff.take(), max(0.0, deadline - time.monotonic())))
        for pool in pools:
            if pool is not opened:
                pool.start()
        self._keeper.begin()

    def learn(self, topic: str, seconds: float | None = None) -> TopicRoute:
        """The route of a topic in a cluster, which is asked for if it is not known; a broker may create the topic.

        Raises:
            UnknownTopic: there is no such topic.
            DMQError: it could not be asked for.
        """
        known = self._known(topic)
        deadline = FOREVER if seconds is None else time.monotonic() + seconds
        tries = 0
        while known is None:
            left = None if deadline == FOREVER else max(0.001, deadline - time.monotonic())
            known = self._known(topic, self.home.request(Command.ROUTE, Route([topic], is_watched=True), timeout=left))
            if known is not None:
                break
            if not tries:  # it says that there is none, or creates it
                decode_response(self.home.request(Command.TOPIC_DESCRIBE, TopicDescribe(topic), timeout=left))
            elif tries > LEARN_TRIES or time.monotonic() >= deadline:
                raise not_routed(topic)
            else:
                time.sleep(LEARN_SECONDS)
            tries += 1
        return known

    def scout(self, asked: Route) -> None:
        """Ask the addresses of the URL for routes, beside all connections."""
        threading.Thread(target=self._scout, args=(asked,), name="dmq-find", daemon=True).start()

    def _scout(self, asked: Route) -> None:
        keeper = self._keeper
        assert keeper is not None
        url = self._look_up()
        pool = Pool(BrokerAt(0, url), self._settings, self)
        for address in url:
            if self.closed_by is not None:
                return
            try:
                connection = Connection.open(
                    address, self._settings.hello, pool, timeout=SCOUT_SECONDS, clock=self._settings.clock
                )
                try:
                    reply = _routes_of(connection, asked)
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
        self._alarms.close()
        for pool in [*self._pools.values()]:
            pool.close(reason)

    def forked(self, reason: NotConnected) -> None:
        """We are in a child: let go of the connections without a word, which are the parent's."""
        self.is_forked = True
        self._lock = threading.Lock()
        for pool in self._pools.values():
            pool.forked(reason)

    def mend(self, error: BaseException) -> None:
        """See to what a call of this thread left half done that an exception out of a signal's handler has ended.

        To be called where the call leaves the client, with whatever left it: an error of ours left nothing half done.
        """
        if isinstance(error, DMQError) or self.is_forked:
            return
        trace = Trace(error)
        for pool in [*self._pools.values()]:
            pool.mend(trace)
        for part in [*self.parts]:
            part.mend(trace)

    def close(self) -> None:
        """End all connections. No listener is called: it was asked for."""
        if self.is_forked:
            return
        for pool in [*self._pools.values()]:
            pool.close(NotConnected("the client is closed: connect again"))
        self._alarms.close()
        self.notifier.close(CONNECT_SECONDS)


def _taken(pools: Sequence[Pool], connection: Connection) -> Pool | None:
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


def own_pool(pools: Sequence[P], hello: HelloReply) -> P | None:
    """The pool of the broker that answered this to the hello, if it leads its shard."""
    shard = hello.shard
    if shard is None or not shard.is_leader:
        return None
    return next((pool for pool in pools if pool.shard == shard.number), None)


def _routes_of(connection: Connection, asked: Route | None = None) -> RouteReply | None:
    """The routes that a broker or a name server answers with; None of a lone broker, and of a member that knows none.

    Raises:
        DMQError: they could not be asked for; the connection is closed.
    """
    if not has_routes(connection.reply):
        return None
    try:
        frame = connection.request(Command.ROUTE, asked or Route(), timeout=CONNECT_SECONDS)
        return routes_in(connection.reply, frame)
    except DMQError as error:
        connection.close(error)
        raise


def _routes_past(connection: Connection) -> RouteReply | None:
    """The routes that a name server answers with, for who wants any member of a shard; None of all others."""
    return _routes_of(connection) if connection.reply.broker == NAME_SERVER else None


def has_routes(hello: HelloReply) -> bool:
    """Whether a server is to be asked for routes: a member of a shard, or a name server."""
    return hello.shard is not None or hello.broker == NAME_SERVER


def routes_in(hello: HelloReply, frame: Frame) -> RouteReply | None:
    """The routes in an answer to ROUTE; None of a member that knows of none: it is followed as a shard by itself.

    Raises:
        DMQError: others may answer better.
    """
    try:
        reply: RouteReply = decode_response(frame)
    except (NotConnected, TimedOut, Busy):
        raise
    except DMQError:
        if hello.broker == NAME_SERVER:
            raise
        return None
    return reply if reply.cluster and reply.shards else None


def not_routed(topic: str) -> UnknownTopic:
    return UnknownTopic(f"topic {topic!r} is not in the routes of the cluster: try again, or look at `dmq topic list`")
