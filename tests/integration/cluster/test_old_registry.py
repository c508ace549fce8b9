"""A cluster of real processes whose registry comes back from an old backup: the runbook, and what is there then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import dmq
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def settings_of(client: dmq.Client, topic: str) -> tuple[int, float | None]:
    found = client.admin.topic(topic)
    return found.queues, found.ttl


def entries(cluster: ClusterProcesses) -> dict[str, Any]:
    done = run("cluster", "export", "-", "--url", cluster.url)
    return {row["path"]: row["value"] for row in json.loads(done.out)["entries"]} if done.code == 0 else {}


def test_what_is_newer_than_the_backup_of_the_registry_comes_back_from_the_members(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, shards=2) as cluster:
        with dmq.connect(cluster.url, timeout=PATIENCE_S) as client:
            client.admin.create_topic("early", queues=1)
        (server,) = cluster.name_servers
        server.stop()
        for suffix in ("", "-wal"):
            if (tmp_path / f"registry.db{suffix}").exists():
                shutil.copy(tmp_path / f"registry.db{suffix}", tmp_path / f"backup.db{suffix}")
        server.start()
        with dmq.connect(cluster.url, timeout=PATIENCE_S) as client:
            eventually(lambda: _is_done(lambda: client.admin.create_topic("late", queues=2, ttl=3600.0)))
            client.admin.create_group("readers", "late")
            client.admin.update_topic("early", queues=3, ttl=60.0)
            producer = client.producer()
            sent = {producer.send(topic, b"%d" % number).id for topic in ("early", "late") for number in range(50)}
        for member in cluster.members.values():
            member.kill()
        cluster.start_all()  # each is elected anew, so that the backup is older than what they have seen
        cluster.until(lambda found: all(row.epoch > 1 and row.leader for row in found.shards), "not elected anew")
        for member in cluster.members.values():
            member.kill()
        server.stop()
        for suffix in ("", "-wal"):
            (tmp_path / f"registry.db{suffix}").unlink(missing_ok=True)
            if (tmp_path / f"backup.db{suffix}").exists():
                shutil.copy(tmp_path / f"backup.db{suffix}", tmp_path / f"registry.db{suffix}")
        (tmp_path / "registry.db-shm").unlink(missing_ok=True)
        server.start()
        cluster.start_all()

        eventually(lambda: "import --from-members" in run("cluster", "check", "--url", cluster.url).out)
        done = run("cluster", "import", "--from-members", "--url", cluster.url)
        assert done.code == 0, done.err
        assert done.out.count("rebuilt with revision") == 2
        cluster.until_led()
        with dmq.connect(cluster.url, timeout=PATIENCE_S) as client:
            late = [["s1", 2], ["s2", 2]]  # in the order in which their leaders came
            eventually(lambda: sorted(entries(cluster).get("topic/late", {}).get("slots", [])) == late)
            assert settings_of(client, "late") == (2, 3600.0)
            assert settings_of(client, "early") == (3, 60.0)
            eventually(lambda: "topic/late/readers" in entries(cluster))
            found = set()
            for topic in ("early", "late"):
                with client.consumer(topic, group="readers") as consumer:
                    while batch := consumer.pull(100, wait=1.0):
                        found |= {message.id for message in batch}
                        consumer.ack(batch)
        assert found == sent
        assert run("cluster", "check", "--url", cluster.url).code == 0


def _is_done(work: Any) -> bool:
    try:
        work()
    except dmq.RegistryDown:
        return False
    return True
