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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from dmq.client.connection.link import Link
from dmq.client.connection.session import Pending
from dmq.client.connection.url import Address
from dmq.errors import DMQError, ServerError
from dmq.protocol import Buffer, Command, Flag, Frame, decode_response
from dmq.protocol.produce import Produce, ProduceReply

__all__ = ["NumberedBatch", "NumberedSender", "Owner"]


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
