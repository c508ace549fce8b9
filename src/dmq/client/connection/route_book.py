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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dmq.client.connection.url import Address, parsed_address
from dmq.model import SYSTEM_PREFIX, place_of, place_shard
from dmq.protocol.cluster.route import TOPICS_MAX, RouteReply, ShardRoute, SlotRoute, TopicRoute

__all__ = ["REFRESH_SECONDS", "BrokerAddresses", "RouteBook", "RouteChange"]

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
