"""The record that is built from what members say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dmq.errors import InvalidSettings, ShardConflict
from dmq.protocol.cluster.member import MemberState
from dmq.registry.contents import ShardContent, encode_content, hex_id
from dmq.shard.admin.rebuilt_record import rebuilt_record
from tests.unit.shard.admin.shard_scene import CLUSTER, IDS, A, B, C, record


def state(name: str, kept: ShardContent | None = None, **more: Any) -> MemberState:
    kept = record() if kept is None else kept
    fields: dict[str, Any] = {
        "broker": name,
        "cluster": CLUSTER,
        "shard": "s1",
        "journal": "000000000000000f",
        "replica": hex_id(IDS[name]),
        "life": 3,
        "revision": kept.revision,
        "last_epoch": 7,
        "end": 1000,
        "committed": 900,
        "record": encode_content(kept),
    }
    return MemberState(**fields | more)


def rebuilt(*states: MemberState, found: ShardContent | None = None, accept_loss: bool = False) -> ShardContent:
    made = rebuilt_record("s1", states, found, accept_loss=accept_loss)
    assert made is not None
    return made


def test_a_record_that_is_as_new_as_any_is_kept() -> None:
    assert rebuilt_record("s1", [state("a"), state("b")], record(), accept_loss=False) is None
    assert rebuilt_record("s1", [state("a")], record(revision=9), accept_loss=False) is None


def test_of_all_members_the_furthest_of_the_newest_epoch_has_everything() -> None:
    old = record(revision=2, epoch=3, in_sync=[hex_id(C)], min_in_sync=1)
    made = rebuilt(state("a", end=5000), state("b", last_epoch=8, end=1100), state("c"), found=old)
    assert (made.in_sync, made.leader, made.epoch, made.unsafe) == ([hex_id(B)], None, 8, 0)
    assert made.revision == 6  # above every one that was seen
    assert made.min_in_sync == 2  # of the newest record, not of the registry's
    assert made.lives == {hex_id(one): 3 for one in IDS.values()}
    assert made.journal == "000000000000000f"


def test_a_leader_that_serves_by_promises_goes_on_with_its_set() -> None:
    newest = record(revision=9, in_sync=[hex_id(A), hex_id(B)])
    leader = state("a", newest, role="leading", mark="00000000000000aa")
    made = rebuilt(leader, state("b", end=2000), found=record(revision=2))
    assert (made.leader, made.epoch, made.in_sync, made.revision) == (hex_id(A), 7, [hex_id(A), hex_id(B)], 10)
    assert made.marks[hex_id(A)] == "00000000000000aa"
    # One that leads an epoch which no record has yet is sure of itself alone.
    made = rebuilt(state("b", role="leading", last_epoch=8), state("a"), state("c"))
    assert (made.leader, made.epoch, made.in_sync) == (hex_id(B), 8, [hex_id(B)])
    # One of an epoch that is over is passed over.
    made = rebuilt(state("a", role="leading"), state("b", last_epoch=8), state("c"))
    assert (made.leader, made.in_sync) == (None, [hex_id(B)])


def test_fewer_missing_than_have_every_message_lose_nothing() -> None:
    made = rebuilt(state("b", end=1200), state("c"))  # two of three have every message, so one of these has
    assert (made.in_sync, made.unsafe) == ([hex_id(B)], 0)
    assert made.members == record().members


@pytest.mark.parametrize(
    "states",
    [
        [state("b")],
        [state("b"), state("c", is_doubtful=True)],
        [state("b", record(members={"a": hex_id(A), "b": hex_id(B)}))],
        [state("b", record(min_in_sync=1)), state("c", record(min_in_sync=1))],
        [state("b", record(asynchronous=True)), state("c", record(asynchronous=True))],
    ],
)
def test_what_may_be_lost_is_accepted_by_a_person(states: list[MemberState]) -> None:
    with pytest.raises(ShardConflict, match=r"nothing was changed: .*did not answer.*--accept-loss"):
        rebuilt(*states)
    made = rebuilt(*states, accept_loss=True)
    assert (made.in_sync, made.unsafe) == ([hex_id(B)], 8)


def test_an_asynchronous_shard_is_its_leader_s() -> None:
    kept = record(asynchronous=True, in_sync=[hex_id(A)])
    assert rebuilt(state("a", kept, end=2000)).in_sync == [hex_id(A)]


def test_a_registry_without_a_record_and_members_that_kept_none_begin_anew() -> None:
    made = rebuilt(state("a", record=b""), state("b", record=b"{"), state("c", record=b"", end=1001))
    assert (made.number, made.in_sync) == (0, [hex_id(C)])
    assert made.members == record().members


def test_who_was_removed_or_replaced_does_not_count() -> None:
    newest = record(revision=9, members={"a": hex_id(A), "b": hex_id(B)}, removed={hex_id(C): "c"})
    made = rebuilt(state("a", newest), state("b", newest), state("c", end=9999))
    assert made.in_sync == [hex_id(A)]  # among equals the last leader
    with pytest.raises(InvalidSettings, match="none of them is a member"):
        rebuilt(state("c", newest))


def test_members_of_two_shards_are_told_apart() -> None:
    with pytest.raises(InvalidSettings, match="not members of one shard"):
        rebuilt(state("a"), msgspec.structs.replace(state("b"), journal="0000000000000001"))
