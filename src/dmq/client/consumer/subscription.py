"""Subscriptions: what a consumer tells each broker that has queues of its topic, and what it hears from it.

A consumer has one subscription for each of these brokers. Leases, acks and credit belong to the broker they came from;
the consumer's prefetch is shared out among them, and each has as much credit of its share as handlers need. The
blocking and the asyncio consumer use the same subscriptions; each brings its own way to wait. No sockets, no threads.

What always holds: after a reconnect the subscription is sent again as itself, with the leases still held (D-22); the
name in the group is the same at all brokers, stays when a connection changes, and no two consumers share it; what is
said of messages is sent once, and kept while there is no connection; an error of a broker that trying again cannot help
ends the consumer. A push that may have lain unread for half of its lease is taken only once the broker has said that
the lease is still ours: so does one that came while the process stood still. A request at every tick keeps that rare.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from dmq.client.connection.link import Link
from dmq.client.connection.router import AnyPool, AnyRouter
from dmq.client.connection.session import OnAnswer, Pending
from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.leases import SETTLEMENTS_MAX, extension
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import LOOK_SECONDS, CreditWindow
from dmq.client.consumer.strategy import STRATEGIES, diff
from dmq.errors import DMQError, LimitReached, NotConnected
from dmq.event_log import EventLog
from dmq.protocol import Buffer, Command, Frame, Header, decode_response, error_from_status
from dmq.protocol.consume import (
    Assign,
    Credit,
    GroupMembers,
    Lease,
    Push,
    Settle,
    SettleReply,
    SubscribeReply,
    SubscriptionEnded,
    Unsubscribe,
)
from dmq.protocol.session import FRAME_CRC, Heartbeat, ServerReboot
from dmq.protocol.status import ErrorHeader, Status

__all__ = ["ALL", "ANSWER_SECONDS", "LAST_WORDS_SECONDS", "AnySubscriber", "NamedLink", "Subscription", "Subscriptions"]

log = EventLog(__name__)


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


class AnySubscriber(Protocol):
    """What subscriptions ask of the part of their consumer that waits and reports, in threads or on a loop."""

    def wake(self, count: int = ..., *, nudge: bool = ...) -> None:
        """Have so many of those who wait for messages look again; also one that reads, if nudged."""
        ...

    def flush(self) -> None:
        """Have `Subscriptions.report` called, now or by the thread that is at it."""
        ...

    def attend(self, link: Any) -> None:
        """Have pushes read from now on though nobody waits at this link."""
        ...


P = TypeVar("P", bound=AnyPool[NamedLink])


class Subscription(Generic[P]):
    """What a consumer has with one broker. Watches the pool of that broker.

    Parameters:
        all: the subscriptions of the consumer, with what they share.
        pool: keeps the connection to the broker.
    """

    def __init__(self, all: Subscriptions[P], pool: P) -> None:
        self._all = all
        self._core = all.core
        self._options = all.options
        self.pool: Final = pool
        self.book: Final = all.core.add_book()
        self.window: Final = CreditWindow(1, is_shared=not all.options.broadcast)
        self._told = 0  # what the broker takes for our credit
        self._is_held = False  # it is to send nothing, for a while
        self.queues: list[int] = []  # that it takes by its strategy
        self._link: NamedLink | None = None  # over which it was sent last
        self._subscribed_at: NamedLink | None = None  # the same, once it is on its way: credit must come behind it

    # --- out --------------------------------------------------------------------------------------------------------

    def member(self, link: NamedLink) -> str:
        """Our name in the group. Members of a broadcast group go by their client id."""
        self.book.is_vouched = FRAME_CRC in link.features
        if not self._core.member and not self._options.broadcast:
            self._core.member = f"{link.client_id[:200]}.{self._all.number}"
        return self._core.member

    def subscribe(self, link: NamedLink) -> None:
        """Subscribe over a link, for the first time or again; once, though two threads may come to it."""
        with self._core.lock:
            if self._link is link:
                return
            self._link, self._subscribed_at = link, None
            self._told = self.window.size
        if self._all.is_divided:
            self._all.subscriber.attend(link)
        holding = self._core.holding(self.book)
        header = self._options.subscribe(
            self._all.number,
            self.member(link),
            holding,
            self.queues,
            credit=self._told,
            share=self.window.ceiling,
        )
        try:
            link.submit(
                Command.SUBSCRIBE, header, on_answer=lambda answer: self._subscribed(link, answer), attended=True
            )
        except DMQError:
            return  # the connection is gone; the next one is subscribed on
        self._subscribed_at = link
        self.follow()

    def _subscribed(self, link: NamedLink, answer: Frame | DMQError) -> None:
        if isinstance(answer, DMQError):
            return  # the connection is gone
        try:
            reply: SubscribeReply = decode_response(answer)
        except DMQError as error:
            if error.retriable and not isinstance(error, LimitReached):  # somebody must first make room
                self.pool.call_later(error.retry_after or AGAIN_SECONDS, lambda: self._again(link))
            else:
                self._all.end(error)
            return
        self._core.subscribed(self.book, reply)
        self._all.subscriber.flush()

    def _again(self, link: NamedLink) -> None:
        if not self._all.is_closing and self.pool.current() is link:
            self._link = None
            self.subscribe(link)

    def hold(self, is_held: bool) -> None:
        """Have the broker send nothing, or go on."""
        self._is_held = is_held
        self.follow()

    def follow(self) -> None:
        """Tell the broker of the credit that it has now, if it is another."""
        link = self._link
        if link is None or link is not self._subscribed_at:
            return  # the subscription has it right, or is followed by what changed meanwhile
        with self._core.lock:
            credit = 0 if self._is_held or self._core.is_paused else self.window.size
            change, self._told = credit - self._told, credit
        if change:
            self._all.note_credit()
            try:
                link.tell(Command.CREDIT, Credit(self._all.number, change))
            except DMQError:
                pass  # as above

    def starve(self) -> None:
        """Handlers wait: if all our credit is in hand, ask for more."""
        window = self.window
        if window.size >= window.ceiling or not self.book.held:
            return
        if (in_hand := self._core.in_hand(self.book)) >= window.size:
            while in_hand >= window.size < window.ceiling:
                window.grow()
            self.follow()

    def report(self) -> None:
        """Tell the broker what was said of its messages, and with it how many more we take."""
        if self.book.has_reports:
            frames = self._core.reports(self.book)
            finished, self.book.finished = self.book.finished, 0
            self.window.finished(finished, self._core.now())
            self.follow()
            unsent = self.send(frames)
            if unsent:
                self._core.not_sent(self.book, unsent)

    def send(self, frames: Sequence[Settle]) -> Sequence[Settle]:
        """Tell the broker something of its leases; what could not be sent."""
        link = self.pool.current()
        for at, frame in enumerate(frames):
            try:
                if link is None:
                    return frames
                link.tell(Command.SETTLE, frame)
            except DMQError:
                return frames[at:]
        return ()

    def keep(self, deliveries: Sequence[Delivery]) -> None:
        """Ask for more time. A lease is longer only once the broker has said so."""
        link = self.pool.current()
        if link is None:
            return
        since = self._core.now()
        try:
            if not deliveries and self._all.is_started:  # its answer tells how old at most later pushes are
                link.submit(Command.HEARTBEAT, Heartbeat(0), on_answer=lambda answer: None, attended=False)
            for at in range(0, len(deliveries), SETTLEMENTS_MAX):
                self._ask_to_keep(link, deliveries[at : at + SETTLEMENTS_MAX], since)
        except DMQError:
            pass  # the leases end as they would have

    def _ask_to_keep(self, link: NamedLink, some: Sequence[Delivery], since: float) -> None:
        def on_answer(answer: Frame | DMQError) -> None:
            lost = refused_of(answer)
            if lost is not None:
                self._core.extended(some, lost, since)

        self._extend(link, [delivery.lease for delivery in some], on_answer)

    def _extend(self, link: NamedLink, leases: Sequence[Lease], on_answer: OnAnswer) -> None:
        options = self._options
        settlements = [extension(lease, options.lease) for lease in leases]
        header = Settle(options.topic, options.group, settlements, self._core.member)
        link.submit(Command.SETTLE, header, on_answer=on_answer, attended=True)

    def farewell(self, link: NamedLink) -> Unsubscribe | None:
        """What tells the broker that this member is gone; None if it never was there."""
        if self._all.is_started:
            return Unsubscribe(self._all.number)
        if not self._all.has_pulled:
            return None
        return Unsubscribe(self._all.number, True, self._options.topic, self._options.group, member=self.member(link))

    # --- in: told by the pool ---------------------------------------------------------------------------------------

    def connected(self, link: NamedLink) -> None:
        if self._all.is_started and not self._all.is_closing:
            self.subscribe(link)
        elif not self._options.ordered:  # an ordered group must be joined first, or its acks say nothing
            self._all.subscriber.flush()
        self._all.subscriber.wake()

    def lost(self, link: NamedLink, reason: DMQError) -> None:
        self._all.subscriber.wake()

    def pushed(self, link: NamedLink, push: Pushed) -> None:
        header = push.header
        if isinstance(header, Push):
            if header.subscription == self._all.number:
                lease_ms = min(lease.lease_ms for lease in header.leases) if header.leases else 0
                if push.since + lease_ms / 2000 < self._core.now():
                    self._confirm(link, header.leases, bytes(push.body))
                else:
                    self._take(header.leases, push.body, push.since)
        elif isinstance(header, GroupMembers):
            if header.subscription == self._all.number:
                self._divide(link, header)
        elif isinstance(header, SubscriptionEnded):
            # A member that does not lead any more: the subscription begins again at the leader.
            if header.subscription == self._all.number and header.status != Status.NOT_LEADER:
                log.warning("subscription ended", group=self._options.group, reason=header.message)
                self._all.end(error_from_status(header.status, ErrorHeader(header.message)))
        elif isinstance(header, ServerReboot):
            self._core.release_waiting(self.book)  # it drains: what nobody has begun can wait for its return

    def _take(self, leases: Sequence[Lease], body: Buffer, since: float, without: Container[int] = ()) -> None:
        count = self._core.received(self.book, leases, body, since, without=without, is_for_handlers=True)
        if count:
            self._all.look_later()
        self._give_back_stray(leases)
        self._all.subscriber.wake(count if self._all.is_divided else self._core.hands_for(count))

    def _confirm(self, link: NamedLink, leases: Sequence[Lease], body: bytes) -> None:
        """Take a push that may be old once its leases are known to be ours, without those that are not."""
        since = self._core.now()

        def on_answer(answer: Frame | DMQError) -> None:
            lost = refused_of(answer)
            if lost is not None and not self._all.is_closing:
                self._take(leases, body, since, lost)

        try:
            self._extend(link, leases, on_answer)
        except DMQError:
            pass  # the connection is gone, and the broker hands them out again

    def unreachable(self, error: DMQError) -> None:
        pass  # it goes on trying, and so do we

    def closed(self, error: DMQError) -> None:
        self._all.end(error)

    def forked(self, reason: NotConnected) -> None:
        self._core.is_paused = True  # what was prefetched is the parent's
        self._core.ended = reason

    # --- queues by a strategy ---------------------------------------------------------------------------------------

    def _divide(self, link: NamedLink, told: GroupMembers) -> None:
        """The members or the queues are others than before: drop and take what that means for us (R-08)."""
        if not self._options.strategy or self._core.member not in told.members:
            return  # the news is older than our subscription
        wanted = STRATEGIES[self._options.strategy](range(told.queues), told.members)[self._core.member]
        dropped, added = diff(self.queues, wanted)
        if not dropped and not added:
            return
        self.queues = wanted
        log.info("queues divided", group=self._options.group, dropped=dropped, added=added)
        try:
            link.tell(Command.ASSIGN, Assign(self._all.number, wanted))
        except DMQError:
            pass  # the next subscription has it right
        if dropped:
            # Behind the assignment, or they would come straight back.
            self._core.release_queues(self.book, frozenset(dropped))

    def _give_back_stray(self, leases: Sequence[Lease]) -> None:
        """Give back what was on its way from queues that we had dropped by then."""
        if self._options.strategy:
            stray = {lease.queue for lease in leases}.difference(self.queues)
            if stray:
                self._core.release_queues(self.book, stray)


class Subscriptions(Generic[P]):
    """All subscriptions of one consumer.

    Parameters:
        options: of the consumer.
        number: of the subscription, unique within the client, the same at all brokers.
        router: says which brokers have queues of the topic.
        core: what the consumer has in hand.
        subscriber: waits and reports for the consumer.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        number: int,
        router: AnyRouter[P, Any],
        core: ConsumerCore,
        subscriber: AnySubscriber,
    ) -> None:
        self.options: Final = options
        self.number: Final = number
        self.core: Final = core
        self.subscriber: Final = subscriber
        self._router = router
        self._all: list[Subscription[P]] = []
        self.is_started = False
        self.has_pulled = False
        self.is_closing = False
        self.is_closed = False
        self._is_ticking = False
        self._is_looking = False

    def __iter__(self) -> Iterator[Subscription[P]]:
        return iter([*self._all])

    @property
    def is_divided(self) -> bool:
        """Whether the queues of the topic are at several brokers."""
        return len(self._all) > 1

    @property
    def only(self) -> Subscription[P] | None:
        """The one subscription, unless the queues of the topic are at several brokers."""
        return self._all[0] if len(self._all) == 1 else None

    def of(self, delivery: Delivery) -> Subscription[P]:
        """With the broker that a delivery came from."""
        return self._all[delivery.broker]

    def at(self, queue: int) -> Subscription[P]:
        """With the broker that has a queue."""
        pool = self._router.pool_for(self.options.topic, queue)
        return next(one for one in self._all if one.pool is pool)

    @property
    def queues(self) -> tuple[int, ...] | None:
        """The queues it takes by its strategy now; None without one, since brokers then share out messages."""
        if not self.options.strategy:
            return None
        return tuple(sorted({queue for one in self._all for queue in one.queues}))

    def refresh(self) -> None:
        """Look which brokers have queues of the topic now. One that has none any more is kept for its leases."""
        known = {id(one.pool) for one in self._all}
        added = [pool for pool in self._router.pools_of(self.options.topic) if id(pool) not in known]
        if not added:
            return
        self._all += [Subscription(self, pool) for pool in added]
        share, left = divmod(self.options.prefetch, len(self._all))
        for at, one in enumerate(self._all):
            one.window.limit(max(1, share + (at < left)))
            one.window.begin(self._handlers, self.core.now())
            if one.pool not in added:
                one.follow()
                if (link := one.pool.current()) is not None:
                    self.subscriber.attend(link)
        for pool in added:
            pool.watch(next(one for one in self._all if one.pool is pool))

    def begin(self) -> None:
        """Subscribe everywhere, now or when there is a connection."""
        self.is_started = True
        for one in self._all:
            one.window.begin(self._handlers, self.core.now())
            link = one.pool.current()
            if link is not None:
                one.subscribe(link)
        self.note_credit()
        self.tick_later()

    def report(self) -> None:
        """Tell brokers what was said of their messages."""
        for one in self._all:
            one.report()

    def set_paused(self, is_paused: bool) -> None:
        """Have brokers keep what is not here yet, or not any more."""
        if self.core.is_paused != is_paused:
            self.core.is_paused = is_paused
            for one in self._all:
                one.follow()
            self.subscriber.wake(nudge=True)
        if is_paused and not self.is_started:
            self.core.release_waiting()

    @property
    def _handlers(self) -> float:
        """How many messages handlers work on at a time, of each broker; in an ordered group each has a lease."""
        each = self.options.batch if self.options.ordered else 1
        return self.core.handlers * each / len(self._all)

    def note_credit(self) -> None:
        """Have half of our credit returned at a time: handlers work on the other half meanwhile."""
        self.core.urgent_count = max(1, sum(one.window.size for one in self._all) // 2)

    def starve(self) -> None:
        """Handlers wait for messages: have more sent where we have all that we asked for."""
        for one in self._all:
            one.starve()

    def look_later(self) -> None:
        """Messages wait: look soon whether they are more than handlers get done."""
        if not self._is_looking:
            self._is_looking = True
            now = self.core.now()
            for one in self._all:
                one.window.watch(now)
            self._router.home.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        core, now = self.core, self.core.now()
        waiting = core.prefetched[0]
        # What waits in an ordered group waits for its queue, and nobody else can have it.
        if self.is_closed or core.is_paused or self.options.ordered or not waiting:
            return
        in_hand, brokers = core.in_hand(), len(self._all)
        for one in self._all:
            one.window.look(self._handlers, (in_hand - waiting) / brokers, now)
            one.follow()
        excess = in_hand - sum(one.window.size for one in self._all)
        if excess > 0:
            core.release_last(excess)
        self.look_later()

    def tick_later(self) -> None:
        """Look after the leases from now on."""
        if not self._is_ticking:
            self._is_ticking = True
            self._router.home.call_later(self.options.lease / TICKS_PER_LEASE, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        if not self.is_closed:
            self.refresh()
            for book, deliveries in self.core.tick():
                self._all[book.broker].keep(deliveries)
            self.tick_later()

    def check_open(self) -> None:
        """Refuse to work once closed.

        Raises:
            NotConnected: the consumer was closed.
        """
        if self.is_closing:
            raise NotConnected("the consumer is closed: make another one with client.consumer()")

    def end(self, error: DMQError) -> None:
        """There will be no messages any more."""
        self.core.ended = self.core.ended or error
        self.subscriber.wake(nudge=True)

    def unwatch(self) -> None:
        """Hear of nothing any more."""
        for one in self._all:
            one.pool.unwatch(one)


def refused_of(answer: Frame | DMQError) -> set[int] | None:
    """The settlements that a broker refused, by their index; None if it did not answer."""
    if isinstance(answer, DMQError):
        return None
    try:
        reply: SettleReply = decode_response(answer)
    except DMQError:
        return None
    return {refusal.index for refusal in reply.refused}


def check_extended(reply: SettleReply, delivery: Delivery, deadline: float) -> None:
    """Take note of an extension.

    Raises:
        LeaseLost: it came too late.
    """
    for refusal in reply.refused:
        raise error_from_status(refusal.status, ErrorHeader(refusal.message))
    delivery.deadline = max(delivery.deadline, deadline)
