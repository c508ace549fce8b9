"""Connections that break: what a client that comes back has in hand is still its own, and no attempt is counted."""

from __future__ import annotations

import threading

import pytest

from dmq.client.client import Client, connect
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing.processes import BrokerProcess
from dmq.testing.proxy import ChaosProxy
from tests.integration.delivery.scenes import GROUP, Scene
from tests.integration.frame_client import port_of
from tests.patience import eventually

CUTS = 5  # more than attempts


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
            assert not consumer.pull(5, wait=0.1)
        for message in batch:
            message.ack()
        eventually(lambda: scene.lag() == 0)
    assert not [*client.admin.dead_letters(topic=scene.topic)]
