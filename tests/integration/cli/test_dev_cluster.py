"""`dmq dev --shards`: a cluster on one machine, and what the guide shows of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dmq
from dmq.testing.processes import DevClusterProcess
from tests.integration.cli.test_commands import children_of
from tests.patience import eventually
from tests.sampling import sample_size

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guide" / "replication.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "dmq://127.0.0.1:9611,127.0.0.1:9621,127.0.0.1:9631"


def run_guide(shard: DevClusterProcess) -> int:
    """Run the blocks of the guide in their order; how many were run."""
    names: dict[str, Any] = {"__name__": __name__}
    text, count = GUIDE.read_text(), 0
    for match in BLOCK.finditer(text):
        code = match[2].replace(URL, shard.url)
        if match[1] == "python":
            line = text.count("\n", 0, match.start()) + 1
            exec(compile("\n" * line + code, str(GUIDE), "exec"), names)
        elif code.startswith("kill -9"):
            shard.kill_leader()
        elif code.startswith("dmq shard"):
            for command in code.splitlines():
                words = command.split("#")[0].split()[1:]
                subprocess.run([sys.executable, "-m", "dmq.cli", *words], check=True, stdout=subprocess.DEVNULL)
        else:
            continue  # what starts it
        count += 1
    return count


def prepare_payments(client: dmq.Client) -> None:
    """A transaction that is committed, and one whose producer dies before it ends it."""
    client.admin.create_topic("payments", queues=1)
    producer = client.producer(group="shop", check=lambda message: "commit", timeout=60)
    with producer.transaction("payments", b"paid"):
        pass
    half = producer.transaction("payments", b"half")
    half.__enter__()  # and nobody ends it


def consume_payments(client: dmq.Client) -> None:
    """Both are there after the failover, each once, and what is acknowledged is settled (R-14)."""
    seen: list[bytes] = []
    with client.consumer("payments", group="ledger") as consumer:
        while len(seen) < 2:
            message = next(consumer)
            seen.append(message.body)
            message.ack()
    assert sorted(seen) == [b"half", b"paid"]
    assert client.admin.lag("payments", "ledger").total == 0


def is_gone(pids: list[str]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.sampled
def test_the_guide_shows_what_works_and_the_shard_is_found_again(tmp_path: Path) -> None:
    soon = ("--set=broker.transaction_first_check_seconds=1", "--set=broker.transaction_check_seconds=1")
    shard = DevClusterProcess(tmp_path / "data", arguments=soon).start()
    try:
        assert [row["name"] for row in shard.rows] == ["a", "b", "c"]
        assert sorted(row["role"] for row in shard.rows) == ["follower", "follower", "leader"]
        assert {row["shard"] for row in shard.rows} == {"s1"}
        with dmq.connect(shard.url, app="shop", timeout=60) as client:
            prepare_payments(client)
            assert run_guide(shard) >= 5
            consume_payments(client)
        for _ in range(sample_size(share=0, whole=3)):
            below = children_of(shard.pid)
            shard.kill()
            eventually(lambda below=below: is_gone(below))  # type: ignore[misc]
            shard.start()
            with dmq.connect(shard.url, timeout=60) as client:
                assert client.admin.topic("orders").messages == 2
        below = children_of(shard.pid)
        assert len(below) >= 3
        assert shard.stop() == 0
        assert is_gone(below)
    finally:
        shard.stop()
