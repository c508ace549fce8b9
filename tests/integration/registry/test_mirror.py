"""A name server in front of ZooKeeper: it mirrors metadata into SQL, and answers ROUTE (J-07)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from dmq.clock import SystemClock
from dmq.deadletters.url import check_url
from dmq.errors import Busy, DMQError, Unsupported
from dmq.net.link import Link
from dmq.protocol.cluster.registry import RegistryRead, RegistrySession
from dmq.protocol.cluster.route import Route, RouteReply
from dmq.protocol.commands import Command
from dmq.registry.contents import (
    ClusterContent,
    ConsumerContent,
    Content,
    KeyContent,
    LimitContent,
    NodeContent,
    ShardContent,
    TopicContent,
    encode_content,
    hex_id,
)
from dmq.registry.metadata import Metadata
from dmq.registry.name_server.client import ServerAddress
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Delete, Put, Registry
from dmq.registry.url import open_registry
from tests.databases import DatabaseServers
from tests.integration.registry.name_servers import NameServerProcess, run_on_loop, sqlite_url
from tests.integration.registry.registries import eventually
from tests.zookeepers import ZooKeeperProcess

_clusters = itertools.count(1)


class Cluster:
    """A cluster in ZooKeeper, at a path of its own."""

    def __init__(self, zookeeper: ZooKeeperProcess) -> None:
        self.number = next(_clusters)
        self.paths = Paths(f"/mirror-{self.number}/dmq")
        self.url = f"zk://{zookeeper.address}{self.paths.root}"

    async def open(self) -> Registry:
        self.registry = await open_registry(self.url, "test")
        self.metadata = Metadata(self.registry, self.paths)
        paths, leader = self.paths, hex_id(2)
        await self.registry.write(paths.folders())
        await self.create(paths.cluster, ClusterContent(id=hex_id(self.number)))
        await self.create(paths.shard("s1"), ShardContent(number=1, members={"a": leader}, leader=leader, epoch=1))
        node = NodeContent(address="a:9611", shard="s1", replica=leader)
        # Not ephemeral: the session of a test on a busy machine may end.
        await self.registry.write([Create(paths.node("a"), encode_content(node))])
        return self.registry

    async def create(self, path: str, content: Content) -> None:
        await self.metadata.write([Create(path, encode_content(content))], path)

    async def add_topic(self, name: str) -> None:
        await self.create(self.paths.topic(name), TopicContent(incarnation=hex_id(7), slots=[("s1", 4)]))
        await self.create(self.paths.consumer(name, "billing"), ConsumerContent())


def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    engine = create_engine(check_url(database))
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]
    finally:
        engine.dispose()


def shows(database: str, query: str, *expected: tuple[Any, ...]) -> Callable[[], Any]:
    found: list[tuple[Any, ...]] = []

    async def look() -> bool:
        nonlocal found
        with contextlib.suppress(OperationalError):  # SQLite is locked while it recovers
            found = await asyncio.to_thread(rows, database, query)
        return found == [*expected]

    return look


@pytest.mark.parametrize(
    "kind",
    [
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.soak),
        pytest.param("mariadb", marks=pytest.mark.soak),
    ],
)
def test_metadata_of_zookeeper_is_mirrored_and_a_restart_goes_on(
    kind: str, zookeeper: ZooKeeperProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = sqlite_url(tmp_path)
    if kind != "sqlite":
        servers: DatabaseServers = request.getfixturevalue("database_servers")
        database = servers.get(kind).url

    async def main() -> None:
        cluster = Cluster(zookeeper)
        registry, paths = await cluster.open(), cluster.paths
        await cluster.add_topic("orders")
        await cluster.create(paths.limit("shop"), LimitContent(messages=5))
        topics = "SELECT topic, shard, queues, leader FROM dmq_topic_shard ORDER BY topic"
        groups = "SELECT topic, client FROM dmq_group ORDER BY topic"
        server = NameServerProcess(database, "--registry", cluster.url)
        await asyncio.to_thread(server.start)  # the loop goes on meanwhile, and with it the session
        with contextlib.ExitStack() as opened:
            opened.callback(server.kill)
            await eventually(shows(database, topics, ("orders", "s1", 4, "a")))
            # What changes is soon there, and what is gone goes.
            await cluster.add_topic("parcels")
            await registry.write([Create(paths.namespace("n"), b"")])
            await cluster.create(paths.key_value("n", "k"), KeyContent.of(b"v"))
            await eventually(shows(database, "SELECT namespace, name, text FROM dmq_key_value", ("n", "k", "v")))
            await registry.write([Delete(paths.key_value("n", "k"), None), Delete(paths.limit("shop"), None)])
            await eventually(shows(database, groups, ("orders", "billing"), ("parcels", "billing")))
            await eventually(shows(database, "SELECT * FROM dmq_key_value"))
            await eventually(shows(database, "SELECT * FROM dmq_limit"))
            assert rows(database, "SELECT * FROM dmq_node") == [], "brokers that run are not metadata"
            # What people write past us, too: nobody mentions it in /dmq/change.
            await registry.write([Put(paths.topic("parcels"), b"spoiled", None)])
            await eventually(shows(database, topics, ("orders", "s1", 4, "a")))
            await asyncio.to_thread(server.kill)
            await cluster.add_topic("returns")
            await registry.write([Delete(paths.consumer("parcels", "billing"), None)])
            await registry.write([Delete(paths.topic("parcels"), None)])
            before = await registry.read(paths.change)
            assert before is not None
            await asyncio.to_thread(server.start)
            await eventually(shows(database, groups, ("orders", "billing"), ("returns", "billing")))
            whole = "SELECT count(*) FROM dmq_mirror_source WHERE cluster = '%s' AND \"change\" = %d"
            query = whole % (hex_id(cluster.number), before.version)
            await eventually(shows(database, query.replace('"', "`") if kind == "mariadb" else query, (1,)))
            assert await registry.read(paths.change) == before, "nothing is written back"
            await check_served(server.address, cluster)
            assert await asyncio.to_thread(server.stop) == 0
        await registry.close()

    run_on_loop(main())


async def check_served(address: ServerAddress, cluster: Cluster) -> None:
    link = await Link.open(address, "app", clock=SystemClock(), peer="name server", on_push=lambda _: None)

    async def has_route() -> bool:
        try:
            reply: RouteReply = await link.request(Command.ROUTE, Route(["orders"]))
        except Busy:
            return False
        return [shard.leader for shard in reply.shards] == ["a:9611"] and len(reply.topics) == 1

    await eventually(has_route)
    found = await link.request(Command.REGISTRY_READ, RegistryRead(cluster.paths.cluster))
    assert found.found is not None
    with pytest.raises(Unsupported, match="REGISTRY_SESSION"):
        await link.request(Command.REGISTRY_SESSION, RegistrySession("b1"))
    link.close(DMQError("done"))


def test_a_mirror_is_no_registry_and_mirrors_one_cluster(zookeeper: ZooKeeperProcess, tmp_path: Path) -> None:
    async def main() -> None:
        one, other = Cluster(zookeeper), Cluster(zookeeper)
        clients = [await one.open(), await other.open()]
        database, taken = sqlite_url(tmp_path / "mirror"), sqlite_url(tmp_path / "registry")
        with NameServerProcess(database, "--registry", one.url):
            pass
        with pytest.raises(DMQError, match="mirrors the cluster"):
            NameServerProcess(database, "--registry", other.url).start()
        with pytest.raises(DMQError, match="holds a mirror of a registry"):
            NameServerProcess(database).start()
        with NameServerProcess(taken):
            pass
        with pytest.raises(DMQError, match="holds the registry itself"):
            NameServerProcess(taken, "--registry", one.url).start()
        nowhere = one.url.replace("/dmq", "/none")
        with pytest.raises(DMQError, match="has no cluster to mirror"):
            NameServerProcess(sqlite_url(tmp_path / "none"), "--registry", nowhere).start()
        for client in clients:
            await client.close()

    run_on_loop(main())
