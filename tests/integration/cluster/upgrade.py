"""A rolling upgrade under load: every member of every shard changes to another checkout, one after the other.

The followers come first, then each leader hands over and follows suit, as `docs/guide/upgrade.md` says. What must hold
at the end: no send failed, each message was stored once and consumed, and those of a key in order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import dmq
from tests.fault.broker.nursery import code_of
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import PATIENCE_S, eventually

__all__ = ["LoadProcess", "Pause", "RollingUpgrade"]

_AGAIN_S = 5.0
_AFTER_S = 2.0  # of a step, in which its senders may still wait for it


class LoadProcess:
    """See `load_process`; with the code of a checkout."""

    def __init__(self, url: str, name: str, tree: Path | None, log: Path) -> None:
        self.name = name
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("load_process.py")), url, name],
                env={**os.environ, **code_of(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the load {self.name} ended"
        return line

    def wait_running(self) -> None:
        self._line()

    def _say(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def stop_sending(self) -> None:
        self._say()

    def finish(self) -> dict[str, Any]:
        """What came of it, once its consumers ended."""
        found: dict[str, Any] = json.loads(self._say())
        self._process.communicate(timeout=PATIENCE_S)
        return found

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


class Pause(NamedTuple):
    """The longest time for which a sender had no answer, around a step."""

    step: str
    sender: str
    seconds: float


class RollingUpgrade:
    """A cluster with a load, whose members change their code one by one.

    Parameters:
        loads: the checkout whose code the clients of each load process run, by its name; None is this one.

    Attributes:
        cluster: its processes.
        results: of the loads, after `finish`.
    """

    def __init__(self, cluster: ClusterProcesses, loads: dict[str, Path | None]) -> None:
        self.cluster = cluster
        self._steps: list[tuple[str, float, float]] = []
        self.results: list[dict[str, Any]] = []
        self._client = dmq.connect(cluster.url, app="operator", timeout=PATIENCE_S)
        for topic in ("rolled", "rolled-in-order"):
            self._client.admin.create_topic(topic, queues=2)
        log = cluster.folder / "load.log"
        self._loads = [LoadProcess(cluster.url, name, tree, log) for name, tree in loads.items()]

    def __enter__(self) -> Self:
        for load in self._loads:
            load.wait_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for load in self._loads:
            load.end()
        self._client.close()

    # --- the upgrade ------------------------------------------------------------------------------------------------

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._steps.append((what, began, time.monotonic()))

    def roll(self, tree: Path | None) -> None:
        """Change every member to the code of a checkout."""
        admin, members = self._client.admin, self.cluster.members
        for shard in self.cluster.shards:  # of two members one is enough while the other one is down
            admin.set_shard(shard, min_in_sync=1)
        for shard in self.cluster.shards:
            leader = self.cluster.leader(shard)
            for name in [name for name in members if name[:-1] == shard and name != leader]:
                self._change(name, tree)
        for shard in self.cluster.shards:
            leader = self.cluster.leader(shard)
            (other,) = (name for name in members if name[:-1] == shard and name != leader)
            with self._step("handover"):
                self._hand_over(shard, other)
            self._change(leader, tree)
        for shard in self.cluster.shards:
            admin.set_shard(shard, min_in_sync=2)

    def _hand_over(self, shard: str, to: str) -> None:
        """Until the other member leads: one that is slow to stand may lose to the old leader."""
        while self.cluster.leader(shard) != to:
            with suppress(dmq.DMQError):
                self._client.admin.hand_over(shard, to=to)
            deadline = time.monotonic() + _AGAIN_S
            while self.cluster.leader(shard) != to and time.monotonic() < deadline:
                time.sleep(0.02)

    def _change(self, name: str, tree: Path | None) -> None:
        member = self.cluster.members[name]
        with self._step("stop"):
            assert member.stop() == 0
        member.move(tree)
        with self._step("start"):
            member.start()
            eventually(lambda: name in self.cluster.in_sync(name[:-1]))

    # --- what came of it --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the load when everything was consumed."""
        for load in self._loads:
            load.stop_sending()
        admin = self._client.admin
        for load in self._loads:
            for topic in ("rolled", "rolled-in-order"):
                eventually(lambda: admin.lag(topic, f"{load.name}-{topic}").total == 0)  # noqa: B023
        self.results = [load.finish() for load in self._loads]

    def check(self) -> None:
        """No send failed; everything is there once, for each group, and in order."""
        senders = {name: facts for result in self.results for name, facts in result["senders"].items()}
        assert [error for facts in senders.values() for error in facts["errors"]] == []
        sent = {name: facts["sent"] for name, facts in senders.items()}
        assert all(sent.values()), sent
        for result in self.results:
            places: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
            last: dict[str, int] = {}
            for body, shard, queue, offset, _ in result["seen"]:
                owner, kind, number = body.split()
                is_first = body not in places
                places[body].add((shard, queue, offset))
                if is_first and kind.startswith(owner):  # a key
                    assert int(number) > last.get(kind, -1), f"{body} came after {last[kind]}"
                    last[kind] = int(number)
            assert {body: found for body, found in places.items() if len(found) > 1} == {}
            assert len(places) == sum(sent.values())

    def pauses(self) -> list[Pause]:
        """The longest pause of each sender around each step."""
        found = []
        for result in self.results:
            for sender, facts in result["senders"].items():
                gaps = [*zip(facts["acks"], facts["acks"][1:], strict=False)]
                for what, began, ended in self._steps:
                    own = [later - at for at, later in gaps if later >= began and at <= ended + _AFTER_S]
                    found.append(Pause(what, sender, max(own, default=0.0)))
        return found
