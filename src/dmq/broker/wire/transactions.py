"""TRANSACTION_END, TRANSACTION_JOIN, TRANSACTION_LIST."""

from __future__ import annotations

import struct
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.schedule.transactions import Ending
from dmq.broker.wire.session import RefusalTexts, Session
from dmq.errors import DMQError, InvalidRequest
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

__all__ = ["end_transactions", "join_transactions", "list_transactions"]

_PLACE: Final = struct.Struct(">Q16s")


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
