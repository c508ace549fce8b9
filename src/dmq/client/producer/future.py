"""What a producer gets for its messages: futures and receipts.

Messages live and die by the batch, so the batch has the state (`Outcome`) and a future is only (batch, index): it costs
a quarter of a microsecond instead of the four of `concurrent.futures.Future`. Receipts are made when somebody looks at
them.

What always holds: a call that fails says how many of its messages are stored nevertheless; a message whose sender was
told that its outcome is not known is found when it is repeated, as long as the bounds of `UnknownOutcomes` allow it.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Self, TypeAlias, overload

import msgspec

from dmq.client.connection.threads import FOREVER
from dmq.client.producer.accumulator import MESSAGE_BYTES, SendBatch
from dmq.client.producer.encoder import encode_body
from dmq.client.producer.outcome import Outcome
from dmq.compiled import quickened
from dmq.errors import ConsumeTimeout, DMQError, InvalidMessage, OutOfRetries, SequenceConflict, TimedOut
from dmq.event_log import EventLog
from dmq.model import Message, MessageId, Receipt

__all__ = ["Receipts", "Repeated", "SendFuture", "Sent", "UnknownOutcomes"]

log = EventLog(__name__)

OBJECTS_MAX: Final = 65_536
NAMES_MAX: Final = 10_000


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

    @quickened("quick_result", Receipt, MessageId)
    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, once it is there.

        Raises:
            TimedOut: nothing is known yet; the message is still on its way.
            DMQError: why the message was not stored, as far as is known.
        """
        outcome = self._outcome
        if not outcome.is_done:
            self._wait(timeout)
        if outcome.error is not None and (failure := outcome.failure(self._index)) is not None:
            raise failure
        return outcome.receipt(self._index)

    def exception(self, timeout: float | None = None) -> DMQError | None:
        """The error, or None once all went well.

        Raises:
            TimedOut: nothing is known yet.
        """
        self._wait(timeout)
        return self._outcome.failure(self._index)

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

    def __init__(self, parts: Sequence[_Part], count: int) -> None:
        self._parts = parts
        self._count = count
        self._places: list[tuple[Outcome | Repeated, int]] | None = None

    @classmethod
    def of(
        cls, parts: Sequence[tuple[Outcome | Repeated, Sequence[int]]], problem: DMQError | None, count: int
    ) -> Self:
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


class Sent(NamedTuple):
    """A message that was sent: in which batch, and how its sender may name it."""

    batch: SendBatch
    at: int  # its place there
    message: Message
    name: str | None = None  # its `id`
    is_object: bool = False  # the message is the sender's own object


class Repeated:
    """Some messages of a batch that was sent before, as a part of a `send_many`."""

    def __init__(self, batch: SendBatch, indexes: list[int]) -> None:
        self.batch = batch
        self.indexes = indexes

    @property
    def is_done(self) -> bool:
        return self.batch.is_done

    @property
    def error(self) -> DMQError | None:
        return self.batch.error

    def receipt(self, rank: int) -> Receipt:
        return self.batch.receipt(self.indexes[rank])


_Part: TypeAlias = "tuple[Outcome | Repeated, Sequence[int]]"


class _Named(NamedTuple):
    batch: SendBatch
    at: int
    checksum: int  # of the body


class UnknownOutcomes:
    """Messages that a repeat must find again: those whose outcome their senders do not know, and those with an `id`.

    A message is found by its object once its sender was told that its outcome is not known; each such sending is
    found once. It is found by its `id` from the moment it is sent, also when it is stored. Thread-safe.

    What always holds: at most `OBJECTS_MAX` messages and `bytes_max` bytes are kept as objects and `NAMES_MAX` ids, the
    oldest go first; a message that was certainly not stored is not found.

    Attributes:
        lock: held by a sender from looking for an `id` until it is known, so that two threads send it once.
    """

    def __init__(self, bytes_max: int) -> None:
        self.lock: Final = threading.RLock()
        self._bytes_max = bytes_max
        self._objects: dict[int, tuple[Message, deque[tuple[SendBatch, int]]]] = {}  # by the identity of the object
        self._count = 0
        self._bytes = 0
        self._names: OrderedDict[str, _Named] = OrderedDict()

    @property
    def has_objects(self) -> bool:
        return bool(self._objects)

    def find(self, topic: str, message: Message, name: str | None) -> tuple[SendBatch, int] | None:
        """The earlier sending of a message that is sent again; None if it is new.

        Raises:
            InvalidMessage: the id belongs to another message.
        """
        if name is None:
            return self.take(topic, message)
        with self.lock:
            found = self._names.get(name)
            if found is None:
                return None
            batch = _latest(found.batch)
            if _has_failed(batch):
                del self._names[name]
                return None
        if batch.topic != topic or found.checksum != _checksum(message):
            raise InvalidMessage(
                f"id {name!r} belongs to another message that this producer sent to {batch.topic!r}: give each message "
                "an id of its own"
            )
        return batch, found.at

    def take(self, topic: str, message: Message) -> tuple[SendBatch, int] | None:
        """The earlier sending of an object whose outcome is not known; the next repeat gets the next one."""
        if not self._objects:
            return None
        with self.lock:
            kept, sendings = self._objects.get(id(message), (None, deque()))
            if kept is not message:
                return None
            for _ in range(len(sendings)):
                batch, index = sendings.popleft()
                batch = _latest(batch)
                if batch.topic != topic:
                    sendings.append((batch, index))
                    continue
                self._uncount(message)
                if not sendings:
                    del self._objects[id(message)]
                if not _has_failed(batch):
                    return batch, index
        return None

    def name(self, sent: Sent) -> None:
        """A message with an `id` is on its way."""
        if sent.name is None:
            return
        with self.lock:
            self._names[sent.name] = _Named(sent.batch, sent.at, _checksum(sent.message))
            while len(self._names) > NAMES_MAX:
                self._names.popitem(last=False)

    def failed(self, error: DMQError, sent: Sent) -> DMQError:
        """A send ends with an error: remember the message if it may be stored.

        Returns:
            What to raise; `detail["id"]` names the message if it may be stored.
        """
        batch, index, message, name, is_object = sent
        if not batch.is_unknown:
            return error
        if is_object and name is None:
            self.keep(message, batch, index)
        if batch.first_sequence < 0:
            return error
        message_id = str(MessageId(batch.producer_id, batch.first_sequence + index))
        if name is None:
            self.name(sent._replace(name=message_id))
        detail = {**error.detail, "id": message_id}
        if isinstance(error, SequenceConflict):
            return OutOfRetries(
                "the message is repeated too late for the broker to tell whether it is stored: look for it with "
                f"admin.find(id={message_id!r}), and send it as a new message if it is not stored",
                **detail,
            )
        return type(error)(error.message, **detail)

    def keep(self, message: Message, batch: SendBatch, index: int) -> None:
        """An object's sender was told that its outcome is not known."""
        with self.lock:
            kept = self._objects.get(id(message))
            if kept is None:
                kept = self._objects[id(message)] = (message, deque())
            kept[1].append((batch, index))
            self._count += 1
            self._bytes += _size(message)
            dropped = 0
            while self._count > OBJECTS_MAX or (self._bytes > self._bytes_max and self._count > 1):
                oldest, sendings = next(iter(self._objects.values()))
                sendings.popleft()
                self._uncount(oldest)
                dropped += 1
                if not sendings:
                    del self._objects[id(oldest)]
        if dropped:
            log.warning(
                "sends without an answer are no longer remembered: a repeat is a new message",
                once_for=id(self),
                count=dropped,
            )

    def _uncount(self, message: Message) -> None:
        self._count -= 1
        self._bytes -= _size(message)


def _latest(batch: SendBatch) -> SendBatch:
    while batch.again is not None:
        batch = batch.again
    return batch


def _has_failed(batch: SendBatch) -> bool:
    """Whether its messages are certainly not stored."""
    return batch.error is not None and not batch.is_unknown and not isinstance(batch.error, ConsumeTimeout)


def _size(message: Message) -> int:
    body: object = message.body
    return MESSAGE_BYTES + (len(body) if isinstance(body, bytes | str) else 0)


def _checksum(message: Message) -> int:
    return zlib.crc32(encode_body(message.body))
