"""SEEK, POSITION, GROUP_CREATE, GROUP_DELETE, GROUP_LIST, GROUP_DESCRIBE."""

from __future__ import annotations

from dmq.broker.broker import Broker, Work
from dmq.broker.catalog.catalog import begin_group
from dmq.broker.delivery.channel import Consumption
from dmq.broker.delivery.group import MemberState
from dmq.broker.retry.mover import retry_topics
from dmq.broker.wire.consume import end_subscriptions, point_offset
from dmq.broker.wire.session import Pusher, Session
from dmq.errors import InvalidRequest, UnknownGroup
from dmq.model import broadcast_name, check_name, parse_broadcast_name
from dmq.protocol import admin, consume
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.state.events import PositionDropped, PositionSet, TopicDropped
from dmq.storage.state.state import Topic

__all__ = ["create_group", "delete_group", "describe_group", "list_groups", "position", "seek"]


def seek(broker: Broker, session: Session, frame: Frame, asked: consume.Seek) -> Work:
    """Move a group's position (J-12); a dry run only says what would happen."""
    topic = broker.store.queries.topic(asked.topic)
    is_broadcast = bool(asked.flags & consume.SubscribeFlag.BROADCAST)
    group = _group(broker, session, asked.group, is_broadcast)
    queues = range(topic.config.queues) if asked.queue == ANY_QUEUE else [asked.queue]
    change = broker.changes.begin(("group", asked.group))

    async def move() -> None:
        try:
            places = await broker.reads.ask(lambda: [point_offset(broker, topic, q, asked.to) for q in queues])
            consumption = broker.consumption(broker.store.queries.topic(asked.topic), group)
            moves = [
                consume.QueueMove(queue, consumption.cursor(queue).floor, place)
                for queue, place in zip(queues, places, strict=True)
            ]
            if not asked.dry_run:
                await broker.write([PositionSet(group, topic.id, move.queue, move.after) for move in moves])
                _moved(broker, consumption, moves)
        finally:
            broker.changes.end(change)
        session.answer(frame, consume.SeekReply(moves))

    return move()


def _moved(broker: Broker, consumption: Consumption, moves: list[consume.QueueMove]) -> None:
    for move in moves:
        cursor = consumption.cursor(move.queue)
        cursor.seek(move.after)
        cursor.sought = broker.store.queries.sought(consumption.group.name, consumption.topic.id, move.queue)
        consumption.selection.mark(move.queue)
    for member in consumption.group.members.values():
        consumption.group.wake(member)  # what was out with it is so no more
    broker.pump_soon(consumption)


def _group(broker: Broker, session: Session, name: str, is_broadcast: bool) -> str:
    """What the positions are kept under that somebody means: the group's, or its own in a broadcast group."""
    known = broker.store.queries.groups()
    alone = broadcast_name(name, session.client_id)
    if is_broadcast or (name not in known and alone in known):
        _known(broker, alone)
        return alone
    if not broker.topics_of(name) and any(
        found is not None and found[0] == name for found in map(parse_broadcast_name, known)
    ):
        raise InvalidRequest(
            f"{name!r} is a broadcast group, in which every member has a place of its own: move a member with its own "
            "consumer.seek()",
            group=name,
        )
    _known(broker, name)
    return name


def position(broker: Broker, session: Session, frame: Frame, asked: consume.Position) -> None:
    topics = [broker.store.queries.topic(asked.topic)] if asked.topic else broker.topics_of(asked.group)
    if not asked.topic:
        _known(broker, asked.group)
    rows = [row for topic in topics for row in _positions(broker, topic, asked.group)]
    session.answer(frame, consume.PositionReply(rows))


def _positions(broker: Broker, topic: Topic, group: str) -> list[consume.QueuePosition]:
    rows = []
    live = broker.consumptions.get((topic.name, group))
    for queue in range(topic.config.queues):
        first, following = broker.store.queries.bounds(topic.name, queue)
        if live is not None:
            cursor = live.cursor(queue)
            place, handed_out, leased = cursor.position, cursor.next, cursor.out
        else:
            stored = broker.store.queries.position(group, topic.name, queue)
            if stored is None:
                continue
            place, handed_out, leased = stored, stored.floor, 0
        settled = sum(end - start for start, end in place.ranges)
        floor = min(max(place.floor, first), following)
        retrying = broker.store.queries.retrying(group, topic.id, queue)
        rows.append(
            consume.QueuePosition(
                topic.name, queue, first, following, floor, handed_out, settled, leased, retrying=retrying
            )
        )
    return rows


def _known(broker: Broker, group: str) -> None:
    if not broker.topics_of(group) and group not in broker.store.queries.groups():
        raise UnknownGroup(f"group {group!r} has never consumed here: check the name", group=group)


def create_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupCreate) -> None:
    broker.check_running()
    check_name(asked.group, "group")
    topic = broker.topic(asked.topic)
    begin_group(
        broker, topic, asked.group, asked.group, lambda queue: broker.store.queries.bounds(topic.name, queue)[0]
    )
    session.answer(frame, Header())


def delete_group(broker: Broker, session: Session, frame: Frame, asked: admin.GroupDelete) -> Work:
    _known(broker, asked.group)
    topic_id = broker.store.queries.topic(asked.topic).id if asked.topic else None
    change = broker.changes.begin(("group", asked.group))
    # At once, so that nothing the group does now is written behind its end.
    error = UnknownGroup(f"group {asked.group!r} was deleted", group=asked.group)
    for (topic, group), consumption in broker.consumptions.items():
        if group == asked.group and asked.topic in ("", topic):
            end_subscriptions(consumption, error)
    broker.forget_group(asked.group, asked.topic)

    async def delete() -> None:
        try:
            gone = retry_topics(broker.store.queries, group=asked.group, topic_id=topic_id)
            await broker.write([PositionDropped(asked.group, topic_id), *(TopicDropped(t.id) for t in gone)])
        finally:
            broker.changes.end(change)
        session.answer(frame, Header())

    return delete()


def list_groups(broker: Broker, session: Session, frame: Frame, asked: admin.GroupList) -> None:
    names = broker.group_names() if not asked.topic else set(broker.groups_of(broker.store.queries.topic(asked.topic)))
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
    rows = [row for topic in topics for row in _positions(broker, topic, group)]
    lag = sum(row.next_offset - row.floor - row.settled for row in rows)
    retrying = sum(row.retrying for row in rows)
    return admin.GroupInfo(group, [topic.name for topic in topics], members, lag, retrying)


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
