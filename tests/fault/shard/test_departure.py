"""A member that is told to stop ends soon, whatever answers it: in virtual time, so it says by the second how soon."""

from __future__ import annotations

import pytest

from tests.fault.shard.cluster import Cluster
from tests.fault.shard.scenario import roles, run

SOON_SECONDS = 6.0
SCALE = 10.0  # a session of a minute: what waits for the registry as long as that may take is not there soon


@pytest.mark.parametrize("silent_seconds", [0.0, 20.0])
@pytest.mark.parametrize("way", ["requests", "answers"])
def test_members_that_stop_do_not_wait_for_a_silent_registry(way: str, silent_seconds: float) -> None:
    with Cluster(1, chances={}, scale=SCALE) as cluster:
        cluster.start()
        cluster.await_progress("whole", cluster.is_whole)
        for process in cluster.processes:
            process.line.loses_requests, process.line.loses_answers = way == "requests", way == "answers"
        cluster.pass_time(silent_seconds)
        for process in cluster.processes:
            process.stop(hand_over=True)
        cluster.pass_time(SOON_SECONDS, lambda: all(process.member is None for process in cluster.processes))
        assert [process.name for process in cluster.processes if process.member is not None] == []


def test_a_leader_that_stops_hands_over_first() -> None:
    def stop_leader(cluster: Cluster) -> None:
        leader, one, other = roles(cluster)
        leader.stop(hand_over=True)
        cluster.pass_time(SOON_SECONDS, lambda: leader.member is None and cluster.leader in (one, other))
        assert leader.member is None
        assert cluster.leader in (one, other)

    assert [what for _, _, what in run(stop_leader).history if "handed over to" in what]
