"""PRODUCE with due times, DELAY_LIST, DELAY_CANCEL."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.schedule.delays import DELAY_MAX_MS, schedule_queue
from dmq.broker.wire.rate_limits import check_can_produce, over_limit
from dmq.broker.wire.session import Session
from dmq.errors import DMQError, InvalidMessage, InvalidRequest, UnknownMessage
from dmq.model import SCHEDULE_TOPIC, SYSTEM_PREFIX, Durability, MessageId
from dmq.protocol import batch as batches
from dmq.protocol.admin import DelayCancel, DelayInfo, DelayList, DelayListReply
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply
from dmq.records import ANY_QUEUE
from dmq.records.columns import BatchRules, batch_rules, check_batch
from dmq.records.layout import COMPRESSED, ORDERED
from dmq.storage.delay.wheel import Delay
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.read.record_group import Gathered
from dmq.storage.state.events import DelaysDone, Event, pack_offsets

__all__ = ["cancel_delay", "delay_page", "list_delays", "produce_delayed", "store_aside", "taken_batch"]

_PLACE: Final = struct.Struct(">QQ")
_SCANNED_MAX: Final = 10_000
_PAGE: Final = 1000
_BATCH_BYTES: Final = 1024


@lru_cache(1024)
def _rules(topic: str, body_bytes_max: int) -> BatchRules:
    return batch_rules(topic, body_bytes_max=body_bytes_max, flags_allowed=COMPRESSED | ORDERED)


def taken_batch(broker: Broker, frame: Frame, asked: Produce, *, dues: bool) -> batches.Batch:
    """The batch of a PRODUCE whose messages do not go to their topic yet; that topic is there.

    Raises:
        InvalidRequest, InvalidMessage, UnknownTopic: it is not taken.
    """
    if asked.topic.startswith(SYSTEM_PREFIX):
        raise InvalidRequest("names that begin with % are DMQ's own: choose another topic")
    if asked.durability == Durability.CONSUMED:
        raise InvalidRequest("a delayed or prepared message is consumed later: ask for durability 'flushed'")
    check_can_produce(broker.topic(asked.topic))
    batch = batches.unpack_batch(frame.body, asked.count, asked.keys, dues)
    check_batch(batch.data, batch.lengths, _rules(asked.topic, broker.store.settings.body_bytes_max))
    return batch


def store_aside(
    broker: Broker,
    session: Session,
    frame: Frame,
    asked: Produce,
    batch: batches.Batch,
    topic: str,
    queue: int,
    on_stored: Callable[[], None] = lambda: None,
    before: Sequence[Event] = (),
) -> None:
    """Store a batch in a topic of our own, behind some events, and answer when it is as safe as asked.

    Raises:
        RateLimited: its topic or app is over its limit. Whatever the policy: a dead letter has neither due time nor
            transaction, and would come too early, or although it was rolled back.
    """
    stored = Batch(
        topic=topic,
        queue=queue,
        data=batch.data,
        lengths=batch.lengths,
        hash_index=batch.hash_index,
        hashes=batch.hashes,
        dues=batch.dues,
        producer_id=asked.producer_id,
        producer_epoch=asked.producer_epoch,
        first_sequence=asked.first_sequence,
        named=bool(asked.flags & ProduceFlag.NAMED),
        expiring=bool(asked.flags & ProduceFlag.EXPIRING),
        address=session.address16,
        port=session.port,
        received_at_ms=broker.clock.now_ms(),
    )

    if broker.limits.rules and (over := over_limit(broker, asked.topic, stored)) is not None:
        raise over[0]

    def done(placements: list[Placement], error: DMQError | None) -> None:
        if error is not None:
            broker.counters["errors"] += 1
            session.refuse(frame, error)
            return
        placement = placements[-1]
        if placement.duplicate:
            broker.counters["duplicates"] += 1
        else:
            broker.counters["messages_in"] += asked.count
            broker.counters["bytes_in"] += len(batch.data)
        on_stored()
        session.answer(frame, ProduceReply(ANY_QUEUE, 0, placement.unit_start, asked.durability, placement.duplicate))

    is_stored = asked.durability <= Durability.STORED
    wanted = Durability.STORED if is_stored else Durability.FLUSHED
    broker.writer.submit([*before, stored], wanted, done, size=len(batch.data) + _BATCH_BYTES)


def produce_delayed(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    """A batch whose messages wait in the schedule until they are due (R-10)."""
    batch = taken_batch(broker, frame, asked, dues=True)
    latest = int(max(batch.dues))
    if latest > broker.now_ms + DELAY_MAX_MS:
        raise InvalidMessage(
            f"a message of the batch is due at {latest} ms since 1970, over two years from now: choose an earlier time",
            due_ms=latest,
        )
    store_aside(broker, session, frame, asked, batch, SCHEDULE_TOPIC, schedule_queue(asked.producer_id, asked.queue))


# --- looking and taking back ------------------------------------------------------------------------------------------


def _target(part: Gathered, index: int) -> str:
    record = part.record(index)
    if not part.is_moved:
        return record.topic
    said = record.attributes
    return said.target_topic or said.original_topic or record.topic


async def list_delays(broker: Broker, session: Session, frame: Frame, asked: DelayList) -> None:
    """Pending messages in the order they are due; those that wait for a retry only where their topic is asked for."""
    if asked.after and len(asked.after) != _PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    at: tuple[int, ...] = _PLACE.unpack(asked.after) if asked.after else (0, 0)
    found: list[DelayInfo] = []
    scanned = 0
    is_last = False
    async with broker.reads.turn(session):
        while not is_last and len(found) < asked.limit and scanned < _SCANNED_MAX:
            wanted = min(_PAGE, asked.limit - len(found))
            page, infos = await broker.reads.ask(partial(delay_page, broker, at, wanted, asked.topic))
            is_last = len(page) < wanted
            scanned += len(page)
            found += infos
            if page:
                at = (page[-1].due_ms, page[-1].offset)
        session.answer(frame, DelayListReply(found, b"" if is_last else _PLACE.pack(*at)))


def delay_page(broker: Broker, after: tuple[int, ...], limit: int, topic: str) -> tuple[list[Delay], list[DelayInfo]]:
    """Pending records behind a place, and what there is to say of those that are for a topic, or for any user's."""
    page = broker.store.queries.delays_after(after[0], after[1], limit)
    parts, _ = broker.store.queries.gather([delay.offset for delay in page])
    infos: dict[int, DelayInfo] = {}
    dues = {delay.offset: delay.due_ms for delay in page}
    for part in parts:
        for index, offset in enumerate(part.offsets.tolist()):
            target = _target(part, index)
            if target == topic or (not topic and not target.startswith(SYSTEM_PREFIX)):
                infos[offset] = DelayInfo(part.message_id(index).to_bytes(), target, dues[offset], offset)
    return page, [infos[delay.offset] for delay in page if delay.offset in infos]


async def cancel_delay(broker: Broker, session: Session, frame: Frame, asked: DelayCancel) -> None:
    """Take back a message that is not due yet: written as done, and never delivered."""
    broker.check_running()
    store = broker.store
    message_id = MessageId.from_bytes(asked.message_id)
    offset = await broker.reads.ask(lambda: _claim(broker, message_id))
    if offset is None:
        raise UnknownMessage(
            f"no message {message_id} is waiting to be delivered: check the id; it may be delivered or cancelled",
            id=str(message_id),
        )
    try:
        await broker.write([DelaysDone(pack_offsets([offset]), "cancelled")])
    except BaseException:
        store.release_due([offset])
        raise
    broker.delays.cancelled += 1
    session.answer(frame, Header())


def _claim(broker: Broker, message_id: MessageId) -> int | None:
    """The journal offset of the pending record of a message, taken so that nobody else delivers it."""
    store = broker.store
    places = [found.journal_offset for found in store.queries.find(message_id=message_id, topic=SCHEDULE_TOPIC)]
    parts, _ = store.queries.gather(places)
    for part in reversed(parts):
        for index, offset in enumerate(part.offsets.tolist()):
            # What waits for a retry belongs to its group: cancelling it would lose the message for that group only.
            if (
                _target(part, index).startswith(SYSTEM_PREFIX)
                or not len(part.dues)
                or part.message_id(index) != message_id
            ):
                continue
            if store.claim_delay(int(part.dues[index]), offset):
                return int(offset)
    return None
