"""What there is beside messages: topics, groups, limits, and the key-value space.

TOPIC_CREATE, TOPIC_UPDATE, TOPIC_DELETE, TOPIC_PLACE, TOPIC_SYNC, TOPIC_LIST, TOPIC_DESCRIBE; SEEK, POSITION,
GROUP_CREATE, GROUP_DELETE, GROUP_LIST, GROUP_DESCRIBE; LIMIT_GET, LIMIT_SET; KEY_PUT, KEY_GET, KEY_LIST, KEY_DELETE.
"""

from __future__ import annotations

from functools import partial

import msgspec

from dmq.broker.broker import Broker
from dmq.broker.catalog.cluster_access import GroupChange
from dmq.broker.catalog.cluster_topics import SlotChange
from dmq.broker.publish.rate_limits import Limit
from dmq.broker.runtime.runtime import Work
from dmq.broker.wire.session import Session
from dmq.errors import NotInCluster
from dmq.protocol import admin, consume, key_values
from dmq.protocol.admin import LimitGet, LimitInfo, LimitPolicy, LimitReply, LimitSet
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.storage.state.state import Topic

__all__ = [
    "create_group",
    "create_topic",
    "delete_group",
    "delete_key",
    "delete_topic",
    "describe_group",
    "describe_topic",
    "get_key",
    "get_limits",
    "list_groups",
    "list_keys",
    "list_topics",
    "place_topic",
    "position",
    "put_key",
    "seek",
    "set_limit",
    "sync_topic",
    "update_topic",
]


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


def seek(broker: Broker, session: Session, frame: Frame, asked: consume.Seek) -> Work:
    return session.answer_with(frame, broker.groups.seek(asked, session.client_id, by=session.who), consume.SeekReply)


def position(broker: Broker, session: Session, frame: Frame, asked: consume.Position) -> None:
    session.answer(frame, consume.PositionReply(broker.groups.positions(asked.group, asked.topic)))


def create_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupCreate) -> Work | None:
    cluster = broker.cluster
    is_here = cluster is None or asked.is_local or broker.catalog.described(asked.topic).id > 0
    if is_here:
        broker.groups.create(asked.group, asked.topic)
    if cluster is not None and not asked.is_local:
        return session.answer_with(frame, cluster.groups.change(GroupChange(asked.group, asked.topic), [], None))
    session.answer(frame, Header())
    return None


def delete_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDelete) -> Work:
    cluster = broker.cluster
    if cluster is None or asked.is_local:
        return session.answer_with(frame, broker.groups.delete(asked.group, asked.topic, by=session.who))
    topics = [asked.topic] if asked.topic else [topic.name for topic in broker.channels.topics_of(asked.group)]
    local = _delete_here(broker, session, asked)
    change = GroupChange(asked.group, asked.topic, is_deleted=True)
    return session.answer_with(frame, cluster.groups.change(change, topics, local))


async def _delete_here(broker: Broker, session: Session, asked: admin.GroupDelete) -> None:
    deleting = await broker.changes.after(lambda: broker.groups.delete(asked.group, asked.topic, by=session.who))
    await deleting


def list_groups(broker: Broker, session: Session, frame: Frame, asked: admin.GroupList) -> None:
    page, more = broker.groups.page(asked.topic, asked.after, asked.limit)
    session.answer(frame, admin.GroupListReply(page, more))


def describe_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDescribe) -> None:
    members = broker.groups.members(asked.group)
    session.answer(frame, admin.GroupDescribeReply(broker.groups.info(asked.group), members))


async def put_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyPut) -> None:
    await (broker.cluster_keys or broker.keys).put(asked.namespace, asked.key, asked.value, asked.ttl_ms)
    session.answer(frame, Header())


async def get_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyGet) -> None:
    shared = broker.cluster_keys
    if shared is None:
        found = broker.keys.get(asked.namespace, asked.key)
    else:
        found = await shared.get(asked.namespace, asked.key)
    session.answer(frame, key_values.KeyReply(None if found is None else key_values.KeyInfo(*found)))


async def list_keys(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyList) -> None:
    shared, which = broker.cluster_keys, (asked.namespace, asked.prefix, asked.after, asked.limit)
    page, more = broker.keys.page(*which) if shared is None else await shared.page(*which)
    session.answer(frame, key_values.KeyListReply([key_values.KeyInfo(*entry) for entry in page], more))


async def delete_key(broker: Broker, session: Session, frame: Frame, asked: key_values.KeyDelete) -> None:
    keys = broker.cluster_keys or broker.keys
    session.answer(frame, key_values.KeyDeleteReply(await keys.delete(asked.namespace, asked.key)))


def get_limits(broker: Broker, session: Session, frame: Frame, asked: LimitGet) -> None:
    limits = [
        limit
        for limit in broker.limits.kept()
        if not (asked.topic or asked.app) or (limit.topic, limit.app) in ((asked.topic, ""), ("", asked.app))
    ]
    session.answer(frame, _limit_reply(limits))


def set_limit(broker: Broker, session: Session, frame: Frame, asked: LimitSet) -> Work:
    said = asked.limit
    is_dead_letter = said.policy == LimitPolicy.DEAD_LETTER
    limit = Limit(said.topic, said.app, said.messages, said.bytes, is_dead_letter=is_dead_letter)
    return session.answer_with(frame, broker.limits.set(limit, by=session.who), _limit_reply)


def _limit_reply(limits: list[Limit]) -> LimitReply:
    return LimitReply([_limit_info(limit) for limit in limits])


def _limit_info(limit: Limit) -> LimitInfo:
    policy = LimitPolicy.DEAD_LETTER if limit.is_dead_letter else LimitPolicy.REFUSE
    return LimitInfo(limit.topic, limit.app, limit.messages, limit.bytes, policy=policy)
