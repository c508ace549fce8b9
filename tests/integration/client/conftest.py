"""What the client's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dmq
from tests.integration.client.servers import RunningBroker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    """A broker of one's own."""
    with RunningBroker(tmp_path / "data") as running:
        yield running


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[dmq.Client]:
    """A client of that broker, with a topic `orders` of four queues."""
    with dmq.connect(broker.url, app="shop") as connected:
        connected.admin.create_topic("orders", queues=4)
        yield connected
