"""The asyncio client, against a real broker and against a peer that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

import dmq
import dmq.aio
from dmq.protocol import Command, Flag, Frame, Header
from dmq.protocol.session import ServerReboot
from tests.integration.client.servers import Peer, RunningBroker, usual
from tests.patience import PATIENCE_S, eventually_async


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    asyncio.run(bounded())


def test_sending_and_administration(broker: RunningBroker) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="shop") as client:
            await client.admin.create_topic("orders", queues=2)
            async with client.producer() as producer:
                receipt = await producer.send("orders", "text", key="k", durability="stored")
                assert (await client.admin.find("orders", key="k"))[0].offset == receipt.offset
                futures = [await producer.send_async("orders", b"%d" % number) for number in range(200)]
                assert len({(await future).id for future in futures}) == 200
                receipts = await producer.send_many("orders", [dmq.Message(b"x", key=str(n)) for n in range(3000)])
                assert len({(r.queue, r.offset) for r in receipts}) == 3000
                await producer.flush()
            assert sum(queue.next_offset for queue in await client.admin.offsets("orders")) == 3201
            with pytest.raises(dmq.NotConnected, match="closed"):
                await producer.send("orders", b"x")
            with pytest.raises(dmq.UnknownTopic):
                await client.producer().send("nowhere", b"x")

    run(main())


def test_a_client_knows_its_name_while_it_is_connected(broker: RunningBroker) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url, client_id="till-1") as client, dmq.aio.connect(broker.url) as other:
            assert client.client_id == "till-1"
            assert other.client_id not in ("", "till-1")
        with pytest.raises(dmq.NotConnected, match="closed"):
            _ = client.client_id

    run(main())


def test_many_tasks_share_batches() -> None:
    async def main() -> None:
        with Peer() as peer:
            async with dmq.aio.connect(peer.url) as client:
                producer = client.producer()
                await producer.send("t", b"warm")
                await asyncio.gather(*(producer.send("t", b"x") for _ in range(500)))
                assert len(peer.produced()) < 20
                assert len(peer.sockets) == 1

    run(main())


def test_nobody_there_is_told_at_once() -> None:
    async def main() -> None:
        with Peer() as peer:
            pass
        with pytest.raises(dmq.NotConnected, match="no broker answers"):
            await dmq.aio.connect(peer.url)

    run(main())


def test_a_broken_connection_comes_back_and_what_was_lost_is_resent() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | None:
        if frame.command == Command.PRODUCE and not frame.flags & Flag.RESEND:
            peer.cut()
            return None
        return usual(frame)

    async def main() -> None:
        events: list[str] = []

        async def resumed() -> None:
            events.append("resumed")

        with Peer(answer) as peer:
            async with dmq.aio.connect(
                peer.url,
                on_exception=lambda _: events.append("exception"),
                on_interrupted=lambda: events.append("interrupted"),
                on_resumed=resumed,
            ) as client:
                await client.producer().send("t", b"x")
                await eventually_async(lambda: len(events) == 3)
                assert events == ["exception", "interrupted", "resumed"]
                assert len(peer.produced()) == 2

    run(main())


def test_plain_mode_stays_closed() -> None:
    async def main() -> None:
        with Peer() as peer:
            async with dmq.aio.connect(peer.url, reconnect=False) as client:
                producer = client.producer()
                await producer.send("t", b"x")
                peer.cut()
                await eventually_async(lambda: client._router.home.closed_by)
                with pytest.raises(dmq.NotConnected, match="closed"):
                    await producer.send("t", b"x")

    run(main())


def test_an_unanswered_send_times_out_and_a_full_window_is_told() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | None:
        return None if frame.command == Command.PRODUCE else usual(frame)

    async def main() -> None:
        with Peer(answer) as peer:
            async with dmq.aio.connect(peer.url) as client:
                producer = client.producer(timeout=0.2, window_messages=1, on_full="raise")
                with pytest.raises(dmq.TimedOut):
                    await producer.send("t", b"x")
                with pytest.raises(dmq.Busy, match="window"):
                    await producer.send_async("t", b"x")
                await producer.close(0.05)

    run(main())


def test_a_rebooting_broker_is_left_for_another() -> None:
    async def main() -> None:
        with Peer() as first, Peer() as second:
            async with dmq.aio.connect(f"dmq://127.0.0.1:{first.port},127.0.0.1:{second.port}") as client:
                producer = client.producer()
                await producer.send("t", b"x")
                first.push(Command.SERVER_REBOOT, ServerReboot("peer", 500))
                await eventually_async(lambda: (c := client._router.home.current()) and c.address.port == second.port)
                await producer.send("t", b"y")
                assert len(second.produced()) == 1

    run(main())


def test_callbacks_may_be_coroutines() -> None:
    async def main() -> None:
        told: list[object] = []

        async def on_delivery(receipt: dmq.Receipt | None, error: dmq.DMQError | None) -> None:
            told.append(receipt)

        with Peer() as peer:
            async with dmq.aio.connect(peer.url) as client:
                await client.producer().send_async("t", b"x", on_delivery=on_delivery)
                await eventually_async(lambda: told)
                assert isinstance(told[0], dmq.Receipt)

    run(main())


def test_ordered_sends_of_many_tasks_are_stored_in_the_order_of_the_calls(broker: RunningBroker) -> None:
    """Before the route of the topic is known and after, through a window that is full all the time."""

    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="shop") as client:
            await client.admin.create_topic("accounts", queues=2)
            producer = client.producer(window_bytes=1 << 16, timeout=60.0)

            async def several(number: int) -> dmq.Receipt:
                of: dict[str, Any] = {"business_id": f"u-{number % 3}", "ordered": True}
                receipts = await producer.send_many("accounts", [dmq.Message(b"a", **of), dmq.Message(b"b", **of)])
                assert receipts[0].offset < receipts[1].offset
                return receipts[1]

            async def one(number: int) -> dmq.Receipt:
                of: dict[str, Any] = {"business_id": f"u-{number % 3}", "ordered": True}
                if number % 4 == 1:
                    return await (await producer.send_async("accounts", b"x" * 20_000, **of))
                if number % 4 == 2:
                    return await producer.send("accounts", dmq.Message(b"x", **of))
                return await producer.send("accounts", b"x" * (30_000 if number % 4 else 10), **of)

            tasks = []
            for number in range(300):
                tasks.append(asyncio.create_task((several if number % 7 == 5 else one)(number)))
                if number % 10 == 9:
                    await asyncio.sleep(0.0005)
            receipts = await asyncio.gather(*tasks)
            for customer in range(3):
                offsets = [receipt.offset for receipt in receipts[customer::3]]
                assert offsets == sorted(offsets)

    run(main())


def test_the_same_id_from_two_tasks_is_one_message_also_while_the_window_is_full(broker: RunningBroker) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="shop") as client:
            await client.admin.create_topic("twins", queues=1)
            producer = client.producer(window_bytes=1 << 16, timeout=60.0)
            await producer.send("twins", b"first")
            large = [asyncio.create_task(producer.send("twins", b"x" * 40_000, priority=5)) for _ in range(8)]
            await asyncio.sleep(0)
            twins = await asyncio.gather(*(producer.send("twins", b"y" * 40_000, id="o-1") for _ in range(3)))
            await asyncio.gather(*large)
            assert len({receipt.id for receipt in twins}) == 1
            assert [queue.next_offset for queue in await client.admin.offsets("twins")] == [10]

    run(main())


def test_a_task_whose_time_is_over_before_its_turn_is_told_and_holds_up_nobody(broker: RunningBroker) -> None:
    held: list[Frame] = []

    def answer(peer: Peer, frame: Frame) -> Header | None:
        if frame.command == Command.TOPIC_DESCRIBE and not held:
            held.append(frame)
            return None
        return usual(frame)

    async def main() -> None:
        with Peer(answer) as peer:
            async with dmq.aio.connect(peer.url) as client:
                producer = client.producer(timeout=PATIENCE_S)
                of: dict[str, Any] = {"business_id": "u", "ordered": True}
                first = asyncio.create_task(producer.send("t", b"1", **of))
                second = asyncio.create_task(producer.send("t", b"2", **of, timeout=0.05))
                third = asyncio.create_task(producer.send("t", b"3", **of))
                with pytest.raises(dmq.TimedOut, match="nothing was sent"):
                    await second
                first.cancel()  # the one that waits for an answer that never comes
                assert (await third).topic == "t"

    run(main())


def test_a_client_on_another_loop_than_its_own_says_so_at_once(broker: RunningBroker) -> None:
    async def use_all(
        client: dmq.aio.AioClient, producer: dmq.aio.AioProducer, consumer: dmq.aio.AioConsumer[bytes]
    ) -> None:
        async def iterate() -> None:
            async for _ in consumer:
                return

        for use in (
            producer.send("loops", b"x"),
            producer.send("unknown", b"x"),
            producer.send_many("loops", [dmq.Message(b"x")]),
            producer.flush(),
            client.admin.topics(),
            consumer.pull(1),
            iterate(),
            client.close(),
        ):
            with pytest.raises(dmq.NotConnected, match="another event loop"):
                await asyncio.wait_for(use, PATIENCE_S)

    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="shop") as client:
            await client.admin.create_topic("loops")
            producer, consumer = client.producer(), client.consumer("loops", group="g")
            await asyncio.to_thread(lambda: asyncio.run(use_all(client, producer, consumer)))

    run(main())
