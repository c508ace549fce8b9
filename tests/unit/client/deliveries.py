"""Deliveries made by hand, for tests of what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.delivery import Delivery
from dmq.client.consumer.leases import LeaseBook, extension
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.consumer.options import ConsumerOptions, SubscribeOptions
from dmq.model import Message
from dmq.protocol import Buffer, pack_records
from dmq.protocol.consume import Lease, Outcome, Settle
from dmq.records import EncodeOptions, Stamp, encode_batch, stamp_few
from dmq.testing import FakeClock


def core(clock: FakeClock | None = None, *, type: Any = None, **options: Unpack[SubscribeOptions]) -> ConsumerCore:
    """A core that reports nothing by itself, with the book of one broker."""
    made = ConsumerCore(
        ConsumerOptions("orders", "billing", options, type=type),
        clock or FakeClock(),
        lambda delivery, seconds: None,
    )
    made.add_book()
    return made


def book(core: ConsumerCore, broker: int = 0) -> LeaseBook:
    """What a core has of a broker."""
    return core._books[broker]


def ticked(core: ConsumerCore) -> list[Settle]:
    """What a tick tells brokers, which do as they are asked."""
    told: list[Settle] = []
    for book, deliveries in core.tick():
        settlements = [extension(delivery.lease, core.options.lease) for delivery in deliveries]
        told += book.frames(settlements, core.member) if settlements else []
        core.extended(deliveries, (), core.now())
    return told


def frame(
    lease: int,
    messages: Sequence[Message],
    *,
    first: int = 0,
    queue: int = 0,
    attempt: int = 1,
    ids: list[tuple[int, int, int]] | None = None,
    sought: int = 0,
    encoding: EncodeOptions | None = None,
) -> tuple[list[Lease], Buffer]:
    """What a broker pushes: one lease and the body of its frame; offsets follow each other."""
    batch = encode_batch("orders", "shop", messages, sent_at_ms=1, options=encoding or EncodeOptions())
    data = bytearray(batch.data)
    starts, at = [], 0
    for length in map(int, batch.lengths):
        starts.append(at)
        at += length
    stamp_few(data, starts, [0] * len(starts), Stamp(queue, first, bytes(6), bytes(6), 1, 1))
    count = len(messages)
    runs = [(count, 7, first)] if ids is None else ids
    header = Lease(queue, 1, lease, first, first + count, count, attempt, 30_000, ids=runs, sought=sought)
    return [header], pack_records(batch.lengths) + bytes(data)


def bodies(*texts: str, priority: int = 4) -> list[Message]:
    return [Message(text.encode(), priority=priority) for text in texts]


def taken(core: ConsumerCore, limit: int = 100) -> list[bytes]:
    """The bodies of what a core hands out."""
    return [ReceivedMessage(*found).body for found in core.take(limit)]


def said(frames: Sequence[Settle]) -> list[tuple[int, str, list[tuple[int, int]]]]:
    """What reports say: lease, outcome, ranges."""
    return [
        (settlement.lease, Outcome(settlement.outcome).name, [*settlement.ranges])
        for frame in frames
        for settlement in frame.settlements
    ]


def one(core: ConsumerCore) -> tuple[Delivery, int]:
    """The next message."""
    (found,) = core.take(1)
    return found
