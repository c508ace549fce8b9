"""The catalog: topics by name, and the positions with which groups begin.

A topic or a group that is needed and missing is made, if the settings allow it. Making it is written like any change,
so the request that needs it is put off (`Later`) and served once it is durable.

What always holds: no more topics and groups are made than the settings allow; a group has durable positions in all
queues before any member joins; one change at a time goes on for one name.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from dmq.broker.catalog.changes import Change, Changes, Later
from dmq.broker.journal.journal import Journal
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import DMQError, InvalidSettings, LimitReached, NotAllowed, ServerError, TopicExists, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import (
    PRIORITIES,
    RESULT_PREFIX,
    SYSTEM_PREFIX,
    TopicConfig,
    check_name,
    check_target,
    retry_topic_parts,
    topic_of_results,
)
from dmq.protocol.cluster.route import SlotRoute, TopicRoute
from dmq.settings import BrokerSettings
from dmq.storage.queries import Queries
from dmq.storage.state.events import PositionSet, TopicDropped
from dmq.storage.state.state import Topic

__all__ = ["Catalog", "TopicAuthority", "TopicListener", "retry_topics"]

log = EventLog(__name__)


class TopicListener(Protocol):
    """Whom the catalog tells what became of a topic."""

    def topic_changed(self, topic: Topic) -> None:
        """It has other settings."""
        ...

    def topic_deleted(self, name: str, error: DMQError) -> None:
        """It is gone; `error` is what its users are told."""
        ...


class TopicAuthority(Protocol):
    """Who says which topics there are, where that is not the journal alone: the registry of a cluster."""

    def missing(self, name: str) -> DMQError | Later | None:
        """What is told of a topic that the journal has not; None if there is none at all."""
        ...

    def elsewhere(self, name: str) -> Topic | None:
        """A topic that has no slot in this shard."""
        ...

    def names(self) -> Iterable[str]:
        """All topics of the cluster."""
        ...

    def group_began(self, topic: str, group: str) -> None:
        """A group has its first positions in a topic."""
        ...

    def is_held(self, name: str) -> bool:
        """Whether ordered messages of a topic wait, because its slots are about to change."""
        ...

    async def create(self, name: str, config: TopicConfig, *, allow_existing: bool, by: str) -> Topic: ...

    async def update(self, name: str, alter: Callable[[TopicConfig], TopicConfig], *, by: str) -> Topic: ...

    async def delete(self, name: str, *, by: str) -> list[str]: ...

    def spread(self, name: str, shards: Iterable[str] | None = None) -> Coroutine[Any, Any, tuple[str, ...]]:
        """Wait until the other shards of a topic have a change; returns those that have not."""
        ...


class Catalog:
    """The topics of one broker.

    Parameters:
        check_config: raises InvalidSettings where other rooms cannot work with the settings of a topic.

    Attributes:
        listeners: told when a topic has changed or is gone.
        authority: of a cluster; None if the journal alone says which topics there are.
    """

    def __init__(
        self,
        journal: Journal,
        runtime: Runtime,
        settings: BrokerSettings,
        check_config: Callable[[TopicConfig], None] = lambda config: None,
    ) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._reads = journal.reads
        self._runtime = runtime
        self._settings = settings
        self._check_config = check_config
        self._round_robin = itertools.count(time.monotonic_ns() & 0xFFFF)
        self._topics_coming = 0  # that are being written: they count as well
        self._groups_coming = 0
        self.changes = Changes(settings.pulls_waiting_max, settings.waiting_bytes_max)
        self.listeners: list[TopicListener] = []
        self.authority: TopicAuthority | None = None

    # --- looking ----------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic.

        Raises:
            UnknownTopic: there is none.
            Later: it is being created, because the settings say so.
        """
        # Asked for every batch that is published: no call on the way.
        topic = self._queries.derived.state.topics.get(name)
        if topic is not None:
            return topic
        if self.authority is not None and (found := self.authority.missing(name)) is not None:
            raise found
        try:
            return self._queries.topic(name)
        except UnknownTopic:
            if name.startswith(RESULT_PREFIX):
                raise self._make_result_topic(name) from None
            if not self._settings.auto_create or name.startswith(SYSTEM_PREFIX):
                raise
        check_name(name, "topic")
        raise self._make(name, TopicConfig(queues=self._settings.auto_create_queues), system=False)

    def choose_queue(self, topic: Topic) -> int:
        """A queue for a message that may go to any."""
        return next(self._round_robin) % topic.config.queues

    def page(self, prefix: str, after: str, limit: int, *, system: bool) -> tuple[list[Topic], bool]:
        """Topics by name, and whether there are more.

        Parameters:
            system: also those of DMQ itself.
        """
        there = self._queries.topics()
        if self.authority is not None:
            here = {topic.name for topic in there}
            others = (self.authority.elsewhere(name) for name in self.authority.names() if name not in here)
            there = sorted([*there, *(one for one in others if one is not None)], key=lambda topic: topic.name)
        chosen = [
            topic
            for topic in there
            if topic.name.startswith(prefix)
            and topic.name > after
            and (system or not topic.name.startswith(SYSTEM_PREFIX))
        ]
        return chosen[:limit], len(chosen) > limit

    def described(self, name: str) -> Topic:
        """A topic for people, also one that has no slot in this shard; else as `topic`."""
        elsewhere = None
        if self.authority is not None and self.find(name) is None:
            elsewhere = self.authority.elsewhere(name)
        return elsewhere or self.topic(name)

    def route(self, name: str, shard: int, slots_version: int = 0) -> TopicRoute | None:
        """A topic that is in this shard alone, for clients; None if there is none."""
        topic = self._queries.find_topic(name)
        if topic is None:
            return None
        slots = [SlotRoute(shard, topic.config.queues)]
        incarnation = topic.incarnation or topic.id
        return TopicRoute(name, incarnation, slots, slots_version, is_priority=topic.config.priority)

    def find(self, name: str) -> Topic | None:
        """A topic that the journal has."""
        return self._queries.find_topic(name)

    def all(self) -> list[Topic]:
        """All topics of the journal."""
        return self._queries.topics()

    def amounts(self, topic: Topic) -> tuple[int, int]:
        """How many messages of a topic are kept, and how many were stored since it was created."""
        if not topic.id:  # it has no slot in this shard
            return 0, 0
        bounds = [self._queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
        return sum(following - first for first, following in bounds), sum(following for _, following in bounds)

    # --- changing ---------------------------------------------------------------------------------------------------

    def create(
        self, name: str, config: TopicConfig, *, allow_existing: bool = False, by: str = ""
    ) -> Coroutine[Any, Any, Topic]:
        """Make a topic; durable when the coroutine is over, and under way from this call on.

        Parameters:
            allow_existing: one that exists with the same settings is as good.
            by: who asks, for the log.

        Raises:
            BrokerStopping, InvalidSettings, Later: it cannot be made now.
        """
        self._runtime.readiness.check_running()
        config = _with_priorities(config)
        self._check_config(config)
        change = self.changes.begin(("topic", name))

        async def create() -> Topic:
            try:
                if self.authority is not None:
                    return await self.authority.create(name, config, allow_existing=allow_existing, by=by)
                return await self._create_unless_there(name, config, allow_existing=allow_existing, by=by)
            finally:
                self.changes.end(change)

        return self._spread(name, create())

    async def _create_unless_there(self, name: str, config: TopicConfig, *, allow_existing: bool, by: str) -> Topic:
        try:
            return await self._create(name, config, by=by)
        except TopicExists:
            topic = self._queries.topic(name)
            if not allow_existing:
                raise
            if topic.config != config:
                raise _otherwise(name, topic.config, config) from None
            return topic

    async def _spread(self, name: str, work: Coroutine[Any, Any, Topic]) -> Topic:
        """In a cluster, a change is over when the other shards have it; others may change the topic meanwhile."""
        topic = await work
        if self.authority is not None:
            await self.authority.spread(name)
        return topic

    def update(
        self, name: str, alter: Callable[[TopicConfig], TopicConfig], *, by: str = ""
    ) -> Coroutine[Any, Any, Topic]:
        """Change the settings of a topic; durable when the coroutine is over, and under way from this call on.

        Parameters:
            alter: gives the new settings for the old ones.

        Raises:
            BrokerStopping, NotAllowed, UnknownTopic, InvalidSettings, Later: they cannot be changed now.
        """
        self._runtime.readiness.check_running()
        _check_own(name)
        change = self.changes.begin(("topic", name))
        if self.authority is not None:
            return self._spread(name, self._update_in_cluster(self.authority, change, alter, by))
        try:
            before = self._queries.topic(name).config
            config = self._altered(alter, before)
        except DMQError:
            self.changes.end(change)
            raise

        async def update() -> Topic:
            try:
                await self._writer.write([self._store.change(name, config)])
                topic = self._queries.topic(name)
                for listener in self.listeners:
                    listener.topic_changed(topic)
                log.info("topic updated", topic=name, changed=_differences(before, config), by=by)
            finally:
                self.changes.end(change)
            return topic

        return update()

    def _altered(self, alter: Callable[[TopicConfig], TopicConfig], before: TopicConfig) -> TopicConfig:
        config = _with_priorities(alter(before), before)
        self._check_config(config)
        return config

    async def _update_in_cluster(
        self, authority: TopicAuthority, change: Change, alter: Callable[[TopicConfig], TopicConfig], by: str
    ) -> Topic:
        try:
            return await authority.update(change.name[1], partial(self._altered, alter), by=by)
        finally:
            self.changes.end(change)

    def delete(self, name: str, *, by: str = "") -> Coroutine[Any, Any, None]:
        """Take a topic away with its results topic and its retry topics; under way from this call on.

        Raises:
            BrokerStopping, NotAllowed, UnknownTopic, Later: it cannot be deleted now.
        """
        self._runtime.readiness.check_running()
        _check_own(name)
        authority = self.authority
        if authority is None:
            self._queries.topic(name)
        self.changes.check(("topic", RESULT_PREFIX + name))
        change = self.changes.begin(("topic", name))

        async def delete() -> None:
            try:
                shards = None if authority is None else await authority.delete(name, by=by)
                if authority is None:
                    await self.drop_slot(name, by=by)
            finally:
                self.changes.end(change)
            if authority is not None:
                await authority.spread(name, shards)

        return delete()

    async def drop_slot(self, name: str, *, by: str = "") -> None:
        """Take a topic out of the journal with its results topic and its retry topics; the caller holds the change."""
        topic, results = self._queries.topic(name), RESULT_PREFIX + name
        kept = [topic, self._queries.find_topic(results)]
        gone = [found for found in kept if found is not None]
        messages = self.amounts(topic)[0]
        gone += [retry for found in gone for retry in retry_topics(self._queries, topic_id=found.id)]
        await self._writer.write([TopicDropped(found.id) for found in gone])
        error = UnknownTopic(f"topic {name!r} was deleted", topic=name)
        for listener in self.listeners:
            listener.topic_deleted(name, error)
            listener.topic_deleted(results, error)
        log.info("topic deleted", topic=name, topic_id=topic.id, messages=messages, by=by)

    def groups_at(self, topic: Topic) -> list[str]:
        """The groups that have positions in a topic."""
        return self._queries.groups_at(topic.id)

    def consumed(self) -> Iterator[tuple[str, str]]:
        """All topics with the groups that have positions in them."""
        names = {topic.id: topic.name for topic in self.all()}
        for group in self._queries.groups():
            for topic_id in {place[0] for place in self._queries.positions_of(group)} & names.keys():
                yield names[topic_id], group

    async def put_slot(
        self, name: str, config: TopicConfig, slot: tuple[int, int, bool], groups: Sequence[str] = ()
    ) -> None:
        """Write a topic of a cluster into the journal, new or changed; the caller holds the change.

        Parameters:
            slot: the incarnation, the version of the slots, and whether ours takes no more messages.
            groups: those that the topic has elsewhere. They begin with the first message of a new slot.
        """
        before = self._queries.find_topic(name)
        event = self._store.creation(name, config) if before is None else self._store.change(name, config)
        incarnation, slots_version, is_removed = slot
        put = msgspec.structs.replace(
            event, incarnation=incarnation, slots_version=slots_version, is_removed=is_removed
        )
        begun = [PositionSet(group, put.topic_id, queue, 0) for group in groups for queue in range(config.queues)]
        await self._writer.write([put, *(begun if before is None else ())])
        topic = self._queries.topic(name)
        if before is not None:
            for listener in self.listeners:
                listener.topic_changed(topic)
        log.info(
            "topic created" if before is None else "topic updated",
            topic=name,
            topic_id=topic.id,
            queues=config.queues,
            slots_version=slots_version,
            removed=is_removed,
            by="cluster",
        )

    async def see_to_topic(self, name: str, config: TopicConfig) -> None:
        """See that a topic of DMQ itself exists and has as many queues as asked for."""
        while self.lacks(name, config):
            try:
                change = self.changes.begin(("topic", name))
            except Later as later:
                done = asyncio.get_running_loop().create_future()
                self.changes.wait(later.change, done.set_result, 0)
                await done
                continue
            try:
                if self._queries.find_topic(name) is not None:
                    await self._writer.write([self._store.change(name, config)])
                else:
                    await self._writer.write([self._store.creation(name, config, system=True)])
            finally:
                self.changes.end(change)

    def lacks(self, name: str, config: TopicConfig) -> bool:
        """Whether a topic is missing, or has fewer queues than asked for."""
        found = self._queries.find_topic(name)
        return found is None or found.config.queues < config.queues

    def _make_result_topic(self, name: str) -> Later:
        """Begin to create a results topic: it exists with its topic, and is made when it is first named (T-04)."""
        of = topic_of_results(check_target(name)) or ""
        self.changes.check(("topic", of))  # it may be about to go
        self.topic(of)
        return self._make(name, TopicConfig(queues=1), system=True)

    def _make(self, name: str, config: TopicConfig, *, system: bool) -> Later:
        self._runtime.readiness.check_running()
        authority = self.authority

        async def make() -> None:
            if authority is None or system:
                await self._create(name, config, system=system, by="auto_create")
            else:
                # The others hear of it by themselves, or make it as we do: who waits for them while they wait for us?
                await authority.create(name, config, allow_existing=True, by="auto_create")

        return self.work_on(name, make)

    def work_on(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> Later:
        """Begin a change of a topic; who needs the topic is served when it is done.

        Raises:
            Later, Busy: it cannot be begun now.
        """
        change = self.changes.begin(("topic", name))

        async def end() -> None:
            await work()
            self.changes.end(change)

        self._runtime.tasks.run(end(), lambda error: self._failed(change, error))
        return Later(change)

    @staticmethod
    def otherwise(name: str, there: TopicConfig, wanted: TopicConfig) -> TopicExists:
        """A topic exists, but not as it is wanted."""
        return _otherwise(name, there, wanted)

    async def _create(self, name: str, config: TopicConfig, *, system: bool = False, by: str = "") -> Topic:
        event = self._store.creation(name, config, system=system)
        count, limit = self._queries.topic_count, self._settings.topics_max
        if not system and count + self._topics_coming >= limit:
            raise LimitReached(
                f"this broker has {count} topics, and broker.topics_max allows no more: delete some, or raise the "
                "setting",
                limit=limit,
            )
        self._topics_coming += 1
        try:
            await self._writer.write([event])
        finally:
            self._topics_coming -= 1
        topic = self._queries.topic(name)
        tell = log.debug if system else log.info
        others = _differences(TopicConfig(queues=config.queues), config) or "default"
        tell("topic created", topic=name, topic_id=topic.id, queues=config.queues, settings=others, by=by)
        return topic

    # --- groups -----------------------------------------------------------------------------------------------------

    def begin_group(self, topic: Topic, group: str, name: str, offset: Callable[[int], int]) -> None:
        """See that a group has a position in every queue.

        Parameters:
            group: what its positions are kept under.
            name: what requests call it.
            offset: where it begins in a queue; may need the disk.

        Raises:
            Later: it gets its first positions now.
            LimitReached: there are too many groups.
        """
        queries = self._queries
        queues = [queue for queue in range(topic.config.queues) if queries.position(group, topic.name, queue) is None]
        if not queues:
            return
        count, limit = queries.group_count, self._settings.groups_max
        is_new, is_first = not queries.positions_of(group), len(queues) == topic.config.queues
        if is_new and count + self._groups_coming >= limit:
            raise LimitReached(
                f"this broker keeps {count} groups, and broker.groups_max allows no more: delete some, or raise the "
                "setting",
                limit=limit,
            )
        change = self.changes.begin(("group", name))
        self._groups_coming += is_new

        async def begin() -> None:
            try:
                # A group that has positions in the topic misses nothing of a queue that was added since.
                begin_at = offset if is_first else (lambda queue: queries.bounds(topic.name, queue)[0])
                offsets = await self._reads.ask(lambda: [begin_at(queue) for queue in queues])
                places = zip(queues, offsets, strict=True)
                await self._writer.write([PositionSet(group, topic.id, queue, place) for queue, place in places])
            finally:
                self._groups_coming -= is_new
            if is_first:
                lag = sum(queries.bounds(topic.name, queue)[1] for queue in queues) - sum(offsets)
                log.info("group created", topic=topic.name, group=group, queues=len(queues), lag=lag)
                if self.authority is not None:
                    self.authority.group_began(topic.name, group)
            self.changes.end(change)

        self._runtime.tasks.run(begin(), lambda error: self._failed(change, error))
        raise Later(change)

    def _failed(self, change: Change, error: BaseException) -> None:
        """Requests that waited for the change are refused with the reason."""
        told = error if isinstance(error, DMQError) else ServerError(f"{error}: the broker's log has more")
        self.changes.end(change, told)


def retry_topics(queries: Queries, *, group: str | None = None, topic_id: int | None = None) -> list[Topic]:
    """The retry topics of a group, of a topic, or of both."""
    found = []
    for topic in queries.topics():
        parts = retry_topic_parts(topic.name)
        if parts is not None and group in (None, parts[0]) and topic_id in (None, parts[1]):
            found.append(topic)
    return found


def _with_priorities(config: TopicConfig, before: TopicConfig | None = None) -> TopicConfig:
    """Settings of a topic, with a queue for each priority if it has priorities (A-02).

    Parameters:
        before: what it has now.

    Raises:
        InvalidSettings: a topic that exists would have to move its messages.
    """
    if before is None:
        return msgspec.structs.replace(config, queues=PRIORITIES) if config.priority else config
    if config.priority != before.priority:
        raise InvalidSettings(
            "whether a topic goes by priority is decided when it is created: make another one", keys=["priority"]
        )
    if config.priority and config.queues != before.queues:
        raise InvalidSettings(
            f"a topic that goes by priority has {before.queues} queues, one for each: leave queues out", keys=["queues"]
        )
    return config


def _check_own(name: str) -> None:
    if name.startswith(SYSTEM_PREFIX):
        raise NotAllowed(f"topic {name!r} is DMQ's own and cannot be changed")


def _differences(before: TopicConfig, after: TopicConfig) -> str:
    """What is set otherwise, for the log: `queues=4 ttl_ms=none`."""
    return " ".join(
        f"{name}={str(getattr(after, name)).lower()}"
        for name in TopicConfig.__struct_fields__
        if getattr(before, name) != getattr(after, name)
    )


def _otherwise(name: str, there: TopicConfig, wanted: TopicConfig) -> TopicExists:
    """A topic exists, but not as it is wanted."""
    differ = [field for field in TopicConfig.__struct_fields__ if getattr(there, field) != getattr(wanted, field)]
    told = [
        f"{field.removesuffix('_ms')} is {_shown(field, getattr(there, field))}, "
        f"not {_shown(field, getattr(wanted, field))}"
        for field in differ
    ]
    return TopicExists(
        f"topic {name!r} already exists with other settings: {', '.join(told)}; ask for those it has, or update it",
        topic=name,
        differ=differ,
    )


def _shown(field: str, value: Any) -> str:
    if value is None:
        return "none"
    if field.endswith("_ms"):
        return f"{value / 1000:g} s"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
    return str(value)
