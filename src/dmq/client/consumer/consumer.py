"""The consumer of a blocking program. Thread-safe.

What always holds: whoever waits for a message reads the connection itself if nobody else does, so that there is no
thread between a lone message and its handler. What is said of messages leaves at once when nothing else is to do, and
in company otherwise. After a reconnect the subscription is sent again as itself, with the leases still held (D-22).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Self

from dmq.client.admin.calls import When, parse_point
from dmq.client.connection.connection import Connection
from dmq.client.connection.pool import Pool
from dmq.client.connection.router import Router
from dmq.client.connection.threads import FOREVER, Waiter
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.executor import Executor
from dmq.client.consumer.handler import RateLimit
from dmq.client.consumer.leases import extension
from dmq.client.consumer.message import Batch, OpenedMessage, ReceivedMessage, parts_to_ack
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

__all__ = ["Consumer"]

# A busy consumer says so much so often that another thread would only be in its way; a slow one does not wait long.
COMPANY_SECONDS: Final = 0.005
# Words about a batch leave with the next pull; so long they wait for one that does not come.
NEXT_PULL_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = 1.0  # a wait looks around at least so often


class Consumer:
    """Gets messages. Made by `Client.consumer`.

    Parameters:
        number: of its subscription, unique within the client.
        released: told when it is closed.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        number: int,
        router: Router,
        clock: Clock,
        released: Callable[[Consumer], None] = lambda consumer: None,
    ) -> None:
        self._options = options
        self._router = router
        self._core = core = ConsumerCore(options, clock, self._extend)
        self._subscriptions = Subscriptions(options, number, router, core, subscriber=self)
        self._puller = Puller(self._subscriptions)
        self._released = released
        self._flushing = threading.RLock()  # a thread that sends may have to read, and hear of more to send
        self._must_flush = False
        self._state = threading.Lock()
        self._waiters: dict[int, Waiter] = {}  # by thread
        self._previous: ReceivedMessage | Batch[ReceivedMessage] | None = None
        self._executor: Executor | None = None
        self._attended: list[Connection] = []
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

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return self

    def __next__(self) -> ReceivedMessage:
        """The next message; waits for it.

        Raises:
            StopIteration: the consumer was closed.
            DMQError: the subscription was refused or ended, or the client is closed.
        """
        self._ack_previous()
        taken = self.take(1)
        if not taken:
            raise StopIteration
        message = ReceivedMessage(*taken[0])
        if self._options.auto_ack:
            self._previous = message
        return message

    def _ack_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            previous.ack()

    def take(self, limit: int, is_over: Callable[[], object] = lambda: False) -> list[tuple[Delivery, int]]:
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
            self._start()
            self.flush()
            self._wait(lambda: core.waiting or core.ended or self.is_closing or is_over())

    def _start(self) -> None:
        with self._state:
            if self._subscriptions.is_started:
                return
            self._subscriptions.is_started = True
        self._subscriptions.begin()

    def _wait(self, is_done: Callable[[], object], seconds: float = _LOOK_SECONDS) -> None:
        """Wait until something is there, reading meanwhile if nobody does; looks around after so long."""
        me, waiter = threading.get_ident(), Waiter()
        self._waiters[me] = waiter
        try:
            only = self._subscriptions.only
            link = None if only is None else only.pool.current()
            if is_done():
                return
            if link is None:
                waiter.wait(seconds)
            else:
                connection = link
                connection.until(waiter, lambda: is_done() or connection.is_closed, time.monotonic() + seconds)
        finally:
            del self._waiters[me]

    def wake(self, count: int = ALL, *, nudge: bool = False) -> None:
        """Have so many of those who wait look again. One that reads is here, and looks by itself."""
        me = threading.get_ident()
        if me in self._waiters:
            count -= 1
        for thread, waiter in tuple(self._waiters.items()):
            if count <= 0:
                break
            if thread != me:
                waiter.wake()
                count -= 1
        if nudge:
            for one in self._subscriptions:
                connection = one.pool.current()
                if connection is not None:
                    connection.nudge()

    def attend(self, link: Connection) -> None:
        """Have pushes read from now on though nobody waits at this link."""
        if link not in self._attended:
            self._attended = [other for other in self._attended if not other.is_closed] + [link]
            link.hold()

    # --- by the batch -----------------------------------------------------------------------------------------------

    def pull(self, max_messages: int = 100, wait: float = 5.0, queue: int | None = None) -> Batch[ReceivedMessage]:
        """A batch of messages: the fastest way out.

        Parameters:
            max_messages: how many at most.
            wait: seconds to wait for the first one; the batch is empty if none comes.
            queue: of this queue only.

        Raises:
            DMQError: there is no connection, or the broker refuses.
        """
        ask = self._puller.check(max_messages, wait, queue)
        self._ack_previous()
        one = self._puller.asked_alone(ask)
        if one is not None:
            self._ahead()
        parts = self._puller.from_stock(ask)
        if not parts:
            self.flush()
            parts = self._pull_now(one, ask, wait) if one is not None else self._pull_any(ask, wait)
        batch = Batch(ReceivedMessage, parts, OpenedMessage)
        if one is not None:
            self._puller.read_ahead(one, ask, len(batch))
        if self._options.auto_ack:
            self._previous = batch
        return batch

    def _ahead(self, is_enough: Callable[[], object] = lambda: False) -> None:
        """Wait for what is being read ahead, or until there is enough."""
        puller, deadline = self._puller, time.monotonic() + ANSWER_SECONDS
        while puller.is_under_way() and not is_enough() and (left := deadline - time.monotonic()) > 0:
            self._wait(lambda: not puller.is_under_way() or is_enough(), left)

    def _pull_now(self, one: Subscription[Pool], ask: Ask, wait: float) -> list[Part]:
        """What one broker has, waiting for it."""
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            try:
                frame = self._pull_once(one, ask, max(0.0, left))
            except (NotConnected, BrokerStopping, Busy) as error:
                if one.pool.closed_by is not None:
                    raise
                if left <= 0:
                    raise unreached(error, wait) from None
                time.sleep(min(left, error.retry_after or 0.1))
                continue
            reply: PullReply = decode_response(frame)
            parts = self._core.pulled(one.book, reply.leases, frame.body)
            if parts or left <= 0 or not reply.leases:
                return parts

    def _pull_any(self, ask: Ask, wait: float) -> list[Part]:
        """What any of several brokers has, waiting for the first."""
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            if self._puller.has_stock:
                is_connected = self._puller.ask_all(ask, max(0.0, left))
                self._ahead(lambda: self._core.prefetched[0])
                parts = self._puller.from_stock(ask)
            else:
                is_connected, parts = self._pull_in_turn(ask, max(0.0, min(left, TURN_SECONDS)))
            if parts or (is_connected and left <= 0):
                return parts
            self._subscriptions.check_open()
            self._puller.check_refused()
            if self._core.ended is not None:
                raise type(self._core.ended)(self._core.ended.message, **self._core.ended.detail)
            if not is_connected:
                if left <= 0:
                    raise NotConnected(f"no broker could be reached within {max(wait, 0):g} s")
                time.sleep(min(left, 0.1))

    def _pull_in_turn(self, ask: Ask, wait: float) -> tuple[bool, list[Part]]:
        """What one of several brokers has, asked one after the other; and whether any is connected."""
        is_connected = False
        for one in self._puller.in_turn():
            try:
                frame = self._pull_once(one, ask, wait)
            except (NotConnected, BrokerStopping, Busy):
                continue
            is_connected = True
            reply: PullReply = decode_response(frame)
            parts = self._core.pulled(one.book, reply.leases, frame.body)
            if parts:
                return True, parts
        return is_connected, []

    def _pull_once(self, one: Subscription[Pool], ask: Ask, wait: float) -> Frame:
        connection = one.pool.connection(time.monotonic() + max(wait, 0.001))
        header = self._options.pull(one.member(connection), ask.max_messages, wait, ask.queue)
        frame = connection.request(Command.PULL, header, timeout=wait + ANSWER_SECONDS)
        if frame.status:
            decode_response(frame)
        return frame

    def ack(self, messages: ReceivedMessage | Iterable[ReceivedMessage]) -> None:
        """These are done: a message, a batch, or some messages."""
        for part in parts_to_ack(messages):
            part.ack()

    # --- with a handler ---------------------------------------------------------------------------------------------

    def run(
        self,
        handler: Callable[[ReceivedMessage], Any],
        workers: int = 8,
        policy: str | RateLimit = "caller-runs",
        local_retries: int = 1,
    ) -> None:
        """Call a handler for each message until the consumer is closed; acks after the handler.

        In the main thread SIGTERM closes the consumer too: what runs is finished, the rest goes back to the broker.

        Parameters:
            handler: called with the message. `dmq.Retry` and `dmq.Reject` say what to do with it; any other error is
                tried again here, then the message is delivered again later.
            workers: threads that run handlers.
            policy: what happens to messages that come while all of them are busy. "caller-runs": this thread runs
                handlers too; "block": they wait in the prefetch, and the broker waits with more; "reject": they go
                back to the broker and come again later, maybe to another member; `dmq.RateLimit(n)`: as "block",
                and handlers start at most n times a second.
            local_retries: how often an error is tried again here.

        Raises:
            DMQError: the subscription was refused or ended, or the client was closed.
            InvalidSettings: a value makes no sense.
        """
        executor = Executor(self, self._core, handler, workers, policy=policy, local_retries=local_retries)
        with self._state:
            if self._executor is not None:
                raise InvalidRequest("run() is running already: one at a time for a consumer")
            if self.is_closing:
                return
            self._executor = executor
        try:
            executor.run()
        finally:
            self._ran(executor)

    def _ran(self, executor: Executor) -> None:
        with self._state:
            self._executor = None
            must_close = self.is_closing
        executor.finished.set()
        if must_close:
            self.close()

    # --- control ----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hand out nothing until `resume`; the broker keeps what is not here yet."""
        self._subscriptions.set_paused(True)

    def resume(self) -> None:
        """Go on."""
        self._subscriptions.set_paused(False)

    def seek(self, to: When) -> None:
        """Move the group to a place, as in `start_from` and `admin.reset`.

        Messages in hand are none of the group's business any more; what was prefetched is forgotten.

        Raises:
            InvalidSettings: that is no place.
            DMQError: there is no connection, or the broker refuses.
        """
        point = parse_point(to)
        self._subscriptions.check_open()
        self.flush()
        header = Seek(self._options.topic, self._options.group, point, flags=self._options.flags)
        for one in self._subscriptions:
            self._seek_at(one, header)

    def _seek_at(self, one: Subscription[Pool], header: Seek) -> None:
        try:
            answer = one.pool.request(
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

    def _seek(self, one: Subscription[Pool], connection: Connection, header: Seek, seconds: float | None) -> Frame:
        is_stopped = self._subscriptions.is_started and not self._core.is_paused
        if is_stopped:
            one.change_credit(-one.credit, connection)
        try:
            answer = connection.request(Command.SEEK, header, timeout=seconds)
            if not answer.status:
                # What was pushed before the answer may have come with it: a second answer is certainly behind it.
                connection.request(Command.HEARTBEAT, Heartbeat(0), timeout=seconds)
                self._core.sought(one.book)
        finally:
            if is_stopped:
                one.change_credit(one.credit, connection)
        return answer

    def _extend(self, delivery: Delivery, seconds: float) -> None:
        header = Settle(self._options.topic, self._options.group, [extension(delivery, seconds)], self._core.member)
        answer = self._subscriptions.of(delivery).pool.request(Command.SETTLE, header, timeout=ANSWER_SECONDS)
        reply: SettleReply = decode_response(answer)
        check_extended(reply, delivery, time.monotonic() + seconds)

    # --- reporting --------------------------------------------------------------------------------------------------

    def _report(self, is_urgent: bool) -> None:
        if is_urgent:
            self.flush()
        elif not self._core.is_report_due:
            self._core.is_report_due = True
            wait = NEXT_PULL_SECONDS if self._core.has_company else COMPANY_SECONDS
            self._router.call_later(wait, self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self._core.is_report_due = False
        self.flush()

    def flush(self) -> None:
        """Tell the broker what was said. A thread that finds another at it leaves the rest to that one."""
        self._must_flush = True
        while self._must_flush and self._flushing.acquire(False):
            try:
                self._must_flush = False
                self._subscriptions.report()
            finally:
                self._flushing.release()

    # --- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to close, without waiting: iterators and `run` come to their end."""
        self.is_closing = self._subscriptions.is_closing = True
        self.wake(nudge=True)

    def close(self) -> None:
        """Finish what runs, report it, and give the rest back. Safe to call twice, and from a handler."""
        if self._router.is_forked:
            return  # it is the parent's
        self.stop()
        with self._state:
            executor = self._executor
        if executor is not None:
            if not executor.is_mine():
                executor.finished.wait(FOREVER)
                self.close()
            return  # run() closes when its handlers are done
        with self._state:
            if self._subscriptions.is_closed:
                return
            self._subscriptions.is_closed = True
        self._ahead()
        self._core.release_all()
        last = [(one, self._last_connection(one)) for one in self._subscriptions]
        with self._flushing:  # or we would overtake what another thread is about to send
            self.flush()
        for one, connection in last:
            farewell = None if connection is None else one.farewell(connection)
            if connection is not None and farewell is not None:
                try:
                    connection.request(Command.UNSUBSCRIBE, farewell, timeout=ANSWER_SECONDS)
                except DMQError:
                    pass  # the broker notices by itself
        self._subscriptions.unwatch()
        self._released(self)

    def _last_connection(self, one: Subscription[Pool]) -> Connection | None:
        """The connection for our last words to a broker, waiting for it if there are any."""
        if one.book.has_reports and one.pool.closed_by is None:
            try:
                return one.pool.connection(time.monotonic() + LAST_WORDS_SECONDS)
            except DMQError:
                pass  # what was not said is not settled, and is delivered again
        return one.pool.current()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
