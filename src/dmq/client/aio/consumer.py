"""The consumer on an event loop: the twin of `dmq.client.consumer.consumer`, over the same core.

What always holds: as there; everything happens on the loop, but for handlers that are plain functions, which run in
threads of their own. `ack`, `nack` and `reject` never wait: they may be awaited, and need not be.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Final, Self

from dmq.client.admin.calls import When, parse_point
from dmq.client.aio.connection import AioConnection
from dmq.client.aio.executor import AioExecutor
from dmq.client.aio.router import AioRouter
from dmq.client.consumer.core import extension
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.handler import RateLimit
from dmq.client.consumer.message import Batch, ReceivedMessage, parts_to_ack
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import Part
from dmq.client.consumer.subscription import (
    ALL,
    ANSWER_SECONDS,
    LAST_WORDS_SECONDS,
    Ask,
    Pulling,
    check_extended,
    unreached,
)
from dmq.clock import Clock
from dmq.errors import BrokerStopping, Busy, DMQError, InvalidRequest, NotConnected, UnknownGroup
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.consume import PullReply, Seek, Settle, SettleReply
from dmq.protocol.session import Heartbeat

__all__ = ["AioBatch", "AioConsumer", "AioMessage"]


class _Done:
    """Something to await that is done already."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


DONE: Final = _Done()


class AioMessage(ReceivedMessage, eq=False, gc=False):
    """A message on an event loop."""

    def ack(self) -> Awaitable[None]:
        super().ack()
        return DONE

    def nack(self, delay: float | None = None, reason: str = "") -> Awaitable[None]:
        super().nack(delay, reason)
        return DONE

    def reject(self, reason: str = "") -> Awaitable[None]:
        super().reject(reason)
        return DONE


class OpenedAioMessage(AioMessage, eq=False, gc=False):
    """A message whose body and key were taken out with those of others."""

    body: Any
    key: str | None


class AioBatch(Batch[AioMessage]):
    """Messages that were pulled together."""

    __slots__ = ()

    def ack(self) -> Awaitable[None]:
        super().ack()
        return DONE

    def nack(self, delay: float | None = None, reason: str = "") -> Awaitable[None]:
        super().nack(delay, reason)
        return DONE


class AioConsumer(Pulling):
    """Gets messages. Made by `AioClient.consumer`; parameters as of `dmq.client.consumer.consumer.Consumer`."""

    def __init__(
        self,
        options: ConsumerOptions,
        number: int,
        router: AioRouter,
        clock: Clock,
        released: Callable[[AioConsumer], None] = lambda consumer: None,
    ) -> None:
        pool = router.pool_for(options.topic)
        super().__init__(options, number, pool, clock, self._extend)
        self._router = router
        self._pool = pool
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._waiters: set[asyncio.Future[None]] = set()
        self._previous: AioMessage | AioBatch | None = None
        self._executor: AioExecutor | None = None
        pool.watch(self)

    # --- one by one -------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[AioMessage]:
        return self

    async def __anext__(self) -> AioMessage:
        """The next message; waits for it.

        Raises:
            StopAsyncIteration: the consumer was closed.
            DMQError: the subscription was refused or ended, or the client is closed.
        """
        self._ack_previous()
        taken = await self.take(1)
        if not taken:
            raise StopAsyncIteration
        message = AioMessage(*taken[0])
        if self._options.auto_ack:
            self._previous = message
        return message

    def _ack_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.ack()

    async def take(self, limit: int, is_over: Callable[[], object] = lambda: False) -> list[tuple[Delivery, int]]:
        """Messages for a handler, waiting for at least one; none once the consumer closes or `is_over`.

        Raises:
            DMQError: there will be none any more.
        """
        core = self._core
        while True:
            if self.is_closing or is_over():
                return []
            taken = core.take(limit)
            if taken:
                return taken
            if core.ended is not None:
                raise type(core.ended)(core.ended.message, **core.ended.detail)
            if not self._is_started:
                self._begin()
            await self._wait()

    async def _wait(self) -> None:
        """Wait until something happened."""
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def wake(self, count: int = ALL, *, nudge: bool = False) -> None:
        """Have so many of those who wait look again."""
        for waiter in [*self._waiters][:count]:
            if not waiter.done():
                waiter.set_result(None)
            self._waiters.discard(waiter)

    # --- by the batch -----------------------------------------------------------------------------------------------

    async def pull(self, max_messages: int = 100, wait: float = 5.0, queue: int | None = None) -> AioBatch:
        """A batch of messages; parameters and errors as of `dmq.client.consumer.consumer.Consumer.pull`."""
        ask = self._check_pull(max_messages, wait, queue)
        self._ack_previous()
        await self._ahead()
        parts = self._from_stock(ask)
        if not parts:
            self._flush()
            parts = await self._pull_now(ask, wait)
        batch = AioBatch(AioMessage, parts, OpenedAioMessage)
        self._read_ahead(self._pool.current(), ask, len(batch))
        if self._options.auto_ack:
            self._previous = batch
        return batch

    async def _ahead(self) -> None:
        """Wait for what is being read ahead."""
        if self._is_under_way:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    while self._is_under_way:
                        await self._wait()
            except TimeoutError:
                pass  # whoever asks next is told why

    async def _pull_now(self, ask: Ask, wait: float) -> list[Part]:
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            try:
                frame = await self._pull_once(ask, max(0.0, left))
            except (NotConnected, BrokerStopping, Busy) as error:
                if self._pool.closed_by is not None:
                    raise
                if left <= 0:
                    raise unreached(error, wait) from None
                await asyncio.sleep(min(left, error.retry_after or 0.1))
                continue
            reply: PullReply = decode_response(frame)
            parts = self._core.pulled(reply.leases, frame.body)
            if parts or left <= 0 or not reply.leases:
                return parts

    async def _pull_once(self, ask: Ask, wait: float) -> Frame:
        connection = await self._pool.connection(max(wait, 0.001))
        header = self._options.pull(self._member(connection), ask.max_messages, wait, ask.queue)
        frame = await connection.request(Command.PULL, header, timeout=wait + ANSWER_SECONDS)
        if frame.status:
            decode_response(frame)
        return frame

    def ack(self, messages: AioMessage | Iterable[AioMessage]) -> Awaitable[None]:
        """These are done: a message, a batch, or some messages."""
        for part in parts_to_ack(messages):
            part.ack()
        return DONE

    # --- with a handler ---------------------------------------------------------------------------------------------

    async def run(
        self,
        handler: Callable[[AioMessage], Any],
        workers: int = 8,
        policy: str | RateLimit = "caller-runs",
        local_retries: int = 1,
    ) -> None:
        """Call a handler for each message until the consumer is closed; as `dmq.client.consumer.consumer.Consumer.run`.

        Parameters:
            handler: a coroutine function, or a plain one, which then runs in a thread.
            workers: how many run at a time.
        """
        executor = AioExecutor(self, self._core, handler, workers, policy, local_retries)
        if self._executor is not None:
            raise InvalidRequest("run() is running already: one at a time for a consumer")
        if self.is_closing:
            return
        self._executor = executor
        try:
            await executor.run()
        finally:
            await self._ran(executor)

    async def _ran(self, executor: AioExecutor) -> None:
        self._executor = None
        executor.finished.set()
        if self.is_closing:
            await self.close()

    # --- control ----------------------------------------------------------------------------------------------------

    def pause(self) -> Awaitable[None]:
        """Hand out nothing until `resume`; the broker keeps what is not here yet."""
        self._set_paused(True)
        return DONE

    def resume(self) -> Awaitable[None]:
        """Go on."""
        self._set_paused(False)
        return DONE

    async def seek(self, to: When) -> None:
        """Move the group to a place; as `dmq.client.consumer.consumer.Consumer.seek`."""
        point = parse_point(to)
        self._check_open()
        self._flush()
        header = Seek(self._options.topic, self._options.group, point, flags=self._options.flags)
        try:
            answer = await self._pool.request(
                Command.SEEK,
                header,
                timeout=ANSWER_SECONDS,
                ask=lambda connection, seconds: self._seek(connection, header, seconds),
            )
            decode_response(answer)
        except UnknownGroup:
            if self._is_started:
                raise
            self._options.start_from = point  # it begins there

    async def _seek(self, connection: AioConnection, header: Seek, seconds: float | None) -> Frame:
        is_stopped = self._is_started and not self._core.is_paused
        if is_stopped:
            self._change_credit(-self._options.prefetch, connection)
        try:
            answer = await connection.request(Command.SEEK, header, timeout=seconds)
            if not answer.status:
                # What was pushed before the answer may have come with it: a second answer is certainly behind it.
                await connection.request(Command.HEARTBEAT, Heartbeat(0), timeout=seconds)
                self._core.sought()
        finally:
            if is_stopped:
                self._change_credit(self._options.prefetch, connection)
        return answer

    async def _extend(self, delivery: Delivery, seconds: float) -> None:
        header = Settle(self._options.topic, self._options.group, [extension(delivery, seconds)], self._core.member)
        answer = await self._pool.request(Command.SETTLE, header, timeout=ANSWER_SECONDS)
        reply: SettleReply = decode_response(answer)
        check_extended(reply, delivery, time.monotonic() + seconds)

    # --- reporting --------------------------------------------------------------------------------------------------

    def _report(self, is_urgent: bool) -> None:
        is_here = threading.get_ident() == self._loop_thread
        if is_urgent and is_here:
            self._flush()
        elif not self._core.is_report_due:
            self._core.is_report_due = True
            if is_here:
                self._loop.call_soon(self._flush)  # what is said in one turn of the loop goes together
            else:
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._core.is_report_due = False
        super()._flush()

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish what runs, report it, and give the rest back. Safe to call twice, and from a handler."""
        self.stop()
        executor = self._executor
        if executor is not None:
            if not executor.is_mine():
                await executor.finished.wait()
                await self.close()
            return  # run() closes when its handlers are done
        if self._is_closed:
            return
        self._is_closed = True
        await self._ahead()
        self._core.release_all()
        connection = await self._last_connection()
        self._flush()
        farewell = None if connection is None else self._farewell(connection)
        if connection is not None and farewell is not None:
            try:
                await connection.request(Command.UNSUBSCRIBE, farewell, timeout=ANSWER_SECONDS)
            except DMQError:
                pass  # the broker notices by itself
        self._pool.unwatch(self)
        self._released(self)

    async def _last_connection(self) -> AioConnection | None:
        """The connection for our last words, waiting for it if there are any."""
        if self._core.has_reports and self._pool.closed_by is None:
            try:
                return await self._pool.connection(LAST_WORDS_SECONDS)
            except DMQError:
                pass  # what was not said is not settled, and is delivered again
        return self._pool.current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
