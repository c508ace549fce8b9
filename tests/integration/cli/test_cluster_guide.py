"""The guide of a cluster on ZooKeeper and three real brokers: every command in it is run, and then the worst of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dmq
from dmq.registry.registry import Delete
from dmq.registry.url import open_registry
from dmq.testing.processes import free_port
from tests.fault.broker.nursery import ForkedProcess
from tests.integration.cli.test_commands import Done
from tests.integration.cli.test_commands import dmq as run
from tests.patience import eventually
from tests.zookeepers import ZooKeeperProcess

pytestmark = pytest.mark.uncounted

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guide" / "cluster.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = ["shard.promise_seconds=1.4", "shard.lag_seconds=3", "store.ballast_bytes=0", "store.segment_bytes=1MiB"]
SETTINGS += ["store.unit_bytes_max=256KiB", "store.body_bytes_max=64KiB"]


class GuideCluster:
    """The cluster of the guide, on ports and in a folder of its own."""

    def __init__(self, folder: Path, zookeeper: ZooKeeperProcess, running: contextlib.ExitStack) -> None:
        self.folder = folder
        self._running = running
        self.registry = f"zk://127.0.0.1:{zookeeper.port}/guide?session=2s"
        self._ports = {port: free_port() for port in (9611, 9621, 9631, 9613, 9623, 9633, 9691, 9692, 9693)}
        self.url = "dmq://" + ",".join(f"127.0.0.1:{self._ports[port]}" for port in (9611, 9621, 9631))
        self.brokers: dict[str, ForkedProcess] = {}
        self.done: list[str] = []

    def words(self, command: str) -> list[str]:
        """The arguments of a command of the guide, as they are here."""
        text = command.replace("zk://127.0.0.1:2181/dmq", self.registry).replace("cluster/", f"{self.folder}/")
        text = re.sub(r"\b(96\d\d)\b", lambda found: str(self._ports[int(found[1])]), text)
        return text.split()[1:]

    def run_guide(self) -> None:
        for block in BLOCK.findall(GUIDE.read_text()):
            for command in block.splitlines():
                if command.startswith("dmq broker"):
                    self._start(self.words(command))
                    if len(self.brokers) == 3:
                        self.until_whole()
                elif command.startswith("dmq "):
                    done = run(*self.words(command))
                    if not self.done and done.code == 3:  # a server that was just started may not serve yet
                        done = run(*self.words(command))
                    assert done.code == 0, (command, done.err)
                    self.done.append(command)

    def _start(self, words: list[str]) -> None:
        name, port = words[words.index("--name") + 1], int(words[words.index("--port") + 1])
        pairs = [argument for setting in SETTINGS for argument in ("--set", setting)]
        process = ForkedProcess([*words, *pairs], port, self.folder / f"{name}.log")
        self._running.enter_context(process)
        self.brokers[name] = process

    def show(self) -> dict[str, Any]:
        shown = run("cluster", "show", "--registry", self.registry, "--format", "json")
        assert shown.code == 0, shown.err
        found: dict[str, Any] = json.loads(shown.out)
        return found

    def check(self, *words: str) -> Done:
        return run("cluster", "check", *(words or ("--url", self.url)), "--format", "json")

    def until_whole(self, members: int = 3) -> None:
        def is_whole() -> bool:
            (shard,) = self.show()["shards"]
            return bool(shard["leader"]) and sum(one["in_sync"] for one in shard["members"]) == members

        eventually(is_whole)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, zookeeper: ZooKeeperProcess) -> Iterator[GuideCluster]:
    with contextlib.ExitStack() as running:
        made = GuideCluster(tmp_path_factory.mktemp("guide"), zookeeper, running)
        made.run_guide()
        yield made


def test_every_command_of_the_guide_is_run(cluster: GuideCluster) -> None:
    assert len(cluster.done) == 16
    found = cluster.show()
    (shard,) = found["shards"]
    assert (found["format"], shard["health"]) == (2, "ok")
    assert [broker["name"] for broker in found["brokers"]] == ["a", "b", "c"]
    assert {broker["version"] for broker in found["brokers"]} == {dmq.__version__}
    assert json.loads(cluster.check().out) == {"ok": True, "findings": []}
    assert cluster.check("--registry", cluster.registry).code == 0
    document = json.loads((cluster.folder / "registry.json").read_text())
    assert document["cluster"] == found["cluster"]


def test_a_member_that_is_removed_leaves_and_comes_back(cluster: GuideCluster) -> None:
    with dmq.connect(cluster.url, timeout=30) as client:
        client.admin.create_topic("t", queues=1, allow_existing=True)
        client.producer(timeout=30).send("t", b"kept", durability="replicated")
    leader = cluster.show()["shards"][0]["leader"]
    done = run("shard", "remove", leader, "--url", cluster.url, "--format", "json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert leader not in [member["name"] for member in facts["members"]]
    assert facts["leader"] not in (None, leader)
    assert facts["replicas"] == 2
    cluster.until_whole(2)
    folder = cluster.folder / leader
    assert run("shard", "leave", str(folder)).code != 0  # its broker runs
    done = run("shard", "add", leader, "--url", cluster.url)
    assert done.out.startswith(f"there is a place for {leader}"), done
    cluster.until_whole()
    assert cluster.check().code == 0


def test_a_registry_that_lost_the_record_is_rebuilt_from_the_members(cluster: GuideCluster) -> None:
    before = cluster.show()["shards"][0]
    for broker in cluster.brokers.values():
        broker.kill()

    async def lose() -> None:
        registry = await open_registry(cluster.registry, "test")
        try:
            while (await registry.read("/guide/shard/s1/leader")) is not None:  # its session ends
                await asyncio.sleep(0.1)
            await registry.write([Delete("/guide/shard/s1", None)])
        finally:
            await registry.close()

    asyncio.run(lose())
    for broker in cluster.brokers.values():
        broker.start()
    eventually(lambda: "dmq cluster import --from-members" in cluster.check().out)
    assert cluster.check().code == 1
    one = run("cluster", "import", "--from-members", "--url", cluster.url.split(",")[0])
    assert one.code == 1, (one.out, one.err)
    assert "--accept-loss" in one.err
    done = run("cluster", "import", "--from-members", "--url", cluster.url)
    assert done.code == 0, done.err
    assert "rebuilt with revision" in done.out
    cluster.until_whole()
    after = cluster.show()["shards"][0]
    assert after["epoch"] > before["epoch"]
    with dmq.connect(cluster.url, timeout=30) as client:
        assert [message.body for message in client.admin.peek("t", queue=0)] == [b"kept"]
