"""One transaction of a blocking program: `with producer.transaction(…) as tx`.

What always holds: its messages are stored, and invisible, before it is handed out; it is ended once; leaving the `with`
block well commits it, an exception rolls it back and goes on. What was not ended at all is decided by a check.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from dmq.client.connection.threads import FOREVER
from dmq.client.producer.accumulator import Batch
from dmq.client.producer.transaction_core import End, Transactions
from dmq.errors import DMQError, InvalidRequest, TimedOut
from dmq.model import MessageId
from dmq.protocol.produce import TransactionOutcome

__all__ = ["EndFuture", "Transaction"]

log = logging.getLogger(__name__)

Prepare = Callable[..., tuple[Batch, int]]


class EndFuture:
    """What becomes of a commit or a rollback. As `concurrent.futures.Future`, without cancelling."""

    __slots__ = ("_end",)

    def __init__(self, end: End) -> None:
        self._end = end

    def done(self) -> bool:
        return self._end.is_done

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is done.

        Raises:
            TimedOut: it is not known yet; it is still on its way.
            DMQError: why the transaction did not end as asked.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> DMQError | None:
        """The error, or None once all went well."""
        if not self._end.wait(FOREVER if timeout is None else time.monotonic() + timeout):
            raise TimedOut(
                f"the broker has not ended the transaction after {timeout:g} s; it is asked to go on, and a check "
                "decides if it never hears of it"
            )
        return self._end.error

    def add_done_callback(self, function: Callable[[EndFuture], Any]) -> None:
        """Have `function(self)` called at the end, or at once if that has been."""
        if not self._end.add_callback(lambda: function(self)):
            function(self)


class Transaction:
    """See the module. Made by `Producer.transaction`.

    Parameters:
        prepare: stores one more half message; parameters as of `Producer.transaction`.
        half: the first one.
        timeout: how long a commit or rollback waits.
    """

    def __init__(
        self, transactions: Transactions, prepare: Prepare, half: tuple[Batch, int], timeout: float | None
    ) -> None:
        self._transactions = transactions
        self._prepare = prepare
        self._halves = [half]
        self._timeout = timeout
        self._end: End | None = None

    @property
    def id(self) -> MessageId | None:
        """The id of its first message, the one its consumers will see; None before it has left."""
        batch, index = self._halves[0]
        return None if batch.first_sequence < 0 else MessageId(batch.producer_id, batch.first_sequence + index)

    @property
    def is_ended(self) -> bool:
        """Whether it was committed or rolled back, or is being so."""
        return self._end is not None

    def send(self, topic: str, body: object, **options: Any) -> None:
        """Add a message: it becomes visible with the others, or not at all. Parameters as of `Producer.transaction`."""
        self._check_open()
        self._halves.append(self._prepare(topic, body, first=self._halves[0], **options))

    def commit(self, timeout: float | None = None) -> None:
        """Make its messages visible, all at once.

        Raises:
            TransactionOver: it was rolled back before.
            TimedOut: the broker has not answered; it is asked again, and a check decides if it never hears of it.
        """
        self.commit_async().result(self._timeout if timeout is None else timeout)

    def rollback(self, timeout: float | None = None) -> None:
        """Drop its messages. Raises as `commit` does."""
        self.rollback_async().result(self._timeout if timeout is None else timeout)

    def commit_async(self) -> EndFuture:
        """`commit` without waiting; also right after `transaction_async`."""
        return self._finish(TransactionOutcome.COMMIT)

    def rollback_async(self) -> EndFuture:
        """`rollback` without waiting."""
        return self._finish(TransactionOutcome.ROLLBACK)

    def _finish(self, outcome: TransactionOutcome) -> EndFuture:
        if self._end is not None and self._end.outcome == outcome:
            return EndFuture(self._end)
        self._check_open()
        if all(batch.is_done and batch.error is None for batch, _ in self._halves):
            self._end = self._transactions.end(self._halves, outcome)
        else:
            self._end = self._transactions.end_later(self._halves, outcome)
        return EndFuture(self._end)

    def _check_open(self) -> None:
        if self._end is not None:
            word = "committed" if self._end.outcome == TransactionOutcome.COMMIT else "rolled back"
            raise InvalidRequest(f"the transaction was {word} already: begin another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is not None:
            return
        if error is None:
            self.commit()
            return
        try:
            self.rollback()
        except DMQError:
            # What went wrong in the block matters more; the broker will ask, or give the message up.
            log.warning("a transaction was not rolled back", exc_info=True, extra={"id": str(self.id)})
