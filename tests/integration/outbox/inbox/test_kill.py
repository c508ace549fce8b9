"""A consumer that is killed: before the commit, between commit and result, between result and ack."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from dmq.outbox import BusinessState
from dmq.testing import TestBroker
from tests.databases import DatabaseServers
from tests.integration.outbox.effects import (
    SECONDS,
    consumed,
    disposed,
    effects,
    open_database,
    outgoing,
    results,
    until,
    url_of,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(grace_seconds=0.2) as broker:
        yield broker


def consume(broker: TestBroker, engine: Engine, point: str) -> subprocess.Popen[bytes]:
    database = engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-m", "tests.integration.outbox.inbox.consumer_process", broker.url, database, point]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)


# Processes take their time to start: every point once, and every database.
@pytest.mark.parametrize(
    ("point", "kind"),
    [
        ("working", "sqlite"),
        ("committed", "sqlite"),
        ("answered", "sqlite"),
        ("committed", "mariadb"),
        ("answered", "postgresql"),
    ],
)
def test_a_killed_consumer_leaves_every_message_its_one_effect_and_its_result(
    broker: TestBroker, database_servers: DatabaseServers, tmp_path: Path, point: str, kind: str
) -> None:
    with disposed(open_database(url_of(kind, database_servers, tmp_path))) as engine:
        _check_effects_of_a_kill(broker, engine, point)


def _check_effects_of_a_kill(broker: TestBroker, engine: Engine, point: str) -> None:
    client = broker.connect()
    sent = [outgoing(f"{'no' if n % 4 == 0 else 'yes'} {n}") for n in range(20)]
    client.producer().send_many("orders", sent)
    with consume(broker, engine, point) as first:
        try:
            assert first.wait(SECONDS) == -9
        finally:
            first.kill()
    before = Counter(consumed(engine).values())
    assert 0 < sum(before.values()) < 20
    ids = {message.properties["dmq.send_id"] for message in sent if message.properties}
    second = consume(broker, engine, "never")
    try:
        until(lambda: {result.send_id for result in results(client)} == ids)
        until(lambda: client.admin.group("stock").lag == 0)
    finally:
        second.kill()
        second.wait(SECONDS)
        assert second.stdout is not None
        second.stdout.close()
    assert Counter(effects(engine)) == Counter(f"yes {n}" for n in range(20) if n % 4)
    states = {
        message.properties["dmq.send_id"]: "ROLLBACK" if message.body.startswith(b"no") else "SUCCESS"
        for message in sent
        if message.properties
    }
    assert consumed(engine) == states
    said: dict[str, set[BusinessState]] = {}
    for result in results(client):
        said.setdefault(result.send_id, set()).add(result.state)
    assert said == {send_id: {BusinessState(state)} for send_id, state in states.items()}
