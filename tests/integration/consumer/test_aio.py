"""Consuming on an event loop: the same promises as in tests/integration/consumer/test_consumer.py, with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import dmq
from dmq import aio
from dmq.testing import TestBroker
from tests.patience import PATIENCE_S, eventually, eventually_async


def in_loop(scenario: Callable[[TestBroker, aio.AioClient], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario against a fresh broker."""

    async def run(broker: TestBroker) -> None:
        async with asyncio.timeout(PATIENCE_S), aio.connect(broker.url, app="test") as client:
            await client.admin.create_topic("orders", queues=1)
            await scenario(broker, client)

    with TestBroker() as broker:
        asyncio.run(run(broker))


async def send(client: aio.AioClient, *bodies: str) -> None:
    producer = client.producer()
    for body in bodies:
        await producer.send("orders", body)


async def lag(client: aio.AioClient) -> int:
    return (await client.admin.lag("orders", "billing")).total


def test_iterating_and_acking() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, "a", "b", "c")
        consumer = client.consumer("orders", "billing")
        seen = []
        async for message in consumer:
            seen.append(message.body)
            await message.ack()
            if len(seen) == 3:
                await consumer.close()
        assert seen == [b"a", b"b", b"c"]
        assert await lag(client) == 0

    in_loop(scenario)


def test_pulling_acking_and_extending() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        consumer = client.consumer("orders", "billing")
        assert len(await consumer.pull(wait=0.0)) == 0
        await send(client, "a", "b")
        batch = await consumer.pull()
        assert [message.body for message in batch] == [b"a", b"b"]
        await batch[0].extend(100.0)
        broker.clock.advance(60)
        assert len(await consumer.pull(wait=0.0)) == 0
        await consumer.ack(batch)
        assert await lag(client) == 0
        await send(client, "c")
        (message,) = await consumer.pull()
        broker.clock.advance(60)
        assert [m.attempt for m in await consumer.pull()] == [2]
        with pytest.raises(dmq.LeaseLost):
            await message.extend(1.0)

    in_loop(scenario)


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize("policy", ["caller-runs", "block", dmq.RateLimit(1000)])
def test_running_a_handler(kind: str, policy: str | dmq.RateLimit) -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, *map(str, range(20)), "bug")
        consumer = client.consumer("orders", "billing")
        seen: list[tuple[bytes, int]] = []

        def handle(message: aio.AioMessage) -> None:
            seen.append((message.body, message.attempt))
            if message.body == b"bug" and message.attempt == 1:
                raise ValueError("a bug")

        async def handle_async(message: aio.AioMessage) -> None:
            await asyncio.sleep(0)
            handle(message)

        running = asyncio.create_task(
            consumer.run(handle if kind == "plain" else handle_async, workers=4, policy=policy)
        )
        await eventually_async(lambda: len(seen) == 23)
        await consumer.close()
        await running
        assert sorted(seen) == sorted([*((b"%d" % n, 1) for n in range(20)), *2 * [(b"bug", 1)], (b"bug", 2)])
        assert await lag(client) == 0

    in_loop(scenario)


class Unusual(BaseException):
    """An error that is no Exception, as some libraries have."""


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("async", asyncio.CancelledError()),  # as of something it waited for
        ("async", Unusual()),
        ("plain", asyncio.CancelledError()),
        ("plain", Unusual()),
        ("plain", SystemExit(3)),
        ("plain", StopIteration()),
    ],
    ids=repr,
)
def test_no_error_of_a_handler_ends_a_worker(kind: str, error: BaseException) -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, "bug", *map(str, range(5)))
        consumer = client.consumer("orders", "billing")
        seen: list[tuple[bytes, int]] = []

        def handle(message: aio.AioMessage) -> None:
            seen.append((message.body, message.attempt))
            if message.body == b"bug" and message.attempt == 1:
                raise error

        async def handle_async(message: aio.AioMessage) -> None:
            handle(message)

        running = asyncio.create_task(consumer.run(handle if kind == "plain" else handle_async, workers=2))
        await eventually_async(lambda: (b"bug", 2) in seen or running.done())
        assert not running.done()
        assert {body for body, _ in seen} == {b"bug", *(b"%d" % n for n in range(5))}
        await consumer.close()
        await running

    in_loop(scenario)


def test_a_run_whose_task_is_cancelled_by_its_handler_says_so() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, "a")

        async def handle(message: aio.AioMessage) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        with pytest.raises(dmq.DMQError, match="a task that runs handlers was cancelled"):
            await client.consumer("orders", "billing").run(handle)

    in_loop(scenario)


def test_an_ordered_group_keeps_its_order_when_a_handler_fails() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(12)])
        consumer = client.consumer("orders", "billing", ordered=True)
        done: list[int] = []
        failures = 0

        async def handle(message: aio.AioMessage) -> None:
            nonlocal failures
            if message.body == b"5" and failures < 3:
                failures += 1
                raise ValueError("not yet")
            done.append(int(message.body))

        running = asyncio.create_task(consumer.run(handle))
        await eventually_async(lambda: len(done) == 12)
        await consumer.close()
        await running
        assert done == list(range(12))

    in_loop(scenario)


def test_a_run_that_is_cancelled_gives_back_what_it_had() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, "a")
        consumer = client.consumer("orders", "billing")
        begun = asyncio.Event()

        async def handle(message: aio.AioMessage) -> None:
            begun.set()
            await asyncio.sleep(PATIENCE_S)

        running = asyncio.create_task(consumer.run(handle))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await consumer.close()
        assert [m.attempt for m in await client.consumer("orders", "billing").pull()] == [1]

    in_loop(scenario)


def test_a_pull_that_is_cancelled_in_the_turn_of_its_answer_gives_the_messages_back() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        consumer = client.consumer("orders", "billing")
        pulling = asyncio.create_task(consumer.pull(wait=PATIENCE_S))
        with dmq.connect(broker.url, app="beside") as beside:  # which keeps our loop from turning
            await eventually_async(lambda: any(group.members for group in beside.admin.groups()))
            beside.producer().send("orders", b"a")
            eventually(lambda: beside.admin.lag("orders", "billing").queues[0].leased == 1)
        await asyncio.sleep(0)  # the answer is read in the next turn, after this task
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert [(m.body, m.attempt) for m in await consumer.pull(wait=PATIENCE_S)] == [(b"a", 1)]

    in_loop(scenario)


def test_pause_resume_and_seek() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, "a")
        consumer = client.consumer("orders", "billing")
        await (await anext(consumer)).ack()
        await consumer.pause()
        await send(client, "b")
        waiting = asyncio.create_task(anext(consumer))
        await client.admin.topics()
        assert not waiting.done()
        await consumer.resume()
        assert (await waiting).body == b"b"
        await consumer.seek("earliest")
        assert [(await anext(consumer)).body for _ in range(2)] == [b"a", b"b"]

    in_loop(scenario)


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_consuming_goes_on_over_a_restart_of_the_broker(how: str) -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(200)])
        consumer = client.consumer("orders", "billing", prefetch=50)
        seen: list[bytes] = []

        async def handle(message: aio.AioMessage) -> None:
            seen.append(message.body)
            await asyncio.sleep(0.001)

        running = asyncio.create_task(consumer.run(handle, workers=4))
        await eventually_async(lambda: len(seen) > 30)
        if how == "kill":
            await asyncio.to_thread(broker.kill)
            broker.start()
        else:
            await asyncio.to_thread(broker.restart)
        await eventually_async(lambda: len(seen) == 200)
        await consumer.close()
        await running
        assert len(set(seen)) == 200

    in_loop(scenario)


def test_a_subscription_that_is_refused_raises() -> None:
    async def scenario(broker: TestBroker, client: aio.AioClient) -> None:
        await send(client, "a")
        first = client.consumer("orders", "billing", tags="x")
        assert len(await first.pull(wait=0.0)) == 0
        with pytest.raises(dmq.SubscriptionConflict):
            await anext(client.consumer("orders", "billing", tags="y"))
        with pytest.raises(dmq.SubscriptionConflict):
            await client.consumer("orders", "billing", tags="y").run(lambda message: None)

    in_loop(scenario)
