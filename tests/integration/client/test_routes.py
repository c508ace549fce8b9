"""A client that finds a cluster: from any member or a name server to the leaders of the shards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import dmq
import dmq.aio
from dmq.client.aio.client import AioClient
from dmq.client.connection.router import NAME_SERVER
from dmq.errors import UnknownTopic, Unsupported
from dmq.model import TopicConfig
from dmq.protocol import Command, Frame, Header, decode_request
from dmq.protocol.admin import TopicDescribeReply, TopicInfo, TopicListReply
from dmq.protocol.cluster.route import Route, RouteChanged, RouteReply, ShardRoute, SlotRoute, TopicRoute
from dmq.protocol.produce import ProduceReply
from dmq.protocol.session import ShardInfo
from dmq.testing.processes import free_port
from tests.integration.client.servers import Peer
from tests.patience import eventually


class FakeCluster:
    """Shards of one or two peers each, that answer as brokers do; and what they answer to ROUTE."""

    def __init__(self, *members: int) -> None:
        self.shards = [[Peer(self._answering(number)) for _ in range(count)] for number, count in enumerate(members, 1)]
        self.epochs = [1] * len(members)
        self.leaders: list[int | None] = [0] * len(members)
        self.topics = {"orders": [SlotRoute(number, 2) for number in range(1, len(members) + 1)]}
        self.version = 1
        for peers in self.shards:
            for peer in peers:
                peer.routes = self.routes
        self.introduce()

    def lead(self, number: int, at: int | None) -> None:
        """Have a member lead a shard from now on, or nobody."""
        self.leaders[number - 1] = at
        self.epochs[number - 1] += 1
        self.introduce()

    def introduce(self) -> None:
        """Have the members say who leads."""
        for number, (peers, leader) in enumerate(zip(self.shards, self.leaders, strict=True), 1):
            for at, peer in enumerate(peers):
                where = "" if leader is None else address(peers[leader])
                peer.shard = ShardInfo(
                    f"s{number}", self.epochs[number - 1], at == leader, where, [address(one) for one in peers], number
                )

    def routes(self, asked: Route) -> RouteReply:
        """What any of them answers to ROUTE."""
        rows = []
        for number, (peers, leader) in enumerate(zip(self.shards, self.leaders, strict=True), 1):
            where = "" if leader is None else address(peers[leader])
            rows.append(
                ShardRoute(number, f"s{number}", self.epochs[number - 1], where, [address(peer) for peer in peers])
            )
        found = [TopicRoute(name, 5, self.topics[name], self.version) for name in asked.topics if name in self.topics]
        return RouteReply(77, rows, found)

    def _answering(self, number: int) -> Callable[[Peer, Frame], Header | Exception | None]:
        def answer(peer: Peer, frame: Frame) -> Header | Exception | None:
            asked = decode_request(frame)
            if frame.command == Command.TOPIC_DESCRIBE:
                if asked.topic not in self.topics:
                    return UnknownTopic(f"no topic {asked.topic}")
                return TopicDescribeReply(TopicInfo(asked.topic, TopicConfig(queues=2)))
            if frame.command == Command.TOPIC_LIST:
                return TopicListReply([])
            return ProduceReply(asked.queue, 0, 0, asked.durability, shard=number, epoch=self.epochs[number - 1])

        return answer

    def push(self, *topics: str) -> None:
        for peers in self.shards:
            for peer in peers:
                peer.push(Command.ROUTE_CHANGED, RouteChanged([*topics]))

    def close(self) -> None:
        for peers in self.shards:
            for peer in peers:
                with peer:
                    pass


def address(peer: Peer) -> str:
    return f"127.0.0.1:{peer.port}"


@contextmanager
def fake_cluster(*members: int) -> Iterator[FakeCluster]:
    made = FakeCluster(*members)
    try:
        yield made
    finally:
        made.close()


def connected(client: dmq.Client | AioClient) -> set[int]:
    return {pool.shard for pool in client._router._pools.values() if pool.current() is not None}


@pytest.mark.parametrize(("shard", "member"), [(1, 0), (2, 1), (3, 0)])
def test_any_member_of_any_shard_leads_to_all_leaders(shard: int, member: int) -> None:
    with fake_cluster(2, 2, 2) as cluster:
        with dmq.connect(cluster.shards[shard - 1][member].url) as client:
            eventually(lambda: connected(client) == {1, 2, 3})
            assert client._router.home.shard == shard
            ports = {pool.current().address.port for pool in client._router._pools.values()}  # type: ignore[union-attr]
            assert ports == {peers[0].port for peers in cluster.shards}

        async def main() -> None:
            async with dmq.aio.connect(cluster.shards[shard - 1][member].url) as aio:
                while connected(aio) != {1, 2, 3}:
                    await asyncio.sleep(0.01)
                assert aio._router.home.shard == shard

        asyncio.run(asyncio.wait_for(main(), 20))


def test_the_connection_that_found_the_routes_is_used_if_it_leads() -> None:
    with fake_cluster(1) as cluster, dmq.connect(cluster.shards[0][0].url) as client:
        assert connected(client) == {1}
        assert len(cluster.shards[0][0].sockets) == 1


def test_a_name_server_will_do() -> None:
    with fake_cluster(1, 1) as cluster, Peer() as server:
        server.name, server.routes = NAME_SERVER, cluster.routes
        with dmq.connect(server.url) as client:
            eventually(lambda: connected(client) == {1, 2})
            assert client.producer().send("orders", b"x").topic == "orders"

        async def main() -> None:
            async with dmq.aio.connect(server.url) as aio:
                assert connected(aio)

        asyncio.run(asyncio.wait_for(main(), 20))


def test_a_name_server_that_knows_no_routes_is_passed_over() -> None:
    with fake_cluster(1) as cluster, Peer() as server:
        server.name, server.routes = NAME_SERVER, lambda _: Unsupported("this is a name server")
        with dmq.connect(f"{server.url},{address(cluster.shards[0][0])}") as client:
            assert connected(client) == {1}
        with pytest.raises(dmq.Unsupported, match="name server"):
            dmq.connect(server.url)


def test_a_url_may_name_members_of_several_shards() -> None:
    with fake_cluster(1, 1) as cluster:
        url = "dmq://" + ",".join(address(peers[0]) for peers in cluster.shards)
        cluster.shards[0][0].close()
        with dmq.connect(url) as client:
            assert connected(client) == {2}
            assert client.admin.topics() == []


def test_a_shard_without_a_leader_does_not_hold_up_the_others() -> None:
    with fake_cluster(2, 1) as cluster:
        cluster.lead(1, None)
        with dmq.connect(cluster.shards[0][1].url) as client:
            assert connected(client) == {2}
            assert client.admin.topics() == [], "asked of the other shard"
            cluster.lead(1, 1)
            eventually(lambda: connected(client) == {1, 2})
        cluster.lead(1, None)
        cluster.lead(2, None)
        with pytest.raises(dmq.NotConnected, match="shard 's1' has no leader"):
            dmq.connect(cluster.shards[0][1].url)
        threading.Timer(0.2, lambda: cluster.lead(2, 0)).start()
        with dmq.connect(cluster.shards[0][1].url, timeout=30) as client:
            assert connected(client) == {2}


def test_an_advertised_address_that_nobody_reaches_is_named() -> None:
    nowhere = f"127.0.0.1:{free_port()}"

    with Peer() as server:
        server.name = NAME_SERVER
        server.routes = lambda _: RouteReply(7, [ShardRoute(1, "s1", 3, nowhere, [nowhere])])
        with pytest.raises(dmq.NotConnected, match=nowhere):
            dmq.connect(server.url)


def test_the_next_leader_is_followed_without_another_pool() -> None:
    with fake_cluster(2, 1) as cluster, dmq.connect(cluster.shards[0][0].url) as client:
        eventually(lambda: connected(client) == {1, 2})
        pool = client._router._pools[1]
        cluster.lead(1, 1)
        cluster.shards[0][0].close()
        eventually(lambda: (link := pool.current()) is not None and link.address.port == cluster.shards[0][1].port)
        assert client._router._pools[1] is pool


def test_a_push_brings_new_slots_to_those_who_watch() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.topics: set[str] = set()

        def connected(self, connection: object) -> None:
            pass

        def pushed(self, connection: object, push: object) -> None:
            pass

        def routes_changed(self, topics: frozenset[str]) -> None:
            self.topics |= topics

    with fake_cluster(1, 1) as cluster, dmq.connect(cluster.shards[0][0].url) as client:
        cluster.topics["orders"] = [SlotRoute(1, 2)]
        assert len(client._router.learn("orders", 10).slots) == 1
        watcher = Watcher()
        client._router.watch(watcher)
        cluster.topics["orders"], cluster.version = [SlotRoute(1, 2), SlotRoute(2, 2)], 2
        cluster.push("orders")
        eventually(lambda: watcher.topics == {"orders"})
        assert len(client._router.pools_of("orders")) == 2
        client._router.unwatch(watcher)


def test_a_topic_that_is_nowhere_is_not_learned() -> None:
    with fake_cluster(1) as cluster, dmq.connect(cluster.shards[0][0].url) as client, pytest.raises(UnknownTopic):
        client._router.learn("nothing", 10)


def test_after_all_members_have_moved_the_url_is_asked_again() -> None:
    with fake_cluster(1) as cluster, fake_cluster(1) as moved, Peer() as server:
        server.name, server.routes = NAME_SERVER, cluster.routes
        with dmq.connect(server.url) as client:
            assert connected(client) == {1}
            cluster.shards[0][0].close()
            cluster.shards = moved.shards
            cluster.lead(1, 0)
            pool, port = client._router.home, moved.shards[0][0].port
            eventually(lambda: (link := pool.current()) is not None and link.address.port == port)


def test_a_member_that_does_not_know_of_routes_is_followed_as_a_shard_by_itself() -> None:
    with Peer(lambda peer, frame: TopicListReply([])) as peer:
        peer.shard = ShardInfo("s1", 1, True)
        with dmq.connect(peer.url) as client:
            assert client._router.is_single
            assert client.admin.topics() == []
