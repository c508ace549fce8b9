"""What waits for its time or its outcome: TRANSACTION_END, _JOIN and _LIST, DELAY_LIST and DELAY_CANCEL."""

from __future__ import annotations

import struct
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.schedule.transactions import Ending
from dmq.broker.wire.session import RefusalTexts, Session
from dmq.errors import DMQError, InvalidRequest
from dmq.model import MessageId
from dmq.protocol.admin import DelayCancel, DelayList, DelayListReply
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.protocol.produce import (
    TransactionEnd,
    TransactionEndReply,
    TransactionJoin,
    TransactionList,
    TransactionListReply,
    TransactionRefusal,
)

__all__ = ["cancel_delay", "end_transactions", "join_transactions", "list_delays", "list_transactions"]

_PLACE: Final = struct.Struct(">Q16s")
_DELAY_PLACE: Final = struct.Struct(">QQ")


def end_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionEnd) -> None:
    def done(ending: Ending, error: DMQError | None) -> None:
        if error is not None:
            session.refuse(frame, error)
            return
        texts = RefusalTexts()
        refused = [
            TransactionRefusal(int.from_bytes(message_id[8:], "big"), *texts.of(reason))
            for message_id, reason in ending.refused.items()
        ]
        session.answer(frame, TransactionEndReply(refused))

    broker.transactions.end(asked, done)


def join_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionJoin) -> None:
    """This connection answers checks of a producer group, or no longer does."""
    if asked.leaves:
        broker.transactions.leave(session, asked.group)
        session.producer_groups[asked.group] = max(0, session.producer_groups[asked.group] - 1)
    else:
        broker.transactions.join(session, asked.group)
        session.producer_groups[asked.group] += 1
    session.answer(frame, Header())


async def list_transactions(broker: Broker, session: Session, frame: Frame, asked: TransactionList) -> None:
    if asked.after and len(asked.after) != _PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    since_ms, message_id = _PLACE.unpack(asked.after) if asked.after else (0, b"")
    async with broker.reads.turn(session):
        infos, following = await broker.transactions.page((since_ms, message_id), asked.limit, asked.topic)
        session.answer(frame, TransactionListReply(infos, _PLACE.pack(*following) if following[1] else b""))


async def list_delays(broker: Broker, session: Session, frame: Frame, asked: DelayList) -> None:
    if asked.after and len(asked.after) != _DELAY_PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    due_ms, offset = _DELAY_PLACE.unpack(asked.after) if asked.after else (0, 0)
    async with broker.reads.turn(session):
        found, following = await broker.delays.pending((due_ms, offset), asked.limit, asked.topic)
        session.answer(frame, DelayListReply(found, _DELAY_PLACE.pack(*following) if any(following) else b""))


async def cancel_delay(broker: Broker, session: Session, frame: Frame, asked: DelayCancel) -> None:
    await broker.delays.cancel(MessageId.from_bytes(asked.message_id))
    session.answer(frame, Header())
