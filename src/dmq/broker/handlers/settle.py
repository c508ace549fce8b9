"""SETTLE: ack, nack, reject, extend, release."""

from __future__ import annotations

import logging
from typing import Final

from dmq.broker.bitmap import Ranges
from dmq.broker.broadcast import broadcast_name
from dmq.broker.broker import Broker
from dmq.broker.consumption import Consumption
from dmq.broker.cursor import Cursor
from dmq.broker.session import Session
from dmq.errors import DMQError, LeaseLost, TopicExists, UnknownGroup
from dmq.model import TopicConfig
from dmq.protocol.consuming import Outcome, Refusal, Settle, Settlement, SettleReply
from dmq.protocol.frame import Frame
from dmq.protocol.status import status_of
from dmq.records import id_hash, key_hash, moved_record
from dmq.storage import events as stored
from dmq.storage.appending import Batch
from dmq.storage.events import Event, Settled
from dmq.storage.reading import Found

__all__ = ["settle"]

log = logging.getLogger(__name__)

_DRAIN: Final = "%DRAIN%"
_AGAIN_MS: Final = 1000
DEAD: Final = stored.Outcome.DEAD


def settle(broker: Broker, session: Session, frame: Frame, asked: Settle) -> None:
    consumption = _consumption(broker, session, asked)
    refused: list[Refusal] = []
    for index, settlement in enumerate(asked.settlements):
        try:
            _apply(broker, consumption, settlement)
        except DMQError as error:
            status, header = status_of(error)
            refused.append(Refusal(index, status, header.message))
    member = consumption.group.members.get(session.member_name(asked.member))
    if member is not None:
        consumption.group.wake(member)
    broker.pump_soon(consumption)
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
    if not 0 <= said.queue < consumption.topic.config.queues:
        raise LeaseLost(f"topic {consumption.topic.name!r} has no queue {said.queue}")
    cursor = consumption.cursor(said.queue)
    now_ms = broker.now_ms
    ranges: Ranges | None = [(first, first + count) for first, count in said.ranges] or None
    match said.outcome:
        case Outcome.ACK:
            consumption.settled(said.queue, cursor.ack(said.epoch, said.lease, ranges, now_ms))
        case Outcome.NACK:
            cursor.nack(said.epoch, said.lease, ranges, now_ms, max(0, said.delay_ms))
            consumption.selection.mark(said.queue)
        case Outcome.RELEASE:
            cursor.nack(said.epoch, said.lease, ranges, now_ms, max(0, said.delay_ms), was_tried=False)
            consumption.selection.mark(said.queue)
        case Outcome.EXTEND:
            lease_ms = said.delay_ms if said.delay_ms >= 0 else int(broker.settings.lease_seconds * 1000)
            cursor.extend(said.epoch, said.lease, now_ms, lease_ms)
        case Outcome.REJECT:
            _reject(broker, consumption, cursor, said, ranges)


def _reject(broker: Broker, consumption: Consumption, cursor: Cursor, said: Settlement, ranges: Ranges | None) -> None:
    """Rejected messages go to the group's dead letters in the same unit that settles them.

    Until that is written they are neither settled nor out; if it cannot be written, they are handed out again.
    """
    name = f"%DLQ%{consumption.group.name}"
    try:
        broker.store.create_topic(name, TopicConfig(queues=1, carry_for=_DRAIN), system=True)
    except TopicExists:
        pass
    aside = cursor.set_aside(said.epoch, said.lease, ranges, DEAD, broker.now_ms, said.reason)
    if aside is None:
        return
    entry, events = aside

    def done(error: DMQError | None) -> None:
        now_ms = broker.now_ms
        if error is None:
            cursor.conclude(entry, now_ms)
            consumption.dead += moved
        else:
            log.error("dead letters could not be written", extra={"group": consumption.group.name, "error": str(error)})
            cursor.conclude(entry, now_ms, now_ms + _AGAIN_MS)
        consumption.selection.mark(said.queue)
        broker.pump_soon(consumption)

    moved = 0
    try:
        items = _dead_letters(broker, consumption, said.queue, name, events)
        moved = len(items) - len(events)
        broker.write_together(items, done)
    except DMQError as error:
        done(error)
        raise


def _dead_letters(
    broker: Broker, consumption: Consumption, queue: int, name: str, events: list[Settled]
) -> list[Batch | Event]:
    """The unit that settles messages and keeps their copies; what retention took meanwhile has none."""
    items: list[Batch | Event] = list(events)
    for event in events:
        for offset in range(event.start, event.start + event.count):
            if event.bitmap and not event.bitmap[(offset - event.start) // 8] >> ((offset - event.start) % 8) & 1:
                continue
            found = _found(broker, consumption, queue, offset) if event.outcome == DEAD else None
            if found is not None:
                items.append(_dead_letter(broker, consumption, found, name, event))
    return items


def _found(broker: Broker, consumption: Consumption, queue: int, offset: int) -> Found | None:
    where = broker.store.journal_offset(consumption.topic.name, queue, offset)
    return None if where is None else broker.store.record_at(where)


def _dead_letter(broker: Broker, consumption: Consumption, found: Found, topic: str, event: Settled) -> Batch:
    record = moved_record(
        found.record,
        topic,
        sent_at_ms=broker.clock.now_ms(),
        message_id=found.message_id,
        attempt=event.attempt,
        group=consumption.group.name,
        reason=event.error or "REJECTED",
    )
    hashes = [id_hash(found.message_id)]
    if found.record.key is not None:
        hashes.append(key_hash(found.record.key))
    return Batch(
        topic=topic,
        queue=0,
        data=record,
        lengths=[len(record)],
        hash_index=[0] * len(hashes),
        hashes=hashes,
        moved=True,
    )
