"""Settlements: what was said of messages and must still be told to the broker. Pure.

Words about one lease are gathered into one settlement for each outcome, and those into as few frames as they fit: a
consumer that acks message by message sends little more than one that acks by the batch.

What always holds: everything that was added is given out once; what is waiting is bounded by what is out with the
consumer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dmq.client.delivery import Delivery
from dmq.protocol.consuming import Outcome, Settle, Settlement
from dmq.protocol.header import TEXT_MAX

__all__ = ["Settlements", "settlements_of"]

# In one frame; far below what a header may hold, so that the broker gets to others in between.
SETTLEMENTS_MAX: Final = 1000


def settlements_of(delivery: Delivery) -> Iterable[Settlement]:
    """What a delivery has to report, one settlement for each outcome; it has nothing more then."""
    lease = delivery.lease
    if delivery.acks:
        acks, delivery.acks = delivery.acks, []
        yield Settlement(lease.queue, lease.epoch, lease.lease, Outcome.ACK, delivery.ranges(acks), topic=lease.topic)
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
                delivery.ranges(indexes),
                delay_ms,
                shortened(reason),
                lease.topic,
            )


def shortened(reason: str) -> str:
    """A reason as long as the protocol takes it, and without what cannot be encoded."""
    text = str(reason).encode("utf-8", "replace").decode()
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"


class Settlements:
    """The deliveries that have something to report.

    Parameters:
        topic, group: of the consumer.
    """

    def __init__(self, topic: str, group: str) -> None:
        self._topic = topic
        self._group = group
        self._dirty: list[Delivery] = []
        self.count = 0  # messages, about

    def add(self, delivery: Delivery, count: int = 1) -> None:
        """A delivery has more to report."""
        self.count += count
        if not delivery.is_dirty:
            delivery.is_dirty = True
            self._dirty.append(delivery)

    def take(self) -> list[Delivery]:
        """The deliveries that have something to report; to be turned into frames."""
        dirty, self._dirty = self._dirty, []
        self.count = 0
        for delivery in dirty:
            delivery.is_dirty = False
        return dirty

    def frames(self, settlements: list[Settlement], member: str) -> list[Settle]:
        """The headers that report them."""
        return [
            Settle(self._topic, self._group, settlements[at : at + SETTLEMENTS_MAX], member)
            for at in range(0, len(settlements), SETTLEMENTS_MAX)
        ]
