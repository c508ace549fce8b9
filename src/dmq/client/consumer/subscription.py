"""Subscriptions: what a consumer tells each broker that has queues of its topic, and what it hears from it.

A consumer has one subscription for each of these brokers. Leases, acks and credit belong to the broker they came from;
the consumer's prefetch is shared out among them, more of it to those that have messages, and each has as much credit of
its share as handlers need. The blocking and the asyncio consumer use the same subscriptions; each brings its own way to
wait. No sockets, no threads.

What always holds: the shares together are the prefetch; of more brokers than that each may send one message, and one
too many goes back untouched. After a reconnect the subscription is sent again as itself, with the leases still held
(D-22); the name in the group is the same at all brokers, stays when a connection changes, and no two consumers share
it; what is said of messages is sent once, and kept while there is no connection; an error of a broker that trying again
cannot help ends the consumer. A push that may have lain unread for half of its lease is taken only once the broker has
said that the lease is still ours: so does one that came while the process stood still. Ticks keep that rare.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from dmq.client.connection.link import NamedLink
from dmq.client.connection.router import AnyPool, AnyRouter
from dmq.client.connection.session import OnAnswer
from dmq.client.connection.session import Push as Pushed
from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.leases import SETTLEMENTS_MAX, extension, refused_of
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.consumer.prefetch import LOOK_SECONDS, CreditWindow, loans
from dmq.client.consumer.strategy import SETTLED_SECONDS, STRATEGIES, Roll, diff
from dmq.errors import DMQError, LimitReached, NotConnected, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX, place_of, place_queue, place_shard
from dmq.protocol import Buffer, Command, Frame, decode_response, error_from_status
from dmq.protocol.consume import (
    Assign,
    Credit,
    GroupMembers,
    Lease,
    Point,
    Push,
    Settle,
    SubscribeReply,
    SubscriptionEnded,
    Unsubscribe,
)
from dmq.protocol.session import FRAME_CRC, Heartbeat, ServerReboot
from dmq.protocol.status import ErrorHeader, Status

__all__ = [
    "ALL",
    "ANSWER_SECONDS",
    "LAST_WORDS_SECONDS",
    "LEARN_SECONDS",
    "AnySubscriber",
    "Subscription",
    "Subscriptions",
]

log = EventLog(__name__)

_SETTLE: Final = int(Command.SETTLE)
ANSWER_SECONDS: Final = 10.0
LAST_WORDS_SECONDS: Final = 5.0
LEARN_SECONDS: Final = 1.0
"""How long to wait at a time to hear which brokers have the topic."""
AGAIN_SECONDS: Final = 0.5
UNKNOWN_SECONDS: Final = 1.0  # until one of several brokers is asked again that did not know the topic
TICKS_PER_LEASE: Final = 4
ALL: Final = 1 << 30


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
        is_late: the topic got queues there after the consumer had begun.
    """

    def __init__(self, all: Subscriptions[P], pool: P, *, is_late: bool = False) -> None:
        self._all = all
        self._core = all.core
        self._options = all.options
        self.pool: Final = pool
        self.standing: Final = pool.standing
        self.book: Final = all.core.add_book()
        self.window: Final = CreditWindow(1, is_shared=not all.options.broadcast)
        self.loans = 0  # shares of other brokers that are about to be this one's
        self.owed: list[tuple[Subscription[P], int]] = []  # of its own share, to whom
        self._begins_at = Point() if is_late else None  # if not where the consumer says
        self._told = self._told_bytes = 0  # what the broker takes for our credit
        self._is_held = False  # it is to send nothing, for a while
        self.queue_count = 0  # of the topic, here
        self.queues: list[int] = []  # that it takes by its strategy
        self._told_queues: list[int] = []  # what the broker takes for them
        self.refused_by: DMQError | None = None  # it does not know the topic, though others do
        self._link: NamedLink | None = None  # over which it was sent last
        self._subscribed_at: NamedLink | None = None  # the same, once it is on its way: credit must come behind it
        self.pulled_over: NamedLink | None = None  # the last link over which a pull was answered

    # --- out --------------------------------------------------------------------------------------------------------

    @property
    def start_from(self) -> Point:
        return self._begins_at or self._options.start_from

    @property
    def is_over(self) -> bool:
        """Whether nothing of the broker is in hand, and nothing is to be said to it, or never will be."""
        return self.pool.closed_by is not None or (not self.book.held and not self.book.has_reports)

    def member(self, link: NamedLink) -> str:
        """Our name in the group. Members of a broadcast group go by their client id."""
        self.book.is_vouched = FRAME_CRC in link.features
        self.book.shard = link.shard
        if not self._core.member and not self._options.broadcast:
            self._core.member = f"{link.client_id[:200]}.{self._all.number}"
        return self._core.member

    def subscribe(self, link: NamedLink) -> None:
        """Subscribe over a link, for the first time or again; once, though two threads may come to it."""
        with self._core.lock:
            if self._link is link:
                return
            self._link, self._subscribed_at = link, None
            self._told, self._told_bytes = self.window.size, self._credit_bytes
            self._told_queues = self.queues
        if self._all.is_divided:
            self._all.subscriber.attend(link)
        self.tell(link)
        holding = self._core.holding(self.book)
        header = self._options.subscribe(
            self.member(link),
            holding,
            self._told_queues,
            start_from=self.start_from,
            credit=Credit(self._all.number, self._told, self._told_bytes),
            share=self.window.ceiling,
        )
        try:
            link.submit(
                Command.SUBSCRIBE, header, on_answer=lambda answer: self._subscribed(link, answer), attended=True
            )
        except DMQError:
            return  # the next connection is subscribed on
        self._subscribed_at = link
        self.follow()
        self._tell_queues()

    def _subscribed(self, link: NamedLink, answer: Frame | DMQError) -> None:
        if isinstance(answer, DMQError):
            return  # the connection is gone
        try:
            reply: SubscribeReply = decode_response(answer)
        except DMQError as error:
            if error.retriable and not isinstance(error, LimitReached):  # somebody must first make room
                self.pool.call_later(error.retry_after or AGAIN_SECONDS, lambda: self._again(link))
            else:
                self._refused(link, error)
            return
        self.refused_by = None
        self.queue_count = reply.queues
        self._core.subscribed(self.book, reply)
        self._all.subscriber.flush()

    def _refused(self, link: NamedLink, error: DMQError) -> None:
        """The broker will not have us. One of several may not know of the topic yet, or no more: the others go on."""
        self.refused_by = error
        if isinstance(error, UnknownTopic) and any(one.refused_by is None for one in self._all):
            self.pool.call_later(UNKNOWN_SECONDS, lambda: self._again(link))
        else:
            self._all.end(error)

    def _again(self, link: NamedLink) -> None:
        is_over = self._all.is_closing or self._core.ended is not None
        if not is_over and self.pool.current() is link and self in self._all:
            self._link = None
            with contextlib.suppress(DMQError):  # what ended may have been an earlier one, and ours is there
                link.submit(Command.UNSUBSCRIBE, Unsubscribe(self._all.number, False), on_answer=lambda answer: None)
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
            credit, size = self.window.size, self._credit_bytes
            if self._is_held or self._core.is_paused or self._all.is_full or self._core.ended is not None:
                credit = 0
            change, self._told = credit - self._told, credit
            change_bytes, self._told_bytes = size - self._told_bytes, size
        if change or change_bytes:
            self._all.note_credit()
            with contextlib.suppress(DMQError):  # as above
                link.tell(Command.CREDIT, Credit(self._all.number, change, change_bytes))

    @property
    def _credit_bytes(self) -> int:
        """Its part of the bytes; 0 leaves it to the broker."""
        options = self._options
        return -(-options.prefetch_bytes * min(self.window.ceiling, options.prefetch) // options.prefetch)

    def after_pushes(self, done: Callable[[], None], answers: int = 2) -> None:
        """Have a function called once all is here that the broker sent before it heard what we told it last.

        What was pushed before an answer may be handled after it, if it came with it; not after a second one.
        """
        link = self._link
        try:
            if answers and link is not None and link is self._subscribed_at:
                link.submit(
                    Command.HEARTBEAT,
                    Heartbeat(0),
                    on_answer=lambda answer: self.after_pushes(done, answers - 1),
                    attended=True,
                )
                return
        except DMQError:
            pass  # nothing more comes over it
        done()

    def starve(self) -> None:
        """Handlers wait: if all our credit is in hand, ask for more."""
        window = self.window
        if not self.book.held or (window.size >= window.ceiling and not self._all.is_divided):
            return
        if (in_hand := self._core.in_hand(self.book)) >= window.size:
            if in_hand >= window.ceiling:
                self._all.claim(self)
            while in_hand >= window.size < window.ceiling:
                window.grow()
            self.follow()

    def report(self) -> None:
        """Tell the broker what was said of its messages, and with it how many more we take."""
        if self.book.has_reports:
            frames = self._core.reports(self.book)
            finished, self.book.finished = self.book.finished, 0
            if self.window.finished(finished, self._core.now()) and self._all.is_divided:
                self._all.claim(self)
            self.follow()
            if self.owed:
                self._all.repay(self)
            link = self.standing.in_use
            if link is None or not link.is_usable:
                self._core.not_sent(self.book, frames)
            else:
                self.tell(link, frames)

    def tell(self, link: NamedLink, frames: Sequence[Settle] = ()) -> None:
        """Tell the broker something of its leases, and first what may have been lost with the link before.

        What cannot be sent goes with the next reports.
        """
        frames, at = [*self._core.take_lost(self.book, link), *frames], 0
        try:
            for frame in frames:
                link.tell(_SETTLE, frame)
                at += 1
            if at and self._core.told(self.book, link, frames):
                link.submit(Command.HEARTBEAT, Heartbeat(0), on_answer=lambda answer: None, attended=False)
        except DMQError:
            if at < len(frames):
                self._core.told(self.book, link, frames[:at])
                self._core.not_sent(self.book, frames[at:])
        current = self.standing.in_use
        if at and current is not link and current is not None and current.is_usable:
            self.tell(current)  # the link broke under it, and the next one was there before this was noted

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

    def leave(self) -> None:
        """The topic has no queues at the broker any more."""
        self.pool.unwatch(self)
        link = self.pool.current()
        if link is not None and (farewell := self.farewell(link)) is not None:
            with contextlib.suppress(DMQError):  # it notices by itself
                link.submit(Command.UNSUBSCRIBE, farewell, on_answer=lambda answer: None, attended=False)

    # --- in: told by the pool ---------------------------------------------------------------------------------------

    def connected(self, link: NamedLink) -> None:
        if self._all.is_started and not self._all.is_closing and self._core.ended is None:
            self.subscribe(link)
        elif not self._options.ordered:  # an ordered group must be joined first, or its acks say nothing
            self._all.subscriber.flush()
        self._all.subscriber.wake()

    def lost(self, link: NamedLink, reason: DMQError) -> None:
        self._all.lost(self)
        self._all.subscriber.wake()

    def pushed(self, link: NamedLink, push: Pushed) -> None:
        header = push.header
        if isinstance(header, Push):  # of this subscription alone
            leases = header.leases
            lease_ms = leases[0].lease_ms if len(leases) == 1 else min([one.lease_ms for one in leases], default=0)
            if push.since + lease_ms / 2000 < self._core.now():
                self._confirm(link, leases, bytes(push.body))
            else:
                self._take(leases, push.body, push.since)
        elif isinstance(header, GroupMembers):
            if header.subscription == self._all.number:
                self.queue_count = header.queues
                self._all.told(self, header.members)
        elif isinstance(header, SubscriptionEnded):
            # A member that does not lead any more: the subscription begins again at the leader.
            if header.subscription == self._all.number and header.status != Status.NOT_LEADER:
                log.warning("subscription ended", group=self._options.group, reason=header.message)
                self._refused(link, error_from_status(header.status, ErrorHeader(header.message)))
        elif isinstance(header, ServerReboot):
            self._core.release_waiting(self.book)  # it drains: what nobody has begun can wait for its return

    def _take(self, leases: Sequence[Lease], body: Buffer, since: float, without: Container[int] = ()) -> None:
        count = self._core.received(self.book, leases, body, since, without=without, is_for_handlers=True)
        if not count and self._core.begun is not None:
            return  # the thread that reads handles it
        if count and not self._all.is_looking:
            self._all.look_later()
        if self._all.is_divided:
            self._all.received(self)
        if self._options.strategy:
            self._give_back_stray(leases)
        if self._core.ended is not None:
            self._core.release_waiting(self.book)  # nobody asks any more
        self._all.subscriber.wake(self._core.hands_for(count))

    def _confirm(self, link: NamedLink, leases: Sequence[Lease], body: bytes) -> None:
        """Take a push that may be old once its leases are known to be ours, without those that are not."""
        since = self._core.now()

        def on_answer(answer: Frame | DMQError) -> None:
            lost = refused_of(answer)
            if lost is not None and not self._all.is_closing:
                self._take(leases, body, since, lost)

        with contextlib.suppress(DMQError):  # the connection is gone, and the broker hands them out again
            self._extend(link, leases, on_answer)

    def unreachable(self, error: DMQError) -> None:
        pass  # it goes on trying, and so do we

    def closed(self, error: DMQError) -> None:
        self._all.closed(self, error)

    def forked(self, reason: NotConnected) -> None:
        self._core.is_paused = True  # what was prefetched is the parent's
        self._core.ended = reason

    # --- queues by a strategy ---------------------------------------------------------------------------------------

    def assign(self, wanted: list[int]) -> None:
        """These queues are ours now: drop and take what that means (R-08)."""
        dropped, added = diff(self.queues, wanted)
        if not dropped and not added:
            return
        self.queues = wanted
        log.info("queues divided", group=self._options.group, shard=self.book.shard, dropped=dropped, added=added)
        self._tell_queues()
        if dropped:
            # Behind the assignment, or they would come straight back.
            self._core.release_waiting(self.book, frozenset(dropped))

    def _tell_queues(self) -> None:
        """Tell the broker which queues we take, if they are others than it knows of."""
        link = self._link
        if link is None or link is not self._subscribed_at:
            return  # the subscription has it right, or is followed by what changed meanwhile
        with self._core.lock:
            queues, is_told = self.queues, self._told_queues == self.queues
            self._told_queues = queues
        if not is_told:
            with contextlib.suppress(DMQError):  # the next subscription has it right
                link.tell(Command.ASSIGN, Assign(self._all.number, queues))

    def _give_back_stray(self, leases: Sequence[Lease]) -> None:
        """Give back what was on its way from queues that we had dropped by then."""
        if stray := {lease.queue for lease in leases}.difference(self.queues):
            self._core.release_waiting(self.book, stray)


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
        self._by_book: dict[int, Subscription[P]] = {}
        self._roll = Roll()
        self.is_started = False
        self.has_pulled = False
        self.is_closing = False
        self.is_closed = False
        self._is_ticking = False
        self.is_looking = False
        self.is_full = False  # all of the prefetch is in hand, and brokers are more than it: they send nothing
        self._sharing = threading.Lock()  # held while shares of the prefetch move
        self._dividing = threading.Lock()
        self._must_divide = False
        router.watch_routes(self, self.routes_changed)

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
        return self._by_book[delivery.broker]

    @property
    def queues(self) -> tuple[int, ...] | None:
        """The places it takes by its strategy now; None without one, since brokers then share out messages."""
        if not self.options.strategy:
            return None
        return tuple(sorted({place_of(queue, one.book.shard) for one in self._all for queue in one.queues}))

    @property
    def is_routed(self) -> bool:
        """Whether it is known which brokers have the topic."""
        topic = self.options.topic
        return (
            self._router.book is None or topic.startswith(SYSTEM_PREFIX) or self._router.topic_route(topic) is not None
        )

    def refresh(self) -> None:
        """Look which brokers have queues of the topic now. One that has none any more is kept for its leases."""
        if not self.is_routed or self.core.ended is not None:
            return
        pools = self._router.pools_of(self.options.topic)
        with self._sharing:
            known = [one.pool for one in self._all]
            # Their first messages came after us: none of them is passed over.
            is_late = bool(known) and (self.is_started or self.has_pulled)
            added = [Subscription(self, pool, is_late=is_late) for pool in pools if pool not in known]
            gone = [one for one in self._all if one.pool not in pools and one.is_over]
            if not added and (not gone or len(gone) == len(self._all)):
                return
            kept = [one for one in self._all if one not in gone]
            self._all = kept + added
            self._by_book |= {one.book.broker: one for one in added}
            self._share_out(kept, sum(one.window.ceiling + sum(lent for _, lent in one.owed) for one in gone))
        for one in kept:
            one.follow()
            link = one.pool.current()
            if link is not None and self.is_divided:
                self.subscriber.attend(link)
        for one in added:
            one.pool.watch(one, self.number)
        for one in gone:
            one.leave()
        self.divide()

    def _share_out(self, kept: Sequence[Subscription[P]], freed: int) -> None:
        """Give each broker a share: an even one at first; later ones begin with one message, and claim what they need.

        Parameters:
            freed: the shares of those that are gone.
        """
        share, left = divmod(self.options.prefetch, len(self._all))
        for at, one in enumerate(self._all):
            if not kept:
                one.window.limit(max(1, share + (at < left)))
            elif one not in kept:
                if freed:
                    freed -= 1
                elif (largest := max(kept, key=lambda other: other.window.ceiling).window).ceiling > 1:
                    largest.limit(largest.ceiling - 1)
        for _ in range(freed):
            smallest = min(self._all, key=lambda other: other.window.ceiling).window
            smallest.limit(smallest.ceiling + 1)
        for one in self._all:
            one.window.begin(self._handlers, self.core.now())

    def routes_changed(self, topics: Container[str]) -> None:
        """Told by the router: the queues of topics are at other brokers than before."""
        if not self.is_closing and self.options.topic in topics:
            self.refresh()

    def lost(self, one: Subscription[P]) -> None:
        """There is no connection to a broker."""
        self._roll.lost(one.book.broker)
        if self.is_divided:
            self.divide()

    def closed(self, one: Subscription[P], error: DMQError) -> None:
        """There will be no connection to a broker any more. If it is one of several, the others go on."""
        if all(other.pool.closed_by is not None for other in self._all):
            self.end(error)

    # --- queues by a strategy ---------------------------------------------------------------------------------------

    def told(self, one: Subscription[P], members: list[str]) -> None:
        """A broker says who is in the group."""
        if self.options.strategy and self.core.member in members:  # else the news is older than our subscription
            self._roll.told(one.book.broker, members, self.core.now())
            self.divide()
            if self.is_divided:
                self._router.home.call_later(SETTLED_SECONDS, self.divide)

    def divide(self) -> None:
        """The members, the queues or the brokers may be others than before: drop and take what that means for us."""
        if not self.options.strategy:
            return
        self._must_divide = True
        while self._must_divide and self._dividing.acquire(False):
            try:
                self._must_divide = False
                self._divide()
            finally:
                self._dividing.release()

    def _divide(self) -> None:
        pools = self._router.pools_of(self.options.topic)
        ordered = [one for pool in pools for one in self._all if one.pool is pool]
        members = self._roll.members([one.book.broker for one in ordered], self.core.now())
        if members is None or self.is_closing:
            return
        places = {place_of(queue, one.book.shard) for one in ordered for queue in range(one.queue_count)}
        route = self._router.topic_route(self.options.topic)
        if route is not None:  # a shard without a leader has queues too
            places |= {place_of(queue, slot.shard) for slot in route.slots for queue in range(slot.queues)}
        wanted = STRATEGIES[self.options.strategy](places, members)[self.core.member]
        for one in self._all:
            one.assign([place_queue(place) for place in wanted if place_shard(place) == one.book.shard])

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
        if self.is_full:
            self._bound(self.core.in_hand())

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
        """Have half of our credit, or one broker's, returned at a time: handlers work on the rest meanwhile."""
        credit = sum(one.window.size for one in self._all)
        self.core.urgent_count = max(1, credit // max(2, len(self._all)))

    def starve(self) -> None:
        """Handlers wait for messages: have more sent where we have all that we asked for."""
        for one in self._all:
            if one.book.held:
                one.starve()

    # --- shares of the prefetch -------------------------------------------------------------------------------------

    def claim(self, one: Subscription[P]) -> None:
        """The share of a broker is too small: have it get what other brokers do not need of theirs."""
        if one.loans or not self._sharing.acquire(False):
            return  # it is about to get more, or somebody is at it
        try:
            subscriptions, now = [*self._all], self.core.now()
            if one not in subscriptions:
                return
            windows = [other.window for other in subscriptions]
            needed = [other.window.needed(self.core.in_hand(other.book), now) for other in subscriptions]
            even = self.options.prefetch // len(windows)
            found = [(subscriptions[at], lent) for at, lent in loans(windows, needed, windows.index(one.window), even)]
            for giver, lent in found:
                giver.window.limit(giver.window.ceiling - lent)
            one.loans = len(found)
        finally:
            self._sharing.release()
        for giver, lent in found:
            giver.follow()
            giver.after_pushes(lambda giver=giver, lent=lent: self._lend(giver, one, lent))  # type: ignore[misc]

    def _lend(self, giver: Subscription[P], taker: Subscription[P], lent: int) -> None:
        """A broker knows that it has less credit, and what it had sent before is here."""
        with self._sharing:
            taker.loans -= 1
            giver.owed.append((taker, lent))
        self.repay(giver)

    def repay(self, giver: Subscription[P]) -> None:
        """Give others what is theirs of a broker's share by now: as much as is not in hand any more."""
        in_hand = self.core.in_hand(giver.book) if giver in self._all else 0
        heirs = []
        with self._sharing:
            owed, giver.owed = giver.owed, []
            free = sum(lent for _, lent in owed) - max(0, in_hand - giver.window.ceiling)
            for taker, lent in owed:
                given = max(0, min(lent, free))
                free -= given
                if given < lent:
                    giver.owed.append((taker, lent - given))
                if given:
                    heir = taker if taker in self._all else self._all[0]
                    heir.window.limit(heir.window.ceiling + given)
                    heir.window.grow()
                    heirs.append(heir)
        for heir in heirs:
            heir.follow()

    def received(self, one: Subscription[P]) -> None:
        """One of several brokers has sent something: keep no more than the prefetch, and let no handler wait if that
        broker may have more."""
        if len(self._all) > self.options.prefetch:
            in_hand = self.core.in_hand()
            self._bound(in_hand)
            if in_hand > self.options.prefetch:
                if self.options.ordered:
                    self.core.release_waiting(one.book)
                else:
                    self.core.release_last(in_hand - self.options.prefetch)
        elif self.core.prefetched[0] < self.core.handlers and self.core.in_hand() < self.core.handlers:
            one.starve()

    def _bound(self, in_hand: int) -> None:
        """Of more brokers than the prefetch, have none send anything while all of it is in hand."""
        is_full = in_hand >= self.options.prefetch
        if is_full != self.is_full:
            self.is_full = is_full
            for one in self._all:
                one.follow()

    def look_later(self) -> None:
        """Messages wait: look soon whether they are more than handlers get done."""
        if not self.is_looking:
            self.is_looking = True
            now = self.core.now()
            for one in self._all:
                one.window.watch(now)
            self._router.home.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self.is_looking = False
        core, now = self.core, self.core.now()
        waiting = core.prefetched[0]
        # What waits in an ordered group waits for its queue, and nobody else can have it.
        if self.is_closed or core.is_paused or self.options.ordered or not waiting:
            return
        in_hand = 0
        for one in self._all:
            mine, mine_waiting = core.in_hand_of(one.book)
            one.window.look(self._handlers, mine - mine_waiting, now)
            one.follow()
            in_hand += mine
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
            if self.is_full:
                self._bound(self.core.in_hand())
            for one in self._all:
                if one.owed:
                    self.repay(one)
            for book, deliveries in self.core.tick():
                self._by_book[book.broker].keep(deliveries)
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
        for one in self._all:
            one.follow()
        self.subscriber.wake(nudge=True)

    def unwatch(self) -> None:
        """Hear of nothing any more."""
        self._router.unwatch_routes(self)
        for one in self._all:
            one.pool.unwatch(one)
