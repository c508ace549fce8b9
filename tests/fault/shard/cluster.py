"""A simulated shard: machines, network, registry, clients and the checker, in one virtual time.

cluster = Cluster(seed)
cluster.run()       # raises Violation, with the seed and what happened
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, NoReturn

from dmq.errors import StorageError
from dmq.registry.contents import ShardContent, decode_content, hex_id
from dmq.registry.memory import Fate, MemoryRegistry
from dmq.registry.paths import Paths
from dmq.settings import StoreSettings
from dmq.shard.member import MemberSettings, Role
from dmq.storage.replica import Replica
from tests.fault.shard.checker import Checker, journal_of
from tests.fault.shard.client import Clients
from tests.fault.shard.clock import MachineClock
from tests.fault.shard.loop import Schedule, VirtualLoop
from tests.fault.shard.network import Network
from tests.fault.shard.process import Process

__all__ = ["Cluster", "Violation"]

SHARD = "s"
_SAMPLE_SECONDS = 0.05
_PROGRESS_SECONDS = 90.0
_HISTORY_LINES = 400


class Violation(AssertionError):
    """The shard broke its word.

    Parameters:
        sentences: what is wrong, without the history.
    """

    def __init__(self, message: str, sentences: str) -> None:
        super().__init__(message)
        self.sentences = sentences


class Cluster:
    """Of one seed.

    Parameters:
        members: how many machines.
        chances: of the registry's writes; drawn if left out.
        scale: of a session of 6, a promise of 4 and a lag of 10 seconds; drawn if left out.

    Attributes:
        history: what happened: time, who, what.
        failures: callbacks and tasks of members that failed with nobody to tell.
    """

    def __init__(
        self,
        seed: int,
        *,
        members: int = 3,
        chances: dict[Fate, float] | None = None,
        scale: float | None = None,
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.history: list[tuple[float, str, str]] = []
        self.failures: list[str] = []
        self.waits_for_person = False  # in the end: nobody may be elected
        self.schedule = Schedule(random.Random(rng.random()))
        scale = scale or rng.choice((0.5, 0.5, 1.0))
        self.member_settings = MemberSettings(
            replicas=members, min_in_sync=min(2, members), promise_seconds=4.0 * scale, lag_seconds=10.0 * scale
        )
        self.store_settings = StoreSettings(
            segment_bytes=64 << 10,
            unit_bytes_max=32 << 10,
            body_bytes_max=16 << 10,
            checkpoint_bytes=rng.choice((20 << 10, 100 << 10)),
            retention_bytes=rng.choice((None, 130 << 10, 200 << 10)),
            keep_unconsumed=False,
            ballast_bytes=0,
            scrub_hours=0.003,  # beside all that happens: it must find what turns, and take nothing else for damage
        )
        if chances is None:
            bad = rng.choice((0.0, 0.02, 0.1))
            chances = {Fate.LOST: bad, Fate.UNANSWERED: bad, Fate.LATE: bad}
        self.chances = chances
        self._true_clock = _TrueClock(self.schedule)
        self.registry = MemoryRegistry(
            self._true_clock, session_seconds=6.0 * scale, seed=rng.getrandbits(32), chances=chances
        )
        self.network = Network(self.schedule, random.Random(rng.random()))
        self.checker = Checker(self.copies, self.member_settings.min_in_sync)
        self.processes = [Process(self, name) for name in "abcdefg"[:members]]
        self.path = Paths().shard(SHARD)
        loop = VirtualLoop(MachineClock(self.schedule.time, random.Random(0)))
        self._client_loop = loop
        self.schedule.loops.append(loop)
        self.clients = Clients(
            self.schedule,
            loop,
            random.Random(rng.random()),
            members=[process.name for process in self.processes],
            reach=self._reach,
        )
        self._sample_later()

    # --- who is who -------------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def _reach(self, name: str) -> Any:
        process = self.process(name)
        return None if process.service is None else (process.service, process.loop)

    @property
    def leaders(self) -> list[Process]:
        """Those that have a Broker."""
        return [one for one in self.processes if one.service is not None and one.service.store is not None]

    @property
    def leader(self) -> Process | None:
        """Of those, the newest."""
        return max(self.leaders, key=_epoch_of, default=None)

    @property
    def record(self) -> ShardContent | None:
        """The shard's record, as it truly is."""
        entry = self.registry.read(self.path)
        return None if entry is None else decode_content(ShardContent, entry.value, self.path)

    def replica_of(self, process: Process) -> str:
        """The replica id of a machine's directory."""
        member = process.membership
        return "" if member is None else hex_id(member.replica_id)

    def survives_without(self, process: Process, *, may_rot: bool = False) -> bool:
        """Whether all that is committed is on another disk, too, and that one is whole and does not doubt it.

        Parameters:
            may_rot: bits of that one may have turned, since this process still has what they belong to.
        """
        record = self.record
        others = [other for other in self.processes if other is not process]
        there = {
            self.replica_of(other) for other in others if not other.is_doubtful and (may_rot or not other.is_rotten)
        }
        return record is not None and bool(there & {*record.in_sync})

    def copies(self, offset: int) -> int:
        """On how many disks everything below an offset is, durably."""
        return sum(process.flushed >= offset for process in self.processes)

    def is_followed(self, process: Process) -> bool:
        return any(connection.far.host is process.host for connection in self.network.connections)

    def copy_registry(self) -> dict[str, Any]:
        """All that stands there for good."""
        entries = self.registry._tree._entries
        return {path: entry for path, entry in entries.items() if not entry.is_ephemeral and path != "/"}

    def restore_registry(self, entries: dict[str, Any]) -> None:
        """Somebody puts an old copy in the place of the registry; sessions go on."""
        tree = self.registry._tree
        for path, entry in entries.items():
            tree._set(path, entry)
        self.registry._announce(entries)
        self.note("!", "an old copy of the registry is put back")

    # --- history ----------------------------------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        self.history.append((self.schedule.now, who, what))

    def ended_with(self, who: str, error: BaseException) -> None:
        if not isinstance(error, StorageError):
            self.checker.violated(f"the process of {who} ended with {error!r}")

    def _sample_later(self) -> None:
        self.schedule.after(_SAMPLE_SECONDS, self._sample)

    def _sample(self) -> None:
        """At this very moment, who may serve? And does anybody find that what it has as committed is not?"""
        self._sample_later()
        self.copies(0)
        for process in self.processes:
            if process.member is not None and process.member.role is Role.PARKED:
                self.checker.violated(f"{process} is parked: {process.member.report().obstacle}")
        for process in self.leaders:
            service = process.service
            leadership = None if service is None else service.leadership
            if service is not None and leadership is not None and process.is_running and leadership.may_serve():
                self.checker.served(process.name, leadership.epoch, is_excepted=service.is_excepted)

    # --- running ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for process in self.processes:
            self.schedule.after(self.rng.uniform(0, 1), process.start)
            process.wanted = True

    def pass_time(self, seconds: float, until: Callable[[], bool] | None = None, *, at_once: bool = False) -> bool:
        """Let time pass; returns whether what was waited for is so.

        Parameters:
            at_once: look after every single step, and stop in that very moment.

        Raises:
            Violation: something is wrong.
        """
        checker, failures = self.checker, self.failures

        def is_over() -> bool:
            return bool(checker.violations or failures) or (at_once and until is not None and until())

        end = self.schedule.now + seconds
        while self.schedule.now < end:
            self.schedule.run(min(end, self.schedule.now + 0.1), is_over)
            for process in self.processes:
                if process.loop is not None and process.loop.failures:
                    failures += [f"{process.name}: {failure}" for failure in process.loop.failures]
            if checker.violations or failures:
                self.fail(*checker.violations, *failures)
            if until is not None and until():
                return True
        return until is None

    def fail(self, *sentences: str) -> NoReturn:
        lines = [f"{at:10.3f} {who:>2} {what}" for at, who, what in self.history[-_HISTORY_LINES:]]
        what = "\n".join(sentences)
        message = f"seed {self.seed}, at {self.schedule.now:.3f}: {what}\n" + "\n".join(lines) + f"\n{what}"
        raise Violation(message, what)

    def await_progress(self, what: str, until: Callable[[], bool]) -> None:
        if not self.pass_time(_PROGRESS_SECONDS, until):
            states = [f"{process.name}: {self._state(process)}" for process in self.processes]
            self.fail(f"no progress: not {what} within {_PROGRESS_SECONDS} s; record {self.record}", *states)

    def _state(self, process: Process) -> str:
        return "dead" if process.member is None else f"{process.member.role} {process.member.report()}"

    def is_whole(self) -> bool:
        """Whether all members run, one leads, and all are in sync."""
        record, leader = self.record, self.leader
        if record is None or leader is None or len(self.leaders) != 1 or not all(p.is_running for p in self.processes):
            return False
        return {*record.in_sync} == {self.replica_of(process) for process in self.processes}

    def is_a_person_needed(self) -> bool:
        """Whether no member of the in-sync set is left without doubts: then none may be elected."""
        record = self.record
        sure = {self.replica_of(process) for process in self.processes if not process.is_doubtful}
        return record is not None and self.leader is None and not sure & {*record.in_sync}

    def is_level(self) -> bool:
        """Whether they also have answered everything and have the same."""
        leader = self.leader
        if self.clients.unanswered or not self.is_whole() or leader is None or leader.service is None:
            return False
        store = leader.service.store
        if store is None or store.queries.visible != store.queries.end:
            return False
        reports = [process.member.report() for process in self.processes if process.member is not None]
        return all(report.committed == report.end == store.queries.end for report in reports)

    def heal(self) -> None:
        """No more faults; everybody is started."""
        self.note("", "all is healed")
        self.registry.chances = {}
        self.network.mend_all()
        for process in self.processes:
            process.line.mend()
            process.files.heal()
            process.disk_seconds = (0.0005, 0.006)
            process.resume()
            process.start()

    def settle(self) -> None:
        """Heal, wait until all is level, and compare everything.

        Raises:
            Violation: something is wrong.
        """
        self.heal()
        if not self.pass_time(_PROGRESS_SECONDS, self.is_whole):
            if self.is_a_person_needed():
                self.note("", "nobody can be elected: the disks that had all were lost, or are in doubt")
                self.waits_for_person = True
                return
            self.await_progress("whole and committing", self.is_whole)
        self.clients.is_stopping = True
        self.await_progress("level", self.is_level)
        if self.checker.turned:
            self._mend()
        for process in self.processes:
            replica = Replica(process.files.copy(), self.store_settings, process.clock)
            raw = journal_of(replica.journal, replica.start, replica.end)
            self.checker.member_has(process.name, replica.start, raw)
            replica.close()
        if self.checker.violations:
            self.fail(*self.checker.violations)

    def _mend(self) -> None:
        """Bits were turned: in the end none is left."""
        turned = [process for process in self.processes if process.name in self.checker.turned]

        def are_mended() -> bool:
            for process in turned:
                process.mend()
            return all(process.is_mended for process in turned)

        self.await_progress("mended", are_mended)
        self.checker.turned.clear()
        self.await_progress("level again", self.is_level)

    def close(self) -> None:
        self.schedule.loops.clear()
        for process in self.processes:
            if process.loop is not None:
                self.schedule.loops.append(process.loop)
            process.close()
        for task in self._client_loop.bury():
            task.get_coro().close()
        self._client_loop.close()

    def __enter__(self) -> Cluster:
        self._lines = _Lines(self)
        logger = logging.getLogger("dmq")
        self._logger_state = logger.level, logger.propagate
        logger.addHandler(self._lines)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        history, self.history = self.history, []
        self.close()
        self.history = history  # without the last words of the dead
        logger = logging.getLogger("dmq")
        logger.removeHandler(self._lines)
        logger.level, logger.propagate = self._logger_state


class _TrueClock:
    """The registry's clock."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def now_ms(self) -> int:
        return int(self._schedule.now * 1000)

    def monotonic(self) -> float:
        return self._schedule.now

    def boottime(self) -> float:
        return self._schedule.now


class _Lines(logging.Handler):
    """What members log, as part of the history."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        self._cluster.note(self._cluster.schedule.running, record.getMessage())


def _epoch_of(process: Process) -> int:
    assert process.service is not None
    assert process.service.store is not None
    return process.service.store.queries.epoch
