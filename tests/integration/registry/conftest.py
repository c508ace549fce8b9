"""The implementations of the registry's contract, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.registry.name_servers import NameServerProcess, NameServerRegistries, sqlite_url
from tests.integration.registry.registries import MemoryRegistries, Registries


@pytest.fixture(scope="session")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameServerProcess]:
    """A name server over SQLite that tests share."""
    with NameServerProcess(sqlite_url(tmp_path_factory.mktemp("registry"))) as process:
        yield process


@pytest.fixture(params=["memory", "name server"])
def registries(request: pytest.FixtureRequest) -> Callable[[], Registries]:
    """Makes a registry; called on the event loop of the test."""
    if request.param == "memory":
        return MemoryRegistries
    address = request.getfixturevalue("name_server").address
    return lambda: NameServerRegistries(address)
