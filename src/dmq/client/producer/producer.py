"""The producer of a blocking program. Thread-safe.

What always holds: `send` returns a receipt or raises, never later than its timeout; `send_async` returns at once, or as
soon as the window has room. A callback runs on the notifier's thread (D-07).

A lone `send` needs none of what makes many sends fast: no batch that gathers, no callback, no other thread. While
nothing else is under way it takes the straight path (`straight_path`), in the caller's own thread.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, Unpack
from weakref import WeakSet

from dmq.client.arguments import check_function, check_seconds, check_timeout
from dmq.client.connection.connection import Connection
from dmq.client.connection.router import Router
from dmq.client.connection.session import Push
from dmq.client.connection.threads import FOREVER, Trace, Waiter
from dmq.client.producer.accumulator import Draft, SendBatch
from dmq.client.producer.core import WHOLE_MESSAGES, Core, listed
from dmq.client.producer.future import Receipts, Repeated, SendFuture, Sent
from dmq.client.producer.message import SendOptions, own_message, parse_id
from dmq.client.producer.retry_policy import unknown_after
from dmq.client.producer.routes import UNKNOWN, Route
from dmq.client.producer.sender import Sender
from dmq.client.producer.signal_mender import SignalMender
from dmq.client.producer.straight_path import StraightPath
from dmq.client.producer.transaction import Transaction
from dmq.client.producer.transaction_core import HalfOptions, Transactions, roll_back_late
from dmq.compiled import quickened
from dmq.errors import DMQError, InvalidSettings, NotConnected, TimedOut
from dmq.event_log import EventLog
from dmq.model import DEFAULT_PRIORITY, Body, DurabilityName, Message, MessageId, Receipt, check_target
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.produce import TransactionCheck

__all__ = ["OnDelivery", "Producer"]

LOOK_SECONDS: Final = 1.0  # a thread that waits looks at least so often whether the end has come
END_SECONDS: Final = 5.0  # that the end of the interpreter waits for producers that were not closed, all together
HOLD_SECONDS: Final = 0.01  # that a batch is held for threads that come back, as far as others keep them from it

log = EventLog(__name__)

OnDelivery = Callable[[Receipt | None, DMQError | None], Any]


class Producer:
    """Sends messages. Made by `Client.producer`.

    Attributes:
        straight: the straight path of lone sends, which counts them.
    """

    def __init__(
        self,
        core: Core,
        router: Router,
        on_close: Callable[[Producer], None] = lambda _: None,
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
        self._gatherer = core.accumulator.gatherer
        self._spooling = core.spooling
        self.straight: Final = StraightPath(core, router)
        self._is_straight = core.options.straight and core.spooling is None
        if self._is_straight:
            core.begin_lone = self.straight.begin
        self._watcher: Final = _RouterWatcher(core, transactions)
        router.watch(self._watcher)
        router.parts.add(self._watcher)
        _open.add(self)

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(
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
        """Send a message and wait until it is as safe as asked.

        With a spool, a receipt may say `spooled`: no broker has answered, but the message is kept and will be sent.

        Parameters:
            topic: where it goes.
            body: bytes, text, a dict or list, a msgspec struct, a dataclass, a Pydantic model, or a `dmq.Message`.
            key: to find it by.
            tag: to filter by.
            business_id: what it belongs to; with `ordered`, messages of the same one stay in order.
            priority: 0 to 9.
            delay: seconds from now until it is delivered.
            deliver_at: the same as a moment: seconds since 1970, or a datetime with its time zone.
            ttl: seconds until it expires.
            properties: names and values that travel with it.
            durability: `none`, `stored`, `flushed`, `replicated` or `consumed`.
            consumed_by: with `consumed`, the group whose ack is waited for.
            id: a name of your own: what this producer sent under it before is not sent again.
            timeout: seconds that this send may take; the producer's own if left out.

        Raises:
            DMQError: it was not stored as asked, or that is not known (`TimedOut`): then send the same `dmq.Message`
                again, or give `detail["id"]` as `id`, and it is stored once.
        """
        try:
            deadline = self._deadline(timeout)
            message = Message(body, key, tag, business_id, ordered=ordered, priority=priority, properties=properties)
            if id is not None or type(body) is Message:
                options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at, ttl=ttl)
                return self._send_known(message, options, id, timeout)
            batch, index = None, 0
            if self._is_straight and not (ordered or delay or deliver_at is not None or ttl is not None or consumed_by):
                sent = self.straight.send(topic, message, durability, deadline)
                if isinstance(sent, Receipt):
                    return sent
                if sent is not None:
                    batch = sent
                elif (joined := self._core.join(topic, message, durability, deadline)) is not None:
                    batch, index = joined
                    self._wait_among(batch, deadline, is_first=not index)
            if batch is None:
                options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at, ttl=ttl)
                batch, index = self._begin(message, options, deadline)
            if not batch.is_done:
                self._wait(batch, deadline)
            if batch.is_done and batch.error is None:
                return batch.receipt(index)
            return self._conclude(Sent(batch, index, message), timeout)
        except BaseException as error:  # also out of a signal's handler
            self._router.mend(error)
            raise

    def _begin(self, message: Message, options: SendOptions, deadline: float) -> tuple[SendBatch, int]:
        """Put a message of `send` on its way: its batch, and its place there."""
        draft = self._core.draft(self._route(options.topic, deadline, options, message), message, options)
        batch, index = self._put(draft, False, deadline)
        self._sender.pump(batch.lane)
        return batch, index

    def _send_known(
        self, message: Message, options: SendOptions, name: str | MessageId | None, timeout: float | None
    ) -> Receipt:
        """`send` for a message that may have been sent before, which its object or its `id` tells."""
        deadline = self._deadline(timeout)
        sent = self._sent(message, options, parse_id(name), deadline, attended=False)
        if not sent.batch.is_done:
            self._wait(sent.batch, deadline)
        return self._conclude(sent, timeout)

    def _sent(
        self, message: Message, options: SendOptions, name: str | None, deadline: float | None, *, attended: bool
    ) -> Sent:
        """Put a message on its way, or find it on the way it was put on before."""
        given, message = message, own_message(message)
        route = self._route(options.topic, deadline or self._deadline(), options, message)
        draft, outcomes = self._core.draft(route, message, options), self._core.outcomes
        with outcomes.lock:
            found = outcomes.find(options.topic, message, name)
            if found is None:
                batch, index = self._put(draft, attended, deadline)
                batch.is_kept = True
                outcomes.name(Sent(batch, index, message, name))
        if found is None:
            self._sender.pump(batch.lane)
        else:
            batch, index = self._sender.resume(found[0], deadline), found[1]
        return Sent(batch, index, message, name, is_object=message is not given)

    def _conclude(self, sent: Sent, timeout: float | None) -> Receipt:
        """The receipt of a message whose time is over; or its error, with what makes it known when it is repeated."""
        batch = sent.batch
        try:
            if not batch.is_done:
                self._give_up(batch, timeout)
            failure = batch.failure(sent.at)
            if failure is None:
                return batch.receipt(sent.at)
            raise failure
        except DMQError as error:
            raise self._core.outcomes.failed(error, sent) from None

    @quickened("quick_send_async", SendFuture, DEFAULT_PRIORITY)
    def send_async(
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
        on_delivery: OnDelivery | None = None,
    ) -> SendFuture:
        """Send a message and go on. Parameters as in `send`.

        Parameters:
            on_delivery: called with (receipt, None) or (None, error) once the outcome is known.

        Raises:
            DMQError: the message cannot be sent at all, or the window is full and `on_full` is not "block".
        """
        try:
            if on_delivery is not None:
                check_function("on_delivery", on_delivery)
            if (
                tag is None and business_id is None and not ordered and priority == DEFAULT_PRIORITY and not delay
                and deliver_at is None and ttl is None and properties is None and not consumed_by and id is None
            ):  # fmt: skip
                put = self._core.gather(topic, durability, body, key, on_delivery=on_delivery)
                if put is not None:
                    return SendFuture(*put)
            message = Message(body, key, tag, business_id, ordered=ordered, priority=priority, properties=properties)
            options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at, ttl=ttl)
            if id is not None or type(body) is Message:
                batch, index = self._core.watched(self._sent(message, options, parse_id(id), None, attended=True))
            else:
                route = self._routes.get(topic) or self._route(topic, self._deadline(), options, message)
                batch, index = self._put(self._core.draft(route, message, options), True, None)
            future = SendFuture(batch, index)
            if on_delivery is not None:
                tell = on_delivery
                future.add_done_callback(lambda _: batch.tell(index, tell))
            if batch.is_worth_a_look:
                self._sender.pump(batch.lane)
            return future
        except BaseException as error:  # also out of a signal's handler
            self._router.mend(error)
            raise

    def send_many(
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

        Returns:
            Their receipts, in the order of the messages, each made when it is looked at.

        Raises:
            DMQError: the first error. `detail["stored"]` says how many messages of the call are stored nevertheless,
                `detail["stored_indexes"]` which; a message that cannot be sent at all raises before anything after it
                is sent.
        """
        try:
            deadline = self._deadline(timeout)
            messages = listed(messages)
            if not messages:
                return Receipts((), 0)
            if (
                self._is_straight and not delay and deliver_at is None and not consumed_by
                and len(messages) < WHOLE_MESSAGES and not self._core.outcomes.has_objects
            ):  # fmt: skip
                straight = self.straight.send_batch(topic, messages, durability, deadline)
                if straight is not None:
                    return self._end_many([(straight, range(len(messages)))], None, messages, (deadline, timeout))
            repeated: list[tuple[Repeated, list[int]]] = []
            fresh, places = messages, None
            if self._core.outcomes.has_objects:
                repeated, places = self._core.repeats(topic, messages)
                fresh = [messages[at] for at in places]
                for part, _ in repeated:
                    part.batch = self._sender.resume(part.batch, deadline)
            parts: list[tuple[SendBatch, Sequence[int]]] = []
            problem: DMQError | None = None
            try:
                options = SendOptions(topic, durability, consumed_by, delay, deliver_at=deliver_at)
                route = self._routes.get(topic) or self._route(topic, deadline, options, messages=fresh)
                for batch, indexes in self._core.many(route, fresh, options):
                    if parts and (connection := self._router.link_for(topic, parts[-1][0].queue)) is not None:
                        connection.take_ready()  # the answers that came while the batch was made
                    # Every batch gets the whole timeout: it bounds an answer, not how much one sends.
                    deadline = batch.deadline = self._deadline(timeout)
                    self._enter(batch, parts, deadline)
                    parts.append((batch, indexes if places is None else [places[at] for at in indexes]))
                    self._sender.pump(batch.lane)
            except DMQError as error:
                problem = error
            return self._end_many([*repeated, *parts], problem, messages, (deadline, timeout))
        except BaseException as error:  # also out of a signal's handler
            self._router.mend(error)
            raise

    def _end_many(
        self,
        sent: Sequence[tuple[SendBatch | Repeated, Sequence[int]]],
        problem: DMQError | None,
        messages: Sequence[Message],
        times: tuple[float, float | None],
    ) -> Receipts:
        """Wait for all parts of a `send_many`: the receipts.

        Parameters:
            problem: what kept the rest of them from being sent.
            times: its deadline, and the timeout that it was given.

        Raises:
            DMQError: the problem, or the first that there was with a part.
        """
        for part, _ in sent:
            failure = part.error if part.is_done else self._wait_for_part(part, *times)
            problem = problem or failure
        if problem is not None:
            self._core.many_failed(sent, messages)
        return Receipts.of(sent, problem, len(messages))

    def _wait_for_part(self, part: SendBatch | Repeated, deadline: float, timeout: float | None) -> DMQError | None:
        """Wait for a part of a `send_many` that is not done; its error, if it has one."""
        batch, is_own = (part.batch, False) if isinstance(part, Repeated) else (part, True)
        self._wait(batch, max(deadline, batch.deadline or 0.0))
        try:
            if not batch.is_done:
                self._give_up(batch, timeout, is_own=is_own)
        except DMQError as error:
            return error
        return batch.error

    def transaction(self, topic: str, body: Body, **options: Unpack[HalfOptions]) -> Transaction:
        """Prepare a message that nobody sees until its transaction is committed. To be used with `with`: leaving it
        well commits, an exception rolls back.

        Parameters:
            options: `key`, `tag`, `business_id`, `ordered`, `priority`, `ttl` and `properties`, as of `send`.

        Raises:
            InvalidSettings: the producer was made without `group`.
            DMQError: the message could not be prepared; should it be stored after all, it is rolled back.
        """
        transactions = self._transacting()
        half = self._prepare(topic, body, **options)
        return Transaction(transactions, self._prepare, half, self._options.timeout)

    def transaction_async(self, topic: str, body: Body, **options: Unpack[HalfOptions]) -> Transaction:
        """`transaction` without waiting for the broker: its `commit_async` goes out once the message is prepared."""
        transactions = self._transacting()
        route = self._routes.get(topic) or self._route(topic, self._deadline())
        batch, index = self._put(transactions.draft(route, topic, body, **options), True, None)
        if batch.is_worth_a_look:
            self._sender.pump(batch.lane)
        return Transaction(transactions, self._prepare, (batch, index), self._options.timeout)

    def _transacting(self) -> Transactions:
        if self._transactions is None:
            raise InvalidSettings("transactions need a producer group: make the producer with group= and check=")
        return self._transactions

    def _prepare(
        self, topic: str, body: Body, *, first: tuple[SendBatch, int] | None = None, **options: Unpack[HalfOptions]
    ) -> tuple[SendBatch, int]:
        transactions = self._transacting()
        deadline = self._deadline()
        if first is not None:  # it may still be on its way, and only then has its number
            self._wait(first[0], deadline)
            if not first[0].is_done:
                self._give_up(first[0])
            if first[0].error is not None:
                raise first[0].error
        draft = transactions.draft(self._route(topic, deadline), topic, body, first=first, **options)
        batch, index = self._put(draft, False, deadline)
        self._sender.pump(batch.lane)
        try:
            if not batch.is_done:
                self._wait(batch, deadline)
                if not batch.is_done:
                    self._give_up(batch)
        except DMQError:
            roll_back_late(transactions, batch, index)
            raise
        if batch.error is not None:
            raise batch.error
        return batch, index

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _deadline(self, timeout: float | None = None) -> float:
        """When the time of a send is over; it may have one of its own."""
        if timeout is None:
            timeout = self._options.timeout
        else:
            check_seconds("timeout", timeout, above=True)
        return FOREVER if timeout is None else time.monotonic() + timeout

    def _patience(self, timeout: float | None) -> float:
        """How long a send waited at most, to tell the user."""
        own = self._options.timeout if timeout is None else timeout
        return min(limit for limit in (own, self._router.timeout, FOREVER) if limit is not None)

    def _route(
        self,
        topic: str,
        deadline: float,
        options: SendOptions | None = None,
        message: Message | None = None,
        messages: Sequence[Message] = (),
    ) -> Route:
        """What is known of a topic; the broker is asked for one that is not known, if it takes what is to be sent."""
        self._core.check_open()
        route = self._routes.get(topic)
        if route is not None:
            return route
        check_target(topic)
        if options is not None:
            self._core.check(options, message, messages)
        if self._spooling is not None and self._router.link_for(topic) is None:
            return UNKNOWN  # the spool takes it, and the broker says later
        left = None if deadline == FOREVER else max(0.001, deadline - time.monotonic())
        if self._router.book is None:
            answer = self._router.pool_for(topic).request(Command.TOPIC_DESCRIBE, TopicDescribe(topic), timeout=left)
            route = Route.of(decode_response(answer).info.config, time.monotonic())
        else:
            route = Route.of_slots(self._router.learn(topic, left))
        self._routes.put(topic, route)
        if self._spooling is not None:
            self._spooling.remember(topic)
        return route

    def _put(self, draft: Draft, attended: bool, deadline: float | None) -> tuple[SendBatch, int]:
        """Put a message into its lane, waiting for room if the user wants that."""
        limit = deadline or FOREVER
        while True:
            put = self._core.put(draft, attended=attended, deadline=deadline)
            if put is not None:
                return put
            self._core.check_open()
            if self._options.on_full != "block":
                raise self._core.full(draft.lane.key.topic, draft.message)
            if not self._wait_for_room(draft.size, 1, limit):
                raise self._core.full(draft.lane.key.topic, draft.message)

    def _wait_for_room(self, size: int, count: int, deadline: float) -> bool:
        """Wait until the window may have room; False if time is over."""
        waiter = Waiter()
        accumulator = self._core.accumulator
        with self._core.lock:
            if accumulator.has_room(size, count) or self._sender.closed_by is not None:
                return True
            accumulator.waiters.append(waiter)
        # At most so long: who was to wake this thread may have been interrupted.
        return waiter.wait(min(deadline - time.monotonic(), LOOK_SECONDS)) or time.monotonic() < deadline

    def _enter(self, batch: SendBatch, parts: Sequence[tuple[SendBatch, Sequence[int]]], deadline: float) -> None:
        """Let a batch of `send_many` into the window; while that is full, read the answers that make room."""
        accumulator = self._core.accumulator
        while True:
            self._core.check_open()
            with self._core.lock:
                if accumulator.has_room(batch.bytes, batch.count):
                    accumulator.add(batch)
                    return
            if self._options.on_full != "block":
                raise self._core.full(batch.topic, Message(b""))
            own = next((other for other, _ in parts if not other.is_done), None)
            if own is not None:
                self._wait(own, deadline)
                is_over = not own.is_done
            else:
                is_over = not self._wait_for_room(batch.bytes, batch.count, deadline)
            if is_over:
                raise TimedOut("the window stayed full until the time of the send was over")

    def _wait(self, batch: SendBatch, deadline: float) -> None:
        """Wait for a batch; read meanwhile if nobody else does."""
        router = self._router
        limit = deadline
        if router.timeout is not None and router.link_for(batch.topic, batch.queue) is None:
            limit = min(limit, time.monotonic() + router.timeout)
        if self._spooling is not None:
            self._spooling.wait_kept(batch, deadline)
        if batch.queue < 0 and not router.is_single:
            with self._core.lock:  # which connection brings its answer is not known yet: none is read for it here
                batch.is_attended = batch.is_attended or batch.queue < 0
        waiter = Waiter()
        batch.queue_up(waiter)
        try:
            while not batch.is_done:
                now = time.monotonic()
                if now >= limit:
                    return
                # The thread that is to wake this one may be held up, in a signal's handler for example.
                until = min(limit, now + LOOK_SECONDS)
                connection = router.link_for(batch.topic, batch.queue)
                # One that is sent again is attended to; before that, its answer comes over this connection.
                if connection is None or batch.is_attended:
                    waiter.wait(until - now)
                else:
                    connection.until(waiter, lambda: batch.is_done or batch.is_attended, until)
                if batch.lane.is_held and time.monotonic() >= until:
                    batch.lane.let_go(self._sender.pump)
        finally:
            batch.step_out(waiter)

    def _wait_among(self, batch: SendBatch, deadline: float, *, is_first: bool) -> None:
        """Wait for a batch of many threads, which the connection's own thread reads for.

        A thread of this batch or of the one before, which is to let this one go or the batch leave, may be held up: in
        a signal's handler, or by what else it computes. So every thread looks now and then, and the first one soon.
        """
        waiter, pause = Waiter(), HOLD_SECONDS if is_first else LOOK_SECONDS
        batch.queue_up(waiter)
        try:
            while not batch.ended() and (left := deadline - time.monotonic()) > 0:
                if not waiter.wait(min(left, pause)):
                    pause = LOOK_SECONDS
                    if batch.lane.is_held:
                        batch.lane.let_go(self._sender.pump)
        finally:
            batch.step_out(waiter)

    def _give_up(self, batch: SendBatch, timeout: float | None = None, *, is_own: bool = False) -> None:
        """The time of a synchronous send is over: take it back if that is still possible, and raise.

        What the spool has ends well.

        Parameters:
            timeout: what the send had of its own.
            is_own: nobody else has messages in it.
        """
        patience = self._patience(timeout)
        if self._spooling is not None:
            self._spooling.give_up(batch, patience)
            return
        error = self._sender.too_late(batch, patience)
        if is_own or batch.count == 1:
            self._sender.withdraw(batch, error)
        if not batch.is_done:
            raise error if isinstance(error, TimedOut) else TimedOut(unknown_after(patience))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything that was sent before this call is settled, well or not.

        With a spool: until a broker has acknowledged everything in it.

        Raises:
            TimedOut: it is not, after so many seconds.
        """
        self._settle(check_timeout(timeout))

    def _settle(self, timeout: float | None, *, while_connected: bool = False) -> None:
        deadline = FOREVER if timeout is None else time.monotonic() + timeout
        with self._core.lock:
            batches = [*self._core.accumulator.unsettled()]
        for batch in batches:
            if not batch.wait(deadline):
                raise TimedOut(f"messages are still on their way after {timeout:g} s")
        for end in () if self._transactions is None else self._transactions.unsettled():
            if not end.wait(deadline):
                raise TimedOut(f"transactions are still being ended after {timeout:g} s")
        if self._spooling is not None and not self._spooling.wait_drained(deadline, while_connected=while_connected):
            raise TimedOut(f"messages are still in the spool after {timeout:g} s; they stay there until they are sent")

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is on its way, then take no more. What is not settled in time fails; what is spooled stays so.

        Parameters:
            timeout: how long to wait; the producer's own if left out.
        """
        if self._router.is_forked:
            return  # it is the parent's, and so is its spool
        try:
            if self._sender.closed_by is None:
                self._settle(self._options.timeout if timeout is None else timeout, while_connected=True)
        except TimedOut:
            pass  # told to each message by its future
        finally:
            _open.discard(self)
            self._router.unwatch(self._watcher)
            if self._transactions is not None:
                self._transactions.close(NotConnected("the producer is closed: a check ends what it has not ended"))
            self._sender.close(NotConnected("the producer is closed: make another one with client.producer()"))
            if self._spooling is not None:
                self._spooling.leave()
            self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, until: float) -> None:
        """The program ends and has not closed the producer: close it, and tell what was not sent."""
        if self._router.is_forked or self._sender.closed_by is not None:
            return
        with self._core.lock:
            batches = [*self._core.accumulator.unsettled()]
        if not batches:
            return
        left = max(0.0, until - time.monotonic())
        self.close(min(left, self._options.timeout or left))
        unsent = sum(batch.count for batch in batches if batch.error is not None)
        if unsent:
            log.warning(
                "messages may not be stored: the program ended before they were",
                messages=unsent,
                topics=sorted({batch.topic for batch in batches if batch.error is not None}),
            )


# Producers that are not closed: at the end of the interpreter, what they were given by `send_async` is still sent.
_open: WeakSet[Producer] = WeakSet()


@atexit.register
def _end_all() -> None:
    until = time.monotonic() + END_SECONDS
    for producer in [*_open]:
        producer._end(until)


class _RouterWatcher:
    """What the router tells of connections, for the sender, the spool and the transactions of a producer."""

    def __init__(self, core: Core, transactions: Transactions | None) -> None:
        self._sender: Sender = core.sender
        self._gatherer = core.accumulator.gatherer
        self._spooling = core.spooling
        self._transactions = transactions
        self._mender = SignalMender(core.sender) if core.spooling is None else None

    def mend(self, trace: Trace) -> None:
        if self._mender is not None:
            self._mender.mend()

    def forked(self, reason: NotConnected) -> None:
        self._sender.closed_by = reason
        if self._gatherer is not None:
            self._gatherer.close()

    def connected(self, connection: Connection) -> None:
        self._sender.connected(connection)
        if self._transactions is not None:
            if self._transactions.check is not None:
                connection.hold()  # checks come by themselves
            self._transactions.connected(connection)

    def lost(self, connection: Connection, reason: DMQError) -> None:
        if self._spooling is not None:  # else its batches have heard of it themselves
            self._spooling.lost()

    def pushed(self, connection: Connection, push: Push) -> None:
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
