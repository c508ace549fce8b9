"""`dmq dev --shards`: a cluster on one machine. Each member of a shard is a process, and so is a name server.

What always holds: everything is below one folder, and a second start in it finds the shards again; while the first one
runs it is refused, and touches nothing. A process that dies is started again, on the port it had. None is left when
this one ends: a signal ends it once the others have stopped, and on Linux they end with it if it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dmq.cli.process.child_process import ChildProcess, stop_children, stop_event, watch_children
from dmq.errors import DirectoryInUse, DMQError, InvalidSettings

if TYPE_CHECKING:
    from dmq.client.admin.shards import ShardReport

__all__ = ["SESSION", "SHARDS_MAX", "DevCluster", "DevClusterOptions", "check_lone", "held_folder"]

SESSION: Final = "6s"
SHARDS_MAX: Final = 16
REGISTRY: Final = "nameserver"
_LETTERS: Final = "abcdefg"
_DATABASE: Final = "registry.sqlite"
_LOCK: Final = "dev.lock"
_DEAD_LETTERS: Final = "letters.sqlite"
_READY_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.2
_PORTS_APART: Final = 10


@dataclass(frozen=True, slots=True)
class DevPorts:
    """Where the first member listens; the others have those behind it. 0 takes any."""

    client: int = 0
    metrics: int = 0
    telnet: int | None = None  # none is off
    console: int | None = None

    def of(self, at: int) -> DevPorts:
        """Those of one member."""
        apart = _PORTS_APART * at
        return DevPorts(
            self.client and self.client + apart,
            self.metrics and self.metrics + at,
            self.telnet and self.telnet + apart,
            self.console and self.console + at,
        )


@dataclass(frozen=True, slots=True)
class DevClusterOptions:
    """What a cluster on one machine is made of.

    Parameters:
        folder: everything is below it.
        replicas: members of each shard.
        session: seconds after which a member that says nothing is taken for dead.
        is_insecure: another address than loopback is meant.
        arguments: more of them for each `dmq broker`.
    """

    folder: Path
    host: str
    ports: DevPorts
    shards: int
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
    """Refuse to run a broker by itself where a cluster has its data.

    Raises:
        InvalidSettings: there is one.
    """
    if (folder / _DATABASE).exists():
        raise InvalidSettings(f"{folder} holds the data of a cluster: add --shards, or give another --data")


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other clusters out of it meanwhile: they would take the logs of its processes away.

    Raises:
        DirectoryInUse: another one runs there.
        InvalidSettings: it cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(f"{folder} cannot be made a directory ({error.strerror})") from error
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidSettings(f"{folder} cannot be written to ({error.strerror}): give another --data") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DirectoryInUse(
                f"a cluster runs in {folder} already: stop that dmq dev, or give another --data, and other ports"
            ) from None
        yield
    finally:
        os.close(lock)


@dataclass(frozen=True, slots=True)
class DevMember:
    """One member of one shard, and its process."""

    shard: str
    child: ChildProcess


class DevCluster:
    """The processes of a cluster, from their start to their end."""

    def __init__(self, options: DevClusterOptions) -> None:
        self._options = options
        folder, port = options.folder, options.ports.client
        self._registry = ChildProcess(
            REGISTRY, self._registry_command, folder / f"{REGISTRY}.log", port - 1 if port else 0
        )
        self._members = [self._member(number, at) for number in range(options.shards) for at in range(options.replicas)]
        self._children = [member.child for member in self._members]

    def _member(self, number: int, at: int) -> DevMember:
        """The member `at` of a shard. Members of the first shard have a letter for a name, so that they are found again
        when more shards are asked for."""
        options = self._options
        name = _LETTERS[at] + (str(number + 1) if number else "")
        shard = f"s{number + 1}"
        ports = options.ports.of(number * options.replicas + at)
        child = ChildProcess(
            name,
            lambda port: self._member_command(name, shard, port, ports),
            options.folder / f"{name}.log",
            ports.client,
        )
        return DevMember(shard, child)

    @property
    def folder(self) -> Path:
        """Everything is below it."""
        return self._options.folder

    @property
    def url(self) -> str:
        """Names every member."""
        return f"dmq://{','.join(child.address for child in self._children)}"

    def _registry_command(self, port: int) -> Sequence[str]:
        options = self._options
        database = f"sqlite:///{options.folder / _DATABASE}"
        session = f"{options.session:g}s"
        return (
            "nameserver", "--database", database, "--host", options.host, "--port", str(port), "--session", session,
            "--log-level", "warning", *self._insecure,
        )  # fmt: skip

    def _member_command(self, name: str, shard: str, port: int, ports: DevPorts) -> Sequence[str]:
        options = self._options
        replication = ports.client + 2 if ports.client else 0
        console = () if ports.console is None else ("--console-port", str(ports.console))
        return (
            "broker", "--data", str(options.folder / name), "--host", options.host, "--port", str(port),
            "--name", name, "--metrics-port", str(ports.metrics),
            "--telnet-port", "none" if ports.telnet is None else str(ports.telnet), *console,
            "--registry", f"dmq://{self._registry.address}", "--shard", shard,
            "--replication-port", str(replication), "--replicas", str(options.replicas),
            "--min-in-sync", str(min(2, options.replicas)),
            "--set", f"shard.promise_seconds={options.session * 2 / 3:.3f}",
            "--set", f"broker.dead_letters_url=sqlite:///{options.folder.absolute() / _DEAD_LETTERS}",
            *self._insecure, *options.arguments,
        )  # fmt: skip

    @property
    def _insecure(self) -> tuple[str, ...]:
        return ("--insecure",) if self._options.is_insecure else ()

    def run(self, on_ready: Callable[[DevCluster, list[dict[str, Any]]], None]) -> None:
        """Run it until SIGTERM or Ctrl-C.

        Parameters:
            on_ready: called when every shard has a leader and all its members follow it, with a row for each member.

        Raises:
            DMQError: it cannot be started.
        """
        stop = stop_event()
        with held_folder(self._options.folder):
            try:
                self._start(stop)
                reports = self._wait_for_leaders(stop)
                if reports is not None:
                    on_ready(self, self._rows(reports))
                while not stop.wait(_LOOK_SECONDS):
                    watch_children([self._registry, *self._children])
            finally:
                stop_children(self._children, [self._registry])

    @property
    def registry_facts(self) -> dict[str, Any]:
        """Port and process of the name server."""
        return {"name": REGISTRY, "port": self._registry.port, "pid": self._registry.pid}

    def _start(self, stop: threading.Event) -> None:
        for child in (self._registry, *self._children):
            child.clear_log()
        self._registry.start()
        self._registry.wait_ready()
        for child in self._children:
            child.start()
        for child in self._children:
            if not stop.is_set():
                child.wait_ready()

    def _wait_for_leaders(self, stop: threading.Event) -> list[ShardReport] | None:
        """How the shards stand once a member leads each and all others follow; None if it is to end before.

        Raises:
            DMQError: that takes too long.
        """
        from dmq.client.client import connect

        deadline, why = time.monotonic() + _READY_SECONDS, "no member has answered"
        names = dict.fromkeys(member.shard for member in self._members)
        while not stop.wait(_LOOK_SECONDS):
            watch_children([self._registry, *self._children])
            try:
                with connect(self.url, app="dmq-dev", any_member=True) as client:
                    client.admin.timeout = 5.0
                    reports = [client.admin.shard(name) for name in names]
                late = [
                    report
                    for report in reports
                    if report.leader is None or len(report.in_sync) < self._options.replicas
                ]
                if not late:
                    return reports
                why = late[0].findings[0].what if late[0].findings else f"no member leads {late[0].name}"
            except DMQError as error:
                why = error.message
            if time.monotonic() > deadline:
                raise DMQError(f"the cluster was not ready within {_READY_SECONDS:g} s: {why}")
        return None

    def _rows(self, reports: Sequence[ShardReport]) -> list[dict[str, Any]]:
        roles = {member.name: member.role for report in reports for member in report.members}
        return [
            {
                "name": member.child.name,
                "shard": member.shard,
                "role": roles.get(member.child.name, ""),
                "port": member.child.port,
                "pid": member.child.pid,
            }
            for member in self._members
        ]
