"""The route book: what a client knows of a cluster's shards, and of the topics that it uses. Pure.

It takes answers to ROUTE, which come from brokers and name servers whose views of the registry differ in age, and
keeps the newest. A broker is named by the number of its shard here, whichever member leads it.

What always holds:
- An answer about a shard never replaces one of a higher epoch; one about a topic never replaces one of the same
  incarnation with a higher version of its slots. An answer of another cluster changes nothing.
- A shard that is no longer named has no addresses, and no topic of it is known by this book.
- At most `TOPICS_KEPT` topics are known, the oldest go first. Topics whose slots are alike share them, so that ten
  thousand topics take a few megabytes.
- Every topic comes up in `due` within an hour, if that is asked for every `REFRESH_SECONDS`.

The route keeper: keeps a client's route book new. No sockets, no threads.

It asks over the connection to any shard, again after half a minute, and soon when a broker says that routes have
changed or a shard is lost. Where no shard is connected it has the addresses of the URL asked.

What always holds: one question is under way at a time, of at most `TOPICS_MAX` topics; what is wanted meanwhile is
asked for next; a broker is asked to tell of changes over the connection that was asked last. Owners are told of a
change with no lock held.

The choice of a place for messages that may go to any: weighted, at random. Pure.

Senders walk around a wheel: the places of a topic, each shard as often as its weight says, in an order that each client
has for itself. So shares are exact after one turn of the wheel, and no two clients hit the same shard in step (J-01).

What always holds: only places that take messages are on a wheel; a shard of weight 0 is on it only if all are of weight
0; at most `WHEELS_MAX` wheels are kept, of at most `WHEEL_MAX` places.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from dmq.client.connection.link import Link
from dmq.client.connection.url import Address, parsed_address
from dmq.errors import DMQError
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX, place_of, place_shard
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.cluster.route import TOPICS_MAX, Route, RouteReply, ShardRoute, SlotRoute, TopicRoute

__all__ = [
    "ANY",
    "REFRESH_SECONDS",
    "BrokerAddresses",
    "PlaceChoice",
    "RouteBook",
    "RouteChange",
    "RouteKeeper",
    "any_shard",
    "priority_queue",
]

REFRESH_SECONDS: Final = 30.0
FULL_SECONDS: Final = 3600.0
TOPICS_KEPT: Final = 65_536
_SLOTS_KEPT: Final = 1024  # lists of slots that are shared

BrokerAddresses: TypeAlias = tuple[Address, ...]  # the addresses at which one broker answers


class RouteChange(NamedTuple):
    """What an answer has changed: shards by their numbers, and topics."""

    shards: frozenset[int] = frozenset()
    topics: frozenset[str] = frozenset()


class RouteBook:
    """The routes of one cluster. It is a route table (`dmq.client.connection.router.RouteTable`).

    Parameters:
        reply: the first answer.
        home: the shard that is asked about everything that belongs to no topic; the first one with a leader if it is
            left out.
    """

    def __init__(self, reply: RouteReply, home: int = 0) -> None:
        self.cluster: Final = reply.cluster
        self._shards: dict[int, ShardRoute] = {}
        self._addresses: dict[int, BrokerAddresses] = {}
        self._topics: dict[str, TopicRoute] = {}
        self._alike: dict[tuple[SlotRoute, ...], list[SlotRoute]] = {}
        self._due: list[str] = []
        self.take(reply)
        leading = [number for number, row in self._shards.items() if row.leader]
        self.home: Final = home if home in self._shards else (leading or [*self._shards] or [0])[0]

    # --- learning ---------------------------------------------------------------------------------------------------

    def take(self, reply: RouteReply, asked: Iterable[str] = ()) -> RouteChange:
        """Take an answer.

        Parameters:
            asked: the topics that were asked for: those that the answer leaves out do not exist.
        """
        if reply.cluster != self.cluster:
            return RouteChange()
        shards = {row.number for row in reply.shards if self._take_shard(row)}
        for number in self._shards.keys() - {row.number for row in reply.shards}:
            del self._shards[number], self._addresses[number]
            shards.add(number)
        topics = {row.topic for row in reply.topics if self._take_topic(row)}
        for name in {*asked} - {row.topic for row in reply.topics}:
            if self._topics.pop(name, None) is not None:
                topics.add(name)
        return RouteChange(frozenset(shards), frozenset(topics))

    def _take_shard(self, row: ShardRoute) -> bool:
        known = self._shards.get(row.number)
        if known is not None and (row.epoch < known.epoch or row == known):
            return False
        self._shards[row.number] = row
        named = [address for text in (row.leader, *row.members) if (address := parsed_address(text)) is not None]
        self._addresses[row.number] = tuple(dict.fromkeys(named))
        return True

    def _take_topic(self, row: TopicRoute) -> bool:
        known = self._topics.pop(row.topic, None)
        if known is not None:
            is_old = row.incarnation == known.incarnation and row.slots_version < known.slots_version
            if is_old or row == known:
                self._topics[row.topic] = known
                return False
        if len(self._alike) >= _SLOTS_KEPT:
            self._alike.clear()
        slots = self._alike.setdefault(tuple(row.slots), row.slots)
        self._topics[row.topic] = msgspec.structs.replace(row, slots=slots)
        if len(self._topics) > TOPICS_KEPT:
            del self._topics[next(iter(self._topics))]
        return True

    def due(self) -> list[str]:
        """The topics to ask for now, all of them in turn: so many that each comes up within an hour."""
        if not self._due:
            self._due = [*self._topics]
        count = max(TOPICS_MAX, -(-len(self._topics) // int(FULL_SECONDS / REFRESH_SECONDS)))
        due, self._due = self._due[:count], self._due[count:]
        return due

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def shards(self) -> Sequence[int]:
        """The numbers of all shards, the home one first."""
        return sorted(self._shards, key=lambda number: (number != self.home, number))

    def shard(self, number: int) -> ShardRoute | None:
        return self._shards.get(number)

    def topic(self, name: str) -> TopicRoute | None:
        return self._topics.get(name)

    def addresses(self, broker: int) -> BrokerAddresses:
        """Where the members of a shard are, its leader first; none if it is not known."""
        return self._addresses.get(broker, ())

    def brokers(self, topic: str) -> Sequence[int]:
        """The shards that have queues of a topic; of a topic that is not known, the home one. A system topic may be in
        any shard, without a route."""
        row = self._topics.get(topic)
        if row is None and topic.startswith(SYSTEM_PREFIX):
            return self.shards or (self.home,)
        numbers = [] if row is None else [slot.shard for slot in row.slots if slot.shard in self._shards]
        return numbers or (self.home,)

    def broker(self, topic: str, place: int) -> int:
        """The shard of a place."""
        return place_shard(place)

    def places(self, topic: str) -> list[int]:
        """The places of a topic that take messages, in the order in which ordered messages are divided among them."""
        row = self._topics.get(topic)
        if row is None:
            return []
        return [place_of(queue, slot.shard) for slot in row.slots if slot.is_writable for queue in range(slot.queues)]


log = EventLog(__name__)

SOON_SECONDS: Final = 0.1  # many clients hear of a change in one moment
LOST_SECONDS: Final = 2.0  # between two questions while a shard is not connected
ANSWER_SECONDS: Final = 10.0


class KeeperOwner(Protocol):
    """Whose routes they are: a router."""

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...

    def any_link(self) -> Link | None:
        """A connection to any shard; None while there is none."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether every shard is connected."""
        ...

    def scout(self, asked: Route) -> None:
        """Ask the addresses of the URL, beside all connections; ends in `RouteKeeper.took` or `RouteKeeper.missed`."""
        ...

    def routes_taken(self, change: RouteChange) -> None:
        """The book has changed."""
        ...


class RouteKeeper:
    """Keeps one book. Thread-safe."""

    def __init__(self, book: RouteBook, owner: KeeperOwner) -> None:
        self.book: Final = book
        self._owner = owner
        self._random = random.Random()
        self._lock = threading.Lock()  # guards the book and what follows
        self._wanted: set[str] = set()
        self._is_wanted = False
        self._is_asking = False
        self._asked = 0  # questions, to tell the one that is given up

    def begin(self) -> None:
        """Ask now and then from now on."""
        self._later()
        self.want()

    def _later(self) -> None:
        seconds = REFRESH_SECONDS if self._owner.is_whole else LOST_SECONDS
        self._owner.call_later(seconds * self._random.uniform(0.75, 1.0), self._refresh)

    def _refresh(self) -> None:
        with self._lock:
            due = self.book.due() if self._owner.is_whole else []
        self.want(due, 0.0)
        self._later()

    def changed(self, topics: Iterable[str]) -> None:
        """A broker says that these have changed; of none, that more have than it names, or the shards have."""
        with self._lock:
            topics = [*topics] or self.book.due()
        self.want(topics)

    def want(self, topics: Iterable[str] = (), seconds: float = SOON_SECONDS) -> None:
        """Have the shards and these topics asked for soon."""
        with self._lock:
            self._wanted.update(topics)
            is_first, self._is_wanted = not self._is_wanted, True
        if is_first:
            self._owner.call_later(seconds * self._random.uniform(0.5, 1.0), self._ask)

    def _ask(self) -> None:
        with self._lock:
            if self._is_asking or not self._is_wanted:
                return
            topics = sorted(self._wanted)[:TOPICS_MAX]
            self._wanted.difference_update(topics)
            self._is_asking, self._is_wanted = True, bool(self._wanted)
            self._asked += 1
            number = self._asked
        asked, link = Route(topics, is_watched=True), self._owner.any_link()
        if link is None:
            self._owner.scout(asked)
            return
        self._owner.call_later(ANSWER_SECONDS, lambda: self._give_up(number))
        try:
            link.submit(Command.ROUTE, asked, on_answer=lambda answer: self._answered(asked, answer))
        except DMQError:
            self.missed(asked)

    def _give_up(self, number: int) -> None:
        with self._lock:
            if not self._is_asking or self._asked != number:
                return
        self._end()

    def _answered(self, asked: Route, answer: Frame | DMQError) -> None:
        try:
            if isinstance(answer, DMQError):
                raise answer
            reply: RouteReply = decode_response(answer)
        except DMQError as error:
            log.debug("routes not learned", error=error)
            self.missed(asked)
        else:
            self.took(reply, asked.topics)

    def missed(self, asked: Route) -> None:
        """A question had no answer: it is asked again in a while."""
        self._end()
        self.want(asked.topics, LOST_SECONDS)

    def took(self, reply: RouteReply, asked: Iterable[str] = ()) -> None:
        """An answer came."""
        self.learned(reply, asked)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._is_asking = False
            must_ask = self._is_wanted
        if must_ask:
            self._ask()

    def learned(self, reply: RouteReply, asked: Iterable[str] = ()) -> None:
        """Take an answer to somebody else's question."""
        with self._lock:
            change = self.book.take(reply, asked)
        if reply.cluster != self.book.cluster:
            log.error(
                "a broker answers with the routes of another cluster, and is not believed",
                once_for=reply.cluster,
                cluster=reply.cluster,
                own=self.book.cluster,
            )
        if change != RouteChange():
            self._owner.routes_taken(change)


ANY: Final = -1  # whichever queue
WHEELS_MAX: Final = 1024
WHEEL_MAX: Final = 4096
_UNITS: Final = 64  # so fine are weights


def any_shard(queue: int) -> int:
    """What stands for this queue of whichever shard: of a topic that goes by priorities."""
    return -2 - queue


def priority_queue(wanted: int) -> int:
    """The queue that is wanted in whichever shard; -1 if any is."""
    return -1 if wanted == ANY else -2 - wanted


class PlaceChoice:
    """The wheels of one client."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._wheels: dict[tuple[tuple[SlotRoute, ...], int, tuple[tuple[int, int], ...]], tuple[int, ...]] = {}

    def wheel(self, slots: Sequence[SlotRoute], wanted: int, weights: Mapping[int, int]) -> Sequence[int]:
        """The places of a topic, each shard as often as its weight says.

        Parameters:
            wanted: ANY, or `any_shard` of a queue.
            weights: of the shards that may be chosen now, by number.
        """
        key = (tuple(slots), wanted, tuple(weights.items()))
        found = self._wheels.get(key)
        if found is None:
            if len(self._wheels) >= WHEELS_MAX:
                self._wheels.clear()
            found = self._wheels[key] = self._made(slots, priority_queue(wanted), weights)
        return found

    def _made(self, slots: Sequence[SlotRoute], queue: int, weights: Mapping[int, int]) -> tuple[int, ...]:
        taking = [slot for slot in slots if slot.is_writable and slot.shard in weights and slot.queues > queue]
        if not taking:
            return ()
        most = max(weights[slot.shard] for slot in taking)
        chosen = [(slot, weights[slot.shard]) for slot in taking if weights[slot.shard] or not most]
        units = [max(1, round(weight * _UNITS / most)) if most else 1 for _, weight in chosen]
        common = gcd(*units)
        queues = max(slot.queues for slot, _ in chosen) if queue < 0 else 1
        places: list[int] = []
        for (slot, _), unit in zip(chosen, units, strict=True):
            count = unit // common * queues
            first = self._random.randrange(slot.queues)
            places += [place_of((first + at) % slot.queues if queue < 0 else queue, slot.shard) for at in range(count)]
        self._random.shuffle(places)
        return tuple(places[:WHEEL_MAX])
