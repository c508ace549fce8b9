"""Pulling: batches that are asked for, and one that is asked for before it is wanted. No sockets, no threads.

A program that pulls batch after batch spends its time in turns with the broker: it waits, then the broker does. So once
it has asked twice for the same and got all of it, or with a filter a good part of it, the next batch is asked for when
one is handed out, and what was said of the batch before travels with that request.

What always holds: what is read ahead and what is in hand is never more than the prefetch; read-ahead messages wait like
any others, so they go back untried when the consumer pauses, closes or does not get on, and are dropped by a seek;
their leases run from when they were asked for. Ordered groups and those with `parallel` read nothing ahead.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from dmq.client.arguments import check_whole
from dmq.client.prefetch import Part
from dmq.client.subscription import TICKS_PER_LEASE, NamedLink, Subscription
from dmq.errors import DMQError, InvalidRequest, InvalidSettings, NotConnected
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.consuming import PullReply, Unsubscribe
from dmq.protocol.header import LIST_MAX
from dmq.records import ANY_QUEUE

__all__ = ["Ask", "Pulling", "unreached"]

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
