"""Members that divide the queues among themselves by a strategy (R-08); `test_rebalance` has them as processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing.processes import BrokerProcess
from tests.integration.consumer.handler_thread import Handling
from tests.integration.delivery.scenes import GROUP, Scene
from tests.patience import eventually


def nothing(message: ReceivedMessage) -> None:
    pass


def test_each_member_gets_only_its_own_queues_and_knows_them(client: Client) -> None:
    scene = Scene(client, "own", queues=5)
    one, two = (scene.consumer(strategy="average") for _ in range(2))
    seen: dict[str, set[int]] = {"one": set(), "two": set()}
    with (
        Handling(one, lambda message: seen["one"].add(message.queue)),
        Handling(two, lambda message: seen["two"].add(message.queue)),
    ):
        eventually(lambda: sorted([one.queues, two.queues]) == [(0, 1, 2), (3, 4)])  # type: ignore[type-var]
        for n in range(100):
            scene.send(n, business_id=f"u-{n}", ordered=True)
        eventually(lambda: scene.lag() == 0)
        assert seen == {"one": {*(one.queues or ())}, "two": {*(two.queues or ())}}
    assert scene.consumer().queues is None


def test_what_waits_of_a_queue_that_moves_goes_to_its_new_member_as_not_tried(client: Client) -> None:
    scene = Scene(client, "moving", queues=2)
    first = scene.consumer(strategy="circle")
    with Handling(first, nothing):
        eventually(lambda: first.queues == (0, 1))
        first.pause()
        for n in range(40):
            scene.send(n, business_id=f"u-{n}", ordered=True)
        first.resume()
        eventually(lambda: scene.lag() == 0)
    idle = scene.consumer(strategy="circle", prefetch=100)
    idle._core.handlers = 20  # it asks for two messages for each of them
    for n in range(40, 80):
        scene.send(n, business_id=f"u-{n}", ordered=True)
    next(idle)
    eventually(lambda: sum(row.leased for row in client.admin.lag("moving", GROUP).queues) == 40)
    found: list[tuple[int, int]] = []
    other = scene.consumer(strategy="circle")
    with Handling(other, lambda message: found.append((message.queue, message.attempt))):
        eventually(lambda: len(other.queues or ()) == 1 and len(idle.queues or ()) == 1)
        eventually(lambda: scene.queue((other.queues or (0,))[0]).lag <= 1)
    assert {attempt for _, attempt in found} == {1}
    assert {queue for queue, _ in found} == {*(other.queues or ())}


def test_all_members_have_the_same_strategy_and_a_higher_version_changes_it(client: Client) -> None:
    scene = Scene(client, "agreed", queues=2)
    scene.send("0", "1")
    old = scene.consumer(strategy="average", auto_ack=True)
    with Handling(old, nothing) as running:
        eventually(lambda: old.queues == (0, 1))
        for other in ({"strategy": "circle"}, {}):
            with pytest.raises(dmq.SubscriptionConflict, match="strategy 'average'"):
                next(scene.consumer(**other))
        new = scene.consumer(strategy="circle", version=1)
        with Handling(new, nothing):
            eventually(lambda: new.queues == (0, 1))
            running.join()
            assert isinstance(running.error, dmq.SubscriptionSuperseded)


def test_a_failing_message_comes_again_to_the_member_that_has_its_queue(client: Client) -> None:
    scene = Scene(client, "failing", queues=2)
    attempts: list[tuple[int, int]] = []

    def handle(message: ReceivedMessage) -> None:
        attempts.append((message.queue, message.attempt))
        if message.attempt == 1:
            raise dmq.Retry("again", after=0.0)

    one, two = (scene.consumer(strategy="average") for _ in range(2))
    with Handling(one, handle), Handling(two, handle):
        eventually(lambda: len(one.queues or ()) == len(two.queues or ()) == 1)
        for n in range(10):
            scene.send(n, business_id=f"u-{n}", ordered=True)
        eventually(lambda: len(attempts) == 20)
    assert sorted(attempt for _, attempt in attempts) == [1] * 10 + [2] * 10


def test_an_asyncio_consumer_divides_too(broker: BrokerProcess, client: Client) -> None:
    scene = Scene(client, "async", queues=3)

    async def consume() -> tuple[set[int], tuple[int, ...] | None]:
        seen: set[int] = set()
        async with dmq.aio.connect(broker.url, app="test") as other:
            consumer = other.consumer("async", GROUP, strategy="consistent-hash")
            with pytest.raises(dmq.InvalidRequest, match="strategy"):
                await consumer.pull()
            async for message in consumer:
                seen.add(int(message.body))
                await message.ack()
                if len(seen) == 30:
                    return seen, consumer.queues
        raise AssertionError("it ended")

    scene.send(*range(30))
    seen, queues = asyncio.run(asyncio.wait_for(consume(), 60))
    assert (seen, queues) == ({*range(30)}, (0, 1, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "fair"}, "'average', 'circle', 'consistent-hash'"),
        ({"strategy": 7}, "strategy is"),
        ({"strategy": "average", "broadcast": True}, "broadcast"),
    ],
)
def test_what_makes_no_sense_is_refused(client: Client, options: dict[str, Any], words: str) -> None:
    with pytest.raises(dmq.InvalidSettings, match=words):
        client.consumer("orders", GROUP, **options)


def test_a_consumer_with_a_strategy_does_not_pull(client: Client) -> None:
    with pytest.raises(dmq.InvalidRequest, match=r"pull\(queue=\)"):
        client.consumer("orders", GROUP, strategy="circle").pull()
