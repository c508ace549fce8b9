"""A subscription: what a consumer tells the broker and hears from it, over whichever connection is in use.

The blocking and the asyncio consumer are subscriptions; each brings its own way to wait. No sockets, no threads.

What always holds: after a reconnect the subscription is sent again as itself, with the leases still held (D-22); the
name in the group stays when the connection changes, and no two consumers share it; words about messages are sent once,
and kept while there is no connection; an error of the broker that trying again cannot help ends the subscription.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from dmq.client.consuming import ConsumerCore
from dmq.client.delivery import Delivery
from dmq.client.links import Link
from dmq.client.rebalance import STRATEGIES, diff
from dmq.client.session import OnAnswer, Pending
from dmq.client.session import Push as Pushed
from dmq.client.subscribing import ConsumerOptions
from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected
from dmq.protocol import Buffer, Command, Frame, Header, decode_response, error_from_status
from dmq.protocol.consuming import (
    Assign,
    Credit,
    GroupMembers,
    Lease,
    Push,
    Settle,
    SettleReply,
    SubscribeReply,
    SubscriptionEnded,
)
from dmq.protocol.session import ServerReboot
from dmq.protocol.status import ErrorHeader

__all__ = ["ANSWER_SECONDS", "LAST_WORDS_SECONDS", "Subscription"]

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
