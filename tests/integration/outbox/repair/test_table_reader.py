"""Reading the outbox's tables in pages, and ordering resends, on every database."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, insert, select, update

from dmq.errors import DatabaseDown
from dmq.outbox.repair.table_reader import COLUMNS, OutboxReader, Period
from dmq.outbox.sender.envelope import floor_send_id
from tests.integration.outbox.shop import TABLES

AT = 1_900_000_000_000
PERIOD = Period(AT, AT + 1000)


def send_id(number: int, at_ms: int = AT) -> str:
    return floor_send_id(at_ms)[:12] + f"{number:020x}"


def fill(engine: Engine, count: int) -> None:
    send = {"app": "a", "topic": "t", "is_ordered": 0, "priority": 4, "body": b"b", "attempts": 1, "checks": 0}
    times = {"due_at_ms": 1, "created_at_ms": 1}
    consumed = {"topic": "t", "business_state": "SUCCESS", "consumer_id": "c", "created_at_ms": 1}
    names = [send_id(number, AT + number % 2) for number in range(count)]
    outside = [send_id(0, PERIOD.from_ms - 1), send_id(0, PERIOD.to_ms)]
    with engine.begin() as connection:
        rows = [{"send_id": name, "state": "SENT", **send, **times} for name in names + outside]
        connection.execute(insert(TABLES.send), rows)
        groups = [{"send_id": name, "consumer_group": group, **consumed} for name in names for group in "abc"]
        connection.execute(insert(TABLES.consumer), groups)


@pytest.mark.parametrize("page_rows", [1, 2, 7, 1000])
def test_every_row_of_the_period_comes_once_in_order_whatever_the_page(engine: Engine, page_rows: int) -> None:
    fill(engine, 14)
    with OutboxReader(engine.url.render_as_string(hide_password=False)) as reader:
        assert reader.there() == ["send", "result", "consumer"]
        sent = [row for page in reader.pages("send", PERIOD, page_rows) for row in page]
        consumed = [row for page in reader.pages("consumer", PERIOD, page_rows) for row in page]
        assert [*reader.pages("result", PERIOD, page_rows)] == []
    names = sorted(send_id(number, AT + number % 2) for number in range(14))
    assert [row[0] for row in sent] == names
    assert [row[:2] for row in consumed] == [(name, group) for name in names for group in "abc"]
    state = COLUMNS["send"].index("state")
    assert {row[state] for row in sent} == {"SENT"}


def test_only_what_waits_for_a_result_is_sent_again(engine: Engine) -> None:
    fill(engine, 6)
    names = [send_id(number, AT + number % 2) for number in range(6)]
    send = TABLES.send
    with engine.begin() as connection:
        for name, state in zip(names, ["NEW", "SENT", "ALERTED", "DONE", "REVERSED", "SENT"], strict=True):
            connection.execute(update(send).where(send.c.send_id == name).values(state=state, claimed_by="x"))
    with OutboxReader(engine.url.render_as_string(hide_password=False)) as reader:
        assert reader.send_again([*names[:5], "nobody's"], now_ms=77) == 2
        assert reader.send_again([]) == 0
    with engine.connect() as connection:
        rows = {row.send_id: row for row in connection.execute(select(send).where(send.c.send_id.in_(names)))}
    assert [rows[name].state for name in names] == ["NEW", "NEW", "NEW", "DONE", "REVERSED", "SENT"]
    assert [(rows[name].due_at_ms, rows[name].claimed_by) for name in names[1:3]] == [(77, None)] * 2
    assert rows[names[0]].claimed_by == "x", "what waits to be sent is left to its relay"


def test_a_database_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DatabaseDown, match="--outbox names no database"):
        OutboxReader(f"sqlite:///{tmp_path / 'nothing.db'}")
    with (
        OutboxReader("postgresql://u@127.0.0.1:1/x") as reader,
        pytest.raises(DatabaseDown, match="cannot be used"),
    ):
        reader.there()
