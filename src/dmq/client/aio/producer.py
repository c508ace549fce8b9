"""The producer on an event loop: the twin of `dmq.client.producer.producer`, over the same core.

What always holds: as there. Everything happens on the loop's thread; a task that is cancelled while it waits leaves its
message on its way. Ordered messages go on their way in the order of the calls, also while tasks wait for the route of
the topic or for room in the window: such tasks take turns, and a task that comes meanwhile waits behind them.

The straight path of a lone `send` on an event loop: the twin of `dmq.client.producer.straight_path`.

What always holds: as there. A task that is cancelled while it waits leaves its message to the general way.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from datetime import datetime
from operator import attrgetter
from types import TracebackType
from typing import Any, Final, Self, Unpack

from dmq.client.aio.connection import AioConnection
from dmq.client.aio.router import AioRouter
from dmq.client.aio.transaction import AioTransaction
from dmq.client.aio.waiter import SharedWaiter, TaskTurns, TaskWaiter
from dmq.client.arguments import check_function, check_seconds, check_timeout
from dmq.client.connection.session import Pending, Push
from dmq.client.connection.socket import LONE_SECONDS
from dmq.client.producer.accumulator import MESSAGE_BYTES, Draft, Lane, Lone, SendBatch
from dmq.client.producer.core import Core, listed
from dmq.client.producer.future import Receipts, Repeated, SendFuture, Sent
from dmq.client.producer.message import SendOptions, own_message, parse_id
from dmq.client.producer.retry_policy import unknown_after
from dmq.client.producer.routes import Route
from dmq.client.producer.sender import Sender
from dmq.client.producer.straight_path import Groove, LonePath, Outgoing, plain_reply, request_of
from dmq.client.producer.transaction_core import HalfOptions, Transactions, roll_back_late
from dmq.errors import DMQError, InvalidSettings, NotConnected, TimedOut
from dmq.model import DEFAULT_PRIORITY, Body, DurabilityName, Message, MessageId, Receipt, check_target
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.frame import Frame
from dmq.protocol.produce import TransactionCheck

__all__ = ["AioProducer", "AioSendFuture", "OnAioDelivery"]

OnAioDelivery = Callable[[Receipt | None, DMQError | None], Awaitable[None] | None]

_ordered = attrgetter("ordered")
_running: set[asyncio.Future[Any]] = set()  # callbacks under way: a loop alone would let them be collected


class AioSendFuture(SendFuture, eq=False, gc=False):
    """What becomes of one message; `await` it for the receipt."""

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self._outcome.is_done:
            waiter = TaskWaiter()
            self._outcome.add_waiter(waiter)
            yield from waiter.wait(None).__await__()
        return self.result(0)

    def add_done_callback(self, function: Callable[[SendFuture], Any]) -> None:
        """Have `function(self)` called at the end, or at once if that has been; it may be a coroutine function."""
        if not self._outcome.add_callback(lambda: function(self)):
            result = function(self)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(result)
                _running.add(task)
                task.add_done_callback(_running.discard)


class AioProducer:
    """Sends messages. Made by `AioClient.producer`. Parameters of its methods as of
    `dmq.client.producer.producer.Producer`.

    Attributes:
        straight: the straight path of lone sends, which counts them.
    """

    def __init__(
        self,
        core: Core,
        router: AioRouter,
        on_close: Callable[[AioProducer], None] = lambda _: None,
        transactions: Transactions | None = None,
    ) -> None:
        self._core = core
        self._router = router
        self._on_close = on_close
        self._transactions = transactions
        self._options = core.options
        self._routes = core.routes
        self._clock = core.clock
        self._sender: Sender = core.sender
        self.straight: Final = AioStraightPath(core, router)
        self._is_crowded = False  # tasks go on whose messages shared a batch: they will hardly send less than before
        self._turns = TaskTurns()  # by topic, of the tasks that wait for its route or for room
        self._pumping: dict[Lane, None] = {}  # lanes that are pumped at the end of this turn of the loop
        self._sender.pump_after = self._pump_soon
        self._watcher = _RouterWatcher(core, transactions)
        router.watch(self._watcher)

    async def send(
        self,
        topic: str,
        body: Body | Message,
        *,
        key: str | None = None,
        tag: str | None = None,
        business_id: str | None = None,
        ordered: bool = False,
        priority: int = DEFAULT_PRIORITY,
        delay: float = 0.0,
        deliver_at: float | datetime | None = None,
        ttl: float | None = None,
        properties: Mapping[str, str] | None = None,
        durability: DurabilityName = "flushed",
        consumed_by: str = "",
        id: str | MessageId | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Send a message and wait until it is as safe as asked. Parameters as of `Producer.send`.

        Raises:
            DMQError: it was not stored as asked, or that is not known (`TimedOut`): then send the same `dmq.Message`
                again, or give `detail["id"]` as `id`, and it is stored once.
        """
        self._router.check_loop()
        deadline = self._deadline(timeout)
        message = Message(body, key, tag, business_id, ordered=ordered, priority=priority, properties=properties)
        if id is not None or type(body) is Message:
            options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at, ttl=ttl)
            sent = await self._sent(message, options, parse_id(id), deadline)
            return await self._conclude(sent, deadline, timeout)
        draft = None
        if not ordered and not delay and deliver_at is None and ttl is None and not consumed_by:
            joined = self._core.join(topic, message, durability, deadline, is_held=self._is_crowded)
            if joined is not None:
                batch, index = joined
                if self._is_crowded and batch.lane not in self._pumping:
                    self._pump_soon(batch.lane)
                # As `_conclude` does, without a coroutine more: tasks by the hundred come through here.
                if batch.is_done or await self._end_of(batch, deadline):
                    self._is_crowded = batch.count > 1
                    if batch.error is None and not batch.parts:
                        return batch.receipt(index)
                return await self._conclude(Sent(batch, index, message), deadline, timeout)
            draft = self._core.plain_draft(topic, message, durability)
            if self._options.straight and not self._is_crowded and (draft is None or draft.lane.is_free):
                lone = await self.straight.send(topic, message, durability, deadline)
                if type(lone) is Receipt:
                    return lone
                if isinstance(lone, SendBatch):
                    return await self._conclude(Sent(lone, 0, message), deadline, timeout)
        if draft is None:
            options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at, ttl=ttl)
            batch, index = await self._put_in_turn(message, options, deadline)
        else:
            put = self._core.put(draft, attended=deadline is None, deadline=deadline)
            batch, index = put or await self._put(draft, deadline)
        if self._is_crowded:
            self._pump_soon(batch.lane)
        elif batch.is_worth_a_look:
            self._sender.pump(batch.lane)
        return await self._conclude(Sent(batch, index, message), deadline, timeout)

    def _pump_soon(self, lane: Lane) -> None:
        """Send what gathers in a lane once the other tasks that were woken had their turn."""
        if not self._pumping:
            asyncio.get_running_loop().call_soon(self._pump)
        self._pumping[lane] = None

    def _pump(self) -> None:
        lanes, self._pumping, self._is_crowded = self._pumping, {}, False
        for lane in lanes:
            self._sender.pump(lane)

    async def _sent(self, message: Message, options: SendOptions, name: str | None, deadline: float | None) -> Sent:
        """Put a message on its way, or find it on the way it was put on before."""
        given, message = message, own_message(message)
        topic, outcomes = options.topic, self._core.outcomes
        route, found = self._routes.get(topic), None
        if route is not None:
            self._core.draft(route, message, options)  # raises if it may not be sent at all
            found = outcomes.find(topic, message, name)
        if found is None:
            async with self._turn(topic, deadline, message):
                draft = await self._draft(message, options, deadline)
                found = outcomes.find(topic, message, name)  # another task may have brought it while we waited
                if found is None:
                    batch, index = await self._put(draft, deadline)
                    batch.is_kept = True
                    outcomes.name(Sent(batch, index, message, name))
        if found is None:
            self._sender.pump(batch.lane)
        else:
            batch, index = self._sender.resume(found[0], deadline), found[1]
        return Sent(batch, index, message, name, is_object=message is not given)

    async def _put_in_turn(
        self, message: Message, options: SendOptions, deadline: float | None
    ) -> tuple[SendBatch, int]:
        """Put a message on its way, behind those of its topic that other tasks brought before."""
        topic = options.topic
        route = self._routes.get(topic)
        if route is not None and self._turns.is_free(topic):
            draft = self._core.draft(route, message, options)
            put = self._core.put(draft, attended=deadline is None, deadline=deadline)
            if put is not None:
                return put
        async with self._turn(topic, deadline, message):
            return await self._put(await self._draft(message, options, deadline), deadline)

    @asynccontextmanager
    async def _turn(self, topic: str, deadline: float | None, message: Message) -> AsyncIterator[None]:
        """Wait until all who came before with messages of the topic have put them on their way."""
        if not await self._turns.enter(topic, self._left(deadline)):
            if self._routes.get(topic) is not None:
                raise self._core.full(topic, message)
            raise TimedOut(f"the broker did not tell the queues of topic {topic!r} in time: nothing was sent")
        try:
            yield
        finally:
            self._turns.leave(topic)

    async def _draft(self, message: Message, options: SendOptions, deadline: float | None) -> Draft:
        route = self._routes.get(options.topic)
        if route is None:
            route = await self._route(options.topic, self._left(deadline), options, message)
        return self._core.draft(route, message, options)

    async def _conclude(self, sent: Sent, deadline: float | None, timeout: float | None) -> Receipt:
        """The receipt of a message; or its error, with what makes it known when it is repeated."""
        batch = sent.batch
        try:
            await self._wait(batch, deadline, timeout)
            failure = batch.failure(sent.at)
            if failure is None:
                return batch.receipt(sent.at)
            raise failure
        except DMQError as error:
            raise self._core.outcomes.failed(error, sent) from None

    async def send_async(
        self,
        topic: str,
        body: Body | Message,
        *,
        key: str | None = None,
        tag: str | None = None,
        business_id: str | None = None,
        ordered: bool = False,
        priority: int = DEFAULT_PRIORITY,
        delay: float = 0.0,
        deliver_at: float | datetime | None = None,
        ttl: float | None = None,
        properties: Mapping[str, str] | None = None,
        durability: DurabilityName = "flushed",
        consumed_by: str = "",
        id: str | MessageId | None = None,
        on_delivery: OnAioDelivery | None = None,
    ) -> AioSendFuture:
        """Send a message and go on as soon as the window has room; `await` the future for the receipt.

        Raises:
            DMQError: the message cannot be sent at all, or the window is full and `on_full` is not "block".
        """
        self._router.check_loop()
        if on_delivery is not None:
            check_function("on_delivery", on_delivery)
        if (
            tag is None and business_id is None and not ordered and priority == DEFAULT_PRIORITY and not delay
            and deliver_at is None and ttl is None and properties is None and not consumed_by and id is None
        ):  # fmt: skip
            put = self._core.gather(topic, durability, body, key, on_delivery=on_delivery)
            if put is not None:
                return AioSendFuture(*put)
        message = Message(body, key, tag, business_id, ordered=ordered, priority=priority, properties=properties)
        options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at, ttl=ttl)
        if id is not None or type(body) is Message:
            batch, index = self._core.watched(await self._sent(message, options, parse_id(id), None))
        else:
            batch, index = await self._put_in_turn(message, options, None)
        future = AioSendFuture(batch, index)
        if on_delivery is not None:
            tell = on_delivery
            future.add_done_callback(lambda _: batch.tell(index, tell))
        if batch.is_worth_a_look:
            self._sender.pump(batch.lane)
        return future

    async def send_many(
        self,
        topic: str,
        messages: Sequence[Message],
        *,
        delay: float = 0.0,
        deliver_at: float | datetime | None = None,
        durability: DurabilityName = "flushed",
        consumed_by: str = "",
        timeout: float | None = None,
    ) -> Receipts:
        """Send many messages and wait for all: the fastest way in. All are delayed alike, or none.

        Parameters:
            timeout: seconds that the answer to each batch may take; the producer's own if left out.

        Raises:
            DMQError: the first error; `detail["stored"]` says how many messages are stored nevertheless.
        """
        self._router.check_loop()
        messages = listed(messages)
        if not messages:
            return Receipts((), 0)
        options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at)
        parts: list[tuple[SendBatch | Repeated, Sequence[int]]] = []
        is_turn = _has_order(messages)
        async with self._turn(topic, self._deadline(timeout), messages[0]) if is_turn else nullcontext():
            problem = await self._enter_many(messages, options, timeout, parts)
        for one, _ in parts:
            batch, is_own = (one.batch, False) if isinstance(one, Repeated) else (one, True)
            try:
                await self._wait(batch, self._deadline(timeout), timeout, is_own=is_own)
            except DMQError as error:
                problem = problem or error
            problem = problem or batch.error
        if problem is not None:
            self._core.many_failed(parts, messages)
        return Receipts.of(parts, problem, len(messages))

    async def _enter_many(
        self,
        messages: Sequence[Message],
        options: SendOptions,
        timeout: float | None,
        parts: list[tuple[SendBatch | Repeated, Sequence[int]]],
    ) -> DMQError | None:
        """Put the messages of a `send_many` on their way; the batches go into `parts`. Why some are not, or None."""
        topic = options.topic
        route = self._routes.get(topic) or await self._route(topic, None, options, messages=messages)
        fresh, places = messages, None
        if self._core.outcomes.has_objects:
            repeated, places = self._core.repeats(topic, messages)
            fresh = [messages[at] for at in places]
            for part, _ in repeated:
                part.batch = self._sender.resume(part.batch, self._deadline(timeout))
            parts += repeated
        try:
            for batch, indexes in self._core.many(route, fresh, options):
                batch.deadline = self._deadline(timeout)
                await self._enter(batch, batch.deadline)
                parts.append((batch, indexes if places is None else [places[at] for at in indexes]))
                self._sender.pump(batch.lane)
                await asyncio.sleep(0)  # let answers in, and other tasks go on
        except DMQError as error:
            return error
        return None

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _deadline(self, timeout: float | None = None) -> float | None:
        """When the time of a send is over; it may have one of its own."""
        if timeout is None:
            timeout = self._options.timeout
        else:
            check_seconds("timeout", timeout, above=True)
        return None if timeout is None else self._clock.monotonic() + timeout

    def _left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self._clock.monotonic())

    async def _route(
        self,
        topic: str,
        timeout: float | None = None,
        options: SendOptions | None = None,
        message: Message | None = None,
        messages: Sequence[Message] = (),
    ) -> Route:
        self._core.check_open()
        check_target(topic)
        if options is not None:
            self._core.check(options, message, messages)
        timeout = self._options.timeout if timeout is None else timeout
        if self._router.book is None:
            answer = await self._router.pool_for(topic).request(
                Command.TOPIC_DESCRIBE, TopicDescribe(topic), timeout=timeout
            )
            route = Route.of(decode_response(answer).info.config, self._clock.monotonic())
        else:
            route = Route.of_slots(await self._router.learn(topic, timeout))
        self._routes.put(topic, route)
        return route

    async def _put(self, draft: Draft, deadline: float | None) -> tuple[SendBatch, int]:
        while True:
            put = self._core.put(draft, attended=deadline is None, deadline=deadline)
            if put is not None:
                return put
            self._core.check_open()
            if self._options.on_full != "block" or not await self._wait_for_room(deadline):
                raise self._core.full(draft.lane.key.topic, draft.message)

    async def _wait_for_room(self, deadline: float | None) -> bool:
        waiter = TaskWaiter()
        self._core.accumulator.waiters.append(waiter)
        return await waiter.wait(self._left(deadline))

    async def _enter(self, batch: SendBatch, deadline: float | None) -> None:
        """Let a batch of `send_many` into the window."""
        while True:
            self._core.check_open()
            if self._core.accumulator.has_room(batch.bytes, batch.count):
                self._core.accumulator.add(batch)
                return
            if self._options.on_full != "block" or not await self._wait_for_room(deadline):
                raise self._core.full(batch.topic, Message(b""))

    async def _wait(
        self, batch: SendBatch, deadline: float | None, timeout: float | None = None, *, is_own: bool = False
    ) -> None:
        """Wait for a batch; raise if it takes too long.

        Parameters:
            timeout: what the send has of its own.
            is_own: nobody else has messages in it.
        """
        if batch.is_done:
            return
        if await self._end_of(batch, deadline):
            self._is_crowded = batch.count > 1
            return
        timeouts = (self._options.timeout if timeout is None else timeout, self._router.timeout)
        error = self._sender.too_late(batch, *timeouts)
        if is_own or batch.count == 1:
            self._sender.withdraw(batch, error)
        if not batch.ended():
            patience = min((limit for limit in timeouts if limit is not None), default=0.0)
            raise error if isinstance(error, TimedOut) else TimedOut(unknown_after(patience))

    def _end_of(self, batch: SendBatch, deadline: float | None) -> asyncio.Future[bool]:
        """Waits for a batch that is not done: whether it has ended in time."""
        left, client = self._left(deadline), self._router.timeout
        if client is not None and self._router.link_for(batch.topic, batch.queue) is None:
            left = client if left is None else min(left, client)
        waiter = batch.tasks
        if waiter is None:
            waiter = batch.tasks = SharedWaiter()
            batch.add_waiter(waiter)
        future: asyncio.Future[bool] = waiter.wait(left)
        return future

    def transaction(self, topic: str, body: Body, **options: Unpack[HalfOptions]) -> AioTransaction:
        """A transaction with one message, to be entered with `async with` or awaited; see `Producer.transaction`."""
        if self._transactions is None:
            raise InvalidSettings("transactions need a producer group: make the producer with group= and check=")
        return AioTransaction(self._transactions, self._prepare, (topic, body, options), self._options.timeout)

    async def _prepare(
        self, topic: str, body: Body, *, first: tuple[SendBatch, int] | None = None, **options: Unpack[HalfOptions]
    ) -> tuple[SendBatch, int]:
        self._router.check_loop()
        transactions = self._transactions
        assert transactions is not None
        deadline = self._deadline()
        route = self._routes.get(topic) or await self._route(topic)
        batch, index = await self._put(transactions.draft(route, topic, body, first=first, **options), deadline)
        self._sender.pump(batch.lane)
        try:
            await self._wait(batch, deadline)
        except BaseException:
            roll_back_late(transactions, batch, index)
            raise
        if batch.error is not None:
            raise batch.error
        return batch, index

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was sent before this call is settled, well or not.

        Raises:
            TimedOut: it is not, after so many seconds.
        """
        self._router.check_loop()
        seconds = check_timeout(timeout)
        deadline = None if seconds is None else self._clock.monotonic() + seconds
        for batch in self._core.accumulator.unsettled():
            if batch.is_done:
                continue
            waiter = TaskWaiter()
            batch.add_waiter(waiter)
            if not await waiter.wait(self._left(deadline)):
                raise TimedOut(f"messages are still on their way after {timeout:g} s")
        for end in () if self._transactions is None else self._transactions.unsettled():
            waiter = TaskWaiter()
            end.add_waiter(waiter)
            if not await waiter.wait(self._left(deadline)):
                raise TimedOut(f"transactions are still being ended after {timeout:g} s")

    async def close(self, timeout: float | None = None) -> None:
        """Wait for what is on its way, then take no more. What is not settled in time fails."""
        try:
            if self._sender.closed_by is None:
                await self.flush(self._options.timeout if timeout is None else timeout)
        except TimedOut:
            pass  # told to each message by its future
        finally:
            self._router.unwatch(self._watcher)
            if self._transactions is not None:
                self._transactions.close(NotConnected("the producer is closed: a check ends what it has not ended"))
            self._sender.close(NotConnected("the producer is closed: make another one with client.producer()"))
            self._on_close(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _has_order(messages: Sequence[Message]) -> bool:
    try:
        return True in map(_ordered, messages)
    except AttributeError:
        return False  # something there is no message, which is told when they are encoded


class _RouterWatcher:
    """What the router tells of connections, for the sender and the transactions of a producer."""

    def __init__(self, core: Core, transactions: Transactions | None) -> None:
        self._sender: Sender = core.sender
        self._transactions = transactions

    def connected(self, connection: AioConnection) -> None:
        self._sender.connected(connection)
        if self._transactions is not None:
            self._transactions.connected(connection)

    def lost(self, connection: AioConnection, reason: DMQError) -> None:
        pass  # its batches have heard of it themselves

    def pushed(self, connection: AioConnection, push: Push) -> None:
        if self._transactions is not None and isinstance(push.header, TransactionCheck):
            self._transactions.pushed(connection, push.header, push.body)

    def routes_changed(self, topics: Iterable[str]) -> None:
        self._sender.routes_changed(topics)

    def unreachable(self, error: DMQError) -> None:
        self._sender.unreachable(error)

    def closed(self, error: DMQError) -> None:
        self._sender.close(error)
        if self._transactions is not None:
            self._transactions.close(error)


class AioStraightPath(LonePath[AioConnection]):
    """The straight path of one producer on an event loop.

    One timer looks after all sends: one for each would cost more than the rest of the waiting.
    """

    def __init__(self, core: Core, router: AioRouter) -> None:
        super().__init__(core, router)
        self._waiting: set[_Waiting] = set()
        self._is_looking = False

    async def send(
        self, topic: str, message: Message, durability: DurabilityName, deadline: float | None
    ) -> Receipt | SendBatch | None:
        """As `StraightPath.send`."""
        found = self._find(topic, message, durability, deadline)
        if found is None:
            return None
        groove, connection, queues, now = found
        prepared = self._prepare(topic, message)
        correlation = connection.claim()
        if not correlation or self._sender.closed_by is not None:
            self.left += 1
            return None
        lane = groove[0]
        lone = self._accumulator.take_lone(lane, len(message.body) + MESSAGE_BYTES, queues)
        if lone is None:
            self.left += 1
            return None
        loop = asyncio.get_running_loop()
        frame = request_of(groove, lone, correlation, prepared)
        waiting = _Waiting(self, groove, lone, (frame, deadline, now), connection=connection)
        waiting.outcome = loop.create_future()
        waiting.pending = connection.ask(correlation, frame, waiting.answered)
        self._waiting.add(waiting)
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(LONE_SECONDS, self._look)
        try:
            return await waiting.outcome
        finally:
            self._waiting.discard(waiting)
            if lane.lone is lone:  # the task was cancelled
                self.be_late(waiting, None)

    def be_late(self, waiting: _Waiting, came: Frame | DMQError | None) -> SendBatch:
        """Leave a message to the general way, with whatever came instead of its answer."""
        sender, connection = self._sender, waiting.connection
        batch = self.late_batch(waiting.groove, waiting.sent, connection)
        if not batch.is_done:
            batch.pending = waiting.pending
            waiting.pending.on_answer = lambda late: sender.answered(batch, connection, late)
            if came is not None:
                sender.answered(batch, connection, came)
        return batch

    def _look(self) -> None:
        """Leave what has waited for long to the general way."""
        oldest = self._monotonic() - LONE_SECONDS
        for waiting in [*self._waiting]:
            if waiting.sent[2] <= oldest and waiting.groove.lane.lone is waiting.lone:
                waiting.end(self.be_late(waiting, None))
        self._is_looking = bool(self._waiting)
        if self._is_looking:
            asyncio.get_running_loop().call_later(LONE_SECONDS, self._look)


class _Waiting:
    """One message that is under way, and the task that waits for it."""

    __slots__ = ("_path", "connection", "groove", "lone", "outcome", "pending", "sent")
    outcome: asyncio.Future[Receipt | SendBatch]
    pending: Pending

    def __init__(
        self, path: AioStraightPath, groove: Groove, lone: Lone, sent: Outgoing, connection: AioConnection
    ) -> None:
        self._path = path
        self.groove = groove
        self.lone = lone
        self.sent = sent
        self.connection = connection

    def answered(self, came: Frame | DMQError) -> None:
        reply = plain_reply(came) if type(came) is Frame else None
        path = self._path
        self.end(path.be_late(self, came) if reply is None else path.stored(self.groove.lane, self.lone, reply))

    def end(self, outcome: Receipt | SendBatch) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
