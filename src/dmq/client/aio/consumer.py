"""The consumer: messages one by one, by the batch, or with a handler.

What always holds: a message is acked once, by the caller or by the handler's return; after a reconnect the subscription
is sent again as itself, with the leases still held (D-22). How it waits, and when its reports leave, is the business of
its subscriber.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from dmq.client.admin.calls import When, parse_point
from dmq.client.aio.connection import AioConnection
from dmq.client.aio.executor import AioExecutor

# twin: async
from dmq.client.aio.message import DONE, AioBatch, AioMessage, OpenedAioMessage

# twin: end
from dmq.client.aio.pool import AioPool
from dmq.client.aio.router import AioRouter
from dmq.client.aio.subscriber import AioSubscriber
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.handler import RateLimit
from dmq.client.consumer.leases import check_extended, extension, partly_moved, refused_of
from dmq.client.consumer.message import T, parts_to_ack
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import Part
from dmq.client.consumer.puller import (
    LATE_SECONDS,
    PASSING,
    REFUSED_SECONDS,
    TURN_SECONDS,
    Ask,
    Puller,
    unreached,
)
from dmq.client.consumer.subscription import (
    ALL,
    ANSWER_SECONDS,
    LAST_WORDS_SECONDS,
    LEARN_SECONDS,
    Subscription,
)
from dmq.clock import Clock
from dmq.errors import DMQError, InvalidRequest, NotConnected, TimedOut, UnknownGroup, UnknownTopic
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.consume import PullReply, Seek, Settle, SettleReply
from dmq.protocol.session import Heartbeat

# twin: blocking
# from dmq.client.connection.router import mended
# from dmq.client.connection.threads import FOREVER
# from dmq.client.consumer.message import Batch, OpenedMessage, ReceivedMessage
# twin: end

__all__ = ["AioConsumer"]

R = TypeVar("R")


class AioConsumer(Generic[T]):
    """Gets messages. Made by `AioClient.consumer`.

    Parameters:
        number: of its subscription, unique within the client.
        released: told when it is closed.
    """

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
        self._core = ConsumerCore(options, clock, self._extend)
        self._subscriber = AioSubscriber(options, number, router, self._core)
        self._subscriptions = self._subscriber.subscriptions
        self._puller = Puller(self._subscriptions)
        # twin: blocking
        # self._subscriber.on_start_anew = self._puller.start_anew
        # twin: end
        self._released = released
        self._state = threading.Lock()  # held for some statements, never while waiting
        self._previous: AioMessage | AioBatch | None = None
        self._executor: AioExecutor | None = None
        self.is_closing = False
        self._subscriptions.refresh()

    @property
    def group(self) -> str:
        """With whom it shares the work."""
        return self._options.group

    @property
    def queues(self) -> tuple[int, ...] | None:
        """The queues it takes by its strategy now; None without one, since brokers then share out messages.

        In a cluster each is the number of its shard times 256 and its own number there.
        """
        return self._subscriptions.queues

    # --- one by one -------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[AioMessage[T]]:
        return self

    # twin: blocking
    # @mended
    # twin: end
    async def __anext__(self) -> AioMessage[T]:
        """The next message; waits for it.

        Raises:
            StopAsyncIteration: the consumer was closed.
            DMQError: the subscription was refused or ended, or the client is closed.
        """
        self._ack_previous()
        taken = await self._await(lambda: self._core.take(1))
        if not taken:
            raise StopAsyncIteration
        message: AioMessage[T] = AioMessage(*taken[0])
        if self._options.auto_ack:
            self._previous = message
        return message

    def _ack_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.ack()

    async def _await(self, take: Callable[[], R], is_over: Callable[[], object] = lambda: False) -> R | None:
        """What `take` finds of the messages that wait, once it finds any; None once the consumer closes or `is_over`.

        Raises:
            DMQError: there will be none any more.
        """
        core = self._core
        while True:
            if self.is_closing or is_over():
                return None
            taken = take()
            if taken:
                return taken
            if core.ended is not None:
                raise type(core.ended)(core.ended.message, **core.ended.detail)
            if not self._subscriptions.is_started:
                if not await self._is_routed():
                    continue
                self._start()
            # twin: blocking
            # if core.has_reports:
            #     self._subscriber.flush()
            # twin: end
            self._subscriptions.starve()
            await self._subscriber.wait(
                lambda: core.waiting or core.ended or self.is_closing or is_over(), is_for_message=True
            )

    async def _is_routed(self) -> bool:
        """Whether it is known which brokers have the topic; else ask, and wait a while for the answer."""
        if self._subscriptions.is_routed:
            return True
        try:
            await self._learn(LEARN_SECONDS)
        except (NotConnected, TimedOut):
            if self._router.closed_by is not None:
                raise
            return False
        return True

    async def _learn(self, seconds: float) -> None:
        """Ask which brokers have the topic, if that is not known."""
        if not self._subscriptions.is_routed:
            await self._router.learn(self._options.topic, seconds)
            self._subscriptions.refresh()

    def _start(self) -> None:
        with self._state:
            if self._subscriptions.is_started:
                return
            self._subscriptions.is_started = True
        self._subscriptions.begin()

    def _wake(self, count: int = ALL, *, nudge: bool = False) -> None:
        """Have so many of those who wait for messages look again; also one that reads, if nudged."""
        self._subscriber.wake(count, nudge=nudge)

    # --- by the batch -----------------------------------------------------------------------------------------------

    # twin: blocking
    # @mended
    # twin: end
    async def pull(
        self, max_messages: int = 100, wait: float = 5.0, queue: int | None = None
    ) -> AioBatch[AioMessage[T]]:
        """A batch of messages: the fastest way to consume.

        Parameters:
            max_messages: how many at most.
            wait: seconds to wait for the first one; the batch is empty if none comes.
            queue: take messages of this queue only; of several shards, of the queue with this number in each.

        Raises:
            DMQError: there is no connection, or the broker refuses.
        """
        # twin: async
        self._router.check_loop()
        # twin: end
        ask = self._puller.check(max_messages, wait, queue)
        self._ack_previous()
        await self._learn(max(wait, LEARN_SECONDS))
        await self._ahead()
        parts = self._puller.from_stock(ask)
        if not parts:
            self._subscriber.flush()
            one = self._puller.asked_alone()
            parts = await self._pull_now(one, ask, wait) if one is not None else await self._pull_any(ask, wait)
        # twin: async
        batch: AioBatch[AioMessage[T]] = AioBatch(AioMessage, parts, OpenedAioMessage)
        # twin: blocking
        # batch: Batch[ReceivedMessage[T]] = Batch(ReceivedMessage, parts, OpenedMessage)
        # twin: end
        self._puller.read_ahead(ask, len(batch))
        if self._options.auto_ack:
            self._previous = batch
        return batch

    async def _ahead(self) -> None:
        """Wait for what is being read ahead; of several brokers, the others are asked if one takes long."""
        puller, one = self._puller, self._puller.ahead
        if one is None:
            return
        deadline = time.monotonic() + (ANSWER_SECONDS if puller.asked_alone() is one else LATE_SECONDS)
        while puller.ahead is one and (left := deadline - time.monotonic()) > 0:
            await self._subscriber.wait(lambda: puller.ahead is not one, left, at=one)
        puller.give_up_ahead()

    async def _answers(self, is_enough: Callable[[], object], seconds: float) -> None:
        """Wait for what brokers were asked, or until there is enough."""
        puller, deadline = self._puller, time.monotonic() + seconds
        while puller.is_under_way() and not is_enough() and (left := deadline - time.monotonic()) > 0:
            await self._subscriber.wait(lambda: not puller.is_under_way() or is_enough(), left)

    async def _pull_now(self, one: Subscription[AioPool], ask: Ask, wait: float) -> list[Part]:
        """What one broker has, waiting for it."""
        deadline = time.monotonic() + wait
        while True:
            left, since = deadline - time.monotonic(), self._core.now()
            try:
                frame = await self._pull_once(one, ask, max(0.0, left))
            except PASSING as error:
                if one.pool.closed_by is not None:
                    raise
                if left <= 0:
                    raise unreached(error, wait) from None
                await asyncio.sleep(min(left, error.retry_after or 0.1))
                if self._puller.asked_alone() is not one:  # its queues are at other brokers now
                    return await self._pull_any(ask, deadline - time.monotonic())
                continue
            reply: PullReply = decode_response(frame)
            parts = await self._kept(one, self._core.pulled(one.book, reply.leases, frame.body, since), since)
            if parts or left <= 0 or not reply.leases:
                return parts

    async def _kept(self, one: Subscription[AioPool], parts: list[Part], since: float) -> list[Part]:
        """Of what was pulled, what is still ours: the process may have stood still before it read the answer."""
        asked = self._core.now()
        if not parts or asked - since < self._options.lease / 2:
            return parts
        deliveries = [delivery for delivery, _ in parts]
        settlements = [extension(delivery.lease, self._options.lease) for delivery in deliveries]
        header = Settle(self._options.topic, self._options.group, settlements, self._core.member)
        try:
            lost = refused_of(await one.pool.request(Command.SETTLE, header, timeout=ANSWER_SECONDS))
        except DMQError:
            lost = None
        gone = {*range(len(parts))} if lost is None else lost
        self._core.extended(deliveries, gone, asked)
        self._core.forget((parts[at][0], index) for at in gone for index in parts[at][1])
        return [part for at, part in enumerate(parts) if at not in gone]

    async def _pull_any(self, ask: Ask, wait: float) -> list[Part]:
        """What any of several brokers has, waiting for the first."""
        deadline, turn = time.monotonic() + wait, 0.0
        while True:
            left = deadline - time.monotonic()
            if self._puller.has_stock:
                is_connected, parts = await self._pull_in_turn(self._puller.rich(), ask, 0.0)
                if not parts:
                    is_connected = self._puller.ask_all(ask, max(0.0, left))
                    await self._answers(lambda: self._core.prefetched[0], max(0.0, left) + LATE_SECONDS)
                    parts = self._puller.from_stock(ask)
            else:
                is_connected, parts = await self._pull_in_turn(self._puller.in_turn(), ask, max(0.0, min(left, turn)))
                turn = TURN_SECONDS  # once all of them had nothing
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
            elif self._puller.has_refusals:
                await asyncio.sleep(min(max(left, 0.0), REFUSED_SECONDS))

    async def _pull_in_turn(
        self, asked: Sequence[Subscription[AioPool]], ask: Ask, wait: float
    ) -> tuple[bool, list[Part]]:
        """What one of several brokers has, asked one after the other; and whether any is connected."""
        is_connected = False
        self._puller.forget_refusals()
        for one in asked:
            since = self._core.now()
            try:
                frame = await self._pull_once(one, ask, wait, LATE_SECONDS)
            except PASSING:
                continue
            except (TimedOut, UnknownTopic) as error:
                self._puller.refused(one, error)
                is_connected = True
                continue
            is_connected = True
            reply: PullReply = decode_response(frame)
            self._puller.got(one, ask.max_messages, sum(lease.count for lease in reply.leases))
            parts = await self._kept(one, self._core.pulled(one.book, reply.leases, frame.body, since), since)
            if parts:
                return True, parts
        return is_connected, []

    async def _pull_once(
        self, one: Subscription[AioPool], ask: Ask, wait: float, late: float = ANSWER_SECONDS
    ) -> Frame:
        # twin: async
        connection = await one.pool.connection(max(wait, 0.001))
        # twin: blocking
        # connection = one.pool.connection(time.monotonic() + max(wait, 0.001))
        # twin: end
        header, on_late = self._puller.header(one, connection, ask, wait), partial(self._puller.late, one)
        frame = await connection.request(Command.PULL, header, timeout=wait + late, on_late=on_late)
        if frame.status:
            decode_response(frame)
        one.pulled_over = connection
        return frame

    # twin: blocking
    # @mended
    # twin: end
    def ack(self, messages: AioMessage | Iterable[AioMessage]) -> Awaitable[None]:
        """These are done: a message, a batch, or some messages."""
        for part in parts_to_ack(messages):
            part.ack()
        return DONE

    # --- with a handler ---------------------------------------------------------------------------------------------

    # twin: blocking
    # @mended
    # twin: end
    async def run(
        self,
        handler: Callable[[AioMessage[T]], Any],
        workers: int = 8,
        policy: str | RateLimit = "caller-runs",
        local_retries: int = 1,
    ) -> None:
        """Call a handler for each message until the consumer is closed; acks after the handler.

        In the main thread SIGTERM and SIGINT close the consumer too, with all others that run in the process: handlers
        that run are finished, the other messages go back to the broker. A second signal ends the program at once.

        Parameters:
            handler: called with the message; on an event loop a coroutine function, or a plain function, which runs in
                a thread. `dmq.Retry` and `dmq.Reject` say what to do with the message; after any other error the
                handler is tried again here, then the message is delivered again later.
            workers: how many handlers run at a time.
            policy: what happens to messages that come while all workers are busy. "caller-runs": the caller runs
                handlers too; "block": they wait in the prefetch, and the broker waits with more; "reject": they go
                back to the broker and come again later, maybe to another member; `dmq.RateLimit(n)`: as "block",
                and handlers start at most n times a second.
            local_retries: how often an error is tried again here.

        Raises:
            DMQError: the subscription was refused or ended, or the client was closed.
            InvalidSettings: a value makes no sense.
        """
        executor = AioExecutor(self, self._core, handler, workers, policy=policy, local_retries=local_retries)
        try:
            with self._state:
                if self._executor is not None:
                    raise InvalidRequest("run() is running already: one at a time for a consumer")
                if self.is_closing:
                    return
                self._executor = executor
            await executor.run()
        finally:
            if self._executor is executor:
                await self._ran(executor)

    async def _ran(self, executor: AioExecutor) -> None:
        with self._state:
            self._executor = None
            must_close = self.is_closing
        executor.finished.set()
        if must_close:
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

    # twin: blocking
    # @mended
    # twin: end
    async def seek(self, to: When) -> None:
        """Move the group to a place, as in `start_from` and `admin.reset`.

        Messages in hand are no longer leased to this consumer, and prefetched ones are dropped.

        Raises:
            InvalidSettings: that is not a place.
            DMQError: there is no connection, or the broker refuses.
        """
        point = parse_point(to)
        self._subscriptions.check_open()
        self._subscriber.flush()
        await self._learn(ANSWER_SECONDS)
        header = Seek(self._options.topic, self._options.group, point, flags=self._options.flags)
        failed: list[DMQError] = []
        for one in self._subscriptions:
            try:
                await self._seek_at(one, header)
            except DMQError as error:
                failed.append(error)
        if failed:
            raise partly_moved(failed, len([*self._subscriptions]))

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
            one.hold(True)
        try:
            answer = await connection.request(Command.SEEK, header, timeout=seconds)
            if not answer.status:
                # What was pushed before the answer may have come with it: a second answer is certainly behind it.
                await connection.request(Command.HEARTBEAT, Heartbeat(0), timeout=seconds)
                self._core.sought(one.book)
        finally:
            if is_stopped:
                one.hold(False)
        return answer

    async def _extend(self, delivery: Delivery, seconds: float) -> None:
        settlement, since = extension(delivery.lease, seconds), self._core.now()
        header = Settle(self._options.topic, self._options.group, [settlement], self._core.member)
        answer = await self._subscriptions.of(delivery).pool.request(Command.SETTLE, header, timeout=ANSWER_SECONDS)
        reply: SettleReply = decode_response(answer)
        check_extended(reply, delivery, since + seconds)

    # --- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to close, without waiting: iterators and `run` come to their end."""
        self.is_closing = self._subscriptions.is_closing = True
        self._wake(nudge=True)

    async def close(self) -> None:
        """Finish what runs, report it, and give the rest back. Safe to call twice, and from a handler."""
        # twin: blocking
        # if self._router.is_forked:
        #     return  # it is the parent's
        # twin: end
        self.stop()
        with self._state:
            executor = self._executor
        if executor is not None:
            if not executor.is_mine():
                # twin: async
                await executor.finished.wait()
                # twin: blocking
                # executor.finished.wait(FOREVER)
                # twin: end
                await self.close()
            return  # run() closes when its handlers are done
        with self._state:
            if self._subscriptions.is_closed:
                return
            self._subscriptions.is_closed = True
        await self._ahead()  # who is asked and waits for messages is told not to
        self._core.release_all()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        last = [(one, await self._last_connection(one, deadline)) for one in self._subscriptions]
        self._subscriber.flush_last()
        deadline = time.monotonic() + ANSWER_SECONDS
        for one, connection in last:
            farewell = None if connection is None else one.farewell(connection)
            if connection is not None and farewell is not None:
                try:
                    left = max(0.1, deadline - time.monotonic())
                    await connection.request(Command.UNSUBSCRIBE, farewell, timeout=left)
                except DMQError:
                    pass  # the broker notices by itself
        self._subscriptions.unwatch()
        self._released(self)

    async def _last_connection(self, one: Subscription[AioPool], deadline: float) -> AioConnection | None:
        """The connection for the last reports to a broker, waiting for it if there are any."""
        if one.book.has_reports and one.pool.closed_by is None:
            try:
                # twin: async
                return await one.pool.connection(max(0.001, deadline - time.monotonic()))
                # twin: blocking
                # return one.pool.connection(deadline)
                # twin: end
            except DMQError:
                pass  # what was not reported is delivered again
        return one.pool.current()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
