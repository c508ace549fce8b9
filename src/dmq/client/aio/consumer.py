"""The consumer on an event loop: the twin of `dmq.client.consumer.consumer`, over the same core.

What always holds: as there; everything happens on the loop, but for handlers that are plain functions, which run in
threads of their own. `ack`, `nack` and `reject` never wait: they may be awaited, and need not be.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self

from dmq.client.admin.calls import When, parse_point
from dmq.client.aio.connection import AioConnection
from dmq.client.aio.executor import AioExecutor
from dmq.client.aio.message import DONE, AioBatch, AioMessage, OpenedAioMessage
from dmq.client.aio.pool import AioPool
from dmq.client.aio.router import AioRouter
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.handler import RateLimit
from dmq.client.consumer.leases import extension
from dmq.client.consumer.message import parts_to_ack
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import Part
from dmq.client.consumer.puller import TURN_SECONDS, Ask, Puller, unreached
from dmq.client.consumer.subscription import (
    ALL,
    ANSWER_SECONDS,
    LAST_WORDS_SECONDS,
    Subscription,
    Subscriptions,
    check_extended,
)
from dmq.clock import Clock
from dmq.errors import BrokerStopping, Busy, DMQError, InvalidRequest, NotConnected, UnknownGroup
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.consume import PullReply, Seek, Settle, SettleReply
from dmq.protocol.session import Heartbeat

__all__ = ["AioConsumer"]


class AioConsumer:
    """Gets messages. Made by `AioClient.consumer`; parameters as of `dmq.client.consumer.consumer.Consumer`."""

    def __init__(
        self,
        options: ConsumerOptions,
        number: int,
        router: AioRouter,
        clock: Clock,
        released: Callable[[AioConsumer], None] = lambda consumer: None,
    ) -> None:
        self._options = options
        self._router = router
        self._core = core = ConsumerCore(options, clock, self._extend)
        self._subscriptions = Subscriptions(options, number, router, core, subscriber=self)
        self._puller = Puller(self._subscriptions)
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._waiters: set[asyncio.Future[None]] = set()
        self._previous: AioMessage | AioBatch | None = None
        self._executor: AioExecutor | None = None
        self.is_closing = False
        core.on_reports = self._report
        core.on_free = lambda: self.wake(nudge=True)
        self._subscriptions.refresh()

    @property
    def group(self) -> str:
        """With whom it shares the work."""
        return self._options.group

    @property
    def queues(self) -> tuple[int, ...] | None:
        """The queues it takes by its strategy now; None without one, since brokers then share out messages."""
        return self._subscriptions.queues

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
            if not self._subscriptions.is_started:
                self._subscriptions.begin()
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

    def attend(self, link: AioConnection) -> None:
        """Nothing: the loop reads all connections."""

    # --- by the batch -----------------------------------------------------------------------------------------------

    async def pull(self, max_messages: int = 100, wait: float = 5.0, queue: int | None = None) -> AioBatch:
        """A batch of messages; parameters and errors as of `dmq.client.consumer.consumer.Consumer.pull`."""
        ask = self._puller.check(max_messages, wait, queue)
        self._ack_previous()
        one = self._puller.asked_alone(ask)
        if one is not None:
            await self._ahead()
        parts = self._puller.from_stock(ask)
        if not parts:
            self.flush()
            parts = await self._pull_now(one, ask, wait) if one is not None else await self._pull_any(ask, wait)
        batch = AioBatch(AioMessage, parts, OpenedAioMessage)
        if one is not None:
            self._puller.read_ahead(one, ask, len(batch))
        if self._options.auto_ack:
            self._previous = batch
        return batch

    async def _ahead(self, is_enough: Callable[[], object] = lambda: False) -> None:
        """Wait for what is being read ahead, or until there is enough."""
        if self._puller.is_under_way():
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    while self._puller.is_under_way() and not is_enough():
                        await self._wait()
            except TimeoutError:
                pass  # the next pull says why

    async def _pull_now(self, one: Subscription[AioPool], ask: Ask, wait: float) -> list[Part]:
        """What one broker has, waiting for it."""
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            try:
                frame = await self._pull_once(one, ask, max(0.0, left))
            except (NotConnected, BrokerStopping, Busy) as error:
                if one.pool.closed_by is not None:
                    raise
                if left <= 0:
                    raise unreached(error, wait) from None
                await asyncio.sleep(min(left, error.retry_after or 0.1))
                continue
            reply: PullReply = decode_response(frame)
            parts = self._core.pulled(one.book, reply.leases, frame.body)
            if parts or left <= 0 or not reply.leases:
                return parts

    async def _pull_any(self, ask: Ask, wait: float) -> list[Part]:
        """What any of several brokers has, waiting for the first."""
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            if self._puller.has_stock:
                is_connected = self._puller.ask_all(ask, max(0.0, left))
                await self._ahead(lambda: self._core.prefetched[0])
                parts = self._puller.from_stock(ask)
            else:
                is_connected, parts = await self._pull_in_turn(ask, max(0.0, min(left, TURN_SECONDS)))
            if parts or (is_connected and left <= 0):
                return parts
            self._subscriptions.check_open()
            self._puller.check_refused()
            if self._core.ended is not None:
                raise type(self._core.ended)(self._core.ended.message, **self._core.ended.detail)
            if not is_connected:
                if left <= 0:
                    raise NotConnected(f"no broker could be reached within {max(wait, 0):g} s")
                await asyncio.sleep(min(left, 0.1))

    async def _pull_in_turn(self, ask: Ask, wait: float) -> tuple[bool, list[Part]]:
        """What one of several brokers has, asked one after the other; and whether any is connected."""
        is_connected = False
        for one in self._puller.in_turn():
            try:
                frame = await self._pull_once(one, ask, wait)
            except (NotConnected, BrokerStopping, Busy):
                continue
            is_connected = True
            reply: PullReply = decode_response(frame)
            parts = self._core.pulled(one.book, reply.leases, frame.body)
            if parts:
                return True, parts
        return is_connected, []

    async def _pull_once(self, one: Subscription[AioPool], ask: Ask, wait: float) -> Frame:
        connection = await one.pool.connection(max(wait, 0.001))
        header = self._options.pull(one.member(connection), ask.max_messages, wait, ask.queue)
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
        executor = AioExecutor(self, self._core, handler, workers, policy=policy, local_retries=local_retries)
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
        self._subscriptions.set_paused(True)
        return DONE

    def resume(self) -> Awaitable[None]:
        """Go on."""
        self._subscriptions.set_paused(False)
        return DONE

    async def seek(self, to: When) -> None:
        """Move the group to a place; as `dmq.client.consumer.consumer.Consumer.seek`."""
        point = parse_point(to)
        self._subscriptions.check_open()
        self.flush()
        header = Seek(self._options.topic, self._options.group, point, flags=self._options.flags)
        for one in self._subscriptions:
            await self._seek_at(one, header)

    async def _seek_at(self, one: Subscription[AioPool], header: Seek) -> None:
        try:
            answer = await one.pool.request(
                Command.SEEK,
                header,
                timeout=ANSWER_SECONDS,
                ask=lambda connection, seconds: self._seek(one, connection, header, seconds),
            )
            decode_response(answer)
        except UnknownGroup:
            if self._subscriptions.is_started:
                raise
            self._options.start_from = header.to  # it begins there

    async def _seek(
        self, one: Subscription[AioPool], connection: AioConnection, header: Seek, seconds: float | None
    ) -> Frame:
        is_stopped = self._subscriptions.is_started and not self._core.is_paused
        if is_stopped:
            one.change_credit(-one.credit, connection)
        try:
            answer = await connection.request(Command.SEEK, header, timeout=seconds)
            if not answer.status:
                # What was pushed before the answer may have come with it: a second answer is certainly behind it.
                await connection.request(Command.HEARTBEAT, Heartbeat(0), timeout=seconds)
                self._core.sought(one.book)
        finally:
            if is_stopped:
                one.change_credit(one.credit, connection)
        return answer

    async def _extend(self, delivery: Delivery, seconds: float) -> None:
        header = Settle(self._options.topic, self._options.group, [extension(delivery, seconds)], self._core.member)
        answer = await self._subscriptions.of(delivery).pool.request(Command.SETTLE, header, timeout=ANSWER_SECONDS)
        reply: SettleReply = decode_response(answer)
        check_extended(reply, delivery, time.monotonic() + seconds)

    # --- reporting --------------------------------------------------------------------------------------------------

    def _report(self, is_urgent: bool) -> None:
        is_here = threading.get_ident() == self._loop_thread
        if is_urgent and is_here:
            self.flush()
        elif not self._core.is_report_due:
            self._core.is_report_due = True
            if is_here:
                self._loop.call_soon(self.flush)  # what is said in one turn of the loop goes together
            else:
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        self._core.is_report_due = False
        self._subscriptions.report()

    # --- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to close, without waiting: iterators and `run` come to their end."""
        self.is_closing = self._subscriptions.is_closing = True
        self.wake(nudge=True)

    async def close(self) -> None:
        """Finish what runs, report it, and give the rest back. Safe to call twice, and from a handler."""
        self.stop()
        executor = self._executor
        if executor is not None:
            if not executor.is_mine():
                await executor.finished.wait()
                await self.close()
            return  # run() closes when its handlers are done
        if self._subscriptions.is_closed:
            return
        self._subscriptions.is_closed = True
        await self._ahead()
        self._core.release_all()
        last = [(one, await self._last_connection(one)) for one in self._subscriptions]
        self.flush()
        for one, connection in last:
            farewell = None if connection is None else one.farewell(connection)
            if connection is not None and farewell is not None:
                try:
                    await connection.request(Command.UNSUBSCRIBE, farewell, timeout=ANSWER_SECONDS)
                except DMQError:
                    pass  # the broker notices by itself
        self._subscriptions.unwatch()
        self._released(self)

    async def _last_connection(self, one: Subscription[AioPool]) -> AioConnection | None:
        """The connection for our last words to a broker, waiting for it if there are any."""
        if one.book.has_reports and one.pool.closed_by is None:
            try:
                return await one.pool.connection(LAST_WORDS_SECONDS)
            except DMQError:
                pass  # what was not said is not settled, and is delivered again
        return one.pool.current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
