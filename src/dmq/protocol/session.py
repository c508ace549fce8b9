"""Headers of the session: who is there, are you still there, and what the brokers are up to.

What always holds: HELLO is the first request on a connection and comes once; its two structs can be read by every
version, for ever, since they decide what else can be.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import U16, U32, Amount, Header, Name, OptionalName, Text

__all__ = [
    "BLOCKS",
    "FEATURES",
    "FRAME_CRC",
    "OVERLAP",
    "PROTOCOL_VERSION",
    "PROTOCOL_VERSION_MIN",
    "BrokerInfo",
    "Cluster",
    "ClusterReply",
    "Drain",
    "DrainAction",
    "DrainReply",
    "Heartbeat",
    "Hello",
    "HelloReply",
    "Limits",
    "ServerHealth",
    "ServerReboot",
    "ShardInfo",
    "Stats",
    "StatsReply",
    "choose_features",
    "choose_version",
]

# The version of the commands, agreed on in the hello; the wire format in every frame is another matter.
PROTOCOL_VERSION: Final = 1
PROTOCOL_VERSION_MIN: Final = 1

FRAME_CRC: Final = "frame-crc"
"""Every frame of the connection, in both directions, ends with its CRC-32C: see `dmq.protocol.frame`."""

OVERLAP: Final = "overlap"
"""A producer may have several batches under way to a queue: `Produce.previous_sequence` is looked at."""

BLOCKS: Final = "blocks"
"""Bodies of a PRODUCE, a push and the answer to a PULL may stand in blocks: see `dmq.records.block`."""

# What a peer may offer beyond version 1, by name.
FEATURES: Final = frozenset({BLOCKS, FRAME_CRC, OVERLAP})

Features = Annotated[list[Name], Meta(max_length=256)]
Secret = Annotated[bytes, Meta(max_length=32_768)]


class Hello(Header, frozen=True):
    """Client to broker, first of all."""

    app: Name
    client_id: OptionalName = ""  # "" leaves it to the broker to name the client; then broadcast is not possible
    version_min: U16 = PROTOCOL_VERSION_MIN
    version_max: U16 = PROTOCOL_VERSION
    software: Text = ""  # for people: "dmq-python 0.1.0"
    features: Features = []
    auth_mechanism: OptionalName = ""  # "" is anonymous; else a SASL mechanism's name
    auth_data: Secret = b""


class Limits(Header, frozen=True):
    """What the broker takes on this connection."""

    frame_bytes_max: U32
    body_bytes_max: U32  # of one message, as stored
    heartbeat_ms: U32  # send something at least this often; silence of three times as long ends the connection
    prefetch_messages: U32  # credit of a subscription that asks for 0
    prefetch_bytes: U32
    partial_ms: U32  # a frame must arrive whole within this time


class ShardInfo(Header, frozen=True):
    """The shard that the answering broker is a member of, as it sees it."""

    shard: Name
    epoch: U32 = 0  # the newest that it has heard of
    is_leader: bool = False  # it serves everything; else only what needs no leader
    leader: Text = ""  # where clients reach the leader; "" while none is known
    members: Annotated[list[Text], Meta(max_length=64)] = []  # where clients reach the members that are known
    number: U32 = 0  # of the shard: given once, never used again; 0 while it is not known


class HelloReply(Header, frozen=True):
    """The broker's answer; everything after it follows `version` and `features`."""

    broker: Name
    address: Text  # where it wants to be reached
    version: U16
    limits: Limits
    features: Features = []  # those in force: asked for by the client and known to the broker
    client_id: OptionalName = ""  # the client's own, or the one the broker gave it
    software: Text = ""
    now_ms: Amount = 0  # the broker's wall clock, so that a client can tell how far its own is off
    auth_data: Secret = b""  # a challenge or a proof, as the mechanism says
    shard: ShardInfo | None = None  # None of a lone broker


class Heartbeat(Header, frozen=True):
    """Either way. As a request it is answered with the same header; one-way it only says: still here."""

    now_ms: Amount = 0


class ServerReboot(Header, frozen=True):
    """Broker to client, one-way: take me out of your routes; what runs is finished within `grace_ms`."""

    broker: Name
    grace_ms: U32 = 0
    reason: Text = ""


class ServerHealth(Header, frozen=True):
    """Broker to client, one-way: this broker may be used again; forget that it failed."""

    broker: Name
    address: Text = ""


class Stats(Header, frozen=True):
    """Ask for counters, all or those whose name begins with one of these."""

    prefixes: Annotated[list[Name], Meta(max_length=256)] = []


class StatsReply(Header, frozen=True):
    """Counters and gauges by name, and when they were read."""

    values: dict[str, float]
    at_ms: Amount = 0
    warnings: Annotated[list[Text], Meta(max_length=64)] = []  # what an operator should know, in sentences


class Cluster(Header, frozen=True):
    """Ask which brokers there are."""


class BrokerInfo(Header, frozen=True):
    """One broker as another sees it."""

    broker: Name
    address: Text
    shard: OptionalName = ""
    is_leader: bool = True
    is_writable: bool = True
    state: OptionalName = ""  # for people
    epoch: U32 = 0


class ClusterReply(Header, frozen=True):
    """All brokers that are known, the answering one first."""

    brokers: Annotated[list[BrokerInfo], Meta(max_length=10_000)]


class DrainAction(IntEnum):
    """What a drain is to do."""

    SHOW = 0  # nothing: only tell
    BEGIN = 1  # take the broker out of use
    END = 2  # put it back in use
    STOP = 3  # stop its process, as SIGTERM does


class Drain(Header, frozen=True):
    """Take a broker out of use, put it back, or see how far it is (D-09)."""

    action: DrainAction = DrainAction.SHOW
    grace_ms: U32 = 0  # what clients are told they have
    reason: Text = ""


class DrainReply(Header, frozen=True):
    """Safe to stop once it is `drained` and nothing is out or waits."""

    state: Name  # running, drained or stopping
    out: Amount = 0  # messages that consumers have leased
    waiting_bytes: Amount = 0  # not written yet
    waiting: U32 = 0  # requests that wait for a topic or group to be changed
    clients: U32 = 0


def choose_version(hello: Hello) -> int | None:
    """The newest version both sides speak; None if there is none."""
    version = min(hello.version_max, PROTOCOL_VERSION)
    return version if version >= max(hello.version_min, PROTOCOL_VERSION_MIN) else None


def choose_features(hello: Hello, known: frozenset[str] = FEATURES) -> list[str]:
    """The features in force: what the client asked for and we know, in the client's order."""
    return [name for name in dict.fromkeys(hello.features) if name in known]
