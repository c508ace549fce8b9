"""`dmq cluster balance` over three shards of two members each, on hosts of two names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dmq
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster-balance")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = Path(tmp_path_factory.mktemp("balance"))
    with ClusterProcesses(folder, replicas=2, hosts=("127.0.0.1", "localhost")) as running:
        yield running


def balance(cluster: ClusterProcesses, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = run("cluster", "balance", "--url", cluster.url, "--format", "json", *arguments)
    assert done.code == code, done.err
    found: dict[str, Any] = json.loads(done.out) if done.out else {"error": done.err}
    return found


def leaders(cluster: ClusterProcesses) -> Counter[str]:
    """How many leaders each host has: members a are on one, and b on the other."""
    return Counter(cluster.leader(shard)[-1] for shard in cluster.shards)


def test_leaders_and_topics_are_spread_and_nothing_moves_unless_it_is_said(cluster: ClusterProcesses) -> None:
    for shard in cluster.shards:
        if cluster.leader(shard)[-1] == "b":
            eventually(lambda: run("shard", "handover", shard, "--url", cluster.url).code == 0)  # noqa: B023
    eventually(lambda: leaders(cluster) == Counter(a=3))
    with dmq.connect(cluster.url, timeout=30) as client:
        client.admin.create_topic("wide", queues=2)
        client.admin.create_topic("narrow", queues=2)
        client.admin.place_topic("narrow", remove="s2", force=True)
        client.producer(timeout=30).send_many("narrow", [dmq.Message(b"x" * 1000)] * 500)

        eventually(lambda: not balance(cluster)["obstacles"])
        planned = balance(cluster)
        (leader, slot) = planned["moves"]
        assert (leader["move"], leader["from"][-1], leader["to"][-1], leader["done"]) == ("leader", "a", "b", False)
        assert leader["why"] == "127.0.0.1 has 3 leaders, and localhost has 0"
        assert (slot["move"], slot["of"], slot["from"], slot["to"]) == ("queues", "narrow", None, "s2")
        assert leaders(cluster) == Counter(a=3)

        done = balance(cluster, "--execute")
        assert [move["done"] for move in done["moves"]] == [True, True]
        assert leaders(cluster) == Counter(a=2, b=1)
        slots = {slot.shard: slot.is_writable for slot in client.admin.topic("narrow").slots}
        assert slots == {"s1": True, "s2": True, "s3": True}
        assert balance(cluster) == {"moves": [], "obstacles": []}


def test_nothing_moves_while_a_shard_is_not_whole(cluster: ClusterProcesses) -> None:
    follower = next(name for name in ("s3a", "s3b") if name != cluster.leader("s3"))
    cluster.members[follower].kill()
    try:
        eventually(lambda: balance(cluster)["obstacles"])
        assert f"shard s3 is not whole, {follower} is not in sync" in balance(cluster)["obstacles"][0]
        refused = balance(cluster, "--execute", code=1)["error"]
        assert refused.startswith("dmq: nothing was moved: shard s3 is not whole"), refused
    finally:
        cluster.start_all()
