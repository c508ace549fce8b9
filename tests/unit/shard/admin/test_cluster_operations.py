"""A cluster as a whole: what is wrong with it, its registry taken out, lost, and put back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from dmq.client.admin.cluster import document_of, entries_of
from dmq.errors import InvalidSettings, ShardConflict
from dmq.protocol.cluster.shard import Severity
from dmq.registry.contents import (
    CLUSTER_FORMAT,
    ClusterContent,
    NodeContent,
    ShardContent,
    ShardsContent,
    decode_content,
    encode_content,
)
from dmq.registry.memory import MemoryRegistry
from dmq.registry.paths import Paths
from dmq.registry.registry import Create, Delete, Put
from dmq.shard.admin.cluster_operations import ClusterOperations
from dmq.shard.admin.cluster_overview import ClusterOverview, ClusterSighting
from dmq.shard.admin.operations import Operations
from dmq.shard.admin.overview import Sighting, overview_of
from dmq.shard.admin.visitor import Visitor
from dmq.shard.member import MemberSettings, Role
from tests.unit.shard.admin.shard_scene import CLUSTER, IDS, node, record, reply
from tests.unit.shard.member_rig import DirectPeers, Machine, Shard, in_shard

PATHS = Paths()


def cluster_of(machine: Machine) -> ClusterOperations:
    shard = machine.shard
    return ClusterOperations(
        Operations(machine.member, DirectPeers(shard.net, machine.address), shard.clock, machine.name)
    )


def visitor(shard: Shard, registry: MemoryRegistry | None = None) -> ClusterOperations:
    client = (registry or shard.registry).connect(beats=False)
    return ClusterOperations(Operations(Visitor(client, PATHS), DirectPeers(shard.net, "-"), shard.clock, "me"))


def record_in(registry: MemoryRegistry) -> ShardContent:
    entry = registry.read(PATHS.shard("s"))
    assert entry is not None
    return decode_content(ShardContent, entry.value, entry.path)


# --- what is wrong ----------------------------------------------------------------------------------------------------


def seen(**more: Any) -> ClusterSighting:
    nodes = {name: node(name, format=CLUSTER_FORMAT) for name in IDS}
    shard = overview_of(
        Sighting(
            name="s1", record=record(), version=1, leader=None, nodes=nodes, said={name: reply(name) for name in IDS}
        )
    )
    fields: dict[str, Any] = {
        "cluster": ClusterContent(id=CLUSTER, format=CLUSTER_FORMAT),
        "shards": [shard],
        "nodes": nodes,
        "session_seconds": 6.0,
        "topics": 3,
    }
    return ClusterSighting(**fields | more)


def test_a_sound_cluster_has_nothing_to_tell() -> None:
    view = ClusterOverview(seen())
    assert view.findings == []
    header = view.header("zk://h/dmq")
    assert (header.cluster, header.topics, header.session_ms, header.registry) == (CLUSTER, 3, 6000, "zk://h/dmq")
    assert [one.name for one in header.nodes] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"own_obstacle": "it is full"}, "the member that was asked cannot join: it is full"),
        ({"troubles": [("one of three servers is down", "start it")]}, "one of three servers is down"),
        ({"shards": []}, "the registry has no record of shard s1, and a, b, c are members of it"),
        ({"shards": [], "nodes": {}}, "the cluster has no shards"),
        ({"session_seconds": 1.0}, "a session with the registry lives 1 s"),
        ({"nodes": {"a": node("a"), "b": node("b", version="9")}}, "brokers run different versions: 0.1.0 (a); 9 (b)"),
        ({"cluster": ClusterContent(id=CLUSTER, format=99)}, "the cluster has format 99"),
    ],
)
def test_what_a_person_should_know_of_a_cluster(more: dict[str, Any], what: str) -> None:
    found = [finding for finding in ClusterOverview(seen(**more)).findings if finding.severity is not Severity.OK]
    assert found
    assert what in found[0].what


def test_an_epoch_that_began_with_loss_is_told_until_the_next_one() -> None:
    shard = seen().shards[0]
    unsafe = msgspec.structs.replace(shard, record=record(unsafe=7))
    assert "with loss" in ClusterOverview(seen(shards=[unsafe])).findings[0].what
    past = msgspec.structs.replace(shard, record=record(unsafe=6))
    assert ClusterOverview(seen(shards=[past])).findings == []


def test_a_format_that_everybody_knows_can_be_raised() -> None:
    (found,) = ClusterOverview(seen(cluster=ClusterContent(id=CLUSTER, format=1))).findings
    assert (found.severity, found.advice.split(" raises")[0]) == (Severity.OK, "dmq cluster finalize")


# --- the format -------------------------------------------------------------------------------------------------------


def test_the_format_is_raised_when_every_member_knows_it() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        client = shard.registry.connect()
        entry = shard.registry.read(PATHS.cluster)
        assert entry is not None
        old = msgspec.structs.replace(decode_content(ClusterContent, entry.value, entry.path), format=1)
        await client.write([Put(PATHS.cluster, encode_content(old), None)])
        one = shard.followers[0]
        await one.stop()
        with pytest.raises(ShardConflict, match=f"{one.name} of shard s does not run"):
            await cluster_of(leader).finalize(by="me")
        elder = encode_content(NodeContent(address="x:1", shard="s", format=1))
        await client.write([Create(PATHS.node(one.name), elder, ephemeral=True)])
        assert await cluster_of(leader).finalize(by="me") == (
            1,
            f"the cluster has format 1 already; {one.name} know no newer one",
        )
        await client.write([Delete(PATHS.node(one.name), None)])
        one.start()
        await shard.until(lambda: one.role is Role.FOLLOWING)
        await asyncio.sleep(1)
        number, done = await visitor(shard).finalize(by="me")
        assert number == CLUSTER_FORMAT
        assert done.startswith(f"the cluster has format {CLUSTER_FORMAT}, before 1")
        assert (await visitor(shard).finalize(by="me"))[1] == f"the cluster has format {CLUSTER_FORMAT} already"

    in_shard(test)


# --- out and in -------------------------------------------------------------------------------------------------------


async def all_of(operations: ClusterOperations) -> dict[str, Any]:
    rows, after = await operations.export()
    assert not after
    return document_of(rows)


def test_a_registry_comes_back_from_an_export_and_nothing_gets_older() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        client = shard.registry.connect()
        await client.write(
            [
                Create(PATHS.topic("t"), b'{"incarnation": "0000000000000001"}'),
                Create(PATHS.consumer("t", "billing"), b'{"policies": {}}'),
                Create(PATHS.namespace("ns"), b""),
                Create(PATHS.key_value("ns", "a/b"), b'{"text": "x"}'),
            ]
        )
        document = msgspec.json.decode(msgspec.json.encode(await all_of(cluster_of(leader))))
        paths = [row["path"] for row in document["entries"]]
        assert paths[:3] == ["cluster", "kv", "kv/ns"]
        assert {"shard/s", "topic/t", "topic/t/billing", "kv/ns/a%2Fb"} < {*paths}
        assert not any("node" in path or "leader" in path for path in paths)
        owner, rows = entries_of(document)

        other = MemoryRegistry(shard.clock)  # an empty one
        dry = await visitor(shard, other).take_in(owner, rows, dry_run=True, foreign=False, by="me")
        assert {outcome.what.split(" with")[0] for outcome in dry} == {"created"}
        assert other.read(PATHS.cluster) is None
        await visitor(shard, other).take_in(owner, rows, dry_run=False, foreign=False, by="me")
        assert await all_of(visitor(shard, other)) == document
        again = await visitor(shard, other).take_in(owner, rows, dry_run=False, foreign=False, by="me")
        assert not any(outcome.is_written for outcome in again)

        # An older export changes nothing; a newer record is put only while nobody leads.
        older = [(path, value) for path, value in rows if path == "shard/s"]
        record = record_in(shard.registry)
        newer = encode_content(msgspec.structs.replace(record, revision=record.revision + 5))
        (kept,) = await cluster_of(leader).take_in(owner, older, dry_run=False, foreign=False, by="me")
        assert kept.what.startswith("kept: the registry has revision")
        (kept,) = await cluster_of(leader).take_in(owner, [("shard/s", newer)], dry_run=False, foreign=False, by="me")
        assert "the shard has a leader" in kept.what
        assert record_in(shard.registry).revision == record.revision
        (put,) = await visitor(shard, other).take_in(owner, [("shard/s", newer)], dry_run=False, foreign=False, by="m")
        assert put.is_written
        (kept,) = await visitor(shard, other).take_in(owner, older, dry_run=False, foreign=False, by="me")
        assert not kept.is_written
        numbers = encode_content(ShardsContent(numbers=9))
        await visitor(shard, other).take_in(owner, [("shard", numbers)], dry_run=False, foreign=False, by="me")
        (kept,) = await visitor(shard, other).take_in(
            owner, [rows[paths.index("shard")]], dry_run=False, foreign=False, by="me"
        )
        assert kept.what == "kept: its numbers is 9"

    in_shard(test)


def test_another_cluster_s_export_is_refused_and_its_metadata_taken_on_demand() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        owner, rows = entries_of(await all_of(cluster_of(leader)))
        rows.append(("topic/t", b'{"incarnation": "0000000000000001"}'))
        other = MemoryRegistry(shard.clock)
        foreign = encode_content(ClusterContent(id="00000000000000ff"))
        with pytest.raises(InvalidSettings, match="no cluster yet"):
            await visitor(shard, other).take_in(owner, rows, dry_run=False, foreign=True, by="me")
        await other.connect(beats=False).write([*PATHS.folders(), Create(PATHS.cluster, foreign)])
        with pytest.raises(InvalidSettings, match="--foreign"):
            await visitor(shard, other).take_in(owner, rows, dry_run=False, foreign=False, by="me")
        done = await visitor(shard, other).take_in(owner, rows, dry_run=False, foreign=True, by="me")
        assert [outcome.path for outcome in done if outcome.is_written] == ["topic/t"]
        assert other.read(PATHS.shard("s")) is None
        entry = other.read(PATHS.cluster)
        assert entry is not None
        assert entry.value == foreign

    in_shard(test, 1, settings=MemberSettings(min_in_sync=1))


@pytest.mark.parametrize(
    "document", [{}, {"dmq_export": 2}, {"dmq_export": 1, "cluster": "x", "entries": [{"path": 1}]}, {"dmq_export": 1}]
)
def test_what_is_no_export_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings):
        entries_of(document)


def test_strange_paths_are_refused() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start()
        owner = (await cluster_of(leader).show()).seen.cluster.id
        for path in ("node/a", "shard/s/leader", "cluster/x", "other", "../x"):
            with pytest.raises(InvalidSettings, match="not an entry of a cluster"):
                await cluster_of(leader).take_in(owner, [(path, b"{}")], dry_run=False, foreign=False, by="me")

    in_shard(test, 1, settings=MemberSettings(min_in_sync=1))


# --- a registry that is an old copy, or lost --------------------------------------------------------------------------


async def put_back(shard: Shard, old: ShardContent) -> None:
    await shard.registry.connect().write([Put(PATHS.shard("s"), encode_content(old), None)])


def test_a_registry_from_an_old_backup_is_refused_and_rebuilt_while_members_run() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        old = record_in(shard.registry)
        await leader.kill()
        others = [one for one in shard.machines if one is not leader]
        await shard.until(lambda: any(one.serves for one in others))
        now = shard.leader
        now.shop.write(5)
        await shard.level(now)
        await asyncio.sleep(2)
        await put_back(shard, old)
        await shard.registry.connect().write([Delete(PATHS.leader("s"), None)])
        await asyncio.sleep(5)
        assert now.serves  # by promises, though the registry says nothing of it
        before = record_in(shard.registry)
        assert before == old
        (view,) = (await cluster_of(now).show()).seen.shards
        assert "the registry is an old copy" in view.findings[0].what
        states = [await one.member.state() for one in others]
        (done,) = await visitor(shard).rebuild(states, dry_run=True, accept_loss=False, by="me")
        assert record_in(shard.registry) == old
        (done,) = await visitor(shard).rebuild(states, dry_run=False, accept_loss=False, by="me")
        assert done.is_written
        made = record_in(shard.registry)
        assert made.epoch == now.member.report().epoch
        await asyncio.sleep(5)
        assert now.serves
        assert now.member.report().epoch == made.epoch  # no failover
        leader.start()
        await shard.until(lambda: len(now.member.report().in_sync) == 3)
        now.shop.write(5, first=5)
        await shard.level(now)
        assert now.shop.messages == 10

    in_shard(test)


@pytest.mark.parametrize("is_lost", [False, True])
def test_members_that_start_on_an_old_registry_wait_until_it_is_rebuilt(is_lost: bool) -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        old = record_in(shard.registry)
        leader.shop.write(5)
        await shard.level(leader)
        await asyncio.sleep(1)
        for one in shard.machines:
            await one.kill()
        client = shard.registry.connect()
        await asyncio.sleep(20)
        if is_lost:
            await client.write([Delete(PATHS.shard("s"), None)])
        else:
            await put_back(shard, msgspec.structs.replace(old, revision=old.revision - 2, in_sync=[]))
        for one in shard.machines:
            one.start()
        await asyncio.sleep(30)
        assert {one.role for one in shard.machines} == {Role.STARTING}
        assert all("--from-members" in one.member.report().obstacle for one in shard.machines)
        states = [await one.member.state() for one in shard.machines]
        assert {one.end for one in states} == {max(one.end for one in states)}
        (done,) = await cluster_of(shard.machines[0]).rebuild(states, dry_run=False, accept_loss=False, by="me")
        assert done.what.startswith("rebuilt with revision")
        made = record_in(shard.registry)
        assert (made.number, made.journal, made.members) == (old.number, old.journal, old.members)
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert shard.leader.shop.messages == 5
        await shard.until(lambda: len(shard.leader.member.report().in_sync) == 3)
        (kept,) = await visitor(shard).rebuild(states, dry_run=False, accept_loss=False, by="me")
        assert kept.what == "kept: no member has seen a newer one"

    in_shard(test)


def test_a_registry_that_lost_everything_becomes_the_same_cluster_again() -> None:
    async def test(shard: Shard) -> None:
        leader = await shard.start_with_topic()
        owner = (await cluster_of(leader).show()).seen.cluster.id
        for one in shard.machines:
            await one.stop(hand_over=False)
        shard.registry = MemoryRegistry(shard.clock)
        for one in shard.machines:
            one.start()
        await asyncio.sleep(10)
        states = [await one.member.state() for one in shard.machines]
        await visitor(shard).rebuild(states, dry_run=False, accept_loss=False, by="me")
        await shard.until(lambda: any(one.serves for one in shard.machines))
        assert (await cluster_of(shard.leader).show()).seen.cluster.id == owner
        foreign = [msgspec.structs.replace(one, cluster="00000000000000ff") for one in states]
        with pytest.raises(InvalidSettings, match="check --registry"):
            await visitor(shard).rebuild(foreign, dry_run=False, accept_loss=False, by="me")
        with pytest.raises(InvalidSettings, match="several clusters"):
            await visitor(shard).rebuild([states[0], foreign[1]], dry_run=False, accept_loss=False, by="me")
        with pytest.raises(InvalidSettings, match="no member has answered"):
            await visitor(shard).rebuild([], dry_run=False, accept_loss=False, by="me")

    in_shard(test)
