"""Deleting what is over: what goes, what stays, and that a strict sequence goes on behind it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, Table, func, insert, select, update
from sqlalchemy.orm import Session

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, Inbox, Purged, create_tables, purge, tables
from dmq.outbox.sender.envelope import floor_send_id
from tests.integration.outbox.effects import effect, effects, open_database, outgoing
from tests.integration.outbox.shop import TABLES, answer, order, shop, states
from tests.integration.outbox.test_cli import command

DAY = 86_400.0
DAY_MS = 86_400_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send_id(days: float, number: int) -> str:
    """One that was made so many days ago."""
    return floor_send_id(now_ms() - round(days * DAY_MS))[:12] + f"{number:020x}"


def put_sent(engine: Engine, number: int, state: str, made_days: float, ended_days: float | None) -> str:
    """A row of the sender table, with one answer."""
    made_ms = now_ms() - round(made_days * DAY_MS)
    row: dict[str, Any] = {
        "send_id": send_id(made_days, number), "app": "shop", "topic": "orders", "is_ordered": 0, "priority": 4,
        "body": b"x", "state": state, "attempts": 1, "checks": 0, "due_at_ms": made_ms + 600_000,
        "created_at_ms": made_ms, "sent_at_ms": made_ms,
        "ended_at_ms": None if ended_days is None else now_ms() - round(ended_days * DAY_MS),
    }  # fmt: skip
    answered = {
        "send_id": row["send_id"], "consumer_group": "stock", "business_state": "SUCCESS", "consumer_id": "c",
        "consumed_at_ms": made_ms, "received_at_ms": made_ms,
    }  # fmt: skip
    with engine.begin() as connection:
        connection.execute(insert(TABLES.send), row)
        connection.execute(insert(TABLES.result), answered)
    return str(row["send_id"])


def kept(engine: Engine, table: Table) -> set[str]:
    with engine.connect() as connection:
        return {*connection.scalars(select(table.c.send_id))}


def test_rows_that_ended_long_ago_go_with_their_answers_and_nothing_else_does(engine: Engine) -> None:
    for number in range(7):
        put_sent(engine, number, ("DONE", "REVERSED", "ROLLED_BACK")[number % 3], 40, 31)
    stay = {
        put_sent(engine, 10, "DONE", 40, 29),  # its end is not long ago
        put_sent(engine, 11, "SENT", 40, None),
        put_sent(engine, 12, "ALERTED", 40, None),
        put_sent(engine, 13, "NEW", 40, None),
        put_sent(engine, 14, "DONE", 1, 0.5),
    }
    counted = [Purged("m_msgsend", 7), Purged("m_msgresult", 7), Purged("m_msgconsumer", 0)]
    assert purge(engine, 30 * DAY) == counted
    assert len(kept(engine, TABLES.send)) == 12
    assert purge(engine, 30 * DAY, execute=True, batch=3) == counted
    assert kept(engine, TABLES.send) == kept(engine, TABLES.result) == stay
    assert purge(engine, 30 * DAY, execute=True) == [
        Purged("m_msgsend", 0), Purged("m_msgresult", 0), Purged("m_msgconsumer", 0),
    ]  # fmt: skip


def test_consumer_rows_go_by_when_they_were_consumed_in_every_group(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client, confirm=None)

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        session.execute(effect(message.body.decode()))
        return BusinessState.SUCCESS

    consumers = [client.consumer("orders", group) for group in ("stock", "mails")]
    client.producer().send_many("orders", [outgoing(f"m {number}") for number in range(5)])
    came = [message for consumer in consumers for message in consumer.pull(5)]
    for message in came:
        handle(message)
    consumer_rows = TABLES.consumer
    old = {message.properties["dmq.send_id"] for message in came[:3]}
    with engine.begin() as connection:
        chosen = consumer_rows.c.send_id.in_(old)
        ago_ms = now_ms() - 31 * DAY_MS
        connection.execute(update(consumer_rows).where(chosen).values(consumed_at_ms=ago_ms))
    assert purge(engine, 30 * DAY, execute=True, batch=1)[-1] == Purged("m_msgconsumer", 6)
    assert kept(engine, consumer_rows) == {message.properties["dmq.send_id"] for message in came[3:5]}
    for message in came[3:5]:
        handle(message)  # known still
    assert len(effects(engine)) == 10


def test_a_strict_sequence_goes_on_behind_what_was_purged(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client, confirm=None)
    handled: list[str] = []

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        handled.append(message.body.decode())
        return BusinessState.SUCCESS

    consumer = client.consumer("orders", "stock")

    def round_trip(service: Any, body: str) -> None:
        placed = order(service, engine, body, business_id="u", strict=True)
        (message,) = consumer.pull(1, 30.0)
        handle(message)
        message.ack()
        answer(client, placed, "stock", BusinessState.SUCCESS)

    with shop(engine, client) as service:
        service.start()
        for body in ("first", "second"):
            round_trip(service, body)
        service.flush()
        past_ms = now_ms() - 31 * DAY_MS
        for table, values in (
            (TABLES.send, {"state": "DONE", "ended_at_ms": past_ms}),
            (TABLES.consumer, {"consumed_at_ms": past_ms}),
        ):
            with engine.begin() as connection:
                for number, one in enumerate(sorted(kept(engine, table))):
                    aged = {**values, "send_id": send_id(32, number)} if table is TABLES.send else values
                    connection.execute(update(table).where(table.c.send_id == one).values(**aged))
        assert [one.rows for one in purge(engine, 30 * DAY, execute=True) if one.table != "m_msgresult"] == [2, 2]
        round_trip(service, "third")
    assert handled == ["first", "second", "third"]
    with engine.connect() as connection:
        assert connection.scalar(select(func.max(TABLES.position.c.last))) == 3
        assert connection.scalar(select(func.max(TABLES.send.c.sequence))) == 3


def test_a_database_of_one_side_alone_and_one_of_neither(tmp_path: Path) -> None:
    ours = tables("x_")
    engine = open_database(f"sqlite:///{tmp_path / 'one.db'}")
    with pytest.raises(dmq.InvalidSettings, match="neither x_msgsend nor x_msgconsumer"):
        purge(engine, 30 * DAY, tables=ours)
    ours.metadata.create_all(engine, tables=[ours.consumer])
    assert purge(engine, 30 * DAY, tables=ours, execute=True) == [Purged("x_msgconsumer", 0)]
    create_tables(engine, ours)
    assert [one.table for one in purge(engine, 30 * DAY, tables=ours)] == ["x_msgsend", "x_msgresult", "x_msgconsumer"]
    engine.dispose()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"older_than": 3600.0}, "a day at least"), ({"older_than": float("nan")}, "a day"), ({"batch": 0}, "above 0")],
)
def test_what_makes_no_sense_is_refused(plain: Engine, options: dict[str, Any], said: str) -> None:
    with pytest.raises(dmq.InvalidSettings, match=said):
        purge(plain, **{"older_than": 30 * DAY, **options})


def test_the_command_counts_and_deletes_only_when_told_to(plain: Engine) -> None:
    put_sent(plain, 1, "DONE", 40, 31)
    arguments = ("purge", "--database", str(plain.url))
    code, out, _ = command(*arguments)
    assert code == 0
    assert "say --execute" in out
    assert states(plain) == {"DONE": 1}
    _, out, _ = command(*arguments, "--older-than", "50d", "--execute", "--format", "json")
    assert [row["deleted"] for row in json.loads(out)] == [0, 0, 0]
    _, out, _ = command(*arguments, "--execute", "--format", "json")
    assert [row["deleted"] for row in json.loads(out)] == [1, 1, 0]
    assert states(plain) == {}
    code, _, err = command(*arguments, "--older-than", "1h")
    assert code == 2
    assert "too young" in err
    assert "Traceback" not in err
