"""What can be done to a shard, over a registry that may be unkind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from dmq.errors import DMQError, InvalidSettings, NotLeader, RegistryDown, ShardConflict, UnknownEntry, WriteUnknown
from dmq.protocol.cluster.replication import Standing, StandingReply
from dmq.protocol.cluster.shard import Severity
from dmq.registry.contents import NodeContent, ShardContent, encode_content, hex_id
from dmq.registry.memory import Fate
from dmq.registry.registry import Create, Delete, Put
from dmq.shard.admin.record_change import RecordChange
from dmq.shard.report import Role
from tests.unit.shard.admin.shard_scene import CLUSTER, PATHS, A, B, C, ShardScene, node, record, reply

Story = Callable[[ShardScene], Awaitable[None]]


def run(story: Story, *, asked: str = "a", content: ShardContent | None = None, **scene: Any) -> None:
    """Tell a story of a shard."""

    async def told() -> None:
        made = ShardScene(asked)
        await made.set_up(content or record(), **scene)
        await story(made)

    asyncio.run(told())


async def check_refusal(work: Awaitable[Any], kind: type[DMQError], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        await work


# --- looking ----------------------------------------------------------------------------------------------------------


def test_any_member_tells_of_all_members() -> None:
    async def story(scene: ShardScene) -> None:
        view = await scene.operations.shard()
        assert (view.name, view.leader, [one.name for one in view.members]) == ("s1", "a", ["a", "b", "c"])
        assert {address for address, _ in scene.asked_at} == {"a:9613", "c:9613"}
        assert {asked.cluster for _, asked in scene.asked_at} == {CLUSTER}
        await check_refusal(scene.operations.shard("s9"), UnknownEntry, "there is no shard 's9': those there are: s1")

    run(story, asked="b")


def test_shards_come_in_pages() -> None:
    async def story(scene: ShardScene) -> None:
        more = [Create(PATHS.shard(name), encode_content(ShardContent(number=9))) for name in ("s0", "s2", "s3")]
        await scene.others.write(more)
        first, after = await scene.operations.shards(limit=3)
        rest, end = await scene.operations.shards(after, limit=3)
        assert ([one.name for one in first], [one.name for one in rest], end) == (["s0", "s1", "s2"], ["s3"], "")

    run(story)


def test_a_shard_is_looked_at_without_the_brokers_of_others() -> None:
    async def story(scene: ShardScene) -> None:
        others = [f"/dmq/node/other-{number}" for number in range(100)]
        value = encode_content(NodeContent(address="h:1", shard="t"))
        await scene.client.write([Create(path, value, ephemeral=True) for path in others])
        scene.client.children = None  # type: ignore[method-assign, assignment]
        assert (await scene.operations.shard("s1")).leader == "a"
        assert (await scene.operations.change("s1", RecordChange(replicas=4), by="me")).shard.record.replicas == 4

    run(story)


def test_a_member_that_does_not_answer_or_has_another_disk_is_shown_as_it_is() -> None:
    async def story(scene: ShardScene) -> None:
        del scene.said["b"]
        scene.said["c"] = msgspec.structs.replace(reply("c"), replica=0xCC)
        view = await scene.operations.shard("s1")
        b, c = view.member("b"), view.member("c")
        assert b is not None
        assert b.role == "unknown"
        assert b.said is None
        assert b.is_in_sync
        assert c is not None
        assert c.said is None

    run(story)


def test_two_processes_under_one_name_are_told() -> None:
    async def story(scene: ShardScene) -> None:
        entry = await scene.client.read(PATHS.node("c"))
        assert entry is not None
        value = encode_content(node("c", replica=hex_id(0xCC)))
        await scene.others.write([Put(PATHS.node("c"), value, entry.version)])
        obstacle = "another data directory has taken the place of this one as c: stop one of the two"
        scene.said["c"] = msgspec.structs.replace(reply("c"), replica=0xCC, role="parked", obstacle=obstacle)
        view = await scene.operations.shard("s1")
        (found,) = [one for one in view.findings if one.what.startswith("c ")]
        assert found.severity is Severity.PROBLEM
        assert found.what == f"c does not take part: {obstacle}"

    run(story)


def test_while_the_registry_is_down_the_shard_is_shown_as_it_was_known_last() -> None:
    async def story(scene: ShardScene) -> None:
        await scene.member.view.refresh()
        scene.client.cut()
        with pytest.raises(RegistryDown):
            await scene.member.view.refresh()
        scene.said["c"] = reply("c", end=400)
        for view in (await scene.operations.shard(), (await scene.operations.shards())[0][0]):
            assert view.leader == "a"
            assert view.members[2].lag == 600
            assert "the registry does not answer" in view.findings[0].what
        assert await scene.operations.shards("s1") == ([], "")
        for work in (
            scene.operations.shard("s2"),
            scene.operations.change("s1", RecordChange(replicas=4), by="me"),
            scene.operations.promote("", "b", accept_loss=True, by="me"),
        ):
            await check_refusal(work, RegistryDown, "this needs the registry, and ")

    run(story)


def test_a_member_that_cannot_join_says_so_itself() -> None:
    async def story(scene: ShardScene) -> None:
        why = "this directory is a member of another cluster"
        scene.member.told = msgspec.structs.replace(scene.member.told, role=Role.STARTING, obstacle=why)
        view = await scene.operations.shard()
        assert view.findings[0].what == f"the member that was asked cannot join: {why}"

    run(story)


# --- changes ----------------------------------------------------------------------------------------------------------


def test_a_change_is_one_write_with_the_next_revision() -> None:
    async def story(scene: ShardScene) -> None:
        done = await scene.operations.change("", RecordChange(min_in_sync=1, replicas=5), by="me")
        now = await scene.record()
        assert now == msgspec.structs.replace(record(), revision=6, min_in_sync=1, replicas=5) == done.shard.record
        assert done.what == "min_in_sync is 1, replicas is 5"
        await scene.operations.change("s1", RecordChange(min_in_sync=1), by="me")
        assert (await scene.record()).revision == 6

    run(story)


@pytest.mark.parametrize(
    "fates", [[Fate.UNANSWERED], [Fate.LOST], [Fate.LATE], [Fate.LATE, Fate.LOST, Fate.UNANSWERED]]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_write_without_an_answer_is_settled_and_done_once(fates: list[Fate], seed: int) -> None:
    async def story(scene: ShardScene) -> None:
        scene.registry.random.seed(seed)
        scene.client.fates.extend(fates)
        done = await scene.operations.change("s1", RecordChange(min_in_sync=1), by="me")
        scene.registry.land_late()
        now = await scene.record()
        assert now == done.shard.record
        assert (now.revision, now.min_in_sync) == (6, 1)

    run(story)


def test_a_change_is_decided_anew_when_another_one_was_quicker() -> None:
    async def story(scene: ShardScene) -> None:
        write, others = scene.client.write, [msgspec.structs.replace(record(), revision=6, in_sync=[hex_id(A)])]

        async def late(operations: Any) -> Any:
            if others:
                await scene.put(others.pop())
            return await write(operations)

        scene.client.write = late  # type: ignore[method-assign]
        await scene.operations.change("s1", RecordChange(replicas=4), by="me")
        now = await scene.record()
        assert (now.revision, now.in_sync, now.replicas) == (7, [hex_id(A)], 4)

    run(story)


def test_a_registry_that_goes_away_in_the_middle_leaves_it_open_and_says_so() -> None:
    async def story(scene: ShardScene) -> None:
        scene.client.fates.append(Fate.LOST)
        write = scene.client.write

        async def cut(operations: Any) -> Any:
            try:
                return await write(operations)
            finally:
                scene.client.cut()
                scene.client._is_cut_noticed = True

        scene.client.write = cut  # type: ignore[method-assign]
        change = scene.operations.change("s1", RecordChange(replicas=4), by="me")
        await check_refusal(change, WriteUnknown, "whether the change took place is not known")

    run(story)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (RecordChange(), InvalidSettings, "there is nothing to change"),
        (RecordChange(min_in_sync=4), InvalidSettings, "min_in_sync 4 is above replicas 3"),
        (RecordChange(replicas=1, min_in_sync=1), InvalidSettings, "the shard has 3 members"),
        (RecordChange(remove="b"), ShardConflict, "b runs: stop it first"),
        (RecordChange(remove="d"), UnknownEntry, "shard s1 has no member 'd': those it has: a, b, c"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(change: RecordChange, kind: type[DMQError], words: str) -> None:
    async def story(scene: ShardScene) -> None:
        await check_refusal(scene.operations.change("s1", change, by="me"), kind, words)
        assert await scene.record() == record()

    run(story)


def test_a_member_that_is_gone_for_good_is_removed_but_never_below_the_least() -> None:
    async def story(scene: ShardScene) -> None:
        await scene.operations.change("s1", RecordChange(remove="c"), by="me")
        now = await scene.record()
        assert [*now.members] == ["a", "b"]
        assert now.in_sync == [hex_id(A), hex_id(B)]
        assert hex_id(C) not in now.lives
        await scene.others.write([Delete(PATHS.node("b"), None)])
        remove = scene.operations.change("s1", RecordChange(remove="b"), by="me")
        await check_refusal(remove, ShardConflict, "only 1 would be left in the in-sync set, and min_in_sync is 2")
        done = await scene.operations.change("s1", RecordChange(min_in_sync=1, remove="b"), by="me")
        assert done.shard.record.in_sync == [hex_id(A)]
        assert done.what == "min_in_sync is 1, replicas is 3, b is not a member any more"

    run(story, nodes="ab")


def test_an_old_copy_of_the_registry_is_not_changed() -> None:
    async def story(scene: ShardScene) -> None:
        scene.said["b"] = reply("b", revision=6)
        await check_refusal(
            scene.operations.change("s1", RecordChange(replicas=4), by="me"), ShardConflict, "an old copy"
        )

    run(story)


def test_a_record_that_changes_while_members_are_asked_is_no_old_copy() -> None:
    async def story(scene: ShardScene) -> None:
        ask = scene.standing

        async def standing(address: str, asked: Standing, seconds: float) -> StandingReply:
            if not scene.asked_at:
                await scene.elect("b")
            return await ask(address, asked, seconds)

        scene.standing = standing  # type: ignore[method-assign]
        view = await scene.operations.shard()
        assert (view.leader, view.record.revision, view.revision_seen) == ("b", 6, 6)
        assert not [found.what for found in view.findings if "old copy" in found.what]

    run(story)


# --- promotion --------------------------------------------------------------------------------------------------------

LOST = record(in_sync=[hex_id(A)], min_in_sync=1)


def test_a_promotion_says_what_would_be_lost_and_does_nothing() -> None:
    async def story(scene: ShardScene) -> None:
        scene.said = {"b": reply("b", role="waiting", end=400), "c": reply("c", role="waiting", end=700)}
        promotion = scene.operations.promote("", "b", accept_loss=False, by="me")
        with pytest.raises(ShardConflict) as caught:
            await promotion
        told = caught.value.message
        assert "its journal ends at 400" in told
        assert "c has 300 bytes more" in told
        assert "what a acknowledged" in told
        assert await scene.record() == LOST

    run(story, asked="b", content=LOST, leader=None, nodes="bc")


@pytest.mark.parametrize("fate", [Fate.ANSWERED, Fate.UNANSWERED, Fate.LOST, Fate.LATE])
def test_a_promoted_member_leads_alone_and_the_record_says_that_it_was_unsafe(fate: Fate) -> None:
    async def story(scene: ShardScene) -> None:
        scene.said = {"b": reply("b", role="waiting", obstacle="none")}
        scene.client.fates.append(fate)

        async def elect() -> None:
            while (await scene.record()).in_sync != [hex_id(B)]:
                await asyncio.sleep(0.001)
            await scene.elect("b")

        election = asyncio.create_task(elect())
        scene.operations.election_seconds = 5.0
        done = await scene.operations.promote("s1", "b", accept_loss=True, by="me")
        await election
        now = await scene.record()
        assert (now.in_sync, now.unsafe, now.epoch, now.leader) == ([hex_id(B)], 8, 8, hex_id(B))
        assert "b leads in epoch 8" in done.what
        assert "The leader before was a" in done.what

    run(story, asked="b", content=LOST, leader=None, nodes="bc")


def test_a_promotion_that_takes_long_says_what_keeps_the_member() -> None:
    async def story(scene: ShardScene) -> None:
        scene.said = {"b": reply("b", role="waiting", obstacle="it has promised not to", promise_ms=900)}
        done = await scene.operations.promote("s1", "b", accept_loss=True, by="me")
        assert "b may lead now and does not yet, since it has promised not to" in done.what

    run(story, asked="b", content=LOST, leader=None, nodes="bc")


def test_a_member_of_the_set_needs_no_promotion() -> None:
    async def story(scene: ShardScene) -> None:
        scene.said = {"b": reply("b", role="waiting", obstacle="its tail was cut")}
        promotion = scene.operations.promote("s1", "b", accept_loss=False, by="me")
        await check_refusal(promotion, ShardConflict, "it does not lead yet, since its tail was cut")

    run(story, asked="b", leader=None, nodes="b")


@pytest.mark.parametrize(
    ("member", "leader", "nodes", "words"),
    [
        ("a", "a", "abc", "a leads already"),
        ("b", "a", "abc", "dmq shard handover --to b"),
        ("c", None, "b", "c does not run"),
        ("c", None, "bc", "c does not answer at c:9613"),
    ],
)
def test_who_cannot_be_promoted(member: str, leader: str | None, nodes: str, words: str) -> None:
    async def story(scene: ShardScene) -> None:
        if leader is None:
            scene.said = {"b": reply("b", role="waiting")}
        await check_refusal(scene.operations.promote("s1", member, accept_loss=True, by="me"), ShardConflict, words)
        assert await scene.record() == record()

    run(story, asked="b", leader=leader, nodes=nodes)


def test_a_leader_that_serves_by_promises_alone_is_not_passed_over() -> None:
    async def story(scene: ShardScene) -> None:
        await check_refusal(
            scene.operations.promote("s1", "b", accept_loss=True, by="me"), ShardConflict, "a leads shard s1"
        )

    run(story, asked="b", leader=None)


def test_a_leader_that_comes_in_between_stops_a_promotion() -> None:
    async def story(scene: ShardScene) -> None:
        scene.said = {"b": reply("b", role="waiting")}
        write, is_first = scene.client.write, [True]

        async def late(operations: Any) -> Any:
            if is_first:
                is_first.clear()
                await scene.elect("a")
            return await write(operations)

        scene.client.write = late  # type: ignore[method-assign]
        await check_refusal(
            scene.operations.promote("s1", "b", accept_loss=True, by="me"), ShardConflict, "a leads shard s1"
        )
        assert (await scene.record()).unsafe == 0

    run(story, asked="b", content=LOST, leader=None, nodes="ab")


def test_nobody_knows_a_member_that_is_not_there() -> None:
    async def story(scene: ShardScene) -> None:
        promotion = scene.operations.promote("", "x", accept_loss=True, by="me")
        await check_refusal(promotion, UnknownEntry, "no shard has a member 'x'")
        promotion = scene.operations.promote("s1", "x", accept_loss=True, by="me")
        await check_refusal(promotion, UnknownEntry, "shard s1 has no member 'x': those it has: a, b, c")

    run(story)


# --- hand-over and repair ---------------------------------------------------------------------------------------------


def test_the_leader_hands_over() -> None:
    async def story(scene: ShardScene) -> None:
        done = await scene.operations.hand_over("", "", by="me")
        assert scene.member.handed_to == [None]
        assert done.shard.leader == "b"
        assert done.what == "b leads in epoch 8"

    run(story)


@pytest.mark.parametrize(
    ("to", "kind", "words"),
    [
        ("a", ShardConflict, "a leads already"),
        ("c", ShardConflict, "a leads on: no follower is within a second of the leader"),
        ("x", UnknownEntry, "shard s1 has no member 'x'"),
    ],
)
def test_who_cannot_take_over(to: str, kind: type[DMQError], words: str) -> None:
    async def story(scene: ShardScene) -> None:
        await check_refusal(scene.operations.hand_over("s1", to, by="me"), kind, words)

    run(story)


def test_who_is_not_in_sync_or_does_not_run_cannot_take_over() -> None:
    async def story(scene: ShardScene) -> None:
        await check_refusal(scene.operations.hand_over("s1", "b", by="me"), ShardConflict, "it is not in sync")
        await check_refusal(scene.operations.hand_over("s1", "c", by="me"), ShardConflict, "it does not run")
        assert scene.member.handed_to == []

    run(story, content=record(in_sync=[hex_id(A), hex_id(C)]), nodes="ab")


def test_a_follower_names_the_leader_and_a_shard_without_one_says_so() -> None:
    async def follower(scene: ShardScene) -> None:
        with pytest.raises(NotLeader) as caught:
            await scene.operations.hand_over("", "c", by="me")
        assert caught.value.detail["leader"] == "a:9611"

    async def nobody(scene: ShardScene) -> None:
        scene.said = {"b": reply("b", role="waiting")}
        await check_refusal(scene.operations.hand_over("", "", by="me"), ShardConflict, "shard s1 has no leader")

    run(follower, asked="b")
    run(nobody, asked="b", leader=None)


def test_a_repair_is_the_members_own() -> None:
    async def story(scene: ShardScene) -> None:
        mended = await scene.operations.mend(by="me")
        assert mended is not None
        assert (mended.mended, mended.left) == ([(64, 128)], [(256, 300)])

    run(story)


def test_who_asks_again_waits_for_the_same_repair() -> None:
    async def story(scene: ShardScene) -> None:
        scene.operations.repair_seconds = 0.001
        scene.member.mends_after = asyncio.Event()
        assert await scene.operations.mend(by="me") is None
        assert await scene.operations.mend(by="me") is None
        scene.member.mends_after.set()
        scene.operations.repair_seconds = 5.0
        assert await scene.operations.mend(by="me") is not None
        assert scene.member.repairs == 1

    run(story)


def test_brokers_of_other_shards_are_no_members() -> None:
    async def story(scene: ShardScene) -> None:
        await scene.others.write([Create(PATHS.node("z"), encode_content(node("a", shard="s2")), ephemeral=True)])
        view = await scene.operations.shard("s1")
        assert [one.name for one in view.members] == ["a", "b", "c"]

    run(story)
