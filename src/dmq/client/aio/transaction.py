"""One transaction of an asyncio program: `async with producer.transaction(…) as tx`.

What always holds: as in `dmq.client.producer.transaction`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Self

from dmq.client.producer.accumulator import Batch
from dmq.client.producer.transaction_core import End, Transactions
from dmq.errors import DMQError, InvalidRequest, TimedOut
from dmq.model import MessageId
from dmq.protocol.produce import TransactionOutcome

__all__ = ["AioTransaction"]

log = logging.getLogger(__name__)

Prepare = Callable[..., Awaitable[tuple[Batch, int]]]


class _Event:
    """A task that waits for an end."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float | None) -> None:
        async with asyncio.timeout(seconds):
            await self._future


class AioTransaction:
    """See the module. Made by `AioProducer.transaction`; prepared when it is awaited or entered."""

    def __init__(
        self,
        transactions: Transactions,
        prepare: Prepare,
        first: tuple[str, object, dict[str, Any]],
        timeout: float | None,
    ) -> None:
        self._transactions = transactions
        self._prepare = prepare
        self._first = first
        self._timeout = timeout
        self._halves: list[tuple[Batch, int]] = []
        self._end: End | None = None

    async def _begin(self) -> Self:
        if not self._halves:
            topic, body, options = self._first
            self._halves.append(await self._prepare(topic, body, **options))
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._begin().__await__()

    @property
    def id(self) -> MessageId | None:
        """The id of its first message, the one its consumers will see; None before it is prepared."""
        if not self._halves:
            return None
        batch, index = self._halves[0]
        return MessageId(batch.producer_id, batch.first_sequence + index)

    @property
    def is_ended(self) -> bool:
        """Whether it was committed or rolled back, or is being so."""
        return self._end is not None

    async def send(self, topic: str, body: object, **options: Any) -> None:
        """Add a message: it becomes visible with the others, or not at all."""
        self._check_open()
        self._halves.append(await self._prepare(topic, body, first=self._halves[0], **options))

    async def commit(self, timeout: float | None = None) -> None:
        """Make its messages visible, all at once. Raises as of `dmq.client.producer.transaction.Transaction.commit`."""
        await self._finish(TransactionOutcome.COMMIT, timeout)

    async def rollback(self, timeout: float | None = None) -> None:
        """Drop its messages."""
        await self._finish(TransactionOutcome.ROLLBACK, timeout)

    async def _finish(self, outcome: TransactionOutcome, timeout: float | None) -> None:
        if self._end is None or self._end.outcome != outcome:
            self._check_open()
            self._end = self._transactions.end(self._halves, outcome)
        end = self._end
        if not end.is_done:
            event = _Event()
            end.add_waiter(event)
            seconds = self._timeout if timeout is None else timeout
            try:
                await event.wait(seconds)
            except TimeoutError:
                raise TimedOut(
                    f"the broker has not ended the transaction after {seconds:g} s; it is asked to go on, and a check "
                    "decides if it never hears of it"
                ) from None
        if end.error is not None:
            raise end.error

    def _check_open(self) -> None:
        if not self._halves:
            raise InvalidRequest("the transaction is not prepared yet: await it, or enter it with `async with`")
        if self._end is not None:
            word = "committed" if self._end.outcome == TransactionOutcome.COMMIT else "rolled back"
            raise InvalidRequest(f"the transaction was {word} already: begin another one")

    async def __aenter__(self) -> Self:
        return await self._begin()

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
            log.warning("a transaction was not rolled back", exc_info=True, extra={"id": str(self.id)})
