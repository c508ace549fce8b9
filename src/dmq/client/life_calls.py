"""Questions about one message: its life, and why it is not consumed. See `dmq.client.calls`."""

from __future__ import annotations

from dmq.client.arguments import parse_id
from dmq.client.calls import Call
from dmq.client.reports import GroupReason, TraceReport, TraceStep, WhyReport
from dmq.model import MessageId
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import MessageQuery
from dmq.protocol.life import TraceReply, WhyReply

__all__ = ["trace", "why"]

_NO_QUEUE = 255


def trace(id: MessageId | str, group: str) -> Call[TraceReport]:
    wanted = parse_id(id)
    reply: TraceReply = decode_response((yield Command.TRACE, MessageQuery(wanted.to_bytes(), group)))
    steps = tuple(
        TraceStep(
            step.at_ms,
            step.what,
            step.topic,
            None if step.queue == _NO_QUEUE else step.queue,
            None if step.queue == _NO_QUEUE else step.offset,
            step.group,
            step.member,
            step.attempt,
            step.note,
        )
        for step in reply.steps
    )
    return TraceReport(wanted, steps, tuple(reply.notes), reply.is_complete)


def why(id: MessageId | str, group: str) -> Call[WhyReport]:
    wanted = parse_id(id)
    reply: WhyReply = decode_response((yield Command.WHY, MessageQuery(wanted.to_bytes(), group)))
    groups = tuple(GroupReason(reason.group, reason.state, reason.text) for reason in reply.groups)
    return WhyReport(wanted, reply.state, reply.text, groups, reply.is_complete)
