"""A shard of real processes, operated as a person does it: with `dmq shard`, against any member that answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dmq
from tests.integration.cli.test_commands import dmq as run
from tests.integration.shard.processes import ShardProcesses

pytestmark = pytest.mark.uncounted


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardProcesses]:
    with ShardProcesses(Path(tmp_path_factory.mktemp("operated"))) as running:
        with dmq.connect(running.url, timeout=30) as client:
            client.admin.create_topic("t", queues=1)
        send(running, b"before")  # each test finds it, whichever of them run in this process
        yield running


def show(shard: ShardProcesses) -> dict[str, Any]:
    done = run("shard", "show", "--url", shard.url, "--format", "json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def send(shard: ShardProcesses, body: bytes) -> None:
    with dmq.connect(shard.url, timeout=30) as client:
        client.producer(timeout=30).send("t", body, durability="replicated")


def bodies(shard: ShardProcesses) -> list[bytes]:
    with dmq.connect(shard.url, timeout=30) as client:
        return [message.body for message in client.admin.peek("t", queue=0)]


def test_a_hand_over_is_asked_of_any_member(shard: ShardProcesses) -> None:
    before = show(shard)
    to = next(row["name"] for row in before["members"] if row["role"] == "follower")
    asked = next(
        member for member, row in zip(shard.members, before["members"], strict=True) if row["role"] == "follower"
    )
    checked = run("doctor", "--url", asked.url).out
    assert "it is a member of shard s1 that does not lead" in checked
    assert f"{before['leader']} leads in epoch {before['epoch']}; 3 of 3 are in sync" in checked
    done = run("shard", "handover", "--to", to, "--url", asked.url, "--format", "json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (facts["leader"], facts["epoch"]) == (to, before["epoch"] + 1)
    assert (
        run("shard", "handover", "--to", to, "--url", shard.url).err
        == f"dmq: {to} leads already: name another member\n"
    )
    assert bodies(shard) == [b"before"]


def test_what_is_damaged_is_mended_from_another_member(shard: ShardProcesses) -> None:
    # What a follower does not know to be committed it drops and fetches again by itself.
    shard.until(lambda found: all(one.end and one.end == one.committed for one in found.members), "not at rest")
    for number, folder in enumerate(shard.folders):
        (segment,) = (folder / "journal").glob("*.journal")
        whole = segment.read_bytes()
        at = whole.index(b"before")
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(b"BEFORE")
        done = run("shard", "repair", f"b{number}", "--url", shard.url)
        assert done.code == 0, done.err
        assert "is mended" in done.out
        assert segment.read_bytes()[: len(whole)] == whole


def test_a_shard_is_operated_down_to_one_member_and_back(shard: ShardProcesses) -> None:
    shard.until_whole()
    leader = shard.leader()
    kept, late = (number for number in range(3) if number != leader)
    shard.members[late].kill()
    shard.until(lambda found: len([one for one in found.members if one.is_electable]) == 2, "it stays in the set")
    facts = show(shard)
    gone = facts["members"][late]
    assert (gone["role"], gone["in_sync"], gone["electable"]) == ("down", False, False)
    send(shard, b"without")  # which the late one never gets

    # Nobody who has everything is left, and one that lacks something is.
    shard.members[leader].kill()
    shard.members[kept].kill()
    shard.members[late].start()
    shard.until(
        lambda found: not any(found.members[one].is_registered for one in (leader, kept)), "the dead are registered"
    )
    facts = show(shard)
    assert facts["leader"] is None
    assert facts["findings"][0]["what"].startswith("there is no leader: no member of the in-sync set runs")
    asked = run("shard", "promote", f"b{late}", "--url", shard.url)
    assert asked.code == 1
    assert f"what b{min(leader, kept)}, b{max(leader, kept)} acknowledged after that is lost" in asked.err
    done = run("shard", "promote", f"b{late}", "--accept-loss", "--url", shard.url)
    assert done.out.startswith(f"b{late} leads in epoch {facts['epoch'] + 1}. The leader before was b{leader}: "), done
    done = run("shard", "set", "--min-in-sync", "1", "--url", shard.url)
    assert done.out.startswith("min_in_sync is 1, replicas is 3\n"), done
    send(shard, b"after")
    assert bodies(shard) == [b"before", b"after"]

    # The others come back, and cut what was lost.
    shard.start_all()
    shard.until_whole()
    assert run("shard", "set", "--min-in-sync", "2", "--url", shard.url).code == 0
    assert show(shard)["health"] == "ok"
    assert shard.check_equal()
