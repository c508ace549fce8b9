"""What a broker does for a lone message, and what acks cost it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.cursor import Cursor
from dmq.broker.delivery.waiters import Demand, Handed
from dmq.protocol import Command, Kind, Status, decode_request, one_way_head, request_head
from dmq.protocol.consume import Outcome, Push, Settle, Settlement, Subscribe
from dmq.storage.state.events import KeyPut, Settled
from tests.patience import eventually_async
from tests.unit.broker.turns import Peer, Rig, running


def in_a_broker(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running(offline_delay_ms=0) as rig:
            await test(rig)

    asyncio.run(run())


async def subscribed(rig: Rig) -> Peer:
    """A peer that consumes `orders` and also sends."""
    (peer,) = await rig.connect(1)
    peer.feed(request_head(Command.SUBSCRIBE, Subscribe(1, "orders", "billing", prefetch_messages=100), 900))
    await eventually_async(lambda: peer.wire.frames)
    await rig.settle()
    peer.wire.frames.clear()
    return peer


def pushes(peer: Peer) -> list[Push]:
    return [decode_request(frame) for frame in peer.wire.frames if frame.kind == Kind.ONE_WAY]


def ack(lease: int, epoch: int, first: int, count: int, queue: int = 0) -> Settle:
    said = Settlement(queue, epoch, lease, Outcome.ACK, [(first, count)])
    return Settle("orders", "billing", [said])


def test_the_answer_to_a_send_and_the_push_it_causes_leave_in_one_write() -> None:
    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        peer.wire.writes = 0
        peer.send([b"a"])
        await eventually_async(lambda: peer.wire.frames)
        assert len(peer.wire.frames) == 2
        assert len(pushes(peer)) == 1
        assert peer.wire.writes == 1

    in_a_broker(run)


def test_a_push_leaves_before_the_answer_to_its_producer() -> None:
    async def run(rig: Rig) -> None:
        consumer = await subscribed(rig)
        (producer,) = await rig.connect(1)
        written: list[str] = []
        consumer.wire.on_write, producer.wire.on_write = (
            lambda: written.append("push"),
            lambda: written.append("answer"),
        )
        producer.send([b"a"])
        await eventually_async(lambda: len(written) == 2)
        assert written == ["push", "answer"]

    in_a_broker(run)


def test_acks_are_written_together_and_no_message_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmq.broker.journal.writer._LAZY_SECONDS", 3600.0)

    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        peer.send([b"a", b"b", b"c"])
        await eventually_async(lambda: pushes(peer))
        (lease,) = pushes(peer)[0].leases
        units = rig.broker.writer.units
        for index in range(3):
            peer.feed(
                one_way_head(Command.SETTLE, ack(lease.lease, lease.epoch, lease.first_offset + index, 1, lease.queue))
            )
        peer.send([b"d"], sequence=3)
        await eventually_async(lambda: len(pushes(peer)) == 2)
        assert rig.broker.writer.units == units + 1
        position = rig.store.queries.position("billing", "orders", lease.queue)
        assert position is None or position.floor == lease.first_offset
        rig.broker.writer.write_soon([KeyPut("app", "key", b"value")])
        await rig.turn()
        assert rig.broker.writer.units == units + 2, "other events come after them, in one unit"
        position = rig.store.queries.position("billing", "orders", lease.queue)
        assert position is not None
        assert position.floor == lease.end_offset

    in_a_broker(run)


def test_an_ack_asks_nobody_unless_there_is_something_to_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        (peer,) = await rig.connect(1)
        peer.feed(request_head(Command.SUBSCRIBE, Subscribe(1, "orders", "billing", prefetch_messages=2, batch=2), 900))
        await eventually_async(lambda: peer.wire.frames)
        await rig.settle()
        peer.wire.frames.clear()
        asked: list[Demand] = []
        hand_out = Channel.hand_out

        def counted(channel: Channel, demand: Demand, now_ms: int) -> Handed | None:
            asked.append(demand)
            return hand_out(channel, demand, now_ms)

        monkeypatch.setattr(Channel, "hand_out", counted)
        peer.send([b"a", b"b"])
        await eventually_async(lambda: pushes(peer))
        await rig.settle()
        assert len(asked) == 1, "what was handed out was all there is"
        peer.send([b"c"], sequence=2)
        await rig.settle()
        assert len(asked) == 1, "nobody has credit"
        (lease,) = pushes(peer)[0].leases
        peer.feed(one_way_head(Command.SETTLE, ack(lease.lease, lease.epoch, lease.first_offset, 1, lease.queue)))
        await eventually_async(lambda: len(pushes(peer)) == 2)
        (third,) = pushes(peer)[1].leases
        await rig.settle()
        assert len(asked) == 2
        peer.feed(one_way_head(Command.SETTLE, ack(third.lease, third.epoch, third.first_offset, 1, third.queue)))
        await rig.settle()
        assert len(asked) == 2, "an ack frees credit, and nothing waits for it"

    in_a_broker(run)


def test_time_is_looked_at_only_where_something_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        looked: list[Cursor] = []
        next_deadline = Cursor.next_deadline

        def counted(cursor: Cursor) -> int | None:
            looked.append(cursor)
            return next_deadline(cursor)

        monkeypatch.setattr(Cursor, "next_deadline", counted)
        (channel,) = rig.broker.channels.open.values()
        assert len(channel.cursors) == channel.topic.config.queues
        channel.tick(0)
        assert not looked
        peer.send([b"a"])
        await eventually_async(lambda: pushes(peer))
        (lease,) = pushes(peer)[0].leases
        looked.clear()
        channel.tick(0)
        assert looked == [channel.cursors[lease.queue]]
        peer.feed(one_way_head(Command.SETTLE, ack(lease.lease, lease.epoch, lease.first_offset, 1, lease.queue)))
        channel.tick(0)
        looked.clear()
        channel.tick(0)
        assert not looked

    in_a_broker(run)


def test_acks_that_nothing_follows_are_written_soon() -> None:
    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        peer.send([b"a"])
        await eventually_async(lambda: pushes(peer))
        (lease,) = pushes(peer)[0].leases
        peer.feed(one_way_head(Command.SETTLE, ack(lease.lease, lease.epoch, lease.first_offset, 1, lease.queue)))

        def is_written() -> bool:
            position = rig.store.queries.position("billing", "orders", lease.queue)
            return position is not None and position.floor == lease.end_offset

        await eventually_async(is_written)

    in_a_broker(run)


def test_an_ack_that_somebody_waits_for_is_written_in_its_turn() -> None:
    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        peer.send([b"a"])
        await eventually_async(lambda: pushes(peer))
        (lease,) = pushes(peer)[0].leases
        units = rig.broker.writer.units
        said = ack(lease.lease, lease.epoch, lease.first_offset, 1, lease.queue)
        peer.feed(request_head(Command.SETTLE, said, 901))
        await rig.turn()
        await rig.turn()
        assert rig.broker.writer.units == units + 1

    in_a_broker(run)


def test_an_ack_that_comes_after_the_end_is_refused_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        peer.send([b"a"])
        await eventually_async(lambda: pushes(peer))
        (lease,) = pushes(peer)[0].leases
        await rig.broker.stop(0.0)
        peer.wire.frames.clear()
        said = ack(lease.lease, lease.epoch, lease.first_offset, 1, lease.queue)
        peer.feed(one_way_head(Command.SETTLE, said))
        peer.feed(request_head(Command.SETTLE, said, 901))
        await eventually_async(lambda: peer.wire.frames)
        assert peer.answers() == [Status.BROKER_STOPPING]
        rig.broker.writer.write_lazily([Settled("billing", 16, 0, 0, 1)])
        rig.broker.writer.write_soon([Settled("billing", 16, 0, 0, 1)])
        await rig.broker.writer.drain()

    with caplog.at_level(logging.DEBUG, "dmq.broker"):
        in_a_broker(run)
    told = {(record.levelname, record.getMessage().partition(" error=")[0]) for record in caplog.records}
    assert ("DEBUG", "events came too late") in told
    assert not {level for level, _ in told} & {"WARNING", "ERROR", "CRITICAL"}


def test_acks_that_come_while_the_broker_closes_are_written() -> None:
    async def run(rig: Rig) -> None:
        peer = await subscribed(rig)
        peer.send([b"a", b"b"])
        await eventually_async(lambda: pushes(peer))
        (lease,) = pushes(peer)[0].leases
        peer.feed(one_way_head(Command.SETTLE, ack(lease.lease, lease.epoch, lease.first_offset, 1, lease.queue)))
        closing = asyncio.ensure_future(rig.broker.writer.close())
        peer.feed(one_way_head(Command.SETTLE, ack(lease.lease, lease.epoch, lease.first_offset + 1, 1, lease.queue)))
        await closing
        position = rig.store.queries.position("billing", "orders", lease.queue)
        assert position is not None
        assert position.floor == lease.end_offset

    in_a_broker(run)
