"""PULL, SUBSCRIBE, UNSUBSCRIBE, CREDIT, ASSIGN.

SETTLE: ack, nack, reject, extend, release. What fails is moved by `dmq.broker.retry.mover`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dmq.broker.broker import Broker
from dmq.broker.catalog.catalog import begin_group
from dmq.broker.delivery.bitmap import Ranges
from dmq.broker.delivery.channel import Consumption
from dmq.broker.delivery.group import Member, Subscription, must_keep, normalised
from dmq.broker.delivery.queue_selection import with_retries
from dmq.broker.delivery.waiters import Handed, WaitingPull
from dmq.broker.diagnostics.whereabouts import base
from dmq.broker.wire.session import Pusher, RefusalTexts, Session, wire_lease
from dmq.errors import (
    BrokerStopping,
    DMQError,
    InvalidRequest,
    LeaseLost,
    MissingClientId,
    SubscriptionSuperseded,
    UnknownGroup,
    UnknownTopic,
)
from dmq.model import broadcast_name, check_name
from dmq.protocol.batch import pack_records
from dmq.protocol.commands import Command, one_way_head
from dmq.protocol.consume import (
    Assign,
    Credit,
    LeaseRef,
    Outcome,
    Point,
    PointKind,
    Pull,
    PullReply,
    Refusal,
    Settle,
    Settlement,
    SettleReply,
    Subscribe,
    SubscribeFlag,
    SubscribeReply,
    SubscriptionEnded,
    Unsubscribe,
)
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.header import Header
from dmq.protocol.status import status_of
from dmq.records.attributes import ANY_QUEUE
from dmq.storage.state.events import SubscriptionPut
from dmq.storage.state.state import Topic

__all__ = ["assign", "credit", "end_subscriptions", "point_offset", "pull", "settle", "subscribe", "unsubscribe"]

log = logging.getLogger(__name__)


_PULL_BYTES = 4 << 20
_NO_PUSH = 0


def point_offset(broker: Broker, topic: Topic, queue: int, point: Point) -> int:
    """The queue offset a point means."""
    first, following = broker.store.queries.bounds(topic.name, queue)
    match point.kind:
        case PointKind.EARLIEST:
            return first
        case PointKind.LATEST:
            return following
        case PointKind.OFFSET:
            return min(max(point.value, first), following)
        case PointKind.TIME:
            return broker.store.queries.offset_since(topic.name, queue, point.value)
        case _:
            return broker.store.queries.offset_since(topic.name, queue, max(0, broker.clock.now_ms() - point.value))


def _join(
    broker: Broker, session: Session, asked: Pull | Subscribe, prefetch: int, prefetch_bytes: int
) -> tuple[Consumption, Member]:
    """Make the asker a member of its group."""
    broker.check_running()
    check_name(asked.group, "group")
    topic = broker.topic(asked.topic)
    is_broadcast = bool(asked.flags & SubscribeFlag.BROADCAST)
    name = session.member_name(asked.member)
    if is_broadcast and not asked.member and session.client_id.startswith(f"{session.app}-"):
        raise MissingClientId("a broadcast consumer needs a name that stays: pass client_id= to connect")
    group = broadcast_name(asked.group, name) if is_broadcast else asked.group
    begin_group(broker, topic, group, asked.group, lambda queue: point_offset(broker, topic, queue, asked.start_from))
    consumption = broker.consumption(topic, group)
    subscription = Subscription(
        normalised(asked.tags),
        asked.version,
        bool(asked.flags & SubscribeFlag.ORDERED),
        is_broadcast,
        asked.strategy if isinstance(asked, Subscribe) else "",
    )
    joined = consumption.group.join(name, subscription, prefetch, prefetch_bytes)
    held = consumption.group.subscription
    if must_keep(broker.store.queries.subscription(group, topic.id), held) and held is not None:
        broker.write_events([SubscriptionPut(group, topic.id, held.filter, held.version, held.is_ordered)])
    consumption.set_ordered(subscription.is_ordered, broker.now_ms)
    if asked.parallel:
        consumption.parallel = asked.parallel
        for cursor in consumption.cursors.values():
            cursor.parallel = asked.parallel
    consumption.max_attempts = asked.max_attempts
    if joined.is_resumed:
        for cursor in consumption.cursors.values():
            cursor.resume(joined.member)
    _supersede(broker, consumption, joined.superseded)
    return consumption, joined.member


def _supersede(broker: Broker, consumption: Consumption, members: list[Member]) -> None:
    for member in members:
        sink = consumption.sinks.pop(member.name, None)
        if isinstance(sink, Pusher):
            end_subscription(
                sink,
                SubscriptionSuperseded(
                    f"a newer version of group {consumption.group.name!r} has taken over: stop, or deploy anew"
                ),
            )


def _take_over(consumption: Consumption, member: Member, session: Session) -> None:
    """Somebody comes under a name that is in use: the one before is told, or it would wait for ever."""
    before = consumption.sinks.get(member.name)
    if isinstance(before, Pusher) and before.session is not session:
        before.session.pushers.pop(before.number, None)
        host, port = session.connection.address
        log.warning("consumer taken over", extra={"group": consumption.group.name, "member": member.name})
        end_subscription(
            before,
            SubscriptionSuperseded(
                f"another client, at {host}:{port}, consumes in group {consumption.group.name!r} as {member.name!r} "
                "now: give each client a client_id of its own, or none"
            ),
        )


def end_subscription(pusher: Pusher, error: DMQError) -> None:
    """Tell a member that it gets nothing more, and why."""
    status, header = status_of(error)
    pusher.session.connection.send(
        one_way_head(Command.SUBSCRIPTION_ENDED, SubscriptionEnded(pusher.number, status, header.message))
    )


def end_subscriptions(consumption: Consumption, error: DMQError) -> None:
    """Tell all members that get messages pushed."""
    for sink in consumption.sinks.values():
        if isinstance(sink, Pusher):
            end_subscription(sink, error)


def _check_queues(topic: Topic, queues: Iterable[int]) -> None:
    """Whoever asks for a queue that is not there would wait for ever."""
    for queue in queues:
        if queue >= topic.config.queues:
            raise UnknownTopic(f"topic {topic.name!r} has queues 0-{topic.config.queues - 1}, not {queue}")


def pull(broker: Broker, session: Session, frame: Frame, asked: Pull) -> None:
    """A batch now, or within the time the client is ready to wait (R-02)."""
    if asked.queue != ANY_QUEUE:
        _check_queues(broker.topic(asked.topic), [asked.queue])
    consumption, member = _pulling_member(broker, session, asked)
    lease_ms = asked.lease_ms or int(broker.settings.lease_seconds * 1000)

    def answer(handed: Handed | None) -> None:
        if handed is None:
            session.answer(frame, PullReply())
        else:
            lengths = pack_records(handed.lengths)
            session.answer(frame, PullReply([wire_lease(handed, lease_ms)]), lengths, *handed.pieces)

    now_ms = broker.now_ms
    waiting = WaitingPull(
        session,
        member,
        None if asked.queue == ANY_QUEUE else asked.queue,
        asked.max_messages,
        asked.max_bytes or _PULL_BYTES,
        lease_ms,
        now_ms + asked.wait_ms,
        answer,
    )
    if consumption.try_pull(waiting, now_ms):
        return
    if asked.wait_ms or consumption.is_looking:
        consumption.wait(waiting)
    else:
        answer(None)


def _pulling_member(broker: Broker, session: Session, asked: Pull) -> tuple[Consumption, Member]:
    """The member that pulls; it joins with its first pull."""
    found = broker.consumptions.get((asked.topic, asked.group))
    if found is not None and not asked.flags & SubscribeFlag.BROADCAST:
        member = found.group.members.get(session.member_name(asked.member))
        if (
            member is not None
            and (found, member) in session.pulling
            and member.may_pull
            and (found.group.subscription is not None and found.group.subscription.filter == normalised(asked.tags))
        ):
            broker.check_running()
            return found, member
    consumption, member = _join(broker, session, asked, _NO_PUSH, _NO_PUSH)
    session.pulling.add((consumption, member))
    return consumption, member


def subscribe(broker: Broker, session: Session, frame: Frame, asked: Subscribe) -> None:
    """Push from now on (D-12); sent again after a reconnect, it takes up where it was."""
    if asked.subscription in session.pushers:
        raise InvalidRequest(f"subscription {asked.subscription} is in use on this connection: choose another number")
    _check_queues(broker.topic(asked.topic), asked.queues)
    settings = broker.settings
    messages = asked.prefetch_messages or settings.prefetch_messages
    size = asked.prefetch_bytes or settings.prefetch_bytes
    lease_ms = asked.lease_ms or int(settings.lease_seconds * 1000)
    consumption, member = _join(broker, session, asked, messages, size)
    allowed = _bits(asked.queues) if asked.queues or asked.strategy else -1
    pusher = Pusher(session, asked.subscription, consumption, member, asked.batch or messages, lease_ms, allowed)
    session.pushers[asked.subscription] = pusher
    _take_over(consumption, member, session)
    consumption.sinks[member.name] = pusher
    lost = _take_stock(consumption, member, asked.holding, broker.now_ms)
    reply = SubscribeReply(
        asked.subscription, consumption.topic.config.queues, messages, size, lease_ms, settings.offline_delay_ms, lost
    )
    session.answer(frame, reply)
    consumption.group.subscribed(member, broker.now_ms, settings.offline_delay_ms)
    broker.dividing.changed(consumption)
    broker.pump_soon(consumption)


def _take_stock(consumption: Consumption, member: Member, holding: list[LeaseRef], now_ms: int) -> list[LeaseRef]:
    """Which leases a member thinks it has that it has not; what it has and does not think of is handed out again."""
    held = {(consumption.queue_of(ref.topic, ref.queue), ref.epoch, ref.lease) for ref in holding}
    mine = set()
    for queue, cursor in consumption.cursors.items():
        for lease in cursor.leases():
            if lease.holder is member:
                mine.add((queue, lease.epoch, lease.number))
                if (queue, lease.epoch, lease.number) not in held:
                    cursor.nack(lease.epoch, lease.number, None, now_ms, was_tried=False)
                    consumption.selection.mark(queue)
    return [ref for ref in holding if (consumption.queue_of(ref.topic, ref.queue), ref.epoch, ref.lease) not in mine]


def unsubscribe(broker: Broker, session: Session, frame: Frame, asked: Unsubscribe) -> None:
    pusher = session.pushers.pop(asked.subscription, None)
    if pusher is not None:
        consumption = pusher.consumption
        if consumption.sinks.get(pusher.member.name) is pusher:
            del consumption.sinks[pusher.member.name]
            member = consumption.group.leave(pusher.member.name)
            if member is not None and asked.release:
                consumption.forget(member, broker.now_ms, is_clean=True)
        broker.dividing.changed(consumption)
        broker.pump_soon(consumption)
    elif asked.member:
        _stop_pulling(broker, session, asked)
    session.answer(frame, Header())


def _stop_pulling(broker: Broker, session: Session, asked: Unsubscribe) -> None:
    for consumption, member in [*session.pulling]:
        name = consumption.group.name
        if (consumption.topic.name, member.name) != (asked.topic, asked.member) or base(name) != asked.group:
            continue
        session.pulling.discard((consumption, member))
        consumption.end_pulls(session, member)
        if session.is_last_of(consumption, member) and consumption.group.leave(member.name) is not None:
            consumption.forget(member, broker.now_ms, is_clean=True)
            broker.dividing.changed(consumption)
            broker.pump_soon(consumption)


def _bits(queues: Iterable[int]) -> int:
    """What a subscription may be pushed that takes these queues."""
    return with_retries(sum(1 << queue for queue in set(queues)))


def assign(broker: Broker, session: Session, frame: Frame, asked: Assign) -> None:
    """A member takes other queues than before (R-08)."""
    pusher = session.pushers.get(asked.subscription)
    if pusher is not None:
        _check_queues(pusher.consumption.topic, asked.queues)
        pusher.allowed = _bits(asked.queues)
        pusher.consumption.group.wake(pusher.member)
        broker.pump_soon(pusher.consumption)
    session.answer(frame, Header())


def credit(broker: Broker, session: Session, frame: Frame, asked: Credit) -> None:
    pusher = session.pushers.get(asked.subscription)
    if pusher is not None:
        member = pusher.member
        member.prefetch = max(0, member.prefetch + asked.messages)
        member.prefetch_bytes = max(0, member.prefetch_bytes + asked.bytes)
        pusher.consumption.group.wake(member)
        broker.pump_soon(pusher.consumption)
    session.answer(frame, Header())


def settle(broker: Broker, session: Session, frame: Frame, asked: Settle) -> None:
    if broker.writer.is_closed:
        raise BrokerStopping("the broker has stopped: what is not settled yet is handed out again when it is back")
    consumption = _consumption(broker, session, asked)
    refused: list[Refusal] = []
    texts = RefusalTexts()
    for index, settlement in enumerate(asked.settlements):
        try:
            _apply(broker, consumption, settlement)
        except DMQError as error:
            refused.append(Refusal(index, *texts.of(error)))
    member = consumption.group.members.get(session.member_name(asked.member))
    if member is not None:
        consumption.group.wake(member)
    broker.pump_soon(consumption)
    if frame.kind == Kind.REQUEST or consumption.watches:
        broker.writer.hurry()  # somebody relies on it
    session.answer(frame, SettleReply(refused))


def _consumption(broker: Broker, session: Session, asked: Settle) -> Consumption:
    found = broker.consumptions.get((asked.topic, asked.group))
    if found is not None:
        return found
    alone = broadcast_name(asked.group, session.member_name(asked.member))
    found = broker.consumptions.get((asked.topic, alone))
    if found is not None:
        return found
    # After a restart acks of leases from before still count; a group that never was here has none.
    known = broker.store.queries.groups()
    for name in (asked.group, alone):
        if name in known:
            return broker.consumption(broker.store.queries.topic(asked.topic), name)
    raise UnknownGroup(f"group {asked.group!r} has nothing of topic {asked.topic!r}", group=asked.group)


def _apply(broker: Broker, consumption: Consumption, said: Settlement) -> None:
    queue = consumption.queue_of(said.topic, said.queue)
    if queue is None:
        raise LeaseLost(f"{said.topic or consumption.topic.name!r} has no queue {said.queue} of this group")
    cursor = consumption.cursor(queue)
    now_ms = broker.now_ms
    ranges: Ranges | None = [(first, first + count) for first, count in said.ranges] or None
    match said.outcome:
        case Outcome.ACK:
            consumption.settled(queue, cursor.ack(said.epoch, said.lease, ranges, now_ms))
        case Outcome.NACK:
            broker.moves.nack(consumption, queue, said.epoch, said.lease, ranges, said.delay_ms, said.reason)
        case Outcome.RELEASE:
            cursor.nack(said.epoch, said.lease, ranges, now_ms, max(0, said.delay_ms), was_tried=False)
            consumption.selection.mark(queue)
        case Outcome.EXTEND:
            lease_ms = said.delay_ms if said.delay_ms >= 0 else int(broker.settings.lease_seconds * 1000)
            cursor.extend(said.epoch, said.lease, now_ms, lease_ms)
        case Outcome.REJECT:
            broker.moves.reject(consumption, queue, said.epoch, said.lease, ranges, said.reason)
