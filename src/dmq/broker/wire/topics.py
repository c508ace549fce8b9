"""TOPIC_CREATE, TOPIC_UPDATE, TOPIC_DELETE, TOPIC_PLACE, TOPIC_SYNC, TOPIC_LIST, TOPIC_DESCRIBE."""

from __future__ import annotations

from functools import partial

import msgspec

from dmq.broker.broker import Broker
from dmq.broker.catalog.cluster_topics import SlotChange
from dmq.broker.runtime.tasks import Work
from dmq.broker.wire.session import Session
from dmq.errors import NotInCluster
from dmq.protocol import admin
from dmq.protocol.frame import Frame
from dmq.storage.state.state import Topic

__all__ = ["create_topic", "delete_topic", "describe_topic", "list_topics", "place_topic", "sync_topic", "update_topic"]


def _info(broker: Broker, topic: Topic) -> admin.TopicInfo:
    kept, stored = broker.catalog.amounts(topic)
    info = admin.TopicInfo(topic.name, topic.config, topic.id, kept, stored=stored)
    content = None if broker.cluster is None else broker.cluster.find(topic.name)
    if broker.cluster is None or content is None:
        return info
    shards = broker.cluster.access.view.shards
    slots = [
        admin.TopicSlot(shard, shards[shard].number, queues, shard not in content.removed)
        for shard, queues in content.slots
        if shard in shards
    ]
    return msgspec.structs.replace(
        info,
        incarnation=int(content.incarnation, 16),
        slots=slots,
        slots_version=content.slots_version,
        lacking=[*broker.cluster.lacking.get(topic.name, ())],
    )


def create_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicCreate) -> Work:
    config = admin.changed_config(asked.settings)
    made = broker.catalog.create(asked.topic, config, allow_existing=asked.allow_existing, by=session.who)
    return session.answer_with(frame, made, partial(_info, broker))


def update_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicUpdate) -> Work:
    changed = broker.catalog.update(asked.topic, partial(admin.changed_config, asked.settings), by=session.who)
    return session.answer_with(frame, changed, partial(_info, broker))


def delete_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicDelete) -> Work:
    return session.answer_with(frame, broker.catalog.delete(asked.topic, by=session.who))


async def sync_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicSync) -> None:
    if broker.cluster is None:
        raise NotInCluster("this broker is in no cluster: its journal alone says which topics there are")
    session.answer(frame, admin.TopicSyncReply(await broker.cluster.sync(asked.topic)))


async def place_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicPlace) -> None:
    if broker.cluster is None:
        raise NotInCluster("this broker is in no cluster: it has all queues of all topics")
    change = SlotChange(asked.add, asked.queues, asked.remove, is_drained=asked.is_drained, is_forced=asked.is_forced)
    session.answer(frame, _info(broker, await broker.cluster.place(asked.topic, change, by=session.who)))


def list_topics(broker: Broker, session: Session, frame: Frame, asked: admin.TopicList) -> None:
    page, more = broker.catalog.page(asked.prefix, asked.after, asked.limit, system=asked.system)
    session.answer(frame, admin.TopicListReply([_info(broker, topic) for topic in page], more))


def describe_topic(broker: Broker, session: Session, frame: Frame, asked: admin.TopicDescribe) -> None:
    # A producer asks this before its first message, so a topic that is made on first use is made here.
    topic = broker.catalog.described(asked.topic)
    groups = broker.channels.groups_of(topic) if topic.id else []
    session.answer(frame, admin.TopicDescribeReply(_info(broker, topic), groups))
