"""A subscription: what a consumer tells the broker and hears from it, over whichever connection is in use.

The blocking and the asyncio consumer are subscriptions; each brings its own way to wait. No sockets, no threads.

What always holds: after a reconnect the subscription is sent again as itself, with the leases still held (D-22); the
name in the group stays when the connection changes, and no two consumers share it; words about messages are sent once,
and kept while there is no connection; an error of the broker that trying again cannot help ends the subscription.

Pulling: batches that are asked for, and one that is asked for before it is wanted. No sockets, no threads.

A program that pulls batch after batch spends its time in turns with the broker: it waits, then the broker does. So once
it has asked twice for the same and got all of it, or with a filter a good part of it, the next batch is asked for when
one is handed out, and what was said of the batch before travels with that request.

What always holds: what is read ahead and what is in hand is never more than the prefetch; read-ahead messages wait like
any others, so they go back untried when the consumer pauses, closes or does not get on, and are dropped by a seek;
their leases run from when they were asked for. Ordered groups and those with `parallel` read nothing ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from dmq.client.arguments import check_whole
from dmq.client.connection.link import Link
from dmq.client.connection.session import OnAnswer, Pending
from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import Part
from dmq.client.consumer.strategy import STRATEGIES, diff
from dmq.clock import Clock
from dmq.errors import DMQError, InvalidRequest, InvalidSettings, NotConnected
from dmq.protocol import Buffer, Command, Frame, Header, decode_response, error_from_status
from dmq.protocol.consume import (
    Assign,
    Credit,
    GroupMembers,
    Lease,
    PullReply,
    Push,
    Settle,
    SettleReply,
    SubscribeReply,
    SubscriptionEnded,
    Unsubscribe,
)
from dmq.protocol.header import LIST_MAX
from dmq.protocol.session import ServerReboot
from dmq.protocol.status import ErrorHeader
from dmq.records import ANY_QUEUE

__all__ = ["ANSWER_SECONDS", "LAST_WORDS_SECONDS", "Ask", "Pulling", "Subscription", "unreached"]

log = logging.getLogger(__name__)


ANSWER_SECONDS: Final = 10.0
LAST_WORDS_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 0.5
TICKS_PER_LEASE: Final = 4
ALL: Final = 1 << 30


class NamedLink(Link, Protocol):
    """A connection, as far as consumers see it."""

    @property
    def client_id(self) -> str: ...

    def submit(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = ...,
        *,
        on_answer: OnAnswer,
        flags: int = ...,
        attended: bool = ...,
        before: Sequence[tuple[int, Header]] = ...,
    ) -> Pending: ...


class Lines(Protocol):
    """All connections of a client, as far as consumers see them."""

    def current(self) -> NamedLink | None: ...

    @property
    def call_later(self) -> Callable[[float, Callable[[], None]], None]: ...


class Subscription:
    """See the module.

    Parameters:
        number: of the subscription, unique within the client.
        extend: keeps a lease for so many seconds, and waits for the answer.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        number: int,
        lines: Lines,
        clock: Clock,
        extend: Callable[[Delivery, float], object],
    ) -> None:
        self._options = options
        self._number = number
        self._lines = lines
        self._core = ConsumerCore(options, clock, extend)
        self._core.on_reports = self._report
        self._core.on_free = self._wake_all
        self._queues: list[int] = []  # that it takes by its strategy
        self._is_started = False
        self._has_pulled = False
        self.is_closing = False
        self._is_closed = False

    # --- what each consumer does in its own way ---------------------------------------------------------------------

    def wake(self, count: int = ALL, *, nudge: bool = False) -> None:
        """Have so many of those who wait for messages look again; also one that reads, if nudged."""
        raise NotImplementedError

    def _report(self, is_urgent: bool) -> None:
        raise NotImplementedError

    def _wake_all(self) -> None:
        self.wake(nudge=True)

    # --- control ----------------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[int, ...] | None:
        """The queues it takes by its strategy now; None without one, since the broker then shares out messages."""
        return tuple(self._queues) if self._options.strategy else None

    def stop(self) -> None:
        """Begin to close, without waiting: iterators and `run` come to their end."""
        self.is_closing = True
        self.wake(nudge=True)

    def _check_open(self) -> None:
        if self.is_closing:
            raise NotConnected("the consumer is closed: make another one with client.consumer()")

    def _set_paused(self, is_paused: bool) -> None:
        if self._core.is_paused != is_paused:
            self._core.is_paused = is_paused
            self._change_credit(-self._options.prefetch if is_paused else self._options.prefetch)
            self.wake(nudge=True)

    def _change_credit(self, messages: int, link: Link | None = None) -> None:
        link = link or self._lines.current()
        if self._is_started and link is not None:
            try:
                link.tell(Command.CREDIT, Credit(self._number, messages))
            except NotConnected:
                pass  # the next subscription has it right

    # --- reporting --------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Tell the broker what was said of messages."""
        self._send(self._core.reports(), is_kept=True)

    def _send(self, frames: list[Settle], *, is_kept: bool) -> None:
        link = self._lines.current()
        for at, frame in enumerate(frames):
            try:
                if link is None:
                    raise NotConnected("no connection")
                link.tell(Command.SETTLE, frame)
            except DMQError:
                if is_kept:
                    self._core.not_sent(frames[at:])
                return

    def _tick(self) -> None:
        if not self._is_closed:
            self._send(self._core.tick(), is_kept=False)
            self._lines.call_later(self._options.lease / TICKS_PER_LEASE, self._tick)

    # --- subscribing ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Subscribe, now or when there is a connection."""
        self._is_started = True
        link = self._lines.current()
        if link is not None:
            self._subscribe(link)
        self._lines.call_later(self._options.lease / TICKS_PER_LEASE, self._tick)

    def _member(self, link: NamedLink) -> str:
        """Our name in the group. Members of a broadcast group go by their client id."""
        if not self._core.member and not self._options.broadcast:
            self._core.member = f"{link.client_id[:200]}.{self._number}"
        return self._core.member

    def _subscribe(self, link: NamedLink) -> None:
        header = self._options.subscribe(self._number, self._member(link), self._core.holding(), self._queues)
        try:
            link.submit(
                Command.SUBSCRIBE, header, on_answer=lambda answer: self._subscribed(link, answer), attended=True
            )
        except DMQError:
            pass  # the connection is gone; the next one is subscribed on

    def _subscribed(self, link: NamedLink, answer: Frame | DMQError) -> None:
        if isinstance(answer, DMQError):
            return  # the connection is gone
        try:
            reply: SubscribeReply = decode_response(answer)
        except DMQError as error:
            if error.retriable:
                self._lines.call_later(error.retry_after or AGAIN_SECONDS, lambda: self._again(link))
            else:
                self._end(error)
            return
        self._core.subscribed(reply)
        if self._core.is_paused:
            self._change_credit(-self._options.prefetch)
        self._flush()

    def _divide(self, link: NamedLink, told: GroupMembers) -> None:
        """The members or the queues are others than before: drop and take what that means for us (R-08)."""
        if not self._options.strategy or self._core.member not in told.members:
            return  # the news is older than our subscription
        wanted = STRATEGIES[self._options.strategy](range(told.queues), told.members)[self._core.member]
        dropped, added = diff(self._queues, wanted)
        if not dropped and not added:
            return
        self._queues = wanted
        log.info("queues divided", extra={"group": self._options.group, "dropped": dropped, "added": added})
        try:
            link.tell(Command.ASSIGN, Assign(self._number, wanted))
        except DMQError:
            pass  # the next subscription has it right
        if dropped:
            self._core.release_queues(frozenset(dropped))  # behind it, or they would come straight back

    def _give_back_stray(self, leases: Sequence[Lease]) -> None:
        """Give back what was on its way from queues that we had dropped by then."""
        if self._options.strategy:
            stray = {lease.queue for lease in leases}.difference(self._queues)
            if stray:
                self._core.release_queues(stray)

    def _again(self, link: NamedLink) -> None:
        if not self.is_closing and self._lines.current() is link:
            self._subscribe(link)

    def _end(self, error: DMQError) -> None:
        self._core.ended = self._core.ended or error
        self.wake(nudge=True)

    # --- told by the transport --------------------------------------------------------------------------------------

    def connected(self, link: NamedLink) -> None:
        if self._is_started and not self.is_closing:
            self._subscribe(link)
        elif not self._options.ordered:  # an ordered group must be joined first, or its acks say nothing
            self._flush()
        self.wake()

    def lost(self, link: NamedLink, reason: DMQError) -> None:
        self.wake()

    def pushed(self, link: NamedLink, push: Pushed) -> None:
        header = push.header
        if isinstance(header, Push):
            if header.subscription == self._number:
                count = self._core.received(header.leases, push.body)
                self._give_back_stray(header.leases)
                self.wake(count)
        elif isinstance(header, GroupMembers):
            if header.subscription == self._number:
                self._divide(link, header)
        elif isinstance(header, SubscriptionEnded):
            if header.subscription == self._number:
                log.warning("subscription ended", extra={"group": self._options.group, "reason": header.message})
                self._end(error_from_status(header.status, ErrorHeader(header.message)))
        elif isinstance(header, ServerReboot):
            self._core.release_waiting()  # it drains: what nobody has begun can wait for its return

    def unreachable(self, error: DMQError) -> None:
        pass  # it goes on trying, and so do we

    def closed(self, error: DMQError) -> None:
        self._end(error)


def check_extended(reply: SettleReply, delivery: Delivery, deadline: float) -> None:
    """Take note of an extension.

    Raises:
        LeaseLost: it came too late.
    """
    for refusal in reply.refused:
        raise error_from_status(refusal.status, ErrorHeader(refusal.message))
    delivery.deadline = max(delivery.deadline, deadline)


_AT_ONCE: Final = 0.0
_UNEVEN: Final = 4
_WAIT_MAX: Final = 1_000_000.0


class Ask(NamedTuple):
    """What a pull asks for."""

    max_messages: int
    queue: int = ANY_QUEUE


class Pulling(Subscription):
    """A subscription that can be pulled from instead; see the module."""

    _last_ask: Ask | None = None  # if it got all it asked for
    _stock_ask: Ask | None = None  # what was read ahead last
    _is_ticking = False
    _is_under_way = False  # something is being read ahead

    @property
    def group(self) -> str:
        """With whom it shares the work."""
        return self._options.group

    def _check_pull(self, max_messages: int, wait: Any, queue: int | None) -> Ask:
        """What a pull asks for; refuses one that makes no sense.

        Raises:
            InvalidRequest: messages are pushed here.
            InvalidSettings: a value makes no sense.
            NotConnected: the consumer is closed.
        """
        if self._options.strategy:
            raise InvalidRequest(
                "a consumer with a strategy gets its queues pushed: iterate over it or run() it, or leave the strategy "
                "out and choose with pull(queue=)"
            )
        if self._is_started:
            raise InvalidRequest("this consumer is subscribed: make another one to pull with")
        self._check_open()
        if self._core.ended is not None:
            raise type(self._core.ended)(self._core.ended.message, **self._core.ended.detail)
        check_whole("max_messages", max_messages, 1, LIST_MAX)
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait <= _WAIT_MAX:
            raise InvalidSettings(f"wait is a time in seconds, not {wait!r}")
        self._has_pulled = True
        return Ask(max_messages, ANY_QUEUE if queue is None else check_whole("queue", queue, 0, ANY_QUEUE - 1))

    def _farewell(self, link: NamedLink) -> Unsubscribe | None:
        """What tells the broker that this member is gone; None if it never was there."""
        if self._is_started:
            return Unsubscribe(self._number)
        if not self._has_pulled:
            return None
        return Unsubscribe(self._number, True, self._options.topic, self._options.group, self._member(link))

    def _from_stock(self, ask: Ask) -> list[Part]:
        """What was read ahead, if it is what is wanted now; else it goes back."""
        core = self._core
        core.has_company = False
        if not core.prefetched[0]:
            return []
        if self._stock_ask is not None and ask.queue not in (self._stock_ask.queue, ANY_QUEUE):
            core.release_waiting()
            return []
        return core.take_parts(ask.max_messages)

    def _read_ahead(self, link: NamedLink | None, ask: Ask, got: int) -> None:
        """A pull got so many: ask for what the next one will want, if it will, and report what is to be reported."""
        # What a filter lets through comes in uneven batches, as much as the broker finds in one look.
        enough = ask.max_messages if not self._options.tags else ask.max_messages // _UNEVEN
        is_repeated, self._last_ask = ask == self._last_ask, ask if got and got >= enough else None
        if (
            link is None
            or not is_repeated
            or self._last_ask is None
            or self.is_closing
            or self._is_under_way
            or not self._core.has_room_for(ask.max_messages, got)
        ):
            self._flush()
            return
        since = self._core.now()
        header = self._options.pull(self._member(link), ask.max_messages, _AT_ONCE, ask.queue)
        frames = self._core.reports()
        self._is_under_way, self._stock_ask = True, ask
        try:
            link.submit(
                Command.PULL,
                header,
                on_answer=lambda answer: self._stocked(answer, since),
                attended=False,
                before=[(Command.SETTLE, frame) for frame in frames],
            )
        except DMQError:
            self._is_under_way = False
            self._core.not_sent(frames)
            return  # the next pull says why
        self._core.has_company = True
        if not self._is_ticking:
            self._is_ticking = True
            self._lines.call_later(self._options.lease / TICKS_PER_LEASE, self._tick)

    def _stocked(self, answer: Frame | DMQError, since: float) -> None:
        """What was read ahead is here."""
        try:
            if not isinstance(answer, DMQError) and not answer.status:
                reply: PullReply = decode_response(answer)
                self._core.received(reply.leases, answer.body, since)
        finally:
            self._is_under_way = False
            if self._core.is_paused or self.is_closing:
                self._core.release_waiting()
            self.wake()

    def _set_paused(self, is_paused: bool) -> None:
        super()._set_paused(is_paused)
        if is_paused and not self._is_started:
            self._core.release_waiting()


def unreached(error: DMQError, wait: float) -> DMQError:
    """What a pull ends with that found no broker: the last try had next to no time, and it says so."""
    if not isinstance(error, NotConnected):
        return error
    return NotConnected(f"no broker could be reached within {max(wait, 0):g} s")
