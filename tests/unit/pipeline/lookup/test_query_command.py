"""`dmq archive query` and the dry run of `dmq archive replay`, without a broker and without Java."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from dmq.cli import main
from dmq.model import MessageId
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.tables import CONSUME_EVENT, COPY
from tests.unit.pipeline.archives import NOON, commit_messages, commit_rows, message_row

ID = str(MessageId(7, 3))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("archive")
    archive = Archive.create(str(folder))
    rows = [message_row(number, business_id=f"u-{number % 2}") for number in range(10)]
    rows[4] = message_row(4, business_id="u-0", body=b"\xff\x00")
    commit_messages(archive, rows)
    later = NOON + timedelta(minutes=1)
    copy = {"message_id": ID, "topic": "%RETRY%g", "queue": 0, "queue_offset": 1, "journal_offset": 1, "group": "g"}
    commit_rows(archive, COPY, [copy | {"stored_at": later, "dt": later.date(), "error": "it failed"}])
    event = {"message_id": ID, "topic": "orders", "group": "g", "outcome": "acked", "journal_offset": 2, "attempt": 2}
    commit_rows(archive, CONSUME_EVENT, [event | {"at": later + timedelta(minutes=1), "dt": later.date()}])
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["archive", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_a_message_is_shown_as_a_row(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "query", "--tables", tables, "--key", "order-3")
    head, row = out.splitlines()
    assert code == 0
    assert head.split()[:4] == ["topic", "queue", "offset", "stored"]
    assert row.split() == ["orders", "3", "0", "2030-01-31", "12:00:03.000Z", ID, "order-3", "-", "u-1", "-", "6"]


def test_json_has_everything_and_bodies_only_when_asked_for(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "query", "--tables", tables, "--id", ID, "--format", "json")
    (row,) = json.loads(out)
    assert (row["message_id"], row["stored_at"], row["dt"]) == (ID, "2030-01-31T12:00:03.000000Z", "2030-01-31")
    assert (row["body_bytes"], "body" in row) == (6, False)
    asked = ("--business-id", "u-0", "--body", "--limit", "3", "--format", "json")
    _, out, _ = run(capsys, "query", "--tables", tables, *asked)
    assert [row.get("body", row.get("body_base64")) for row in json.loads(out)] == ["body 0", "body 2", "/wA="]


def test_a_topic_is_shown_from_a_moment_on(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--topic", "orders", "--since", "2030-01-31T12:00:02Z", "--until", "2030-01-31T12:00:05Z", "--limit", "2")
    _, out, _ = run(capsys, "query", "--tables", tables, *asked)
    lines = out.splitlines()
    assert ["order-2" in lines[1], "order-3" in lines[2]] == [True, True]
    assert lines[-1] == "there may be more than 2: --limit shows them"


def test_the_life_of_a_message_is_shown_step_by_step(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "query", "--tables", tables, "--id", ID, "--trace")
    assert [line.split()[2] for line in out.splitlines()[4:]] == ["copied", "acked"]
    assert "it failed" in out
    _, out, _ = run(capsys, "query", "--tables", tables, "--id", ID, "--trace", "--format", "json")
    found = json.loads(out)
    assert [len(found[name]) for name in ("messages", "copies", "events")] == [1, 1, 1]


def test_sql_is_answered_as_far_as_the_limit_goes(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    select = "SELECT key, body, stored_at FROM message ORDER BY journal_offset"
    code, out, err = run(capsys, "query", "--tables", tables, "--sql", select, "--limit", "5", "--format", "json")
    rows = json.loads(out)
    assert code == 0
    assert (rows[0]["body"], rows[4]["body"]) == ("body 0", "/wA=")
    assert err == "only the first 5 rows are shown: --limit shows more\n"
    code, _, err = run(capsys, "query", "--tables", tables, "--sql", "DROP TABLE message")
    assert (code, err) == (2, "dmq: one SELECT is allowed, and nothing else: the archive is only read here\n")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ((), "give one of --id"),
        (("--id", ID, "--key", "x"), "give one of --id"),
        (("--key", "x", "--since", "1h"), "--since and --until go with --topic alone"),
        (("--sql", "SELECT 1", "--topic", "x"), "--sql says all by itself"),
        (("--key", "x", "--trace"), "--trace goes with --id"),
        (("--id", "x"), "is not a message id"),
        (("--topic", "x", "--since", "latest"), "is not a time"),
    ],
)
def test_what_makes_no_sense_is_a_wrong_call(
    tables: str, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], problem: str
) -> None:
    code, _, err = run(capsys, "query", "--tables", tables, *asked)
    assert code == 2
    assert problem in " ".join(err.split())


def test_what_is_not_there_is_told(tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "query", "--tables", tables, "--key", "nobody's")
    assert (code, err.startswith('dmq: no message with key "nobody\'s" is archived')) == (1, True)
    code, _, err = run(capsys, "query", "--tables", str(tmp_path), "--key", "x")
    assert (code, err.startswith("dmq: there is no archive at")) == (1, True)


def test_a_dry_run_shows_what_would_be_sent_and_asks_no_broker(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("replay", "--tables", tables, "--topic", "orders", "--where", "queue = 1", "--broker", "dmq://127.0.0.1:1")
    code, out, _ = run(capsys, *asked, "--format", "json")
    found = json.loads(out)
    assert (code, found["messages"], found["to"]) == (0, 3, "orders")
    assert [row["key"] for row in found["sample"]] == ["order-1", "order-5", "order-9"]
    _, out, _ = run(capsys, *asked)
    assert out.endswith("this was a dry run of 3 messages into topic orders: say --execute to send them\n")
    code, _, err = run(capsys, "replay", "--tables", tables)
    assert (code, "say which messages" in err) == (2, True)


def test_without_the_extra_one_sentence_says_what_to_install(
    tables: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dmq.pipeline.lookup.lookup", None)
    monkeypatch.delitem(sys.modules, "dmq.pipeline.lookup.lookup")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "dmq.pipeline.lookup.engine", raising=False)
    code, _, err = run(capsys, "query", "--tables", tables, "--key", "x")
    assert (code, err) == (1, 'dmq: the archive needs duckdb: pip install "dmq[spark]"\n')
