"""`dmq dev --shards`: a shard on one machine. Each member is a process of its own, and so is a name server.

What always holds: everything is below one folder, and a second start in it finds the shard again. A process that dies
is started again, on the port it had. None is left when this one ends: a signal ends it once the others have stopped,
and on Linux they end with it if it is killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from dmq.errors import DMQError, InvalidSettings

if TYPE_CHECKING:
    from dmq.client.admin.shards import ShardReport

__all__ = ["SESSION", "DevShard", "DevShardOptions", "check_lone"]

SESSION: Final = "6s"
SHARD: Final = "s1"
NAMES: Final = "abcdefg"
REGISTRY: Final = "nameserver"
_DATABASE: Final = "registry.sqlite"
_READY_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.2
_PORTS_APART: Final = 10
# A process that dies so soon after its start, so often in a row, will not do better.
_SOON_SECONDS: Final = 10.0
_DEATHS_MAX: Final = 5
_AGAIN_SECONDS: Final = 1.0
_LINE: Final = re.compile(r"dmq://(\S+):(\d+)")
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class DevShardOptions:
    """What a shard on one machine is made of.

    Parameters:
        folder: everything is below it.
        port: of the first member, the others have those behind it; 0 takes any.
        session: seconds after which a member that says nothing is taken for dead.
        is_insecure: another address than loopback is meant.
        arguments: more of them for each `dmq broker`.
    """

    folder: Path
    host: str
    port: int
    metrics_port: int
    replicas: int
    session: float
    is_insecure: bool = False
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.folder / "STORE").exists():
            raise InvalidSettings(
                f"{self.folder} holds the data of a broker by itself: give another --data, or leave --shards out"
            )


def check_lone(folder: Path) -> None:
    """Refuse to run a broker by itself where a shard has its data.

    Raises:
        InvalidSettings: there is one.
    """
    if (folder / _DATABASE).exists():
        raise InvalidSettings(f"{folder} holds the data of a shard: add --shards 1, or give another --data")


class ChildProcess:
    """A process that is started again when it dies.

    Parameters:
        command: of `dmq`, with its arguments, for a port.
        log: the file that it logs to.
        port: that it is to listen on; 0 until it has taken one.
    """

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], log: Path, port: int) -> None:
        self.name = name
        self.program = [sys.executable, "-m", "dmq.cli"]
        self._command = command
        self._log = log
        self.port = port
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._deaths = 0  # soon after the start, in a row
        self._again_at: float | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def clear_log(self) -> None:
        """Forget what an earlier run logged."""
        self._log.unlink(missing_ok=True)

    def start(self) -> None:
        """Start it; `wait_ready` waits for it."""
        parent, prctl = os.getpid(), _prctl()

        def begin() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # which died before that
                os._exit(1)

        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.program, *self._command(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us, and we end it in order
                preexec_fn=begin,  # no other thread runs
            )
        self._began = time.monotonic()

    def wait_ready(self) -> None:
        """Wait until it listens.

        Raises:
            DMQError: it does not; with the last that it logged.
        """
        from dmq.testing.processes import read_line

        assert self._process is not None
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + _READY_SECONDS)
        found = None if line is None else _LINE.search(line)
        if found is None:
            raise DMQError(f"{self.name} did not start: {self.last_words()}")
        self.address, self.port = f"{found[1]}:{found[2]}", int(found[2])

    def last_words(self) -> str:
        """The last line that it logged."""
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return f"{lines[-1].removeprefix('dmq: ')} (more in {self._log})" if lines else f"see {self._log}"

    def look(self) -> str:
        """Start it again if it has died; what to tell of that.

        Raises:
            DMQError: it dies as soon as it is started.
        """
        process, now = self._process, time.monotonic()
        assert process is not None
        if self._again_at is not None:
            if now < self._again_at:
                return ""
            self._again_at = None
            self.start()  # its port is known: nobody has to hear it say so again
            return f"{self.name} runs again, with pid {self.pid}"
        code = process.poll()
        if code is None:
            return ""
        process.communicate()
        self._deaths = self._deaths + 1 if now - self._began < _SOON_SECONDS else 1
        if self._deaths > _DEATHS_MAX:
            raise DMQError(f"{self.name} dies as soon as it is started: {self.last_words()}")
        self._again_at = now + _AGAIN_SECONDS
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        return f"{self.name} (pid {process.pid}) {how}: it is started again"

    def ask_to_stop(self) -> None:
        """Have it finish, and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, deadline: float) -> None:
        """Wait for its end; at a moment of `time.monotonic` it is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


class DevShard:
    """The processes of a shard, from their start to their end."""

    def __init__(self, options: DevShardOptions) -> None:
        self._options = options
        folder, port = options.folder, options.port
        self._registry = ChildProcess(
            REGISTRY, self._registry_command, folder / f"{REGISTRY}.log", port - 1 if port else 0
        )
        self._members = [
            ChildProcess(
                name,
                lambda port, at=at: self._member_command(at, port),  # type: ignore[misc]
                folder / f"{name}.log",
                port + _PORTS_APART * at if port else 0,
            )
            for at, name in enumerate(NAMES[: options.replicas])
        ]

    @property
    def folder(self) -> Path:
        """Everything is below it."""
        return self._options.folder

    @property
    def url(self) -> str:
        """Names every member."""
        return f"dmq://{','.join(member.address for member in self._members)}"

    def _registry_command(self, port: int) -> Sequence[str]:
        options = self._options
        database = f"sqlite:///{options.folder / _DATABASE}"
        session = f"{options.session:g}s"
        return (
            "nameserver", "--database", database, "--host", options.host, "--port", str(port), "--session", session,
            "--log-level", "warning", *self._insecure,
        )  # fmt: skip

    def _member_command(self, at: int, port: int) -> Sequence[str]:
        options, name = self._options, NAMES[at]
        replication = options.port + 2 + _PORTS_APART * at if options.port else 0
        metrics = options.metrics_port + at if options.metrics_port else 0
        return (
            "broker", "--data", str(options.folder / name), "--host", options.host, "--port", str(port),
            "--name", name, "--metrics-port", str(metrics), "--telnet-port", "none",
            "--registry", f"dmq://{self._registry.address}", "--shard", SHARD,
            "--replication-port", str(replication), "--replicas", str(options.replicas),
            "--min-in-sync", str(min(2, options.replicas)),
            "--set", f"shard.promise_seconds={options.session * 2 / 3:.3f}", *self._insecure, *options.arguments,
        )  # fmt: skip

    @property
    def _insecure(self) -> tuple[str, ...]:
        return ("--insecure",) if self._options.is_insecure else ()

    def run(self, on_ready: Callable[[DevShard, list[dict[str, Any]]], None]) -> None:
        """Run it until SIGTERM or Ctrl-C.

        Parameters:
            on_ready: called when a leader serves and all members follow it, with a row for each process.

        Raises:
            DMQError: it cannot be started, or a process dies again and again.
        """
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: stop.set())
        self._options.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start(stop)
            report = self._wait_for_leader(stop)
            if report is not None:
                on_ready(self, self._rows(report))
            while not stop.wait(_LOOK_SECONDS):
                self._look()
        finally:
            self._stop()

    def _start(self, stop: threading.Event) -> None:
        for child in (self._registry, *self._members):
            child.clear_log()
        self._registry.start()
        self._registry.wait_ready()
        for member in self._members:
            member.start()
        for member in self._members:
            if not stop.is_set():
                member.wait_ready()

    def _look(self) -> None:
        for child in (self._registry, *self._members):
            if told := child.look():
                typer.echo(told, err=True)

    def _wait_for_leader(self, stop: threading.Event) -> ShardReport | None:
        """How the shard stands once a member leads it and all others follow; None if it is to end before.

        Raises:
            DMQError: that takes too long.
        """
        from dmq.client.client import connect

        deadline, why = time.monotonic() + _READY_SECONDS, "no member has answered"
        while not stop.wait(_LOOK_SECONDS):
            self._look()
            try:
                with connect(self.url, app="dmq-dev", any_member=True) as client:
                    client.admin.timeout = 5.0
                    report = client.admin.shard(SHARD)
                if report.leader is not None and len(report.in_sync) >= len(self._members):
                    return report
                why = report.findings[0].what if report.findings else "no member leads"
            except DMQError as error:
                why = error.message
            if time.monotonic() > deadline:
                raise DMQError(f"the shard was not ready within {_READY_SECONDS:g} s: {why}")
        return None

    def _rows(self, report: ShardReport) -> list[dict[str, Any]]:
        roles = {member.name: member.role for member in report.members}
        rows = [
            {
                "name": member.name,
                "shard": report.name,
                "role": roles.get(member.name, ""),
                "port": member.port,
                "pid": member.pid,
            }
            for member in self._members
        ]
        registry = self._registry
        return [
            *rows,
            {"name": REGISTRY, "shard": "", "role": REGISTRY, "port": registry.port, "pid": registry.pid},
        ]

    def _stop(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        deadline = time.monotonic() + _STOP_SECONDS
        for member in self._members:
            member.ask_to_stop()
        for member in self._members:
            member.stop(deadline)
        self._registry.ask_to_stop()
        self._registry.stop(deadline)


def _prctl() -> Callable[[int, int], object]:
    """What tells the kernel how a process ends with its parent; elsewhere than on Linux it does nothing."""
    if not sys.platform.startswith("linux"):
        return lambda option, argument: None
    found: Callable[[int, int], object] = ctypes.CDLL(None, use_errno=True).prctl
    return found
