"""Consumers of a topic that lies on three shards, and what operators see of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import dmq
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]

PLACES = {(shard, queue) for shard in (1, 2, 3) for queue in (0, 1)}
COUNT = 600


def orders(count: int = COUNT) -> list[dmq.Message]:
    """Messages for all queues of all shards."""
    return [dmq.Message(b"%04d" % n, key=f"k-{n}", business_id=f"u-{n % 50}", ordered=True) for n in range(count)]


@pytest.fixture(scope="module")
def client(cluster: ClusterProcesses) -> Iterator[dmq.Client]:
    with dmq.connect(cluster.url, app="shop", timeout=PATIENCE_S) as connected:
        connected.admin.create_topic("orders", queues=2)
        receipts = connected.producer().send_many("orders", orders())
        assert {(receipt.shard, receipt.queue) for receipt in receipts} == PLACES
        yield connected


def consumed(consumer: dmq.Consumer, count: int) -> list[Any]:
    found = []
    for message in consumer:
        found.append(message)
        message.ack()
        if len(found) == count:
            return found
    raise AssertionError("the consumer ended")


def pulled(consumer: dmq.Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, len(found)
        batch = consumer.pull(max_messages=100, wait=1.0)
        found += batch
        consumer.ack(batch)
    return found


@pytest.mark.parametrize("take", [consumed, pulled])
@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"parallel": 3}, {"prefetch": 2}], ids=str)
def test_all_messages_of_all_shards_come_once_and_are_acked_where_they_are(
    client: dmq.Client, take: Any, options: dict[str, Any]
) -> None:
    group = f"g-{take.__name__}-{'-'.join(options)}"
    with client.consumer("orders", group=group, **options) as consumer:
        found = take(consumer, COUNT)
    assert sorted(message.body for message in found) == [order.body for order in orders()]
    assert {(message.shard, message.queue) for message in found} == PLACES
    if options.get("ordered"):
        for place in PLACES:
            offsets = [message.offset for message in found if (message.shard, message.queue) == place]
            assert offsets == [*range(len(offsets))]
    eventually(lambda: client.admin.lag("orders", group).total == 0)


def test_members_divide_the_queues_of_all_shards_and_a_death_frees_them(cluster: ClusterProcesses) -> None:
    clients = [dmq.connect(cluster.url, app="shop", client_id=f"m{n}", timeout=PATIENCE_S) for n in range(3)]
    consumers = [client.consumer("orders", group="divided", strategy="average") for client in clients]
    threads = [threading.Thread(target=consumer.run, args=(lambda message: None, 1)) for consumer in consumers]
    for thread in threads:
        thread.start()
    try:
        shares = [2, 2, 2]
        eventually(lambda: sorted(len(consumer.queues or ()) for consumer in consumers) == shares)
        assert sorted(place for one in consumers for place in one.queues or ()) == sorted(
            shard << 8 | queue for shard, queue in PLACES
        )
        consumers[0].close()
        eventually(lambda: [len(consumer.queues or ()) for consumer in consumers[1:]] == [3, 3])
        eventually(lambda: clients[1].admin.lag("orders", "divided").total == 0)
    finally:
        for consumer in consumers:
            consumer.close()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()


@pytest.mark.usefixtures("client")
def test_a_broadcast_member_has_a_place_in_each_shard(cluster: ClusterProcesses) -> None:
    for _ in range(2):
        with (
            dmq.connect(cluster.url, app="shop", client_id="radio", timeout=PATIENCE_S) as client,
            client.consumer("orders", group="news", broadcast=True) as consumer,
        ):
            assert len(consumed(consumer, COUNT)) == COUNT
            consumer.seek("earliest")


def test_a_seek_moves_the_group_in_all_shards(client: dmq.Client) -> None:
    with client.consumer("orders", group="seeker") as consumer:
        consumed(consumer, COUNT)
        consumer.seek("earliest")
        assert Counter(message.shard for message in consumed(consumer, COUNT)).keys() == {1, 2, 3}


def test_operators_see_all_shards(client: dmq.Client) -> None:
    admin = client.admin
    with client.consumer("orders", group="seen") as consumer:
        messages = consumed(consumer, COUNT)
    eventually(lambda: admin.lag("orders", "seen").total == 0)
    lag = admin.lag("orders", "seen")
    assert [(row.shard, row.queue) for row in lag.queues] == sorted(PLACES)
    assert (lag.missing, sum(row.next_offset for row in lag.queues)) == ((), COUNT)
    assert "seen" in [group.name for group in admin.groups("orders")]
    assert admin.group("seen").topics == ("orders",)
    moves = admin.reset("orders", "seen", "earliest", dry_run=True)
    assert {(move.shard, move.queue) for move in moves} == PLACES
    assert admin.lag("orders", "seen").total == 0, "a dry run"
    admin.reset("orders", "seen", "earliest")
    assert admin.lag("orders", "seen").total == COUNT
    assert {row.shard for row in admin.peek("orders", limit=9)} == {1, 2, 3}
    assert {(row.shard, row.queue) for row in admin.offsets("orders")} == PLACES
    for message in messages[:3]:
        found = admin.find("orders", id=message.id)
        assert [(row.shard, row.queue, row.offset) for row in found] == [(message.shard, message.queue, message.offset)]
        assert {row.body for row in admin.find("orders", key=message.key)} == {message.body}
        assert "stored" in [step.what for step in admin.trace(message.id).steps]
        assert admin.why(message.id, "seen").groups
    with pytest.raises(dmq.UnknownMessage):
        admin.trace(dmq.MessageId(1, 1))
    with pytest.raises(dmq.UnknownGroup):
        admin.lag("orders", "nobody")


def test_delays_of_all_shards_are_listed_by_their_time_and_cancelled_where_they_are(client: dmq.Client) -> None:
    producer = client.producer()
    receipts = [producer.send("orders", b"later", delay=3600.0 + n) for n in range(12)]
    delays = client.admin.delays("orders")
    assert [delay.due_at_ms for delay in delays] == sorted(delay.due_at_ms for delay in delays)
    assert {delay.id for delay in delays} == {receipt.id for receipt in receipts}
    for receipt in receipts:
        client.admin.cancel_delay(receipt.id)
    assert client.admin.delays("orders") == []


def test_commands_name_the_shard_of_each_row(cluster: ClusterProcesses, client: dmq.Client) -> None:
    def run(*arguments: str) -> Any:
        command = [sys.executable, "-m", "dmq.cli", *arguments, "--url", cluster.url, "--format", "json"]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    with client.consumer("orders", group="shown") as consumer:
        consumed(consumer, COUNT)
    names = {"s1", "s2", "s3"}
    assert {row["shard"] for row in run("group", "lag", "shown")["queues"]} == names
    assert {row["shard"] for row in run("group", "reset", "shown", "--topic", "orders", "--to", "earliest")} == names
    assert {row["shard"] for row in run("peek", "orders", "--limit", "6")} == names


def test_a_shard_that_dies_holds_up_nobody_and_goes_on_in_order(cluster: ClusterProcesses, client: dmq.Client) -> None:
    """Its ordered messages wait for its next leader; what the others have is consumed meanwhile."""
    client.admin.create_topic("steps", queues=2)
    producer = client.producer(timeout=PATIENCE_S)
    names = [f"u-{n}" for n in range(24)]
    homes = {name: producer.send("steps", f"{name} 0".encode(), business_id=name, ordered=True).shard for name in names}
    assert {*homes.values()} == {1, 2, 3}
    dead = cluster.numbers["s2"]
    seen: dict[str, list[int]] = {name: [] for name in names}
    consumer = client.consumer("steps", group="walkers", ordered=True)

    def handle(message: dmq.ReceivedMessage) -> None:
        name, number = message.body.decode().split()
        seen[name].append(int(number))

    running = threading.Thread(target=consumer.run, args=(handle, 4))
    running.start()
    try:
        eventually(lambda: all(seen.values()))
        cluster.members["s2a"].kill()
        sent = [
            producer.send_async("steps", f"{name} {step}".encode(), business_id=name, ordered=True)
            for step in (1, 2, 3)
            for name in names
        ]
        eventually(lambda: all(seen[name][-1] == 3 for name in names if homes[name] != dead))
        assert all(seen[name][-1] == 0 for name in names if homes[name] == dead)
        eventually(lambda: client.admin.lag("steps", "walkers").missing == ("s2",))
        assert {row.shard for row in client.admin.lag("steps", "walkers").queues} == {1, 2, 3} - {dead}
        cluster.start_all()
        cluster.until_led()
        for future in sent:
            future.result(PATIENCE_S)
        eventually(lambda: all(numbers[-1] == 3 for numbers in seen.values()))
        for name, numbers in seen.items():
            firsts = [number for at, number in enumerate(numbers) if number not in numbers[:at]]
            assert firsts == [0, 1, 2, 3], (name, numbers)
        eventually(lambda: client.admin.lag("steps", "walkers").total == 0)
        assert client.admin.lag("steps", "walkers").missing == ()
    finally:
        cluster.start_all()
        consumer.close()
        running.join()


def test_a_topic_is_counted_over_all_shards(cluster: ClusterProcesses) -> None:
    with dmq.connect(cluster.url, timeout=PATIENCE_S) as client:
        client.admin.create_topic("counted", queues=2)
        with client.producer(timeout=PATIENCE_S) as producer:
            receipts = [producer.send("counted", b"%d" % n, business_id=f"u{n}", ordered=True) for n in range(30)]
        assert len({receipt.shard for receipt in receipts}) == 3
        assert client.admin.topic("counted").messages == 30
        (row,) = client.admin.topics("counted")
        assert (row.messages, row.stored, len(row.slots)) == (30, 30, 3)
        assert client.admin.topics("counted").missing == ()
