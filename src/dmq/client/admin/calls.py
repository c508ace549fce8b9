"""Administration as conversations: generators that yield a request and are sent its response. Pure.

Both clients hold them (`Admin.converse`, `AioAdmin.converse`), so that what is asked, and how answers are put
together, is written once.

What always holds: a call yields (command, header), gets a frame, and returns its result; an error that the broker
answered is raised inside of the call, where the frame is decoded. Arguments that are evidently wrong are refused before
anything is asked. A listing is put together from pages, so that it is as long as the caller wants and no page is larger
than a frame.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from dmq.client.admin.reports import (
    ArchiveReport,
    BrokerReport,
    DelayReport,
    DrainReport,
    GroupReason,
    GroupReport,
    Lag,
    LimitReport,
    Move,
    QueueLag,
    QueueRange,
    StoredMessage,
    Topic,
    TraceReport,
    TraceStep,
    TransactionReport,
    WhyReport,
)
from dmq.client.arguments import check_seconds, check_tags, check_whole, parse_id
from dmq.duration import parse_duration
from dmq.errors import InvalidName, InvalidRequest, InvalidSettings, UnknownGroup
from dmq.model import QUEUES_MAX, MessageId, check_name
from dmq.protocol import Command, Frame, Header, admin, decode_response, unpack_records
from dmq.protocol import session as sessions
from dmq.protocol.admin import (
    DelayCancel,
    DelayList,
    DelayListReply,
    LimitGet,
    LimitInfo,
    LimitPolicy,
    LimitReply,
    LimitSet,
    MessageQuery,
)
from dmq.protocol.consume import Point, PointKind, Position, Seek
from dmq.protocol.header import LIST_MAX
from dmq.protocol.key_values import (
    VALUE_BYTES_MAX,
    KeyDelete,
    KeyDeleteReply,
    KeyGet,
    KeyList,
    KeyListReply,
    KeyPut,
    KeyReply,
)
from dmq.protocol.message_history import TraceReply, WhyReply
from dmq.protocol.produce import TransactionList, TransactionListReply
from dmq.protocol.read import Archived, ArchivedReply, Find, Offsets, Peek, PeekReply
from dmq.records import ANY_QUEUE, RecordView, find_corrupt, placeholder

__all__ = [
    "ANSWER_SECONDS",
    "Call",
    "When",
    "cancel_delay",
    "delays",
    "delete",
    "entries",
    "get",
    "limits",
    "parse_point",
    "put",
    "set_limit",
    "trace",
    "transactions",
    "why",
]

T = TypeVar("T")
Call: TypeAlias = Generator[tuple[Command, Header], Frame, T]
When: TypeAlias = str | int | float | datetime | timedelta | Point

ANSWER_SECONDS: Final = 30.0  # that a broker may take for an answer
_MS_MAX: Final = 1 << 62
_NAME_MAX: Final = 255
_NO_QUEUE: Final = 255
_PAGE: Final = 1000
_LIMIT_MAX: Final = 1 << 31
_FOUND_MAX: Final = 10_000  # that one FIND answers
_OFFSET_MAX: Final = (1 << 63) - 1
_POLICIES: Final = {"refuse": LimitPolicy.REFUSE, "dead-letter": LimitPolicy.DEAD_LETTER}
_TTL_SECONDS_MAX: Final = 10 * 365 * 86_400


def parse_point(to: When) -> Point:
    """Parse a place in a queue, as users write it.

    "earliest", "latest", an offset (int), a moment (datetime, or seconds since 1970 as a float), or a time back from
    now (timedelta, or text as in "2h": ms, s, m, h, d).

    Raises:
        InvalidSettings: it is not one of these.
    """
    if isinstance(to, Point):
        return to
    if isinstance(to, str) and to in ("earliest", "latest"):
        return Point(PointKind.EARLIEST if to == "earliest" else PointKind.LATEST)
    if isinstance(to, int) and not isinstance(to, bool) and 0 <= to < 1 << 63:
        return Point(PointKind.OFFSET, to)
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise InvalidSettings("a moment needs a time zone: datetime.now(timezone.utc), for example")
        return Point(PointKind.TIME, max(0, int(to.timestamp() * 1000)))
    if isinstance(to, timedelta):
        return Point(PointKind.BACK, max(0, int(to.total_seconds() * 1000)))
    if isinstance(to, float) and 0 <= to * 1000 <= _MS_MAX:
        return Point(PointKind.TIME, int(to * 1000))
    seconds = parse_duration(to) if isinstance(to, str) else None
    if seconds is not None and (back := seconds * 1000) <= _MS_MAX:
        return Point(PointKind.BACK, round(back))
    raise InvalidSettings(
        f"{to!r} is not a place in a queue: use 'earliest', 'latest', an offset, a datetime, seconds since 1970 as a "
        "float, or a duration back from now: a timedelta, or text such as '2h'"
    )


# --- topics -----------------------------------------------------------------------------------------------------------


class SlotChange(NamedTuple):
    """As of `Admin.place_topic`."""

    add: str
    remove: str
    queues: int
    drain: bool
    force: bool


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the wire has them: `ttl` in seconds becomes `ttl_ms`."""
    given = dict(settings)
    if "ttl" in given:
        ttl = given.pop("ttl")
        given["ttl_ms"] = None if ttl is None else round(check_seconds("ttl", ttl, above=True) * 1000)
    return given


def create_topic(name: str, settings: Mapping[str, Any], allow_existing: bool) -> Call[Topic]:
    asked = admin.TopicCreate(check_name(name, "topic"), _settings(settings), allow_existing)
    info: admin.TopicInfo = decode_response((yield Command.TOPIC_CREATE, asked))
    return Topic.of(info)


def update_topic(name: str, settings: Mapping[str, Any]) -> Call[Topic]:
    asked = admin.TopicUpdate(check_name(name, "topic", system=True), _settings(settings))
    info: admin.TopicInfo = decode_response((yield Command.TOPIC_UPDATE, asked))
    return Topic.of(info)


def place_topic(name: str, change: SlotChange) -> Call[Topic]:
    if bool(change.add) == bool(change.remove):
        raise InvalidRequest("say one shard to add= or one to remove=")
    asked = admin.TopicPlace(
        check_name(name, "topic"),
        change.add,
        change.remove,
        change.queues,
        is_drained=change.drain,
        is_forced=change.force,
    )
    info: admin.TopicInfo = decode_response((yield Command.TOPIC_PLACE, asked))
    return Topic.of(info)


def delete_topic(name: str) -> Call[None]:
    decode_response((yield Command.TOPIC_DELETE, admin.TopicDelete(check_name(name, "topic", system=True))))


def topics(prefix: str, system: bool) -> Call[list[Topic]]:
    found: list[Topic] = []
    after = ""
    while True:
        reply: admin.TopicListReply = decode_response(
            (yield Command.TOPIC_LIST, admin.TopicList(prefix, after, system=system))
        )
        found += map(Topic.of, reply.topics)
        if not reply.more or not reply.topics:
            return found
        after = reply.topics[-1].topic


def topic(name: str) -> Call[Topic]:
    reply: admin.TopicDescribeReply = decode_response(
        (yield Command.TOPIC_DESCRIBE, admin.TopicDescribe(check_name(name, "topic", system=True)))
    )
    return Topic.of(reply.info, reply.groups)


# --- groups -----------------------------------------------------------------------------------------------------------


def groups(topic: str) -> Call[list[GroupReport]]:
    found: list[GroupReport] = []
    after = ""
    while True:
        reply: admin.GroupListReply = decode_response((yield Command.GROUP_LIST, admin.GroupList(topic, after)))
        found += map(GroupReport.of, reply.groups)
        if not reply.more or not reply.groups:
            return found
        after = reply.groups[-1].group


def group(name: str) -> Call[GroupReport]:
    asked = admin.GroupDescribe(check_name(name, "group", system=True))
    reply: admin.GroupDescribeReply = decode_response((yield Command.GROUP_DESCRIBE, asked))
    return GroupReport.of(reply.info, reply.members)


def create_group(name: str, topic: str) -> Call[None]:
    asked = admin.GroupCreate(check_name(name, "group"), check_name(topic, "topic", system=True))
    decode_response((yield Command.GROUP_CREATE, asked))


def delete_group(name: str, topic: str) -> Call[None]:
    asked = admin.GroupDelete(check_name(name, "group", system=True), topic)
    decode_response((yield Command.GROUP_DELETE, asked))


def lag(topic: str, group: str) -> Call[Lag]:
    check_name(group, "group", system=True)
    if topic != "":  # which is all of them
        check_name(topic, "topic", system=True)
    reply = decode_response((yield Command.POSITION, Position(group, topic)))
    queues = tuple(QueueLag.of(position) for position in reply.positions)
    if topic and not queues:
        raise UnknownGroup(
            f"group {group!r} has no position in topic {topic!r}: check the name against the list of groups",
            group=group,
            topic=topic,
        )
    return Lag(group, sum(queue.lag for queue in queues), queues, sum(queue.retrying for queue in queues))


def reset(topic: str, group: str, to: When, queue: int | None, dry_run: bool) -> Call[list[Move]]:
    check_name(topic, "topic", system=True)
    asked = Seek(topic, check_name(group, "group", system=True), parse_point(to), _queue(queue), dry_run=dry_run)
    reply = decode_response((yield Command.SEEK, asked))
    return [Move(move.queue, move.before, move.after) for move in reply.moves]


# --- messages ---------------------------------------------------------------------------------------------------------


def _queue(queue: int | None) -> int:
    """A queue as the wire has it; None is all of them."""
    return ANY_QUEUE if queue is None else check_whole("queue", queue, 0, QUEUES_MAX - 1)


def _records(frame: Frame, count: int) -> list[RecordView]:
    """The records of an answer, with a placeholder for each that cannot be read."""
    lengths, data = unpack_records(frame.body, count)
    sizes = np.asarray(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    corrupt = find_corrupt(data, starts, sizes)
    views = []
    for index, (at, length) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        why = corrupt.get(index)
        raw = data[at : at + length]
        views.append(RecordView(raw if why is None else placeholder(bytes(raw), why)))
    return views


def find(topic: str, key: str | None, id: MessageId | str | None, limit: int) -> Call[list[StoredMessage]]:
    if (key is None) == (id is None):
        raise InvalidRequest("find takes key= or id=: give exactly one of them")
    if key is not None and not topic:
        raise InvalidRequest("find by key= searches one topic: give topic=")
    if key is not None and not isinstance(key, str):
        raise InvalidSettings(f"key is a text, not {key!r}")
    if topic:
        check_name(topic, "topic", system=True)
    if not check_whole("limit", limit, 0, _FOUND_MAX):
        return []
    wanted = None if id is None else parse_id(id)
    asked = Find(topic, key, None if wanted is None else wanted.to_bytes(), limit)
    frame = yield Command.FIND, asked
    reply = decode_response(frame)
    ids = [MessageId.from_bytes(found.message_id) if found.message_id else wanted for found in reply.found]
    return [StoredMessage.of(record, id) for record, id in zip(_records(frame, len(ids)), ids, strict=True)]


def peek(topic: str, queue: int | None, at: When, limit: int, tags: str) -> Call[list[StoredMessage]]:
    """Queue by queue. An answer has a few megabytes: what did not fit is asked for, as far as there was something."""
    check_tags(tags)
    check_name(topic, "topic", system=True)
    if not check_whole("limit", limit, 0, _LIMIT_MAX):
        return []
    asked = Peek(topic, _queue(queue), parse_point(at), min(limit, LIST_MAX), max_bytes=0, tags=tags)
    frame = yield Command.PEEK, asked
    reply: PeekReply = decode_response(frame)
    messages = _peeked(frame, reply)
    if len(messages) >= limit:
        return messages
    found: dict[int, list[StoredMessage]] = {}
    for message in messages:
        found.setdefault(message.queue, []).append(message)
    reached = {span.queue: span.end_offset for span in reply.spans}
    messages = []
    for row in (yield from offsets(topic, queue, at)):
        messages += found.get(row.queue, ())
        start = reached.get(row.queue, row.at)
        while start < row.next_offset and len(messages) < limit:
            more, end = yield from read(topic, row.queue, start, limit - len(messages), tags=tags)
            if end <= start:
                break
            messages += more
            start = end
    return messages[:limit]


def _peeked(frame: Frame, reply: PeekReply) -> list[StoredMessage]:
    """Messages with their ids; those that were moved carry theirs themselves, and an older broker tells none."""
    ids: list[MessageId | None] = []
    for span in reply.spans:
        mine: list[MessageId | None] = []
        for count, producer, first in span.ids:
            mine += [MessageId(producer, first + i) if producer else None for i in range(count)]
        ids += mine if len(mine) == span.count else [None] * span.count
    return [StoredMessage.of(record, id) for record, id in zip(_records(frame, len(ids)), ids, strict=True)]


def read(topic: str, queue: int, offset: int, limit: int, tags: str) -> Call[tuple[list[StoredMessage], int]]:
    check_tags(tags)
    check_name(topic, "topic", system=True)
    check_whole("queue", queue, 0, QUEUES_MAX - 1)
    point = Point(PointKind.OFFSET, check_whole("offset", offset, 0, _OFFSET_MAX))
    if not check_whole("limit", limit, 0, _LIMIT_MAX):
        return [], offset
    frame = yield Command.PEEK, Peek(topic, queue, point, min(limit, LIST_MAX), max_bytes=0, tags=tags)
    reply = decode_response(frame)
    return _peeked(frame, reply), reply.spans[-1].end_offset if reply.spans else offset


def offsets(topic: str, queue: int | None, at: When) -> Call[list[QueueRange]]:
    check_name(topic, "topic", system=True)
    reply = decode_response((yield Command.OFFSETS, Offsets(topic, _queue(queue), parse_point(at))))
    return [QueueRange(row.queue, row.first_offset, row.next_offset, row.at) for row in reply.queues]


def archived(journal_id: int, offset: int) -> Call[ArchiveReport]:
    reply: ArchivedReply = decode_response((yield Command.ARCHIVED, Archived(journal_id, offset)))
    return ArchiveReport(reply.journal_id, reply.archived, reply.first, reply.flushed, visible=reply.visible)


# --- the broker -------------------------------------------------------------------------------------------------------


def stats(prefixes: tuple[str, ...]) -> Call[dict[str, float]]:
    reply: sessions.StatsReply = decode_response((yield Command.STATS, sessions.Stats([*prefixes])))
    return reply.values


def warnings() -> Call[list[str]]:
    reply: sessions.StatsReply = decode_response((yield Command.STATS, sessions.Stats(["disk_"])))
    return reply.warnings


def cluster() -> Call[list[BrokerReport]]:
    reply: sessions.ClusterReply = decode_response((yield Command.CLUSTER, sessions.Cluster()))
    return [BrokerReport.of(info) for info in reply.brokers]


def drain(action: sessions.DrainAction, grace: float, reason: str) -> Call[DrainReport]:
    asked = sessions.Drain(action, round(grace * 1000), reason)
    reply: sessions.DrainReply = decode_response((yield Command.DRAIN, asked))
    return DrainReport.of(reply)


# --- key-value space --------------------------------------------------------------------------------------------------


def put(namespace: str, key: str, value: bytes | str, ttl: float | None) -> Call[None]:
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise InvalidSettings(f"a value is bytes or text, not {value!r}: encode it first")
    try:
        raw = value.encode() if isinstance(value, str) else bytes(value)
    except UnicodeEncodeError as error:
        raise InvalidSettings(f"a text value must be UTF-8: {error}") from None
    if len(raw) > VALUE_BYTES_MAX:
        raise InvalidSettings(f"a value has at most {VALUE_BYTES_MAX} bytes, not {len(raw)}: keep it elsewhere")
    if ttl is not None and not 0.001 <= ttl <= _TTL_SECONDS_MAX:
        raise InvalidSettings(f"ttl is in seconds, above 0 and at most ten years, or None, not {ttl!r}")
    asked = KeyPut(_checked(namespace, "namespace"), _checked(key, "key"), raw, 0 if ttl is None else round(ttl * 1000))
    decode_response((yield Command.KEY_PUT, asked))


def get(namespace: str, key: str) -> Call[bytes | None]:
    asked = KeyGet(_checked(namespace, "namespace"), _checked(key, "key"))
    reply: KeyReply = decode_response((yield Command.KEY_GET, asked))
    return None if reply.found is None else reply.found.value


def entries(namespace: str, prefix: str) -> Call[dict[str, bytes]]:
    found: dict[str, bytes] = {}
    after, more = "", True
    while more:
        asked = KeyList(_checked(namespace, "namespace"), prefix, after)
        reply: KeyListReply = decode_response((yield Command.KEY_LIST, asked))
        found |= {entry.key: entry.value for entry in reply.keys}
        more = reply.more and bool(reply.keys)
        after = reply.keys[-1].key if reply.keys else ""
    return found


def delete(namespace: str, key: str) -> Call[bool]:
    asked = KeyDelete(_checked(namespace, "namespace"), _checked(key, "key"))
    reply: KeyDeleteReply = decode_response((yield Command.KEY_DELETE, asked))
    return reply.was_there


def _checked(name: str, what: str) -> str:
    if not 0 < len(name) <= _NAME_MAX:
        raise InvalidName(f"a {what} is text of 1 to {_NAME_MAX} characters, not {name!r}")
    return name


# --- history of a message ---------------------------------------------------------------------------------------------


def trace(id: MessageId | str, group: str) -> Call[TraceReport]:
    wanted = parse_id(id)
    reply: TraceReply = decode_response((yield Command.TRACE, MessageQuery(wanted.to_bytes(), group)))
    steps = tuple(
        TraceStep(
            step.at_ms,
            step.what,
            step.topic,
            None if step.queue == _NO_QUEUE else step.queue,
            offset=None if step.queue == _NO_QUEUE else step.offset,
            group=step.group,
            member=step.member,
            attempt=step.attempt,
            note=step.note,
        )
        for step in reply.steps
    )
    return TraceReport(wanted, steps, tuple(reply.notes), reply.is_complete)


def why(id: MessageId | str, group: str) -> Call[WhyReport]:
    wanted = parse_id(id)
    reply: WhyReply = decode_response((yield Command.WHY, MessageQuery(wanted.to_bytes(), group)))
    groups = tuple(GroupReason(reason.group, reason.state, reason.text) for reason in reply.groups)
    return WhyReport(wanted, reply.state, reply.text, groups, is_complete=reply.is_complete)


# --- rate limits ------------------------------------------------------------------------------------------------------


def limits(topic: str, app: str) -> Call[list[LimitReport]]:
    reply: LimitReply = decode_response((yield Command.LIMIT_GET, LimitGet(topic, app)))
    return [_report(limit) for limit in reply.limits]


def set_limit(topic: str, app: str, messages: int | None, bytes: int | None, policy: str) -> Call[LimitReport | None]:
    if bool(topic) == bool(app):
        raise InvalidSettings("a rate limit is for a topic or for an app: give topic= or app=, one of them")
    for name, value in (("messages", messages), ("bytes", bytes)):
        if value is not None and (type(value) is not int or not 0 < value < 1 << 63):
            raise InvalidSettings(f"{name} must be a whole number a second, 1 or more, or None, not {value!r}")
    if policy not in _POLICIES:
        raise InvalidSettings(f"policy is 'refuse' or 'dead-letter', not {policy!r}")
    asked = LimitSet(LimitInfo(topic, app, messages, bytes, policy=_POLICIES[policy]))
    reply: LimitReply = decode_response((yield Command.LIMIT_SET, asked))
    return _report(reply.limits[0]) if reply.limits else None


def _report(limit: LimitInfo) -> LimitReport:
    policy = "dead-letter" if limit.policy == LimitPolicy.DEAD_LETTER else "refuse"
    return LimitReport(limit.topic, limit.app, limit.messages, limit.bytes, policy=policy)


# --- delayed messages and open transactions ---------------------------------------------------------------------------


def delays(topic: str, limit: int) -> Call[list[DelayReport]]:
    found: list[DelayReport] = []
    after = b""
    check_whole("limit", limit, 0, _LIMIT_MAX)
    while len(found) < limit:
        asked = DelayList(topic, after, min(_PAGE, limit - len(found)))
        reply: DelayListReply = decode_response((yield Command.DELAY_LIST, asked))
        found += [DelayReport(MessageId.from_bytes(d.message_id), d.topic, d.due_at_ms) for d in reply.delays]
        after = reply.next
        if not after:
            break
    return found


def cancel_delay(id: MessageId | str) -> Call[None]:
    decode_response((yield Command.DELAY_CANCEL, DelayCancel(parse_id(id).to_bytes())))


def transactions(topic: str, limit: int) -> Call[list[TransactionReport]]:
    found: list[TransactionReport] = []
    after = b""
    check_whole("limit", limit, 0, _LIMIT_MAX)
    while len(found) < limit:
        asked = TransactionList(topic, after, min(_PAGE, limit - len(found)))
        reply: TransactionListReply = decode_response((yield Command.TRANSACTION_LIST, asked))
        found += [
            TransactionReport(MessageId.from_bytes(t.message_id), t.topic, t.group, t.begun_at_ms, checks=t.checks)
            for t in reply.transactions
        ]
        after = reply.next
        if not after:
            break
    return found
