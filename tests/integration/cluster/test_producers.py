"""Producers over three shards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import pytest

import dmq
import dmq.aio
from dmq.model import place_of
from dmq.records import business_hash
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def client(cluster: ClusterProcesses) -> Iterator[dmq.Client]:
    with dmq.connect(cluster.url, timeout=30) as connected:
        yield connected


def test_lone_sends_go_to_all_shards_in_their_own_threads(client: dmq.Client) -> None:
    client.admin.create_topic("lone", queues=2)
    with client.producer(timeout=30) as producer:
        receipts = [producer.send("lone", b"%d" % number) for number in range(120)]
        assert producer.straight.taken > 100
    shares = Counter(receipt.shard for receipt in receipts)
    assert {*shares} == {1, 2, 3}
    assert min(shares.values()) >= 36, shares
    assert {receipt.queue for receipt in receipts} == {0, 1}
    assert len({(one.shard, one.queue, one.offset) for one in receipts}) == 120
    assert len({receipt.id for receipt in receipts}) == 120


def test_many_and_asynchronous_sends_go_to_all_shards(client: dmq.Client) -> None:
    client.admin.create_topic("many", queues=2)
    with client.producer(timeout=30) as producer:
        receipts = [*producer.send_many("many", [dmq.Message(b"%d" % number) for number in range(20_000)])]
        futures = [producer.send_async("many", b"%d" % number) for number in range(5000)]
        receipts += [future.result(30) for future in futures]
    assert {receipt.shard for receipt in receipts} == {1, 2, 3}
    assert len({(one.shard, one.queue, one.offset) for one in receipts}) == 25_000


def test_a_topic_whose_only_shard_is_read_only_refuses_at_once_and_says_so(client: dmq.Client) -> None:
    client.admin.create_topic("closed", queues=1)
    for shard in ("s1", "s2"):
        client.admin.place_topic("closed", remove=shard)
    with client.producer(timeout=30) as producer:
        producer.send("closed", b"x")
        client.admin.set_shard("s3", state="read-only")
        try:
            eventually(lambda: refusal(producer) == "ShardConflict")
            with pytest.raises(dmq.ShardConflict, match=r"shard '?s3'? is read-only .*dmq shard set s3 --state open"):
                producer.send_async("closed", b"x").result(30)
        finally:
            client.admin.set_shard("s3", state="open")
        eventually(lambda: refusal(producer) == "")


def refusal(producer: dmq.Producer) -> str:
    try:
        producer.send("closed", b"x")
    except dmq.DMQError as error:
        return type(error).__name__
    return ""


def test_ordered_messages_are_divided_over_all_places(client: dmq.Client) -> None:
    client.admin.create_topic("ordered", queues=2)
    places = [place_of(queue, shard) for shard in (1, 2, 3) for queue in (0, 1)]
    with client.producer(timeout=30) as producer:
        for name in (f"u-{number}" for number in range(60)):
            receipt = producer.send("ordered", b"x", business_id=name, ordered=True)
            assert place_of(receipt.queue, receipt.shard) == places[business_hash(name) % 6]
        messages = [dmq.Message(b"x", business_id=f"u-{number}", ordered=True) for number in range(60)]
        for message, receipt in zip(messages, producer.send_many("ordered", messages), strict=True):
            assert place_of(receipt.queue, receipt.shard) == places[business_hash(message.business_id or "") % 6]


def test_a_priority_is_a_queue_of_any_shard(client: dmq.Client) -> None:
    client.admin.create_topic("urgent", priority=True)
    eventually(lambda: client._router.is_whole)
    eventually(lambda: not client._router.health.avoided((1, 2, 3), time.monotonic()))  # as one that refused is a while
    with client.producer(timeout=30) as producer:
        receipts = [producer.send("urgent", b"x", priority=7) for _ in range(30)]
        receipts += [*producer.send_many("urgent", [dmq.Message(b"x", priority=7)] * 30)]
    assert {receipt.queue for receipt in receipts} == {7}
    assert {receipt.shard for receipt in receipts} == {1, 2, 3}


def test_an_asyncio_producer_does_the_same(cluster: ClusterProcesses) -> None:
    async def main() -> None:
        async with dmq.aio.connect(cluster.url, timeout=30) as client:
            await client.admin.create_topic("loop", queues=2)
            producer = client.producer(timeout=30)
            receipts = [await producer.send("loop", b"%d" % number) for number in range(60)]
            assert producer.straight.taken > 50
            receipts += [*await producer.send_many("loop", [dmq.Message(b"x")] * 9000)]
            futures = [await producer.send_async("loop", b"x") for _ in range(1000)]
            receipts += [await future for future in futures]
            assert {receipt.shard for receipt in receipts} == {1, 2, 3}
            assert len({(one.shard, one.queue, one.offset) for one in receipts}) == len(receipts)
            pinned = [await producer.send("loop", b"x", business_id="u", ordered=True) for _ in range(5)]
            assert len({(one.shard, one.queue) for one in pinned}) == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_all_messages_of_a_transaction_are_in_one_shard(client: dmq.Client) -> None:
    client.admin.create_topic("money", queues=2)
    client.admin.create_topic("mail", queues=1)
    with client.producer(timeout=30, group="bank", check=lambda message: "commit") as producer:
        for number in range(6):
            with producer.transaction("money", b"%d" % number) as transaction:
                transaction.send("mail", b"%d" % number)
                transaction.send("money", b"%d again" % number)
    seen: dict[bytes, set[int]] = {}
    for topic, count in (("money", 12), ("mail", 6)):
        with client.consumer(topic, "audit") as consumer:
            for _ in range(count):
                message = next(consumer)
                seen.setdefault(message.body[:1], set()).add(message.shard)
                message.ack()
    assert all(len(shards) == 1 for shards in seen.values()), seen
    assert len({*map(min, seen.values())}) > 1


def test_a_consumed_send_waits_for_the_group_at_its_shard(client: dmq.Client) -> None:
    client.admin.create_topic("asked", queues=1)
    with client.producer(timeout=30) as producer, client.consumer("asked", "answering") as consumer:
        sent = [
            producer.send_async("asked", b"%d" % n, durability="consumed", consumed_by="answering") for n in range(6)
        ]
        for _ in range(6):
            next(consumer).ack()
        assert {future.result(30).durability for future in sent} == {"consumed"}
