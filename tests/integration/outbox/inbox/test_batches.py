"""Batches: many messages in one transaction, and one by one when something is wrong with any of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, Inbox, Rollback
from dmq.testing import TestBroker
from tests.integration.outbox.effects import (
    consumed,
    effect,
    effects,
    outgoing,
    results,
    until,
)

SUCCESS, ROLLBACK, UNKNOWN = BusinessState.SUCCESS, BusinessState.ROLLBACK, BusinessState.UNKNOWN


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(retry_table="0.05") as broker:
        yield broker


@contextmanager
def running(client: Client, inbox: Inbox, function: Any, batch: int = 50) -> Iterator[None]:
    consumer = client.consumer("orders", "stock", max_attempts=None)
    thread = threading.Thread(target=inbox.run_batches, args=(consumer, function, batch))
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join()


def write(session: Session, message: ReceivedMessage) -> BusinessState:
    session.execute(effect(message.body.decode()))
    return SUCCESS


def test_a_batch_is_one_transaction_and_duplicates_in_it_and_after_it_count_once(
    engine: Engine, client: Client
) -> None:
    inbox = Inbox(engine, client)
    sent = [outgoing(f"m{n}") for n in range(100)]
    client.producer().send_many("orders", [*sent, *sent[:20], *sent])
    commits: list[int] = []
    event.listen(engine, "commit", lambda connection: commits.append(1))
    with running(client, inbox, inbox.consumes_messages(write), 100):
        until(lambda: len(results(client)) == 220)
    assert Counter(effects(engine)) == Counter(f"m{n}" for n in range(100))
    assert Counter(result.state for result in results(client)) == {SUCCESS: 220}
    assert len(commits) < 30
    assert (inbox.counts.get("consumed"), inbox.counts.get("duplicates")) == (100, 120)


def test_if_one_is_refused_or_fails_the_others_have_their_effect_once(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)
    failing = {"fails", "unknown"}

    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        body = message.body.decode()
        session.execute(effect(body))
        if body == "refused":
            raise Rollback("no")
        if body in failing and message.attempt > 1:
            failing.discard(body)
        elif body in failing:
            if body == "unknown":
                return UNKNOWN
            raise ValueError("no")
        return SUCCESS

    bodies = [*(f"m{n}" for n in range(20)), "refused", "fails", "unknown", *(f"n{n}" for n in range(20))]
    client.producer().send_many("orders", [outgoing(body) for body in bodies])
    with running(client, inbox, handle):
        until(lambda: len({result.send_id for result in results(client)}) == len(bodies))
    assert Counter(effects(engine)) == Counter(body for body in bodies if body != "refused")
    assert Counter(consumed(engine).values()) == {"SUCCESS": len(bodies) - 1, "ROLLBACK": 1}


def test_strict_sequences_keep_their_order_in_batches(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)
    sent = [outgoing(f"a{n}", n, "a") for n in range(1, 11)] + [outgoing("plain")]
    client.producer().send_many("orders", sent)
    with running(client, inbox, write):
        until(lambda: len(results(client)) == 11)
    assert [what for what in effects(engine) if what != "plain"] == [f"a{n}" for n in range(1, 11)]


def test_two_consumers_with_the_same_messages_do_not_harm_each_other(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)
    sent = [outgoing(f"m{n}") for n in range(60)]
    client.producer().send_many("orders", [message for message in sent for _ in range(3)])
    with running(client, inbox, write, 20), running(client, inbox, write, 20), running(client, inbox, write, 20):
        until(lambda: len(results(client)) >= 180)
    assert Counter(effects(engine)) == Counter(f"m{n}" for n in range(60))
