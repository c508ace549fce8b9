"""Rolling upgrades under load: followers first, then each leader hands over."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

import dmq
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.upgrade import RollingUpgrade
from tests.patience import eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster-failover")]

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guide" / "upgrade.md"
COMMAND = re.compile(r"^dmq (.*) --url dmq://127.0.0.1:9611,127.0.0.1:9621$", re.MULTILINE)
# Which commit is upgraded from.
REF = os.environ.get("UPGRADE_FROM", "HEAD~1")


def test_every_member_is_restarted_and_no_send_fails(pairs: ClusterProcesses) -> None:
    with RollingUpgrade(pairs, {"client": None}) as upgrade:
        upgrade.roll(None)
        upgrade.finish()
        upgrade.check()
        assert {pause.step for pause in upgrade.pauses()} == {"stop", "start", "handover"}
    assert run("cluster", "check", "--url", pairs.url).code == 0


def test_the_commands_of_the_guide_do_what_it_says(pairs: ClusterProcesses, tmp_path: Path) -> None:
    before = {shard: pairs.leader(shard) for shard in pairs.shards}
    commands = COMMAND.findall(GUIDE.read_text())
    assert len(commands) == 12
    for command in commands:
        done = run(*command.split(), "--url", pairs.url, cwd=tmp_path)
        assert done.code == 0, (command, done.err)
        if "handover" in command:
            eventually(lambda: len(pairs.in_sync(command.split()[-1])) == 2)  # noqa: B023
    assert all(pairs.leader(shard) != before[shard] for shard in pairs.shards)
    assert (tmp_path / "registry.json").exists()


@pytest.mark.soak
def test_a_cluster_of_another_commit_is_upgraded_under_load(tmp_path: Path) -> None:
    """Up three times, and back in between; with clients of both."""
    old = checkout(REF, tmp_path / "old")
    with ClusterProcesses(tmp_path / "cluster", 3, 2, tree=old) as cluster:
        with RollingUpgrade(cluster, {"old": old, "new": None}) as upgrade:
            for tree in (None, old, None, old, None):
                time.sleep(1.0)
                upgrade.roll(tree)
            upgrade.finish()
            upgrade.check()
            pauses: dict[str, list[float]] = {step: [] for step in ("stop", "start", "handover")}
            for pause in upgrade.pauses():
                pauses[pause.step].append(pause.seconds)
            for step, seconds in pauses.items():
                seconds.sort()
                half, most = at(seconds, 0.5), at(seconds, 0.95)
                print(f"{step}: pauses p50 {half:.2f}, p95 {most:.2f}, at most {seconds[-1]:.2f} s")
            assert at(pauses["handover"], 0.95) <= 1.0, pauses["handover"]
        with dmq.connect(cluster.url, timeout=60) as client:
            print(client.admin.finalize_cluster())


def at(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def checkout(ref: str, folder: Path) -> Path:
    """The tree of a commit."""
    archive = subprocess.run(["git", "archive", ref], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder
