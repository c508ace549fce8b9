"""What commands read from their arguments, and how they show results."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import typer

from dmq.cli.message.messages import body_text, message_facts, message_line, message_row
from dmq.cli.message.stream import parse_json_line
from dmq.cli.options import Format, parse_pairs, parse_place, parse_seconds
from dmq.cli.output import moment, printable, quantity, show_facts, show_rows
from dmq.client.admin.reports import StoredMessage
from dmq.model import MessageId


def message(body: bytes = b"hello", **changes: object) -> StoredMessage:
    values = {
        "id": MessageId(7, 1),
        "topic": "orders",
        "queue": 2,
        "offset": 41,
        "body": body,
        "key": "k-1",
        "tag": None,
        "business_id": None,
        "priority": 4,
        "sent_at_ms": 1_700_000_000_000,
        "stored_at_ms": 1_700_000_000_123,
        "app": "shop",
        "properties": {"trace": "abc"},
    }
    return StoredMessage(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("1.5s", 1.5), ("250ms", 0.25), ("10m", 600), ("7d", 604800)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-5", "5 weeks", "1e9", "s"])
def test_what_is_no_length_of_time_is_a_wrong_call(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_seconds(text)


def test_places_in_a_queue() -> None:
    assert parse_place("earliest") == "earliest"
    assert parse_place("17") == 17
    assert parse_place("10m") == timedelta(minutes=10)
    assert parse_place("2030-01-31T12:00:00Z") == datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert parse_place("2030-01-31T12:00:00+02:00") == datetime(2030, 1, 31, 10, tzinfo=UTC)
    local = parse_place("2030-01-31")
    assert isinstance(local, datetime)
    assert local.tzinfo is not None


@pytest.mark.parametrize("text", ["", "yesterday", "-1", "³"])
def test_what_is_no_place_is_a_wrong_call(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="earliest, latest"):
        parse_place(text)


def test_pairs() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    assert parse_pairs(None) == {}
    for wrong in ("a", "=1", ""):
        with pytest.raises(typer.BadParameter):
            parse_pairs([wrong])


def test_what_a_stranger_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[31m\x07\nb\u202e"
    assert printable(evil) == r"a\x1b[31m\x07\nb\u202e"
    show_rows([{"topic": evil, "lag": 3}], Format.TABLE, empty="")
    show_facts({"topic": evil}, Format.TABLE)
    shown = capsys.readouterr().out + message_line(message(evil.encode(), key=evil), {}) + body_text(b"\xff\x1b")
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert r"a\x1b[31m\x07\nb" in shown


def test_a_table_in_a_pipe_keeps_every_row_on_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(
        [{"topic": "x" * 500, "messages": 1_234_567}, {"topic": "[bold]", "messages": None}], Format.TABLE, empty=""
    )
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["topic", "messages"]
    assert first.split() == ["x" * 500, "1,234,567"]
    assert second.split() == ["[bold]", "-"]


def test_rows_of_a_table_may_have_more_to_say_than_others(capsys: pytest.CaptureFixture[str]) -> None:
    # As of topics in a cluster: those of the broker's own are on no list of shards.
    show_rows([{"topic": "%DLQ%"}, {"topic": "orders", "shards": "s1, s2"}], Format.TABLE, empty="")
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["topic", "shards"]
    assert [row.split(maxsplit=1) for row in rows] == [["%DLQ%", "-"], ["orders", "s1, s2"]]


def test_a_listing_as_json_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"topic": "a", "messages": 1}], Format.JSON, empty="none")
    assert json.loads(capsys.readouterr().out) == [{"topic": "a", "messages": 1}]
    show_rows([], Format.JSON, empty="none")
    assert json.loads(capsys.readouterr().out) == []
    show_rows([], Format.TABLE, empty="none yet")
    assert capsys.readouterr().out == "none yet\n"


def test_numbers_and_moments_for_people() -> None:
    assert [quantity(value) for value in (0, 12, 1234567.8, 12.345, 0.01234)] == [
        "0",
        "12",
        "1,234,568",
        "12.3",
        "0.0123",
    ]
    assert moment(1_700_000_000_123) == "2023-11-14 22:13:20.123Z"


def test_a_message_on_a_line_has_everything_a_person_looks_for() -> None:
    shown = "2023-11-14 22:13:20.123Z 2/41 id=000000000000e0000000000004 key=k-1 trace=abc hello"
    assert message_line(message(), {}) == shown


def test_a_long_body_is_cut_in_a_table_and_whole_in_json() -> None:
    long = message(b"x" * 1000)
    assert message_row(long, {})["body"] == "x" * 80 + "…"
    assert message_row(long, {})["bytes"] == 1000
    assert message_facts(long, {})["body"] == "x" * 1000


@pytest.mark.parametrize("body", [b"hello", "grüße 你好".encode(), b"\xff\x00binary", b""])
def test_what_tail_prints_as_json_can_be_sent_again(body: bytes) -> None:
    line = json.dumps(message_facts(message(body), {})).encode()
    assert parse_json_line(line) == (body, {"key": "k-1", "priority": 4, "properties": {"trace": "abc"}})
