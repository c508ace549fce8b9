"""Shards of real processes whose network parts, whose leaders stand still, and whose clocks are set.

What must hold is said in `tests.integration.shard.torture`. `./scripts/soak` does more of each.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
from tests.integration.shard.torture import PATIENCE, REGISTRY, Torture, between
from tests.sampling import sample_size

pytestmark = pytest.mark.uncounted

HOUR = 3600.0
# Sessions of 6 s, promises of 4 s: as a shard is by itself.
PLAIN = ("store.ballast_bytes=0", "broker.grace_seconds=30")


# --- partitions -------------------------------------------------------------------------------------------------------


def leader_is_cut_off(torture: Torture) -> None:
    """From the others and the registry; clients reach it all the same."""
    leader = torture.shard.leader()
    began = time.monotonic()
    cut = [way for other in torture.others(leader) for way in between(f"b{leader}", f"b{other}")]
    torture.wires.block([*cut, *between(f"b{leader}", REGISTRY)])
    torture.until_led_by_another(leader)
    torture.until_served(began)


def registry_is_cut_off_from_the_leader(torture: Torture) -> None:
    """Nobody notices: the members hear each other."""
    leader, epoch = torture.shard.leader(), torture.epoch()
    torture.wires.block(between(f"b{leader}", REGISTRY))
    time.sleep(1.6 * torture.session_seconds)
    torture.until_served()
    torture.wires.mend()
    assert (torture.epoch(), torture.shard.leader()) == (epoch, leader), "a failover, though members heard each other"


def leader_is_not_heard(torture: Torture) -> None:
    """One way: it hears the others, and they do not hear it."""
    leader = torture.shard.leader()
    began = time.monotonic()
    torture.wires.block([(f"b{leader}", f"b{other}") for other in torture.others(leader)])
    torture.until_led_by_another(leader)
    torture.until_served(began)


def leader_does_not_hear(torture: Torture) -> None:
    """The other way: they follow it, and it cannot know."""
    leader = torture.shard.leader()
    began = time.monotonic()
    torture.wires.block([(f"b{other}", f"b{leader}") for other in torture.others(leader)])
    torture.until_led_by_another(leader)
    torture.until_served(began)


def leader_and_follower_are_cut_off(torture: Torture) -> None:
    """Neither side has both a majority of the set and the registry: nobody serves until it is mended."""
    leader = torture.shard.leader()
    other, third = torture.others(leader)
    inside = (f"b{leader}", f"b{other}")
    torture.wires.block([way for one in inside for away in (f"b{third}", REGISTRY) for way in between(one, away)])
    time.sleep(2 * torture.session_seconds + torture.rng.uniform(0, 2))


def registry_is_cut_off_from_all(torture: Torture) -> None:
    leader, epoch = torture.shard.leader(), torture.epoch()
    torture.wires.block([way for number in range(3) for way in between(f"b{number}", REGISTRY)])
    time.sleep(1.6 * torture.session_seconds)
    torture.until_served()
    torture.wires.mend()
    assert (torture.epoch(), torture.shard.leader()) == (epoch, leader), "a failover, though members heard each other"


PARTITIONS = (
    registry_is_cut_off_from_the_leader,
    leader_is_cut_off,
    leader_is_not_heard,
    leader_and_follower_are_cut_off,
    leader_does_not_hear,
    registry_is_cut_off_from_all,
)


def zookeeper_is_down(torture: Torture, seconds: float) -> None:
    """Nobody notices, however long."""
    leader, epoch = torture.shard.leader(), torture.epoch()
    torture.sender.slowest = 0.0
    torture.zookeeper.kill()
    served = len(torture.sender.answered)
    time.sleep(seconds)
    assert len(torture.sender.answered) > served + seconds, "messages were taken all the while"
    torture.zookeeper.start()
    # And stands still, which nobody is told.
    torture.zookeeper.signal(signal.SIGSTOP)
    time.sleep(1.2 * torture.session_seconds)
    torture.zookeeper.signal(signal.SIGCONT)
    torture.until_served()
    assert (torture.epoch(), torture.shard.leader()) == (epoch, leader), "a failover"
    assert torture.sender.errors == []


def follower_starts_without_a_registry(torture: Torture) -> None:
    """It waits, and says so; the shard stands still with it, since no set can change."""
    follower = torture.others(torture.shard.leader())[0]
    torture.zookeeper.kill()
    torture.shard.members[follower].kill()
    torture.shard.members[follower].start()
    torture.until_told(follower, "the registry does not answer: this member waits for it")
    with (
        dmq.connect(torture.shard.members[follower].url, app="test", any_member=True, timeout=5) as client,
        pytest.raises(dmq.NotLeader, match="does not lead it"),
    ):
        client.admin.topics()
    torture.zookeeper.start()


def sessions_end(torture: Torture, count: int) -> None:
    """Of the leader and of others, by force: nobody notices."""
    leader, epoch = torture.shard.leader(), torture.epoch()
    for number in range(count):
        torture.expire(leader if number % 2 == 0 else torture.rng.choice(torture.others(leader)))
        torture.until_served()
        assert (torture.epoch(), torture.shard.leader()) == (epoch, leader), "a failover"
    assert torture.sender.errors == []


def leader_is_killed(torture: Torture) -> None:
    """And comes back when another one serves."""
    leader = torture.shard.leader()
    began = time.monotonic()
    torture.shard.members[leader].kill()
    torture.until_served(began)
    torture.shard.members[leader].start()


@pytest.mark.sampled
def test_nothing_is_lost_and_never_two_serve_whatever_befalls_the_network_and_zookeeper(tmp_path: Path) -> None:
    with Torture(tmp_path, "partitions") as torture:
        zookeeper_is_down(torture, 2.5 * torture.session_seconds)
        sessions_end(torture, sample_size(share=3, whole=20))
        for number in range(sample_size(share=3, whole=24)):
            happen: Callable[[Torture], None] = PARTITIONS[number % len(PARTITIONS)]
            happen(torture)
            torture.mended()
        follower_starts_without_a_registry(torture)
        torture.mended()
        print(torture.finish())


@pytest.mark.soak
def test_a_zookeeper_that_is_down_for_ten_minutes_stops_nobody(tmp_path: Path) -> None:
    with Torture(tmp_path, "ZooKeeper down", session_seconds=6.0, settings=PLAIN) as torture:
        zookeeper_is_down(torture, 600.0)
        assert not torture.ledger.refused, torture.ledger.refused
        print(torture.finish())


def fill(torture: Torture, count: int) -> None:
    """Messages that wait."""
    with dmq.connect(torture.shard.url, app="filler", timeout=PATIENCE) as client:
        client.admin.create_topic("backlog", queues=4)
        client.admin.create_group("later", "backlog")
        with client.producer(timeout=60) as producer:
            bodies = [dmq.Message(b"%d" % number) for number in range(5000)]
            for _ in range(0, count, len(bodies)):
                producer.send_many("backlog", bodies)


@pytest.mark.soak
def test_a_backlog_does_not_delay_the_next_leader(tmp_path: Path) -> None:
    """Kills with 0 and with 10 million messages behind."""
    medians = []
    for name, count in (("empty", 0), ("backlog", 10_000_000)):
        with Torture(tmp_path / name, name, session_seconds=6.0, settings=PLAIN, is_loaded=False) as torture:
            fill(torture, count)
            for _ in range(5):
                leader_is_killed(torture)
                torture.mended()
            medians.append(statistics.median(torture.seconds))
            print(torture.finish())
    assert medians[1] <= 1.2 * medians[0], medians


@pytest.mark.soak
def test_another_member_leads_within_ten_seconds_of_a_kill(tmp_path: Path) -> None:
    with Torture(tmp_path, "leaders killed", session_seconds=6.0, settings=PLAIN) as torture:
        for _ in range(30):
            time.sleep(torture.rng.uniform(0, 2))
            leader_is_killed(torture)
            torture.mended()
        seconds = sorted(torture.seconds)
        print(f"served again after {', '.join(f'{one:.1f}' for one in seconds)} s")
        print(torture.finish())
        assert seconds[round(0.95 * len(seconds)) - 1] <= 10.0, seconds


# --- leaders that stand still, and clocks -----------------------------------------------------------------------------


@pytest.mark.soak
def test_nothing_is_lost_and_never_two_serve_when_leaders_stand_still(tmp_path: Path) -> None:
    with Torture(tmp_path, "leaders frozen") as torture:
        for _ in range(10):
            leader = torture.shard.leader()
            began = time.monotonic()
            os.kill(torture.shard.members[leader].pid, signal.SIGSTOP)
            try:
                torture.until_led_by_another(leader)
                torture.until_served(began)
                time.sleep(torture.rng.uniform(0.0, 2.0))
            finally:
                os.kill(torture.shard.members[leader].pid, signal.SIGCONT)
            torture.mended()
        print(torture.finish())


@pytest.mark.soak
def test_no_delay_fires_early_when_clocks_of_followers_are_set(tmp_path: Path) -> None:
    """A member whose clock is an hour ahead stands last: delays are still by a clock that is right."""
    with Torture(tmp_path, "clocks of followers") as torture:
        for step in (HOUR, -HOUR):
            leader = torture.shard.leader()
            wrong, right = torture.others(leader)
            torture.shard.step_clock(wrong, step)
            torture.until_served()
            began = time.monotonic()
            torture.shard.members[leader].kill()
            torture.until_served(began)
            if step > 0:  # of two clocks the earlier one is believed: nothing comes early by that
                assert torture.shard.leader() == right, "the member whose clock is an hour ahead leads"
            torture.shard.step_clock(wrong, 0)
            torture.shard.members[leader].start()
            torture.mended()
            if torture.shard.leader() == wrong:  # it goes by the time from before, and its log says what to do
                torture.until_told(wrong, "the machine's clock was set")
                torture.hand_over(leader)
        print(torture.finish())


@pytest.mark.soak
def test_no_delay_fires_early_beyond_the_skew_when_the_clock_of_a_leader_is_set(tmp_path: Path) -> None:
    """An hour ahead, messages may come an hour early, and not more; nobody else notices the step."""
    with Torture(tmp_path, "clocks of leaders") as torture:
        torture.delays.skew_seconds = HOUR
        leader, epoch = torture.shard.leader(), torture.epoch()
        for step in (HOUR, 0.0, -HOUR, 0.0):
            torture.shard.step_clock(leader, step)
            time.sleep(2 * torture.session_seconds)
            torture.until_served()
        assert (torture.epoch(), torture.shard.leader()) == (epoch, leader), "a failover for a wall clock"
        torture.mended()
        print(torture.finish())
