"""PRODUCE of half messages, TRANSACTION_END, TRANSACTION_JOIN, TRANSACTION_LIST."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from heapq import nsmallest
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.schedule.delays import schedule_queue
from dmq.broker.schedule.transactions import COMMITTED, ROLLED_BACK, Ending, half_target
from dmq.broker.wire.delays import store_aside, taken_batch
from dmq.broker.wire.session import RefusalTexts, Session
from dmq.errors import DMQError, InvalidRequest, LimitReached, StaleEpoch
from dmq.model import HALF_TOPIC, check_name
from dmq.protocol.batch import Batch
from dmq.protocol.frame import Frame
from dmq.protocol.header import LIST_MAX, Header
from dmq.protocol.produce import (
    Produce,
    ProduceFlag,
    TransactionEnd,
    TransactionEndReply,
    TransactionInfo,
    TransactionJoin,
    TransactionList,
    TransactionListReply,
    TransactionOutcome,
    TransactionRefusal,
)
from dmq.records import RecordView
from dmq.storage.state.events import Event, TransactionGroup, TransactionsJoined

__all__ = ["end_transactions", "join_transactions", "list_transactions", "produce_half"]

_PLACE: Final = struct.Struct(">Q16s")
_ID: Final = struct.Struct(">QQ")


def produce_half(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    """A batch of prepared messages (R-09): kept apart, invisible, until each is committed or rolled back."""
    if asked.flags & ProduceFlag.DUES:
        raise InvalidRequest("a prepared message cannot be delayed: send it without a delay")
    check_name(asked.group, "producer group")
    batch = taken_batch(broker, frame, asked, dues=False)
    store = broker.store
    if store.queries.transaction_count + asked.count > store.settings.transactions_max:
        raise LimitReached(
            f"{store.queries.transaction_count} transactions are open, and store.transactions_max is "
            f"{store.settings.transactions_max}: end some, or raise it",
            limit=store.settings.transactions_max,
        )
    ids = [_ID.pack(asked.producer_id, asked.first_sequence + index) for index in range(asked.count)]
    queue = schedule_queue(asked.producer_id, asked.queue)
    before: list[Event] = []
    if store.queries.transaction_group(asked.producer_id) != asked.group:
        before.append(TransactionGroup(asked.producer_id, asked.group))
    if asked.flags & ProduceFlag.JOINED:
        before += _joined(asked, batch, ids)
    store_aside(
        broker,
        session,
        frame,
        asked,
        batch,
        HALF_TOPIC,
        queue,
        lambda: broker.transactions.opened(ids),
        before,
    )


def _joined(asked: Produce, batch: Batch, ids: list[bytes]) -> list[Event]:
    """What the records of a batch say about transactions that began before them."""
    pairs = []
    start = 0
    for message_id, length in zip(ids, batch.lengths, strict=True):
        first = RecordView(batch.data, start, start + int(length)).attributes.transaction
        start += int(length)
        if first is not None:
            pairs += [message_id, _ID.pack(asked.producer_id, first)]
    return [TransactionsJoined(b"".join(pairs))] if pairs else []


def end_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionEnd) -> None:
    broker.check_open()
    newest = broker.store.queries.producer_epoch(asked.producer_id)
    if newest is not None and asked.producer_epoch < newest:
        raise StaleEpoch(
            f"producer {asked.producer_id:016x} was replaced: epoch {newest} has written, and this end is of epoch "
            f"{asked.producer_epoch}; the new one, or a check, ends the transaction",
            producer_id=asked.producer_id,
            epoch=newest,
        )
    count = asked.count + sum(span.count for span in asked.others)
    if count > LIST_MAX:
        raise InvalidRequest(f"at most {LIST_MAX} transactions are ended at once, not {count}")

    def done(ending: Ending, error: DMQError | None) -> None:
        if error is not None:
            broker.counters["errors"] += 1
            session.refuse(frame, error)
            return
        texts = RefusalTexts()
        refused = [
            TransactionRefusal(_ID.unpack(message_id)[1], *texts.of(reason))
            for message_id, reason in ending.refused.items()
        ]
        session.answer(frame, TransactionEndReply(refused))

    outcome = COMMITTED if asked.outcome == TransactionOutcome.COMMIT else ROLLED_BACK
    broker.transactions.end(Ending([*_ids(asked)], outcome, done))


def _ids(asked: TransactionEnd) -> Iterator[bytes]:
    for first, count in ((asked.first_sequence, asked.count), *((s.first_sequence, s.count) for s in asked.others)):
        if first + count > 1 << 64:
            raise InvalidRequest("a sequence is below 2**64")
        for sequence in range(first, first + count):
            yield _ID.pack(asked.producer_id, sequence)


def join_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionJoin) -> None:
    """This connection answers checks of a producer group, or no longer does."""
    check_name(asked.group, "producer group")
    if asked.leaves:
        broker.transactions.leave(session, asked.group)
    else:
        broker.transactions.join(session, asked.group)
    session.answer(frame, Header())


async def list_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionList) -> None:
    """Open transactions, oldest first."""
    if asked.after and len(asked.after) != _PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    after = _PLACE.unpack(asked.after) if asked.after else (0, b"")
    async with broker.reads.turn(session):
        open_ones = broker.store.queries.transactions().items()
        keys = ((half.stored_at_ms, mid.to_bytes(), half.journal_offset, half.group) for mid, half in open_ones)
        page = nsmallest(asked.limit, (key for key in keys if key[:2] > after))
        parts, _ = await broker.reads.ask(lambda: broker.store.queries.gather([key[2] for key in page]))
        topics = {at: half_target(part, index) for part in parts for index, at in enumerate(part.offsets.tolist())}
        attempts = broker.transactions.times_asked
        infos = [
            TransactionInfo(message_id, topics[offset], group, begun_at_ms, attempts(message_id))
            for begun_at_ms, message_id, offset, group in page
            if offset in topics and asked.topic in ("", topics[offset])
        ]
        following = _PLACE.pack(*page[-1][:2]) if len(page) == asked.limit else b""
        session.answer(frame, TransactionListReply(infos, following))
