"""What the doctor says of a registry."""

from __future__ import annotations

import asyncio

from dmq.broker.diagnostics.doctor import State, diagnose_registry
from dmq.registry.contents import ClusterContent, NodeContent, ShardContent, encode_content, hex_id
from dmq.registry.paths import Paths
from dmq.registry.registry import Create
from dmq.registry.zookeeper.client import ZooKeeperClient
from dmq.registry.zookeeper.ensemble import Ensemble
from tests.zookeepers import ZooKeeperProcess


def test_a_registry_is_looked_at(zookeeper: ZooKeeperProcess) -> None:
    url = f"zk://{zookeeper.address}/doctor?session=8s"
    found = list(diagnose_registry(url))
    assert [one.state for one in found] == [State.OK, State.WARNING]
    assert "a session lives 8 s" in found[0].what
    assert "no cluster at /doctor" in found[1].what

    async def write(*operations: Create) -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/dmq"), timeout=30.0)
        await client.write(operations)
        await client.close()

    paths = Paths("/doctor")
    here = NodeContent(address=str(zookeeper.address))  # somebody listens there
    cluster = encode_content(ClusterContent(id=hex_id(1)))
    asyncio.run(write(*paths.folders(), Create(paths.cluster, cluster), Create(paths.node("a"), encode_content(here))))
    assert [(one.check, one.state) for one in diagnose_registry(url)][1:] == [("addresses", State.OK)]

    away = NodeContent(address=str(zookeeper.address), replication_address="127.0.0.1:1")
    asyncio.run(write(Create(paths.node("b"), encode_content(away)), Create(paths.node("c"), b"\xff")))
    found = list(diagnose_registry(url))[1:]
    assert [one.state for one in found] == [State.PROBLEM, State.PROBLEM]
    assert "/doctor/node/c in the registry cannot be read" in found[0].what
    assert "broker b says that it is at 127.0.0.1:1, which is not reached" in found[1].what


def test_entries_that_people_made_are_named(zookeeper: ZooKeeperProcess) -> None:
    paths = Paths("/by-hand")
    record = encode_content(ShardContent(number=1))

    async def write() -> None:
        client = await ZooKeeperClient.open(Ensemble((zookeeper.address,), "/by-hand"), timeout=30.0)
        await client.write([*paths.folders(), Create(paths.cluster, b"?"), Create("/by-hand/foreign", b"")])
        await client.write([Create(paths.shard("s1"), record), Create(paths.leader("s1"), b"mine")])
        await client.write([Create(paths.shard("s2"), b"spoiled")])
        await client.close()

    asyncio.run(write())
    found = [one for one in diagnose_registry(f"zk://{zookeeper.address}/by-hand") if one.state is State.PROBLEM]
    assert [one.what.partition(" ")[0] for one in found] == [
        "/by-hand/cluster",
        "/by-hand/shard/s1/leader",
        "/by-hand/shard/s1/leader",
        "/by-hand/shard/s2",
    ]
    assert "was not created by a broker" in found[2].what


def test_a_registry_that_cannot_be_used_is_a_problem() -> None:
    (down,) = diagnose_registry("zk://127.0.0.1:1/dmq?session=1s")
    assert (down.state, "127.0.0.1:1 is not reached" in down.what) == (State.PROBLEM, True)
    (wrong,) = diagnose_registry("zk://h")
    assert (wrong.state, wrong.advice) == (State.PROBLEM, "correct shard.registry_url")
