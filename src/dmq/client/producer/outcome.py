"""The outcome of a batch: what becomes of its messages, and those who wait for that.

What always holds: an outcome is done once, with an answer or an error, and never changes afterwards; every callback is
called exactly once, by the notifier if it was there before the end, else at once by the thread that adds it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from dmq.client.connection.threads import Waiter
from dmq.errors import ConsumeTimeout, DMQError
from dmq.model import Durability, MessageId, Receipt, place_queue
from dmq.protocol.produce import ProduceReply
from dmq.records import ANY_QUEUE

__all__ = ["DURABILITY_NAMES", "Outcome", "Spooled", "Wakeable"]

DURABILITY_NAMES: Final = tuple(
    level.name.lower() for level in sorted(Durability)
)  # by their numbers, which have no gaps
# Guards the moment at which a batch becomes done against callbacks and waiters that are being added. Held for
# nanoseconds, so that one for all batches beats one lock in each.
_ending = threading.Lock()
_new: Final = tuple.__new__  # a call of a tuple's class costs twice as much
# Producer, number and offset of the first message, -1 if they have none; topic, queue, durability and shard of all.
_Shared: TypeAlias = tuple[int, int, int, str, int, str, int]


class Wakeable(Protocol):
    """A thread's `Waiter`, or what stands for a task of an event loop."""

    def wake(self) -> None: ...


class Spooled(NamedTuple):
    """What stands for a broker's answer while the spool has the batch and a broker has not."""

    queue: int


class Outcome:
    """What becomes of the messages of one batch. Defaults stand in the class: a lone message pays for each one set."""

    producer_id = 0
    first_sequence = -1  # before it leaves
    has_offsets = True  # a delayed message gets its own when it is due, an unanswered one is not known
    is_done = False
    reply: ProduceReply | Spooled | None = None
    error: DMQError | None = None
    _waiters: list[Wakeable] | None = None
    _line: dict[Wakeable, None] | None = None
    _behind: Callable[[], None] | None = None
    _callbacks: list[Callable[[], Any]] | None = None
    _shared: _Shared | None = None
    parts: Sequence[tuple[Outcome, int]] = ()  # what stands for each message, once they were divided anew

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def end(self, reply: ProduceReply | Spooled | None, error: DMQError | None) -> None:
        """Settle it, and wake those who wait. Its callbacks are then to be taken and called."""
        with _ending:
            if self.is_done:
                return
            self.reply, self.error, self.is_done = reply, error, True
        self.wake()

    def wake(self) -> None:
        """Wake those who wait for the end, which has come."""
        for waiter in self._waiters or ():
            waiter.wake()
        self._waiters = None
        self._wake_next()

    def take_callbacks(self) -> list[Callable[[], Any]]:
        """What is to be called after the end; it is given out once."""
        with _ending:
            callbacks, self._callbacks = self._callbacks, None
        return callbacks or []

    def queue_up(self, waiter: Wakeable) -> None:
        """Have a thread woken after the end, one after another, each by one that goes: `step_out` must follow.

        Woken all at once, they would only wake to wait for the interpreter's lock.
        """
        with _ending:
            if not self.is_done:
                if self._line is None:
                    self._line = {}
                self._line[waiter] = None
                return
        waiter.wake()

    def step_out(self, waiter: Wakeable) -> None:
        """A thread waits no more, for whatever reason; after the end it wakes the next."""
        if self._line is not None:
            self._line.pop(waiter, None)  # a thread that was taken out before sees the end here
            if self.is_done:
                self._wake_next()

    @property
    def has_line(self) -> bool:
        """Whether threads stand in line."""
        return bool(self._line)

    def follow(self, function: Callable[[], None]) -> bool:
        """Have it called once the last in line has been woken, or has gone; False if nobody stands there any more."""
        with _ending:
            self._behind = function
        return bool(self._line) or self._take_behind() is None

    def _take_behind(self) -> Callable[[], None] | None:
        with _ending:
            behind, self._behind = self._behind, None
        return behind

    def _wake_next(self) -> None:
        try:
            waiter, _ = self._line.popitem() if self._line else (None, None)
        except KeyError:  # another thread was first
            waiter = None
        if waiter is not None:
            waiter.wake()
        if self._behind is not None and not self._line and (behind := self._take_behind()) is not None:
            behind()

    def add_waiter(self, waiter: Wakeable) -> None:
        """Have it woken at the end; at once if that has been."""
        with _ending:
            if not self.is_done:
                if self._waiters is None:
                    self._waiters = []
                self._waiters.append(waiter)
                return
        waiter.wake()

    def add_callback(self, function: Callable[[], Any]) -> bool:
        """Have it called at the end; False if that has been."""
        with _ending:
            if self.is_done:
                return False
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(function)
            return True

    @property
    def has_callbacks(self) -> bool:
        return self._callbacks is not None

    def wait(self, deadline: float) -> bool:
        """Block until the end, at most until a moment of `time.monotonic`; whether it has come."""
        if not self.is_done:
            waiter = Waiter()
            self.add_waiter(waiter)
            while not self.ended() and (left := deadline - time.monotonic()) > 0:
                waiter.wait(left)
        return self.is_done

    def ended(self) -> bool:
        """`is_done`, asked for anew: what another thread may have changed meanwhile."""
        return self.is_done

    def receipt(self, index: int) -> Receipt:
        """The receipt of one message; only of a batch that went well."""
        shared = self._shared  # first: what stands in the class costs more than what stands in the object
        if shared is None:
            if self.parts:
                part, at = self.parts[index]
                return part.receipt(at)
            shared = self._share()
        producer_id, sequence, offset, topic, queue, level, shard = shared
        message_id = _new(MessageId, (producer_id, sequence + index))
        offset = -1 if offset < 0 else offset + index
        return Receipt(message_id, topic, queue, offset, durability=level, shard=shard)

    def _share(self) -> _Shared:
        """What the receipts of its messages are made of: the first numbers, and what all have."""
        reply = self.reply
        assert reply is not None
        if isinstance(reply, Spooled):
            queue = place_queue(reply.queue) if reply.queue >= 0 else -1
            offset, level = -1, "spooled"
        else:
            offset = reply.first_offset if self.has_offsets else -1
            # A delayed or prepared message gets its queue with its place.
            queue, level = -1 if reply.queue == ANY_QUEUE else reply.queue, DURABILITY_NAMES[reply.durability]
        self._shared = self.producer_id, self.first_sequence, offset, self.topic, queue, level, self.shard
        return self._shared

    def tell(self, index: int, on_delivery: Callable[[Receipt | None, DMQError | None], Any]) -> Any:
        """Tell what became of one message; only once that is known. Returns what the function does."""
        failure = self.failure(index)
        return on_delivery(self.receipt(index), None) if failure is None else on_delivery(None, failure)

    def failure(self, index: int) -> DMQError | None:
        """Why one message failed; None if it is stored. Only once that is known."""
        if self.parts:
            part, at = self.parts[index]
            return part.failure(at)
        return None if self.error is None else self.error_of(index)

    def error_of(self, index: int) -> DMQError:
        """Why one message failed; one that is stored nevertheless has its receipt. Only of a batch that failed."""
        error = self.error
        assert error is not None
        if not isinstance(error, ConsumeTimeout):
            return error
        told = ConsumeTimeout(error.message, **error.detail)
        message_id = MessageId(self.producer_id, self.first_sequence + index)
        queue, offset = error.detail.get("queue", -1), error.detail.get("offset", -1 - index)
        told.receipt = Receipt(message_id, self.topic, queue, offset + index, durability="flushed", shard=self.shard)
        return told

    @property
    def shard(self) -> int:
        """The number of the shard that has its messages; 0 of a lone broker."""
        return 0
