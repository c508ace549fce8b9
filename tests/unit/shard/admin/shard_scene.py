"""A shard in a memory registry, with members that say what a test wants."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from dmq.clock import SystemClock
from dmq.errors import NotConnected, NotEnoughReplicas
from dmq.protocol.cluster.member import MemberState
from dmq.protocol.cluster.replication import Standing, StandingReply
from dmq.registry.contents import (
    ClusterContent,
    LeaderContent,
    NodeContent,
    ShardContent,
    decode_content,
    encode_content,
    hex_id,
)
from dmq.registry.memory import MemoryRegistry
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Delete, Put
from dmq.shard.admin.operations import Operations
from dmq.shard.record.shard_view import ShardView
from dmq.shard.repair.mender import Mended
from dmq.shard.report import MemberReport, Role

CLUSTER = "00000000000000c1"
PATHS = Paths()
A, B, C = 0xA, 0xB, 0xC
IDS = {"a": A, "b": B, "c": C}


def record(**more: Any) -> ShardContent:
    """The record of a shard of three, whose leader of epoch 7 is a."""
    fields: dict[str, Any] = {
        "number": 1,
        "revision": 5,
        "members": {name: hex_id(replica) for name, replica in IDS.items()},
        "lives": {hex_id(replica): 1 for replica in IDS.values()},
        "leader": hex_id(A),
        "epoch": 7,
        "in_sync": [hex_id(replica) for replica in IDS.values()],
    }
    return ShardContent(**fields | more)


def reply(name: str, **more: Any) -> StandingReply:
    fields: dict[str, Any] = {
        "replica": IDS[name],
        "last_epoch": 7,
        "end": 1000,
        "now_ms": 0,
        "role": "leading" if name == "a" else "following",
        "committed": 900,
        "revision": 5,
        "right": "session" if name == "a" else "",
    }
    return StandingReply(**fields | more)


def now(said: StandingReply) -> StandingReply:
    """By a clock that is right."""
    return msgspec.structs.replace(said, now_ms=SystemClock().now_ms())


class SceneMember:
    """The member of this process."""

    def __init__(self, scene: ShardScene) -> None:
        self._scene = scene
        self.view = ShardView(scene.client, "s1")
        self.told = MemberReport(broker=scene.asked, shard="s1", role=Role.FOLLOWING)
        self.handed_to: list[str | None] = []
        self.takes_over = "b"
        self.mends_after: asyncio.Event | None = None
        self.repairs = 0

    def report(self) -> MemberReport:
        return self.told

    def standing(self, asked: Standing) -> StandingReply:
        return now(self._scene.said[self._scene.asked])

    async def hand_over(self, to: str | None = None) -> str:
        self.handed_to.append(to)
        if to == "c":
            raise NotEnoughReplicas("no follower is within a second of the leader")
        await self._scene.elect(to or self.takes_over)
        return to or self.takes_over

    async def state(self) -> MemberState:
        raise NotConnected("nobody asks in this scene")

    async def mend(self) -> Mended:
        self.repairs += 1
        if self.mends_after is not None:
            await self.mends_after.wait()
        return Mended([(64, 128)], [(256, 300)], "no other member has it")


class ShardScene:
    """A registry with the shard s1, and what can be asked of the member that is `asked`.

    Attributes:
        said: what members answer; who is not in it does not answer.
        client: the registry's client of the member that is asked.
    """

    def __init__(self, asked: str = "a") -> None:
        self.asked = asked
        self.registry = MemoryRegistry(session_seconds=3600)
        self.client = self.registry.connect(beats=False)
        self.others = self.registry.connect(beats=False)
        self.said = {name: reply(name) for name in IDS}
        self.member = SceneMember(self)
        self.operations = Operations(self.member, self, SystemClock(), asked)  # type: ignore[arg-type]
        self.operations.election_seconds = 0.05
        self.asked_at: list[tuple[str, Standing]] = []

    async def set_up(self, content: ShardContent, *, leader: str | None = "a", nodes: str = "abc") -> None:
        await self.others.write(
            [
                *(Create(path, b"") for path in (PATHS.root, PATHS.nodes, PATHS.shards)),
                Create(PATHS.cluster, encode_content(ClusterContent(id=CLUSTER))),
                Create(PATHS.shard("s1"), encode_content(content)),
                *(Create(PATHS.node(name), encode_content(node(name)), ephemeral=True) for name in nodes),
            ]
        )
        if leader is not None:
            held = LeaderContent(replica=hex_id(IDS[leader]), epoch=content.epoch)
            await self.others.write([Create(PATHS.leader("s1"), encode_content(held), ephemeral=True)])

    async def standing(self, address: str, asked: Standing, seconds: float) -> StandingReply:
        """As of `Peers`."""
        self.asked_at.append((address, asked))
        name = address.partition(":")[0]
        if name not in self.said:
            raise NotConnected(f"{address} does not answer")
        return now(self.said[name])

    async def record(self) -> ShardContent:
        entry = await self.others.read(PATHS.shard("s1"))
        assert entry is not None
        return decode_content(ShardContent, entry.value, entry.path)

    async def put(self, content: ShardContent) -> None:
        await self.others.write([Put(PATHS.shard("s1"), encode_content(content), None)])

    async def elect(self, name: str) -> None:
        """Let another member lead, as an election does."""
        before = await self.record()
        revision, epoch = before.revision + 1, before.epoch + 1
        won = msgspec.structs.replace(before, revision=revision, epoch=epoch, leader=hex_id(IDS[name]))
        path = PATHS.leader("s1")
        if await self.others.read(path) is not None:
            await self.others.write([Delete(path, None)])
        held = LeaderContent(replica=hex_id(IDS[name]), epoch=won.epoch)
        await self.others.write(
            [Create(path, encode_content(held), ephemeral=True), Put(PATHS.shard("s1"), encode_content(won), None)]
        )
        self.said[name] = reply(name, role="leading", right="session", last_epoch=won.epoch, revision=won.revision)


def node(name: str, **more: Any) -> NodeContent:
    fields: dict[str, Any] = {
        "address": f"{name}:9611",
        "replication_address": f"{name}:9613",
        "shard": "s1",
        "replica": hex_id(IDS[name]),
        "version": "0.1.0",
    }
    return NodeContent(**fields | more)
