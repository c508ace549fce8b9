"""The view of a cluster, kept from a registry in memory, with a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from dmq.errors import RegistryDown
from dmq.protocol.cluster.route import ShardRoute, SlotRoute, TopicRoute
from dmq.registry.cluster_view import ClusterView, ViewChange
from dmq.registry.contents import (
    ChangeContent,
    ClusterContent,
    NodeContent,
    ShardContent,
    ShardState,
    TopicContent,
    TopicState,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.memory import MemoryClient, MemoryRegistry
from dmq.registry.metadata import Metadata
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Delete, Entry, Put
from dmq.registry.watch import Watch
from dmq.testing.clock import FakeClock
from tests.unit.shard.member_rig import LoopClock
from tests.unit.shard.member_rig import run as run_in_virtual_time

PATHS = Paths()


class Counted:
    """A registry that counts reads."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client
        self.reads: list[str] = []
        self.fails_at = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def read(self, path: str) -> Entry | None:
        self.reads.append(path)
        if path == self.fails_at:
            raise RegistryDown("it went away")
        return await self._client.read(path)

    async def children(self, path: str) -> list[Entry]:
        self.reads.append(path + "/*")
        return await self._client.children(path)


class Scene:
    """Two shards, of which the first has a leader and a follower."""

    def __init__(self, clock: Any = None) -> None:
        self.clock = clock or FakeClock()
        self.registry = MemoryRegistry(self.clock)
        self.writer = self.registry.connect(beats=False)
        self.client = self.registry.connect(beats=False)
        self.counted = Counted(self.client)
        self.view = ClusterView(self.counted, PATHS, self.clock)
        self.changes: list[ViewChange] = []
        self.view.listeners.append(self.changes.append)
        self.metadata = Metadata(self.writer, PATHS)

    async def set_up(self) -> None:
        await self.writer.write(PATHS.folders())
        await self.writer.write([Create(PATHS.cluster, encode_content(ClusterContent(id=hex_id(7))))])
        await self.node("a", "s1", 0xA, "h:1")
        await self.node("b", "s1", 0xB, "h:2")
        await self.node("c", "s2", 0xC, "h:3")
        await self.writer.write(
            [
                Create(PATHS.shard("s1"), encode_content(ShardContent(number=1, leader=hex_id(0xB), epoch=4))),
                Create(PATHS.shard("s2"), encode_content(ShardContent(number=2, leader=hex_id(0xC), epoch=2))),
            ]
        )
        await self.view.refresh()

    async def node(self, name: str, shard: str, replica: int, address: str) -> None:
        content = NodeContent(address=address, shard=shard, replica=hex_id(replica))
        await self.writer.write([Create(PATHS.node(name), encode_content(content), ephemeral=True)])

    async def put_node(self, name: str, shard: str, replica: int, address: str, **more: Any) -> None:
        content = NodeContent(address=address, shard=shard, replica=hex_id(replica), **more)
        await self.writer.write([Put(PATHS.node(name), encode_content(content), None)])

    async def topic(self, name: str, **more: Any) -> None:
        fields: dict[str, Any] = {
            "incarnation": hex_id(9),
            "slots": [("s1", 4), ("s2", 2)],
            "slots_version": 1,
            "settings": {"queues": 4},
        }
        path = PATHS.topic(name)
        value = encode_content(TopicContent(**fields | more))
        there = await self.writer.read(path)
        await self.metadata.write([Create(path, value) if there is None else Put(path, value, None)], path)

    async def shard(self, name: str, *, mention: bool = False, **more: Any) -> None:
        path = PATHS.shard(name)
        entry = await self.writer.read(path)
        assert entry is not None
        content = msgspec.structs.replace(decode_content(ShardContent, entry.value, path), **more)
        put = Put(path, encode_content(content), entry.version)
        await (self.metadata.write([put], path) if mention else self.writer.write([put]))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_routes_follow_from_records_and_brokers(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.topic("t")
        await scene.view.refresh()
        found = scene.view.reply(["t", "none", "%RESULT%t"])
        assert found.cluster == 7
        assert found.shards == [
            ShardRoute(1, "s1", 4, leader="h:2", members=["h:2", "h:1"]),
            ShardRoute(2, "s2", 2, leader="h:3", members=["h:3"]),
        ]
        slots = [SlotRoute(1, 4), SlotRoute(2, 2)]
        assert found.topics == [
            TopicRoute("t", 9, slots, 1),
            TopicRoute("%RESULT%t", 9, [SlotRoute(1, 1), SlotRoute(2, 1)], 1),
        ]

    run(main())


def test_a_slot_that_was_removed_and_a_shard_that_is_not_open_are_not_writable(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.topic("t", removed=["s2"])
        await scene.shard("s1", mention=True, state=ShardState.READ_ONLY, weight=30)
        await scene.view.refresh()
        found = scene.view.reply(["t"])
        assert [(row.is_writable, row.weight) for row in found.shards] == [(False, 30), (True, 100)]
        # Ordered messages are divided by the slots alone: those change only with their version.
        assert [row.is_writable for row in found.topics[0].slots] == [True, False]

    run(main())


def test_a_deleted_topic_has_no_route(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.topic("t", state=TopicState.DELETED)
        await scene.view.refresh()
        assert scene.view.reply(["t"]).topics == []
        assert scene.view.topics["t"].state is TopicState.DELETED

    run(main())


def test_a_leader_that_is_not_registered_is_none(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        with scene.client.watch(PATHS.nodes):
            await scene.writer.write([Delete(PATHS.node("b"), None)])
        scene.view._stale_nodes = {PATHS.node("b")}
        await scene.view.refresh()
        assert scene.view.reply([]).shards[0] == ShardRoute(1, "s1", 4, leader="", members=["h:1"])
        assert scene.changes[-1].has_shards

    run(main())


def test_a_broker_that_tells_its_load_is_read_and_nothing_else_and_nobody_is_told(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        scene.changes.clear()
        scene.counted.reads.clear()
        await scene.put_node("b", "s1", 0xB, "h:2", load={"cpu": 0.7})
        scene.view._stale_nodes = {PATHS.node("b")}
        await scene.view.refresh()
        assert scene.counted.reads == [PATHS.node("b"), PATHS.change]
        assert scene.view.nodes["b"].load == {"cpu": 0.7}
        assert scene.changes == []
        await scene.put_node("b", "s1", 0xB, "h:2", weight=50)
        scene.view._stale_nodes = {PATHS.node("b")}
        await scene.view.refresh()
        assert scene.counted.reads[2:] == [PATHS.node("b"), PATHS.change, PATHS.shard("s1")]
        assert scene.view.reply([]).shards[0].weight == 50
        assert scene.changes == [ViewChange(has_shards=True)]

    run(main())


def test_what_was_read_before_the_registry_went_away_is_told_when_it_is_back(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        scene.changes.clear()
        await scene.put_node("b", "s1", 0xB, "h:9")
        await scene.topic("t")
        await scene.topic("u")
        scene.view._stale_nodes = {PATHS.node("b")}
        scene.counted.fails_at = PATHS.topic("u")
        with pytest.raises(RegistryDown):
            await scene.view.refresh()
        assert scene.changes == []
        scene.counted.fails_at = ""
        await scene.view.refresh()
        assert scene.changes == [ViewChange(frozenset({"t", "u"}), has_shards=True)]

    run(main())


def test_shards_that_nobody_mentioned_are_read_in_turn(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        names = [f"x{number:02}" for number in range(70)]
        for number, name in enumerate(names):
            content = ShardContent(number=10 + number)
            await scene.metadata.write([Create(PATHS.shard(name), encode_content(content))], PATHS.shard(name))
        scene.view._seen = None
        await scene.view.refresh()
        for name in names:
            await scene.shard(name, epoch=9)
        for expected in (30, 62, 70):  # after those of the scene
            scene.clock.advance(30)
            scene.counted.reads.clear()
            await scene.view.refresh()
            assert len(scene.counted.reads) <= 33
            assert sum(scene.view.shards[name].epoch == 9 for name in names) == expected

    run(main())


def test_brokers_that_rewrite_their_entries_are_read_together_and_a_new_one_at_once() -> None:
    async def main() -> None:
        scene = Scene(LoopClock())
        await scene.set_up()
        keeper = asyncio.ensure_future(scene.view.keep())
        await asyncio.sleep(5)
        scene.counted.reads.clear()
        for number in range(100):
            await scene.put_node(
                "abc"[number % 3], "s1" if number % 3 < 2 else "s2", 0xA + number % 3, f"h:{number % 3 + 1}"
            )
            await asyncio.sleep(0.03)
        assert scene.counted.reads.count(PATHS.change) < 8
        assert len(scene.counted.reads) < 24
        await asyncio.sleep(1.5)
        await scene.node("d", "s2", 0xD, "h:4")
        await asyncio.sleep(0.01)
        assert "d" in scene.view.nodes
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    run_in_virtual_time(main())


def test_what_the_answering_member_knows_of_its_own_shard_counts_unless_it_is_older(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.shard("s1", mention=True, weight=50)
        await scene.view.refresh()
        newer = ShardRoute(1, "s1", 5, leader="", members=["h:1"])
        assert scene.view.reply([], newer).shards[0] == ShardRoute(1, "s1", 5, leader="", members=["h:1"], weight=50)
        older = ShardRoute(1, "s1", 3, leader="h:1", members=["h:1"])
        assert scene.view.reply([], older).shards[0].leader == "h:2"

    run(main())


def test_one_read_says_that_nothing_has_changed_and_which_topic_has(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        for number in range(3):
            await scene.topic(f"t{number}")
        await scene.view.refresh()
        scene.changes.clear()
        scene.counted.reads.clear()
        await scene.view.refresh()
        assert scene.counted.reads == [PATHS.change]
        assert scene.changes == []
        await scene.topic("t1", slots_version=2)
        scene.counted.reads.clear()
        await scene.view.refresh()
        assert scene.counted.reads == [PATHS.change, PATHS.topic("t1")]
        assert scene.changes == [ViewChange(frozenset({"t1"}))]
        assert scene.view.topics["t1"].slots_version == 2

    run(main())


def test_more_writes_than_are_mentioned_are_all_seen(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        for number in range(100):
            await scene.topic(f"t{number}")
        await scene.view.refresh()
        assert len(scene.view.topics) == 100
        entry = await scene.writer.read(PATHS.change)
        assert entry is not None
        found = decode_content(ChangeContent, entry.value, PATHS.change)
        assert (found.count, len(found.paths), found.path) == (100, 64, PATHS.topic("t99"))

    run(main())


def test_a_writer_that_mentions_nothing_makes_everything_be_read(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.topic("t")
        await scene.view.refresh()
        # As an older version, a person or an import would write it.
        await scene.writer.write([Create(PATHS.topic("u"), encode_content(TopicContent(incarnation=hex_id(1))))])
        await scene.writer.write([Put(PATHS.change, b"{}", None)])
        await scene.view.refresh()
        assert {*scene.view.topics} == {"t", "u"}

    run(main())


def test_everything_is_read_again_once_an_hour(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        value = encode_content(TopicContent(incarnation=hex_id(1)))
        await scene.writer.write([Create(PATHS.topic("silent"), value)])
        await scene.view.refresh()
        assert not scene.view.topics
        scene.clock.advance(3601)
        await scene.view.refresh()
        assert {*scene.view.topics} == {"silent"}

    run(main())


def test_records_of_shards_are_read_every_half_minute(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.shard("s2", epoch=3)
        await scene.view.refresh()
        assert scene.view.shards["s2"].epoch == 2
        scene.clock.advance(31)
        await scene.view.refresh()
        assert scene.view.shards["s2"].epoch == 3

    run(main())


def test_what_was_known_stays_known_while_the_registry_is_down(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.topic("t")
        await scene.view.refresh()
        scene.client.cut()
        with pytest.raises(RegistryDown):
            await scene.view.refresh()
        assert scene.view.is_down
        assert scene.view.reply(["t"]).topics
        scene.client.mend()
        await scene.view.refresh()
        assert not scene.view.is_down

    run(main())


def test_an_entry_that_cannot_be_read_leaves_what_was_known(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        await scene.topic("t")
        await scene.view.refresh()
        await scene.metadata.write([Put(PATHS.topic("t"), b"no JSON", None)], PATHS.topic("t"))
        await scene.view.refresh()
        assert scene.view.topics["t"].slots_version == 1

    run(main())


def test_two_writers_never_replace_each_others_mention(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        other = Metadata(scene.registry.connect(beats=False), PATHS)
        await asyncio.gather(*(one.touch(f"/x/{at}") for at in range(20) for one in (scene.metadata, other)))
        entry = await scene.writer.read(PATHS.change)
        assert entry is not None
        assert decode_content(ChangeContent, entry.value, PATHS.change).count == 40

    run(main())


class Deaf(Counted):
    """A registry whose watches are told nothing."""

    def watch(self, prefix: str) -> Watch:
        return Watch(prefix, lambda watch: None)


def test_what_a_watch_is_not_told_is_seen_within_three_seconds() -> None:
    async def main() -> None:
        clock = LoopClock()
        scene = Scene(clock)
        await scene.set_up()
        views = [ClusterView(Deaf(scene.client), PATHS, clock) for _ in range(3)]
        keepers = [asyncio.ensure_future(view.keep()) for view in views]
        await asyncio.sleep(10.7)
        await scene.topic("t")
        assert not any("t" in view.topics for view in views)
        await asyncio.sleep(3.0)
        assert all("t" in view.topics for view in views)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    run_in_virtual_time(main())


def test_a_change_is_seen_by_the_watch(scene: Scene) -> None:
    async def main() -> None:
        await scene.set_up()
        keeper = asyncio.ensure_future(scene.view.keep())
        await asyncio.sleep(0)
        await scene.topic("t")
        for _ in range(50):
            await asyncio.sleep(0)
        assert "t" in scene.view.topics
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    run(main())
