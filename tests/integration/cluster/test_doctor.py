"""`dmq doctor` in a cluster of real processes: what is wrong with any shard, asked of a broker of another one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmq.testing.processes import free_port
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cli.test_commands import real as in_a_process
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def findings(cluster: ClusterProcesses) -> dict[str, list[dict[str, Any]]]:
    """What the doctor says of the cluster by way of the first shard, by what it is about."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(run("doctor", "--url", cluster.url_of("s1"), "--format", "json").out):
        found.setdefault(row["check"], []).append(row)
    return found


@pytest.fixture
def without_second(cluster: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The cluster while the only member of its second shard is dead."""
    cluster.members["s2a"].kill()
    try:
        yield cluster
    finally:
        cluster.start_all()
        cluster.until_led()


def test_a_cluster_that_is_well_is_said_to_be(cluster: ClusterProcesses) -> None:
    found = findings(cluster)
    (whole,), (registry,) = found["cluster"], found["registry"]
    assert whole["what"] == "shards: 3, brokers: 3; all are well, and reached from here"
    assert registry["what"].startswith(cluster.registry)
    assert [row["state"] for row in found["shard s1"]] == ["ok"]
    shown = json.loads(run("cluster", "show", "--url", cluster.url, "--format", "json").out)
    assert {shard["shard"]: shard["number"] for shard in shown["shards"]} == cluster.numbers
    assert all(broker["load"]["cpu"] > 0 for broker in shown["brokers"])


def test_a_shard_without_a_leader_is_told_by_the_broker_of_another(without_second: ClusterProcesses) -> None:
    def is_told() -> bool:
        rows = findings(without_second).get("shard s2", [])
        return any(row["state"] == "problem" and "no leader" in row["what"] and row["advice"] for row in rows)

    eventually(is_told)
    found = findings(without_second)
    assert "cluster" not in found
    assert [row["state"] for row in found["shard s1"]] == ["ok"]


def test_a_warning_about_the_shard_that_is_asked_is_not_contradicted(cluster: ClusterProcesses) -> None:
    assert run("shard", "set", "s1", "--replicas", "2", "--url", cluster.url).code == 0
    try:
        eventually(lambda: "warning" in [row["state"] for row in findings(cluster)["shard s1"]])
        assert "cluster" not in findings(cluster)
    finally:
        assert run("shard", "set", "s1", "--replicas", "1", "--url", cluster.url).code == 0


def test_an_export_that_cannot_be_written_says_so_and_leaves_nothing(cluster: ClusterProcesses, tmp_path: Path) -> None:
    done = run("cluster", "export", str(tmp_path / "nowhere" / "registry.json"), "--url", cluster.url)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("cannot be written: No such file or directory; its contents are unchanged\n")
    (tmp_path / "there").mkdir()
    done = run("cluster", "export", str(tmp_path / "there"), "--url", cluster.url)
    assert (done.code, done.out) == (2, "")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_registry_that_does_not_answer_is_told_in_one_sentence() -> None:
    done = in_a_process("cluster", "show", "--registry", f"dmq://127.0.0.1:{free_port()}")
    assert done.code == 3
    assert re.fullmatch(r"dmq: no name server answers at 127\.0\.0\.1:\d+ .*: check that it runs, .*\n", done.err)
