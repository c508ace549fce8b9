"""One transaction of a producer: `async with producer.transaction("orders", body) as transaction`.

What always holds: the messages of a transaction are stored, and invisible, when the block begins; a transaction is
ended once; leaving the block well commits it, an exception rolls it back and goes on. A transaction that was never
ended is decided by a check.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Self, Unpack

from dmq.client.aio.waiter import TaskWaiter
from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.transaction_core import End, HalfOptions, Transactions
from dmq.errors import DMQError, InvalidRequest, TimedOut
from dmq.event_log import EventLog
from dmq.model import Body, MessageId
from dmq.protocol.produce import TransactionOutcome

# twin: blocking
# from dmq.client.connection.threads import FOREVER
# twin: end

__all__ = ["AioEndFuture", "AioTransaction"]

log = EventLog(__name__)

Prepare = Callable[..., Awaitable[tuple[SendBatch, int]]]


class AioEndFuture:
    # twin: async
    """The result of a commit or a rollback."""

    # twin: blocking
    # """The result of a commit or a rollback. As `concurrent.futures.Future`, without cancelling."""
    # twin: end

    __slots__ = ("_end",)

    def __init__(self, end: End) -> None:
        self._end = end

    async def result(self, timeout: float | None = None) -> None:
        """Wait until the transaction is ended.

        Raises:
            TimedOut: the broker has not answered yet; the request is still on its way.
            DMQError: why the transaction did not end as asked.
        """
        error = await self.exception(timeout)
        if error is not None:
            raise error

    async def exception(self, timeout: float | None = None) -> DMQError | None:
        """Wait until the transaction is ended; the error, or None if all went well."""
        if not await self._wait(timeout):
            raise TimedOut(
                f"the broker has not ended the transaction after {timeout:g} s; the request is still on its way, and "
                "a check decides if it never arrives"
            )
        return self._end.error

    # twin: async
    async def _wait(self, seconds: float | None) -> bool:
        waiter = TaskWaiter()
        self._end.add_waiter(waiter)
        return await waiter.wait(seconds)

    # twin: blocking
    # def _wait(self, seconds: float | None) -> bool:
    #     return self._end.wait(FOREVER if seconds is None else time.monotonic() + seconds)
    #
    # def done(self) -> bool:
    #     return self._end.is_done
    #
    # def add_done_callback(self, function: Callable[[EndFuture], Any]) -> None:
    #     """Have `function(self)` called at the end, or at once if the transaction is ended."""
    #     if not self._end.add_callback(lambda: function(self)):
    #         function(self)
    #
    # twin: end


class AioTransaction:
    """A transaction and its messages. Made by `AioProducer.transaction`.

    Parameters:
        prepare: stores one more half message; parameters as of `AioProducer.transaction`.
        first: the message that begins the transaction.
        timeout: how long a commit or rollback waits.
    """

    # twin: async
    def __init__(
        self,
        transactions: Transactions,
        prepare: Prepare,
        first: tuple[str, Body, HalfOptions],
        timeout: float | None,
    ) -> None:
        self._transactions = transactions
        self._prepare = prepare
        self._first = first
        self._halves: list[tuple[SendBatch, int]] = []  # empty until it is awaited or entered
        self._timeout = timeout
        self._end: End | None = None

    async def _begin(self) -> Self:
        if not self._halves:
            topic, body, options = self._first
            self._halves.append(await self._prepare(topic, body, **options))
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._begin().__await__()

    # twin: blocking
    # def __init__(
    #     self, transactions: Transactions, prepare: Prepare, first: tuple[SendBatch, int], timeout: float | None
    # ) -> None:
    #     self._transactions = transactions
    #     self._prepare = prepare
    #     self._halves = [first]
    #     self._timeout = timeout
    #     self._end: End | None = None
    #
    # twin: end
    @property
    def id(self) -> MessageId | None:
        """The id of its first message, which its consumers will see; None before that has left."""
        # twin: async
        if not self._halves:
            return None
        # twin: end
        batch, index = self._halves[0]
        return None if batch.first_sequence < 0 else MessageId(batch.producer_id, batch.first_sequence + index)

    @property
    def is_ended(self) -> bool:
        """Whether it was committed or rolled back, or is about to be."""
        return self._end is not None

    async def send(self, topic: str, body: Body, **options: Unpack[HalfOptions]) -> None:
        """Add a message: it becomes visible with the others, or not at all. Parameters as of
        `AioProducer.transaction`."""
        self._check_open()
        self._halves.append(await self._prepare(topic, body, first=self._halves[0], **options))

    async def commit(self, timeout: float | None = None) -> None:
        """Make its messages visible, all at once.

        Raises:
            TransactionOver: it was rolled back before.
            TimedOut: the broker has not answered; it is asked again, and a check decides if it never hears of it.
        """
        await self._finish(TransactionOutcome.COMMIT).result(self._timeout if timeout is None else timeout)

    async def rollback(self, timeout: float | None = None) -> None:
        """Drop its messages. Raises as `commit` does."""
        await self._finish(TransactionOutcome.ROLLBACK).result(self._timeout if timeout is None else timeout)

    # twin: blocking
    # def commit_async(self) -> EndFuture:
    #     """`commit` without waiting; also right after `transaction_async`."""
    #     return self._finish(TransactionOutcome.COMMIT)
    #
    # def rollback_async(self) -> EndFuture:
    #     """`rollback` without waiting."""
    #     return self._finish(TransactionOutcome.ROLLBACK)
    #
    # twin: end
    def _finish(self, outcome: TransactionOutcome) -> AioEndFuture:
        if self._end is None or self._end.outcome != outcome:
            self._check_open()
            if all(batch.is_done and batch.error is None for batch, _ in self._halves):
                self._end = self._transactions.end(self._halves, outcome)
            else:
                self._end = self._transactions.end_later(self._halves, outcome)
        return AioEndFuture(self._end)

    def _check_open(self) -> None:
        # twin: async
        if not self._halves:
            raise InvalidRequest("the transaction is not prepared yet: await it, or enter it with `async with`")
        # twin: end
        if self._end is not None:
            word = "committed" if self._end.outcome == TransactionOutcome.COMMIT else "rolled back"
            raise InvalidRequest(f"the transaction was {word} already: begin another one")

    async def __aenter__(self) -> Self:
        # twin: async
        await self._begin()
        # twin: end
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is not None:
            return
        if error is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except DMQError:
            # What went wrong in the block matters more; the broker will ask, or give the message up.
            log.warning("a transaction was not rolled back", once_for=(), exc_info=True, id=str(self.id))
