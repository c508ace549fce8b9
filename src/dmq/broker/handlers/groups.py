"""SEEK, POSITION, GROUP_CREATE, GROUP_DELETE, GROUP_LIST, GROUP_DESCRIBE."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.handlers.consume import point_offset
from dmq.broker.member import MemberState
from dmq.broker.session import Pusher, Session
from dmq.errors import UnknownGroup
from dmq.model import check_name
from dmq.protocol import admin, consuming
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.events import PositionDropped, PositionSet
from dmq.storage.state import Topic

__all__ = ["create_group", "delete_group", "describe_group", "list_groups", "position", "seek"]


def seek(broker: Broker, session: Session, frame: Frame, asked: consuming.Seek) -> None:
    """Move a group's position (J-12); a dry run only says what would happen."""
    topic = broker.store.topic(asked.topic)
    _known(broker, asked.group)
    consumption = broker.consumption(topic, asked.group)
    queues = range(topic.config.queues) if asked.queue == ANY_QUEUE else [asked.queue]
    moves = [
        consuming.QueueMove(queue, consumption.cursor(queue).floor, point_offset(broker, topic, queue, asked.to))
        for queue in queues
    ]
    if not asked.dry_run:
        broker.write_now([PositionSet(asked.group, topic.id, move.queue, move.after) for move in moves])
        for move in moves:
            consumption.cursor(move.queue).seek(move.after)
            consumption.selection.mark(move.queue)
        broker.pump_soon(consumption)
    session.answer(frame, consuming.SeekReply(moves))


def position(broker: Broker, session: Session, frame: Frame, asked: consuming.Position) -> None:
    topics = [broker.store.topic(asked.topic)] if asked.topic else broker.topics_of(asked.group)
    if not asked.topic:
        _known(broker, asked.group)
    rows = [row for topic in topics for row in _positions(broker, topic, asked.group)]
    session.answer(frame, consuming.PositionReply(rows))


def _positions(broker: Broker, topic: Topic, group: str) -> list[consuming.QueuePosition]:
    rows = []
    live = broker.consumptions.get((topic.name, group))
    for queue in range(topic.config.queues):
        first, following = broker.store.bounds(topic.name, queue)
        if live is not None:
            cursor = live.cursor(queue)
            place, handed_out, leased = cursor.position, cursor.next, cursor.out
        else:
            stored = broker.store.position(group, topic.name, queue)
            if stored is None:
                continue
            place, handed_out, leased = stored, stored.floor, 0
        settled = sum(end - start for start, end in place.ranges)
        floor = min(max(place.floor, first), following)
        rows.append(consuming.QueuePosition(topic.name, queue, first, following, floor, handed_out, settled, leased))
    return rows


def _known(broker: Broker, group: str) -> None:
    if not broker.topics_of(group) and group not in broker.store.groups():
        raise UnknownGroup(f"group {group!r} has never consumed here: check the name", group=group)


def create_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupCreate) -> None:
    check_name(asked.group, "group")
    topic = broker.topic(asked.topic)
    consumption = broker.consumption(topic, asked.group)
    broker.begin_group(consumption, lambda queue: broker.store.bounds(topic.name, queue)[0])
    session.answer(frame, Header())


def delete_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDelete) -> None:
    _known(broker, asked.group)
    topic_id = broker.store.topic(asked.topic).id if asked.topic else None
    broker.write_now([PositionDropped(asked.group, topic_id)])
    broker.forget_group(asked.group, asked.topic)
    session.answer(frame, Header())


def list_groups(broker: Broker, session: Session, frame: Frame, asked: admin.GroupList) -> None:
    names = broker.group_names() if not asked.topic else set(broker.groups_of(broker.store.topic(asked.topic)))
    chosen = sorted(name for name in names if name > asked.after)
    page = [_info(broker, name) for name in chosen[: asked.limit]]
    session.answer(frame, admin.GroupListReply(page, len(chosen) > asked.limit))


def _info(broker: Broker, group: str) -> admin.GroupInfo:
    topics = broker.topics_of(group)
    members = sum(
        len(broker.consumptions[topic.name, group].group.members)
        for topic in topics
        if (topic.name, group) in broker.consumptions
    )
    lag = sum(row.next_offset - row.floor - row.settled for topic in topics for row in _positions(broker, topic, group))
    return admin.GroupInfo(group, [topic.name for topic in topics], members, lag)


def describe_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDescribe) -> None:
    _known(broker, asked.group)
    members = []
    for (topic, group), consumption in broker.consumptions.items():
        if group != asked.group:
            continue
        for member in consumption.group.members.values():
            sink = consumption.sinks.get(member.name)
            address = sink.session.connection.address if isinstance(sink, Pusher) else ("", 0)
            members.append(
                admin.MemberInfo(
                    member.name,
                    topic,
                    f"{address[0]}:{address[1]}" if address[0] else "",
                    member.subscription.filter,
                    member.subscription.version,
                    member.messages_out,
                    member.state is MemberState.ACTIVE,
                )
            )
    session.answer(frame, admin.GroupDescribeReply(_info(broker, asked.group), members))
