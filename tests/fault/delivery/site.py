"""What serves the long run, and what goes wrong with it: a broker by itself, or a cluster of three shards of two.

What always holds: whatever breaks is noted with its time and its shard, and works again when the call returns.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import dmq
from tests.fault.broker.nursery import ForkedBroker
from tests.fault.delivery import plan
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.shard.processes import SETTINGS
from tests.patience import eventually

__all__ = ["ClusterSite", "LoneSite", "Note", "Site", "Way"]

Way = Callable[[], None]
# kind, who, since: something is whole again that was broken since then. Who is "*", all there is, or "*3", a shard.
Note = Callable[[str, str, float], None]


class Site(Protocol):
    """What the run needs of it.

    Attributes:
        kills: how many brokers were killed.
    """

    kills: int

    @property
    def url(self) -> str: ...

    @property
    def leader_urls(self) -> list[str]:
        """One for each broker that leads."""

    def start(self, rng: random.Random, note: Note) -> None: ...

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def ways(self) -> dict[Way, int]:
        """What can go wrong, and how often that is to happen."""

    def kill(self) -> None:
        """The worst of it."""


class LoneSite:
    """A broker by itself."""

    def __init__(self, folder: Path) -> None:
        self._broker = ForkedBroker(folder, plan.SETTINGS)
        self.kills = 0

    @property
    def url(self) -> str:
        return self._broker.url

    @property
    def leader_urls(self) -> list[str]:
        return [self.url]

    def start(self, rng: random.Random, note: Note) -> None:
        self._rng, self._note = rng, note
        self._broker.start()

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._broker.__exit__(kind, error, trace)

    def ways(self) -> dict[Way, int]:
        return {self.kill: 6, self.stop: 1, self.freeze: 1}

    def kill(self) -> None:
        since = time.monotonic()
        self._broker.kill()
        self.kills += 1
        time.sleep(self._rng.uniform(0.0, 0.3))
        self._broker.start()
        self._note("kill", "*", since)

    def stop(self) -> None:
        since = time.monotonic()
        assert self._broker.stop() == 0
        self._broker.start()
        self._note("stop", "*", since)

    def freeze(self) -> None:
        since = time.monotonic()
        os.kill(self._broker.pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.1, 1.0))
        os.kill(self._broker.pid, signal.SIGCONT)
        self._note("freeze", "*", since)


class ClusterSite:
    """Three shards of two members.

    Parameters:
        letters: the URL of the database of their dead letters.

    Attributes:
        placed: how often the slots of the topic changed.
    """

    SETTINGS: Final = (*SETTINGS, *plan.SETTINGS, "store.segment_bytes=8MiB")

    def __init__(self, folder: Path, letters: str) -> None:
        settings = [*self.SETTINGS, f"broker.dead_letters_url={letters}"]
        self._cluster = ClusterProcesses(folder, 3, 2, settings=settings)
        self.kills = self.placed = 0

    @property
    def url(self) -> str:
        return self._cluster.url

    @property
    def leader_urls(self) -> list[str]:
        return [self._cluster.url_of(shard) for shard in self._cluster.shards]

    def start(self, rng: random.Random, note: Note) -> None:
        self._rng, self._note = rng, note
        self._cluster.start()
        self._numbers = self._cluster.numbers

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cluster.__exit__(kind, error, trace)

    def ways(self) -> dict[Way, int]:
        return {
            self.kill: 4, self.kill_follower: 1, self.kill_shard: 2, self.stop: 1, self.freeze: 2, self.hand_over: 1,
            self.move_slot: 4,
        }  # fmt: skip

    def _wait(self, low: float, high: float) -> None:
        time.sleep(self._rng.uniform(low, high))

    def _choose(self) -> tuple[str, str, str]:
        """A shard, its leader and its follower."""
        shard = self._rng.choice(self._cluster.shards)
        leader = self._cluster.leader(shard)
        (follower,) = (name for name in self._cluster.members if name[:-1] == shard and name != leader)
        return shard, leader, follower

    def _mended(self, kind: str, shard: str, since: float) -> None:
        """Wait until both members of a shard have everything, and note what was wrong with it until then."""
        eventually(lambda: len(self._cluster.in_sync(shard)) == 2, f"{shard} does not become whole")
        self._cluster.until_led()
        self._note(kind, f"*{self._numbers[shard]}", since)

    def _kill(self, names: list[str]) -> None:
        for name in names:
            self._cluster.members[name].kill()
            self.kills += 1

    def kill(self) -> None:
        """A leader."""
        shard, leader, _ = self._choose()
        since = time.monotonic()
        self._kill([leader])
        self._wait(0.0, 3.0)
        self._cluster.members[leader].start()
        self._mended("kill", shard, since)

    def kill_follower(self) -> None:
        shard, _, follower = self._choose()
        since = time.monotonic()
        self._kill([follower])
        self._wait(0.0, 1.0)
        self._cluster.members[follower].start()
        self._mended("kill", shard, since)

    def kill_shard(self) -> None:
        shard, leader, follower = self._choose()
        since = time.monotonic()
        self._kill([leader, follower])
        self._wait(0.0, 2.0)
        self._cluster.start_all()
        self._mended("kill", shard, since)

    def stop(self) -> None:
        shard, leader, _ = self._choose()
        since = time.monotonic()
        assert self._cluster.members[leader].stop() == 0
        self._cluster.members[leader].start()
        self._mended("stop", shard, since)

    def freeze(self) -> None:
        """A leader stands still, for less than its session or for longer."""
        shard, leader, _ = self._choose()
        since = time.monotonic()
        os.kill(self._cluster.members[leader].pid, signal.SIGSTOP)
        try:
            self._wait(0.1, 4.0)
        finally:
            os.kill(self._cluster.members[leader].pid, signal.SIGCONT)
        self._mended("freeze", shard, since)

    def hand_over(self) -> None:
        shard, _, _ = self._choose()
        since = time.monotonic()
        with dmq.connect(self.url, app="life", timeout=60.0) as client:
            client.admin.hand_over(shard)
        self._mended("handover", shard, since)

    def move_slot(self) -> None:
        """The topic leaves a shard, or comes back to it; ordered messages are held meanwhile."""
        with dmq.connect(self.url, app="life", timeout=60.0) as client:
            admin = client.admin
            writable = [slot.shard for slot in admin.topic(plan.TOPIC).slots if slot.is_writable]
            absent = [shard for shard in self._cluster.shards if shard not in writable]
            since = time.monotonic()
            try:
                if absent:
                    admin.place_topic(plan.TOPIC, add=absent[0], drain=True)
                else:
                    admin.place_topic(plan.TOPIC, remove=self._rng.choice(writable), drain=True)
                self.placed += 1
                self._note("place", "place", since)
            except (
                dmq.Busy,
                dmq.ShardConflict,
                dmq.TimedOut,
            ):  # consumers do not get on, or a slot is still being emptied
                self._note("not placed", "place", since)
