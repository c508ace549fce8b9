"""The leases of one broker that a consumer has in hand, and what is still to be told of them. Pure.

What is said of one lease is gathered into one settlement for each outcome, and those into as few frames as they fit: a
consumer that acks message by message sends little more than one that acks by the batch.

What always holds: everything that was said is reported, and again over another link if it may not have arrived; what
waits to be reported is bounded by what is in hand. The lock of the consumer's core guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from dmq.client.connection.link import NamedLink
from dmq.client.consumer.delivery import Delivery, LeaseKey
from dmq.client.consumer.duplicates import Screening
from dmq.client.consumer.options import ConsumerOptions
from dmq.errors import DMQError
from dmq.protocol import Frame, decode_response, error_from_status
from dmq.protocol.consume import Lease, LeaseRef, Outcome, Settle, Settlement, SettleReply
from dmq.protocol.header import TEXT_MAX
from dmq.protocol.status import ErrorHeader

__all__ = [
    "SETTLEMENTS_MAX",
    "TOLD_MAX",
    "LeaseBook",
    "Told",
    "check_extended",
    "extension",
    "partly_moved",
    "refused_of",
    "settlements_of",
]

# In one frame; far below what a header may hold, so that the broker gets to others in between.
SETTLEMENTS_MAX: Final = 1000
TOLD_MAX: Final = 20_000
_SIGN_FRAMES: Final = 64


def settlements_of(delivery: Delivery) -> Iterable[Settlement]:
    """What a delivery has to report, one settlement for each outcome; it has nothing more then."""
    lease = delivery.lease
    if delivery.acks:
        acks, delivery.acks = delivery.acks, []
        yield Settlement(
            lease.queue, lease.epoch, lease.lease, Outcome.ACK, ranges=delivery.ranges(acks), topic=lease.topic
        )
    if delivery.others:
        others, delivery.others = delivery.others, []
        alike: dict[tuple[int, int, str], list[int]] = {}
        for index, outcome, delay_ms, reason in others:
            alike.setdefault((outcome, delay_ms, reason), []).append(index)
        for (outcome, delay_ms, reason), indexes in alike.items():
            indexes.sort()
            yield Settlement(
                lease.queue,
                lease.epoch,
                lease.lease,
                Outcome(outcome),
                ranges=delivery.ranges(indexes),
                delay_ms=delay_ms,
                reason=shortened(reason),
                topic=lease.topic,
            )


def shortened(reason: str) -> str:
    """A reason as long as the protocol takes it, and without what cannot be encoded."""
    text = str(reason).encode("utf-8", "replace").decode()
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


class Told:
    """Settlements that a broker was told, until an answer shows that they arrived: a link that breaks loses what is on
    its way. Told again, they change nothing the second time.

    What always holds: there are at most `TOLD_MAX` settlements; of more, the oldest are held to have arrived.
    """

    __slots__ = ("_count", "_frames", "_link", "_lost", "_unsigned")

    def __init__(self) -> None:
        self._frames: deque[tuple[float, Settle]] = deque()
        self._count = 0  # settlements in them
        self._link: NamedLink | None = None  # over which they were told
        self._lost: list[Settle] = []  # those of the links before
        self._unsigned = 0  # how many were told since the last time that the broker was asked for a sign

    def add(self, link: NamedLink, frames: Sequence[Settle], now: float) -> bool:
        """They were told over a link; returns whether the broker is to be asked for a sign that they arrived."""
        self._move_to(link)
        self._forget_arrived()
        self._frames.extend((now, frame) for frame in frames)
        self._count += sum(len(frame.settlements) for frame in frames)
        while self._count > TOLD_MAX:
            self._forget_first()
        self._unsigned += len(frames)
        if self._unsigned < _SIGN_FRAMES:
            return False
        self._unsigned = 0
        return True

    def take_lost(self, link: NamedLink) -> list[Settle]:
        """What was told over links before this one, and may not have arrived."""
        self._move_to(link)
        lost, self._lost = self._lost, []
        return lost

    def _move_to(self, link: NamedLink) -> None:
        if link is not self._link:
            self._forget_arrived()
            self._lost += (frame for _, frame in self._frames)
            self._frames.clear()
            self._count, self._link, self._unsigned = 0, link, 0

    def _forget_arrived(self) -> None:
        if self._link is not None:
            since = self._link.answered_since
            while self._frames and self._frames[0][0] < since:
                self._forget_first()

    def _forget_first(self) -> None:
        self._count -= len(self._frames.popleft()[1].settlements)


class LeaseBook:
    """What a consumer has of one broker: deliveries in hand, by lease, and those that have something to report.

    Parameters:
        broker: its number within the consumer.
    """

    __slots__ = (
        "_options",
        "_sought",
        "_unsent",
        "broker",
        "dirty",
        "finished",
        "held",
        "is_vouched",
        "screening",
        "shard",
        "told",
    )

    def __init__(self, options: ConsumerOptions, broker: int) -> None:
        self._options = options
        self.broker = broker
        self.shard = 0  # the number of the broker's shard
        self._sought: dict[tuple[str, int], int] = {}
        self._unsent: list[Settlement] = []
        self.held: dict[LeaseKey, Delivery] = {}
        self.dirty: list[Delivery] = []
        self.is_vouched = False  # frames have a checksum, which stands for those of their records
        self.finished = 0  # how many messages were reported and not yet counted
        self.screening = Screening(options.tag_set)
        self.told = Told()

    @property
    def has_reports(self) -> bool:
        """Whether there is something to tell the broker."""
        return bool(self._unsent or self.dirty)

    def add(self, delivery: Delivery) -> None:
        """A delivery has more to report."""
        if not delivery.is_dirty:
            delivery.is_dirty = True
            self.dirty.append(delivery)

    def take_dirty(self) -> list[Delivery]:
        """The deliveries that have something to report; to be turned into settlements."""
        dirty, self.dirty = self.dirty, []
        for delivery in dirty:
            delivery.is_dirty = False
        return dirty

    def take_unsent(self) -> list[Settlement]:
        """What was to be reported before, and found no connection."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def not_sent(self, frames: Iterable[Settle]) -> None:
        """There was no connection for them: they go with the next ones."""
        self._unsent = [settlement for frame in frames for settlement in frame.settlements] + self._unsent

    def frames(self, settlements: list[Settlement], member: str) -> list[Settle]:
        """The headers that report them."""
        options = self._options
        return [
            Settle(options.topic, options.group, settlements[at : at + SETTLEMENTS_MAX], member)
            for at in range(0, len(settlements), SETTLEMENTS_MAX)
        ]

    def is_moved(self, lease: Lease) -> bool:
        """Whether the position of a lease's queue was set by hand since the last lease of it."""
        place = (lease.topic, lease.queue)
        if lease.sought == self._sought.setdefault(place, lease.sought):
            return False
        self._sought[place] = lease.sought
        return True

    def others_of(self, delivery: Delivery) -> Iterable[Delivery]:
        """Deliveries of the same queue that are in hand, the oldest first; itself among them if it is."""
        topic, queue = delivery.lease.topic, delivery.lease.queue
        return (held for held in [*self.held.values()] if (held.lease.topic, held.lease.queue) == (topic, queue))

    def is_first(self, delivery: Delivery) -> bool:
        """Whether no earlier lease of its queue is in hand."""
        return next(iter(self.others_of(delivery)), delivery) is delivery

    def references(self, *, with_pulled: bool = False) -> list[LeaseRef]:
        """The leases we still have something of, or something to say about."""
        topic, held = self._options.topic, self.held.values()
        return [
            LeaseRef(lease.topic or topic, lease.queue, lease.epoch, lease.lease)
            for lease in (delivery.lease for delivery in held if with_pulled or not delivery.is_pulled)
        ]


def extension(lease: Lease, seconds: float) -> Settlement:
    """The wish to keep a lease for so long from now."""
    delay_ms = max(1, round(seconds * 1000))
    return Settlement(lease.queue, lease.epoch, lease.lease, Outcome.EXTEND, delay_ms=delay_ms, topic=lease.topic)


def refused_of(answer: Frame | DMQError) -> set[int] | None:
    """The settlements that a broker refused, by their index; None if it did not answer."""
    if isinstance(answer, DMQError):
        return None
    try:
        reply: SettleReply = decode_response(answer)
    except DMQError:
        return None
    return {refusal.index for refusal in reply.refused}


def partly_moved(failed: Sequence[DMQError], brokers: int) -> DMQError:
    """What a seek raises that some of the brokers did not carry out."""
    error = failed[0]
    if brokers == 1:
        return error
    moved = f"the group was moved in {brokers - len(failed)} of {brokers} shards: seek again to move it in all"
    return type(error)(f"{error.message}; {moved}", **error.detail)


def check_extended(reply: SettleReply, delivery: Delivery, deadline: float) -> None:
    """Take note of an extension.

    Raises:
        LeaseLost: it came too late.
    """
    for refusal in reply.refused:
        raise error_from_status(refusal.status, ErrorHeader(refusal.message))
    delivery.deadline = max(delivery.deadline, deadline)
