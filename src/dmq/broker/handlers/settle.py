"""SETTLE: ack, nack, reject, extend, release. What fails is moved by `dmq.broker.moves`."""

from __future__ import annotations

from dmq.broker.bitmap import Ranges
from dmq.broker.broadcast import broadcast_name
from dmq.broker.broker import Broker
from dmq.broker.consumption import Consumption
from dmq.broker.refusals import RefusalTexts
from dmq.broker.session import Session
from dmq.errors import BrokerStopping, DMQError, LeaseLost, UnknownGroup
from dmq.protocol.consuming import Outcome, Refusal, Settle, Settlement, SettleReply
from dmq.protocol.frame import Frame, Kind

__all__ = ["settle"]


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
    known = broker.store.groups()
    for name in (asked.group, alone):
        if name in known:
            return broker.consumption(broker.store.topic(asked.topic), name)
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
