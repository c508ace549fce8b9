"""The sender: takes batches from the accumulator to a broker, and sees them through. No sockets, no threads.

It works through two seams. `Link` is a connection that takes requests and calls back with the answer; `Lines` tells
which link is in use, finds another broker, and calls things later. The blocking and the asyncio client bring one each.

What always holds:
- A batch under way is in exactly one place: written and unanswered, parked until a connection is back, or due to be
  sent again at a known time. It leaves that place only by its end.
- The producer's lock is never held while anything is encoded, written or called back.
- A batch that may be stored keeps its queue, its numbers and its count, and goes out as RESEND.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Final, Protocol

from dmq.client.accumulator import Accumulator, Batch, Lane
from dmq.client.retries import History, Retries, Step
from dmq.client.routes import Route, Routes
from dmq.client.session import OnAnswer, Pending
from dmq.client.url import Address
from dmq.clock import Clock
from dmq.errors import Busy, DMQError, NotConnected, OutOfRetries, UnknownTopic
from dmq.protocol import Buffer, Command, Flag, Frame, Header, decode_response, pack_batch
from dmq.protocol.admin import TopicDescribe, TopicDescribeReply
from dmq.protocol.producing import Durability, Produce, ProduceFlag, ProduceReply
from dmq.protocol.session import Limits
from dmq.records import Compressor, encode_batch

__all__ = ["Lines", "Link", "Sender"]

log = logging.getLogger(__name__)

SCAN_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 0.5
_BODY_BYTES_MAX: Final = 4 << 20  # before a broker has told its own


class Link(Protocol):
    """A connection, as far as senders see it."""

    @property
    def address(self) -> Address: ...

    @property
    def limits(self) -> Limits: ...

    def submit(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = ...,
        *,
        on_answer: OnAnswer,
        flags: int = ...,
        attended: bool = ...,
    ) -> Pending: ...

    def tell(self, command: int, header: Header, body: Sequence[Buffer] = ...) -> None: ...

    def forget(self, pending: Pending) -> bool: ...


class Lines(Protocol):
    """All connections of a client, as far as senders see them."""

    def current(self) -> Link | None:
        """The link in use; None while there is none."""
        ...

    def has_other(self, link: Link) -> bool:
        """Whether another broker than this link's could be asked."""
        ...

    def find_other(self, link: Link, found: Callable[[Link | None], None]) -> None:
        """Have `found` called with a link to another broker, or None if none answers. Does not block."""
        ...

    def call_later(self, seconds: float, function: Callable[[], None]) -> None: ...

    def notify(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a user's callback called where it can block nobody."""
        ...


class Sender:
    """What sends one producer's batches."""

    def __init__(
        self,
        app: str,
        accumulator: Accumulator,
        retries: Retries,
        routes: Routes,
        lines: Lines,
        clock: Clock,
        compressor: Compressor | None,
    ) -> None:
        self.lock: Final = threading.Lock()  # guards the accumulator and what is here
        self._app = app
        self._accumulator = accumulator
        self._retries = retries
        self._routes = routes
        self._lines = lines
        self._clock = clock
        self._compressor = compressor
        self._encoding = threading.Lock()  # a compressor serves one thread at a time
        self._parked: list[Batch] = []
        self._under_way: dict[Batch, Link] = {}
        self._is_scanning = False
        self.closed_by: DMQError | None = None
        self.body_bytes_max = _BODY_BYTES_MAX
        """What the broker in use takes as a body, after compression."""

    # --- out --------------------------------------------------------------------------------------------------------

    def pump(self, lane: Lane) -> None:
        """Send what is ready to go in a lane."""
        while True:
            link = self._lines.current()
            if link is None:
                return
            route = self._routes.get(lane.key.topic)
            with self.lock:
                batch = self._accumulator.next_batch(lane, route.queues if route else 1)
            if batch is None:
                return
            self._dispatch(batch, link)
            if lane.is_idle:
                return

    def encode(self, batch: Batch) -> None:
        """Turn a batch's messages into the body of its request.

        Raises:
            InvalidMessage, MessageTooLarge: a message cannot be sent.
        """
        with self._encoding:
            encoded = encode_batch(
                batch.topic,
                self._app,
                batch.messages,
                sent_at_ms=self._clock.now_ms(),
                compressor=self._compressor,
                extra=batch.extras if batch.has_extras else b"",
                body_bytes_max=self.body_bytes_max,
            )
        batch.keys = len(encoded.hashes)
        batch.body = pack_batch(encoded, batch.dues)
        batch.messages = []  # the records hold everything; the objects may go
        batch.extras = []

    def _dispatch(self, batch: Batch, link: Link) -> None:
        try:
            if batch.body is None:
                self.encode(batch)
            self._send(batch, link)
        except NotConnected as error:
            batch.last_error = error
            self._park(batch)
        except Busy as error:
            batch.last_error = error
            self._lines.call_later(error.retry_after or 0.05, lambda: self._again(batch))
        except DMQError as error:
            self._end(batch, None, error)

    def _send(self, batch: Batch, link: Link) -> None:
        key = batch.lane.key
        assert batch.body is not None
        timeout_ms = 0
        now = self._clock.monotonic()
        if key.durability == Durability.CONSUMED and batch.deadline is not None:
            # The broker's time is over a little sooner, so that its answer, which says where the message is, arrives.
            left = batch.deadline - now
            timeout_ms = max(1, int((left - min(ANSWER_SECONDS, left / 4)) * 1000))
        header = Produce(
            key.topic,
            batch.queue,
            batch.count,
            batch.keys,
            batch.producer_id,
            0,
            batch.first_sequence,
            key.durability,
            ProduceFlag.DUES if key.is_delayed else 0,
            key.group,
            timeout_ms,
        )
        if key.durability == Durability.NONE:
            link.tell(Command.PRODUCE, header, batch.body)
            self._end(batch, ProduceReply(batch.queue, 0, 0, Durability.NONE), None, is_alone=True)
            return
        if batch.sent_at is None:
            batch.sent_at = now
            if batch.deadline is None:
                batch.deadline = now + self._retries.give_up_after
        batch.broker = str(link.address)
        if self._routes.begin_refresh(key.topic, now):
            self._ask_for(key.topic, link)
        with self.lock:
            self._under_way[batch] = link
            must_scan, self._is_scanning = not self._is_scanning, True
        try:
            batch.pending = link.submit(
                Command.PRODUCE,
                header,
                batch.body,
                on_answer=lambda answer: self._answered(batch, link, answer),
                flags=Flag.RESEND if batch.is_unanswered else 0,
                attended=batch.is_attended,
            )
        except DMQError:
            with self.lock:
                self._under_way.pop(batch, None)
            raise
        finally:
            if must_scan:
                self._lines.call_later(SCAN_SECONDS, self._scan)

    # --- back -------------------------------------------------------------------------------------------------------

    def _answered(self, batch: Batch, link: Link, answer: Frame | DMQError) -> None:
        with self.lock:
            self._under_way.pop(batch, None)
        if isinstance(answer, DMQError):
            batch.is_unanswered = True
            batch.last_error = answer
            self._park(batch)
            return
        try:
            reply: ProduceReply = decode_response(answer)
        except DMQError as error:
            self._refused(batch, link, error)
        else:
            self._end(batch, reply, None)

    def _refused(self, batch: Batch, link: Link, error: DMQError) -> None:
        batch.last_error = error
        verdict = self._retries.after_refusal(
            self.history(batch), error, self._clock.monotonic(), self._lines.has_other(link)
        )
        if verdict.step is Step.FAIL:
            self._end(batch, None, error)
            return
        batch.is_attended = True  # from now on things happen while nobody may be waiting
        batch.refusals += error.retry_after is None
        if error.code == "SERVER_ERROR":
            batch.is_unanswered = True
        if verdict.step is Step.REFRESH:
            batch.is_refreshed = True
            self._refresh(batch, link)
        elif verdict.step is Step.ELSEWHERE:
            batch.moves += 1
            self._lines.find_other(
                link, lambda other: self._again(batch) if other is None else self._dispatch(batch, other)
            )
        else:
            self._lines.call_later(verdict.pause, lambda: self._again(batch))

    def _again(self, batch: Batch) -> None:
        if batch.is_done:
            return
        link = self._lines.current()
        if link is None or not self._retries.may_move(self.history(batch), batch.broker == str(link.address)):
            self._park(batch)
        else:
            self._dispatch(batch, link)

    def _refresh(self, batch: Batch, link: Link) -> None:
        """Ask whether the topic is there, and with how many queues; then send again, or give up."""

        def learned(answer: Frame | DMQError) -> None:
            self.learn(batch.topic, answer)
            route = self._routes.get(batch.topic)
            if isinstance(answer, Frame) and (route is None or batch.queue >= route.queues):
                assert isinstance(batch.last_error, DMQError)
                self._end(batch, None, batch.last_error)
            else:
                self._again(batch)

        try:
            link.submit(Command.TOPIC_DESCRIBE, TopicDescribe(batch.topic), on_answer=learned)
        except DMQError:
            self._park(batch)

    def _ask_for(self, topic: str, link: Link) -> None:
        """Ask for a topic anew, and go on with what is known of it meanwhile."""
        try:
            link.submit(
                Command.TOPIC_DESCRIBE, TopicDescribe(topic), on_answer=lambda answer: self.learn(topic, answer)
            )
        except DMQError:
            self._routes.end_refresh(topic)

    def learn(self, topic: str, answer: Frame | DMQError) -> None:
        """What a broker said of a topic."""
        try:
            if isinstance(answer, DMQError):
                raise answer
            described: TopicDescribeReply = decode_response(answer)
        except UnknownTopic:
            self._routes.drop(topic)
        except DMQError:
            self._routes.end_refresh(topic)
        else:
            self._routes.put(topic, Route.of(described.info.config, self._clock.monotonic()))

    def _park(self, batch: Batch) -> None:
        """Keep a batch until a connection is back; if one is there already, it goes at once."""
        batch.is_attended = True
        with self.lock:
            closed_by = self.closed_by
            if closed_by is None:
                self._parked.append(batch)
        if closed_by is not None:
            self._end(batch, None, closed_by)
        elif (link := self._lines.current()) is not None:
            self.connected(link)

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self, link: Link) -> None:
        """A link is in use: what was parked goes out over it, then what has gathered."""
        self.body_bytes_max = link.limits.body_bytes_max
        with self.lock:
            parked, self._parked = self._parked, []
        held = []
        for batch in parked:
            if batch.is_done:
                continue
            if self._retries.may_move(self.history(batch), batch.broker in ("", str(link.address))):
                self._dispatch(batch, link)
            else:
                held.append(batch)
        with self.lock:
            self._parked += held
            lanes = self._accumulator.waiting_lanes()
            must_scan = bool(held) and not self._is_scanning
            self._is_scanning = self._is_scanning or must_scan
        if must_scan:
            self._lines.call_later(SCAN_SECONDS, self._scan)
        for lane in lanes:
            self.pump(lane)

    def _scan(self) -> None:
        """Once a second while anything is under way: send again what stays unanswered, give up what did too long."""
        now = self._clock.monotonic()
        with self.lock:
            under_way = [*self._under_way.items()]
            parked = [batch for batch in self._parked if batch.sent_at is not None]
            self._is_scanning = bool(under_way or parked)
            must_go_on = self._is_scanning
        for batch, link in under_way:
            if batch.sent_at is None or batch.is_done or batch.lane.key.durability == Durability.CONSUMED:
                continue
            is_given_up = self._retries.is_given_up(batch.sent_at, now)
            if not is_given_up and not self._retries.is_resend_due(batch.resends, batch.sent_at, now):
                continue
            if batch.pending is None or not link.forget(batch.pending):  # type: ignore[arg-type]
                continue  # its answer is being handed over
            with self.lock:
                self._under_way.pop(batch, None)
            if is_given_up:
                self._end(batch, None, self._out_of_retries(batch))
                continue
            batch.resends += 1
            batch.is_unanswered = batch.is_attended = True
            self._dispatch(batch, link)
        for batch in parked:
            assert batch.sent_at is not None
            if self._retries.is_given_up(batch.sent_at, now):
                self._end(batch, None, self._out_of_retries(batch))
        if must_go_on:
            self._lines.call_later(SCAN_SECONDS, self._scan)

    def _out_of_retries(self, batch: Batch) -> OutOfRetries:
        return OutOfRetries(
            f"sent {batch.resends + 1} times within {self._retries.give_up_after:g} s and never answered; whether the "
            "message is stored is not known",
            resends=batch.resends,
        )

    def _end(self, batch: Batch, reply: ProduceReply | None, error: DMQError | None, *, is_alone: bool = False) -> None:
        if batch.is_done:
            return
        callbacks = batch.end(reply, error)
        batch.body = None
        with self.lock:
            self._under_way.pop(batch, None)
            lanes = self._accumulator.finished(batch)
            waiters = [] if callbacks else self._accumulator.release(batch)
        for waiter in waiters:
            waiter.wake()
        if callbacks:
            self._lines.notify(self._call_back, batch, callbacks)
        if not is_alone:  # else nobody waited for it, and whoever sent it sends the next one too
            for lane in lanes:
                self.pump(lane)

    def _call_back(self, batch: Batch, callbacks: list[Callable[[], Any]]) -> Awaitable[None] | None:
        """Run a batch's callbacks; its room in the window is free afterwards, so that slow callbacks push back.

        Returns what is still to be awaited, where callbacks are coroutine functions.
        """
        waiting = []
        for callback in callbacks:
            try:
                result = callback()
            except Exception:
                log.exception("a delivery callback raised", extra={"topic": batch.topic})
            else:
                if result is not None and isawaitable(result):
                    waiting.append(result)
        if waiting:
            return self._await_callbacks(batch, waiting)
        self._release(batch)
        return None

    async def _await_callbacks(self, batch: Batch, waiting: list[Awaitable[Any]]) -> None:
        for awaitable in waiting:
            try:
                await awaitable
            except Exception:
                log.exception("a delivery callback raised", extra={"topic": batch.topic})
        self._release(batch)

    def _release(self, batch: Batch) -> None:
        with self.lock:
            waiters = self._accumulator.release(batch)
        for waiter in waiters:
            waiter.wake()

    def withdraw(self, batch: Batch, error: DMQError) -> bool:
        """Take back a batch that was never sent; False if it was, or may be any moment."""
        with self.lock:
            if batch.sent_at is not None or batch.is_done:
                return False
            is_waiting = self._accumulator.withdraw(batch)
            if not is_waiting:
                if batch not in self._parked:
                    return False
                self._parked.remove(batch)
        self._end(batch, None, error)
        return True

    def unreachable(self, error: DMQError) -> None:
        """No broker was reached for as long as the client waits: what was never sent fails."""
        with self.lock:
            batches = [batch for batch in self._accumulator.unsettled() if batch.sent_at is None]
        for batch in batches:
            self.withdraw(batch, error)

    def close(self, error: DMQError) -> None:
        """End everything that is not settled with this error."""
        with self.lock:
            self.closed_by = self.closed_by or error
            self._parked.clear()
            batches = [*self._accumulator.unsettled()]
            for batch in batches:
                self._accumulator.withdraw(batch)
        for batch in batches:
            self._end(batch, None, error)

    @staticmethod
    def history(batch: Batch) -> History:
        """What happened to a batch so far."""
        return History(
            batch.refusals,
            batch.moves,
            batch.is_unanswered,
            batch.lane.key.queue >= 0,
            batch.is_refreshed,
            batch.deadline,
        )
