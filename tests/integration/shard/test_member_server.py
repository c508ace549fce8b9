"""A server as the one member of a shard: what clients, operators and disks see of it."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import dmq.aio
from dmq.broker.server import BrokerServer
from dmq.client.aio.client import AioClient
from dmq.errors import InvalidName, InvalidRequest, InvalidSettings, NotAllowed, NotEnoughReplicas
from dmq.registry.memory import MemoryClient, MemoryRegistry
from dmq.settings import BrokerSettings, Settings, ShardSettings
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore
from tests.patience import PATIENCE_S, eventually_async
from tests.unit.broker.leading import on_a_loop


def settings_of(folder: Path, *, shard: dict[str, Any] | None = None, **broker: Any) -> Settings:
    ports: dict[str, Any] = {"port": 0, "metrics_port": 0, "telnet_port": None, "name": "b1", "auto_create": True}
    alone: dict[str, Any] = {
        "registry_url": "memory:",
        "name": "s1",
        "replication_port": 0,
        "replicas": 1,
        "min_in_sync": 1,
    }
    alone["promise_seconds"] = 0.5
    return Settings(
        broker=BrokerSettings(data=str(folder), **(ports | broker)), shard=ShardSettings(**(alone | (shard or {})))
    )


@contextlib.asynccontextmanager
async def member(registry: MemoryRegistry, settings: Settings) -> AsyncIterator[BrokerServer]:
    """A member that takes part."""
    server = BrokerServer(settings)

    async def open_registry(owner: str) -> MemoryClient:
        return registry.connect()

    server.open_registry = open_registry
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def page(server: BrokerServer, path: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}{path}") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    return await asyncio.to_thread(get)


async def bodies(client: AioClient, count: int) -> list[bytes]:
    """So many messages of `orders`, in any order."""
    found: list[bytes] = []
    async with client.consumer("orders", "billing") as consumer:
        while len(found) < count:
            found += [message.body for message in await consumer.pull(10, wait=PATIENCE_S)]
    return sorted(found)


@on_a_loop
async def test_one_member_is_a_shard(tmp_path: Path) -> None:
    registry = MemoryRegistry(session_seconds=2.0)
    settings = settings_of(tmp_path)
    async with member(registry, settings) as server:
        await eventually_async(lambda: server.dispatcher.broker is not None)
        async with dmq.aio.connect(f"dmq://{server.address}", app="shop") as client:
            producer = client.producer()
            receipt = await producer.send("orders", b"one", durability="replicated")
            assert receipt.durability == "replicated"
            await producer.send("orders", b"two", durability="stored")
            (me,) = await client.admin.cluster()
            assert (me.shard, me.is_leader) == ("s1", True)
            with pytest.raises(InvalidRequest, match="dmq shard handover"):
                await client.admin.drain()
            stats = await client.admin.stats()
            assert (stats["shard_leading"], stats["shard_in_sync"]) == (1, 1)
            assert (stats["shard_cuts"], stats["shard_skew"]) == (0, 0)
        assert await page(server, "/readyz") == (200, "ready\n")
        assert "dmq_shard_leading 1" in (await page(server, "/metrics"))[1]
    async with member(registry, settings) as server:  # a promise of the process before is kept first
        await eventually_async(lambda: server.dispatcher.broker is not None)
        async with dmq.aio.connect(f"dmq://{server.address}", app="shop") as client:
            assert await bodies(client, 2) == [b"one", b"two"]
    with pytest.raises(InvalidSettings, match=r"member of shard 's1'.* --registry and --shard s1"):
        MessageStore(OsFiles(tmp_path))


@on_a_loop
async def test_the_directory_of_a_broker_by_itself_seeds_a_shard(tmp_path: Path) -> None:
    lone = BrokerServer(Settings(broker=BrokerSettings(data=str(tmp_path), port=0, metrics_port=0, telnet_port=None)))
    await lone.start()
    lone.broker.store.create_topic("orders")
    async with dmq.aio.connect(f"dmq://{lone.address}") as client:
        await client.producer().send("orders", b"before")
    await lone.stop()
    async with member(MemoryRegistry(session_seconds=2.0), settings_of(tmp_path)) as server:
        await eventually_async(lambda: server.dispatcher.broker is not None)
        async with dmq.aio.connect(f"dmq://{server.address}") as client:
            await client.producer().send("orders", b"after")
            assert await bodies(client, 2) == [b"after", b"before"]


@on_a_loop
async def test_a_member_without_enough_others_says_so(tmp_path: Path) -> None:
    """It leads as soon as it may, but the start of its epoch is committed by nobody else."""
    shard = {"replicas": 3, "min_in_sync": 2}
    async with member(MemoryRegistry(session_seconds=2.0), settings_of(tmp_path, shard=shard)) as server:
        status, words = await page(server, "/readyz")
        assert (status, words != "") == (503, True)
        assert "dmq_shard_leading 0" in (await page(server, "/metrics"))[1]
        with pytest.raises(dmq.DMQError) as refused:
            async with dmq.aio.connect(f"dmq://{server.address}") as client:
                await client.producer().send("orders", b"one", timeout=0.5)
        assert not isinstance(refused.value, NotEnoughReplicas)  # nothing serves: there is nobody to say that


@on_a_loop
async def test_a_registry_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, shard={"registry_url": "dmq://127.0.0.1:1"})
    server = BrokerServer(settings)
    await server.start()
    try:
        status, words = await page(server, "/readyz")
        assert (status, words) == (503, "starting: the registry has not answered yet\n")
        assert server.member is not None
        assert not server.member.ended.done()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"shard": {"registry_url": "zk://h"}}, InvalidSettings, "names no path"),
        ({"shard": {"registry_url": "memory:"}}, InvalidSettings, "serves one process only"),
        ({"shard": {"registry_url": "http://h"}}, InvalidSettings, "names no registry"),
        ({"shard": {"name": "no name"}}, InvalidName, "shard name"),
        ({"name": "dmq"}, InvalidSettings, "give --name"),
        ({"shard": {"replication_host": "0.0.0.0"}}, NotAllowed, "--insecure"),
        ({"shard": {"address": "nowhere"}}, InvalidSettings, r"shard\.address = 'nowhere'"),
    ],
)
def test_what_can_never_be_a_member_is_refused(
    tmp_path: Path, wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    shard = {"registry_url": "dmq://127.0.0.1:1"} | wrong.pop("shard", {})
    settings = settings_of(tmp_path, shard=shard, **wrong)

    async def start() -> None:
        server = BrokerServer(settings)
        try:
            await server.start()
        finally:
            if server.port:
                await server.stop()

    with pytest.raises(error, match=words):
        asyncio.run(start())
    assert not any(tmp_path.iterdir())
