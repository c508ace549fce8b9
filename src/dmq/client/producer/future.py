"""What a producer gets for its messages: futures, receipts, and the batch they hang on.

Messages live and die by the batch, so the batch has the state and a future is only (batch, index): it costs a quarter
of a microsecond instead of the four of `concurrent.futures.Future`. Receipts are made when somebody looks at them.

What always holds: a batch is done once, with an answer or an error, and never changes afterwards; every callback is
called exactly once, by the notifier if it was there before the end, else at once by whoever adds it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, overload

import msgspec

from dmq.client.connection.threads import FOREVER, Waiter
from dmq.errors import ConsumeTimeout, DMQError, TimedOut
from dmq.model import Durability, MessageId, Receipt
from dmq.protocol.produce import ProduceReply
from dmq.records import ANY_QUEUE

__all__ = ["Fate", "Receipts", "SendFuture", "Spooled", "Wakeable"]

_NAMES: Final = tuple(level.name.lower() for level in sorted(Durability))  # by their numbers, which have no gaps
# Guards the moment at which a batch becomes done against callbacks and waiters that are being added. Held for
# nanoseconds, so that one for all batches beats one lock in each.
_ending = threading.Lock()


class Wakeable(Protocol):
    """A thread's `Waiter`, or what stands for a task of an event loop."""

    def wake(self) -> None: ...


class Spooled(NamedTuple):
    """What stands for a broker's answer while the spool has the batch and a broker has not."""

    queue: int


class Fate:
    """What becomes of the messages of one batch. Defaults stand in the class: a lone message pays for each one set."""

    producer_id = 0
    first_sequence = -1  # before it leaves
    has_offsets = True  # a delayed message gets its own when it is due, an unanswered one is not known
    is_done = False
    reply: ProduceReply | Spooled | None = None
    error: DMQError | None = None
    _waiters: list[Wakeable] | None = None
    _callbacks: list[Callable[[], Any]] | None = None

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def end(self, reply: ProduceReply | Spooled | None, error: DMQError | None) -> list[Callable[[], Any]]:
        """Settle it, wake those who wait, and return the callbacks that are now to be called."""
        with _ending:
            if self.is_done:
                return []
            self.reply, self.error, self.is_done = reply, error, True
            waiters, callbacks = self._waiters, self._callbacks
            self._waiters = self._callbacks = None
        for waiter in waiters or ():
            waiter.wake()
        return callbacks or []

    def add_waiter(self, waiter: Wakeable) -> None:
        """Have it woken at the end; at once if that has been."""
        with _ending:
            if not self.is_done:
                self._waiters = [*(self._waiters or ()), waiter]
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
        reply = self.reply
        assert reply is not None
        message_id = MessageId(self.producer_id, self.first_sequence + index)
        if isinstance(reply, Spooled):
            return Receipt(message_id, self.topic, reply.queue, -1, "spooled")
        offset = reply.first_offset + index if self.has_offsets else -1
        # A delayed or prepared message gets its queue with its place.
        queue = -1 if reply.queue == ANY_QUEUE else reply.queue
        return Receipt(message_id, self.topic, queue, offset, _NAMES[reply.durability])

    def error_of(self, index: int) -> DMQError:
        """Why one message failed; one that is stored nevertheless has its receipt. Only of a batch that failed."""
        error = self.error
        assert error is not None
        if not isinstance(error, ConsumeTimeout):
            return error
        told = ConsumeTimeout(error.message, **error.detail)
        message_id = MessageId(self.producer_id, self.first_sequence + index)
        queue, offset = error.detail.get("queue", -1), error.detail.get("offset", -1 - index)
        told.receipt = Receipt(message_id, self.topic, queue, offset + index, "flushed")
        return told


class SendFuture(msgspec.Struct, eq=False, gc=False):
    """What becomes of one message. As `concurrent.futures.Future`, without cancelling.

    Nothing for the garbage collector, which a flood of them would keep busy: a batch that is done holds no callbacks.
    """

    _fate: Fate
    _index: int

    @property
    def id(self) -> MessageId | None:
        """The message's id, from the moment it leaves; None before."""
        fate = self._fate
        return None if fate.first_sequence < 0 else MessageId(fate.producer_id, fate.first_sequence + self._index)

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._fate.is_done

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, once it is there.

        Raises:
            TimedOut: nothing is known yet; the message is still on its way.
            DMQError: why the message was not stored, as far as is known.
        """
        fate = self._fate
        if not fate.is_done:
            self._wait(timeout)
        if fate.error is not None:
            raise fate.error_of(self._index)
        return fate.receipt(self._index)

    def exception(self, timeout: float | None = None) -> DMQError | None:
        """The error, or None once all went well.

        Raises:
            TimedOut: nothing is known yet.
        """
        self._wait(timeout)
        return None if self._fate.error is None else self._fate.error_of(self._index)

    def add_done_callback(self, function: Callable[[SendFuture], Any]) -> None:
        """Have `function(self)` called at the end: off the connection's thread, or at once if that has been."""
        if not self._fate.add_callback(lambda: function(self)):
            function(self)

    def _wait(self, timeout: float | None) -> None:
        if not self._fate.wait(FOREVER if timeout is None else time.monotonic() + timeout):
            raise TimedOut(f"nothing is known of the message after {timeout:g} s; it is still on its way")

    def __repr__(self) -> str:
        fate = self._fate
        state = "pending" if not fate.is_done else "failed" if fate.error else "stored"
        return f"<SendFuture {state}, topic {fate.topic}, id {self.id}>"


class Receipts(Sequence[Receipt]):
    """The receipts of many messages, each made when it is looked at.

    Parameters:
        parts: for each batch its fate and the indexes its messages had in the call: a range where they follow each
            other, as they do unless ordered messages were spread over queues.
        count: of all messages.
    """

    __slots__ = ("_count", "_parts", "_places")

    def __init__(self, parts: Sequence[tuple[Fate, Sequence[int]]], count: int) -> None:
        self._parts = parts
        self._count = count
        self._places: list[tuple[Fate, int]] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Receipt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Receipt]: ...

    def __getitem__(self, index: int | slice) -> Receipt | list[Receipt]:
        if isinstance(index, slice):
            return [self._at(at) for at in range(*index.indices(self._count))]
        at = index + self._count if index < 0 else index
        if not 0 <= at < self._count:
            raise IndexError(f"there are {self._count} receipts, and no number {index}")
        return self._at(at)

    def __iter__(self) -> Iterator[Receipt]:
        return map(self._at, range(self._count))

    def _at(self, at: int) -> Receipt:
        if self._places is None:
            places: list[Any] = [None] * self._count
            for fate, indexes in self._parts:
                for rank, index in enumerate(indexes):
                    places[index] = (fate, rank)
            self._places = places
        fate, rank = self._places[at]
        return fate.receipt(rank)

    def __repr__(self) -> str:
        return f"<Receipts of {self._count} messages in {len(self._parts)} batches>"
