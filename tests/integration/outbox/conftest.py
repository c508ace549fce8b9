"""Fixtures of tests of outbox and inbox: a database of each kind, and relays that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from dmq.client.client import Client
from dmq.outbox import Relay
from tests.databases import DatabaseServers
from tests.integration.outbox.effects import KINDS, disposed, open_database, url_of


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, database_servers: DatabaseServers, tmp_path: Path) -> Iterator[Engine]:
    """Each kind of database in turn."""
    with disposed(open_database(url_of(request.param, database_servers, tmp_path), pool_size=20)) as opened:
        yield opened


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Engine]:
    """SQLite, where the database makes no difference."""
    with disposed(open_database(f"sqlite:///{tmp_path / 'shop.db'}", pool_size=20)) as opened:
        yield opened


@pytest.fixture
def relay_of() -> Iterator[Callable[..., Relay]]:
    """Makes relays that look around often. Ask for it last, so that they end before what they work on."""
    made: list[Relay] = []

    def make(engine: Engine, client: Client, **options: Any) -> Relay:
        made.append(Relay(engine, client, **{"poll": 0.02, "timeout": 5.0, **options}))
        return made[-1]

    yield make
    for relay in made:
        relay.close()
