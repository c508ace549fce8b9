"""What a producer gets for its messages: futures and receipts.

Messages live and die by the batch, so the batch has the state (`Outcome`) and a future is only (batch, index): it costs
a quarter of a microsecond instead of the four of `concurrent.futures.Future`. Receipts are made when somebody looks at
them.

What always holds: a call that fails says how many of its messages are stored nevertheless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, overload

import msgspec

from dmq.client.connection.threads import FOREVER
from dmq.client.producer.accumulator import Outcome
from dmq.errors import DMQError, TimedOut
from dmq.model import MessageId, Receipt

__all__ = ["Receipts", "SendFuture"]


class SendFuture(msgspec.Struct, eq=False, gc=False):
    """What becomes of one message. As `concurrent.futures.Future`, without cancelling.

    Nothing for the garbage collector, which a flood of them would keep busy: a batch that is done holds no callbacks.
    """

    _outcome: Outcome
    _index: int

    @property
    def id(self) -> MessageId | None:
        """The message's id, from the moment it leaves; None before."""
        outcome = self._outcome
        return (
            None if outcome.first_sequence < 0 else MessageId(outcome.producer_id, outcome.first_sequence + self._index)
        )

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome.is_done

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, once it is there.

        Raises:
            TimedOut: nothing is known yet; the message is still on its way.
            DMQError: why the message was not stored, as far as is known.
        """
        outcome = self._outcome
        if not outcome.is_done:
            self._wait(timeout)
        if outcome.error is not None:
            raise outcome.error_of(self._index)
        return outcome.receipt(self._index)

    def exception(self, timeout: float | None = None) -> DMQError | None:
        """The error, or None once all went well.

        Raises:
            TimedOut: nothing is known yet.
        """
        self._wait(timeout)
        return None if self._outcome.error is None else self._outcome.error_of(self._index)

    def add_done_callback(self, function: Callable[[SendFuture], Any]) -> None:
        """Have `function(self)` called at the end: off the connection's thread, or at once if that has been."""
        if not self._outcome.add_callback(lambda: function(self)):
            function(self)

    def _wait(self, timeout: float | None) -> None:
        if not self._outcome.wait(FOREVER if timeout is None else time.monotonic() + timeout):
            raise TimedOut(f"nothing is known of the message after {timeout:g} s; it is still on its way")

    def __repr__(self) -> str:
        outcome = self._outcome
        state = "pending" if not outcome.is_done else "failed" if outcome.error else "stored"
        return f"<SendFuture {state}, topic {outcome.topic}, id {self.id}>"


class Receipts(Sequence[Receipt]):
    """The receipts of many messages, each made when it is looked at.

    Parameters:
        parts: for each batch its outcome, and the indexes its messages had in the call: a range where they follow each
            other, as they do unless ordered messages were spread over queues.
        count: of all messages.
    """

    __slots__ = ("_count", "_parts", "_places")

    def __init__(self, parts: Sequence[tuple[Outcome, Sequence[int]]], count: int) -> None:
        self._parts = parts
        self._count = count
        self._places: list[tuple[Outcome, int]] | None = None

    @classmethod
    def of(cls, parts: Sequence[tuple[Outcome, Sequence[int]]], problem: DMQError | None, count: int) -> Self:
        """The receipts of a `send_many` of so many messages.

        Raises:
            DMQError: the problem if there is one, with `detail["stored"]` and, as of the call, `["stored_indexes"]`.
        """
        if problem is not None:
            stored = [index for batch, indexes in parts if batch.error is None and batch.is_done for index in indexes]
            detail = {**problem.detail, "stored": len(stored), "stored_indexes": stored}
            raise type(problem)(problem.message, **detail) from problem
        return cls(parts, count)

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
            for outcome, indexes in self._parts:
                for rank, index in enumerate(indexes):
                    places[index] = (outcome, rank)
            self._places = places
        outcome, rank = self._places[at]
        return outcome.receipt(rank)

    def __repr__(self) -> str:
        return f"<Receipts of {self._count} messages in {len(self._parts)} batches>"
