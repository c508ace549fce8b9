"""A shard of processes on this machine, for benchmarks: a name server, brokers that can come and go, and a load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import dmq
from dmq.testing.processes import BrokerProcess, free_port, read_line

__all__ = ["Cluster", "Load", "LoadProcess", "journal_bytes"]

_WAIT_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.1


def journal_bytes(data: Path) -> int:
    """How much journal a data directory has."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(data / "journal"))
    except FileNotFoundError:
        return 0


class Cluster:
    """A name server over SQLite, and the members of one shard in a folder.

    Parameters:
        min_in_sync: of the shard; with 1 the first member serves alone.
    """

    def __init__(self, folder: Path, *, min_in_sync: int = 1) -> None:
        self._folder = folder
        self._min_in_sync = min_in_sync
        self._port = free_port()
        self._name_server: subprocess.Popen[bytes] | None = None
        self.brokers: dict[str, BrokerProcess] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        database = f"sqlite:///{self._folder / 'registry.db'}"
        arguments = ["nameserver", "--database", database, "--port", str(self._port)]
        process = subprocess.Popen([sys.executable, "-m", "dmq.cli", *arguments], stdout=subprocess.PIPE)
        assert process.stdout is not None
        if read_line(process.stdout, time.monotonic() + _WAIT_SECONDS) is None:
            raise SystemExit("the name server does not start")
        self._name_server = process
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in [*self.brokers]:
            self.kill(name)
        if self._name_server is not None:
            self._name_server.kill()
            self._name_server.wait()

    def data(self, name: str) -> Path:
        return self._folder / name

    def start(self, name: str) -> BrokerProcess:
        """Start a member, on the directory that it has."""
        arguments = ["--registry", f"dmq://127.0.0.1:{self._port}", "--shard", "s1", "--replication-port", "0"]
        arguments += ["--name", name, "--min-in-sync", str(self._min_in_sync)]
        broker = BrokerProcess(self.data(name), arguments, wait=_WAIT_SECONDS)
        self.brokers[name] = broker.start()
        return broker

    def kill(self, name: str) -> None:
        self.brokers.pop(name).kill()

    def wipe(self, name: str) -> None:
        """Kill a member and take its directory away."""
        self.kill(name)
        shutil.rmtree(self.data(name))

    def wait_in_sync(self, name: str, count: int) -> None:
        """Until so many members are in sync, as one of them tells."""
        deadline = time.monotonic() + _WAIT_SECONDS
        with self.connect(name) as client:
            while len(client.admin.shard().in_sync) < count:
                if time.monotonic() > deadline:
                    raise SystemExit(f"the shard has not {count} members in sync")
                time.sleep(_LOOK_SECONDS)

    def leader(self, name: str) -> BrokerProcess:
        """The broker that leads, as a member tells."""
        with self.connect(name) as client:
            found = client.admin.shard().leader
        assert found is not None
        return self.brokers[found]

    def connect(self, name: str) -> dmq.Client:
        """A client, once the shard has a leader."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                return dmq.connect(self.brokers[name].url, app="bench")
            except dmq.NotConnected:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)


class Load:
    """Some processes that send as fast as they are answered. One has one core at most, and its interpreter's lock.

    Parameters:
        processes: how many; see `LoadProcess` for the others.
    """

    def __init__(self, url: str, processes: int, senders: int, batch: int, durability: str = "flushed") -> None:
        self._processes = [LoadProcess(url, senders, batch, durability) for _ in range(processes)]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def sent(self) -> int:
        """Messages that were answered so far."""
        return sum(process.sent() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.stop()


class LoadProcess:
    """A process that sends as fast as it is answered, and can be asked how far it is: `python -m bench.shard load`.

    Parameters:
        senders: threads, each with a producer of its own.
        batch: messages a call of `send_many`.
    """

    def __init__(self, url: str, senders: int, batch: int, durability: str = "flushed") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.shard", "load", url, durability, str(senders), str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.sent()

    @property
    def pid(self) -> int:
        return self._process.pid

    def sent(self) -> int:
        """Messages that were answered so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_WAIT_SECONDS)
