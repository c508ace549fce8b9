"""What a consumer gets: messages, and batches of them.

What always holds: a message is a view, and costs next to nothing until it is looked at; those of a batch that is gone
through in order have body and key taken out some at a time, at half the price of asking each for them. Saying `ack`,
`nack` or `reject` of one that is settled already does nothing, since the first word counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, Generic, overload

import msgspec

from dmq.client.arguments import check_seconds, delay_ms, reason_text
from dmq.client.consumer.delivery import Delivery
from dmq.errors import InvalidRequest
from dmq.model import MessageId
from dmq.protocol.consume import Outcome
from dmq.records.attributes import Attributes
from dmq.records.layout import BODY_AT

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)  # defaults of type variables come with Python 3.13; type checkers know them already
else:
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["BLOCK", "Batch", "OpenedMessage", "ReceivedMessage", "T", "facts_of", "messages_of"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ACK: Final = Outcome.ACK
BLOCK: Final = 128
"""Opened at a time: so few that their bodies stay in the processor's cache."""


class ReceivedMessage(msgspec.Struct, Generic[T], eq=False, gc=False):
    """A message on its way out. `ReceivedMessage[Order]` is one of a consumer with `type=Order`."""

    _delivery: Delivery
    _index: int

    # --- what it says -----------------------------------------------------------------------------------------------

    @property
    def body(self) -> T:
        """The body: bytes as they were sent, or an object of the consumer's `type=`.

        Raises:
            InvalidMessage: the bytes do not hold such an object; they are in `raw`.
        """
        delivery, index = self._delivery, self._index
        bodies, spans = delivery.bodies, delivery.spans
        if bodies is not None:
            return bodies[index]  # type: ignore[no-any-return]
        if spans is not None and (end := spans[0][index]):
            body: Any = delivery.buffer[delivery.starts[index] + BODY_AT : end]
            return body  # type: ignore[no-any-return]
        return delivery.body(index)  # type: ignore[no-any-return]

    @property
    def value(self) -> T:
        """The same as `body`."""
        return self.body

    @property
    def raw(self) -> bytes:
        """The body as it was sent, whatever its type."""
        return self._delivery.raw_body(self._index)

    @property
    def key(self) -> str | None:
        delivery, index = self._delivery, self._index
        keys, spans = delivery.keys, delivery.spans
        if keys is not None:
            return keys[index]
        if spans is not None and (end := spans[2][index]):
            return delivery.buffer[spans[1][index] : end].decode()
        return delivery.key_of(index)

    @property
    def tag(self) -> str | None:
        return self._delivery.record(self._index).tag

    @property
    def business_id(self) -> str | None:
        return self._delivery.record(self._index).business_id

    @property
    def properties(self) -> Mapping[str, str]:
        return self._delivery.record(self._index).properties

    @property
    def priority(self) -> int:
        return self._delivery.priority(self._index)

    @property
    def app(self) -> str:
        """Who sent it."""
        return self._delivery.record(self._index).app

    # --- where it is ------------------------------------------------------------------------------------------------

    @property
    def id(self) -> MessageId | None:
        """Its id, the same as in the producer's receipt, however often it was moved or sent again."""
        return self._delivery.message_id(self._index)

    def _origin(self) -> Attributes | None:
        """What a message in the group's retry topic was before."""
        delivery = self._delivery
        if delivery.lease.topic and delivery.is_moved(self._index):
            return delivery.record(self._index).attributes
        return None

    @property
    def topic(self) -> str:
        origin = self._origin()
        return self._delivery.core.options.topic if origin is None else origin.original_topic or self._record_topic()

    def _record_topic(self) -> str:
        return self._delivery.record(self._index).topic

    @property
    def group(self) -> str:
        """Whose it is: the consumer's group."""
        return self._delivery.core.options.group

    @property
    def shard(self) -> int:
        """The number of the shard that stores it; 0 of a broker by itself."""
        return self._delivery.shard

    @property
    def queue(self) -> int:
        """Its queue, of those that the topic has in the shard."""
        origin = self._origin()
        found = None if origin is None else origin.original_queue
        return self._delivery.lease.queue if found is None else found

    @property
    def offset(self) -> int:
        origin = self._origin()
        found = None if origin is None else origin.original_queue_offset
        return self._delivery.offset(self._index) if found is None else found

    @property
    def sent_at(self) -> datetime:
        """When the producer sent it, by the producer's clock, in UTC."""
        record = self._delivery.record(self._index)
        first = record.attributes.original_send_time_ms if record.moved else None
        return _EPOCH + timedelta(milliseconds=record.send_time_ms if first is None else first)

    @property
    def stored_at(self) -> datetime:
        """When the broker stored it where it is now, in UTC."""
        return _EPOCH + timedelta(milliseconds=self._delivery.record(self._index).store_time_ms)

    @property
    def attempt(self) -> int:
        """Which attempt this is; the first is 1."""
        return self._delivery.attempt_of(self._index)

    @property
    def replay(self) -> str | None:
        """The id of the replay that brought it back from the archive; None if none did."""
        return self._delivery.replay_of(self._index)

    # --- what becomes of it -----------------------------------------------------------------------------------------

    def ack(self) -> Any:
        """It is done."""
        delivery = self._delivery
        delivery.core.ack(delivery, self._index)

    def nack(self, delay: float | None = None, reason: str = "") -> Any:
        """It failed: deliver it again.

        Parameters:
            delay: seconds until then; left out, the broker's retry table says.
            reason: why, for the person who looks into it.
        """
        delivery = self._delivery
        delivery.core.settle(delivery, self._index, Outcome.NACK, delay_ms(delay), reason=reason_text(reason))

    def reject(self, reason: str = "") -> Any:
        """No attempt will help: keep it among the dead letters."""
        delivery = self._delivery
        delivery.core.settle(delivery, self._index, Outcome.REJECT, -1, reason=reason_text(reason))

    def extend(self, seconds: float) -> Any:
        """Keep it for so long from now, with everything of its lease; waits for the broker's answer.

        Raises:
            LeaseLost: it is too late; somebody else has it, or will.
        """
        delivery = self._delivery
        return delivery.core.extend(delivery, check_seconds("seconds", seconds))

    @property
    def is_settled(self) -> bool:
        """Whether it was acked, nacked or rejected."""
        return self._delivery.core.is_settled(self._delivery, self._index)

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.topic} queue {self.queue} offset {self.offset}, attempt {self.attempt}>"


class OpenedMessage(ReceivedMessage[Any], eq=False, gc=False):
    """A message whose body and key were taken out with those of others."""

    body: Any
    key: str | None


if TYPE_CHECKING:
    M = TypeVar("M", bound="ReceivedMessage[Any]", default="ReceivedMessage[Any]")
else:
    M = TypeVar("M", bound=ReceivedMessage)


def messages_of(
    delivery: Delivery,
    indexes: Sequence[int],
    kind: Callable[[Delivery, int], M],
    opened: Callable[[Delivery, int, Any, str | None], M],
) -> Iterator[M]:
    """Some messages of a delivery; with body and key taken out already, if all are read alike.

    Parameters:
        kind: makes a message.
        opened: makes one with its body and key.
    """
    if isinstance(indexes, range):
        columns = delivery.columns(indexes)
        if columns is not None:
            return map(opened, repeat(delivery), indexes, *columns)
    return map(kind, repeat(delivery), indexes)


class Batch(Sequence[M], Generic[M]):
    """Messages that were pulled together, each made when it is looked at.

    Parameters:
        kind: the class of its messages.
        parts: the deliveries and which of their messages belong to the batch.
        opened: the same class with body and key as its own.
    """

    __slots__ = ("_count", "_kind", "_opened", "_parts")

    def __init__(
        self,
        kind: type[M],
        parts: Sequence[tuple[Delivery, Sequence[int]]] = (),
        opened: Callable[[Delivery, int, Any, str | None], M] | None = None,
    ) -> None:
        self._kind = kind
        self._opened = opened
        self._parts = parts
        self._count = sum(len(indexes) for _, indexes in parts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[M]:
        # No line of ours runs between two messages.
        return chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[Iterator[M]]:
        kind, opened = self._kind, self._opened
        for delivery, indexes in self._parts:
            if opened is None:
                yield map(kind, repeat(delivery), indexes)
                continue
            for at in range(0, len(indexes), BLOCK):
                yield messages_of(delivery, indexes[at : at + BLOCK], kind, opened)

    @overload
    def __getitem__(self, index: int) -> M: ...

    @overload
    def __getitem__(self, index: slice) -> list[M]: ...

    def __getitem__(self, index: int | slice) -> M | list[M]:
        if isinstance(index, slice):
            return [self._at(at) for at in range(*index.indices(self._count))]
        at = index + self._count if index < 0 else index
        if not 0 <= at < self._count:
            raise IndexError(f"the batch has {self._count} messages, and no number {index}")
        return self._at(at)

    def _at(self, at: int) -> M:
        for delivery, indexes in self._parts:
            if at < len(indexes):
                return self._kind(delivery, indexes[at])
            at -= len(indexes)
        raise IndexError(at)

    def ack(self) -> Any:
        """All that is not settled yet is done."""
        for delivery, indexes in self._parts:
            delivery.core.settle_many(delivery, indexes, _ACK)

    def nack(self, delay: float | None = None, reason: str = "") -> Any:
        """All that is not settled yet failed; as `ReceivedMessage.nack`."""
        later_ms, why = delay_ms(delay), reason_text(reason)
        for delivery, indexes in self._parts:
            delivery.core.settle_many(delivery, indexes, Outcome.NACK, later_ms, reason=why)

    def __repr__(self) -> str:
        return f"<Batch of {self._count} messages>"


def facts_of(message: ReceivedMessage) -> dict[str, object]:
    """What a line in the log says of a message, so that a person finds it."""
    return {
        "topic": message.topic,
        **({"shard": message.shard} if message.shard else {}),
        "queue": message.queue,
        "offset": message.offset,
        "key": message.key,
        "group": message.group,
        "attempt": message.attempt,
        "message_id": str(message.id),
    }


def parts_to_ack(messages: Any) -> Sequence[Any]:
    """What `Consumer.ack` was given, as things that can be acked.

    Raises:
        InvalidRequest: something is not a message.
    """
    if isinstance(messages, Batch | ReceivedMessage):
        return (messages,)
    given = [*messages] if isinstance(messages, Iterable) else [messages]
    for message in given:
        if not isinstance(message, ReceivedMessage):
            raise InvalidRequest(f"ack takes a message, a batch or a list of messages, not {message!r:.80}")
    return given
