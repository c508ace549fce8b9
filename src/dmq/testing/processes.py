"""A broker in a process of its own, on a directory of its own, for tests, demos and benchmarks; and a shard of several.

What always holds: once `start` returned, the broker answers, or the shard's leader; after `stop`, or the end of a
`with`, the processes are gone, and so is the directory if it was made here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from dmq.errors import DMQError
from dmq.testing.ports import free_port

__all__ = ["BrokerProcess", "DevClusterProcess", "cpu_seconds", "free_port", "read_line", "resident_bytes"]

_URL = re.compile(r"dmq://\S+:\d+")
_SCHEDULED = 2  # the kind of CPU clock that counts nanoseconds, on Linux
_LOG_CHARACTERS_MAX = 1 << 20
_CLUSTER_SECONDS = 90.0  # until it is ready
_PAGE = re.compile(r"status page\D+(http://\S+:\d+/)")


class BrokerProcess:
    """One broker.

    Parameters:
        folder: its data directory; a temporary one if left out.
        arguments: more of them for `dmq broker`.
        command: the command that is run, `broker` or `dev`.
    """

    def __init__(
        self, folder: Path | None = None, arguments: Sequence[str] = (), *, command: str = "broker", wait: float = 30.0
    ) -> None:
        self._made = None if folder is not None else Path(tempfile.mkdtemp(prefix="dmq-"))
        self.folder = folder or (self._made or Path()) / "data"
        self._arguments = arguments
        self._command = command
        self._wait = wait
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._logged = ""
        self.url = ""
        self.page = ""
        """The status page, if it serves one."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has logged, over all its runs; the last of it, if it was much."""
        if self._errors is None:
            return self._logged
        size = os.fstat(self._errors.fileno()).st_size
        return self._logged + os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def _close_log(self) -> None:
        self._logged = self.log[-_LOG_CHARACTERS_MAX:]
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def start(self) -> Self:
        """Start it, and wait until it is ready.

        Raises:
            DMQError: it did not start; the message is what it said.
        """
        self.url = self.page = ""
        ports = ("--port", "0", "--metrics-port", "0", "--telnet-port", "none")
        # Into a file: a pipe that nobody reads would block a broker with much to say.
        self._close_log()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        logged = len(self._logged)
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "dmq.cli", self._command, "--data", str(self.folder), *ports, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
        )
        assert process.stdout is not None
        try:
            is_ready = self._is_ready(process.stdout)
        except BaseException:
            self.stop()
            raise
        if not is_ready:
            self.stop(1.0)
            reason = self.log[logged:].strip().removeprefix("dmq: ")
            raise DMQError(reason or f"no broker was ready within {self._wait:g} s")
        return self

    def _is_ready(self, stream: IO[bytes]) -> bool:
        deadline = time.monotonic() + self._wait
        told = ""
        while not self.url or (self._command == "dev" and not self.page):
            line = read_line(stream, deadline)
            if line is None:
                return False
            told += line
            self.url = next(iter(_URL.findall(told)), "")
            self.page = next(iter(_PAGE.findall(told)), "")
        return True

    def cpu_seconds(self) -> float:
        """CPU time it has used."""
        return cpu_seconds(self.pid)

    def kill(self) -> None:
        """End it with kill -9. `start` brings it back on what it left, and on its port if `arguments` name one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        self._close_log()

    def ended(self, timeout: float = 20.0) -> int | None:
        """Wait until it has ended by itself; its exit code, None if it goes on."""
        assert self._process is not None
        try:
            self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        self._close_log()
        return self._process.returncode

    def stop(self, timeout: float = 20.0) -> int | None:
        """Ask it to stop, and wait; kill it if it does not. Returns its exit code."""
        process, self._process = self._process, None
        code = None
        if process is not None:
            process.terminate()
            try:
                process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            code = process.returncode
        self._close_log()
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class DevClusterProcess:
    """A cluster as `dmq dev --shards` runs it: some brokers and a name server, each a process, and one above them.

    Parameters:
        folder: its data.
        replicas: members of each shard.
        session: how long a member that is dead is taken for alive.
        arguments: more of them for `dmq dev`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shards: int = 1,
        replicas: int = 3,
        session: str = "2s",
        arguments: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._size = ("--shards", str(shards), "--replicas", str(replicas), "--session", session)
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        """Names every member."""
        self.rows: list[dict[str, Any]] = []
        """What it said of each member when it was ready: name, shard, role, port and pid."""

    @property
    def pid(self) -> int:
        """Of the process above the others."""
        assert self._process is not None
        return self._process.pid

    def kill_leader(self, shard: str = "s1") -> str:
        """End the process that led a shard when all were ready with kill -9; its name. It is started again after a
        while."""
        leader = next(row for row in self.rows if row["role"] == "leader" and row["shard"] == shard)
        os.kill(leader["pid"], signal.SIGKILL)
        return str(leader["name"])

    def start(self) -> Self:
        """Start it, and wait until a leader serves and the others follow it.

        Raises:
            DMQError: it did not start; the message is what it said.
        """
        ports = ("--port", "0", "--metrics-port", "0", "--telnet-port", "none", "--console-port", "0")
        command = ("dev", *self._size, "--format", "json", "--data", str(self.folder))
        with tempfile.TemporaryFile() as errors:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "dmq.cli", *command, *ports, *self._arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
            )
            assert process.stdout is not None
            told = read_line(process.stdout, time.monotonic() + _CLUSTER_SECONDS)
            if told is None:
                self.stop()
                errors.seek(0)
                reason = errors.read().decode(errors="replace").strip().removeprefix("dmq: ")
                raise DMQError(reason or f"no cluster was ready within {_CLUSTER_SECONDS:g} s")
        facts = json.loads(told)
        self.url, self.rows = facts["url"], facts["members"]
        return self

    def kill(self) -> None:
        """End the process above the others with kill -9: the others end with it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def stop(self, timeout: float = 30.0) -> int | None:
        """Ask it to stop, and wait; kill it if it does not. Returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return process.returncode

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """The settings of the process that starts others are not meant for them; whether loops are compiled is."""
    return {name: value for name, value in os.environ.items() if name == "DMQ_PURE" or not name.startswith("DMQ_")}


def read_line(stream: IO[bytes], deadline: float) -> str | None:
    """A line that a process wrote; None if it ended, or wrote none until a moment of `time.monotonic`."""
    line = b""
    fd = stream.fileno()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return None
        # One byte at a time: what follows the line stays for the next reader.
        byte = os.read(fd, 1)
        if not byte:
            return None
        line += byte
    return line.decode(errors="replace")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, with all its threads; 0 where that cannot be known."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(~pid << 3 | _SCHEDULED)  # what clock_getcpuclockid makes of it
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use now; 0 where that cannot be known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
