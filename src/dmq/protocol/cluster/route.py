"""Headers of ROUTE and ROUTE_CHANGED: which shards have a topic's queues, and who leads them.

Any broker and any name server answers ROUTE; the answer is as new as its own view of the registry. What always holds:
of two answers about a shard the one with the higher epoch is the newer one, and of two about a topic of one
incarnation the one with the higher version of its slots.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import U32, U64, Header, Name, Queue, Text

__all__ = ["SLOTS_MAX", "TOPICS_MAX", "Route", "RouteChanged", "RouteReply", "ShardRoute", "SlotRoute", "TopicRoute"]

TOPICS_MAX: Final = 256  # in one question
SLOTS_MAX: Final = 1000  # shards of a cluster, and slots of a topic


class Route(Header, frozen=True):
    """Ask for all shards, and for these topics."""

    topics: Annotated[list[Name], Meta(max_length=TOPICS_MAX)] = []
    is_watched: bool = False  # send ROUTE_CHANGED on this connection when an answer would be another


class ShardRoute(Header, frozen=True):
    """One shard; a lone broker is shard 0, of no cluster."""

    number: U32
    name: Text
    epoch: U32 = 0
    leader: Text = ""  # where clients reach it; "" while there is none
    members: Annotated[list[Text], Meta(max_length=64)] = []  # where clients reach the members that are known
    is_writable: bool = True  # it takes new messages
    weight: U32 = 100  # its share of the messages that may go to any shard


class SlotRoute(Header, frozen=True):
    """The queues of a topic in one shard: 0 to `queues` - 1."""

    shard: U32
    queues: Queue
    is_writable: bool = True  # False: taken out of the topic, and read until it is empty


class TopicRoute(Header, frozen=True):
    """One topic."""

    topic: Name
    incarnation: U64
    slots: Annotated[list[SlotRoute], Meta(max_length=SLOTS_MAX)]
    slots_version: U32 = 0  # what PRODUCE carries for an ordered message
    is_priority: bool = False


class RouteReply(Header, frozen=True):
    """The shards, and those of the topics that there are."""

    cluster: U64  # 0 of a lone broker
    shards: Annotated[list[ShardRoute], Meta(max_length=SLOTS_MAX)]
    topics: Annotated[list[TopicRoute], Meta(max_length=TOPICS_MAX)] = []


class RouteChanged(Header, frozen=True):
    """To a client that asked for it: ask anew. Of no topics: the shards have changed, or more than are named here."""

    topics: Annotated[list[Name], Meta(max_length=TOPICS_MAX)] = []
