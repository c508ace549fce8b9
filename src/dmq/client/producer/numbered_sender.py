"""The numbered sender: what all senders of numbered batches do alike. No sockets, no threads.

A numbered batch has a producer id and a first sequence, by which a broker recognises it when it comes again. A
producer, a spool, the Spark sink and a replay all send such batches. They differ in which batch goes next, over which
link, and in who waits for it: each is the `Owner` of its batches. What an attempt is, and what its outcome means, is
decided here.

What always holds:
- A batch goes out with the same numbers and the same bytes however often it is sent.
- From the moment it may be stored, it goes out as RESEND: an attempt was never answered, or the broker failed in a way
  that it did not expect.
- An attempt that was begun ends in exactly one call of its owner, `stored`, `refused` or `unanswered`; or it is taken
  back.

The lane sender sends batches that are ready-made, each until it is stored, one of a lane at a time. A lane is a queue
as one producer id sees it. Its next batch leaves when the one before is stored, so that the numbers in it rise whatever
breaks; other lanes go on meanwhile, and so does the thread that makes the next batch. The Spark sink and a replay send
this way: they have bounds and numbers of their own, and begin again where an earlier run ended.

What always holds: a batch goes out with the same numbers and bytes until it is stored, or has failed for good; after
`drain`, all are stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from dmq.client.connection.link import Link
from dmq.client.connection.router import Router
from dmq.client.connection.session import Pending
from dmq.client.connection.url import Address
from dmq.client.producer.retry_policy import pause_after
from dmq.errors import Busy, DMQError, NotConnected, ServerError, TimedOut
from dmq.model import place_of
from dmq.protocol import Buffer, Command, Flag, Frame, decode_response
from dmq.protocol.produce import Produce, ProduceReply

__all__ = ["ANSWER_SECONDS", "LaneBatch", "LaneSender", "NumberedBatch", "NumberedSender", "Owner"]


class NumberedBatch:
    """A batch with its numbers, and what became of it. Defaults stand in the class: a lone message pays for each one
    set."""

    body: Sequence[Buffer] | None = None  # encoded
    block_bytes = 0  # of the body: bodies of its messages that were compressed together
    broker: Address | None = None  # of the last attempt
    pending: Pending | None = None  # of the last attempt
    refusals = 0  # by brokers that named no time to try again
    is_unanswered = False  # it may be stored
    last_error: DMQError | None = None


B = TypeVar("B", bound=NumberedBatch)
O = TypeVar("O", bound=NumberedBatch, contravariant=True)  # noqa: E741


class Owner(Protocol[O]):
    """Whose batches they are. Called by the thread that reads the connection."""

    def stored(self, batch: O, reply: ProduceReply) -> None:
        """A broker has the batch."""
        ...

    def refused(self, batch: O, link: Link, error: DMQError) -> None:
        """The broker answered with an error: nothing was stored, unless the batch says otherwise."""
        ...

    def unanswered(self, batch: O, error: DMQError) -> None:
        """The connection broke before the answer came: the batch may be stored."""
        ...


class NumberedSender(Generic[B]):
    """Begins attempts to send batches, and tells their owner how each one ended."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner[B]) -> None:
        self._owner = owner

    def send(self, batch: B, header: Produce, link: Link, *, attended: bool = True) -> None:
        """Begin an attempt.

        Parameters:
            header: with the batch's numbers, the same each time.
            attended: the answer is read even if no thread waits for it.

        Raises:
            NotConnected, Busy, MessageTooLarge: nothing was sent, and the owner is not called.
        """
        assert batch.body is not None
        batch.broker = link.address
        batch.pending = None
        batch.pending = link.submit(
            Command.PRODUCE,
            header,
            batch.body,
            on_answer=lambda answer: self.answered(batch, link, answer),
            flags=Flag.RESEND if batch.is_unanswered else 0,
            attended=attended,
        )

    def answered(self, batch: B, link: Link, answer: Frame | DMQError) -> None:
        """An attempt ended: with the answer, or with what broke the connection."""
        if isinstance(answer, DMQError):
            batch.is_unanswered = True
            batch.last_error = answer
            self._owner.unanswered(batch, answer)
            return
        try:
            reply: ProduceReply = decode_response(answer)
        except DMQError as error:
            if isinstance(error, ServerError):
                batch.is_unanswered = True
            batch.last_error = error
            self._owner.refused(batch, link, error)
        else:
            self._owner.stored(batch, reply)

    @staticmethod
    def take_back(batch: NumberedBatch, link: Link) -> bool:
        """Give up on the answer to the last attempt, which takes too long: the batch may be stored.

        False if the answer came, or is about to be handed over: then the owner is called.
        """
        if batch.pending is None or not link.forget(batch.pending):
            return False
        batch.is_unanswered = True
        return True


WINDOW_BYTES: Final = 16 << 20
PAUSE_MAX: Final = 2.0
ANSWER_SECONDS: Final = 30.0
_TICK_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 30.0


class LaneBatch(NumberedBatch):
    """A ready-made batch on its way.

    Parameters:
        shard: that has the queue of the header; 0 is a lone broker.
    """

    def __init__(self, header: Produce, body: list[Buffer], shard: int = 0) -> None:
        self.header = header
        self.body = body
        self.place = place_of(header.queue, shard)
        self.size = sum(map(len, body))
        self.lane = (header.producer_id, self.place)
        self.deadline = 0.0  # by which it must be stored
        self.due_at: float | None = None  # when it is to be sent again
        self.link: Link | None = None  # of the last attempt
        self.sent_at = 0.0  # the last attempt


class LaneSender:
    """Sends the batches of one thread.

    Parameters:
        timeout: seconds in which a batch must be stored.
        on_stored: called with each batch that is stored, by the thread that reads the connection; the sender fails
            with a DMQError that it raises.
        on_late: called with a batch that was not stored in time; returns the error that the sender fails with.
        stop: once it is set, no batch is sent again, and the sender fails with the reason for which it would be.
        answer_seconds: that an answer may take before the batch is sent again.
    """

    def __init__(
        self,
        router: Router,
        timeout: float,
        on_stored: Callable[[LaneBatch, ProduceReply], None],
        on_late: Callable[[LaneBatch], DMQError],
        stop: threading.Event | None = None,
        *,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._router = router
        self._timeout = timeout
        self._on_stored = on_stored
        self._on_late = on_late
        self._stop = stop or threading.Event()
        self._answer_seconds = answer_seconds
        self._attempts: NumberedSender[LaneBatch] = NumberedSender(self)
        self._changed = threading.Condition()  # guards all below
        self._under_way: dict[tuple[int, int], LaneBatch] = {}
        self._bytes = 0
        self._failed: DMQError | None = None

    def send(self, header: Produce, body: list[Buffer], shard: int = 0) -> None:
        """Send a batch to a shard once its lane is free and the window has room; returns before it is stored.

        Raises:
            DMQError: a batch could not be stored, this or one before.
        """
        batch = LaneBatch(header, body, shard)
        self._wait(lambda: batch.lane not in self._under_way and self._bytes < WINDOW_BYTES)
        batch.deadline = time.monotonic() + self._timeout
        with self._changed:
            self._under_way[batch.lane] = batch
            self._bytes += batch.size
        self._begin(batch)

    def drain(self) -> None:
        """Wait until all is stored. Raises as `send` does."""
        self._wait(lambda: not self._under_way)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        # The caller may have taken long to make a batch, and nothing was sent again meanwhile: that is not the
        # broker's fault.
        patience = time.monotonic() + min(self._timeout, _PATIENCE_SECONDS)
        for batch in self._under_way.copy().values():
            batch.deadline = max(batch.deadline, patience)
        while True:
            with self._changed:
                again = self._due()
                if self._failed is None and not again and not is_done():
                    self._changed.wait(self._nap())
                    again = self._due()
                if self._failed is not None:
                    raise self._failed
                if not again and is_done():
                    return
            for batch in again:
                self._begin(batch)

    def _nap(self) -> float:
        """Until something is to be sent again, or may be too late."""
        now = time.monotonic()
        moments = [batch.due_at for batch in self._under_way.values() if batch.due_at is not None]
        return max(0.001, min([_TICK_SECONDS, *(moment - now for moment in moments)]))

    def _due(self) -> list[LaneBatch]:
        """What is to be sent again now; fails if something has not been stored for too long."""
        now = time.monotonic()
        due = []
        for batch in self._under_way.values():
            if now >= batch.deadline:
                self._fail(self._on_late(batch))
                continue
            link = batch.link if batch.due_at is None and now - batch.sent_at >= self._answer_seconds else None
            if link is not None and self._attempts.take_back(batch, link):
                batch.due_at, batch.link = now, None
                batch.last_error = TimedOut(f"the broker did not answer within {self._answer_seconds:g} s")
            if batch.due_at is not None and now >= batch.due_at:
                if self._stop.is_set() and batch.last_error is not None:
                    self._fail(batch.last_error)
                else:
                    due.append(batch)
        return due

    def _fail(self, error: DMQError) -> None:
        self._failed = self._failed or error

    # --- out and back -----------------------------------------------------------------------------------------------

    def _begin(self, batch: LaneBatch) -> None:
        batch.due_at, batch.link = None, None
        try:
            header = batch.header
            link = self._router.pool_for(header.topic, batch.place).connection(batch.deadline)
            batch.sent_at = time.monotonic()
            self._attempts.send(batch, header, link)
            batch.link = link
        except (NotConnected, Busy) as error:
            batch.last_error = error
            with self._changed:
                self._send_later(batch, error)
        except DMQError as error:
            with self._changed:
                self._fail(error)

    def stored(self, batch: LaneBatch, reply: ProduceReply) -> None:
        """A broker has the batch."""
        problem: DMQError | None = None
        try:
            self._on_stored(batch, reply)
        except DMQError as error:
            problem = error
        finally:
            with self._changed:
                if problem is not None:
                    self._fail(problem)
                else:
                    del self._under_way[batch.lane]
                    self._bytes -= batch.size
                self._changed.notify_all()

    def unanswered(self, batch: LaneBatch, error: DMQError) -> None:
        """The connection broke: the batch is sent again over the next one."""
        self._failed_attempt(batch, error)

    def refused(self, batch: LaneBatch, link: Link, error: DMQError) -> None:
        """The broker refused the batch: it is sent again if that can help."""
        self._failed_attempt(batch, error)

    def _failed_attempt(self, batch: LaneBatch, error: DMQError) -> None:
        with self._changed:
            if error.retriable or isinstance(error, NotConnected):
                self._send_later(batch, error)
            else:
                self._fail(error)
            self._changed.notify_all()

    def _send_later(self, batch: LaneBatch, error: DMQError) -> None:
        batch.due_at = time.monotonic() + pause_after(error, batch.refusals, PAUSE_MAX)
        batch.refusals += error.retry_after is None
