"""Dead letters between real processes: a broker that is killed, and databases that go and come back (D-16)."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import dmq
from dmq.cli import main
from dmq.client.client import Client
from dmq.deadletters.url import default_url
from dmq.testing.processes import BrokerProcess
from tests.databases import DatabaseServers
from tests.integration.dead_letters.letters import consumed, drained, reject, rejected
from tests.patience import eventually
from tests.sampling import SEED

SOAK = pytest.mark.soak  # what databases do is the same for all of them, which the contract tests show
DRAINED = ["sqlite", "mariadb", pytest.param("postgresql", marks=SOAK)]
RESENT = ["sqlite", pytest.param("mariadb", marks=SOAK), "postgresql"]


def database_url(kind: str, servers: DatabaseServers, folder: Path) -> str:
    return default_url(folder / "apart") if kind == "sqlite" else servers.get(kind).url


def broker_at(folder: Path, url: str | None, **settings: object) -> BrokerProcess:
    """A broker that keeps its dead letters in some database."""
    chosen: dict[str, object] = {"broker.auto_create": "true", **{f"broker.{k}": v for k, v in settings.items()}}
    if url is not None:
        chosen["broker.dead_letters_url"] = url
    pairs = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    return BrokerProcess(folder / "data", pairs)


def dmq_command(*arguments: str) -> tuple[int, str, str]:
    """A command, in this process: exit code, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()


def figures(client: Client) -> dict[str, float]:
    return client.admin.stats("broker_dead_letters_")


@pytest.mark.parametrize("kind", DRAINED)
def test_a_broker_that_is_killed_again_and_again_drains_each_letter_once(
    kind: str, tmp_path: Path, database_servers: DatabaseServers
) -> None:
    """D-16."""
    rng = random.Random(SEED)
    url = database_url(kind, database_servers, tmp_path)
    broker = broker_at(tmp_path, url)
    expected: set[str] = set()
    for turn in range(2):
        with broker, dmq.connect(broker.url, app="t") as client:
            rejected(client, 60, prefix=f"t{turn}-")
            expected |= {f"t{turn}-{number}" for number in range(60)}
            time.sleep(rng.uniform(0, 0.3))
            broker.kill()
    with broker, dmq.connect(broker.url, app="t") as client:
        # What was rejected just before a kill may not have been taken note of: then it comes again.
        left = client.admin.lag("orders", "billing").total
        if left:
            reject(client, left)
        letters = drained(client, len(expected))
        assert {letter.body.decode() for letter in letters} == expected
        eventually(lambda: figures(client)["broker_dead_letters_waiting"] == 0)


@pytest.mark.parametrize("kind", RESENT)
def test_a_broker_that_is_killed_while_it_resends_delivers_each_letter_once(
    kind: str, tmp_path: Path, database_servers: DatabaseServers
) -> None:
    """D-16."""
    broker = broker_at(tmp_path, database_url(kind, database_servers, tmp_path))
    count = 150
    with broker:
        with dmq.connect(broker.url, app="t") as client:
            rejected(client, count)
            numbers = [letter.number for letter in drained(client, count)]
            asking = threading.Thread(target=lambda: resend(client, numbers), daemon=True)
            asking.start()
            eventually(lambda: figures(client)["broker_dead_letters_resent"] >= 20)
            broker.kill()
            client.close()
            asking.join()
        broker.start()
        with dmq.connect(broker.url, app="t") as client:
            # Until the claims of before are settled a letter may say that it is being resent.
            eventually(lambda: resend(client, numbers) and not client.admin.dead_letters(bodies=False))
            assert {letter.state for letter in client.admin.dead_letters(state="")} == {"resent"}
            bodies = [body for body, _ in consumed(client, count)]
            assert sorted(bodies) == sorted(f"m{number}" for number in range(count))


def resend(client: Client, numbers: list[int]) -> bool:
    try:
        client.admin.resend_dead_letters(numbers, rate=100.0)
    except dmq.DMQError:
        return False
    return True


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_a_database_that_goes_and_comes_back_gets_what_it_missed(
    kind: str, tmp_path: Path, database_servers: DatabaseServers
) -> None:
    """D-16."""
    server = database_servers.get(kind)
    with broker_at(tmp_path, server.url) as broker, dmq.connect(broker.url, app="t") as client:
        rejected(client, 3)
        drained(client, 3)
        server.kill()
        rejected(client, 4, prefix="while-down-")
        eventually(lambda: figures(client)["broker_dead_letters_database_down"] == 1)
        code, out, _ = dmq_command("doctor", "--data", str(tmp_path / "data"), "--url", broker.url)
        assert "their database cannot be used; 4 wait in the journal" in out
        assert code == 1
        code, _, err = dmq_command("dlq", "list", "--url", broker.url)
        assert code == 1
        assert "cannot be used" in err
        assert err.count("\n") == 1
        assert "s3cret" not in err
        client.producer().send("others", b"as ever")
        assert consumed(client, 1, topic="others") == [("as ever", 1)]
        server.start()
        assert len(drained(client, 7)) == 7
        eventually(lambda: figures(client)["broker_dead_letters_database_down"] == 0)
        _, out, _ = dmq_command("doctor", "--data", str(tmp_path / "data"), "--url", broker.url)
        assert "their database takes them" in out
        told = re.findall(r" (ERROR|WARNING) +the database of dead letters is (gone|back)", broker.log)
        assert told == [("ERROR", "gone"), ("WARNING", "back")]
        assert "s3cret" not in broker.log


def test_a_message_too_large_for_the_database_stays_in_the_journal_and_the_others_go(
    tmp_path: Path, database_servers: DatabaseServers
) -> None:
    """D-16."""
    url = database_servers.get("mariadb").url
    with broker_at(tmp_path, url) as broker, dmq.connect(broker.url, app="t") as client:
        producer = client.producer()
        for body in (b"small", random.Random(1).randbytes(1_200_000), b"little"):
            producer.send("orders", body)
        with client.consumer("orders", "billing") as consumer:
            seen = 0
            while seen < 3:
                for message in consumer.pull(max_messages=3, wait=20.0):
                    message.reject("no good")
                    seen += 1
        assert sorted(letter.body for letter in drained(client, 2)) == [b"little", b"small"]
        eventually(lambda: figures(client)["broker_dead_letters_refused"] == 1)
        assert figures(client)["broker_dead_letters_waiting"] == 1
        _, out, _ = dmq_command("doctor", "--data", str(tmp_path / "data"), "--url", broker.url)
        assert "1 are refused by their database and stay in the journal" in out


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "broker.dead_letters_url is not a database URL: write something like sqlite:"),
        ("oracle://u:s3cret@h/x", "names 'oracle', which dead letters cannot be kept in"),
        ("mysql://u:s3cret@h", "names no database"),
    ],
)
def test_a_url_that_can_never_work_ends_the_broker_at_start_with_one_sentence(
    url: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(dmq.DMQError) as caught:
        broker_at(tmp_path, url).start()
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert "s3cret" not in caught.value.message


def test_without_a_url_dead_letters_are_in_sqlite_in_the_data_directory(tmp_path: Path) -> None:
    with broker_at(tmp_path, None) as broker, dmq.connect(broker.url, app="t") as client:
        file = tmp_path / "data" / "deadletters" / "letters.db"
        client.producer().send("orders", b"fine")
        consumed(client, 1)
        assert not file.exists(), "who has none pays nothing"
        rejected(client, 2)
        drained(client, 2)
        database = sqlite3.connect(file)
        rows = database.execute('SELECT "group", reason, body, state FROM dmq_dead_letter ORDER BY body').fetchall()
        database.close()
    assert rows == [("billing", "REJECTED", b"m0", "waiting"), ("billing", "REJECTED", b"m1", "waiting")]


def test_the_command_line_lists_shows_resends_and_deletes(tmp_path: Path) -> None:
    """D-16."""
    with broker_at(tmp_path, None) as broker, dmq.connect(broker.url, app="t") as client:

        def dlq(*arguments: str) -> tuple[int, str, str]:
            return dmq_command("dlq", *arguments, "--url", broker.url)

        def listed(*arguments: str) -> list[dict[str, Any]]:
            code, out, err = dlq("list", "--format", "json", *arguments)
            assert (code, err) == (0, "")
            rows: list[dict[str, Any]] = json.loads(out)
            return rows

        assert dlq("list")[1] == "no dead letters\n"
        client.admin.create_topic("orders", queues=1)
        receipts = rejected(client, 4)
        drained(client, 4)
        rows = listed("--group", "billing", "--reason", "rejected")
        assert [row["body"] for row in rows] == ["m0", "m1", "m2", "m3"]
        assert [row["id"] for row in rows] == [str(receipt.id) for receipt in receipts]
        assert listed("--since", "0s") == []
        assert len(listed("--limit", "2")) == 2
        first = str(rows[0]["number"])
        code, out, _ = dlq("show", first)
        assert code == 0
        assert "no good: m0" in out
        assert "there is no dead letter 4711" in dlq("show", "4711")[2]
        assert dlq("resend")[0] == 2
        code, out, _ = dlq("resend", first, str(receipts[1].id))
        assert (code, out) == (0, "2 resent\n")
        code, out, err = dlq("resend", first)
        assert code == 1
        assert "it was resent by dmq-cli/" in err
        code, out, _ = dlq("delete", "--group", "billing")
        assert "this was a dry run of 2: say --execute to do it" in out
        assert len(listed()) == 2
        assert dlq("delete", "--group", "billing", "--rate", "50", "--execute")[1] == "2 deleted\n"
        assert [row["state"] for row in listed("--state", "any")] == ["resent", "resent", "deleted", "deleted"]
        assert sorted(body for body, _ in consumed(client, 2)) == ["m0", "m1"]
