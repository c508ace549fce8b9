"""The adversary: what goes wrong, when and for how long, drawn from a seed.

It does nothing that a shard need not survive: of what is committed, one whole disk is always left. Everything else may
happen, several things at a time.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

from dmq.storage.upkeep.identity import read_identity
from tests.fault.shard.clock import ClockMode
from tests.fault.shard.cluster import Cluster
from tests.fault.shard.process import Process

__all__ = ["Adversary"]

_STORM_SECONDS = 45.0


class Adversary:
    """Of one run.

    Parameters:
        only: kinds of faults, by the names of the methods; all if left out.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, only: tuple[str, ...] = ()) -> None:
        self._cluster = cluster
        self._rng = rng
        self._every_seconds = rng.choice((1.0, 2.0, 4.0)) * cluster.member_settings.promise_seconds / 2
        self._is_over = False
        kinds: dict[Callable[[], None], int] = {
            self.kill: 8,
            self.power: 5,
            self.fall: 5,
            self.kill_all: 2,
            self.power_all: 2,
            self.wipe: 3,
            self.old_copy: 2,
            self.pause: 6,
            self.suspend: 2,
            self.freeze: 3,
            self.wedge: 2,
            self.isolate: 5,
            self.one_way: 7,
            self.slow_link: 2,
            self.reset: 4,
            self.registry_cut: 6,
            self.registry_down: 2,
            self.expire: 3,
            self.slow_disk: 4,
            self.stuck_disk: 1,
            self.failing_flush: 1,
            self.step_wall: 1,
            self.hand_over: 3,
            self.stop: 3,
            self.flip: 2,
            self.rot: 2,
            self.blocked_port: 1,
        }
        self._kinds = {kind: weight for kind, weight in kinds.items() if not only or kind.__name__ in only}

    def storm(self) -> None:
        """Let things go wrong for a while.

        Raises:
            Violation: the shard broke its word.
        """
        cluster = self._cluster
        self._next()
        cluster.pass_time(_STORM_SECONDS)
        self._is_over = True

    def _next(self) -> None:
        if not self._is_over:
            cluster = self._cluster
            cluster.schedule.after(self._rng.expovariate(1 / self._every_seconds), self._next)
            (kind,) = self._rng.choices([*self._kinds], [*self._kinds.values()])
            kind()

    # --- choices ----------------------------------------------------------------------------------------------------

    def _any(self, *, leader_chance: float = 0.5) -> Process:
        """A machine; the leader more often than others."""
        leader = self._cluster.leader
        if leader is not None and self._rng.random() < leader_chance:
            return leader
        return self._rng.choice(self._cluster.processes)

    def _seconds(self, low: float = 0.2, high: float = 4.0) -> float:
        """Shorter and longer than a promise."""
        return self._cluster.member_settings.promise_seconds * self._rng.uniform(low, high)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._cluster.schedule.after(seconds, action)

    def _note(self, what: str) -> None:
        self._cluster.note("!", what)

    # --- processes --------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        process = self._any()
        process.crash()
        self._later(self._seconds(0, 3), process.start)

    def power(self) -> None:
        process = self._any()
        process.crash(power=True)
        self._later(self._seconds(0, 3), process.start)

    def fall(self) -> None:
        """The power goes in the middle of something."""
        process, operations = self._any(), self._rng.randrange(1, 60)
        self._note(f"{process} loses its power within operation {operations} of its disk")
        process.fall(operations)

    def kill_all(self) -> None:
        self._all(power=False)

    def power_all(self) -> None:
        self._all(power=True)

    def _all(self, *, power: bool) -> None:
        for process in self._cluster.processes:
            process.crash(power=power)
            self._later(self._seconds(0, 1), process.start)

    def wipe(self) -> None:
        process = self._any()
        if self._cluster.survives_without(process):
            process.crash()
            process.wipe()
        self._later(self._seconds(0, 2), process.start)

    def old_copy(self) -> None:
        """Copy a directory; or put back a copy of an earlier life, if that is known to the record."""
        process, record = self._any(), self._cluster.record
        if process.old_files is None:
            process.keep_copy()
            return
        copied, current = read_identity(process.old_files), self._cluster.replica_of(process)
        if copied is None or copied.member is None or record is None or not self._cluster.survives_without(process):
            return
        if f"{copied.member.replica_id:016x}" == current and record.lives.get(current, 0) > copied.member.life:
            process.crash()
            process.restore_copy()
            self._later(self._seconds(0, 1), process.start)

    def pause(self) -> None:
        self._pause(ClockMode.RUNS)

    def suspend(self) -> None:
        self._pause(ClockMode.SUSPENDED)

    def freeze(self) -> None:
        self._pause(ClockMode.FROZEN)

    def _pause(self, mode: ClockMode) -> None:
        process, seconds = self._any(leader_chance=0.7), self._seconds()
        loop = process.loop
        process.pause(mode)
        self._note(f"{process} stands still for {seconds:.2f} s, clocks: {mode.value}")
        self._later(seconds, lambda: process.resume() if process.loop is loop else None)

    def wedge(self) -> None:
        process, seconds = self._any(leader_chance=0.8), self._seconds()
        loop = process.loop
        process.wedge()
        self._note(f"the loop of {process} hangs for {seconds:.2f} s")
        self._later(seconds, lambda: process.resume() if process.loop is loop else None)

    def stop(self) -> None:
        process = self._any()
        process.stop(hand_over=self._rng.random() < 0.8)
        self._later(self._seconds(0, 3), process.start)

    def hand_over(self) -> None:
        leader = self._cluster.leader
        if leader is not None:
            leader.hand_over()

    # --- network ----------------------------------------------------------------------------------------------------

    def isolate(self) -> None:
        """A member reaches nobody; the registry perhaps."""
        process, seconds = self._any(), self._seconds()
        others = [other for other in self._cluster.processes if other is not process]
        pairs = [(process, other) for other in others] + [(other, process) for other in others]
        with_registry = self._rng.random() < 0.5
        if with_registry:
            process.line.loses_requests = process.line.loses_answers = True
        self._note(f"{process} is cut off for {seconds:.2f} s, from the registry: {with_registry}")
        self._cut(pairs, seconds)
        self._later(seconds, process.line.mend)

    def one_way(self) -> None:
        """Something is heard and not answered."""
        one, other = self._rng.sample(self._cluster.processes, 2)
        seconds = self._seconds()
        self._note(f"nothing comes from {one} to {other} for {seconds:.2f} s")
        self._cut([(one, other)], seconds)

    def blocked_port(self) -> None:
        """Nobody reaches the leader's replication any more, and it keeps its registry."""
        leader = self._cluster.leader
        if leader is not None:
            seconds = 4 * self._cluster.member_settings.lag_seconds
            self._note(f"the replication of {leader} is blocked for {seconds:.2f} s")
            others = [other for other in self._cluster.processes if other is not leader]
            self._cut([(leader, other) for other in others] + [(other, leader) for other in others], seconds)

    def _cut(self, pairs: list[tuple[Process, Process]], seconds: float) -> None:
        network = self._cluster.network
        for one, other in pairs:
            network.cut(one.name, other.name)
            self._later(seconds, lambda one=one, other=other: network.mend(one.name, other.name))  # type: ignore[misc]

    def slow_link(self) -> None:
        one, other = self._rng.sample(self._cluster.processes, 2)
        seconds, slow = self._seconds(), self._seconds(0.05, 0.6)
        wire = self._cluster.network.wire(one.name, other.name)
        before, wire.delay = wire.delay, (slow / 2, slow)
        self._note(f"from {one} to {other} it takes {slow:.2f} s, for {seconds:.2f} s")

        def mend() -> None:
            wire.delay = before

        self._later(seconds, mend)

    def reset(self) -> None:
        connections = self._cluster.network.connections
        if connections:
            connection = self._rng.choice(connections)
            self._note(f"a connection of {connection.near.host.name} to {connection.far.host.name} is reset")
            self._cluster.network.reset(connection)

    # --- registry ---------------------------------------------------------------------------------------------------

    def registry_cut(self) -> None:
        process, seconds = self._any(leader_chance=0.7), self._seconds()
        way = self._rng.choice(("requests", "answers", "both"))
        process.line.loses_requests |= way != "answers"
        process.line.loses_answers |= way != "requests"
        self._note(f"{process} loses its registry, {way}, for {seconds:.2f} s")
        self._later(seconds, process.line.mend)

    def registry_down(self) -> None:
        seconds = self._seconds(0.5, 6)
        self._note(f"the registry is down for {seconds:.2f} s")
        for process in self._cluster.processes:
            process.line.loses_requests = process.line.loses_answers = True
            self._later(seconds, process.line.mend)

    def expire(self) -> None:
        process = self._any()
        if process.registry is not None:
            self._note(f"the session of {process} expires")
            process.registry.lose_session()

    # --- disks and clocks -------------------------------------------------------------------------------------------

    def slow_disk(self) -> None:
        self._slow(self._seconds(0.05, 0.5))

    def stuck_disk(self) -> None:
        self._slow(self._seconds(2, 5))

    def _slow(self, slow: float) -> None:
        process, seconds = self._any(), self._seconds()
        process.disk_seconds = (slow / 3, slow)
        self._note(f"the disk of {process} takes {slow:.2f} s, for {seconds:.2f} s")

        def mend() -> None:
            process.disk_seconds = (0.0005, 0.006)

        self._later(seconds, mend)

    def failing_flush(self) -> None:
        process = self._any()
        process.files.fail("sync", self._rng.randrange(1, 4), errno.EIO)
        self._note(f"a flush of {process} will fail")

    def step_wall(self) -> None:
        process, seconds = self._any(), self._rng.choice((-3600.0, 3600.0, -1.0, 8.0))
        process.clock.step_wall(seconds)
        self._note(f"the wall clock of {process} steps by {seconds} s")

    def rot(self) -> None:
        """A bit of what a member knows as committed turns; the others have it."""
        process, turned = self._any(leader_chance=0.4), self._cluster.checker.turned
        if not self._cluster.survives_without(process, may_rot=True):
            return
        process.crash()
        start, known = process.known
        if start < known:
            at = self._rng.randrange(start, known)
            elsewhere = [offset for name, offsets in turned.items() if name != process.name for offset in offsets]
            if all(abs(offset - at) > self._cluster.store_settings.unit_bytes_max for offset in elsewhere):
                process.turn(at, self._rng.randrange(8))
        self._later(self._seconds(0, 1), process.start)

    def flip(self) -> None:
        """A bit of what a member does not know as committed turns while the machine is off."""
        process = self._any(leader_chance=0.2)
        if not self._cluster.survives_without(process, may_rot=True):
            return
        process.crash()
        known, end = process.tail
        if known < end:
            process.turn(self._rng.randrange(known, end), self._rng.randrange(8))
        self._later(self._seconds(0, 1), process.start)
