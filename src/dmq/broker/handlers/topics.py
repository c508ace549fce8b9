"""TOPIC_CREATE, TOPIC_UPDATE, TOPIC_DELETE, TOPIC_LIST, TOPIC_DESCRIBE."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.handlers.consume import end_subscription
from dmq.broker.session import Pusher, Session
from dmq.errors import NotAllowed, TopicExists, UnknownTopic
from dmq.protocol import admin
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.storage.state import Topic

__all__ = ["create_topic", "delete_topic", "describe_topic", "list_topics", "update_topic"]


def _info(broker: Broker, topic: Topic) -> admin.TopicInfo:
    bounds = [broker.store.bounds(topic.name, queue) for queue in range(topic.config.queues)]
    return admin.TopicInfo(topic.name, topic.config, topic.id, sum(following - first for first, following in bounds))


def create_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicCreate) -> None:
    broker.check_running()
    config = admin.changed_config(asked.settings)
    try:
        topic = broker.store.create_topic(asked.topic, config)
    except TopicExists:
        topic = broker.store.topic(asked.topic)
        if not asked.allow_existing or topic.config != config:
            raise
    session.answer(frame, _info(broker, topic))


def update_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicUpdate) -> None:
    broker.check_running()
    _own(asked.topic)
    config = admin.changed_config(asked.settings, broker.store.topic(asked.topic).config)
    topic = broker.store.update_topic(asked.topic, config)
    for consumption in [c for (name, _), c in broker.consumptions.items() if name == topic.name]:
        broker.consumption(topic, consumption.group.name)
        broker.pump_soon(consumption)
    session.answer(frame, _info(broker, topic))


def delete_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicDelete) -> None:
    broker.check_running()
    _own(asked.topic)
    broker.writer.catch_up()
    broker.store.delete_topic(asked.topic)
    error = UnknownTopic(f"topic {asked.topic!r} was deleted", topic=asked.topic)
    for consumption in [c for (name, _), c in broker.consumptions.items() if name == asked.topic]:
        for sink in consumption.sinks.values():
            if isinstance(sink, Pusher):
                end_subscription(sink, error)
    broker.forget_topic(asked.topic)
    session.answer(frame, Header())


def _own(name: str) -> None:
    if name.startswith("%"):
        raise NotAllowed(f"topic {name!r} is DMQ's own and cannot be changed")


def list_topics(broker: Broker, session: Session, frame: Frame, asked: admin.TopicList) -> None:
    chosen = [
        topic
        for topic in broker.store.topics()
        if topic.name.startswith(asked.prefix)
        and topic.name > asked.after
        and (asked.system or not topic.name.startswith("%"))
    ]
    page = [_info(broker, topic) for topic in chosen[: asked.limit]]
    session.answer(frame, admin.TopicListReply(page, len(chosen) > asked.limit))


def describe_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicDescribe) -> None:
    # A producer asks this before its first message, so a topic that is made on first use is made here.
    topic = broker.topic(asked.topic)
    session.answer(frame, admin.TopicDescribeReply(_info(broker, topic), broker.groups_of(topic)))
