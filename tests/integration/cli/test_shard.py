"""`dmq shard` as a person uses it, against a server whose shard stands in a memory registry."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from dmq import aio
from dmq.client.client import connect
from dmq.errors import NotInCluster, ShardConflict
from dmq.protocol.cluster.route import RouteReply
from dmq.protocol.session import BrokerInfo, ShardInfo
from dmq.registry.contents import hex_id
from tests.integration.broker_thread import ServedBroker
from tests.integration.cli.test_commands import Done
from tests.integration.cli.test_commands import dmq as run
from tests.unit.shard.admin.shard_scene import A, B, ShardScene, record, reply

T = TypeVar("T")


class ServedShard(ServedBroker):
    """A broker that answers for the member a of a shard."""

    def on_loop(self, work: Callable[[], Awaitable[T]]) -> T:
        async def done() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(30)

    def arrange(self, **scene: Any) -> ShardScene:
        async def arranged() -> ShardScene:
            made = ShardScene(scene.pop("asked", "a"))
            await made.set_up(scene.pop("content", record()), **scene)
            self.server.dispatcher.shards = made.operations
            return made

        return self.on_loop(arranged)


class FaceOfStarting:
    """What a member tells clients before it has reached its registry."""

    def info(self) -> ShardInfo:
        return ShardInfo("s1")

    def brokers(self) -> list[BrokerInfo]:
        return []

    def figures(self) -> dict[str, float]:
        return {}

    async def routes(self, topics: Sequence[str]) -> RouteReply:
        return RouteReply(0, [])


@pytest.fixture(scope="module")
def served() -> Iterator[ServedShard]:
    server = ServedShard()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def dmq(served: ServedShard, *arguments: str) -> Done:
    return run("shard", *arguments, "--url", served.url)


def test_a_lone_broker_says_what_to_do(served: ServedShard) -> None:
    served.server.dispatcher.shards = None
    done = dmq(served, "list")
    assert done.code == 1
    assert "start it with --registry and --shard" in done.err
    with connect(served.url) as client, pytest.raises(NotInCluster):
        client.admin.shard()


def test_a_member_that_has_not_reached_its_registry_says_so(
    served: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.server.dispatcher, "shards", None)
    monkeypatch.setattr(served.server.dispatcher, "face", FaceOfStarting())
    done = dmq(served, "show")
    assert done.code == 3
    assert "bring the registry back" in done.err
    assert "bring the registry back" in run("doctor", "--url", served.url).out


def test_a_shard_is_listed_and_shown(served: ServedShard) -> None:
    scene = served.arrange()
    scene.said["c"] = reply("c", end=400, committed=300)
    listed = dmq(served, "list").out
    assert listed.splitlines()[0].split() == ["shard", "leader", "epoch", "members", "in", "sync", "state", "health"]
    assert listed.splitlines()[1].split()[:3] == ["s1", "a", "7"]
    shown = dmq(served, "show").out
    assert "follower" in shown
    assert "ok: a leads in epoch 7" in shown
    (from_list,) = json.loads(dmq(served, "list", "--format", "json").out)
    facts = json.loads(dmq(served, "show", "s1", "--format", "json").out)
    for one in (from_list, facts):
        for member in one["members"]:
            member.pop("clock_skew_seconds")
    assert facts == from_list
    assert (facts["shard"], facts["leader"], facts["epoch"], facts["health"]) == ("s1", "a", 7, "ok")
    rows = [(row["name"], row["role"], row["in_sync"], row["committed"], row["lag"]) for row in facts["members"]]
    assert rows == [("a", "leader", True, 900, 0), ("b", "follower", True, 900, 0), ("c", "follower", True, 300, 600)]
    assert {row["shard"] for row in facts["members"]} == {"s1"}
    unknown = dmq(served, "show", "s9")
    assert (unknown.code, unknown.err) == (1, "dmq: there is no shard 's9': those there are: s1\n")


def test_a_shard_without_a_leader_is_shown_by_any_member(served: ServedShard) -> None:
    scene = served.arrange(asked="b", leader=None, nodes="b")
    scene.said = {"b": reply("b", role="waiting", obstacle="it has promised not to", promise_ms=1500)}
    facts = json.loads(dmq(served, "show", "--format", "json").out)
    assert facts["leader"] is None
    assert [(row["name"], row["role"], row["in_sync"]) for row in facts["members"]] == [
        ("a", "down", False),
        ("b", "waiting", True),
        ("c", "down", False),
    ]
    assert "problem: there is no leader; b stands in 1.5 s" in dmq(served, "show").out


def test_settings_are_changed_and_mistakes_told(served: ServedShard) -> None:
    scene = served.arrange(nodes="ab")
    done = dmq(served, "set", "s1", "--min-in-sync", "1", "--replicas", "4", "--remove", "c")
    assert done.out.startswith("min_in_sync is 1, replicas is 4, c is not a member any more\n")
    now = served.on_loop(scene.record)
    assert (now.min_in_sync, now.replicas, [*now.members], now.revision) == (1, 4, ["a", "b"], 6)
    for arguments, code, words in (
        (["set"], 2, "there is nothing to change"),
        (["set", "--min-in-sync", "8"], 2, "from 1 to 7"),
        (["set", "--min-in-sync", "5"], 2, "min_in_sync 5 is above replicas 4"),
        (["set", "--remove", "b"], 1, "b runs: stop it first"),
        (["set", "a b", "--replicas", "4"], 2, "is not allowed"),
    ):
        mistaken = dmq(served, *arguments)
        assert mistaken.code == code
        assert words in mistaken.err


def test_a_promotion_needs_a_yes(served: ServedShard) -> None:
    lost = record(in_sync=[hex_id(A)], min_in_sync=1)
    scene = served.arrange(asked="b", content=lost, leader=None, nodes="bc")
    scene.said = {"b": reply("b", role="waiting", end=400)}
    asked = dmq(served, "promote", "b")
    assert asked.code == 1
    assert "dmq: nothing was changed: b is not in the in-sync set" in asked.err
    done = dmq(served, "promote", "b", "--accept-loss", "--format", "json")
    facts = json.loads(done.out)
    assert "The leader before was a" in facts["done"]
    now = served.on_loop(scene.record)
    assert (now.in_sync, now.unsafe) == ([hex_id(B)], 8)
    assert dmq(served, "promote", "c", "--shard", "s9", "--accept-loss").code == 1


def test_a_leader_hands_over_and_both_clients_do_the_same(served: ServedShard) -> None:
    scene = served.arrange()
    assert dmq(served, "handover", "--to", "b").out.startswith("b leads in epoch 8\n")
    assert scene.member.handed_to == ["b"]
    lagging = served.arrange()
    refused = dmq(served, "handover", "s1", "--to", "c")
    assert (refused.code, refused.err) == (1, "dmq: a leads on: no follower is within a second of the leader\n")
    assert lagging.member.handed_to == ["c"]

    async def by_asyncio() -> None:
        async with await aio.connect(served.url) as client:
            shard = await client.admin.shard()
            assert shard.in_sync == ("a", "b", "c")
            changed = await client.admin.set_shard(min_in_sync=3)
            assert changed.shard.min_in_sync == 3
            assert [one.name for one in await client.admin.shards()] == ["s1"]
            with pytest.raises(ShardConflict, match="a leads already"):
                await client.admin.promote("a", accept_loss=True)
            assert (await client.admin.hand_over(to="b")).shard.leader == "b"
            assert (await client.admin.repair()).left == ((256, 300),)

    asyncio.run(by_asyncio())


def test_a_repair_tells_what_is_left(served: ServedShard) -> None:
    served.arrange()
    done = dmq(served, "repair")
    assert (done.code, done.out) == (1, "64 to 128 is mended\n256 to 300 is left: no other member has it\n")
    facts = json.loads(dmq(served, "repair", "--format", "json").out)
    assert facts == {"member": "a", "mended": [[64, 128]], "left": [[256, 300]], "reason": "no other member has it"}
    assert dmq(served, "repair", "x").code == 1


def test_a_repair_that_takes_long_is_waited_for(served: ServedShard) -> None:
    scene = served.arrange()
    scene.operations.repair_seconds = 0.01
    scene.member.mends_after = asyncio.Event()
    served.loop.call_soon_threadsafe(served.loop.call_later, 0.2, scene.member.mends_after.set)
    with connect(served.url) as client:
        assert client.admin.repair().member == "a"
    assert scene.member.repairs == 1


def test_the_shell_completes_shards_and_members(served: ServedShard) -> None:
    served.arrange()
    for words, expected in (("dmq shard show s", ["s1"]), ("dmq shard handover --to ", ["a", "b", "c"])):
        environ = {**os.environ, "_DMQ_COMPLETE": "complete_bash", "COMP_WORDS": words, "DMQ_URL": served.url}
        environ["COMP_CWORD"] = str(len(words.split(" ")) - 1)
        command = [sys.executable, "-m", "dmq.cli"]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        assert done.stdout.split() == expected
