"""Where a client begins: at name servers, or at the brokers that ZooKeeper names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import dmq
import dmq.aio
from dmq.pipeline.decode.journal_reader import shard_servers
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import eventually
from tests.zookeepers import ZooKeeperProcess

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


async def sent_and_pulled(url: str, topic: str) -> set[bytes]:
    async with dmq.aio.connect(url, timeout=30) as client:
        await client.producer(timeout=30).send(topic, b"async")
        async with client.consumer(topic, "async") as consumer:
            found: set[bytes] = set()
            while len(found) < 2:
                batch = await asyncio.wait_for(consumer.pull(wait=30), 60)
                found |= {message.body for message in batch}
            return found


def check(url: str, shards: set[str]) -> None:
    """All kinds of clients begin at a URL, and find all shards from there."""
    with dmq.connect(url, timeout=30) as client:
        client.admin.create_topic("begun", queues=1)
        client.producer(timeout=30).send("begun", b"blocking")
        assert asyncio.run(sent_and_pulled(url, "begun")) == {b"async", b"blocking"}
        assert {*client.admin.shard_names.values()} == shards
        client.admin.delete_topic("begun")
    for command in (("shard", "list"), ("cluster", "show"), ("topic", "list")):  # of any member, and of leaders
        done = run(*command, "--url", url, "--format", "json")
        assert done.code == 0, done.err
    assert {row["shard"] for row in json.loads(run("shard", "list", "--url", url, "--format", "json").out)} == shards
    assert len(shard_servers(url, "test")) == len(shards)


def test_a_client_begins_at_a_name_server(cluster: ClusterProcesses) -> None:
    check(cluster.registry, {"s1", "s2", "s3"})


def test_a_client_begins_at_zookeeper_and_finds_brokers_that_have_moved(
    tmp_path: Path, zookeeper: ZooKeeperProcess
) -> None:
    url = f"zk://{zookeeper.address}/begin/here?session=2s"
    with pytest.raises(dmq.NotConnected, match="names no broker that runs: start one"):
        dmq.connect(url)
    with ClusterProcesses(tmp_path, shards=1, registry=url) as cluster:
        check(url, {"s1"})
        with dmq.connect(url, timeout=30) as client:
            client.admin.create_topic("moved", queues=1)
            producer = client.producer(timeout=60)
            producer.send("moved", b"1")
            cluster.members["s1a"].stop()
            cluster.move("s1a")
            producer.send("moved", b"2")
            eventually(lambda: client.admin.topic("moved").messages == 2)
