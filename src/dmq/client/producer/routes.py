"""Routes: what a client knows of topics, and which queue a message goes to. Pure.

In a cluster a queue is a place, a queue of a shard, and the router keeps what is known of a topic
(`dmq.client.connection.route_book`).

What always holds: one business id goes to one place for as long as the topic keeps its slots, or its number of queues
at a lone broker, unless the topic's queues are priorities; an ordered message without a business id is refused; what
is known of a topic is at most an hour old, or being asked for anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Final, NamedTuple

from dmq.client.connection.route_book import ANY, any_shard
from dmq.client.producer.accumulator import LaneKey
from dmq.errors import DMQError, InvalidMessage, NotConnected, StaleRoute
from dmq.model import Message, TopicConfig, place_of, place_queue
from dmq.protocol.cluster.route import SlotRoute, TopicRoute
from dmq.records import business_hash

__all__ = ["UNKNOWN", "Route", "Routes", "choose_queue"]

FRESH_SECONDS: Final = 3600.0
ROUTES_MAX: Final = 65_536


class Route(NamedTuple):
    """A topic as producers see it."""

    queues: int
    is_priority: bool
    fetched_at: float  # on the monotonic clock; for ever where the router keeps it
    places: Sequence[int] | None = None  # in a cluster, those that take messages
    slots_version: int = 0  # of which these places are

    @classmethod
    def of(cls, config: TopicConfig, now: float) -> Route:
        return cls(config.queues, config.priority, now)

    @property
    def all_places(self) -> Sequence[int]:
        """Those that take messages; at a lone broker, its queues."""
        return range(self.queues) if self.places is None else self.places

    @classmethod
    def of_slots(cls, row: TopicRoute) -> Route:
        """Of a topic in a cluster."""
        places = _places(tuple(row.slots))
        queues = max((slot.queues for slot in row.slots), default=0)
        return cls(queues, row.is_priority, inf, places, slots_version=row.slots_version)


@lru_cache(maxsize=1024)
def _places(slots: tuple[SlotRoute, ...]) -> tuple[int, ...]:
    return tuple(place_of(queue, slot.shard) for slot in slots if slot.is_writable for queue in range(slot.queues))


# Of a topic that was never asked for; only with a spool, which takes messages before any broker is there.
UNKNOWN: Final = Route(0, False, -FRESH_SECONDS)


class Routes:
    """The topics one client has asked for."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._asking: set[str] = set()
        self.get: Final = self._routes.get

    def put(self, topic: str, route: Route) -> None:
        """Remember a topic; beyond the maximum, the oldest is forgotten."""
        self._asking.discard(topic)
        self._routes.pop(topic, None)
        self._routes[topic] = route
        if len(self._routes) > ROUTES_MAX:
            del self._routes[next(iter(self._routes))]

    def drop(self, topic: str) -> None:
        self._asking.discard(topic)
        self._routes.pop(topic, None)

    def has_newest(self, key: LaneKey, refusal: DMQError | None) -> bool:
        """Whether neither we nor the shard that refused a batch know newer slots: it has not heard of these yet."""
        route = self._routes.get(key.topic)
        known = 0 if route is None else route.slots_version
        said = 0 if refusal is None else refusal.detail.get("slots_version", 0)
        return max(known, said) <= key.slots_version

    def begin_refresh(self, topic: str, now: float) -> bool:
        """Whether the topic is to be asked for anew; True once until `put`, `drop` or `end_refresh`."""
        route = self._routes.get(topic)
        if route is None or now - route.fetched_at < FRESH_SECONDS or topic in self._asking:
            return False
        self._asking.add(topic)
        return True

    def end_refresh(self, topic: str) -> None:
        """It could not be asked for."""
        self._asking.discard(topic)


def choose_queue(route: Route, message: Message) -> int:
    """The queue a message must go to; -1 if any will do.

    Raises:
        InvalidMessage: it is ordered and has no business id.
        NotConnected: it is ordered, and how many queues there are is not known.
        StaleRoute: it is ordered, and no shard takes messages of the topic.
    """
    if message.ordered:
        if not message.business_id:
            raise InvalidMessage(
                "ordered=True needs a business_id: messages with the same one stay in order; give one, or leave "
                "ordered out"
            )
        if not route.queues:
            raise NotConnected(
                "no broker is connected, and how many queues the topic has is not known here yet, which an ordered "
                "message depends on: send it when a broker is connected"
            )
        if not route.is_priority:
            number = business_hash(message.business_id)
            if route.places is None:
                return number % route.queues
            return _at(route.places, number)
    if route.is_priority:
        # Also if it is ordered: there is order within a priority.
        queue = min(message.priority, route.queues - 1)
        if route.places is None:
            return queue
        if not message.ordered:
            return any_shard(queue)
        own = [place for place in route.places if place_queue(place) == queue]
        assert message.business_id
        return _at(own, business_hash(message.business_id))
    return ANY


def _at(places: Sequence[int], number: int) -> int:
    if not places:
        raise StaleRoute("no shard takes messages of the topic now: put it on one with `dmq topic place --add`")
    return places[number % len(places)]
