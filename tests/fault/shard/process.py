"""One simulated machine, and the member's process that runs on it, dies, and is started again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from dmq.errors import DMQError
from dmq.shard.member import Directory, Member, Place
from dmq.storage.journal.journal import FOLDER
from dmq.storage.replica import Replica
from dmq.storage.upkeep.identity import Membership, parse_identity
from dmq.testing import MemoryFiles
from dmq.testing.disk.crash import Keep
from tests.fault.shard.clock import ClockMode, MachineClock
from tests.fault.shard.loop import VirtualLoop
from tests.fault.shard.network import SimulatedPeers
from tests.fault.shard.registry import Line, SimulatedRegistry
from tests.fault.shard.service import SimulatedService

if TYPE_CHECKING:
    from tests.fault.shard.cluster import Cluster

__all__ = ["Process"]

T = TypeVar("T")
_WATCH_SECONDS = 0.25


class Process:
    """A machine by its name; `member` is there while its process runs.

    Attributes:
        files: its disk.
        disk_seconds: how long a flush takes, at least and at most.
        wanted: it is to be running: it is started again when it has ended by itself.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self.name = name
        self._rng = random.Random(cluster.rng.random())
        self.clock = MachineClock(cluster.schedule.time, self._rng)
        self.files = MemoryFiles(rng=random.Random(self._rng.random()))
        self.old_files: MemoryFiles | None = None
        self.line = Line()
        self.host = cluster.network.host(name)
        self.disk_seconds = (0.0005, 0.006)
        self.wanted = False
        self.starts = 0
        self._is_mending = False
        self._mending_in = -1  # the life in which it was asked to mend last
        self._flushed = 0
        self._replica: Replica | None = None  # the last that its process had
        self._turned_in = -1  # the life after which a bit of it turned
        self.loop: VirtualLoop | None = None
        self.member: Member | None = None
        self.service: SimulatedService | None = None
        self.registry: SimulatedRegistry | None = None
        self._graves: list[tuple[Any, ...]] = []  # what is dead and must not be collected
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return self.name

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.wanted = True
        if self.member is not None:
            return
        cluster = self._cluster
        self.starts += 1
        loop = self.loop = VirtualLoop(self.clock)
        loop.name = self.name
        loop.ready_at = cluster.schedule.now
        files = self.files
        loop.after_turn = lambda: self._fell() if files._machine.dead else None
        self.registry = SimulatedRegistry(
            cluster.registry, self.line, schedule=cluster.schedule, loop=loop, clock=self.clock
        )
        self.service = SimulatedService(
            self.name,
            cluster.checker,
            self.on_disk,
            fail=lambda why: cluster.schedule.after(0, lambda: self._failed(loop, why)),
        )
        self.host.loop, self.host.is_silent = loop, False
        place = Place(
            broker=self.name,
            shard="s",
            address=f"{self.name}:9600",
            replication_address=f"{self.name}:9613",
        )
        directory = Directory(self.files, cluster.store_settings, self.clock, self.on_disk, draw=self.draw)
        member = self.member = Member(
            directory,
            place,
            self.registry,
            SimulatedPeers(cluster.network, self.host),
            self.service,
            cluster.member_settings,
        )
        self.host.hearing = member
        task = loop.create_task(member.run())
        task.add_done_callback(lambda done: cluster.schedule.after(0, lambda: self._ended(loop, done)))
        cluster.schedule.loops.append(loop)
        self._watch(loop)
        cluster.note(self.name, f"started, time {self.starts}")

    def stop(self, *, hand_over: bool) -> None:
        """It is asked to end, as by SIGTERM."""
        self.wanted = False
        self._run(lambda member: member.stop(hand_over=hand_over), "stop")

    def hand_over(self) -> None:
        """It is asked to let another one lead."""
        self._run(lambda member: member.hand_over(), "hand-over")

    def draw(self) -> int:
        """An id that nobody has drawn before."""
        return self._rng.getrandbits(64)

    def mend(self) -> None:
        """It is asked to look through its journal, and to mend it; again, if its process ended before it was done."""
        if self._mending_in == self.starts or self.member is None:
            return
        self._mending_in, self._is_mending = self.starts, True

        async def mend(member: Member) -> Any:
            mended = await member.mend()
            self._is_mending = False
            return mended

        self._run(mend, "mend")

    @property
    def is_mended(self) -> bool:
        """Whether it has looked through its journal, and nothing is damaged that the leader has not dropped.

        What no other member could give at that moment is mended later, by itself.
        """
        member = self.member
        return not self._is_mending and member is not None and member.report().damaged == 0

    def _run(self, ask: Callable[[Member], Coroutine[Any, Any, Any]], what: str) -> None:
        member, loop = self.member, self.loop
        if member is None or loop is None:
            return

        async def run() -> None:
            try:
                outcome = await ask(member)
            except DMQError as error:
                outcome = repr(error)
            self._cluster.note(self.name, f"{what}: {outcome}")

        self._cluster.note(self.name, f"{what} begins")
        loop.call_soon(lambda: self._tasks.append(loop.create_task(run())))

    def _watch(self, loop: VirtualLoop) -> None:
        """The thread that ends the session of a member whose loop, or flush, stands still."""
        if loop is not self.loop or self.member is None or self.registry is None:
            return
        self._cluster.schedule.after(_WATCH_SECONDS, lambda: self._watch(loop))
        if not self.line.is_stopped and not self.member.heart.is_beating:
            self.registry.close_session()

    def _ended(self, loop: VirtualLoop, task: asyncio.Task[None]) -> None:
        """The process has ended by itself."""
        if loop is not self.loop:
            return
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._cluster.note(self.name, f"ended with {error!r}")
            self._cluster.ended_with(self.name, error)
        else:
            self._cluster.note(self.name, "ended")
        self._bury(is_silent=False)
        self.files = self.files.kill()
        self._start_later()

    def _fell(self) -> None:
        """The power went within an operation of the disk; see `fall`."""
        self.crash(power=True)
        self._start_later()

    def fall(self, operations: int) -> None:
        """The power goes within the so manieth operation of the disk from now on."""
        self.files.crash_at = self.files.operations + operations

    def _failed(self, loop: VirtualLoop, why: str) -> None:
        if loop is self.loop:
            self._cluster.note(self.name, f"fails: {why}")
            self.crash()
            self._start_later()

    def _start_later(self) -> None:
        if self.wanted:
            self._cluster.schedule.after(self._rng.uniform(0.1, 2.0), self._start_again)

    def _start_again(self) -> None:
        if self.wanted:
            self.start()

    def crash(self, *, power: bool = False, keep: Keep | None = None) -> None:
        """It dies on the spot; with the power, all that was not flushed may go.

        Parameters:
            keep: what stays of that; drawn if left out.
        """
        if self.member is None:
            return
        self._bury(is_silent=power)
        if power:
            self.files = self.files.crash(self._rng, keep)
            self.clock.reboot()
        else:
            self.files = self.files.kill()
        self._cluster.note(self.name, "loses its power" if power else "is killed")

    def _bury(self, *, is_silent: bool) -> None:
        assert self.loop is not None
        assert self.registry is not None
        self._flushed = self.flushed
        self.resume()
        self._graves.append((self.loop.bury(), self.loop, self.member, self.service))
        self._cluster.failures += [f"{self.name}: {failure}" for failure in self.loop.failures]
        self._cluster.schedule.loops.remove(self.loop)
        self.registry.end()
        self._cluster.network.died(self.host, is_silent=is_silent)
        self.loop = self.member = self.service = self.registry = self._replica = None

    def close(self) -> None:
        """The run is over: let go of everything without a word."""
        if self.member is not None:
            self.crash()
        for tasks, loop, *_ in self._graves:
            for task in tasks:
                coroutine = task.get_coro()
                try:
                    coroutine.close()
                except BaseException:
                    pass  # its last words do not matter: the machine is gone
            loop.close()

    # --- standing still ---------------------------------------------------------------------------------------------

    def pause(self, mode: ClockMode = ClockMode.RUNS) -> None:
        """The process stands still as a whole; its clocks run, or do not."""
        if self.loop is not None:
            self.loop.is_paused = True
            self.line.is_stopped = True
            self.clock.set_mode(mode)
            if mode is ClockMode.FROZEN and self.service is not None:
                self.service.is_excepted = True

    def wedge(self) -> None:
        """The event loop stands still, and other threads go on."""
        if self.loop is not None:
            self.loop.is_paused = True

    def resume(self) -> None:
        self.clock.set_mode(ClockMode.RUNS)
        self.line.is_stopped = False
        if self.loop is not None:
            self.loop.is_paused = False
            self.loop.ready_at = self._cluster.schedule.now

    @property
    def membership(self) -> Membership | None:
        """What its directory says of itself."""
        try:
            identity = parse_identity(self.files.read_file("STORE"))
        except (FileNotFoundError, ValueError):
            return None
        return identity.member

    @property
    def is_doubtful(self) -> bool:
        """Whether it has lost something, whether or not it knows that yet."""
        member = self.membership
        return member is None or member.doubtful or member.life == self._turned_in

    @property
    def is_rotten(self) -> bool:
        """Whether a bit of what is committed turned and was not mended: it may be found late, where nobody reads."""
        checker = self._cluster.checker
        for offset in checker.turned.get(self.name, ()):
            paths = [path for path in self.files.paths() if path.startswith(f"{FOLDER}/") and _start_of(path) <= offset]
            if paths and offset >= checker.first:
                at = offset - _start_of(max(paths))
                own = self.files.read_file(max(paths))[at : at + 1]
                right = checker.journal[offset - checker.first : offset - checker.first + 1]
                if own and right and own != right:
                    return True
        return False

    @property
    def known(self) -> tuple[int, int]:
        """From where to where its journal goes that it knows as committed; the process is dead."""
        return self._bounds()[:2]

    @property
    def tail(self) -> tuple[int, int]:
        """From where to where the rest of it goes."""
        return self._bounds()[1:]

    def _bounds(self) -> tuple[int, int, int]:
        if self.membership is None:
            return 0, 0, 0
        replica = Replica(self.files.copy(), self._cluster.store_settings, self.clock)
        replica.close()
        return replica.start, replica.applied, replica.end

    def turn(self, offset: int, bit: int = 0) -> None:
        """A bit of its journal turns; the process is dead."""
        assert self.member is None
        member, files = self.membership, self.files
        self._turned_in = 0 if member is None else member.life
        path = max(path for path in files.paths() if path.startswith(f"{FOLDER}/") and _start_of(path) <= offset)
        files.flip_bit(path, offset - _start_of(path), bit)
        self._cluster.checker.turned.setdefault(self.name, set()).add(offset)
        self._cluster.note("!", f"a bit of the journal of {self} turns, at {offset}")

    @property
    def flushed(self) -> int:
        """Up to where its disk has had the journal for certain; what it has lost since counts."""
        if self.member is not None:
            term, replica = self.member.term, self.member._replica
            if term is not None:
                self._flushed = max(self._flushed, term.store.queries.flushed)
            elif replica is not None:
                self._replica = replica  # a member that stops lets go of it before it is gone
            if self._replica is not None:
                self._flushed = max(self._flushed, self._replica.flushed)
        return self._flushed

    @property
    def is_running(self) -> bool:
        return self.loop is not None and not self.loop.is_paused

    # --- the disk -----------------------------------------------------------------------------------------------------

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Runs what blocks, in a thread in real life."""
        low, high = self.disk_seconds
        share = self._rng.random()
        seconds = self._rng.uniform(low, high)
        await asyncio.sleep(seconds * share)
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        await asyncio.sleep(seconds * (1 - share))
        if failure is not None:
            raise failure
        return result

    def wipe(self) -> None:
        """Another, empty disk; the process is dead."""
        assert self.member is None
        self.files = MemoryFiles(rng=random.Random(self._rng.random()))
        self.old_files = None
        self._cluster.note(self.name, "gets an empty disk")

    def keep_copy(self) -> None:
        """Somebody copies the data directory, to put it back later."""
        self.old_files = self.files.copy()

    def restore_copy(self) -> None:
        """The old copy is put in the place of the directory; the process is dead."""
        assert self.member is None
        assert self.old_files is not None
        self.files, self.old_files = self.old_files, None
        self._cluster.note(self.name, "gets an old copy of its directory")


def _start_of(path: str) -> int:
    """The journal offset of a segment."""
    return int(path.rpartition("/")[2].partition(".")[0])
