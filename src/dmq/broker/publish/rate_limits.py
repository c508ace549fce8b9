"""Rate limits: how many messages and bytes a second producers may send, by topic and by app (D-16, J-11).

Each limit has a bucket that fills with time and holds one second's worth. A batch takes from the buckets of its topic
and of its app.

What always holds: over any time no more passes than the rate, one second's worth, and what is left of one batch, since
a batch passes whole; a batch that does not pass takes nothing from any bucket; a limit that is changed keeps what its
bucket holds, so changing it gives nothing away. Without limits `rules` is empty, and nothing else needs to be asked.

Rate limits of a cluster: the registry has them whole, and each shard puts its share in force.

A topic's limit stands in its entry, an app's in `/dmq/limit/<app>`. A shard's share of a topic's limit is that of its
queues among those that take messages; of an app's limit, one part of as many as there are open shards.

What always holds: the shares of all shards are the limit, each rounded up to at least 1 a second. Nothing of it is in
the journal: a leader that begins has read the registry.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Iterable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from dmq.broker.catalog.cluster_access import ClusterAccess
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import DMQError, InvalidRequest, InvalidSettings, LimitReached, RateLimited, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import check_name
from dmq.records import RecordView
from dmq.registry.cluster_view import ViewChange
from dmq.registry.contents import LimitContent, ShardState, TopicContent, TopicState
from dmq.registry.registry import needs_registry
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.queries import Queries
from dmq.storage.state.events import LimitPut
from dmq.storage.state.state import Topic
from dmq.token_bucket import TokenBucket

__all__ = ["LIMITS_MAX", "ClusterLimits", "Limit", "Limits", "Over", "RateLimits", "kept_limits"]

log = EventLog(__name__)

LIMITS_MAX: Final = 2000  # all of them fit into one answer
_ROUNDING_SECONDS: Final = 1e-6  # who comes when it was told to is not refused for the last digit of a sum


class Limit(NamedTuple):
    """How much a second a topic takes, or an app may send: the other name is empty. None means no limit."""

    topic: str = ""
    app: str = ""
    messages: int | None = None
    bytes: int | None = None
    is_dead_letter: bool = False  # what is over it becomes a dead letter; else it is refused

    def describe(self) -> str:
        """In words, for an error message."""
        amounts = [f"{n:,} {unit}" for n, unit in ((self.messages, "messages"), (self.bytes, "bytes")) if n is not None]
        whose = f"topic {self.topic!r} takes" if self.topic else f"app {self.app!r} may send"
        return f"{whose} {' and '.join(amounts)} a second"


class Over(NamedTuple):
    """What is over which limit, and when it would pass."""

    limit: Limit
    seconds: float
    is_dead_letter: bool

    @property
    def retry_after_ms(self) -> int:
        """Rounded up: who comes then is not too early."""
        return max(1, math.ceil(self.seconds * 1000))


class _Rule:
    """A limit and its buckets."""

    __slots__ = ("bytes", "limit", "messages")

    def __init__(self, limit: Limit, now: float) -> None:
        self.limit = limit
        self.messages = None if limit.messages is None else TokenBucket(limit.messages, now)
        self.bytes = None if limit.bytes is None else TokenBucket(limit.bytes, now)

    def take_over(self, before: _Rule, now: float) -> None:
        """Go on with what the buckets hold."""
        for mine, old in ((self.messages, before.messages), (self.bytes, before.bytes)):
            if mine is not None and old is not None:
                mine.take_over(old, now)

    def missing(self, count: int, size: int, now: float) -> float:
        """Seconds until so much could pass."""
        seconds = 0.0 if self.messages is None else self.messages.missing(count, now)
        return seconds if self.bytes is None else max(seconds, self.bytes.missing(size, now))

    def spend(self, count: int, size: int) -> None:
        if self.messages is not None:
            self.messages.spend(count)
        if self.bytes is not None:
            self.bytes.spend(size)


class Limits:
    """Limits and their buckets. Pure code."""

    def __init__(self) -> None:
        self.rules: dict[tuple[str, str], _Rule] = {}  # by topic and app, one of which is empty
        self.has_apps = False  # whether any app has a limit

    def replace(self, limits: Iterable[Limit], now: float) -> None:
        """Put these in force, and no others."""
        rules: dict[tuple[str, str], _Rule] = {}
        for limit in limits:
            rule = rules[limit.topic, limit.app] = _Rule(limit, now)
            before = self.rules.get((limit.topic, limit.app))
            if before is not None:
                rule.take_over(before, now)
        self.rules = rules
        self.has_apps = any(app for _, app in rules)

    def take(self, topic: str, app: str, count: int, size: int, now: float) -> Over | None:
        """Let messages pass, or say which limit they are over; where several are, the one that lasts longest.

        What one limit refuses does not become a dead letter because of another.
        """
        asked = [rule for key in ((topic, ""), ("", app)) if (rule := self.rules.get(key)) is not None]
        over = [(rule.missing(count, size, now), rule.limit) for rule in asked]
        over = [(seconds, limit) for seconds, limit in over if seconds > _ROUNDING_SECONDS]
        if over:
            seconds, limit = max(over, key=lambda pair: pair[0])
            return Over(limit, seconds, all(each.is_dead_letter for _, each in over))
        for rule in asked:
            rule.spend(count, size)
        return None


def kept_limits(queries: Queries) -> list[Limit]:
    """The limits that the journal has, by name."""
    found = []
    for said in queries.limits():
        topic = queries.topic_by_id(said.topic_id) if said.topic_id else None
        if topic is not None or not said.topic_id:
            name = "" if topic is None else topic.name
            found.append(Limit(name, said.app, said.messages, said.bytes, is_dead_letter=bool(said.policy)))
    return sorted(found)


class SharedLimits(Protocol):
    """Limits of which a share is in force here."""

    def whole(self) -> list[Limit]: ...

    def share(self, limit: Limit) -> Limit: ...

    async def put(self, limit: Limit) -> None: ...

    def concerns(self, change: ViewChange) -> bool: ...


class RateLimits:
    """The limits of one broker, as the journal has them.

    Attributes:
        limits: those in force.
        shared: those of the cluster, of which a share is in force here; None of a lone broker.
        limited: how many messages were over a limit.
    """

    def __init__(self, journal: Journal, runtime: Runtime) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._runtime = runtime
        self.limits = Limits()
        self.shared: SharedLimits | None = None
        self.limited = 0
        self._coming = 0  # that are being written
        self.reload()

    def kept(self) -> list[Limit]:
        """The limits there are, by name; in a cluster those of the registry before those of the journal."""
        own = kept_limits(self._queries)
        if self.shared is None:
            return own
        whole = self.shared.whole()
        known = {(one.topic, one.app) for one in whole}
        return sorted([*whole, *(one for one in own if (one.topic, one.app) not in known)])

    def reload(self) -> None:
        """Put the limits in force that there are; in a cluster, our share of them."""
        limits = self.kept()
        if self.shared is not None:
            whole = {*self.shared.whole()}
            limits = [self.shared.share(one) if one in whole else one for one in limits]
        self.limits.replace(limits, self._runtime.clock.wall.monotonic())

    def topic_changed(self, topic: Topic) -> None:
        """No limit depends on the settings of a topic."""

    def topic_deleted(self, name: str, error: DMQError) -> None:
        """The limit of the topic is gone with it."""
        self.reload()

    def over(self, topic: str, batch: Batch) -> tuple[RateLimited, bool] | None:
        """Let a batch pass its limits, or say which it is over, and whether it becomes a dead letter.

        Parameters:
            topic: where its messages go in the end.
            batch: as it would be stored; its app is that of its first message, since a batch is one producer's.
        """
        limits = self.limits
        app = RecordView(batch.data, 0, int(batch.lengths[0])).app if limits.has_apps else ""
        count = len(batch.lengths)
        over = limits.take(topic, app, count, len(batch.data), now=self._runtime.clock.wall.monotonic())
        if over is None or self._is_resent(batch, count):
            return None
        self.limited += count
        error = RateLimited(
            f"{over.limit.describe()}: try again in {over.retry_after_ms} ms, or raise the limit",
            retry_after_ms=over.retry_after_ms,
            topic=over.limit.topic,
            app=over.limit.app,
        )
        return error, over.is_dead_letter

    def _is_resent(self, batch: Batch, count: int) -> bool:
        """Whether it is stored already: a producer that sends it again is told so, and nothing is stored twice."""
        stored = self._queries.topic(batch.topic)
        return self._queries.is_resent(
            stored,
            batch.queue,
            batch.producer_id,
            batch.producer_epoch,
            first_sequence=batch.first_sequence,
            count=count,
        )

    def set(self, limit: Limit, by: str = "") -> Coroutine[Any, Any, list[Limit]]:
        """Put a limit in force, durably; without numbers it is taken away. Returns it, if there is one now.

        Raises:
            BrokerStopping, InvalidRequest, InvalidSettings, UnknownTopic, InvalidName, LimitReached: it cannot be.
        """
        self._runtime.readiness.check_running()
        if bool(limit.topic) == bool(limit.app):
            raise InvalidRequest("a limit is one of a topic or one of an app: give exactly one of them")
        if limit.messages == 0 or limit.bytes == 0:
            raise InvalidSettings(
                "a limit is at least 1 a second: to stop a topic from taking messages, switch producing off with "
                "'dmq topic update TOPIC --no-produce'"
            )
        topic_id = 0
        if limit.topic:
            check_name(limit.topic, "topic")
            topic_id = 0 if self.shared is not None else self._queries.topic(limit.topic).id
        else:
            check_name(limit.app, "app")
        known = self.kept()
        name = (limit.topic, limit.app)
        is_new = name not in {(one.topic, one.app) for one in known}
        if is_new and len(known) + self._coming >= LIMITS_MAX:
            raise LimitReached(f"there are {len(known)} limits, and no more are kept: take some away first")

        self._coming += is_new

        async def change() -> list[Limit]:
            try:
                await self._put(limit, topic_id)
            finally:
                self._coming -= is_new
            self.reload()
            log.info(
                "limit removed" if limit.messages is None and limit.bytes is None else "limit changed",
                topic=limit.topic or None,
                app=limit.app or None,
                messages_per_second=limit.messages,
                bytes_per_second=limit.bytes,
                over="dead letter" if limit.is_dead_letter else "refused",
                by=by,
            )
            return [one for one in self.kept() if (one.topic, one.app) == name]

        return change()

    async def _put(self, limit: Limit, topic_id: int) -> None:
        if self.shared is not None:
            await self.shared.put(limit)
            found = self._queries.find_topic(limit.topic) if limit.topic else None
            topic_id = 0 if found is None else found.id
            if (limit.topic, limit.app) in {(one.topic, one.app) for one in kept_limits(self._queries)}:
                await self._writer.write([LimitPut(topic_id, limit.app)])  # of before it was in a cluster
            return
        put = LimitPut(topic_id, limit.app, limit.messages, limit.bytes, policy=int(limit.is_dead_letter))
        await self._writer.write([put])


_DEAD_LETTER: Final = "dead-letter"


class ClusterLimits:
    """The limits of one cluster, at one leader."""

    def __init__(self, access: ClusterAccess) -> None:
        self._view = access.view
        self._entries = access.entries
        self._shard = access.shard
        self._limited: frozenset[str] | set[str] = frozenset()  # topics that have a limit

    def whole(self) -> list[Limit]:
        """The limits of the cluster, by name."""
        found = [_limit(content, app=app) for app, content in self._view.limits.items()]
        for name, topic in self._view.topics.items():
            if topic.limits and topic.state is TopicState.OPEN:
                self._limited = self._limited | {name}
                found.append(_limit(msgspec.convert(topic.limits, LimitContent), topic=name))
        return sorted(limit for limit in found if limit.messages is not None or limit.bytes is not None)

    def concerns(self, change: ViewChange) -> bool:
        """Whether a limit, or our share of one, may have changed."""
        before, topics = self._limited, self._view.topics
        named = {name for name in change.topics if (found := topics.get(name)) is not None and found.limits}
        self._limited = (before - change.topics) | named
        return change.is_all or change.has_limits or change.has_shards or bool(named or before & change.topics)

    def share(self, limit: Limit) -> Limit:
        """What of a limit is in force here."""
        part = self._topic_part(limit.topic) if limit.topic else self._app_part()
        return limit._replace(
            messages=None if limit.messages is None else max(1, math.ceil(limit.messages * part)),
            bytes=None if limit.bytes is None else max(1, math.ceil(limit.bytes * part)),
        )

    def _topic_part(self, name: str) -> float:
        content = self._view.topics[name]
        queues = {shard: count for shard, count in content.slots if shard not in content.removed}
        return queues.get(self._shard, 0) / max(1, sum(queues.values()))

    def _app_part(self) -> float:
        return 1 / max(1, sum(record.state is ShardState.OPEN for record in self._view.shards.values()))

    async def put(self, limit: Limit) -> None:
        """Write a limit; without numbers it is taken away.

        Raises:
            UnknownTopic: there is no such topic.
            RegistryDown, WriteUnknown, Busy: as of `TopicEntries.rewrite`.
        """
        policy = _DEAD_LETTER if limit.is_dead_letter else ""
        content = LimitContent(messages=limit.messages or 0, bytes=limit.bytes or 0, policy=policy)
        is_gone = limit.messages is None and limit.bytes is None
        if limit.app:
            with needs_registry():
                await self._entries.put_limit(limit.app, None if is_gone else content)
            return

        def limited(topic: TopicContent | None) -> TopicContent:
            if topic is None or topic.state is not TopicState.OPEN:
                raise UnknownTopic(f"there is no topic {limit.topic!r}: create it first", topic=limit.topic)
            fields = {} if is_gone else {"messages": content.messages, "bytes": content.bytes, "policy": policy}
            return msgspec.structs.replace(topic, limits=fields)

        await self._entries.rewrite(limit.topic, limited)


def _limit(content: LimitContent, topic: str = "", app: str = "") -> Limit:
    is_dead_letter = content.policy == _DEAD_LETTER
    return Limit(topic, app, content.messages or None, content.bytes or None, is_dead_letter=is_dead_letter)
