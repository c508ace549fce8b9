"""Topics of a cluster: the registry has them, and the journals of the shards follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from dmq.broker.catalog.cluster_access import GroupChange
from dmq.broker.catalog.cluster_topics import SlotChange, Verdict, decide
from dmq.broker.catalog.key_values import KeyValue
from dmq.broker.publish.rate_limits import Limit
from dmq.errors import (
    Busy,
    InvalidRequest,
    LimitReached,
    RegistryDown,
    ShardConflict,
    StaleRoute,
    TopicExists,
    UnknownEntry,
    UnknownGroup,
    UnknownTopic,
)
from dmq.model import TopicConfig
from dmq.registry.contents import ConsumerContent, ShardState, TopicContent, TopicState, encode_content, hex_id
from dmq.registry.memory import Fate
from dmq.registry.registry import Create, Delete
from dmq.storage.state.events import PositionSet
from dmq.storage.state.state import Topic
from tests.unit.broker.catalog.leaders import PATHS, Leaders, ShardLeader, leaders
from tests.unit.broker.leading import on_a_loop


def content(**more: object) -> TopicContent:
    fields: dict[str, object] = {
        "incarnation": hex_id(9),
        "settings": {"queues": 2},
        "slots": [("s1", 2)],
        "slots_version": 3,
    }
    return TopicContent(**fields | more)  # type: ignore[arg-type]


def local(**more: object) -> Topic:
    fields: dict[str, object] = {"incarnation": 9, "slots_version": 3}
    return Topic(17, "t", TopicConfig(queues=2), 0, **fields | more)  # type: ignore[arg-type]


DELETED = content(state=TopicState.DELETED)
ELSEWHERE = content(slots=[("s2", 2)])


@pytest.mark.parametrize(
    ("entry", "journal", "verdict"),
    [
        (None, None, Verdict.NOTHING),
        (None, local(), Verdict.ADOPT),
        (None, local(incarnation=0), Verdict.ADOPT),
        (content(), None, Verdict.PUT),
        (content(), local(), Verdict.NOTHING),
        (content(slots_version=4), local(), Verdict.PUT),
        (content(removed=["s1"]), local(), Verdict.PUT),
        (content(settings={"queues": 2, "ttl_ms": 5}), local(), Verdict.PUT),
        (content(slots=[("s1", 3)]), local(), Verdict.PUT),
        (content(slots=[("s1", 1)]), local(), Verdict.ADOPT),
        (content(slots_version=2), local(), Verdict.ADOPT),
        (content(slots_version=2, settings={"queues": 2, "ttl_ms": 5}), local(), Verdict.ADOPT),
        (content(), local(incarnation=0), Verdict.PUT),
        (content(), local(incarnation=8), Verdict.DROP),
        (content(), local(incarnation=10), Verdict.CONFLICT),
        (ELSEWHERE, None, Verdict.NOTHING),
        (ELSEWHERE, local(), Verdict.ADOPT),
        (ELSEWHERE, local(is_removed=True), Verdict.DROP),
        (ELSEWHERE, local(incarnation=8), Verdict.DROP),
        (ELSEWHERE, local(incarnation=0), Verdict.ADOPT),
        (DELETED, None, Verdict.FORGET),
        (DELETED, local(), Verdict.DROP),
        (DELETED, local(incarnation=8), Verdict.DROP),
        (DELETED, local(incarnation=10), Verdict.CONFLICT),
        (DELETED, local(incarnation=0), Verdict.ADOPT),
        (content(state=TopicState.DELETED, slots=[]), None, Verdict.NOTHING),
    ],
)
def test_what_is_done_about_a_topic(entry: TopicContent | None, journal: Topic | None, verdict: Verdict) -> None:
    assert decide(entry, journal, "s1") is verdict


@on_a_loop
async def test_a_topic_is_created_on_all_open_shards() -> None:
    async with leaders("s1", "s2", "s3") as cluster:
        s1, s2, s3 = cluster.shards.values()
        await s2.create("t", 3)
        entry = await cluster.entry("t")
        assert entry is not None
        assert entry.slots == [("s1", 3), ("s2", 3), ("s3", 3)]
        assert entry.settings["queues"] == 3
        slot = (3, int(entry.incarnation, 16), 1, False)
        assert [one.topic("t") for one in (s1, s2, s3)] == [slot] * 3  # all had it when it was answered


@on_a_loop
async def test_a_shard_that_is_not_open_gets_no_slot_and_its_leader_creates_topics_all_the_same() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await cluster.set_state("s2", ShardState.READ_ONLY)
        made = await s2.create("t")
        assert made.config.queues == 2
        assert (s1.topic("t") is not None, s2.topic("t")) == (True, None)
        with pytest.raises(StaleRoute, match="has no queues in shard 's2'"):
            s2.broker.catalog.topic("t")
        assert [topic.name for topic in s2.broker.catalog.page("", "", 10, system=False)[0]] == ["t"]
        assert s2.broker.catalog.described("t").config.queues == 2


@on_a_loop
async def test_the_same_topic_created_at_two_leaders_at_once_is_one() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await asyncio.gather(s1.create("t", allow_existing=True), s2.create("t", allow_existing=True))
        assert s1.topic("t") == s2.topic("t")
        with pytest.raises(TopicExists, match="already exists"):
            await s2.create("t")
        with pytest.raises(TopicExists, match="queues is 2, not 3"):
            await s1.create("t", 3, allow_existing=True)


@on_a_loop
async def test_settings_change_everywhere_and_more_queues_are_another_version() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        incarnation = s1.topic("t")[1]
        await s2.broker.catalog.update("t", lambda before: msgspec.structs.replace(before, ttl_ms=7))
        assert s1.broker.catalog.topic("t").config.ttl_ms == 7
        assert s1.topic("t") == (2, incarnation, 1, False)
        await s1.broker.catalog.update("t", lambda before: msgspec.structs.replace(before, queues=5))
        assert s2.topic("t") == (5, incarnation, 2, False)
        with pytest.raises(UnknownTopic):
            await s1.broker.catalog.update("none", lambda before: before)


@on_a_loop
async def test_a_deleted_topic_is_dropped_everywhere_and_its_tombstone_goes_last() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        await s2.die()
        await s1.delete("t")
        entry = await cluster.entry("t")
        assert entry is not None
        assert (entry.state, entry.slots) == (TopicState.DELETED, [("s2", 2)])
        assert s1.broker.cluster is not None
        assert s1.broker.cluster.lacking == {"t": ("s2",)}
        # Its next leader has the topic, and hears that it is gone.
        await s2.come_back()
        await cluster.until(lambda: s2.topic("t") is None)
        await cluster.until(lambda: "t" not in s1.view.topics)
        assert await cluster.entry("t") is None
        with pytest.raises(UnknownTopic):
            await s1.delete("t")


@on_a_loop
async def test_a_topic_created_anew_drops_what_a_shard_still_had_of_the_old_one() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        old, before = s1.topic("t")[1], s2.broker.catalog.topic("t").id
        await s2.die()
        await s1.delete("t")
        await s1.create("t", 4)
        assert s1.topic("t")[1] > old
        await s2.come_back()
        await cluster.until(lambda: s2.topic("t") == s1.topic("t"))
        assert s2.broker.catalog.topic("t").id != before


@on_a_loop
async def test_an_entry_that_somebody_deletes_deletes_nothing_and_comes_back() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        slot = s1.topic("t")
        await cluster.writer.write([Delete(PATHS.topic("t"), None)])
        for one in (s1, s2):
            one.view._seen = None  # as an hour later
            await one.view.refresh()
        await cluster.until(lambda: s1.topic("t")[2] > 1 and s1.topic("t") == s2.topic("t"))
        entry = await cluster.entry("t")
        assert entry is not None
        assert {*entry.slots} == {("s1", 2), ("s2", 2)}
        assert int(entry.incarnation, 16) == slot[1]


@on_a_loop
async def test_the_topics_of_a_lone_brokers_directory_are_taken_over() -> None:
    async with leaders() as cluster:
        s1 = await cluster.add("s1", {"old": TopicConfig(queues=3)})
        await cluster.until(lambda: s1.topic("old")[1])
        entry = await cluster.entry("old")
        assert entry is not None
        assert entry.slots == [("s1", 3)]
        # A shard that joins later gets none of them; new topics get it.
        s2 = await cluster.add("s2")
        await s2.create("new")
        assert (s2.topic("old"), s1.topic("new") == s2.topic("new")) == (None, True)


@on_a_loop
async def test_two_directories_with_a_topic_of_one_name_are_one_topic_if_they_agree() -> None:
    async with leaders() as cluster:
        s1 = await cluster.add("s1", {"same": TopicConfig(queues=3), "other": TopicConfig(queues=1)})
        await cluster.until(lambda: s1.topic("same")[1] and s1.topic("other")[1])
        s2 = await cluster.add("s2", {"same": TopicConfig(queues=5), "other": TopicConfig(queues=1, ttl_ms=4)})
        await cluster.until(lambda: s2.topic("same")[1])
        entry = await cluster.entry("same")
        assert entry is not None
        assert (entry.slots, entry.slots_version) == ([("s1", 3), ("s2", 5)], 2)
        await cluster.until(lambda: s1.topic("same")[2] == 2)
        assert s2.topic("other") == (1, 0, 0, False)  # reported, and left alone
        entry = await cluster.entry("other")
        assert entry is not None
        assert entry.slots == [("s1", 1)]


@on_a_loop
async def test_a_registry_that_is_down_refuses_changes_with_a_sentence() -> None:
    async with leaders("s1") as cluster:
        (s1,) = cluster.shards.values()
        await s1.create("t")
        s1.client.cut()
        with pytest.raises(RegistryDown, match=r"this needs the registry, and .* go on meanwhile"):
            await s1.create("u")
        assert s1.broker.catalog.topic("t").config.queues == 2
        s1.client.mend()
        await s1.create("u")


@on_a_loop
async def test_a_write_that_is_not_answered_is_settled_and_not_repeated() -> None:
    async with leaders("s1") as cluster:
        (s1,) = cluster.shards.values()
        for fate in (Fate.UNANSWERED, Fate.LOST):
            s1.client.fates.append(fate)
            await s1.create(f"t{fate.value}")
            entry = await cluster.entry(f"t{fate.value}")
            assert entry is not None
            assert (entry.slots_version, int(entry.incarnation, 16)) == (1, s1.topic(f"t{fate.value}")[1])


@on_a_loop
async def test_topics_are_counted_over_the_cluster() -> None:
    async with leaders("s1", topics_max=2) as cluster:
        (s1,) = cluster.shards.values()
        await s1.create("t")
        await s1.create("u")
        with pytest.raises(LimitReached, match="this cluster has 2 topics"):
            await s1.create("v")


@on_a_loop
async def test_a_topic_made_by_its_first_use_is_made_in_the_cluster() -> None:
    async with leaders("s1", "s2", auto_create=True) as cluster:
        s1, s2 = cluster.shards.values()
        found = await s1.broker.changes.after(lambda: s1.broker.catalog.topic("t"))
        assert found.incarnation
        await cluster.until(lambda: s2.topic("t") == s1.topic("t"))
        same = await s2.broker.changes.after(lambda: s2.broker.catalog.topic("t"))
        assert same.incarnation == found.incarnation


@on_a_loop
async def test_an_old_copy_of_the_registry_drops_nothing() -> None:
    async with leaders("s1") as cluster:
        (s1,) = cluster.shards.values()
        await s1.create("t")
        slot = s1.topic("t")
        for state in (TopicState.OPEN, TopicState.DELETED):
            await cluster.put("t", content(incarnation=hex_id(slot[1] - 1), slots=[("s1", 2)], state=state))
            await cluster.until(lambda state=state: s1.view.topics["t"].state is state)  # type: ignore[misc]
            await asyncio.sleep(0.02)
            assert s1.topic("t") == slot


def _place(leader: ShardLeader, topic: str, **change: Any) -> Coroutine[Any, Any, Topic]:
    assert leader.broker.cluster is not None
    return leader.broker.cluster.place(topic, SlotChange(**change), by="test")


@on_a_loop
async def test_a_slot_is_added_by_command_alone() -> None:
    async with leaders("s1") as cluster:
        (s1,) = cluster.shards.values()
        await s1.create("t")
        s2 = await cluster.add("s2")
        await s2.create("other")
        assert s2.topic("t") is None
        await _place(s2, "t", add="s2", queues=5)
        assert (s1.topic("t")[2], s2.topic("t")[0], s2.topic("t")[2]) == (2, 5, 2)
        with pytest.raises(InvalidRequest, match="has a slot in shard 's2' already"):
            await _place(s1, "t", add="s2")
        with pytest.raises(UnknownEntry, match="there is no shard 's9': those there are: s1, s2"):
            await _place(s1, "t", add="s9")
        with pytest.raises(UnknownTopic):
            await _place(s1, "none", add="s2")
        with pytest.raises(InvalidRequest, match="say one shard"):
            await _place(s1, "t", add="s1", remove="s2")


@on_a_loop
async def test_a_removed_slot_is_read_only_until_it_is_consumed_and_then_goes() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        s2.rig.store.append([PositionSet("g", s2.broker.catalog.topic("t").id, queue, 0) for queue in range(2)])
        await s2.write("t")
        await _place(s1, "t", remove="s2")
        assert (s1.topic("t")[2:], s2.topic("t")[2:]) == ((2, False), (2, True))
        with pytest.raises(InvalidRequest, match="removed already"):
            await _place(s1, "t", remove="s2")
        with pytest.raises(InvalidRequest, match="the last slot that takes messages"):
            await _place(s1, "t", remove="s1")
        assert s2.broker.cluster is not None
        await s2.broker.cluster.take_away(s2.broker.catalog.topic("t"))
        assert s2.topic("t") is not None, "one message is not consumed"
        s2.rig.store.append([PositionSet("g", s2.broker.catalog.topic("t").id, 0, 1)])
        s2.rig.store.flush()
        s2.rig.commit()
        await s2.broker.cluster.take_away(s2.broker.catalog.topic("t"))
        assert s2.topic("t") is None
        entry = await cluster.entry("t")
        assert entry is not None
        assert (entry.slots, entry.removed, entry.slots_version) == ([("s1", 2)], [], 3)
        await cluster.until(lambda: s1.topic("t")[2] == 3)


@on_a_loop
async def test_a_removed_slot_comes_back_with_what_it_has() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        await s2.write("t")
        topic_id = s2.broker.catalog.topic("t").id
        await _place(s1, "t", remove="s2")
        await _place(s1, "t", add="s2")
        assert (s2.topic("t")[2:], s2.broker.catalog.topic("t").id) == ((3, False), topic_id)


@on_a_loop
async def test_a_slot_goes_by_force_with_its_messages() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        await s2.write("t")
        await _place(s1, "t", remove="s2", is_forced=True)
        assert s2.topic("t") is None
        entry = await cluster.entry("t")
        assert entry is not None
        assert entry.slots == [("s1", 2)]
        await _place(s1, "t", add="s2")
        await s2.die()
        with pytest.raises(ShardConflict, match="'s2' has no leader"):
            await _place(s1, "t", remove="s2", is_forced=True)
        entry = await cluster.entry("t")
        assert entry is not None
        assert entry.removed == ["s2"]


@on_a_loop
async def test_ordered_messages_wait_while_a_topic_is_drained() -> None:
    async with leaders("s1", "s2", "s3") as cluster:
        s1, s2, _ = cluster.shards.values()
        await s1.create("t")
        await _place(s1, "t", remove="s3", is_forced=True)
        s2.rig.store.append([PositionSet("g", s2.broker.catalog.topic("t").id, queue, 0) for queue in range(2)])
        await s2.write("t")
        placing = asyncio.ensure_future(_place(s1, "t", add="s3", is_drained=True))
        assert s2.broker.cluster is not None
        held = s2.broker.cluster.is_held
        await cluster.until(lambda: held("t"))
        await asyncio.sleep(0.3)
        assert not placing.done(), "a message is not consumed"
        noted = s2.broker.cluster._rest._holds  # type: ignore[attr-defined]
        await cluster.until(lambda: any(ends for _, ends in noted.values()))
        await s2.write("t")  # in no order, and not waited for
        s2.rig.store.append([PositionSet("g", s2.broker.catalog.topic("t").id, 0, 1)])
        await placing
        assert not held("t")
        assert s2.topic("t")[2] == s1.topic("t")[2] > 2


@on_a_loop
async def test_a_drain_that_takes_too_long_changes_nothing() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        s2.rig.store.append([PositionSet("g", s2.broker.catalog.topic("t").id, queue, 0) for queue in range(2)])
        await s2.write("t")
        before = await cluster.entry("t")
        assert s1.broker.cluster is not None
        s1.broker.cluster.drain_seconds = 0.3
        with pytest.raises(Busy, match="have not consumed it within"):
            await _place(s1, "t", remove="s2", is_drained=True)
        assert await cluster.entry("t") == before


@on_a_loop
async def test_groups_are_named_below_their_topics_and_deleted_everywhere() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        first = s1.broker.cluster
        assert first is not None
        await s1.broker.changes.after(lambda: s1.broker.groups.create("g", "t"))
        await first.groups.change(GroupChange("g", "t"), [], None)
        assert [one.broker.queries.groups() for one in (s1, s2)] == [["g"], ["g"]]
        assert await cluster.writer.read(PATHS.consumer("t", "g")) is not None
        # A group that begins by subscribing is named as well.
        await s2.broker.changes.after(lambda: s2.broker.groups.create("h", "t"))
        paths = [PATHS.consumer("t", "g"), PATHS.consumer("t", "h")]
        async with asyncio.timeout(20):
            while [one.path for one in await cluster.writer.children(PATHS.topic("t"))] != paths:
                await asyncio.sleep(0.001)
        await first.groups.change(GroupChange("g", "t", is_deleted=True), ["t"], _delete(s1, "g"))
        assert [one.broker.queries.groups() for one in (s1, s2)] == [[], ["h"]]
        with pytest.raises(UnknownGroup):
            await first.groups.change(GroupChange("g", "", is_deleted=True), [], _delete(s1, "g"))
        await s1.delete("t")  # with the entries below it
        await cluster.until(lambda: "t" not in s1.view.topics)
        assert await cluster.entry("t") is None


@on_a_loop
async def test_a_group_misses_nothing_of_a_slot_that_is_added_while_it_is_away() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        await _place(s1, "t", remove="s2", is_forced=True)
        await cluster.until(lambda: s2.broker.catalog.find("t") is None)
        await s1.broker.changes.after(lambda: s1.broker.groups.create("g", "t"))
        async with asyncio.timeout(20):
            while not await cluster.writer.children(PATHS.topic("t")):
                await asyncio.sleep(0.001)
        # One of a topic of that name that was there before, and one that an earlier version has noted.
        for name, noted in (("old", ConsumerContent(incarnation=hex_id(1))), ("older", ConsumerContent())):
            await cluster.writer.write([Create(PATHS.consumer("t", name), encode_content(noted))])
        await _place(s1, "t", add="s2", queues=3)
        topic = s2.broker.catalog.topic("t")
        assert {place: found.floor for place, found in s2.broker.queries.positions_of("g").items()} == {
            (topic.id, queue): 0 for queue in range(3)
        }
        assert s2.broker.queries.groups() == ["g"]
        await s1.broker.changes.after(lambda: s1.broker.groups.create("older", "t"))  # it is noted with the topic now
        await _place(s1, "t", remove="s2", is_forced=True)
        await cluster.until(lambda: s2.broker.catalog.find("t") is None)
        async with asyncio.timeout(20):
            while b'"incarnation":""' in (await _entry(cluster, "older")).replace(b" ", b""):
                await asyncio.sleep(0.001)
        await _place(s1, "t", add="s2")
        assert s2.broker.queries.groups() == ["g", "older"]


@on_a_loop
async def test_a_group_whose_leader_died_before_the_registry_named_it_is_named_by_the_next_one() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        await _place(s1, "t", remove="s2", is_forced=True)
        await cluster.until(lambda: s2.broker.catalog.find("t") is None)
        s1.client.cut()
        await s1.broker.changes.after(lambda: s1.broker.groups.create("g", "t"))
        assert s1.broker.queries.groups() == ["g"]
        assert not await cluster.writer.children(PATHS.topic("t"))
        await s1.end()
        s1.client.mend()
        await cluster.writer.write([Delete(PATHS.node("s1"), None)])
        await s1.come_back()
        assert s1.broker.queries.groups() == ["g"]
        async with asyncio.timeout(20):
            while not await cluster.writer.children(PATHS.topic("t")):
                await asyncio.sleep(0.001)
        await _place(s1, "t", add="s2")
        assert {found.floor for found in s2.broker.queries.positions_of("g").values()} == {0}, "it misses nothing"


async def _entry(cluster: Leaders, group: str) -> bytes:
    found = await cluster.writer.read(PATHS.consumer("t", group))
    assert found is not None
    return found.value


async def _delete(leader: ShardLeader, group: str) -> None:
    await leader.broker.groups.delete(group, "")


@on_a_loop
async def test_a_limit_is_shared_out_over_the_shards() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        await s1.create("t")
        await _place(s1, "t", remove="s2", is_forced=True)
        await _place(s1, "t", add="s2", queues=6)
        (whole,) = await s1.broker.limits.set(Limit("t", "", messages=80))
        assert whole == Limit("t", "", messages=80)
        (app,) = await s2.broker.limits.set(Limit("", "shop", bytes=1001))
        assert app.bytes == 1001
        await cluster.until(lambda: all(len(one.broker.limits.limits.rules) == 2 for one in (s1, s2)))
        for one, messages in ((s1, 20), (s2, 60)):
            rules = one.broker.limits.limits.rules
            assert rules["t", ""].limit.messages == messages
            assert rules["", "shop"].limit.bytes == 501
            assert one.broker.limits.kept() == [app, whole]
        await _place(s1, "t", remove="s2")
        await cluster.until(lambda: s1.broker.limits.limits.rules["t", ""].limit.messages == 80)
        await s2.broker.limits.set(Limit("t"))
        await s1.broker.limits.set(Limit("", "shop"))
        await cluster.until(lambda: not any(one.broker.limits.limits.rules for one in (s1, s2)))
        with pytest.raises(UnknownTopic):
            await s1.broker.limits.set(Limit("none", messages=1))


@on_a_loop
async def test_the_key_value_space_is_one_for_all_shards() -> None:
    async with leaders("s1", "s2") as cluster:
        s1, s2 = cluster.shards.values()
        one, other = s1.broker.cluster_keys, s2.broker.cluster_keys
        assert one is not None
        assert other is not None
        await s1.broker.keys.put("n", "of the journal", b"old")
        await one.put("n", "k/1", b"\xff\x00", ttl_ms=1000)
        await one.put("n", "k/2", b"text")
        assert await other.get("n", "k/1") == KeyValue("k/1", b"\xff\x00", 1000)
        assert await one.get("n", "of the journal") == KeyValue("of the journal", b"old", 0)
        assert [found.key for found in (await one.page("n", "", "", 10))[0]] == ["k/1", "k/2", "of the journal"]
        assert await other.page("n", "k", "", 1) == ([KeyValue("k/1", b"\xff\x00", 1000)], True)
        cluster.clock.advance(2)
        await asyncio.sleep(0.06)
        assert await other.get("n", "k/1") is None
        assert not await other.delete("n", "k/1")
        assert await other.delete("n", "k/2")
        assert await one.delete("n", "of the journal")
        assert await one.page("n", "", "", 10) == ([], False)
        s1.client.cut()
        with pytest.raises(RegistryDown, match="this needs the registry"):
            await one.get("n", "k/2")
