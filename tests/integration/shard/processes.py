"""A shard of real processes, by default with a name server on SQLite, and what must hold of its disks afterwards.

Members are killed, stopped, wiped and started again by their number. Clients follow the leader by themselves.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import dmq
from dmq.client.admin.shards import ShardReport
from dmq.testing.processes import free_port
from tests.clock_offset import set_clock_offset
from tests.fault.broker.nursery import ForkedProcess
from tests.integration.shard.wires import CLIENT, REGISTRY, Wires
from tests.patience import PATIENCE_S

SHARD = "s1"
_DATA = ("journal", "queue", "index", "offset", "delay", "runs")
SESSION_SECONDS = 2.0
# A failover within a few seconds; consumers that lost their leader are not waited for long.
SETTINGS = (
    "shard.promise_seconds=1.4",
    "shard.lag_seconds=3",
    "broker.grace_seconds=0.5",
    "store.segment_bytes=1MiB",
    "store.unit_bytes_max=256KiB",
    "store.body_bytes_max=64KiB",
    "store.checkpoint_bytes=1MiB",
    "store.ballast_bytes=0",
)


class ShardProcesses:
    """One shard.

    Parameters:
        folder: data directories and logs go there.
        registry: the URL of one that runs; a name server of its own if left out. With wires, {} stands for its address.
        wires: carry what members, clients and the registry's server say to each other.
    """

    def __init__(
        self,
        folder: Path,
        members: int = 3,
        settings: Iterable[str] = SETTINGS,
        *,
        registry: str | None = None,
        registry_port: int = 0,
        wires: Wires | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._wires = wires
        self._registry_port = registry_port
        self.name_servers: list[ForkedProcess] = []
        if registry is None:
            port = free_port()
            registry = f"dmq://127.0.0.1:{port}"
            database = f"sqlite:///{folder / 'registry.db'}"
            arguments = ["nameserver", "--database", database, "--port", str(port), "--session", f"{SESSION_SECONDS}s"]
            self.name_servers.append(ForkedProcess(arguments, port, folder / "registry.log"))
        self.folders = [folder / f"b{number}" for number in range(members)]
        self._ports: list[int] = []  # where clients reach them
        self.members = [self._member(number, registry, settings) for number in range(members)]
        self.url = "dmq://" + ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def _member(self, number: int, registry: str, settings: Iterable[str]) -> ForkedProcess:
        folder, port, replication, name = self.folders[number], free_port(), free_port(), f"b{number}"
        settings, reached, wires = [*settings], port, self._wires
        if wires is not None:
            reached = wires.add(name, port, by=CLIENT)
            registry = registry.format(f"127.0.0.1:{wires.add(REGISTRY, self._registry_port, by=name)}")
            settings.append(f"shard.address=127.0.0.1:{reached}")
            settings.append(f"shard.replication_address=127.0.0.1:{wires.add(name, replication)}")
        self._ports.append(reached)
        ports = ("--port", str(port), "--metrics-port", "0", "--telnet-port", "none")
        place = ("--registry", registry, "--shard", SHARD, "--replication-port", str(replication))
        pairs = [argument for setting in settings for argument in ("--set", setting)]
        arguments = ["broker", "--data", str(folder), "--name", name, *ports, *place, *pairs]
        clock = folder.with_suffix(".clock")
        set_clock_offset(clock, 0)
        return ForkedProcess(arguments, port, folder.with_suffix(".log"), clock=clock)

    def step_clock(self, number: int, seconds: float) -> None:
        """Set the wall clock of a member off by so much."""
        set_clock_offset(self.folders[number].with_suffix(".clock"), seconds)

    # --- starting and ending ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the name server and all members, and wait until one leads and all are in sync."""
        for process in (*self.name_servers, *self.members):
            process.load()
        for server in self.name_servers:
            server.start()
        self.start_all()
        self.until_whole()

    def start_all(self) -> None:
        """Start all members that do not run, at once."""
        down = [member for member in self.members if not member.pid]
        with ThreadPoolExecutor(len(self.members)) as threads:
            list(threads.map(ForkedProcess.start, down))

    def kill_all(self) -> None:
        """All members at once, as when the power goes, but for what the machine keeps of files."""
        for member in self.members:
            os.kill(member.pid, signal.SIGKILL)
        for member in self.members:
            member.reap()

    def wipe(self, number: int) -> None:
        """The disk of a member that does not run is replaced."""
        assert not self.members[number].pid
        shutil.rmtree(self.folders[number])

    def turn_bits(self, number: int, count: int, rng: random.Random) -> list[str]:
        """Turn bits on the disk of a member that does not run, in its journal and in what is derived from it."""
        assert not self.members[number].pid
        folder = self.folders[number]
        files = [path for name in _DATA for path in sorted((folder / name).rglob("*")) if path.is_file()]
        files = [path for path in files if path.stat().st_size]
        turned = []
        for path in rng.choices(files, [path.stat().st_size for path in files], k=count):
            at = rng.randrange(path.stat().st_size)
            with path.open("r+b") as file:
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            turned.append(f"{path.relative_to(folder)}:{at}")
        return turned

    def repair(self, number: int) -> None:
        """Have a member look through its journal, and mend it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with dmq.connect(self.members[number].url, app="mender", any_member=True, timeout=5) as client:
                    found = client.admin.repair()
                assert not found.left, found
                return
            except dmq.DMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.members, *self.name_servers):
            process.__exit__(kind, error, trace)
        if error is not None:
            for folder in self.folders:
                error.add_note(f"the log of {folder.name} ends:\n" + self.log_of(folder)[-4000:])

    @staticmethod
    def log_of(folder: Path) -> str:
        log = folder.with_suffix(".log")
        lines = log.read_text().splitlines() if log.exists() else []
        return "\n".join(line for line in lines if "suppressed=" not in line)

    # --- looking ----------------------------------------------------------------------------------------------------

    def report(self, but: int | None = None) -> ShardReport | None:
        """The shard, as the first member that answers sees it.

        Parameters:
            but: who is not asked.
        """
        for number, member in enumerate(self.members):
            if not member.pid or number == but:
                continue
            try:
                with dmq.connect(member.url, app="looker", any_member=True, timeout=2) as client:
                    return client.admin.shard()
            except dmq.DMQError:
                continue
        return None

    def until(self, holds: Callable[[ShardReport], object], what: str, *, but: int | None = None) -> ShardReport:
        """Wait until something holds of the shard; see `report`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.report(but)
            if found is not None and holds(found):
                return found
            assert time.monotonic() < deadline, f"{what}: {found}"
            time.sleep(0.05)

    def until_whole(self) -> ShardReport:
        """Wait until one leads, and all members are in sync."""
        count = len(self.members)
        return self.until(
            lambda found: leader_of(found) and sum(member.is_in_sync for member in found.members) == count,
            "not all members came to be in sync",
        )

    def leader(self) -> int:
        """Who leads, by number; waits until one serves."""
        found = leader_of(self.until(leader_of, "no leader was elected"))
        assert found is not None
        return int(found[1:])

    # --- what must hold afterwards ----------------------------------------------------------------------------------

    def check_equal(self) -> int:
        """All members are killed at rest, and their journals are equal byte for byte; returns how long they are."""
        self.until_whole()
        self.until(
            lambda found: (
                len({(m.end, m.committed) for m in found.members}) == 1
                and all(m.end == m.committed for m in found.members)
            ),
            "the members did not come to rest",
        )
        self.kill_all()
        journals = [journal_of(folder) for folder in self.folders]
        first = max(start for start, _ in journals)
        whole = [journal[first - start :] for start, journal in journals]
        assert all(one == whole[0] for one in whole), [len(one) for one in whole]
        return len(whole[0])


def leader_of(found: ShardReport) -> str | None:
    """The member that leads; a leader whose disk was replaced is none any more."""
    return next((member.name for member in found.members if member.role == "leader"), None)


def journal_of(folder: Path) -> tuple[int, bytes]:
    """The journal of a data directory: where it begins, and its bytes."""
    segments = sorted((folder / "journal").glob("*.journal"))
    return int(segments[0].stem), b"".join(segment.read_bytes() for segment in segments)
