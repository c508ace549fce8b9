"""What the administration of a broker answers: plain values, and how those of several shards become one answer. Pure.

What always holds: these are snapshots, true of the moment the broker answered; nothing here holds a connection. A row
names the shard it came from; a shard that did not answer is named, and nothing is made up for it; what no shard knows
raises as a lone broker does. With a lone broker there is one answer, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from dmq.errors import (
    BrokerStopping,
    Busy,
    DMQError,
    NotConnected,
    NotEnoughReplicas,
    NotLeader,
    RecordCorrupt,
    TimedOut,
    UnknownGroup,
    UnknownMessage,
    UnknownTopic,
)
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
    "ShardAnswers",
    "ShardRows",
    "StoredMessage",
    "Topic",
    "TopicSlot",
    "TraceReport",
    "TraceStep",
    "TransactionReport",
    "WhyReport",
    "chosen_why",
    "interleaved",
    "joined_group",
    "joined_groups",
    "joined_lag",
    "joined_topic",
    "joined_topics",
    "joined_trace",
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
    journal_offset: int = 0  # of its record, in the journal of its shard: messages of several queues are in order by it

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
            journal_offset=record.journal_offset,
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
    """How much a second a topic takes, or an app may send: the other name is empty. None means no limit."""

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


T = TypeVar("T")

_UNKNOWN: Final = (UnknownTopic, UnknownGroup, UnknownMessage)
_AWAY: Final = (NotConnected, TimedOut, NotLeader, NotEnoughReplicas, BrokerStopping, Busy)


class ShardRows(list[T], Generic[T]):
    """Rows of all shards.

    Attributes:
        missing: the names of shards that did not answer: their rows are not here.
    """

    def __init__(self, rows: Iterable[T] = (), missing: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.missing: tuple[str, ...] = tuple(missing)


class ShardAnswers(Generic[T]):
    """The answers of some shards to one question.

    Parameters:
        is_change: a shard that did not answer may have done what it was asked for.

    Attributes:
        found: the answers with the numbers of their shards.
        missing: the names of shards that did not answer.
    """

    def __init__(self, *, is_change: bool = False) -> None:
        self._is_change = is_change
        self.found: list[tuple[int, T]] = []
        self.missing: list[str] = []
        self._unknown: DMQError | None = None
        self._away: DMQError | None = None

    def failed(self, shard: str, error: DMQError) -> None:
        """A shard answered with an error, or did not answer.

        Raises:
            DMQError: it is one that every shard would give.
        """
        if isinstance(error, _UNKNOWN):
            self._unknown = error
        elif isinstance(error, _AWAY):
            self._away = error
            self.missing.append(shard)
        else:
            raise error

    def check(self) -> None:
        """Raise what all shards together say, if none has an answer."""
        if self.found:
            return
        error = self._away if self._is_change and self._away is not None else self._unknown or self._away
        assert error is not None, "somebody was asked"
        if error is self._unknown and self.missing:
            away = f"shard {', '.join(self.missing)} did not answer, and may know more: try again later"
            raise type(error)(f"{error.message}; {away}", **error.detail)
        raise error

    def rows(
        self: ShardAnswers[list[Any]], key: Callable[[Any], Any] | None = None, limit: int | None = None
    ) -> ShardRows[Any]:
        """The rows of all, each with its shard: one shard after the other, or sorted."""
        named = [[replace(row, shard=shard) if shard else row for row in rows] for shard, rows in self.found]
        rows = [*chain.from_iterable(named)]
        return ShardRows((rows if key is None or len(named) == 1 else sorted(rows, key=key))[:limit], self.missing)


def interleaved(answers: ShardAnswers[list[StoredMessage]], limit: int) -> ShardRows[StoredMessage]:
    """So many messages, of each shard as many as of the others if it has them; one shard after the other."""
    each = [[replace(row, shard=shard) if shard else row for row in rows] for shard, rows in answers.found]
    dealt = [pair for turn in zip_longest(*map(_numbered, range(len(each)), each)) for pair in turn if pair is not None]
    chosen = sorted(dealt[:limit], key=lambda pair: pair[0])
    return ShardRows([row for _, row in chosen], answers.missing)


def _numbered(at: int, rows: list[StoredMessage]) -> list[tuple[int, StoredMessage]]:
    return [(at, row) for row in rows]


def joined_topics(answers: ShardAnswers[list[Topic]]) -> ShardRows[Topic]:
    """Topics by name, with what all shards keep of them."""
    found: dict[str, list[Topic]] = {}
    for _, rows in answers.found:
        for row in rows:
            found.setdefault(row.name, []).append(row)
    return ShardRows((joined_topic(rows) for _, rows in sorted(found.items())), answers.missing)


def joined_topic(rows: Sequence[Topic]) -> Topic:
    """One topic, with what all shards keep of it; the newest slots are the ones that hold."""
    if len(rows) == 1:
        return rows[0]
    groups = None if any(row.groups is None for row in rows) else sorted({g for row in rows for g in row.groups or ()})
    return replace(
        max(rows, key=lambda row: row.slots_version),
        messages=sum(row.messages for row in rows),
        bytes=sum(row.bytes for row in rows),
        stored=sum(row.stored for row in rows),
        groups=None if groups is None else tuple(groups),
    )


def joined_lag(answers: ShardAnswers[Lag]) -> Lag:
    """How far a group is in all shards."""
    queues = [replace(row, shard=shard) if shard else row for shard, lag in answers.found for row in lag.queues]
    queues.sort(key=lambda row: (row.topic, row.shard, row.queue))
    lags = [lag for _, lag in answers.found]
    return Lag(
        lags[0].group,
        sum(lag.total for lag in lags),
        tuple(queues),
        sum(lag.retrying for lag in lags),
        missing=tuple(answers.missing),
    )


def joined_group(reports: Iterable[GroupReport], missing: Iterable[str] = ()) -> GroupReport:
    """One group in all shards; its members are the same ones at each of them."""
    found = [*reports]
    return GroupReport(
        found[0].name,
        tuple(sorted({topic for one in found for topic in one.topics})),
        sum(one.lag for one in found),
        max(one.members for one in found),
        details=tuple(member for one in found for member in one.details),
        retrying=sum(one.retrying for one in found),
        missing=tuple(missing),
    )


def joined_groups(answers: ShardAnswers[list[GroupReport]]) -> ShardRows[GroupReport]:
    """All groups, each with what all shards say of it."""
    by_name: dict[str, list[GroupReport]] = {}
    for _, reports in answers.found:
        for report in reports:
            by_name.setdefault(report.name, []).append(report)
    return ShardRows((joined_group(by_name[name]) for name in sorted(by_name)), answers.missing)


def joined_trace(answers: ShardAnswers[TraceReport]) -> TraceReport:
    """The history of a message; nearly always one shard knows all of it."""
    reports = [report for _, report in answers.found]
    steps = sorted((step for report in reports for step in report.steps), key=lambda step: step.at_ms)
    notes = tuple(dict.fromkeys(note for report in reports for note in report.notes))
    return TraceReport(
        reports[0].id,
        tuple(steps) if len(reports) > 1 else reports[0].steps,
        notes,
        all(report.is_complete for report in reports) and not answers.missing,
        missing=tuple(answers.missing),
    )


def chosen_why(answers: ShardAnswers[WhyReport]) -> WhyReport:
    """What the shard says that stores the message."""
    reports = [report for _, report in answers.found]
    best = max(reports, key=lambda report: len(report.groups))
    return replace(best, is_complete=best.is_complete and not answers.missing, missing=tuple(answers.missing))
