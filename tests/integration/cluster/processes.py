"""A cluster of real processes: several shards over one name server on SQLite. For every test that needs more than one.

Shards are called s1, s2, …, and their members s1a, s1b, …; by default each shard has one member, which starts fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import dmq
from dmq.protocol.cluster.route import Route, RouteReply, ShardRoute, TopicRoute
from dmq.protocol.commands import Command
from dmq.testing.processes import free_port
from tests.fault.broker.nursery import ForkedProcess
from tests.integration.cluster.questions import ask
from tests.integration.shard.processes import SESSION_SECONDS, SETTINGS
from tests.patience import PATIENCE_S

__all__ = ["ClusterProcesses"]


class ClusterProcesses:
    """Shards of members, each a process.

    Parameters:
        folder: data directories and logs go there.
        shards: how many.
        replicas: members of each.
        registry: the URL of one that runs; a name server of its own if left out.
        hosts: what the members of a shard call their hosts, in turn.
        tree: another checkout, whose code the processes run.

    Attributes:
        members: processes by name.
        url: names all members.
        registry: its URL.
    """

    def __init__(
        self,
        folder: Path,
        shards: int = 3,
        replicas: int = 1,
        *,
        settings: Iterable[str] = SETTINGS,
        registry: str | None = None,
        hosts: Sequence[str] = ("127.0.0.1",),
        tree: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._tree = tree
        self.settings = [*settings]
        self.replicas = replicas
        self.hosts = hosts
        self.name_servers: list[ForkedProcess] = []
        if registry is None:
            port = free_port()
            registry = f"dmq://127.0.0.1:{port}"
            database = f"sqlite:///{folder / 'registry.db'}"
            arguments = ["nameserver", "--database", database, "--port", str(port), "--session", f"{SESSION_SECONDS}s"]
            self.name_servers.append(ForkedProcess(arguments, port, folder / "registry.log", tree=tree))
        self.registry = registry
        self.shards = [f"s{number + 1}" for number in range(shards)]
        self.members: dict[str, ForkedProcess] = {}
        for shard in self.shards:
            self._add_members(shard)

    def _add_members(self, shard: str) -> list[str]:
        names = [f"{shard}{'abcdefg'[at]}" for at in range(self.replicas)]
        for name in names:
            self._add_member(name)
        return names

    def _add_member(self, name: str) -> None:
        folder, port, shard = self.folder / name, free_port(), name[:-1]
        ports = ("--port", str(port), "--metrics-port", "0", "--telnet-port", "none")
        place = ("--registry", self.registry, "--shard", shard, "--replication-port", str(free_port()))
        set_size = ("--replicas", str(self.replicas), "--min-in-sync", str(min(2, self.replicas)))
        host = self.hosts["abcdefg".index(name[-1]) % len(self.hosts)]
        settings = (*self.settings, f"shard.address={host}:{port}")
        pairs = [argument for setting in settings for argument in ("--set", setting)]
        arguments = ["broker", "--data", str(folder), "--name", name, *ports, *place, *set_size, *pairs]
        self.members[name] = ForkedProcess(arguments, port, folder.with_suffix(".log"), tree=self._tree)

    def move(self, name: str) -> None:
        """Start a member that is stopped on other ports than it had."""
        self.members[name].__exit__(None, None, None)
        self._add_member(name)
        self.members[name].start()

    @property
    def url(self) -> str:
        return "dmq://" + ",".join(f"127.0.0.1:{member.port}" for member in self.members.values())

    def url_of(self, shard: str) -> str:
        """That of the members of one shard."""
        ports = [member.port for name, member in self.members.items() if name[:-1] == shard]
        return "dmq://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    # --- starting and ending ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the name server and all members, and wait until each shard has a leader, which all members know."""
        for process in (*self.name_servers, *self.members.values()):
            process.load()
        for server in self.name_servers:
            server.start()
        self.start_all()
        self.until_led()

    def _start(self, names: Iterable[str]) -> None:
        down = [self.members[name] for name in names if not self.members[name].pid]
        if down:
            with ThreadPoolExecutor(len(down)) as threads:
                list(threads.map(ForkedProcess.start, down))

    def start_all(self) -> None:
        """Start all members that do not run, at once."""
        self._start(self.members)

    def add_shard(self) -> str:
        """Another shard joins; returns its name, once it has a leader."""
        shard = f"s{len(self.shards) + 1}"
        self.shards.append(shard)
        names = self._add_members(shard)
        for name in names:
            self.members[name].load()
        self._start(names)
        self.until_led()
        return shard

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
        for process in (*self.members.values(), *self.name_servers):
            process.__exit__(kind, error, trace)
        if error is not None:
            for name in self.members:
                log = (self.folder / name).with_suffix(".log")
                text = log.read_text() if log.exists() else ""
                error.add_note(f"the log of {name} ends:\n{text[-3000:]}")

    # --- looking ----------------------------------------------------------------------------------------------------

    def routes(self, *topics: str, member: str = "") -> RouteReply | None:
        """What the first member that answers says; or the one that is named."""
        for name in [member] if member else [*self.members]:
            process = self.members[name]
            if process.pid and (found := ask(process.port, Command.ROUTE, Route([*topics]))) is not None:
                assert isinstance(found, RouteReply)
                return found
        return None

    def until(self, holds: Callable[[RouteReply], object], what: str, *topics: str, member: str = "") -> RouteReply:
        """Wait until something holds of the routes."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.routes(*topics, member=member)
            if found is not None and holds(found):
                return found
            assert time.monotonic() < deadline, f"{what}: {found}"
            time.sleep(0.05)

    def until_led(self) -> None:
        """Wait until every member that runs sees a leader of every shard, and all members."""
        running = [name for name, process in self.members.items() if process.pid]

        def is_whole(found: RouteReply) -> bool:
            led = {row.name for row in found.shards if row.leader and len(row.members) == self.replicas}
            return led >= {*self.shards}

        for name in running:
            self.until(is_whole, f"{name} does not see all leaders", member=name)

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of the shards, by name: they have them in the order in which they came to be."""
        found = self.routes()
        assert found is not None
        return {row.name: row.number for row in found.shards}

    def leader(self, shard: str) -> str:
        """The name of the member that leads a shard; waits until one does."""

        def row(found: RouteReply) -> ShardRoute | None:
            return next((one for one in found.shards if one.name == shard and one.leader), None)

        found = row(self.until(row, f"{shard} has no leader"))
        assert found is not None
        port = int(found.leader.rpartition(":")[2])
        return next(name for name, process in self.members.items() if process.port == port)

    def in_sync(self, shard: str) -> tuple[str, ...]:
        """The members of a shard that have everything; none if nobody tells."""
        try:
            with dmq.connect(self.url_of(shard), app="looker", any_member=True, timeout=5) as client:
                return client.admin.shard().in_sync
        except dmq.DMQError:
            return ()

    def topic(self, name: str, member: str = "") -> TopicRoute | None:
        """The route of a topic."""
        found = self.routes(name, member=member)
        return None if found is None or not found.topics else found.topics[0]
