"""Name servers as processes, and their clients through proxies that can be stalled."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from dmq.clock import SystemClock
from dmq.errors import DMQError, RegistryDown, SessionExpired, WriteUnknown
from dmq.net.link import Link
from dmq.protocol.cluster.registry import RegistryClose
from dmq.protocol.commands import Command
from dmq.registry.name_server.client import NameServerClient, ServerAddress
from dmq.registry.registry import Put, Registry
from dmq.testing.processes import free_port, read_line
from dmq.testing.proxy import ChaosProxy
from tests.databases import DatabaseServer
from tests.integration.registry.registries import PATIENCE_S

START_S = 60.0


class NameServerProcess:
    """One name server, on one port however often it is started."""

    def __init__(self, database: str, *more: str, session: str = "6s") -> None:
        self.port = free_port()
        self.address = ServerAddress("127.0.0.1", self.port)
        self._arguments = ["--database", database, "--port", str(self.port), "--session", session, *more]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "dmq.cli", "nameserver", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("DMQ_")},
        )
        assert process.stdout is not None
        if read_line(process.stdout, time.monotonic() + START_S) is None:
            process.kill()
            _, said = process.communicate()
            self._process = None
            raise DMQError(said.decode())
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        assert self._process is not None
        self._process.terminate()
        self._process.communicate(timeout=START_S)
        code = self._process.returncode
        self._process = None
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'registry.db'}"


class NameServerPair:
    """Two name servers over one database, each with a way of its own to it.

    Parameters:
        name: of the database, which is made.
    """

    def __init__(self, server: DatabaseServer, name: str, *, session: str) -> None:
        self.database = server
        self._name = name
        server.add_database(name)
        self.ways = [ChaosProxy(("127.0.0.1", server.port)) for _ in range(2)]
        place = server.url.rpartition("/")[0]
        urls = [f"{place.replace(f':{server.port}', f':{way.port}')}/{name}" for way in self.ways]
        self.url = f"{place}/{name}"
        self.servers = [NameServerProcess(url, session=session) for url in urls]
        self.addresses = [one.address for one in self.servers]

    def serving(self, client: NameServerClient) -> int:
        """Which of them a client is with."""
        assert client.address is not None
        return self.addresses.index(client.address)

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(NameServerProcess.start, self.servers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.kill()
        for way in self.ways:
            way.close()
        self.database.drop_database(self._name)


class NameServerRegistries:
    """Name servers that all tests share, and clients that each have a way of their own to one of them."""

    def __init__(self, kind: str, addresses: Sequence[ServerAddress]) -> None:
        self.kind = kind
        self._addresses = itertools.cycle(addresses)
        self._clients: list[NameServerClient] = []
        self._proxies: dict[int, ChaosProxy] = {}
        self.clock = SystemClock()

    async def connect(self) -> Registry:
        proxy = ChaosProxy(next(self._addresses))
        client = await NameServerClient.open([ServerAddress("127.0.0.1", proxy.port)], "test", timeout=30.0)
        self._proxies[id(client)] = proxy
        self._clients.append(client)
        return client

    async def expire(self, client: Registry) -> None:
        await expire(next(self._addresses), client)

    def cut(self, client: Registry) -> None:
        assert isinstance(client, NameServerClient)
        client.timeout = 0.3
        self._proxies[id(client)].stall()

    async def outlast(self, client: Registry) -> None:
        await self.expire(client)

    def mend(self, client: Registry) -> None:
        assert isinstance(client, NameServerClient)
        client.timeout = 30.0
        self._proxies[id(client)].resume()
        # Now it notices: what it sent before arrives as well, in a session that may be over.
        self._proxies[id(client)].cut()

    async def close(self) -> None:
        for client in self._clients:
            client.timeout = 1.0
            await client.close()
        for proxy in self._proxies.values():
            await asyncio.get_running_loop().run_in_executor(None, proxy.close)


async def expire(address: ServerAddress, client: Registry) -> None:
    """End a client's session from another connection, as if it had not been heard."""
    link = await Link.open(address, "operator", clock=SystemClock(), peer="name server", on_push=lambda _: None)
    await link.request(Command.REGISTRY_CLOSE, RegistryClose(client.session))
    link.close(DMQError("done"))


def run_on_loop(main: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await main  # type: ignore[misc]

    asyncio.run(bounded())


async def insist(client: Registry, path: str, value: bytes) -> None:
    """Put a value until that is answered."""
    while True:
        try:
            await client.write([Put(path, value, None)])
            return
        except (RegistryDown, WriteUnknown, SessionExpired):
            await asyncio.sleep(0.02)
