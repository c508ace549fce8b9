"""Fixtures of tests that consume through a broker in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dmq.client.client import Client
from dmq.testing import TestBroker


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    return client
