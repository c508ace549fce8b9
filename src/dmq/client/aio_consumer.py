"""The consumer on an event loop: the twin of `dmq.client.consumer`, over the same core.

What always holds: as there; everything happens on the loop, but for handlers that are plain functions, which run in
threads of their own. `ack`, `nack` and `reject` never wait: they may be awaited, and need not be.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Final, Self

from dmq.client.aio_connection import AioConnection
from dmq.client.aio_executor import AioExecutor
from dmq.client.aio_transport import AioTransport
from dmq.client.calls import When, parse_point
from dmq.client.consumer import AGAIN_SECONDS, ANSWER_SECONDS, LAST_WORDS_SECONDS, TICKS_PER_LEASE
from dmq.client.consuming import ConsumerCore, extension
from dmq.client.delivery import Delivery
from dmq.client.handling import RateLimit
from dmq.client.received import Batch, ReceivedMessage
from dmq.client.session import Push as Pushed
from dmq.client.subscribing import ConsumerOptions
from dmq.clock import Clock
from dmq.errors import BrokerStopping, Busy, DMQError, InvalidRequest, NotConnected, UnknownGroup
from dmq.protocol import Command, Frame, decode_response, error_from_status
from dmq.protocol.consuming import (
    Credit,
    PullReply,
    Push,
    Seek,
    Settle,
    SettleReply,
    SubscribeReply,
    SubscriptionEnded,
    Unsubscribe,
)
from dmq.protocol.session import Heartbeat, ServerReboot
from dmq.protocol.status import ErrorHeader
from dmq.records import ANY_QUEUE

__all__ = ["AioBatch", "AioConsumer", "AioMessage"]


class _Done:
    """Something to await that is done already."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


DONE: Final = _Done()


class AioMessage(ReceivedMessage):
    """A message on an event loop."""

    __slots__ = ()

    def ack(self) -> Awaitable[None]:
        super().ack()
        return DONE

    def nack(self, delay: float | None = None, reason: str = "") -> Awaitable[None]:
        super().nack(delay, reason)
        return DONE

    def reject(self, reason: str = "") -> Awaitable[None]:
        super().reject(reason)
        return DONE


class AioBatch(Batch[AioMessage]):
    """Messages that were pulled together."""

    __slots__ = ()

    def ack(self) -> Awaitable[None]:
        super().ack()
        return DONE

    def nack(self, delay: float | None = None, reason: str = "") -> Awaitable[None]:
        super().nack(delay, reason)
        return DONE


class AioConsumer:
    """Gets messages. Made by `AioClient.consumer`; parameters as of `dmq.client.consumer.Consumer`."""

    def __init__(
        self,
        options: ConsumerOptions,
        number: int,
        transport: AioTransport,
        clock: Clock,
        released: Callable[[AioConsumer], None] = lambda consumer: None,
    ) -> None:
        self._options = options
        self._number = number
        self._transport = transport
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._core = ConsumerCore(options, clock, self._extend)
        self._core.on_reports = self._report
        self._is_started = False
        self._is_closing = False
        self._is_closed = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._previous: AioMessage | AioBatch | None = None
        self._executor: AioExecutor | None = None
        transport.watch(self)

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
            if self._is_closing or is_over():
                return []
            taken = core.take(limit)
            if taken:
                return taken
            if core.ended is not None:
                raise type(core.ended)(core.ended.message, **core.ended.detail)
            self._start()
            waiter = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _start(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        connection = self._transport.current()
        if connection is not None:
            self._subscribe(connection)
        self._transport.call_later(self._options.lease / TICKS_PER_LEASE, self._tick)

    def wake(self, count: int = 1 << 30) -> None:
        """Have so many of those who wait look again."""
        for waiter in [*self._waiters][:count]:
            if not waiter.done():
                waiter.set_result(None)
            self._waiters.discard(waiter)

    # --- by the batch -----------------------------------------------------------------------------------------------

    async def pull(self, max_messages: int = 100, wait: float = 5.0, queue: int | None = None) -> AioBatch:
        """A batch of messages; parameters and errors as of `dmq.client.consumer.Consumer.pull`."""
        if self._is_started:
            raise InvalidRequest("this consumer is subscribed: make another one to pull with")
        if self._is_closing:
            raise NotConnected("the consumer is closed: make another one with client.consumer()")
        self._ack_previous()
        self._flush()
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            try:
                frame = await self._pull_once(max_messages, max(0.0, left), ANY_QUEUE if queue is None else queue)
            except (NotConnected, BrokerStopping, Busy) as error:
                if left <= 0 or self._transport.closed_by is not None:
                    raise
                await asyncio.sleep(min(left, error.retry_after or 0.1))
                continue
            reply: PullReply = decode_response(frame)
            parts = self._core.pulled(reply.leases, frame.body)
            if parts or left <= 0 or not reply.leases:
                batch = AioBatch(AioMessage, parts)
                if self._options.auto_ack:
                    self._previous = batch
                return batch

    async def _pull_once(self, max_messages: int, wait: float, queue: int) -> Frame:
        connection = await self._transport.connection(max(wait, 0.001))
        header = self._options.pull(self._member(connection), max_messages, wait, queue)
        frame = await connection.request(Command.PULL, header, timeout=wait + ANSWER_SECONDS)
        if frame.status:
            decode_response(frame)
        return frame

    def ack(self, messages: AioMessage | AioBatch) -> Awaitable[None]:
        """These are done."""
        return messages.ack()

    # --- with a handler ---------------------------------------------------------------------------------------------

    async def run(
        self,
        handler: Callable[[AioMessage], Any],
        workers: int = 8,
        policy: str | RateLimit = "caller-runs",
        local_retries: int = 1,
    ) -> None:
        """Call a handler for each message until the consumer is closed; as `dmq.client.consumer.Consumer.run`.

        Parameters:
            handler: a coroutine function, or a plain one, which then runs in a thread.
            workers: how many run at a time.
        """
        executor = AioExecutor(self, self._core, handler, workers, policy, local_retries)
        if self._executor is not None:
            raise InvalidRequest("run() is running already: one at a time for a consumer")
        if self._is_closing:
            return
        self._executor = executor
        try:
            await executor.run()
        finally:
            self._executor = None
            executor.finished.set()
            if self.is_closing:
                await self.close()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def stop(self) -> None:
        """Begin to close, without waiting: iterators and `run` come to their end."""
        self._is_closing = True
        self.wake()

    # --- control ----------------------------------------------------------------------------------------------------

    def pause(self) -> Awaitable[None]:
        """Hand out nothing until `resume`; the broker keeps what is not here yet."""
        if not self._core.is_paused:
            self._core.is_paused = True
            self._change_credit(-self._options.prefetch)
        return DONE

    def resume(self) -> Awaitable[None]:
        """Go on."""
        if self._core.is_paused:
            self._core.is_paused = False
            self._change_credit(self._options.prefetch)
            self.wake()
        return DONE

    def _change_credit(self, messages: int) -> None:
        connection = self._transport.current()
        if self._is_started and connection is not None:
            connection.tell(Command.CREDIT, Credit(self._number, messages))

    async def seek(self, to: When) -> None:
        """Move the group to a place; as `dmq.client.consumer.Consumer.seek`."""
        point = parse_point(to)
        self._flush()
        is_stopped = self._is_started and not self._core.is_paused
        if is_stopped:
            self._change_credit(-self._options.prefetch)
        try:
            header = Seek(self._options.topic, self._options.group, point)
            decode_response(await self._transport.request(Command.SEEK, header, timeout=ANSWER_SECONDS))
            # What was pushed before the answer may have come with it: a second answer is certainly behind it.
            await self._transport.request(Command.HEARTBEAT, Heartbeat(0), timeout=ANSWER_SECONDS)
            self._core.sought()
        except UnknownGroup:
            if self._is_started:
                raise
            self._options.start_from = point  # it begins there
        finally:
            if is_stopped:
                self._change_credit(self._options.prefetch)

    async def _extend(self, delivery: Delivery, seconds: float) -> None:
        header = Settle(self._options.topic, self._options.group, [extension(delivery, seconds)], self._core.member)
        answer = await self._transport.request(Command.SETTLE, header, timeout=ANSWER_SECONDS)
        reply: SettleReply = decode_response(answer)
        for refusal in reply.refused:
            raise error_from_status(refusal.status, ErrorHeader(refusal.message))
        delivery.deadline = max(delivery.deadline, time.monotonic() + seconds)

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
        self._send(self._core.reports(), is_kept=True)

    def _send(self, frames: list[Settle], *, is_kept: bool) -> None:
        connection = self._transport.current()
        for at, frame in enumerate(frames):
            try:
                if connection is None:
                    raise NotConnected("no connection")
                connection.tell(Command.SETTLE, frame)
            except DMQError:
                if is_kept:
                    self._core.not_sent(frames[at:])
                return

    def _tick(self) -> None:
        if not self._is_closed:
            self._send(self._core.tick(), is_kept=False)
            self._transport.call_later(self._options.lease / TICKS_PER_LEASE, self._tick)

    # --- told by the transport --------------------------------------------------------------------------------------

    def _member(self, connection: AioConnection) -> str:
        if not self._core.member and not self._options.broadcast:
            self._core.member = f"{connection.client_id[:200]}.{self._number}"
        return self._core.member

    def _subscribe(self, connection: AioConnection) -> None:
        header = self._options.subscribe(self._number, self._member(connection), self._core.holding())
        try:
            connection.submit(Command.SUBSCRIBE, header, on_answer=lambda answer: self._subscribed(connection, answer))
        except DMQError:
            pass  # the connection is gone; the next one is subscribed on

    def _subscribed(self, connection: AioConnection, answer: Frame | DMQError) -> None:
        if isinstance(answer, DMQError):
            return  # the connection is gone
        try:
            reply: SubscribeReply = decode_response(answer)
        except DMQError as error:
            if error.retriable:
                self._transport.call_later(error.retry_after or AGAIN_SECONDS, lambda: self._again(connection))
            else:
                self._end(error)
            return
        self._core.subscribed(reply)
        if self._core.is_paused:
            self._change_credit(-self._options.prefetch)
        self._flush()

    def _again(self, connection: AioConnection) -> None:
        if not self._is_closing and self._transport.current() is connection:
            self._subscribe(connection)

    def _end(self, error: DMQError) -> None:
        self._core.ended = self._core.ended or error
        self.wake()

    def connected(self, connection: AioConnection) -> None:
        if self._is_started and not self._is_closing:
            self._subscribe(connection)
        elif not self._options.ordered:  # an ordered group must be joined first, or its acks say nothing
            self._flush()

    def lost(self, connection: AioConnection, reason: DMQError) -> None:
        pass  # what is here is handed out meanwhile

    def pushed(self, connection: AioConnection, push: Pushed) -> None:
        header = push.header
        if isinstance(header, Push):
            if header.subscription == self._number:
                self.wake(self._core.received(header.leases, push.body))
        elif isinstance(header, SubscriptionEnded):
            if header.subscription == self._number:
                self._end(error_from_status(header.status, ErrorHeader(header.message)))
        elif isinstance(header, ServerReboot) and self._is_started:
            self._core.release_waiting()  # it drains: what nobody has begun can wait for its return

    def unreachable(self, error: DMQError) -> None:
        pass  # it goes on trying, and so do we

    def closed(self, error: DMQError) -> None:
        self._end(error)

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
        self._core.release_all()
        connection = await self._last_connection()
        self._flush()
        if self._is_started and connection is not None:
            try:
                await connection.request(Command.UNSUBSCRIBE, Unsubscribe(self._number), timeout=ANSWER_SECONDS)
            except DMQError:
                pass  # the broker notices by itself
        self._transport.unwatch(self)
        self._released(self)

    async def _last_connection(self) -> AioConnection | None:
        """The connection for our last words, waiting for it if there are any."""
        if self._core.has_reports and self._transport.closed_by is None:
            try:
                return await self._transport.connection(LAST_WORDS_SECONDS)
            except DMQError:
                pass  # what was not said is not settled, and is delivered again
        return self._transport.current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
