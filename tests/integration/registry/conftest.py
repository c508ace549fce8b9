"""The implementations of the registry's contract, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from dmq.registry.name_server.client import ServerAddress
from tests.databases import DatabaseServers
from tests.integration.registry.name_servers import NameServerProcess, NameServerRegistries, sqlite_url
from tests.integration.registry.registries import MemoryRegistries, Registries
from tests.integration.registry.zookeeper_registries import ZooKeeperRegistries


@pytest.fixture(scope="session")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameServerProcess]:
    """A name server over SQLite that tests share."""
    with NameServerProcess(sqlite_url(tmp_path_factory.mktemp("registry"))) as process:
        yield process


@pytest.fixture(scope="session")
def shared_name_servers(database_servers: DatabaseServers) -> Iterator[Callable[[str], list[ServerAddress]]]:
    """Two name servers over one database of a kind."""
    started: dict[str, list[ServerAddress]] = {}
    with ExitStack() as processes:

        def get(kind: str) -> list[ServerAddress]:
            if kind not in started:
                server = database_servers.get(kind)
                server.add_database("registry")
                url = server.url.rpartition("/")[0] + "/registry"
                made = [processes.enter_context(NameServerProcess(url)) for _ in range(2)]
                started[kind] = [process.address for process in made]
            return started[kind]

        yield get


@pytest.fixture(
    params=[
        "memory",
        "name server",
        "zookeeper",
        pytest.param("postgresql", marks=pytest.mark.soak),
        pytest.param("mariadb", marks=pytest.mark.soak),
    ]
)
def registries(request: pytest.FixtureRequest) -> Callable[[], Registries]:
    """Makes a registry; called on the event loop of the test."""
    kind = request.param
    if kind == "memory":
        return MemoryRegistries
    if kind == "zookeeper":
        address = request.getfixturevalue("zookeeper").address
        return lambda: ZooKeeperRegistries(address)
    if kind == "name server":
        addresses = [request.getfixturevalue("name_server").address]
    else:
        addresses = request.getfixturevalue("shared_name_servers")(kind)
    return lambda: NameServerRegistries(kind, addresses)
