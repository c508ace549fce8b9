"""What a person is told of a shard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dmq.protocol.cluster.shard import Severity
from dmq.registry.contents import LeaderContent, ShardContent, ShardState, hex_id
from dmq.shard.admin.overview import Overview, Sighting, overview_of
from dmq.shard.election import Obstacle
from tests.unit.shard.admin.shard_scene import A, B, C, node, record, reply

NOBODY_STANDS = {"last_epoch": 7, "role": "waiting"}


def sight(content: ShardContent | None = None, *, leader: int | None = A, **more: Any) -> Overview:
    fields: dict[str, Any] = {
        "nodes": {name: node(name) for name in "abc"},
        "said": {name: reply(name) for name in "abc"},
        "skews": {},
    }
    content = content or record()
    held = None if leader is None else LeaderContent(replica=hex_id(leader), epoch=7)
    return overview_of(Sighting(name="s1", record=content, version=3, leader=held, **fields | more))


def without(*names: str) -> dict[str, Any]:
    """Nodes and answers of all but these."""
    there = [name for name in "abc" if name not in names]
    return {"nodes": {name: node(name) for name in there}, "said": {name: reply(name) for name in there}}


def told(view: Overview) -> list[tuple[Severity, str]]:
    return [(found.severity, found.what) for found in view.findings]


def test_a_sound_shard_has_nothing_to_tell() -> None:
    view = sight()
    assert told(view) == [(Severity.OK, "a leads in epoch 7; 3 of 3 are in sync")]
    assert [(one.name, one.role, one.lag, one.is_in_sync) for one in view.members] == [
        ("a", "leader", 0, True),
        ("b", "follower", 0, True),
        ("c", "follower", 0, True),
    ]


def test_a_member_that_does_not_run_is_not_in_sync_though_the_record_keeps_it() -> None:
    view = sight(**without("c"))
    gone = view.member("c")
    assert gone is not None
    assert gone.is_recorded
    assert not gone.is_in_sync
    assert gone.role == "down"
    assert gone.lag is None
    assert told(view) == [
        (Severity.WARNING, "only 2 of 3 are in sync: with one less, sends are refused"),
        (Severity.WARNING, "c does not run"),
    ]
    assert "--remove c" in view.findings[1].advice


def test_too_few_in_sync_says_how_sends_go_on() -> None:
    view = sight(record(in_sync=[hex_id(A), hex_id(B)]), **without("b", "c"))
    first = view.findings[0]
    assert first.severity is Severity.PROBLEM
    assert "NOT_ENOUGH_REPLICAS" in first.what
    assert "dmq shard set s1 --min-in-sync 1" in first.advice


def test_a_follower_that_catches_up_is_told_with_its_lag() -> None:
    said = {name: reply(name) for name in "ab"} | {"c": reply("c", end=400)}
    view = sight(record(in_sync=[hex_id(A), hex_id(B)]), said=said)
    assert (Severity.WARNING, "c runs and is not in sync, 600 bytes behind") in told(view)


def test_a_follower_that_lost_its_session_and_keeps_up_is_in_sync() -> None:
    gone = without("b", "c")
    view = sight(**gone | {"said": {"a": reply("a", keeping_up=[B])}})
    assert [(one.name, one.role, one.is_in_sync) for one in view.members] == [
        ("a", "leader", True),
        ("b", "follower", True),
        ("c", "down", False),
    ]
    assert told(view) == [
        (Severity.WARNING, "only 2 of 3 are in sync: with one less, sends are refused"),
        (Severity.WARNING, "b follows and is not registered: its session with the registry is lost"),
        (Severity.WARNING, "c does not run"),
    ]


def test_a_leader_without_its_session_is_still_the_leader() -> None:
    view = sight(leader=None)
    assert view.leader == "a"
    assert view.findings[0].severity is Severity.WARNING
    assert "promises" in view.findings[0].what
    silent = {"a": reply("a", right="none")}
    assert sight(leader=None, said=silent).leader == ""


def test_a_leader_that_only_its_followers_reach_is_not_taken_for_one_that_does_not_run() -> None:
    """The registry lost its session, so that nobody knows where to ask it."""
    view = sight(record(leader=hex_id(A)), leader=None, **without("a"))
    assert view.leader == ""
    assert told(view) == [
        (
            Severity.WARNING,
            "a leads without its entry in the registry, as b, c hear: its session was lost, and it serves by the "
            "promises of its followers",
        )
    ]
    a = view.member("a")
    assert a is not None
    assert (a.role, a.is_in_sync) == ("unknown", True)
    silent = {"nodes": {n: node(n) for n in "bc"}, "said": {n: reply(n, silent_ms=2000) for n in "bc"}}
    whats = [what for _, what in told(sight(record(leader=hex_id(A)), leader=None, **silent))]
    assert "a does not run" in whats
    assert any(what.startswith("there is no leader") for what in whats)


def test_a_leader_that_may_not_answer_is_a_problem() -> None:
    view = sight(said={name: reply(name) for name in "bc"} | {"a": reply("a", right="none")})
    assert view.leader == "a"
    assert view.findings[0].severity is Severity.PROBLEM


def test_a_leader_whose_port_is_blocked_is_told() -> None:
    view = sight(said={name: reply(name) for name in "bc"})
    assert "does not answer on its port for members at a:9613" in view.findings[0].what


def test_followers_that_do_not_answer_are_told() -> None:
    view = sight(said={"a": reply("a"), "b": reply("b")})
    assert told(view) == [(Severity.WARNING, "c does not answer on its port for members at c:9613")]


def test_a_leader_whose_writes_are_not_committed_is_a_problem() -> None:
    view = sight(said={"a": reply("a", stalled_ms=7200), "b": reply("b")})
    first = view.findings[0]
    assert first.severity is Severity.PROBLEM
    assert first.what == "what a writes has not been committed for 7 s: sends wait for c"
    assert told(sight(said={name: reply(name, stalled_ms=300) for name in "abc"}))[0][0] is Severity.OK


SILENT = {
    "b": reply("b", role="waiting", silent_ms=3400, obstacle=Obstacle.LED),
    "c": reply("c", silent_ms=2900),
}


def test_a_leader_that_nobody_hears_is_a_problem_that_an_election_ends() -> None:
    view = sight(said=SILENT, session_seconds=6.0)
    first = view.findings[0]
    assert first.severity is Severity.PROBLEM
    assert first.what == "the leader a does not answer, and b, c have heard nothing of it for 3 s: sends wait"
    assert "within 6 s" in first.advice
    assert "an election follows" in first.advice


def test_a_leader_that_one_member_hears_serves() -> None:
    view = sight(said=SILENT | {"c": reply("c", silent_ms=400)}, session_seconds=6.0)
    assert "does not answer on its port for members" in view.findings[0].what
    assert view.findings[0].severity is Severity.WARNING


@pytest.mark.parametrize(
    ("more", "what", "advice"),
    [
        (without("a", "b", "c"), "no member of the in-sync set runs (a, b, c)", "nobody else runs"),
        (
            {"nodes": {"b": node("b")}, "said": {"b": reply("b", role="waiting", obstacle="none")}},
            "an election is due among b",
            "ask again",
        ),
        (
            {
                "nodes": {"b": node("b")},
                "said": {"b": reply("b", role="waiting", promise_ms=2100, obstacle=Obstacle.PROMISED)},
            },
            "b stands in 2.1 s",
            "wait",
        ),
        (
            {"nodes": {"b": node("b")}, "said": {"b": reply("b", role="waiting", obstacle="its tail was cut")}},
            "b does not stand: its tail was cut",
            "start a, c, to compare with; or, if what it lacks may be lost, dmq shard promote b --accept-loss",
        ),
        (
            {"nodes": {"b": node("b")}, "said": {"b": reply("b", role="parked", obstacle="its journal has diverged")}},
            "b does not stand: its journal has diverged",
            "look into its log",
        ),
        (
            {"said": {"b": reply("b", obstacle=Obstacle.FOLLOWING), "c": reply("c", obstacle=Obstacle.FOLLOWING)}},
            "b does not stand: it still follows",
            "wait, and ask again in a few seconds",
        ),
        (
            {"nodes": {"b": node("b")}, "said": {"b": reply("b", role="waiting", obstacle=Obstacle.DRAINED)}},
            "b does not stand: it is drained",
            "dmq shard drain b --undo",
        ),
    ],
)
def test_a_shard_without_a_leader_says_why_and_what_to_do(more: dict[str, Any], what: str, advice: str) -> None:
    view = sight(leader=None, **more)
    first = view.findings[0]
    assert view.leader == ""
    assert first.severity is Severity.PROBLEM
    assert first.what.startswith("there is no leader")
    assert what in first.what
    assert advice in first.advice
    assert not first.advice.startswith("or")


def test_if_the_set_is_gone_the_furthest_of_the_others_is_named() -> None:
    said = {"b": reply("b", role="waiting", end=500), "c": reply("c", role="waiting", end=800)}
    nodes = {name: node(name) for name in "bc"}
    view = sight(record(in_sync=[hex_id(A)], min_in_sync=1), leader=None, nodes=nodes, said=said)
    assert "(a)" in view.findings[0].what
    assert "dmq shard promote c --accept-loss" in view.findings[0].advice


def test_a_set_whose_disk_was_replaced_is_named_by_its_replica() -> None:
    view = sight(record(in_sync=[hex_id(0xDEAD)]), leader=None, **without("a", "b", "c"))
    assert "replica 000000000000dead" in view.findings[0].what


def test_an_old_copy_of_the_registry_is_told_first() -> None:
    view = sight(said={name: reply(name, revision=9) for name in "abc"})
    assert view.is_stale
    assert "revision 5" in view.findings[0].what
    assert "seen 9" in view.findings[0].what


def test_a_place_that_nobody_takes_can_be_given_up() -> None:
    (found,) = sight(record(replicas=4)).findings
    assert found.what == "3 of 4 members have joined"
    assert found.advice.endswith("; dmq shard set s1 --replicas 3 if none is to come")


def test_the_clock_that_is_wrong_is_told_and_not_those_that_differ_from_it() -> None:
    hour = 3_600_000
    clocks = [
        ({"b": 20 - hour, "c": -hour}, [f"the clock of a is {hour - 20} ms ahead"]),  # a was asked
        ({"b": 20, "c": -hour}, [f"the clock of c is {hour} ms behind"]),
    ]
    for skews, told_of in clocks:
        view = sight(skews=skews)
        assert [what for _, what in told(view) if what.startswith("the clock of")] == told_of
    two = sight(**without("c") | {"skews": {"b": -hour}})
    assert "the clock of b is 3600000 ms behind" in [what for _, what in told(two)]


def test_a_broker_with_another_disk_joins_by_itself() -> None:
    nodes = {name: node(name) for name in "ab"} | {"c": node("c", replica=hex_id(0xCC))}
    view = sight(nodes=nodes, said={name: reply(name) for name in "ab"})
    assert any("c runs with another data directory, in the place of replica" in what for _, what in told(view))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"said": {**{n: reply(n) for n in "ab"}, "c": reply("c", damaged=2)}}, "c has 2 damaged ranges"),
        (
            {"said": {**{n: reply(n) for n in "ab"}, "c": reply("c", obstacle=Obstacle.LEADER_DAMAGED)}},
            "c cannot follow: the journal of a is damaged, and no member has given what is missing",
        ),
        ({"said": {**{n: reply(n) for n in "ab"}, "c": reply("c", is_full=True)}}, "the disk of c is full"),
        ({"skews": {"b": -700}}, "the clock of b is 700 ms behind"),
        ({"nodes": {n: node(n, zone="z1" if n in "ab" else "z2") for n in "abc"}}, "a, b are in one zone, z1"),
    ],
)
def test_what_else_a_person_should_know(more: dict[str, Any], what: str) -> None:
    view = sight(**more)
    assert view.findings[0].severity is Severity.WARNING
    assert any(what in said for _, said in told(view))


def test_a_leader_whose_disk_is_full_is_a_problem_and_another_may_lead() -> None:
    view = sight(said={**{n: reply(n) for n in "bc"}, "a": reply("a", role="leading", is_full=True)})
    assert view.findings[0].severity is Severity.PROBLEM
    assert "DISK_FULL" in view.findings[0].what
    assert "dmq shard handover" in view.findings[0].advice


def test_a_shard_with_fewer_members_than_replicas_or_one_that_is_closed_is_told() -> None:
    members = {"a": hex_id(A), "b": hex_id(B)}
    view = sight(record(members=members, in_sync=[hex_id(A), hex_id(B)], state=ShardState.READ_ONLY))
    assert [what for _, what in told(view)] == [
        "only 2 of 3 are in sync: with one less, sends are refused",
        "2 of 3 members have joined",
        "the shard is read-only: it takes no messages",
    ]


def test_a_shard_of_one_is_sound() -> None:
    lone = record(members={"a": hex_id(A)}, in_sync=[hex_id(A)], min_in_sync=1, replicas=1)
    assert told(sight(lone, **without("b", "c"))) == [(Severity.OK, "a leads in epoch 7; 1 of 1 are in sync")]


def test_a_replica_that_no_member_has_may_hold_the_entry() -> None:
    assert sight(record(members={"a": hex_id(A), "b": hex_id(B)}), leader=C).leader == hex_id(C)


def runbook(root: Path) -> list[str]:
    """What the pages for people say that a shard says."""
    text = (root / "docs" / "guide" / "when-things-go-wrong.md").read_text()
    chapters = text.split("## A shard has no leader")[1].split("## Damage")[0]
    tables = re.findall(r"^\| it says .*?(?=^$)", chapters, re.MULTILINE | re.DOTALL)
    return [found for table in tables for found in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]


def test_the_runbook_quotes_what_is_said(root: Path) -> None:
    waiting = {name: reply(name, role="waiting") for name in "bc"}
    cut = Obstacle.DOUBTFUL
    late = reply("b", obstacle=Obstacle.FOLLOWING, promise_ms=2000, silent_ms=2000)
    promised = reply("b", role="waiting", obstacle=Obstacle.PROMISED, promise_ms=2100)
    pair = [hex_id(A), hex_id(B)]
    scenes = [
        sight(leader=None, **without("a", "c") | {"said": {"b": promised}}),
        sight(leader=None, **without("a") | {"said": waiting}),
        sight(record(in_sync=pair), leader=None, **without("a", "b")),
        sight(leader=None, **without("a", "c") | {"said": {"b": reply("b", role="waiting", obstacle=cut)}}),
        sight(leader=None, **without("a", "c") | {"said": {"b": late}}),
        sight(leader=None, **without("a")),
        sight(said={name: reply(name, revision=9) for name in "abc"}),
        sight(
            said={**{n: reply(n) for n in "ab"}, "c": reply("c", role="parked", obstacle="its journal has diverged")}
        ),
        sight(said=SILENT),
        sight(said={"a": reply("a", stalled_ms=7200), "b": reply("b")}),
        sight(**without("b") | {"said": {"a": reply("a", keeping_up=[B])}}),
        sight(**without("b", "c")),
        sight(**without("c")),
        sight(**without("b", "c") | {"said": {"a": reply("a", keeping_up=[B])}}),
        sight(record(in_sync=pair), said={name: reply(name, end=1000 if name in "ab" else 400) for name in "abc"}),
        sight(said={"a": reply("a", right="none")}),
        sight(said={name: reply(name) for name in "bc"}),
        sight(said={"a": reply("a"), "b": reply("b", obstacle=Obstacle.LEADER_DAMAGED), "c": reply("c")}),
        sight(said={"a": reply("a", is_full=True), "b": reply("b", is_full=True), "c": reply("c")}),
    ]
    said = [found.what for view in scenes for found in view.findings]
    quoted = runbook(root)
    assert len(quoted) == 20
    assert [quote for quote in quoted if not any(quote in what for what in said)] == []
