"""SEEK, POSITION, GROUP_CREATE, GROUP_DELETE, GROUP_LIST, GROUP_DESCRIBE."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.catalog.cluster_access import GroupChange
from dmq.broker.runtime.tasks import Work
from dmq.broker.wire.session import Session
from dmq.protocol import admin, consume
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header

__all__ = ["create_group", "delete_group", "describe_group", "list_groups", "position", "seek"]


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
