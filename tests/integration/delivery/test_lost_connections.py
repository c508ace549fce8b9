"""Connections that break: what a client that comes back has in hand is still its own, and no attempt is counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

import dmq.aio
from dmq.client.client import Client, connect
from dmq.client.consumer.message import ReceivedMessage
from dmq.errors import NotConnected, TimedOut
from dmq.testing.processes import BrokerProcess
from dmq.testing.proxy import ChaosProxy
from tests.integration.delivery.scenes import GROUP, Scene
from tests.integration.frame_client import port_of
from tests.patience import eventually

CUTS = 5  # more than attempts
_LONG = 300.0  # a lease that no test waits for


@pytest.mark.parametrize("ordered", [False, True])
def test_what_waits_for_its_handler_while_connections_break_is_not_tried(
    ordered: bool, broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, f"cut-{ordered}")
    with scene.consumer(ordered=ordered) as consumer:
        consumer.pull(1, wait=0.0)  # the group is there
    scene.send(*range(20))
    handled: list[tuple[int, int]] = []
    may_go = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        may_go.wait(60)
        handled.append((int(message.body), message.attempt))

    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, max_attempts=3, prefetch=20, ordered=ordered)
        thread = threading.Thread(target=consumer.run, args=(handle,))
        thread.start()
        for _ in range(CUTS):
            eventually(lambda: scene.queue().leased and proxy.connections)
            assert proxy.cut()
        may_go.set()
        eventually(lambda: len(handled) >= 20)
        consumer.stop()
        thread.join(30)
    assert sorted(handled) == [(number, 1) for number in range(20)]
    assert scene.lag() == 0
    assert not [*client.admin.dead_letters(topic=scene.topic)]


def test_what_was_pulled_is_not_tried_again_when_connections_break(broker: BrokerProcess, client: Client) -> None:
    scene = Scene(client, "cut-pulled")
    scene.send(*range(20))
    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, start_from="earliest", max_attempts=3)
        batch = scene.pull(consumer, 20)
        for _ in range(CUTS):
            proxy.cut()
            eventually(lambda: proxy.connections == 0)
            while True:
                try:
                    assert not consumer.pull(5, wait=0.1)
                    break
                except NotConnected:  # it takes longer to be back
                    continue
        for message in batch:
            message.ack()
        eventually(lambda: scene.lag() == 0)
    assert not [*client.admin.dead_letters(topic=scene.topic)]


def test_what_was_handed_out_in_an_answer_that_was_lost_comes_again_at_once(
    broker: BrokerProcess, client: Client
) -> None:
    """The member is back, and says that it never had it: neither an attempt nor the time of a lease is spent."""
    scene = Scene(client, "cut-answer")
    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, lease=_LONG)
        assert not consumer.pull(20, wait=0.0)
        scene.send(*range(20))
        proxy.stall(to_target=False)
        found: list[ReceivedMessage] = []
        thread = threading.Thread(target=lambda: found.extend(scene.pull(consumer, 20)))
        thread.start()
        eventually(lambda: scene.queue().leased == 20)
        proxy.cut()
        proxy.resume()
        thread.join(60)
        assert [(int(message.body), message.attempt) for message in found] == [(number, 1) for number in range(20)]


def test_what_was_acked_over_a_connection_that_broke_costs_no_attempt(broker: BrokerProcess, client: Client) -> None:
    scene = Scene(client, "cut-ack")
    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, lease=_LONG, start_from="earliest")
        scene.send(*range(20))
        batch = consumer.pull(20, wait=60.0)
        proxy.stall(to_client=False)
        for message in batch:
            message.ack()
        assert scene.lag() == 20
        proxy.cut()
        proxy.resume()
        deadline = time.monotonic() + 60
        while scene.lag():  # unless the acks were kept, and sent again
            assert time.monotonic() < deadline
            with contextlib.suppress(NotConnected):  # it is not back yet
                for message in consumer.pull(20, wait=0.1):
                    assert message.attempt == 1
                    message.ack()


def test_an_answer_that_comes_too_late_goes_back_untried(
    broker: BrokerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmq.client.consumer.consumer.ANSWER_SECONDS", 0.1)
    scene = Scene(client, "late-answer")
    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, lease=_LONG)
        assert not consumer.pull(20, wait=0.0)
        scene.send(*range(20))
        proxy.stall(to_target=False)
        with pytest.raises(TimedOut):
            consumer.pull(20, wait=0.0)
        proxy.resume()
        monkeypatch.setattr("dmq.client.consumer.consumer.ANSWER_SECONDS", 10.0)
        found = scene.pull(consumer, 20)
        assert [(int(message.body), message.attempt) for message in found] == [(number, 1) for number in range(20)]


@pytest.mark.parametrize("ordered", [False, True])
def test_the_answer_to_a_pull_that_was_cancelled_goes_back_untried(
    ordered: bool, broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, f"cancelled-{ordered}")

    async def run(url: str, proxy: ChaosProxy) -> list[tuple[int, int]]:
        async with (
            await dmq.aio.connect(url, app="shop") as mine,
            mine.consumer(scene.topic, GROUP, lease=_LONG, ordered=ordered) as consumer,
        ):
            assert not await consumer.pull(20, wait=0.0)
            await asyncio.to_thread(scene.send, *range(20))
            proxy.stall(to_target=False)
            task = asyncio.create_task(consumer.pull(20, wait=5.0))
            while not (await asyncio.to_thread(scene.queue)).leased:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            proxy.resume()
            return [(int(message.body), message.attempt) for message in await consumer.pull(20, wait=60.0)]

    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy:
        found = asyncio.run(run(proxy.url, proxy))
    assert found
    assert found == [(number, 1) for number in range(len(found))]


@pytest.mark.parametrize("ordered", [False, True])
def test_acks_of_a_part_of_a_lease_that_were_lost_are_told_again(
    ordered: bool, broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, f"cut-part-{ordered}")
    scene.send(*range(20))
    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, lease=_LONG, start_from="earliest", ordered=ordered)
        messages = [next(consumer)]
        done = scene.queue().leased // 2
        messages += [next(consumer) for _ in range(done - 1)]
        proxy.stall(to_client=False)
        for message in messages:
            message.ack()
        assert scene.lag() == 20
        proxy.cut()
        proxy.resume()
        eventually(lambda: scene.lag() == 20 - done)
        rest = []
        for _ in range(20 - done):
            message = next(consumer)
            rest.append((int(message.body), message.attempt))
            message.ack()
        assert rest == [(number, 1) for number in range(done, 20)]
        eventually(lambda: scene.lag() == 0)


def test_what_is_in_hand_of_a_pull_is_not_handed_out_again_when_connections_break(
    broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, "cut-in-hand")
    scene.send(*range(20))
    with ChaosProxy(("127.0.0.1", port_of(broker.url))) as proxy, connect(proxy.url, app="shop") as mine:
        consumer = mine.consumer(scene.topic, GROUP, lease=_LONG, start_from="earliest")
        batch = scene.pull(consumer, 20)
        assert proxy.cut()
        while True:
            try:
                assert not consumer.pull(5, wait=0.1)
                break
            except NotConnected:
                continue
        with scene.consumer() as another:
            assert not another.pull(20, wait=0.1), "it is leased"
        consumer.ack(batch)
        eventually(lambda: scene.lag() == 0)
