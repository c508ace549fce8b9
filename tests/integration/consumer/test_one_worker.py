"""A handler on the thread that reads: whatever it does, the connection goes on for everybody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import dmq
from dmq import aio
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import TestBroker
from tests.integration.broker_thread import ServedBroker
from tests.integration.consumer.handler_thread import PATIENCE, Handling, lag, send
from tests.patience import eventually

WARM_UP = 40  # handlers are known to be quick then


class Blocking:
    """A handler that is quick until it meets the message that it waits with."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.is_blocked, self.may_return = threading.Event(), threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        if message.body == b"slow":
            self.is_blocked.set()
            assert self.may_return.wait(PATIENCE)
        self.seen.append(message.body)

    def warm_up(self, client: Client, topic: str = "orders") -> None:
        send(client, *map(str, range(WARM_UP)), topic=topic)
        eventually(lambda: len(self.seen) >= WARM_UP)
        send(client, "slow", topic=topic)
        assert self.is_blocked.wait(PATIENCE)


@pytest.fixture
def beating() -> Iterator[Client]:
    """A client of a broker that takes a client for dead that is silent for less than a second."""
    with ServedBroker(heartbeat_seconds=0.25) as broker, dmq.connect(broker.url, app="test") as client:
        client.admin.create_topic("orders", queues=1)
        yield client


@pytest.mark.parametrize("policy", ["caller-runs", "block"])
def test_a_handler_that_takes_longer_than_heartbeats_may_keeps_its_connection_and_its_lease(
    beating: Client, policy: str
) -> None:
    lost: list[object] = []
    handler = Blocking()
    pool = beating._router.home
    before = pool.current()
    with Handling(beating.consumer("orders", "billing", lease=0.5), handler, workers=1, policy=policy):
        handler.warm_up(beating)
        threading.Event().wait(1.5)  # twice as long as the broker's patience, and three leases
        lost.append(pool.current() is not before)
        handler.may_return.set()
        eventually(lambda: handler.seen[-1] == b"slow")
    assert lost == [False]
    assert handler.seen.count(b"slow") == 1
    assert lag(beating) == 0


def test_while_a_handler_waits_others_of_its_client_are_served(client: Client) -> None:
    client.admin.create_topic("bills", queues=1)
    slow, quick = Blocking(), Blocking()
    producer = client.producer()
    with (
        Handling(client.consumer("orders", "billing"), slow, workers=1, policy="block"),
        Handling(client.consumer("bills", "billing"), quick, workers=1, policy="block"),
    ):
        slow.warm_up(client)
        send(client, *map(str, range(WARM_UP)), topic="bills")
        eventually(lambda: len(quick.seen) == WARM_UP)
        futures = [producer.send_async("bills", f"{n}") for n in range(10)]
        assert len({future.result(PATIENCE).id for future in futures}) == 10
        eventually(lambda: len(quick.seen) == WARM_UP + 10)
        assert client.admin.topic("orders").name == "orders"
        assert lag(client) == 1
        slow.may_return.set()
    assert lag(client) == 0


@pytest.mark.parametrize("policy", ["caller-runs", "block"])
def test_a_handler_may_use_the_client_that_it_was_called_from(client: Client, policy: str) -> None:
    client.admin.create_topic("bills", queues=1)
    producer = client.producer()
    done: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        receipt = producer.send("bills", message.body)
        future = producer.send_async("bills", message.body)
        assert future.result(PATIENCE).id != receipt.id
        assert client.admin.topic("bills").name == "bills"
        done.append(message.body)

    with Handling(client.consumer("orders", "billing"), handle, workers=1, policy=policy):
        send(client, *map(str, range(WARM_UP)))
        eventually(lambda: len(done) == WARM_UP)
    assert lag(client) == 0
    assert len(client.consumer("bills", "copies").pull(3 * WARM_UP)) == 2 * WARM_UP


def test_what_is_behind_a_message_that_takes_long_is_done_by_another_worker(client: Client) -> None:
    """Also if it was taken with it: quick handlers take many messages at a time."""
    handler = Blocking()
    with Handling(client.consumer("orders", "billing"), handler, workers=2, policy="block"):
        handler.warm_up(client)
        handler.may_return.set()
        eventually(lambda: len(handler.seen) == WARM_UP + 1)
        handler.is_blocked.clear()
        handler.may_return.clear()
        bodies = [b"%d" % n for n in range(100)] + [b"slow"] + [b"%d" % n for n in range(100)]
        client.producer().send_many("orders", [dmq.Message(body) for body in bodies])
        assert handler.is_blocked.wait(PATIENCE)
        eventually(lambda: len(handler.seen) == WARM_UP + 1 + 200)
        eventually(lambda: lag(client) == 1)  # what was before it in its turn is acked too
        handler.may_return.set()
    assert lag(client) == 0


def test_a_close_waits_for_the_handler_and_gives_the_rest_back(client: Client) -> None:
    handler = Blocking()
    consumer = client.consumer("orders", "billing")
    with Handling(consumer, handler, workers=1):
        client.producer().send_many("orders", [dmq.Message(b"slow")] * 2 + [dmq.Message(b"x")] * 500)
        assert handler.is_blocked.wait(PATIENCE)
        closing = threading.Thread(target=consumer.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        handler.may_return.set()
        closing.join(PATIENCE)
        assert not closing.is_alive()
    assert lag(client) == 502 - len(handler.seen)
    left = 502 - len(handler.seen)
    with client.consumer("orders", "billing") as others:
        while left > 0 and len(again := others.pull(1000)):
            assert {message.attempt for message in again} == {1}
            left -= len(again)
    assert left == 0


def test_a_handler_that_raises_now_and_then_costs_nobody_anything(client: Client) -> None:
    calls: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        calls.append(message.body)
        number = int(message.body)
        if number % 10 == 3 and calls.count(message.body) == 1:
            raise ValueError("once")
        if number % 10 == 7:
            raise dmq.Reject("never")

    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(300)])
    with Handling(client.consumer("orders", "billing"), handle, workers=1):
        eventually(lambda: len(calls) == 330)
        eventually(lambda: lag(client) == 0)
    assert sorted({*calls}, key=int) == [b"%d" % n for n in range(300)]


def test_on_a_loop_what_is_behind_a_handler_that_waits_goes_to_another_task() -> None:
    """And a handler that never waits has its messages one after another, without a turn of the loop for each."""

    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await client.admin.create_topic("orders", queues=1)
        seen: list[bytes] = []
        blocked, may_return = asyncio.Event(), asyncio.Event()

        async def handle(message: aio.AioMessage) -> None:
            if message.body == b"slow":
                blocked.set()
                await may_return.wait()
            seen.append(message.body)

        consumer = client.consumer("orders", "billing")
        running = asyncio.create_task(consumer.run(handle, workers=2, policy="block"))
        producer = client.producer()
        await producer.send_many("orders", [dmq.Message(b"%d" % n) for n in range(500)])
        while len(seen) < 500:
            await asyncio.sleep(0.001)
        bodies = [b"%d" % n for n in range(100)] + [b"slow"] + [b"%d" % n for n in range(100)]
        await producer.send_many("orders", [dmq.Message(body) for body in bodies])
        await asyncio.wait_for(blocked.wait(), PATIENCE)
        while len(seen) < 700:
            await asyncio.sleep(0.001)
        assert b"slow" not in seen
        may_return.set()
        while len(seen) < 701:
            await asyncio.sleep(0.001)
        await consumer.close()
        await running
        assert (await client.admin.lag("orders", "billing")).total == 0

    async def main() -> None:
        async with TestBroker() as broker:
            await asyncio.wait_for(scenario(broker, await broker.aio_connect()), PATIENCE)

    asyncio.run(main())


def test_a_thread_that_reads_on_heeds_a_retry_a_pause_and_the_end(client: Client) -> None:
    seen: list[tuple[bytes, int]] = []
    consumer, producer = client.consumer("orders", "billing"), client.producer()

    def handle(message: ReceivedMessage) -> None:
        seen.append((message.body, message.attempt))
        if len(seen) == WARM_UP:
            raise ValueError("the first time")

    with Handling(consumer, handle, workers=1, policy="block"):
        for number in range(WARM_UP):
            # Nobody waits for an answer, so that the lead is lent.
            producer.send_async("orders", str(number).encode())
            eventually(lambda number=number: len(seen) > number)  # type: ignore[misc]
        eventually(lambda: len(seen) == WARM_UP + 1)
        assert seen[-1] == seen[-2]
        eventually(lambda: consumer._subscriber._reads_on)
        consumer.pause()
        producer.send("orders", b"paused")
        assert lag(client) == 1
        assert len(seen) == WARM_UP + 1
        consumer.resume()
        eventually(lambda: seen[-1] == (b"paused", 1))
        producer.send_async("orders", b"last")
        eventually(lambda: seen[-1] == (b"last", 1))
        eventually(lambda: lag(client) == 0)
    assert len(seen) == WARM_UP + 3
