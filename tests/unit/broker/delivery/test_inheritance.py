"""Who gets an ordered queue after a failover, and when."""

from __future__ import annotations

import itertools

from dmq.broker.delivery.channel import Channel, ChannelParts
from dmq.broker.delivery.cursor import LeaseNumbers
from dmq.broker.delivery.group import Group, Member, Subscription
from dmq.broker.delivery.waiters import Demand, Handed
from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import PositionSet, Settled
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.unit.broker.delivery.test_filter import NothingFails

UNTIL_MS = 10_000


class Shard:
    """A topic of two queues, and leaders of its shard one after the other."""

    def __init__(self) -> None:
        self.store = MessageStore(MemoryFiles(), clock=FakeClock())
        self.store.create_topic("orders", TopicConfig(queues=2))
        self.sequences = itertools.count(1, 100)
        self.channel = self.lead()

    def lead(self) -> Channel:
        """Another leader: it knows what the journal says, and of no lease."""
        queries = self.store.queries
        parts = ChannelParts(
            queries,
            LeaseNumbers(queries.epoch, itertools.count(1)),
            self._write,
            failures=NothingFails(),
            pump_soon=lambda channel: None,
            inherited_until_ms=UNTIL_MS,
            inherited=queries.next_offsets(),
        )
        self.channel = Channel(queries.topic("orders"), Group("billing", "orders"), parts)
        return self.channel

    def _write(self, events: list[Settled]) -> None:
        self.store.append(events)
        self.store.flush()

    def send(self, queue: int, count: int = 3) -> None:
        encoded = encode_batch("orders", "shop", [Message(b"x")] * count, sent_at_ms=1)
        first = next(self.sequences)
        self.store.append([
            Batch(topic="orders", queue=queue, data=encoded.data, lengths=encoded.lengths, producer_id=7,
                  first_sequence=first)
        ])  # fmt: skip
        self.store.flush()
        self.channel.selection.mark(queue)

    def join(self, name: str) -> Member:
        return self.channel.group.join(name, Subscription("", is_ordered=True), 0, 0).member

    def take(self, member: Member, now_ms: int = 1) -> Handed | None:
        return self.channel.hand_out(Demand(member, 10, 1 << 20, 60_000), now_ms)

    def ack(self, handed: Handed) -> None:
        lease = handed.lease
        cursor = self.channel.cursors[handed.queue]
        self.channel.settled(handed.queue, cursor.ack(lease.epoch, lease.number, None, 1))


def test_a_queue_with_something_to_do_waits_for_the_member_that_had_it() -> None:
    shard = Shard()
    shard.send(0)
    assert shard.take(shard.join("a")) is not None
    shard.lead()
    other, heir = shard.join("b"), shard.join("a")
    assert shard.take(other) is None
    shard.channel.inherit(0, heir)
    assert shard.take(other) is None
    assert shard.take(heir) is not None


def test_others_get_it_when_the_time_is_over() -> None:
    shard = Shard()
    shard.send(0)
    shard.lead()
    other = shard.join("b")
    assert shard.take(other) is None
    assert shard.channel.tick(UNTIL_MS)
    assert shard.take(other, UNTIL_MS) is not None


def test_a_queue_that_was_consumed_to_its_end_is_free_though_it_has_new_messages() -> None:
    """The last leader cannot have handed out what came after it."""
    shard = Shard()
    shard.send(0)
    shard.send(1)
    member = shard.join("a")
    for _ in range(2):
        handed = shard.take(member)
        assert handed is not None
        if handed.queue == 0:
            shard.ack(handed)
    shard.lead()
    shard.send(0)
    handed = shard.take(shard.join("b"))
    assert handed is not None
    assert handed.queue == 0
    assert shard.take(shard.join("b")) is None, "queue 1 was with somebody"


def test_a_group_that_is_new_has_all_queues_at_once() -> None:
    shard = Shard()
    shard.send(0)
    shard.lead()
    shard.channel.begin_anew()
    assert shard.take(shard.join("b")) is not None


def test_a_queue_whose_position_was_set_to_its_end_is_free() -> None:
    shard = Shard()
    shard.send(0)
    shard.store.append([PositionSet("billing", shard.channel.topic.id, 0, 3)])
    shard.store.flush()
    shard.lead()
    shard.send(0)
    handed = shard.take(shard.join("b"))
    assert handed is not None
    assert handed.lease.start == 3
