"""Fixtures of the scenarios of delivery: brokers in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dmq.client.client import Client, connect
from dmq.testing.processes import BrokerProcess, free_port
from tests.integration.delivery.scenes import Scene


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    """One for all tests of a module: each uses a topic of its own."""
    with BrokerProcess(arguments=["--set", "broker.retry_table=0.1,0.2,0.2"]) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.url, app="test") as connected:
        yield connected


@pytest.fixture
def scene(request: pytest.FixtureRequest, client: Client) -> Scene:
    """A topic with one queue."""
    return Scene(client, f"t-{abs(hash(request.node.name))}")


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker to kill: it comes back on its port."""
    with BrokerProcess(tmp_path / "data", ["--port", str(free_port())]) as running:
        yield running
