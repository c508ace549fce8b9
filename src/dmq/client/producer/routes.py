"""Routes: what a client knows of topics, and which queue a message goes to. Pure.

What always holds: one business id goes to one queue for as long as the topic keeps its number of queues, unless the
topic's queues are priorities; an ordered message without a business id is refused; what is known of a topic is at most
an hour old, or being asked for anew.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.errors import InvalidMessage, NotConnected
from dmq.model import Message, TopicConfig
from dmq.records import business_hash

__all__ = ["UNKNOWN", "Route", "Routes", "choose_queue"]

FRESH_SECONDS: Final = 3600.0
ROUTES_MAX: Final = 65_536

ANY: Final = -1


class Route(NamedTuple):
    """A topic as producers see it."""

    queues: int
    is_priority: bool
    fetched_at: float  # on the monotonic clock

    @classmethod
    def of(cls, config: TopicConfig, now: float) -> Route:
        return cls(config.queues, config.priority, now)


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
                "message depends on: send it when a broker is there"
            )
        if not route.is_priority:
            return business_hash(message.business_id) % route.queues
    if route.is_priority:
        return min(message.priority, route.queues - 1)  # also if it is ordered: there is order within a priority
    return ANY
