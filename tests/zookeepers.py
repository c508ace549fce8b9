"""A private ZooKeeper for tests, from Debian's package: on a free port, in a directory of its own.

What always holds: a server that was started here ends here, and leaves no file behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from dmq.net.address import ServerAddress
from dmq.testing.processes import free_port

JAR = Path("/usr/share/java/zookeeper.jar")
START_S = 60.0
REQUEST_BYTES_MAX = 40 << 10  # of the ensemble
_SERVING = ("leader", "follower", "standalone")


class ZooKeeperProcess:
    """One server, on one port however often it is started.

    Parameters:
        more: lines of its configuration.
        flags: of Java.
    """

    def __init__(self, *more: str, flags: Sequence[str] = ()) -> None:
        assert JAR.exists(), "ZooKeeper is not installed: ./scripts/setup does it"
        self.port = free_port()
        self.address = ServerAddress("127.0.0.1", self.port)
        self.folder = Path(tempfile.mkdtemp(prefix="dmq-zk-"))
        self._more = more
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it, or start it again, on what it had; one that is alone serves then."""
        self.launch()
        self.until_it_answers(serving=not any(line.startswith("server.") for line in self._more))
        return self

    def launch(self) -> None:
        """Begin to start it."""
        assert self._process is None, "it is running"
        lines = [
            "tickTime=500",
            f"dataDir={self.folder}",
            f"clientPort={self.port}",
            "clientPortAddress=127.0.0.1",
            "admin.enableServer=false",
            "forceSync=no",  # tests kill the process, not the machine
            "maxClientCnxns=0",
            *self._more,
        ]
        config = self.folder / "zoo.cfg"
        config.write_text("\n".join(lines) + "\n")
        flags = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        java = f"{os.environ['JAVA_HOME']}/bin/java" if os.environ.get("JAVA_HOME") else "java"
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    java,
                    *flags,
                    *self._flags,
                    f"-Djava.io.tmpdir={self.folder}",
                    "-Dreadonlymode.enabled=true",
                    *("-cp", str(JAR), "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def until_it_answers(self, *, serving: bool = False) -> None:
        """Wait for it.

        Parameters:
            serving: it has a quorum, too.
        """
        deadline = time.monotonic() + START_S
        assert self._process is not None
        while not (said := self.ask("srvr")) or (serving and self.mode_in(said) not in _SERVING):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise AssertionError(f"ZooKeeper did not start: {said}")
            time.sleep(0.05)

    @staticmethod
    def mode_in(said: str) -> str:
        """What it says it is: leader, follower, standalone, read-only; empty if it serves nobody."""
        return next((line[6:] for line in said.splitlines() if line.startswith("Mode: ")), "")

    @property
    def mode(self) -> str:
        return self.mode_in(self.ask("srvr"))

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, command: str) -> str:
        """What it says to a command of four letters; nothing if it does not run."""
        try:
            with socket.create_connection(self.address, 1.0) as connection:
                connection.sendall(command.encode())
                said = b""
                while part := connection.recv(4096):
                    said += part
                return said.decode()
        except OSError:
            return ""

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            # Its threads stop one after the other.
            tasks = Path(f"/proc/{self._process.pid}/task")
            while any(_state(task) not in "TtXZ" for task in tasks.iterdir()):
                time.sleep(0.01)

    def kill(self) -> None:
        """End it at once; `start` brings it back."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class ZooKeeperEnsemble:
    """Three servers. What they take in one request is little, so that a test need not write much to write too much.

    Attributes:
        servers: each can be killed, stopped and started again.
    """

    def __init__(self) -> None:
        peers = [f"server.{number}=127.0.0.1:{free_port()}:{free_port()}" for number in (1, 2, 3)]
        more = ("initLimit=20", "syncLimit=6", *peers)
        flags = (f"-Djute.maxbuffer={REQUEST_BYTES_MAX}",)
        self.servers = [ZooKeeperProcess(*more, flags=flags) for _ in peers]
        for number, server in enumerate(self.servers, start=1):
            (server.folder / "myid").write_text(f"{number}\n")

    @property
    def addresses(self) -> tuple[ServerAddress, ...]:
        return tuple(server.address for server in self.servers)

    @property
    def hosts(self) -> str:
        return ",".join(map(str, self.addresses))

    def heal(self) -> None:
        """Have all servers run, with a quorum."""
        for server in self.servers:
            if server.is_running:
                server.signal(signal.SIGCONT)
            else:
                server.launch()
        for server in self.servers:
            server.until_it_answers(serving=True)

    def __enter__(self) -> Self:
        try:
            self.heal()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.remove()


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"  # it has ended


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperProcess]:
    """A ZooKeeper that tests share, and leave running."""
    with ZooKeeperProcess() as process:
        yield process


@pytest.fixture(scope="session")
def zookeeper_ensemble() -> Iterator[ZooKeeperEnsemble]:
    """An ensemble that tests share; each leaves it healed."""
    with ZooKeeperEnsemble() as ensemble:
        yield ensemble
