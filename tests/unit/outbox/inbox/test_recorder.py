"""Recording consumptions: the steps against a model, and which errors mean that two were in each other's way."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, insert, select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.pool import StaticPool

from dmq.errors import StorageError
from dmq.outbox.inbox.recorder import Contended, Earlier, Gap, Recorder, Row, insert_new, is_contention, run
from dmq.outbox.schema import create_tables, tables
from dmq.outbox.states import BusinessState

SUCCESS, ROLLBACK = BusinessState.SUCCESS, BusinessState.ROLLBACK


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 1), st.booleans()), max_size=25))
def test_a_sequence_moves_by_one_and_every_message_is_recorded_once(asked: list[tuple[int, int, bool]]) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    create_tables(engine, tables())
    recorder = Recorder(tables(), "sqlite")
    last, recorded = {0: 0, 1: 0}, dict[tuple[int, int], BusinessState]()
    for number, user, jumps in asked:
        row = Row(f"{user}-{number}", "g", "t", f"u{user}", number, "c", 7)
        with engine.connect() as connection:
            steps = recorder.take(row, SUCCESS, jumps=jumps)
            if number > last[user] + 1 and not jumps:
                with pytest.raises(Gap, match=f"is {last[user]}$"):
                    run(steps, connection.execute)
                connection.rollback()
                continue
            got: Any = run(steps, connection.execute)
            connection.commit()
        if (user, number) in recorded:
            assert got.state is recorded[user, number]
        elif number <= last[user]:
            assert got.state is ROLLBACK
            recorded[user, number] = ROLLBACK
        else:
            assert got is None
            recorded[user, number] = SUCCESS
            last[user] = number
    with engine.connect() as connection:
        consumer, position = tables().consumer, tables().position
        rows = connection.execute(select(consumer.c.send_id, consumer.c.business_state)).all()
        places = connection.execute(select(position.c.business_id, position.c.last)).all()
    engine.dispose()
    assert dict(rows) == {f"{user}-{number}": state for (user, number), state in recorded.items()}  # type: ignore[arg-type]
    assert dict(places) == {f"u{user}": n for user, n in last.items() if n}  # type: ignore[arg-type]


class MySqlError(Exception):
    """As its drivers raise it: a number and a text."""


class Cursor:
    """What a driver answers."""

    def __init__(self, rowcount: int) -> None:
        self.rowcount = rowcount


def test_a_driver_that_does_not_count_is_refused_before_anything_is_taken_for_consumed() -> None:
    recorder = Recorder(tables(), "postgresql")
    row = Row("s", "g", "t", None, None, "c", 7)
    with pytest.raises(StorageError, match="does not tell"):
        run(recorder.take(row, SUCCESS), lambda *_: Cursor(-1))


def test_a_duplicate_is_an_error_on_mysql_and_others_are_passed_on() -> None:
    recorder = Recorder(tables(), "mariadb")
    row = Row("s", "g", "t", None, None, "c", 7)
    found = Earlier(SUCCESS, "other", "", 5)

    class Found:
        def one_or_none(self) -> Any:
            return ("SUCCESS", "other", None, 5)

    def execute(code: int, values: Any) -> Any:
        if "one_id" in values:
            return Found()
        raise IntegrityError("insert", {}, MySqlError(code, "no"))

    assert run(recorder.take(row, SUCCESS), lambda _, values: execute(1062, values)) == found
    with pytest.raises(IntegrityError):
        run(recorder.take(row, SUCCESS), lambda _, values: execute(1048, values))


def test_an_insert_needs_no_compiling_and_has_all_columns() -> None:
    consumer = tables().consumer
    assert str(insert_new(consumer, "postgresql")).endswith("ON CONFLICT DO NOTHING")
    for kind in ("postgresql", "sqlite", "mysql"):
        text = str(insert_new(consumer, kind))
        for column in consumer.columns:
            assert column.name in text
    assert isinstance(insert_new(consumer, "mysql"), type(insert(consumer)))


class PgError(Exception):
    def __init__(self, state: str) -> None:
        super().__init__("the server says so")
        self.sqlstate = state


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (PgError("40001"), True),
        (PgError("40P01"), True),
        (PgError("23505"), False),
        (MySqlError(1213, "Deadlock found"), True),
        (MySqlError(1205, "Lock wait timeout"), True),
        (MySqlError(1045, "Access denied"), False),
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("no such table"), False),
    ],
)
def test_only_what_another_transaction_caused_is_tried_again(cause: Exception, expected: bool) -> None:
    assert is_contention(OperationalError("x", {}, cause)) is expected
    assert is_contention(Contended())
    assert not is_contention(ValueError())
