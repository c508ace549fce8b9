"""The relay on real databases: several side by side, order within a business id, and what stands in its way."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import dmq
from dmq.client.client import Client
from dmq.outbox import Alert, AlertKind, MessageService, Relay
from dmq.outbox.sender.relay import Blockers, Claims
from dmq.testing import TestBroker
from tests.databases import DatabaseServers
from tests.integration.outbox.effects import disposed, open_database, until, url_of
from tests.integration.outbox.shop import TABLES, arrived, bodies, order, send_ids, shop, states

MakeRelay = Callable[..., Relay]
ROWS = 2000
BUSINESSES = 20


def in_order(found: list[str]) -> None:
    """Bodies say business and number: of each business they must rise."""
    last: dict[str, int] = {}
    for body in found:
        business, _, number = body.partition("/")
        assert last.get(business, -1) < int(number), f"{body} came behind {last[business]}"
        last[business] = int(number)


def fill(service: MessageService, engine: Engine, rows: int = ROWS) -> list[str]:
    with Session(engine) as session, session.begin():
        return [
            service.send(session, "orders", f"u{number % BUSINESSES}/{number}", business_id=f"u{number % BUSINESSES}")
            for number in range(rows)
        ]


def test_relays_side_by_side_send_each_row_once_and_in_order(
    engine: Engine, broker: TestBroker, relay_of: MakeRelay
) -> None:
    clients = [broker.connect() for _ in range(2)]
    clients[0].admin.create_topic("orders", queues=4)
    with shop(engine, None) as service:
        placed = fill(service, engine)
    relays = [relay_of(engine, client, batch=100) for client in clients]
    for relay in relays:
        relay.start()
    until(lambda: states(engine) == {"SENT": ROWS})
    for relay in relays:
        relay.close()
    found = arrived(clients[0], ROWS)
    assert Counter(send_ids(found)) == Counter(placed)
    in_order(bodies(found))
    assert sum(relay.counts.get("sent") for relay in relays) == ROWS


def test_direct_sends_of_several_processes_and_a_relay_keep_the_order(
    engine: Engine, broker: TestBroker, relay_of: MakeRelay
) -> None:
    client = broker.connect()
    client.admin.create_topic("orders", queues=4)
    services = [MessageService(engine, broker.connect(), app="shop", poll=0.02) for _ in range(2)]
    turn = threading.Lock()
    numbers = iter(range(120))

    def place(service: MessageService) -> None:
        while True:
            with turn:  # what keeps two transactions of a business apart, as a row lock would
                number = next(numbers, None)
                if number is None:
                    return
                order(service, engine, f"u{number % 3}/{number}", business_id=f"u{number % 3}")

    relay = relay_of(engine, broker.connect())
    relay.start()
    threads = [threading.Thread(target=place, args=(service,)) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: states(engine) == {"SENT": 120})
    for service in services:
        service.close()
    relay.close()
    found = arrived(client, 120)
    assert len({*send_ids(found)}) == len(found) == 120
    in_order(bodies(found))


def test_a_row_that_is_refused_holds_back_its_business_and_nobody_else(engine: Engine, relay_of: MakeRelay) -> None:
    alerts: list[Alert] = []
    with TestBroker(auto_create=False) as broker:
        client = broker.connect()
        client.admin.create_topic("others")
        with shop(engine, None) as service, Session(engine) as session, session.begin():
            for number in range(5):
                service.send(session, "orders", f"u/{number}", business_id="u")
                service.send(session, "others", f"u/{number}", business_id="u")
        relay = relay_of(engine, client, alert_after=1, on_alert=alerts.append)
        relay.start()
        assert bodies(arrived(client, 5, "others")) == [f"u/{number}" for number in range(5)]
        until(lambda: alerts)
        client.admin.create_topic("orders")
        assert bodies(arrived(client, 5)) == [f"u/{number}" for number in range(5)]
        until(lambda: states(engine) == {"SENT": 10})
        relay.close()
    assert (alerts[0].kind, alerts[0].topic) == (AlertKind.SEND, "orders")
    assert "there is no topic 'orders'" in alerts[0].reason
    assert len(alerts) == 1


def test_a_row_that_the_broker_finds_too_large_holds_back_only_its_business(plain: Engine, relay_of: MakeRelay) -> None:
    with TestBroker() as broker:
        client = broker.connect()
        with shop(plain, None) as service, Session(plain) as session, session.begin():
            service.send(session, "orders", "u/0", business_id="u")
            large = service.send(session, "orders", b"x", business_id="u")
            service.send(session, "orders", "u/1", business_id="u")
            service.send(session, "orders", "v/0", business_id="v")
        with plain.begin() as connection:  # as if the limit of the broker had been lowered meanwhile
            chosen = TABLES.send.c.send_id == large
            connection.execute(update(TABLES.send).where(chosen).values(body=os.urandom(5 << 20)))
        relay = relay_of(plain, client)
        relay.start()
        assert sorted(bodies(arrived(client, 2))) == ["u/0", "v/0"]
        until(lambda: states(plain) == {"SENT": 2, "NEW": 2})
        relay.close()
    with plain.connect() as connection:
        errors = [*connection.scalars(select(TABLES.send.c.last_error).where(TABLES.send.c.send_id == large))]
    assert "bytes even compressed" in errors[0]


def test_a_limited_topic_is_tried_again_when_the_broker_says(
    plain: Engine, client: Client, relay_of: MakeRelay
) -> None:
    client.admin.set_limit(topic="orders", messages=5, policy="refuse")
    with shop(plain, None) as service:
        fill(service, plain, 20)
    relay = relay_of(plain, client, batch=5)
    relay.start()
    found = arrived(client, 20)
    relay.close()
    assert len(found) == len({*send_ids(found)}) == 20


def test_what_a_relay_that_died_had_claimed_goes_to_another(
    engine: Engine, client: Client, relay_of: MakeRelay
) -> None:
    with shop(engine, None) as service:
        fill(service, engine, 10)
    now_ms = time.time_ns() // 1_000_000
    dead = Claims(engine, TABLES.send)
    assert len(dead.claim(6, "the dead", now_ms, now_ms + 400)) == 6
    assert len(dead.claim(6, "another", now_ms, now_ms + 400)) == 4
    assert dead.claim(6, "a third", now_ms, now_ms + 400) == []
    relay = relay_of(engine, client)
    relay.start()
    found = arrived(client, 10)
    relay.close()
    assert sorted(bodies(found)) == sorted(f"u{number}/{number}" for number in range(10))


def test_a_mark_that_the_database_does_not_take_is_made_later_and_nothing_sent_twice(
    plain: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([True, True])
    original = Claims.sent

    def sent(self: Claims, *arguments: Any) -> None:
        if next(failures, False):
            raise OperationalError("UPDATE", {}, Exception("gone away"))
        original(self, *arguments)

    monkeypatch.setattr(Claims, "sent", sent)
    with shop(plain, client) as service:
        service.start()
        order(service, plain, "x")
        until(lambda: states(plain) == {"SENT": 1})
        assert len(arrived(client, 1)) == 1
        assert service.counts.get("database_errors") == 2


def test_a_crash_between_sending_and_marking_sends_again_under_the_same_send_id(
    plain: Engine, client: Client, monkeypatch: pytest.MonkeyPatch, relay_of: MakeRelay
) -> None:
    with shop(plain, None) as service:
        placed = fill(service, plain, 1)
    dying = relay_of(plain, client, timeout=0.2, lease=0.4)
    with monkeypatch.context() as patch:
        patch.setattr(Claims, "sent", lambda *_: pytest.fail("it died here"))
        with pytest.raises(pytest.fail.Exception):
            dying.step()
    relay = relay_of(plain, client)
    relay.start()
    found = arrived(client, 2)
    relay.close()
    assert send_ids(found) == placed * 2


@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_a_database_that_dies_and_comes_back_loses_and_doubles_nothing(
    kind: str, database_servers: DatabaseServers, broker: TestBroker, tmp_path: Path, relay_of: MakeRelay
) -> None:
    server = database_servers.get(kind)
    engine = open_database(url_of(kind, database_servers, tmp_path), pool_pre_ping=True)
    client = broker.connect()
    with shop(engine, None) as service:
        placed = fill(service, engine, 200)
    relay = relay_of(engine, client, batch=20)
    relay.start()
    until(lambda: relay.counts.get("sent") >= 20)
    server.kill()
    until(lambda: relay.counts.get("database_errors") or relay.counts.get("sent") == 200)
    server.start()
    until(lambda: states(engine) == {"SENT": 200})
    relay.close()
    found = arrived(client, 200)
    assert Counter(send_ids(found)) == Counter(placed)
    in_order(bodies(found))
    engine.dispose()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch= is above 0"),
        ({"poll": -1.0}, "poll= is above 0"),
        ({"lease": 5.0}, "lease= must be at least twice timeout="),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    plain: Engine, client: Client, options: dict[str, Any], said: str, relay_of: MakeRelay
) -> None:
    with pytest.raises(dmq.InvalidSettings, match=said):
        relay_of(plain, client, **options)


def test_a_row_is_held_back_by_any_unsent_one_before_it_that_is_not_among_those_asked_about(engine: Engine) -> None:
    with shop(engine, None) as service, Session(engine) as session, session.begin():
        for business in ("u", "v \"\\{},'", "u", "w", "v \"\\{},'", "u"):
            service.send(session, "orders", "x", business_id=business)
        service.send(session, "others", "x", business_id="w")
        service.send(session, "orders", "x", business_id="w", ordered=False)
    now_ms = time.time_ns() // 1_000_000
    rows = Claims(engine, TABLES.send).claim(10, "me", now_ms, now_ms + 60_000)
    numbers = [row.number for row in rows]
    assert numbers == sorted(numbers)

    def held(*chosen: int) -> dict[str, int]:
        found = Blockers(engine, TABLES.send).of([rows[at] for at in chosen])
        return {place[1][0]: numbers.index(blocker.number) for place, blocker in found.items() if blocker.is_claimed}

    assert held(*range(8)) == held(0, 1, 3, 6, 7) == held(0, 2, 5) == {}
    assert held(1, 2, 5) == {"u": 0}  # the first of three is elsewhere
    assert held(0, 4, 5) == {"u": 2, "v": 1}  # one between two of ours
    with engine.begin() as connection:  # one of ours ended meanwhile, and so did the one that was in the way
        gone = TABLES.send.c.number.in_([numbers[0], numbers[1]])
        connection.execute(update(TABLES.send).where(gone).values(state="DONE"))
    assert held(1, 2, 4, 5) == {}
    assert held(0, 5) == {"u": 2}  # though as many are unsent before the last as we asked about


def test_postgresql_goes_by_its_indexes_whatever_it_believes_of_the_table(
    database_servers: DatabaseServers, tmp_path: Path
) -> None:
    """A backlog that came since the table was last counted; a planner that trusts its figures reads all of it."""
    plans: list[str] = []
    with disposed(open_database(url_of("postgresql", database_servers, tmp_path))) as engine:
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE m_msgsend SET (autovacuum_enabled = off)")
            connection.exec_driver_sql("ANALYZE m_msgsend")
        with shop(engine, None) as service:
            fill(service, engine, 5000)

        @event.listens_for(engine, "before_cursor_execute")
        def explain(connection: Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
            if "m_msgsend" in statement:
                cursor.execute(f"EXPLAIN {statement}", parameters)
                plans.append("\n".join(line for (line,) in cursor.fetchall()))

        now_ms = time.time_ns() // 1_000_000
        claims = Claims(engine, TABLES.send)
        rows = claims.claim(1000, "me", now_ms, now_ms + 60_000)
        assert Blockers(engine, TABLES.send).of(rows) == {}
        claims.sent(rows, now_ms, now_ms)
    assert len(rows) == 1000
    picking, looking, marking = plans
    assert "Index Scan using m_msgsend_by_due" in picking
    assert "Sort" not in picking
    assert "m_msgsend_by_business" in looking
    assert "m_msgsend_pkey" in marking
    for plan in plans:
        assert "Seq Scan" not in plan


def test_settings_of_the_planner_end_with_the_claim(database_servers: DatabaseServers, tmp_path: Path) -> None:
    with disposed(open_database(url_of("postgresql", database_servers, tmp_path), pool_size=1)) as engine:
        Claims(engine, TABLES.send).claim(10, "me", 1, 2)
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW enable_seqscan").scalar() == "on"
