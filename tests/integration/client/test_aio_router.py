"""The asyncio client over two brokers: topics at either, and a topic whose queues lie at both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import dmq
from dmq.client.aio.client import AioClient
from dmq.client.aio.consumer import AioConsumer
from dmq.client.connection.router import Listeners
from tests.integration.client.route_tables import QUEUES, Cluster, numbered, spread, two_brokers
from tests.patience import PATIENCE_S, eventually_async


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with two_brokers() as made:
        yield made


@asynccontextmanager
async def connected(cluster: Cluster, listeners: Listeners | None = None) -> AsyncIterator[AioClient]:
    client = AioClient(cluster, cluster.settings, listeners or Listeners())
    async with await client.open():
        await eventually_async(lambda: client._router.link_for("split", QUEUES - 1) is not None)
        yield client


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    asyncio.run(bounded())


async def iterated(consumer: AioConsumer, count: int) -> list[bytes]:
    """So many messages, acked."""
    found = []
    async for message in consumer:
        found.append(message.body)
        await message.ack()
        if len(found) == count:
            return sorted(found)
    raise AssertionError("the consumer ended")


async def pulled(consumer: AioConsumer, count: int) -> list[bytes]:
    """So many messages, acked by the batch."""
    found: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            batch = await consumer.pull(max_messages=7, wait=1.0)
            found += [message.body for message in batch]
            await consumer.ack(batch)
    return sorted(found)


def test_each_topic_is_sent_to_and_consumed_from_its_broker(cluster: Cluster) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            producer = client.producer()
            for topic in ("orders", "bills"):
                await producer.send(topic, b"0000")
                await (await producer.send_async(topic, b"0001"))
                await producer.send_many(topic, [dmq.Message(body) for body in numbered(50, 2)])
            for topic in ("orders", "bills"):
                async with client.consumer(topic, "push") as consumer:
                    assert await iterated(consumer, 52) == numbered(52)
                async with client.consumer(topic, "pull") as consumer:
                    assert await pulled(consumer, 52) == numbered(52)

    run(main())
    assert cluster.bodies("orders") == (numbered(52), [])
    assert cluster.bodies("bills") == ([], numbered(52))


def test_messages_of_a_topic_at_both_brokers_go_to_the_broker_of_their_queue(cluster: Cluster) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            producer = client.producer()
            for body in numbered(16):
                await producer.send("split", body)
            futures = [await producer.send_async("split", body) for body in numbered(1000, 16)]
            assert {(await future).topic for future in futures} == {"split"}
            await producer.send_many("split", [dmq.Message(body) for body in numbered(5000, 1016)])

    run(main())
    first, second = cluster.bodies("split")
    assert sorted(first + second) == numbered(6016)
    assert cluster.queues("split") == ({0, 1}, {2, 3})


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"strategy": "circle"}], ids=str)
def test_pushes_come_from_both_brokers_and_acks_go_back_to_each(cluster: Cluster, options: dict[str, Any]) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            producer = client.producer()
            for body in numbered(40):
                await producer.send("split", body)
            await producer.send_many("split", spread(260, 40))
            async with client.consumer("split", "billing", prefetch=20, **options) as consumer:
                assert await iterated(consumer, 300) == numbered(300)

    run(main())
    assert cluster.unacked("split", "billing") == 0


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"parallel": 2}], ids=str)
def test_pulls_come_from_both_brokers_and_acks_go_back_to_each(cluster: Cluster, options: dict[str, Any]) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            producer = client.producer()
            for body in numbered(100):
                await producer.send("split", body)
            async with client.consumer("split", "billing", **options) as consumer:
                assert await pulled(consumer, 100) == numbered(100)
                assert len(await consumer.pull(wait=0.1)) == 0

    run(main())
    assert cluster.unacked("split", "billing") == 0


def test_a_consumer_pauses_resumes_seeks_and_extends_at_both_brokers(cluster: Cluster) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            producer = client.producer()
            for body in numbered(20):
                await producer.send("split", body)
            async with client.consumer("split", "billing") as consumer:
                assert await iterated(consumer, 20) == numbered(20)
                await consumer.pause()
                for body in numbered(8, 20):
                    await producer.send("split", body)
                await consumer.resume()
                assert await iterated(consumer, 8) == numbered(8, 20)
                await consumer.seek("earliest")
                again = [await anext(consumer) for _ in range(28)]
                assert sorted(message.body for message in again) == numbered(28)
                for message in again:
                    await message.extend(60.0)
                    message.nack(delay=0.0)
                assert await iterated(consumer, 28) == numbered(28)

    run(main())


def test_one_broker_stops_and_comes_back_while_the_other_goes_on(cluster: Cluster) -> None:
    events: list[str] = []
    listeners = Listeners(None, lambda: events.append("interrupted"), lambda: events.append("resumed"))

    async def main() -> None:
        async with connected(cluster, listeners) as client, client.producer(timeout=20.0) as producer:
            consumer = client.consumer("split", "billing")
            await producer.send_many("split", spread(100))
            found = await iterated(consumer, 100)
            await asyncio.to_thread(cluster.second.stop)
            await eventually_async(lambda: events == ["interrupted"])
            for body in numbered(20, 100):
                assert (await producer.send("split", body)).queue < QUEUES // 2
            found += await iterated(consumer, 20)
            pinned = [
                await producer.send_async("split", b"u-%d" % n, business_id=f"u-{n}", ordered=True) for n in range(40)
            ]
            await asyncio.to_thread(cluster.second.start)
            assert {(await future).queue for future in pinned} == set(range(QUEUES))
            await eventually_async(lambda: events == ["interrupted", "resumed"])
            found += await iterated(consumer, 40)
            assert sorted(found) == sorted(numbered(120) + [b"u-%d" % n for n in range(40)])
            await consumer.close()

    run(main())
    assert cluster.unacked("split", "billing") == 0


def test_pulls_go_on_while_one_broker_is_away(cluster: Cluster) -> None:
    async def main() -> None:
        async with connected(cluster) as client:
            producer = client.producer()
            consumer = client.consumer("split", "billing")
            await producer.send_many("split", spread(50))
            assert await pulled(consumer, 50) == numbered(50)
            await asyncio.to_thread(cluster.first.stop)
            await eventually_async(lambda: client._router.link_for("split", 0) is None)
            await producer.send_many("split", [dmq.Message(body) for body in numbered(50, 50)])
            assert await pulled(consumer, 50) == numbered(50, 50)
            await asyncio.to_thread(cluster.first.start)
            await eventually_async(lambda: client._router.link_for("split", 0) is not None)
            for body in numbered(8, 100):
                await producer.send("split", body)
            assert await pulled(consumer, 8) == numbered(8, 100)
            await consumer.close()

    run(main())
    assert cluster.unacked("split", "billing") == 0
