"""Shards of real processes: members are killed, stopped and wiped under load, and nothing that was promised is lost.

What must hold of messages is in `tests.fault.broker.torture.Ledger.check`; of disks, in `ShardProcesses.check_equal`.
`./scripts/soak` does more of each.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
from tests.fault.broker.torture import GROUPS, QUEUES, TOPIC, Ledger, Workload
from tests.integration.shard.processes import SESSION_SECONDS, SETTINGS, ShardProcesses
from tests.sampling import IS_SOAK, SEED, sample_size

pytestmark = pytest.mark.uncounted

PATIENCE = 120.0
PAUSE = 1.0 if IS_SOAK else 0.3
# A consumer that lost its leader comes back in time, also on a busy machine: it counts as no attempt.
PATIENT = (*SETTINGS, "broker.grace_seconds=20")
_BITS = 10


class Trouble:
    """What happens to the members of a shard under load."""

    def __init__(self, shard: ShardProcesses, rng: random.Random) -> None:
        self._shard = shard
        self._rng = rng
        self.breaks = 0
        self.seconds: list[float] = []  # from a kill until a message is stored again
        self.turned: list[str] = []  # where bits were turned last

    def kill_leader(self) -> None:
        """And it comes back."""
        leader = self._shard.leader()
        began = time.monotonic()
        self._shard.members[leader].kill()
        self._until_served(began)
        self._back(leader)

    def hand_over(self) -> None:
        """SIGTERM, as for an upgrade."""
        leader = self._shard.leader()
        assert self._shard.members[leader].stop() == 0
        self._back(leader)

    def kill_all(self) -> None:
        self._shard.kill_all()
        self._shard.start_all()
        self._back(None)

    def wipe_follower(self) -> None:
        leader = self._shard.leader()
        number = self._rng.choice([n for n in range(len(self._shard.members)) if n != leader])
        self._replace(number)

    def wipe_leader(self) -> None:
        self._replace(self._shard.leader())

    def _replace(self, number: int) -> None:
        self._shard.members[number].kill()
        self._shard.wipe(number)
        self._back(number)

    def turn_bits(self) -> None:
        """Bits turn on the disk of a member; it comes back, and mends its journal from the others."""
        number = self._rng.randrange(len(self._shard.members))
        self._shard.members[number].kill()
        self.turned = self._shard.turn_bits(number, _BITS, self._rng)
        self._back(number)
        self._shard.repair(number)
        self._shard.until_whole()

    def lose_registry(self) -> None:
        """Longer than a session: the members hear each other, and the shard goes on without it, in the same epoch."""
        before = self._shard.until_whole()
        self._shard.name_servers[0].kill()
        time.sleep(3 * SESSION_SECONDS)
        self._until_served(time.monotonic())  # the registry is still gone
        self._shard.name_servers[0].start()
        self._back(None)
        after = self._shard.until_whole()
        assert (after.leader, after.epoch) == (before.leader, before.epoch), "the leader gave up, though it was heard"

    def freeze_leader(self) -> None:
        """Past its promise and its session: another one leads when it goes on."""
        leader = self._shard.leader()
        began = time.monotonic()
        os.kill(self._shard.members[leader].pid, signal.SIGSTOP)
        try:
            self._until_served(began)
            time.sleep(self._rng.uniform(0.0, 1.0))
        finally:
            os.kill(self._shard.members[leader].pid, signal.SIGCONT)
        self._back(None)

    def _until_served(self, began: float) -> None:
        with dmq.connect(self._shard.url, app="probe", timeout=PATIENCE) as client, client.producer() as producer:
            producer.send("probes", b"served again", timeout=PATIENCE)
        self.seconds.append(time.monotonic() - began)

    def _back(self, number: int | None) -> None:
        self.breaks += 1
        if number is not None:
            self._shard.members[number].start()
        self._shard.until_whole()
        time.sleep(PAUSE * self._rng.uniform(0.0, 1.0))


def check_loss(folder: Path, name: str, count: int, happen: Callable[[Trouble], None]) -> None:
    """A load of every kind, and some trouble again and again; then everything must be there, once and in order."""
    rng = random.Random(f"{SEED} {name}")
    ledger = Ledger()
    with ShardProcesses(folder, settings=PATIENT) as shard:
        trouble = Trouble(shard, rng)
        try:
            with dmq.connect(shard.url, app="checker", timeout=PATIENCE) as checker:
                checker.admin.create_topic(TOPIC, queues=QUEUES)
                checker.admin.create_topic("probes", queues=1)
                for group in GROUPS:
                    checker.admin.create_group(group, TOPIC)
                workload = Workload(ledger, [shard.url], rng, least="replicated")
                try:
                    workload.start()
                    for _ in range(count):
                        time.sleep(PAUSE)
                        happen(trouble)
                        assert not workload.problems, workload.problems
                    workload.stop_producing(PATIENCE)
                    workload.drain(checker, PATIENCE)
                finally:
                    workload.close()
                assert not workload.problems, workload.problems
            ledger.check(trouble.breaks)
            size = shard.check_equal()
        except BaseException as error:
            error.add_note(
                f"DMQ_SEED={SEED}, {name} {trouble.breaks} of {count}: {ledger.report(count, trouble.breaks)}"
            )
            error.add_note(f"bits turned: {trouble.turned}")
            raise
    seconds = sorted(trouble.seconds)
    said = f"served again after {', '.join(f'{one:.1f}' for one in seconds)} s; " if seconds else ""
    print(f"DMQ_SEED={SEED}: {name}: {said}{size} bytes equal; {ledger.report(count, trouble.breaks)}")


@pytest.mark.sampled
def test_nothing_is_lost_when_leaders_are_killed(tmp_path: Path) -> None:
    check_loss(tmp_path, "leaders killed", sample_size(share=1, whole=30), Trouble.kill_leader)


@pytest.mark.soak
def test_nothing_is_lost_when_all_members_are_killed_at_once(tmp_path: Path) -> None:
    check_loss(tmp_path, "all killed", 20, Trouble.kill_all)


@pytest.mark.soak
def test_nothing_is_lost_when_disks_are_replaced(tmp_path: Path) -> None:
    check_loss(tmp_path / "followers", "disks of followers", 5, Trouble.wipe_follower)
    check_loss(tmp_path / "leaders", "disks of leaders", 5, Trouble.wipe_leader)


@pytest.mark.soak
def test_nothing_is_lost_when_a_leader_stands_still(tmp_path: Path) -> None:
    check_loss(tmp_path, "leaders frozen", 10, Trouble.freeze_leader)


@pytest.mark.soak
def test_a_registry_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    check_loss(tmp_path, "registry lost", 5, Trouble.lose_registry)


@pytest.mark.soak
def test_nothing_is_lost_when_bits_turn_on_disks(tmp_path: Path) -> None:
    check_loss(tmp_path, "bits turned", 200 // _BITS, Trouble.turn_bits)


@pytest.mark.soak
def test_nothing_is_lost_when_leaders_are_stopped_as_for_an_upgrade(tmp_path: Path) -> None:
    check_loss(tmp_path, "leaders stopped", 10, Trouble.hand_over)
