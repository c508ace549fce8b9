"""Strict sequences (T-09): in order within a business id, whatever the delivery does; gaps wait, or go by policy."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import Alert, AlertKind, BusinessState, GapPolicy, Inbox
from dmq.testing import FakeClock, TestBroker
from tests.integration.outbox.effects import (
    consumed,
    effect,
    effects,
    outgoing,
    results,
    until,
)

SUCCESS, ROLLBACK = BusinessState.SUCCESS, BusinessState.ROLLBACK


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=4)
    return client


def write(session: Session, message: ReceivedMessage) -> BusinessState:
    session.execute(effect(message.body.decode()))
    return SUCCESS


@contextmanager
def running(client: Client, handler: object, workers: int = 8) -> Iterator[None]:
    consumer = client.consumer("orders", "stock", max_attempts=None)
    thread = threading.Thread(target=lambda: consumer.run(handler, workers=workers))  # type: ignore[arg-type]
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join()


def pulled(client: Client, count: int) -> dict[str, ReceivedMessage]:
    """Messages by body."""
    consumer, found = client.consumer("orders", "stock"), dict[str, ReceivedMessage]()
    while len(found) < count:
        found |= {message.body.decode(): message for message in consumer.pull(count)}
    return found


def test_eight_workers_keep_the_order_of_every_business_id(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client, gaps=GapPolicy(patience=5.0))

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        time.sleep(random.random() * 0.005)  # so that workers overtake each other
        return write(session, message)

    sent = [outgoing(f"u{user}-{n}", n, f"u{user}") for n in range(1, 13) for user in range(4)]
    client.producer().send_many("orders", [*sent, *sent])
    with running(client, handle):
        until(lambda: len(results(client)) == 96)
    found = effects(engine)
    assert len(found) == 48
    for user in range(4):
        assert [what for what in found if what.startswith(f"u{user}-")] == [f"u{user}-{n}" for n in range(1, 13)]


def test_a_message_that_comes_too_early_waits_and_others_go_on(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client, gaps=GapPolicy(patience=0.01))
    handler = inbox.consumes_messages(write)
    producer = client.producer()
    producer.send_many("orders", [outgoing("a2", 2, "a"), outgoing("a3", 3, "a"), outgoing("b1", 1, "b")])
    with running(client, handler):
        until(lambda: effects(engine) == ["b1"])
        producer.send_many("orders", [outgoing("a1", 1, "a")])
        until(lambda: len(results(client)) == 4)
    assert effects(engine) == ["b1", "a1", "a2", "a3"]


def test_a_gap_is_retried_later_and_leaves_nothing(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client, gaps=GapPolicy(patience=0.0))
    handler = inbox.consumes_messages(write)
    client.producer().send_many("orders", [outgoing("a2", 2, "a")])
    message = pulled(client, 1)["a2"]
    with pytest.raises(dmq.Retry, match="number 2 waits for number 1") as caught:
        handler(message)
    assert caught.value.after == 1.0
    assert effects(engine) == []
    assert consumed(engine) == {}


@pytest.mark.parametrize("policy", ["skip", "dead-letter", "wait"])
def test_a_gap_that_never_closes_is_a_matter_of_policy(engine: Engine, client: Client, policy: str) -> None:
    clock, alerts = FakeClock(), list[Alert]()
    inbox = Inbox(
        engine, client, gaps=GapPolicy(policy, seconds=60.0, patience=0.0), clock=clock, on_alert=alerts.append
    )
    handler = inbox.consumes_messages(write)
    client.producer().send_many("orders", [outgoing(f"a{n}", n, "a") for n in (1, 3, 4, 2)])
    messages = pulled(client, 4)
    handler(messages["a1"])
    for _ in range(3):
        with pytest.raises(dmq.Retry):
            handler(messages["a3"])
        clock.advance(25)
    if policy == "skip":
        handler(messages["a3"])
        handler(messages["a4"])
        assert effects(engine) == ["a1", "a3", "a4"]
        handler(messages["a2"])  # too late: without effect, and its sender is told
        assert effects(engine) == ["a1", "a3", "a4"]
        late = results(client)[-1]
        assert (late.state, late.send_id) == (ROLLBACK, messages["a2"].properties["dmq.send_id"])
        assert "number 2 came when 4 was consumed already" in late.reason
        handler(messages["a2"])
        assert results(client)[-1].state is ROLLBACK
    elif policy == "dead-letter":
        with pytest.raises(dmq.Reject, match="which did not come in 60 seconds"):
            handler(messages["a3"])
    else:
        with pytest.raises(dmq.Retry):
            handler(messages["a3"])
    if policy == "wait":
        assert alerts == []
    else:
        assert [(alert.kind, alert.business_id) for alert in alerts] == [(AlertKind.GAP, "a")]
    if policy != "skip":
        handler(messages["a2"])
        handler(messages["a3"])
        assert effects(engine) == ["a1", "a2", "a3"]


def test_a_refused_message_moves_the_sequence_on_and_a_failed_one_does_not(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client, gaps=GapPolicy(patience=0.0))
    verdicts: dict[str, BusinessState | None] = {"a1": ROLLBACK, "a2": None, "a3": SUCCESS}

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState | None:
        write(session, message)
        return verdicts[message.body.decode()]

    client.producer().send_many("orders", [outgoing(f"a{n}", n, "a") for n in (1, 2, 3)])
    messages = pulled(client, 3)
    handle(messages["a1"])
    with pytest.raises(dmq.Retry, match="UNKNOWN"):
        handle(messages["a2"])
    with pytest.raises(dmq.Retry, match="number 3 waits for number 2"):
        handle(messages["a3"])
    verdicts["a2"] = SUCCESS
    handle(messages["a2"])
    handle(messages["a3"])
    assert effects(engine) == ["a2", "a3"]
