"""TRACE and WHY: what happened to one message, and why it is not consumed."""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.diagnostics import inquiry
from dmq.broker.wire.session import Session
from dmq.model import MessageId
from dmq.protocol import message_history as headers
from dmq.protocol.admin import MessageQuery
from dmq.protocol.frame import Frame

__all__ = ["trace", "why"]


async def trace(broker: Broker, session: Session, frame: Frame, asked: MessageQuery) -> None:
    async with broker.reads.turn(session):
        found = await inquiry.trace(broker, MessageId.from_bytes(asked.message_id), asked.group)
        steps = [headers.TraceStep(*step._replace(note=headers.shortened(step.note))) for step in found.steps]
        session.answer(frame, headers.TraceReply(steps, [*map(headers.shortened, found.notes)], found.is_complete))


async def why(broker: Broker, session: Session, frame: Frame, asked: MessageQuery) -> None:
    async with broker.reads.turn(session):
        found = await inquiry.why(broker, MessageId.from_bytes(asked.message_id), asked.group)
        groups = [
            headers.GroupReason(headers.shortened(reason.group, 255), reason.state, headers.shortened(reason.text))
            for reason in found.reasons
        ]
        text = headers.shortened(found.text, headers.TEXT_BYTES_MAX)
        session.answer(frame, headers.WhyReply(found.state, text, groups, found.is_complete))
