"""The door for gateways, console and replication: everything a client does, done without a frame."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dmq.errors import (
    ConsumeTimeout,
    InvalidRequest,
    SubscriptionSuperseded,
    TransactionOver,
    UnknownGroup,
    UnknownMessage,
    UnknownTopic,
)
from dmq.model import Durability, MessageId, TopicConfig
from dmq.protocol import read as headers
from dmq.protocol.consume import Outcome, Point, PointKind, Seek, Settle, Settlement, Unsubscribe
from dmq.protocol.produce import ProduceFlag, TransactionOutcome
from tests.integration.broker_door.doors import PRODUCER, Basket, Door, Witness, bodies_of, with_a_door


def test_messages_are_published_pushed_and_acked() -> None:
    async def run(door: Door) -> None:
        placement = await door.publish(b"a", b"b")
        assert (placement.topic, placement.queue, placement.first_offset, placement.count) == ("orders", 0, 0, 2)
        assert (await door.publish(b"a", b"b", sequence=0)).duplicate
        client, basket = door.client("one"), Basket()
        reply = await door.subscribe(client, basket)
        assert (reply.subscription, reply.queues) == (1, 1)
        await door.until(lambda: basket.bodies == [b"a", b"b"])
        for handed in basket.handed:
            door.settle(client, handed, Outcome.ACK)
        await door.publish(b"c")
        await door.until(lambda: basket.bodies == [b"a", b"b", b"c"])
        (row,) = door.broker.groups.positions("billing", "orders")
        assert (row.floor, row.leased, row.next_offset) == (2, 1, 3)
        client.unsubscribe(Unsubscribe(1))
        other = door.client("two")
        again = await door.pull(other)
        assert again is not None
        assert bodies_of(again) == [b"c"], "what was not acked comes again"

    with_a_door(run)


def test_a_pull_waits_for_what_is_published_later() -> None:
    async def run(door: Door) -> None:
        client = door.client("one")
        assert await door.pull(client) is None
        pulling = asyncio.ensure_future(door.pull(client, wait_ms=60_000))
        await asyncio.sleep(0.05)
        assert not pulling.done()
        await door.publish(b"a")
        handed = await pulling
        assert handed is not None
        assert bodies_of(handed) == [b"a"]
        door.settle(client, handed, Outcome.ACK)
        assert door.broker.channels.out == 0

    with_a_door(run)


def test_a_message_that_fails_is_tried_again_and_one_that_is_rejected_is_a_dead_letter() -> None:
    async def run(door: Door) -> None:
        client = door.client("one")
        await door.pull(client)
        await door.publish(b"a", b"b")
        handed = await door.pull(client, wait_ms=1000)
        assert handed is not None
        start = handed.lease.start
        door.settle(client, handed, Outcome.NACK, ranges=[(start, 1)], delay_ms=0, reason="boom")
        door.settle(client, handed, Outcome.REJECT, ranges=[(start + 1, 1)], reason="no")
        again = await door.pull(client, wait_ms=60_000)
        assert again is not None
        assert bodies_of(again) == [b"a"]
        assert again.topic.startswith("%RETRY%")
        door.settle(client, again, Outcome.ACK)
        await door.until(lambda: door.bodies("%DLQ%billing") == [b"b"])

    with_a_door(run)


def test_a_delayed_message_comes_when_it_is_due_and_one_that_is_cancelled_does_not() -> None:
    async def run(door: Door) -> None:
        client = door.client("one")
        await door.pull(client)
        due_ms = door.clock.now_ms() + 5000
        assert (await door.publish(b"later", due_ms=due_ms)).queue == 255
        await door.publish(b"never", due_ms=due_ms)
        infos, _ = await door.broker.delays.pending((0, 0), 10, "orders")
        assert [info.due_at_ms for info in infos] == [due_ms, due_ms]
        await door.broker.delays.cancel(MessageId(PRODUCER, 1))
        with pytest.raises(UnknownMessage):
            await door.broker.delays.cancel(MessageId(PRODUCER, 1))
        assert await door.pull(client) is None
        door.clock.advance(5.1)
        handed = await door.pull(client, wait_ms=60_000)
        assert handed is not None
        assert bodies_of(handed) == [b"later"]

    with_a_door(run)


def test_half_messages_are_seen_once_they_are_committed_and_not_if_they_are_rolled_back() -> None:
    async def run(door: Door) -> None:
        client = door.client("one")
        await door.pull(client)
        await door.publish(b"yes", flags=ProduceFlag.HALF, group="shop", sequence=0)
        await door.publish(b"no", flags=ProduceFlag.HALF, group="shop", sequence=1)
        infos, _ = await door.broker.transactions.page((0, b""), 10, "")
        assert [info.topic for info in infos] == ["orders", "orders"]
        assert await door.pull(client) is None
        assert await door.end(0, 1, TransactionOutcome.COMMIT) == {}
        assert await door.end(1, 1, TransactionOutcome.ROLLBACK) == {}
        (refused,) = (await door.end(1, 1, TransactionOutcome.COMMIT)).values()
        assert isinstance(refused, TransactionOver)
        handed = await door.pull(client, wait_ms=1000)
        assert handed is not None
        assert bodies_of(handed) == [b"yes"]

    with_a_door(run)


def test_a_producer_is_asked_about_a_transaction_that_stays_open() -> None:
    async def run(door: Door) -> None:
        witness = Witness()
        door.broker.transactions.join(witness, "shop")
        await door.publish(b"a", flags=ProduceFlag.HALF, group="shop", sequence=0)
        door.clock.advance(120.0)
        await door.until(lambda: witness.asked)
        assert witness.asked[0].message_id == MessageId(PRODUCER, 0).to_bytes()

    with_a_door(run, transaction_first_check_seconds=1.0)


def test_a_producer_waits_until_its_message_is_consumed() -> None:
    async def run(door: Door) -> None:
        client = door.client("one")
        await door.pull(client)
        how: dict[str, Any] = {"durability": Durability.CONSUMED, "group": "billing", "timeout_ms": 10_000}
        sending = asyncio.ensure_future(door.publish(b"a", **how))
        handed = await door.pull(client, wait_ms=60_000)
        assert handed is not None
        assert not sending.done()
        door.settle(client, handed, Outcome.ACK)
        assert (await sending).first_offset == 0
        late = asyncio.ensure_future(door.publish(b"b", **how))
        await door.until(lambda: door.broker.channels.open["orders", "billing"].watches.count)
        door.clock.advance(11.0)
        with pytest.raises(ConsumeTimeout):
            await late

    with_a_door(run)


def test_a_group_is_moved_and_deleted() -> None:
    async def run(door: Door) -> None:
        await door.publish(b"a", b"b")
        client, basket = door.client("one"), Basket()
        await door.subscribe(client, basket)
        await door.until(lambda: basket.bodies == [b"a", b"b"])
        for handed in basket.handed:
            door.settle(client, handed, Outcome.ACK)
        (move,) = await door.broker.groups.seek(Seek("orders", "billing", to=Point(PointKind.EARLIEST)), "one")
        assert (move.before, move.after) == (2, 0)
        await door.until(lambda: basket.bodies == [b"a", b"b"] * 2)
        await door.broker.groups.delete("billing")
        assert isinstance(basket.ended, UnknownGroup)
        with pytest.raises(UnknownGroup):
            client.settle(Settle("orders", "billing", [Settlement(0, 1, 1, Outcome.ACK)]))

    with_a_door(run)


def test_the_later_of_two_clients_of_one_name_gets_the_messages() -> None:
    async def run(door: Door) -> None:
        first, second = Basket(), Basket()
        await door.subscribe(door.client("same"), first)
        await door.subscribe(door.client("same"), second)
        assert isinstance(first.ended, SubscriptionSuperseded)
        await door.publish(b"a")
        await door.until(lambda: second.bodies == [b"a"])
        assert first.bodies == []

    with_a_door(run)


def test_idle_members_share_what_is_there_and_come_before_those_that_hold_much() -> None:
    async def run(door: Door) -> None:
        first, second, third = Basket(), Basket(), Basket()
        await door.subscribe(door.client("one"), first)
        await door.subscribe(door.client("two"), second)
        await door.publish(*[b"%d" % number for number in range(60)])
        await door.until(lambda: len(first.bodies) + len(second.bodies) == 60)
        assert (len(first.bodies), len(second.bodies)) == (30, 30)
        await door.subscribe(door.client("three"), third)
        await door.publish(b"new")
        await door.until(lambda: third.bodies == [b"new"])

    with_a_door(run)


def test_a_client_that_is_gone_keeps_its_leases_for_the_grace_time() -> None:
    async def run(door: Door) -> None:
        await door.publish(b"a")
        client, basket = door.client("one"), Basket()
        await door.subscribe(client, basket)
        await door.until(lambda: basket.bodies)
        client.leave(2000)
        other = door.client("two")
        assert await door.pull(other) is None
        door.clock.advance(3.0)
        handed = await door.pull(other, wait_ms=60_000)
        assert handed is not None
        assert handed.lease.attempt == 2

    with_a_door(run)


def test_topics_are_created_changed_and_deleted() -> None:
    async def run(door: Door) -> None:
        catalog = door.broker.catalog
        topic = await catalog.create("bills", TopicConfig(queues=2))
        assert topic.config.queues == 2
        assert (await catalog.update("bills", lambda config: TopicConfig(queues=3))).config.queues == 3
        await door.publish(b"a", topic="bills")
        assert catalog.amounts(catalog.topic("bills")) == (1, 1)
        client, basket = door.client("one"), Basket()
        await door.subscribe(client, basket)
        await catalog.delete("orders")
        assert isinstance(basket.ended, UnknownTopic)
        with pytest.raises(InvalidRequest, match="DMQ's own"):
            await door.publish(b"a", topic="%SCHEDULE%")

    with_a_door(run)


class Asker:
    """Asks for what it can take."""

    is_open = is_writable = True
    asked = 0

    def __init__(self) -> None:
        self.reading = asyncio.Lock()


def test_messages_are_read_without_being_consumed() -> None:
    async def run(door: Door) -> None:
        placement = await door.publish(b"a", b"b")
        reader, asker = door.broker.reader, Asker()
        offsets = await reader.offsets(headers.Offsets("orders"), asker)
        assert [(row.first_offset, row.next_offset) for row in offsets.queues] == [(0, 2)]
        lengths: list[int] = []
        await reader.peek(headers.Peek("orders"), asker, lambda spans, read: lengths.extend(read.lengths))
        assert len(lengths) == 2
        units: list[bytes] = []
        start = placement.unit_start
        await reader.fetch(headers.Fetch(start), asker, lambda reply, pieces: units.append(b"".join(pieces)))
        assert len(units[0]) == door.broker.store.queries.visible - start

    with_a_door(run)
