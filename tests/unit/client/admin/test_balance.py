"""The plan of a balance: which leaders and queues move, and which do not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dmq.client.admin.cluster import balanced
from dmq.client.admin.reports import Topic, TopicSlot
from dmq.client.admin.shards import ShardMember, ShardReport


def member(name: str, host: str, **changes: object) -> ShardMember:
    fields: dict[str, object] = dict.fromkeys(ShardMember.__dataclass_fields__, None)
    fields |= {"name": name, "address": f"{host}:9611", "is_in_sync": True, "is_registered": True}
    return ShardMember(**(fields | {"is_drained": False, "is_doubtful": False} | changes))  # type: ignore[arg-type]


def shard(name: str, members: Sequence[ShardMember], leader: str | None, **changes: object) -> ShardReport:
    fields: dict[str, object] = dict.fromkeys(ShardReport.__dataclass_fields__, None)
    fields |= {"name": name, "members": tuple(members), "leader": leader, "state": "open", "weight": 100}
    return ShardReport(**(fields | changes))  # type: ignore[arg-type]


def topic(name: str, size: int, *shards: str) -> Topic:
    slots = tuple(TopicSlot(one, 0, 4, is_writable=True) for one in shards)
    return Topic(name, 4, False, None, None, {}, 1, size, slots=slots)


def pair(name: str, hosts: str, leader: int = 0, **changes: object) -> ShardReport:
    members = [member(f"{name}{host}", host) for host in hosts]
    return shard(name, members, members[leader].name, **changes)


def spread(shards: Sequence[ShardReport]) -> Counter[str]:
    """Leaders of each host after the plan."""
    moved = {move.shard: move.after for move in balanced(shards, []).leaders}
    hosts = {one.name: one.address.rpartition(":")[0] for each in shards for one in each.members}
    return Counter(hosts[moved.get(each.name, each.leader or "")] for each in shards)


def test_leaders_that_are_spread_stay() -> None:
    shards = [pair("s1", "xy"), pair("s2", "xy"), pair("s3", "yx")]
    assert not balanced(shards, []).leaders


def test_leaders_move_over_a_third_host() -> None:
    # Both of x can only go to y, and only what y leads can go on to z.
    shards = [pair("s1", "xy"), pair("s2", "xy"), pair("s3", "yz")]
    assert spread(shards) == Counter(x=1, y=1, z=1)


def test_as_even_as_can_be_with_as_few_moves_as_needed() -> None:
    chance = random.Random(16)
    for _ in range(200):
        hosts = "vwxyz"[: chance.randint(2, 5)]
        shards = [pair(f"s{at}", "".join(chance.sample(hosts, 2))) for at in range(chance.randint(1, 6))]
        found = spread(shards)
        best = min(sorted(spread_of(shards, choice).values(), reverse=True) for choice in range(2 ** len(shards)))
        assert sorted(found.values(), reverse=True) == best
        if not (before := spread_of(shards, 0)).keys() - found.keys() and sorted(before.values(), reverse=True) == best:
            assert not balanced(shards, []).leaders


def spread_of(shards: Sequence[ShardReport], choice: int) -> Counter[str]:
    return Counter(each.members[choice >> at & 1].address.rpartition(":")[0] for at, each in enumerate(shards))


@pytest.mark.parametrize("unfit", ["is_drained", "is_doubtful"])
def test_a_member_that_must_not_lead_gets_nothing(unfit: str) -> None:
    second = [member("s2x", "x"), member("s2y", "y", **{unfit: True})]
    assert not balanced([pair("s1", "x"), shard("s2", second, "s2x")], []).leaders


def test_what_is_not_whole_is_named() -> None:
    shards = [
        shard("s1", [member("a", "x")], None),
        shard("s2", [member("b", "x"), member("c", "y", is_in_sync=False)], "b"),
    ]
    first, second = balanced(shards, []).obstacles
    assert first.startswith("shard s1 has no leader: dmq shard show s1")
    assert second.startswith("shard s2 is not whole, c is not in sync")


def test_a_new_shard_gets_the_largest_topics_until_it_has_its_share() -> None:
    shards = [pair("s1", "x"), pair("s2", "y"), pair("s3", "z")]
    topics = [topic("large", 900_000, "s1", "s2"), topic("small", 10_000, "s1", "s2"), topic("%DLQ%g", 9**9, "s1")]
    assert [(move.topic, move.shard, move.is_added) for move in balanced(shards, topics).slots] == [
        ("large", "s3", True)
    ]


def test_weights_say_how_much_a_shard_gets() -> None:
    shards = [pair("s1", "x", weight=300), pair("s2", "y", weight=0), pair("s3", "z", weight=100)]
    topics = [topic("t", 100, "s1"), topic("u", 100, "s1")]
    found = balanced(shards, topics).slots
    assert {(move.topic, move.shard) for move in found} == {("t", "s3"), ("u", "s3")}
    assert found[0].why == "shard s3 gets 0% of the load, and its weight is 25% of all"


def test_a_shard_that_leaves_loses_its_queues_but_never_the_last_ones() -> None:
    shards = [pair("s1", "x", state="leaving"), pair("s2", "y"), pair("s3", "z", state="read-only")]
    topics = [topic("t", 100, "s1", "s3"), topic("u", 100, "s1", "s2")]
    found = [(move.topic, move.shard, move.is_added) for move in balanced(shards, topics).slots]
    assert found == [("t", "s2", True), ("t", "s1", False), ("u", "s1", False)]
    only = [pair("s1", "x", state="leaving")]
    assert not balanced(only, [topic("t", 100, "s1")]).slots
