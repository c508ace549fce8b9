"""Administration of messages that wait: delayed ones, and those of open transactions. See `dmq.client.calls`.

What always holds: a listing is put together from pages, so it is as long as asked for and no page is larger than a
frame.
"""

from __future__ import annotations

from dmq.client.arguments import parse_id
from dmq.client.calls import Call
from dmq.client.reports import DelayReport, TransactionReport
from dmq.model import MessageId
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import DelayCancel, DelayList, DelayListReply
from dmq.protocol.producing import TransactionList, TransactionListReply

__all__ = ["cancel_delay", "delays", "transactions"]

_PAGE = 1000


def delays(topic: str, limit: int) -> Call[list[DelayReport]]:
    found: list[DelayReport] = []
    after = b""
    while len(found) < limit:
        asked = DelayList(topic, after, min(_PAGE, limit - len(found)))
        reply: DelayListReply = decode_response((yield Command.DELAY_LIST, asked))
        found += [DelayReport(MessageId.from_bytes(d.message_id), d.topic, d.due_at_ms) for d in reply.delays]
        after = reply.next
        if not after:
            break
    return found


def cancel_delay(id: MessageId | str) -> Call[None]:
    decode_response((yield Command.DELAY_CANCEL, DelayCancel(parse_id(id).to_bytes())))


def transactions(topic: str, limit: int) -> Call[list[TransactionReport]]:
    found: list[TransactionReport] = []
    after = b""
    while len(found) < limit:
        asked = TransactionList(topic, after, min(_PAGE, limit - len(found)))
        reply: TransactionListReply = decode_response((yield Command.TRANSACTION_LIST, asked))
        found += [
            TransactionReport(MessageId.from_bytes(t.message_id), t.topic, t.group, t.begun_at_ms, t.checks)
            for t in reply.transactions
        ]
        after = reply.next
        if not after:
            break
    return found
