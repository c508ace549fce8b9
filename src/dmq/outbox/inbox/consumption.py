"""A message's consumption: what the inbox knows of it, and what a handler's end means. Pure code.

What always holds: a result is SUCCESS or ROLLBACK, or the message counts as not consumed; the same message has the same
send id however often it comes: the one its outbox gave it, or, if it came from no outbox, its message id.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from dmq.client.consumer.handler import Retry
from dmq.client.consumer.message import ReceivedMessage
from dmq.errors import InvalidMessage, InvalidRequest
from dmq.model import Message
from dmq.outbox.inbox.recorder import Earlier, Row
from dmq.outbox.sender.envelope import Result, pack_result, result_topic, unpack
from dmq.outbox.states import BusinessState

__all__ = [
    "REASON_CHARS_MAX",
    "Consumption",
    "Rollback",
    "check_active",
    "consumption_of",
    "cut",
    "result_message",
    "settled",
]

REASON_CHARS_MAX: Final = 4096


class Rollback(Exception):
    """Raised by a handler: the business refuses the message. What it did is undone, and the sender is told.

    Parameters:
        reason: in the business's own words, for the sender.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "refused")
        self.reason = cut(reason)


def cut(reason: str) -> str:
    """A reason as every database takes it."""
    return reason.replace("\0", "\u2400")[:REASON_CHARS_MAX]


class Consumption(msgspec.Struct, frozen=True):
    """One message on its way through the inbox."""

    row: Row
    result_to: str  # whom to tell; empty: nobody waits for a result
    attempt: int

    @property
    def is_strict(self) -> bool:
        return self.row.sequence is not None and self.row.business_id is not None

    @property
    def turn(self) -> tuple[str, str, str]:
        """What messages of one sequence have in common."""
        return self.row.group, self.row.topic, self.row.business_id or ""


def consumption_of(message: ReceivedMessage, consumer_id: str, now_ms: int) -> Consumption:
    """What the inbox needs to know of a message.

    Raises:
        InvalidMessage: it has neither a send id nor an id.
    """
    envelope = unpack(message)
    if envelope is not None:
        send_id, result_to, sequence = envelope.send_id, envelope.result_to, envelope.sequence
    elif message.id is not None:
        send_id, result_to, sequence = str(message.id), "", None
    else:
        raise InvalidMessage("the message has no id: the broker is too old for an inbox; upgrade it")
    row = Row(
        send_id, message.group, message.topic, message.business_id,
        sequence=sequence, consumer_id=consumer_id, at_ms=now_ms,
    )  # fmt: skip
    return Consumption(row, result_to, message.attempt)


def settled(state: Any) -> None:
    """Take what a handler returned: nothing more to do for SUCCESS.

    Raises:
        Rollback: the business refuses the message.
        Retry: it says UNKNOWN, or nothing.
        InvalidRequest: that is no result.
    """
    if state is BusinessState.SUCCESS:
        return
    if state is BusinessState.ROLLBACK:
        raise Rollback
    if state is None or state is BusinessState.UNKNOWN:
        raise Retry("the result is UNKNOWN: nothing was kept; return BusinessState.SUCCESS or BusinessState.ROLLBACK")
    raise InvalidRequest(f"a handler returns BusinessState.SUCCESS or BusinessState.ROLLBACK, not {state!r}")


class _Transaction(Protocol):
    @property
    def is_active(self) -> bool: ...


def check_active(transaction: _Transaction) -> None:
    """Refuse a handler that ended the transaction it was given.

    Raises:
        InvalidRequest: it committed or rolled back.
    """
    if not transaction.is_active:
        raise InvalidRequest(
            "the handler ended the session's transaction: leave commit and rollback to the inbox, and return ROLLBACK "
            "to undo what was done"
        )


def result_message(row: Row, result_to: str, earlier: Earlier) -> tuple[str, Message]:
    """The topic and the message that tell the sender what its message came to."""
    result = Result(
        send_id=row.send_id,
        topic=row.topic,
        group=row.group,
        state=earlier.state,
        consumer_id=earlier.consumer_id,
        at_ms=earlier.at_ms,
        reason=earlier.reason,
    )
    return result_topic(row.topic), pack_result(result, result_to)
