"""Priority (A-02): topics whose queues are priorities, and the dispatch channel of the consumer."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

import dmq
from dmq.client.client import Client
from dmq.testing.processes import BrokerProcess
from tests.integration.delivery.scenes import Scene
from tests.patience import eventually


@pytest.fixture
def ranked(client: Client, request: pytest.FixtureRequest) -> Scene:
    """A priority topic."""
    return Scene(client, f"p-{abs(hash(request.node.name))}", priority=True)


def test_the_queue_is_the_priority(ranked: Scene) -> None:
    assert ranked.client.admin.topic(ranked.topic).queues == 10
    for priority in range(10):
        (receipt,) = ranked.send(priority, priority=priority)
        assert receipt.queue == priority
    (receipt,) = ranked.send("default")
    assert receipt.queue == 4
    messages = ranked.pull(ranked.consumer(), 11)
    assert all(message.queue == message.priority for message in messages)


def test_the_highest_is_handed_out_first_and_every_tenth_pick_goes_round(ranked: Scene) -> None:
    """One message a pull is one pick."""
    for priority in (0, 5, 9):
        ranked.send(*range(40), priority=priority)
    consumer = ranked.consumer()
    seen: list[int] = []
    for _ in range(40):
        (message,) = consumer.pull(1, wait=20.0)
        message.ack()
        seen.append(message.priority)
    counts = Counter(seen)
    assert seen[:9] == [9] * 9
    assert counts[9] >= 36
    assert 1 <= counts[0] + counts[5] <= 4, "every tenth goes round, and 9 has its turn there too"


def test_one_message_of_each_priority_comes_from_the_highest_down(ranked: Scene) -> None:
    """A queue that was found empty is not a pick."""
    for priority in range(10):
        ranked.send(priority, priority=priority)
    consumer = ranked.consumer()
    seen: list[int] = []
    while len(seen) < 10:
        (message,) = consumer.pull(1, wait=20.0)
        message.ack()
        seen.append(message.priority)
    assert seen == [*range(9, -1, -1)]


def test_the_lowest_comes_through_though_higher_ones_never_end(ranked: Scene) -> None:
    ranked.send("low", priority=0)
    consumer = ranked.consumer()
    for n in range(200):
        ranked.send(n, priority=9)
        (message,) = consumer.pull(1, wait=20.0)
        message.ack()
        if message.priority == 0:
            return
    pytest.fail("it starved")


def test_a_delayed_message_keeps_its_priority(ranked: Scene) -> None:
    (delayed,) = ranked.send("later", priority=8, delay=0.2)
    message = next(ranked.consumer())
    assert (message.id, message.priority, message.queue) == (delayed.id, 8, 8)


def test_a_retried_message_keeps_its_priority_and_goes_before_lower_ones(ranked: Scene) -> None:
    ranked.send("failing", priority=8)
    consumer = ranked.consumer()
    (message,) = consumer.pull(1, wait=20.0)
    message.nack(delay=0.0)
    ranked.send(*range(5), priority=7)
    eventually(lambda: any(topic.messages for topic in ranked.client.admin.topics("%RETRY%", system=True)))
    found = [consumer.pull(1, wait=20.0)[0] for _ in range(6)]
    assert (found[0].body, found[0].priority, found[0].attempt) == (b"failing", 8, 2)
    assert [message.priority for message in found[1:]] == [7] * 5


def test_in_any_topic_the_highest_of_what_is_here_is_handled_first(scene: Scene) -> None:
    scene.send(*range(100, 117))
    consumer = scene.consumer()
    for _ in range(17):  # one that keeps many is given more ahead
        next(consumer)
    for n in range(15):
        scene.send(n, priority=n % 10)
    eventually(lambda: consumer._core.prefetched[0] == 15)
    rest = [next(consumer) for _ in range(15)]
    assert [int(message.body) for message in rest] == sorted(range(15), key=lambda n: (-(n % 10), n))


def test_the_command_line_makes_and_fills_them(broker: BrokerProcess, client: Client) -> None:
    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "dmq.cli", *arguments, "--url", broker.url]
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    run("topic", "create", "by-hand", "--priority")
    run("send", "by-hand", "low", "--priority", "1")
    run("send", "by-hand", "high", "--priority", "9")
    topic = client.admin.topic("by-hand")
    assert (topic.priority, topic.queues) == (True, 10)
    consumer = client.consumer("by-hand", "billing")
    assert [consumer.pull(1, wait=20.0)[0].body for _ in range(2)] == [b"high", b"low"]


def test_ordered_messages_are_in_the_queue_of_their_priority_too(ranked: Scene) -> None:
    receipts = ranked.send(*range(5), priority=6, business_id="u-7", ordered=True)
    assert [(receipt.queue, receipt.offset) for receipt in receipts] == [(6, n) for n in range(5)]


def test_priority_is_decided_when_a_topic_is_created(ranked: Scene, scene: Scene) -> None:
    admin = scene.client.admin
    with pytest.raises(dmq.InvalidSettings, match="created"):
        admin.update_topic(scene.topic, priority=True)
    with pytest.raises(dmq.InvalidSettings, match="10 queues"):
        admin.update_topic(ranked.topic, queues=12)
    assert admin.update_topic(ranked.topic, ttl=60.0).queues == 10
    assert admin.create_topic(ranked.topic, queues=4, priority=True, ttl=60.0, allow_existing=True).queues == 10


@pytest.mark.parametrize("priority", [-1, 10, 4.5, "high"])
def test_other_priorities_are_refused(scene: Scene, priority: object) -> None:
    with pytest.raises(dmq.InvalidMessage, match="priority"):
        scene.send("x", priority=priority)
