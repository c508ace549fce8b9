"""What tests of the sender's side share: a shop that stores orders and tells of them, and a look at what came out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, MessageService, Result
from dmq.outbox.schema import tables
from dmq.outbox.sender.envelope import SEND_ID, pack_result, result_topic
from tests.integration.outbox.effects import effect

TABLES = tables()


@contextmanager
def shop(engine: Engine, client: Client | None, **options: Any) -> Iterator[MessageService]:
    """A service that looks around often."""
    service = MessageService(engine, client, **{"poll": 0.05, "app": "shop", **options})
    try:
        yield service
    finally:
        service.close()


def order(service: MessageService, engine: Engine, body: str, **options: Any) -> str:
    """Store an order, and tell of it in the same transaction."""
    with Session(engine) as session, session.begin():
        send_id = service.send(session, "orders", body, **options)
        session.execute(effect(send_id))
    return send_id


def arrived(client: Client, count: int, topic: str = "orders", seconds: float = 60.0) -> list[ReceivedMessage]:
    """So many messages, and then no more for a moment, in the order in which they came; acked."""
    found: list[ReceivedMessage] = []
    deadline = time.monotonic() + seconds
    with client.consumer(topic, "looking") as consumer:
        while len(found) < count and time.monotonic() < deadline:
            batch = consumer.pull(1000, 0.5)
            found += batch
            batch.ack()
        more = consumer.pull(1000, 0.2)
        found += more
        more.ack()
    return found


def bodies(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [message.raw.decode() for message in messages]


def send_ids(messages: Sequence[ReceivedMessage]) -> list[str]:
    return [message.properties[SEND_ID] for message in messages]


def states(engine: Engine) -> dict[str, int]:
    """How many rows of the sender table are in which state."""
    send = TABLES.send
    with engine.connect() as connection:
        rows = connection.execute(select(send.c.state, func.count()).group_by(send.c.state))
        return {row[0]: row[1] for row in rows}


def answer(client: Client, send_id: str, group: str, state: BusinessState, times: int = 1, app: str = "shop") -> None:
    """Send the result that a consumer would."""
    result = Result(send_id=send_id, topic="orders", group=group, state=state, consumer_id="c-1", reason="sold out")
    with client.producer() as producer:
        producer.send_many(result_topic("orders"), [pack_result(result, app)] * times)
