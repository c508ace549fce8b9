"""The puller: batches that are asked for, and what came before it was wanted. No sockets, no threads.

A program that pulls batch after batch spends its time in turns with the broker: it waits, then the broker does. So once
it has asked twice for the same and got all of it, or with a filter a good part of it, the next batch is asked for when
one is handed out, and what was said of the batch before travels with that request. Where the queues of the topic are at
several brokers, each is asked for whole batches in turn as long as it has them: a batch costs about as much as its
requests, however many messages it has. A turn lasts some 50 ms, so that a quick program takes several batches of
one broker in a row: a broker that works on has code and data at hand that one which was just woken has to fetch. Those
that had less are asked meanwhile and may take a while to answer. When none has a whole batch, all are asked at once,
and what comes after the first answer waits for the next pull.

What always holds: what is read ahead and what is in hand is never more than the prefetch; no broker that has messages
is passed over while others have a second turn; read-ahead messages wait like any others, so they go back untried when
the consumer pauses, closes or does not get on, and are dropped by a seek; their leases run from when they were asked
for. Ordered groups and those with `parallel` read nothing ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, NamedTuple

from dmq.client.arguments import check_whole
from dmq.client.connection.link import NamedLink
from dmq.client.consumer.prefetch import Part
from dmq.client.consumer.subscription import P, Subscription, Subscriptions
from dmq.errors import (
    BrokerStopping,
    Busy,
    DMQError,
    InvalidRequest,
    InvalidSettings,
    NotConnected,
    NotLeader,
    StaleRoute,
    UnknownTopic,
)
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.consume import Pull, PullReply, Settle
from dmq.protocol.header import LIST_MAX
from dmq.records import ANY_QUEUE

__all__ = ["LATE_SECONDS", "PASSING", "REFUSED_SECONDS", "TURN_SECONDS", "Ask", "Puller", "unreached"]

PASSING: Final = (NotConnected, BrokerStopping, Busy, NotLeader, StaleRoute)
"""What a pull waits out: the same, or another connection, gives messages soon, or the route becomes known."""

_AT_ONCE: Final = 0.0
_UNEVEN: Final = 4
_SMALL: Final = 4  # those that had no whole batch are asked for so small a part of an even one while others have
_WAIT_MAX: Final = 1_000_000.0
# While a program pulls as fast as it can, each of several brokers has one turn in so long; a slow one asks each twice.
_ROUND_SECONDS: Final = 0.15
# Several brokers are asked at once for so long at a time, so that one that comes back meanwhile is asked too.
_ALL_SECONDS: Final = 1.0
TURN_SECONDS: Final = 0.05
"""How long each of several brokers is asked, where one is asked after the other and none had something at once."""
LATE_SECONDS: Final = 1.0
"""How much longer than a pull waits, one of several brokers may take for its answer."""
REFUSED_SECONDS: Final = 0.1
"""The pause after one of several brokers refused a pull."""


class Ask(NamedTuple):
    """What a pull asks for."""

    max_messages: int
    queue: int = ANY_QUEUE


class Puller(Generic[P]):
    """What one consumer has asked for by the batch."""

    def __init__(self, subscriptions: Subscriptions[P]) -> None:
        self._subscriptions = subscriptions
        self._core = subscriptions.core
        self._options = subscriptions.options
        self._last_ask: Ask | None = None  # if it got all it asked for
        self._stock_ask: Ask | None = None  # what was read ahead last
        self._under_way: dict[Subscription[P], int] = {}  # with the brokers that are asked ahead, and for how many
        self.ahead: Subscription[P] | None = None
        """The one of them that the next pull waits for."""
        self._poor: set[Subscription[P]] = set()  # that had no whole batch when they were asked last
        self._refusals: dict[Subscription[P], DMQError] = {}
        self._turn = 0
        self._turns: dict[Subscription[P], int] = {}  # when they were asked for a whole batch
        self._stay: Subscription[P] | None = None  # with the broker whose turn it is
        self._stay_until = 0.0

    def start_anew(self) -> None:
        """Nobody knows what was asked for: what comes all the same waits for the next pull."""
        self._under_way.clear()
        self._last_ask = self.ahead = None

    def is_under_way(self) -> bool:
        """Whether a broker is asked for what waits for the next pull."""
        return bool(self._under_way)

    def give_up_ahead(self) -> None:
        """What is read ahead takes too long: other brokers are asked, and it waits for a later pull."""
        one, self.ahead = self.ahead, None
        link = None if one is None else one.pool.current()
        if link is not None:
            self._subscriptions.subscriber.attend(link)

    def check(self, max_messages: int, wait: Any, queue: int | None) -> Ask:
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
        if self._subscriptions.is_started:
            raise InvalidRequest("this consumer is subscribed: make another one to pull with")
        self._subscriptions.check_open()
        if self._core.ended is not None:
            raise type(self._core.ended)(self._core.ended.message, **self._core.ended.detail)
        if type(max_messages) is not int or not 1 <= max_messages <= LIST_MAX:  # for most pulls it is right
            check_whole("max_messages", max_messages, 1, LIST_MAX)
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait <= _WAIT_MAX:
            raise InvalidSettings(f"wait is a time in seconds, not {wait!r}")
        self._subscriptions.has_pulled = True
        return Ask(max_messages, ANY_QUEUE if queue is None else check_whole("queue", queue, 0, ANY_QUEUE - 1))

    def header(self, one: Subscription[P], link: NamedLink, ask: Ask, wait: float) -> Pull:
        """What asks a broker for a batch; over a new connection it says which leases have come to us."""
        holding = None
        if one.pulled_over is not link:
            one.tell(link)
            holding = self._core.holding(one.book, with_pulled=True)
        return self._options.pull(
            one.member(link), ask.max_messages, wait, queue=ask.queue, start_from=one.start_from, holding=holding
        )

    def asked_alone(self) -> Subscription[P] | None:
        """With the one broker that has the topic; None if several have."""
        return self._subscriptions.only

    @property
    def has_stock(self) -> bool:
        """Whether messages may come before they are wanted: where leases count, they would be in the way of others."""
        return not self._options.ordered and not self._options.parallel

    def in_turn(self) -> list[Subscription[P]]:
        """With the brokers that are connected, each of them first once in a while."""
        self._turn += 1
        found = [one for one in self._subscriptions if one.pool.current() is not None]
        at = self._turn % max(1, len(found))
        return found[at:] + found[:at]

    def rich(self) -> list[Subscription[P]]:
        """With the brokers of several that may have a whole batch: whose turn it is, then whose was longest ago."""
        if not self.has_stock or not self._subscriptions.is_divided:
            return []
        poor, under_way = self._poor, self._under_way
        found = [
            one
            for one in self._subscriptions
            if one not in poor and one not in under_way and one.pool.current() is not None
        ]
        found.sort(key=lambda one: self._turns.get(one, 0))
        if self._stay in found and self._core.now() < self._stay_until:
            found.insert(0, found.pop(found.index(self._stay)))
        return found

    def got(self, one: Subscription[P], asked: int, count: int) -> None:
        """A broker was asked for so many messages, and had so many."""
        self._turn += 1
        self._turns[one] = self._turn
        if count < self._enough(asked):
            self._poor.add(one)
            return
        self._poor.discard(one)
        if one is not self._stay:
            seconds = _ROUND_SECONDS / len([*self._subscriptions])
            self._stay, self._stay_until = one, self._core.now() + seconds

    def _enough(self, asked: int) -> int:
        """How many messages are a whole batch: what a filter lets through comes as the broker finds it in one look."""
        return max(1, asked // _UNEVEN) if self._options.tags else asked

    def from_stock(self, ask: Ask) -> list[Part]:
        """What came before it was wanted, if it is what is wanted now; else it goes back."""
        core = self._core
        core.has_company = False
        if not core.prefetched[0]:
            return []
        if self._stock_ask is not None and ask.queue not in (self._stock_ask.queue, ANY_QUEUE):
            core.release_waiting()
            return []
        return core.take_parts(ask.max_messages)

    def read_ahead(self, ask: Ask, got: int) -> None:
        """A pull got so many: ask for what the next one will want, if it will, and report what is to be reported."""
        is_repeated = ask == self._last_ask
        self._last_ask = ask if got >= self._enough(ask.max_messages) else None
        one, count = self._subscriptions.only, ask.max_messages
        if one is None and (rich := self.rich()):
            self._ask_poor(ask)
            one = rich[0]
            count = min(count, self._options.prefetch - got - sum([*self._under_way.values()]))
        link = None if one is None else one.standing.in_use
        if (
            one is None
            or link is None
            or not link.is_usable
            or not is_repeated
            or self._last_ask is None
            or self._subscriptions.is_closing
            or one in self._under_way
            or 2 * count < ask.max_messages
            or not self._core.has_room_for(count, got)
        ):
            self._subscriptions.subscriber.flush()
            return
        frames = self._core.reports(one.book)
        self.ahead = one
        try:
            self._ask(one, link, ask._replace(max_messages=count), before=frames)
        except DMQError:
            self.ahead = None
            self._core.not_sent(one.book, frames)
            return  # the next pull says why
        self._core.has_company = True

    def _ask_poor(self, ask: Ask) -> None:
        """Have brokers that had no whole batch say when they have something, while others have."""
        small = self._options.prefetch // (_SMALL * len([*self._subscriptions]))
        self._ask_each([one for one in self._subscriptions if one in self._poor], ask, small, _ALL_SECONDS)

    def ask_all(self, ask: Ask, wait: float) -> bool:
        """Ask all brokers that are not asked already, and let what they have wait; False if none is connected."""
        self.forget_refusals()
        subscriptions = [*self._subscriptions]
        return self._ask_each(subscriptions, ask, self._options.prefetch // len(subscriptions), wait)

    def _ask_each(self, subscriptions: Sequence[Subscription[P]], ask: Ask, share: int, wait: float) -> bool:
        share_ask = ask._replace(max_messages=min(ask.max_messages, max(1, share)))
        is_connected = self.is_under_way()
        for one in subscriptions:
            link = one.pool.current()
            if link is None or one in self._under_way:
                continue
            try:
                self._ask(one, link, share_ask, wait=min(wait, _ALL_SECONDS), is_attended=True)
            except DMQError:
                continue  # it is gone, and the others are asked
            is_connected = True  # and it may have answered already
        return is_connected

    def forget_refusals(self) -> None:
        """Brokers are about to be asked anew."""
        self._refusals.clear()

    def refused(self, one: Subscription[P], error: DMQError) -> None:
        """One of several brokers refused a pull."""
        self._refusals[one] = error
        self._poor.add(one)

    def check_refused(self) -> None:
        """Raise what a broker answered to `ask_all`, if trying again cannot help.

        One of several that does not know the topic, or has not as many queues of it, is passed over.
        """
        errors = [error for error in self._refusals.values() if not isinstance(error, PASSING)]
        unknown = sum(isinstance(error, UnknownTopic) for error in errors)
        for error in errors:
            if not isinstance(error, UnknownTopic) or unknown == len([*self._subscriptions]):
                raise error

    @property
    def has_refusals(self) -> bool:
        """Whether a broker refused what `ask_all` asked for."""
        return bool(self._refusals)

    def _ask(
        self,
        one: Subscription[P],
        link: NamedLink,
        ask: Ask,
        *,
        wait: float = _AT_ONCE,
        before: Sequence[Settle] = (),
        is_attended: bool = False,
    ) -> None:
        since = self._core.now()  # an answer that nobody reads at once may be old when it is read
        header = self.header(one, link, ask, wait)
        self._stock_ask = ask
        self._under_way[one] = ask.max_messages
        try:
            link.tell_and_submit(
                [(Command.SETTLE, frame) for frame in before],
                Command.PULL,
                header,
                on_answer=lambda answer: self._answered(one, link, answer, since),
                attended=is_attended,
            )
        except DMQError:
            self._under_way.pop(one, None)
            raise
        if before:
            self._core.told(one.book, link, before)  # the answer to the pull is the sign
        self._subscriptions.tick_later()

    def _answered(self, one: Subscription[P], link: NamedLink, answer: Frame | DMQError, since: float) -> None:
        """What was asked ahead is here."""
        try:
            if isinstance(answer, DMQError):
                raise answer
            reply: PullReply = decode_response(answer)
            one.pulled_over = link
            self.got(one, self._under_way.get(one, 0), sum(lease.count for lease in reply.leases))
            self._core.received(one.book, reply.leases, answer.body, since)
        except DMQError as error:
            if self._subscriptions.is_divided:  # else the next pull says why
                self.refused(one, error)
        finally:
            self._under_way.pop(one, None)
            if self.ahead is one:
                self.ahead = None
            if self._core.is_paused or self._subscriptions.is_closing:
                self._core.release_waiting()
            self._subscriptions.subscriber.wake()

    def late(self, one: Subscription[P], answer: Frame | DMQError) -> None:
        """The answer to a pull is here that does not wait for it any more: its messages go back untried."""
        if isinstance(answer, DMQError) or answer.status:
            return
        reply: PullReply = decode_response(answer)
        if reply.leases:
            self._core.received(one.book, reply.leases, answer.body)
            self._core.release_waiting(one.book)


def unreached(error: DMQError, wait: float) -> DMQError:
    """What a pull ends with that found no broker: the last try had next to no time, and it says so."""
    if not isinstance(error, NotConnected):
        return error
    begin, colon, why = error.message.partition(" s: ")  # of a shard, it says what is wrong
    found = f": {why}" if colon and begin.startswith("no broker could be reached") else ""
    return NotConnected(f"no broker could be reached within {max(wait, 0):g} s{found}")
