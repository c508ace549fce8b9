"""Outbox and inbox together, each with a database of its own: one effect, one result, and refusals taken back once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

import dmq
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, Compensator, Inbox, MessageService, OutboxMessage, Result, Rollback, tables
from dmq.testing import TestBroker
from tests.databases import DatabaseServers
from tests.integration.outbox.effects import (
    KINDS,
    consumed,
    disposed,
    effect,
    effects,
    open_database,
    until,
    url_of,
)

ORDERS = 40


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_has_one_effect_and_one_result_though_the_broker_is_killed_and_handlers_fail(
    database_servers: DatabaseServers, tmp_path: Path, kind: str
) -> None:
    stock_url = url_of(kind, database_servers, tmp_path)
    with (
        TestBroker(retry_table="0.05", grace_seconds=0.2) as broker,
        disposed(open_database(f"sqlite:///{tmp_path / 'orders.db'}")) as orders,
        disposed(open_database(stock_url, pool_size=12)) as stock,
    ):
        shop, store = broker.connect(app="shop"), broker.connect(app="stock")
        shop.admin.create_topic("orders", queues=4)
        # A result that a kill took is asked for after half a second.
        service = MessageService(orders, shop, groups={"orders": ["stock"]}, result_after=0.5, poll=0.1)

        @service.reverse("orders")
        def reverse(session: Session, message: OutboxMessage, result: Result) -> None:
            session.execute(effect(f"back {message.body.decode()} {result.reason}"))

        inbox = Inbox(stock, store)
        chance = random.Random(7)

        @inbox.consumes_messages
        def handle(session: Session, message: ReceivedMessage) -> BusinessState:
            body = message.body.decode()
            session.execute(effect(body))
            if chance.random() < 0.1:
                raise ValueError("a bad moment")
            if body.startswith("no"):
                raise Rollback("sold out")
            return BusinessState.SUCCESS

        consumer = store.consumer("orders", "stock", max_attempts=None)
        worker = threading.Thread(target=lambda: consumer.run(handle, workers=8))
        worker.start()
        with service, Compensator(service, poll=0.1, again=0.5, tries=1000):
            bodies = [f"{'no' if n % 5 == 0 else 'yes'} {n}" for n in range(ORDERS)]
            for at, body in enumerate(bodies):
                with Session(orders) as session, session.begin():
                    service.send(session, "orders", body, business_id=f"u{at % 4}", strict=at % 2 == 0)
                with pytest.raises(KeyError), Session(orders) as session, session.begin():
                    undo(service, session)
                if at == ORDERS // 2:
                    broker.kill()
                    broker.start()
            until(lambda: Counter(states(orders)) == {"DONE": ORDERS * 4 // 5, "REVERSED": ORDERS // 5})
        consumer.close()
        worker.join()
        assert Counter(effects(stock)) == Counter(body for body in bodies if body.startswith("yes"))
        assert Counter(effects(orders)) == Counter(f"back {body} sold out" for body in bodies if body.startswith("no"))
        assert Counter(consumed(stock).values()) == {"SUCCESS": ORDERS * 4 // 5, "ROLLBACK": ORDERS // 5}
        shop.close()
        store.close()


def undo(service: MessageService, session: Session) -> None:
    """A business that fails: nothing of it may ever be seen."""
    service.send(session, "orders", "yes never")
    raise KeyError


def states(engine: object) -> list[str]:
    with engine.connect() as connection:  # type: ignore[attr-defined]
        return [*connection.scalars(select(tables().send.c.state))]


def test_a_service_has_the_inbox_at_hand(tmp_path: Path, dmq_broker: TestBroker) -> None:
    with disposed(open_database(f"sqlite:///{tmp_path / 'both.db'}")) as engine:
        client = dmq.connect(dmq_broker.url, app="shop")
        with client, MessageService(engine, client) as service:

            @service.consumes_messages
            def handle(session: Session, message: ReceivedMessage) -> BusinessState:
                session.execute(effect(message.body.decode()))
                return BusinessState.SUCCESS

            with Session(engine) as session, session.begin():
                service.send(session, "orders", "m")
            consumer = client.consumer("orders", "stock")
            (message,) = consumer.pull(1, wait=30.0)
            handle(message)
            message.ack()
            until(lambda: states(engine) == ["DONE"])
        assert effects(engine) == ["m"]
