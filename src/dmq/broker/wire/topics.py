"""TOPIC_CREATE, TOPIC_UPDATE, TOPIC_DELETE, TOPIC_LIST, TOPIC_DESCRIBE."""

from __future__ import annotations

import msgspec

from dmq.broker.broker import Broker, Work
from dmq.broker.retry.mover import checked_config, retry_topics
from dmq.broker.wire.consume import end_subscriptions
from dmq.broker.wire.session import Session
from dmq.errors import InvalidSettings, NotAllowed, TopicExists, UnknownTopic
from dmq.model import PRIORITIES, RESULT_PREFIX, SYSTEM_PREFIX, TopicConfig
from dmq.protocol import admin
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.storage.state.events import TopicDropped
from dmq.storage.state.state import Topic

__all__ = ["create_topic", "delete_topic", "describe_topic", "list_topics", "update_topic"]


def _info(broker: Broker, topic: Topic) -> admin.TopicInfo:
    bounds = [broker.store.queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
    return admin.TopicInfo(topic.name, topic.config, topic.id, sum(following - first for first, following in bounds))


def _with_priorities(config: TopicConfig, before: TopicConfig | None = None) -> TopicConfig:
    """Settings of a topic, with a queue for each priority if it has priorities (A-02).

    Parameters:
        before: what it has now.

    Raises:
        InvalidSettings: a topic that is there would have to move its messages.
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


def create_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicCreate) -> Work:
    broker.check_running()
    config = checked_config(_with_priorities(admin.changed_config(asked.settings)))
    change = broker.changes.begin(("topic", asked.topic))

    async def create() -> None:
        try:
            topic = await broker.create_topic(asked.topic, config)
        except TopicExists:
            topic = broker.store.queries.topic(asked.topic)
            if not asked.allow_existing or topic.config != config:
                raise
        finally:
            broker.changes.end(change)
        session.answer(frame, _info(broker, topic))

    return create()


def update_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicUpdate) -> Work:
    broker.check_running()
    _own(asked.topic)
    before = broker.store.queries.topic(asked.topic).config
    config = checked_config(_with_priorities(admin.changed_config(asked.settings, before), before))
    change = broker.changes.begin(("topic", asked.topic))

    async def update() -> None:
        try:
            await broker.write([broker.store.change(asked.topic, config)])
            topic = broker.store.queries.topic(asked.topic)
            for consumption in broker.consumptions_of(topic.name):
                broker.consumption(topic, consumption.group.name)
                broker.dividing.changed(consumption)
                broker.pump_soon(consumption)
        finally:
            broker.changes.end(change)
        session.answer(frame, _info(broker, topic))

    return update()


def delete_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicDelete) -> Work:
    broker.check_running()
    _own(asked.topic)
    topic = broker.store.queries.topic(asked.topic)
    results = RESULT_PREFIX + asked.topic
    broker.changes.check(("topic", results))
    change = broker.changes.begin(("topic", asked.topic))

    async def delete() -> None:
        try:
            kept = [topic, broker.store.queries.find_topic(results)]
            gone = [found for found in kept if found is not None]
            gone += [retry for found in gone for retry in retry_topics(broker.store.queries, topic_id=found.id)]
            await broker.write([TopicDropped(found.id) for found in gone])
            error = UnknownTopic(f"topic {asked.topic!r} was deleted", topic=asked.topic)
            for name in (asked.topic, results):
                for consumption in broker.consumptions_of(name):
                    end_subscriptions(consumption, error)
                broker.forget_topic(name)
            broker.load_limits()
        finally:
            broker.changes.end(change)
        session.answer(frame, Header())

    return delete()


def _own(name: str) -> None:
    if name.startswith(SYSTEM_PREFIX):
        raise NotAllowed(f"topic {name!r} is DMQ's own and cannot be changed")


def list_topics(broker: Broker, session: Session, frame: Frame, asked: admin.TopicList) -> None:
    chosen = [
        topic
        for topic in broker.store.queries.topics()
        if topic.name.startswith(asked.prefix)
        and topic.name > asked.after
        and (asked.system or not topic.name.startswith(SYSTEM_PREFIX))
    ]
    page = [_info(broker, topic) for topic in chosen[: asked.limit]]
    session.answer(frame, admin.TopicListReply(page, len(chosen) > asked.limit))


def describe_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicDescribe) -> None:
    # A producer asks this before its first message, so a topic that is made on first use is made here.
    topic = broker.topic(asked.topic)
    session.answer(frame, admin.TopicDescribeReply(_info(broker, topic), broker.groups_of(topic)))
