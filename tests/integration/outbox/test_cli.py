"""`dmq outbox status` and `dmq outbox relay`, as processes and as calls."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, update

import dmq
from dmq.cli import main
from dmq.testing.processes import BrokerProcess, free_port
from tests.databases import DatabaseServers
from tests.integration.outbox.effects import KINDS, open_database, until, url_of
from tests.integration.outbox.shop import TABLES, arrived, bodies, order, shop, states


def command(*arguments: str) -> tuple[int, str, str]:
    """A command, in this process: exit code, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(("outbox", *arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()


def test_status_shows_what_waits(plain: Engine) -> None:
    url = str(plain.url)
    assert command("status", "--database", url) == (
        0,
        "nothing waits: every message is sent and has its results\n",
        "",
    )
    with shop(plain, None) as service:
        refused = order(service, plain, "a")
        order(service, plain, "b")
    send = TABLES.send
    with plain.begin() as connection:
        connection.execute(update(send).where(send.c.send_id == refused).values(last_error="no topic", attempts=3))
    code, out, _ = command("status", "--database", url, "--format", "json")
    (row,) = json.loads(out)
    assert code == 0
    assert row.pop("oldest_seconds") >= 0
    assert row == {"topic": "orders", "new": 2, "failing": 1, "sent": 0, "alerted": 0, "last_error": "no topic"}
    assert "no topic" in command("status", "--database", url)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_relay_in_a_process_of_its_own_sends_and_ends_on_sigterm(
    kind: str, tmp_path: Path, database_servers: DatabaseServers
) -> None:
    database = url_of(kind, database_servers, tmp_path)
    engine = open_database(database)
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url) as client, shop(engine, None) as service:
        client.admin.create_topic("orders")
        order(service, engine, "before")
        arguments = ["outbox", "relay", "--database", database, "--url", broker.url, "--poll", "50ms"]
        with subprocess.Popen([sys.executable, "-m", "dmq.cli", *arguments], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert b"relaying from m_msgsend" in process.stdout.readline()
                order(service, engine, "after")
                assert sorted(bodies(arrived(client, 2))) == ["after", "before"]
                until(lambda: states(engine) == {"SENT": 2})
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                process.kill()
    engine.dispose()


def test_what_is_wrong_is_one_sentence(plain: Engine, tmp_path: Path) -> None:
    url = str(plain.url)
    for arguments, code, said in (
        (["status", "--database", "nonsense"], 2, "--database is not a database URL"),
        (["status", "--database", f"sqlite:///{tmp_path}/none.db"], 1, "there is no file"),
        (["status", "--database", url, "--prefix", "x_"], 1, "the table x_msgsend is missing"),
        (["status", "--database", "postgresql://u:p@127.0.0.1:1/d"], 1, "cannot be used"),
        (["relay", "--database", url, "--url", f"dmq://127.0.0.1:{free_port()}"], 3, "127.0.0.1"),
        (["relay", "--database", url, "--poll", "often"], 2, "is not a duration"),
    ):
        found, out, err = command(*arguments)
        assert (found, out) == (code, ""), err
        assert said in err
        assert "Traceback" not in err
