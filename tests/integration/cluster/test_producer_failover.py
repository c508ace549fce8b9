"""Producers while leaders of shards die: others take what may go anywhere, order waits, nothing is stored twice."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

import dmq
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster-failover")]


def consumed(client: dmq.Client, topic: str, count: int) -> list[dmq.ReceivedMessage]:
    """What a new group gets of a topic: so many messages, and what comes behind them."""
    found: list[dmq.ReceivedMessage] = []
    deadline = time.monotonic() + PATIENCE_S
    with client.consumer(topic, "check") as consumer:
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count}"
            batch = consumer.pull(max_messages=1000, wait=2)
            found += batch
            consumer.ack(batch)
        found += consumer.pull(wait=0.5)
    return found


def test_the_leader_of_a_shard_dies_under_load(pairs: ClusterProcesses, tmp_path: Path) -> None:
    names = [f"u-{number}" for number in range(10)]
    with dmq.connect(pairs.url, timeout=60) as client, client.producer(timeout=60) as producer:
        eventually(lambda: {pool.shard for pool in client._router._pools.values() if pool.current()} == {1, 2})
        spooling = client.producer(timeout=60, spool=tmp_path / "spool")
        futures: list[dmq.SendFuture] = []
        pinned: list[dmq.SendFuture] = []
        for number in range(300):
            futures.append(producer.send_async("any", b"%d" % number))
            name = names[number % 10]
            pinned.append(producer.send_async("ordered", b"%d" % number, business_id=name, ordered=True))
            spooling.send_async("spooled", b"%d" % number)
            if number == 100:
                victim = pairs.leader("s1")
                pairs.members[victim].kill()
                eventually(lambda: client._router._pools[pairs.numbers["s1"]].current() is None)
            if 100 <= number < 140:
                producer.send("any", b"lone-%d" % number)  # the shard has no leader now: another one takes it
        pairs.members[victim].start()
        receipts = [future.result(PATIENCE_S) for future in futures]
        ordered = [future.result(PATIENCE_S) for future in pinned]
        spooling.flush(PATIENCE_S)
        spooling.close()
        assert {receipt.shard for receipt in ordered} == {1, 2}
        assert len({receipt.id for receipt in receipts}) == 300
        places = {names[number % 10]: (one.shard, one.queue) for number, one in enumerate(ordered)}
        assert all(places[names[number % 10]] == (one.shard, one.queue) for number, one in enumerate(ordered))

        found = consumed(client, "any", 340)
        assert {*Counter(message.body for message in found).values()} == {1}
        assert len(found) == 340
        found = consumed(client, "ordered", 300)
        assert {*Counter(message.body for message in found).values()} == {1}
        for name in names:
            own = sorted((one.offset, int(one.body)) for one in found if one.business_id == name)
            assert [number for _, number in own] == sorted(number for _, number in own)
        found = consumed(client, "spooled", 300)
        assert sorted(int(message.body) for message in found) == [*range(300)]


def test_a_spool_is_sent_after_a_restart_to_the_shards_it_was_meant_for(
    pairs: ClusterProcesses, tmp_path: Path
) -> None:
    with dmq.connect(pairs.url, timeout=60) as client:
        client.admin.create_topic("kept", queues=2)
        producer = client.producer(timeout=60, spool=tmp_path / "spool")
        receipts = [producer.send("kept", b"%d" % number) for number in range(20)]
        assert {receipt.shard for receipt in receipts} == {1, 2}
        for name in pairs.members:
            pairs.members[name].kill()
        eventually(lambda: not client._router.is_connected)
        kept = [producer.send("kept", b"%d" % number) for number in range(20, 40)]
        assert {receipt.durability for receipt in kept} == {"spooled"}
        producer.close()
    pairs.start_all()
    pairs.until_led()
    with dmq.connect(pairs.url, timeout=60) as client, client.producer(spool=tmp_path / "spool") as producer:
        producer.flush(PATIENCE_S)
        found = consumed(client, "kept", 40)
        assert sorted(int(message.body) for message in found) == [*range(40)]
