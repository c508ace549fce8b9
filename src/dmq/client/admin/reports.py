"""What the administration of a broker answers: plain values for people and programs.

What always holds: these are snapshots, true of the moment the broker answered; nothing here holds a connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType

from dmq.errors import RecordCorrupt
from dmq.model import MessageId
from dmq.protocol import admin, consume
from dmq.protocol.session import BrokerInfo, DrainReply
from dmq.records import DeadReason, RecordView, placeholder

__all__ = [
    "ArchiveReport",
    "BrokerReport",
    "DelayReport",
    "DrainReport",
    "GroupReason",
    "GroupReport",
    "Lag",
    "LimitReport",
    "Member",
    "Move",
    "QueueLag",
    "QueueRange",
    "StoredMessage",
    "Topic",
    "TopicSlot",
    "TraceReport",
    "TraceStep",
    "TransactionReport",
    "WhyReport",
]

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TopicSlot:
    """The queues of a topic in one shard of a cluster."""

    shard: str
    number: int
    queues: int
    is_writable: bool  # False: removed, and read until it is empty


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
    can_produce: bool = True
    can_consume: bool = True
    stored: int = 0  # since it was created; 0 of a broker that does not tell
    slots: tuple[TopicSlot, ...] = ()  # in a cluster: its shards
    slots_version: int = 0  # raised by every change of them
    lacking: tuple[str, ...] = ()  # shards that had no leader for the last change; they get it when they have one

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
            config.can_produce,
            config.can_consume,
            info.stored,
            tuple(TopicSlot(slot.shard, slot.number, slot.queues, slot.is_writable) for slot in info.slots),
            info.slots_version,
            tuple(info.lacking),
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
    is_silent: bool = False
    """A lease of it ran out without a sign of life: it gets nothing until it speaks."""
    shard: int = 0  # its number; 0 of a broker by itself


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One group."""

    name: str
    topics: tuple[str, ...]
    lag: int
    members: int
    details: tuple[Member, ...] = ()  # only where one group was asked for; of a cluster, one for each shard
    retrying: int = 0  # failed, and wait for another attempt; not part of the lag
    missing: tuple[str, ...] = ()  # shards that did not answer

    @classmethod
    def of(cls, info: admin.GroupInfo, members: list[admin.MemberInfo] | None = None) -> GroupReport:
        details = tuple(
            Member(
                m.member,
                m.topic,
                m.address,
                m.tags,
                version=m.version,
                leased=m.leased,
                is_connected=m.is_connected,
                is_silent=m.is_silent,
            )
            for m in members or ()
        )
        return cls(info.group, tuple(info.topics), info.lag, info.members, details, info.retrying)

    def at(self, shard: int) -> GroupReport:
        """The same, whose members name a shard."""
        return replace(self, details=tuple(replace(member, shard=shard) for member in self.details))


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
    retrying: int = 0  # failed, and wait for another attempt; not part of the lag
    dropped: int = 0  # by retention, before the group had consumed them
    is_holding: bool = False  # retention waits for the group here
    shard: int = 0  # its number; 0 of a broker by itself

    @classmethod
    def of(cls, position: consume.QueuePosition) -> QueueLag:
        return cls(
            position.topic,
            position.queue,
            position.first_offset,
            position.next_offset,
            position.floor,
            position.leased,
            position.next_offset - position.floor - position.settled,
            position.oldest_ms / 1000,
            position.retrying,
            position.dropped,
            position.is_holding,
        )


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group is: messages it has not settled, in all and by queue."""

    group: str
    total: int
    queues: tuple[QueueLag, ...]
    retrying: int = 0  # failed, and wait for another attempt; not part of the total
    missing: tuple[str, ...] = ()  # shards that did not answer

    @property
    def dropped(self) -> int:
        """Messages that retention dropped before the group had consumed them."""
        return sum(queue.dropped for queue in self.queues)

    @property
    def is_holding(self) -> bool:
        """Whether retention waits for the group: what is past the retention is kept for it."""
        return any(queue.is_holding for queue in self.queues)


@dataclass(frozen=True, slots=True)
class Move:
    """From where to where a group was moved in one queue, or would be."""

    queue: int
    before: int
    after: int
    shard: int = 0  # its number; 0 of a broker by itself


@dataclass(frozen=True, slots=True)
class QueueRange:
    """What one queue keeps, and where the point asked for lies."""

    queue: int
    first_offset: int
    next_offset: int
    at: int
    shard: int = 0  # its number; 0 of a broker by itself


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """How far the archive has taken a broker's journal, and what the journal has: offsets of the journal."""

    journal_id: int
    archived: int
    first: int
    flushed: int  # what lies below outlives a power loss
    visible: int


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
    sent_at_ms: int  # the first time, of one that was moved or replayed
    stored_at_ms: int
    app: str
    properties: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    damage: str = ""
    """Not empty for a record that nobody can read: what is wrong with it; the rest is what is left of it."""
    shard: int = 0  # its number; 0 of a broker by itself

    @classmethod
    def of(cls, record: RecordView, message_id: MessageId | None = None, topic: str | None = None) -> StoredMessage:
        attributes = record.attributes
        try:
            body = record.body
        except RecordCorrupt as error:
            return cls.of(
                RecordView(
                    placeholder(bytes(record.buffer[record.start : record.start + record.length]), error.message)
                ),
                message_id,
                topic,
            )
        first_sent_at_ms = attributes.original_send_time_ms if record.moved else None
        return cls(
            attributes.message_id or message_id,
            topic or record.topic,
            record.queue,
            record.queue_offset,
            body,
            attributes.key,
            attributes.tag,
            record.business_id,
            record.priority,
            record.send_time_ms if first_sent_at_ms is None else first_sent_at_ms,
            record.store_time_ms,
            record.app,
            attributes.properties,
            (attributes.reason or "damaged") if record.system and attributes.reason_code == DeadReason.CORRUPT else "",
        )


@dataclass(frozen=True, slots=True)
class DelayReport:
    """A message that waits for its time."""

    id: MessageId
    topic: str
    due_at_ms: int
    shard: int = 0  # its number; 0 of a broker by itself

    @property
    def due_at(self) -> datetime:
        """When it is delivered, in UTC."""
        return datetime.fromtimestamp(self.due_at_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class TransactionReport:
    """A prepared message that is neither committed nor rolled back."""

    id: MessageId
    topic: str
    group: str
    begun_at_ms: int
    checks: int
    shard: int = 0  # its number; 0 of a broker by itself

    @property
    def begun_at(self) -> datetime:
        """When it was prepared, in UTC."""
        return datetime.fromtimestamp(self.begun_at_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class LimitReport:
    """How much a second a topic takes, or an app may send: the other name is empty. None is no limit."""

    topic: str
    app: str
    messages: int | None
    bytes: int | None
    policy: str  # refuse or dead-letter


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One thing that happened to a message."""

    at_ms: int
    what: str  # sent, stored, delivered, acked, failed, …
    topic: str
    queue: int | None
    offset: int | None
    group: str
    member: str
    attempt: int
    note: str

    @property
    def at(self) -> datetime:
        """When, in UTC."""
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The life of a message: its steps in order, and what is not known of it."""

    id: MessageId
    steps: tuple[TraceStep, ...]
    notes: tuple[str, ...]
    is_complete: bool  # the journal was searched to its end
    missing: tuple[str, ...] = ()  # shards that did not answer


@dataclass(frozen=True, slots=True)
class GroupReason:
    """Why one group has not consumed a message, or that it has."""

    group: str
    state: str  # consumed, waiting, leased, retrying, dead, filtered, …
    text: str


@dataclass(frozen=True, slots=True)
class WhyReport:
    """Why a message is not consumed: one paragraph, and the same by group."""

    id: MessageId
    state: str  # of the message itself: stored, delayed, prepared, …
    text: str
    groups: tuple[GroupReason, ...]
    is_complete: bool  # the journal was searched to its end
    missing: tuple[str, ...] = ()  # shards that did not answer

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How far a broker is with being taken out of use."""

    state: str  # running, drained or stopping
    out: int  # messages that consumers have and did not settle
    waiting_bytes: int  # not written yet
    waiting: int  # requests that wait for a change
    clients: int

    @property
    def is_idle(self) -> bool:
        """Nothing is out and nothing waits: once drained, it is safe to stop."""
        return not (self.out or self.waiting_bytes or self.waiting)

    @classmethod
    def of(cls, reply: DrainReply) -> DrainReport:
        return cls(reply.state, reply.out, reply.waiting_bytes, reply.waiting, reply.clients)


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
