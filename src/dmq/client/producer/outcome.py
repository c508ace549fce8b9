"""What a call of a producer ends with: receipts, or the error that says what is known. Pure.

What always holds: a call that fails says how many of its messages are stored nevertheless; a send whose time is over
says whether the message may be stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmq.client.connection.threads import FOREVER
from dmq.client.producer.accumulator import Batch
from dmq.client.producer.future import Receipts
from dmq.client.producer.retry_policy import Retries
from dmq.client.producer.sender import Sender
from dmq.errors import DMQError

__all__ = ["receipts_of", "too_late"]


def receipts_of(parts: Sequence[tuple[Batch, Sequence[int]]], problem: DMQError | None, count: int) -> Receipts:
    """The receipts of a `send_many` of so many messages, from its batches and the indexes of their messages.

    Raises:
        DMQError: the problem if there is one, with `detail["stored"]` and, as of the call, `["stored_indexes"]`.
    """
    if problem is not None:
        stored = [index for batch, indexes in parts if batch.error is None and batch.is_done for index in indexes]
        detail = {**problem.detail, "stored": len(stored), "stored_indexes": stored}
        raise type(problem)(problem.message, **detail) from problem
    return Receipts(parts, count)


def too_late(sender: Sender, batch: Batch, *timeouts: float | None) -> DMQError:
    """What a send raises whose time, the shortest of these, is over."""
    patience = min(limit for limit in (*timeouts, FOREVER) if limit is not None)
    return Retries.too_late(sender.history(batch), batch.last_error, batch.sent_at is not None, patience)
