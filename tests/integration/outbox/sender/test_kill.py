"""A sender that is killed with kill -9: what was committed goes out all the same, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

import dmq
from dmq.outbox import Relay
from dmq.testing.processes import BrokerProcess
from tests.databases import DatabaseServers
from tests.integration.outbox.effects import KINDS, effects, open_database, until, url_of
from tests.integration.outbox.sender.test_relay import in_order
from tests.integration.outbox.shop import TABLES, arrived, bodies, send_ids


def run_until_killed(database: str, url: str, where: str, rows: int) -> None:
    """Let a sender write so many rows, come to the place, and kill it."""
    command = [sys.executable, "-m", "tests.integration.outbox.sender.order_writer", database, url, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line.strip())
            if len(seen) >= rows and (where == "-" or "stopped" in seen):
                break
        process.kill()
    assert len(seen) >= rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["commit", "mark", "-"])
def test_what_a_killed_sender_committed_goes_out_in_order(
    kind: str, where: str, tmp_path: Path, database_servers: DatabaseServers
) -> None:
    database = url_of(kind, database_servers, tmp_path)
    engine = open_database(database)
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=2)
        run_until_killed(database, broker.url, where, 30)
        relay = Relay(engine, client, poll=0.05)
        relay.start()
        with engine.connect() as connection:
            committed = [*connection.scalars(select(TABLES.send.c.send_id))]
        until(lambda: not _unsent(engine))
        found = arrived(client, len(committed))
        relay.close()
    assert {*send_ids(found)} == {*committed} == {*effects(engine)}
    first: dict[str, str] = {}
    for send_id, body in zip(send_ids(found), bodies(found), strict=True):
        first.setdefault(send_id, body)
    in_order([*first.values()])
    if where == "commit":
        assert len(found) == len(committed)  # it had not sent any
    engine.dispose()


def _unsent(engine: object) -> bool:
    from sqlalchemy import Engine

    assert isinstance(engine, Engine)
    with engine.connect() as connection:
        return connection.scalar(select(TABLES.send.c.number).where(TABLES.send.c.state == "NEW").limit(1)) is not None
