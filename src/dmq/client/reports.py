"""What the administration of a broker answers: plain values for people and programs.

What always holds: these are snapshots, true of the moment the broker answered; nothing here holds a connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dmq.model import MessageId
from dmq.protocol import admin, consuming
from dmq.protocol.session import BrokerInfo
from dmq.records import RecordView

__all__ = ["BrokerReport", "GroupReport", "Lag", "Member", "Move", "QueueLag", "QueueRange", "StoredMessage", "Topic"]

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic."""

    name: str
    queues: int
    priority: bool
    ttl: float | None  # seconds
    carry_for: str | None
    properties: Mapping[str, str]
    messages: int  # kept
    bytes: int
    groups: tuple[str, ...] | None = None  # that consume it; None where that was not asked

    @classmethod
    def of(cls, info: admin.TopicInfo, groups: list[str] | None = None) -> Topic:
        config = info.config
        return cls(
            info.topic,
            config.queues,
            config.priority,
            None if config.ttl_ms is None else config.ttl_ms / 1000,
            config.carry_for,
            config.properties,
            info.messages,
            info.bytes,
            None if groups is None else tuple(groups),
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group, and what it has in hand."""

    name: str
    topic: str
    address: str
    tags: str
    version: int
    leased: int
    is_connected: bool


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One group."""

    name: str
    topics: tuple[str, ...]
    lag: int
    members: int
    details: tuple[Member, ...] = ()  # only where one group was asked for

    @classmethod
    def of(cls, info: admin.GroupInfo, members: list[admin.MemberInfo] | None = None) -> GroupReport:
        details = tuple(
            Member(m.member, m.topic, m.address, m.tags, m.version, m.leased, m.is_connected) for m in members or ()
        )
        return cls(info.group, tuple(info.topics), info.lag, info.members, details)


@dataclass(frozen=True, slots=True)
class QueueLag:
    """How far a group is in one queue."""

    topic: str
    queue: int
    first_offset: int
    next_offset: int
    floor: int
    leased: int
    lag: int
    oldest_age: float  # seconds

    @classmethod
    def of(cls, position: consuming.QueuePosition) -> QueueLag:
        return cls(
            position.topic,
            position.queue,
            position.first_offset,
            position.next_offset,
            position.floor,
            position.leased,
            position.next_offset - position.floor - position.settled,
            position.oldest_ms / 1000,
        )


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is: messages it has not settled, in all and by queue."""

    group: str
    total: int
    queues: tuple[QueueLag, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """From where to where a group was moved in one queue, or would be."""

    queue: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class QueueRange:
    """What one queue keeps, and where the point asked for lies."""

    queue: int
    first_offset: int
    next_offset: int
    at: int


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is stored, read without consuming it."""

    id: MessageId | None  # where it is known
    topic: str
    queue: int
    offset: int
    body: bytes
    key: str | None
    tag: str | None
    business_id: str | None
    priority: int
    sent_at_ms: int
    stored_at_ms: int
    app: str
    properties: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    @classmethod
    def of(cls, record: RecordView, message_id: MessageId | None = None) -> StoredMessage:
        attributes = record.attributes
        return cls(
            attributes.message_id or message_id,
            record.topic,
            record.queue,
            record.queue_offset,
            record.body,
            attributes.key,
            attributes.tag,
            record.business_id,
            record.priority,
            record.send_time_ms,
            record.store_time_ms,
            record.app,
            attributes.properties,
        )


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """One broker as another sees it."""

    name: str
    address: str
    shard: str
    is_leader: bool
    is_writable: bool
    state: str

    @classmethod
    def of(cls, info: BrokerInfo) -> BrokerReport:
        return cls(info.broker, info.address, info.shard, info.is_leader, info.is_writable, info.state)
