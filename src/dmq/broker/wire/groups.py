"""SEEK, POSITION, GROUP_CREATE, GROUP_DELETE, GROUP_LIST, GROUP_DESCRIBE."""

from __future__ import annotations

from dmq.broker.broker import Broker
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


def create_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupCreate) -> None:
    broker.groups.create(asked.group, asked.topic)
    session.answer(frame, Header())


def delete_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDelete) -> Work:
    return session.answer_with(frame, broker.groups.delete(asked.group, asked.topic, by=session.who))


def list_groups(broker: Broker, session: Session, frame: Frame, asked: admin.GroupList) -> None:
    page, more = broker.groups.page(asked.topic, asked.after, asked.limit)
    session.answer(frame, admin.GroupListReply(page, more))


def describe_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDescribe) -> None:
    members = broker.groups.members(asked.group)
    session.answer(frame, admin.GroupDescribeReply(broker.groups.info(asked.group), members))
