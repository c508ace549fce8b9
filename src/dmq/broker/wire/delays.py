"""DELAY_LIST and DELAY_CANCEL."""

from __future__ import annotations

import struct
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.wire.session import Session
from dmq.errors import InvalidRequest
from dmq.model import MessageId
from dmq.protocol.admin import DelayCancel, DelayList, DelayListReply
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header

__all__ = ["cancel_delay", "list_delays"]

_PLACE: Final = struct.Struct(">QQ")


async def list_delays(broker: Broker, session: Session, frame: Frame, asked: DelayList) -> None:
    if asked.after and len(asked.after) != _PLACE.size:
        raise InvalidRequest("`after` is what `next` of the page before was")
    due_ms, offset = _PLACE.unpack(asked.after) if asked.after else (0, 0)
    async with broker.reads.turn(session):
        found, following = await broker.delays.pending((due_ms, offset), asked.limit, asked.topic)
        session.answer(frame, DelayListReply(found, _PLACE.pack(*following) if any(following) else b""))


async def cancel_delay(broker: Broker, session: Session, frame: Frame, asked: DelayCancel) -> None:
    await broker.delays.cancel(MessageId.from_bytes(asked.message_id))
    session.answer(frame, Header())
