"""The inbox on real databases: an effect exactly once, whatever happens to the delivery."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox.inbox.consumption import Rollback
from dmq.outbox.inbox.decorator import consumes_messages
from dmq.outbox.inbox.inbox import Inbox
from dmq.outbox.states import BusinessState
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


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=4)
    return client


@contextmanager
def running(client: Client, handler: object, **options: object) -> Iterator[None]:
    """A consumer at work."""
    consumer = client.consumer("orders", "stock", max_attempts=None)
    thread = threading.Thread(target=lambda: consumer.run(handler, **options))  # type: ignore[arg-type]
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join()


def is_done(client: Client) -> bool:
    """Nothing is left for the group, nor waits to be tried again."""
    found = {group.name: group for group in client.admin.groups("orders")}
    return "stock" in found and not found["stock"].lag and not found["stock"].retrying


def write(session: Session, message: ReceivedMessage) -> BusinessState:
    session.execute(effect(message.body.decode()))
    return SUCCESS


def test_every_message_has_its_effect_once_and_its_result_however_often_it_comes(
    engine: Engine, client: Client
) -> None:
    """T-02, T-03, with eight workers that share a prefetch."""
    inbox = Inbox(engine, client)
    handler = inbox.consumes_messages(write)
    sent = [outgoing(f"m{n}") for n in range(60)]
    client.producer().send_many("orders", [*sent, *sent, *sent])
    with running(client, handler, workers=8):
        until(lambda: is_done(client))
    assert Counter(effects(engine)) == Counter(f"m{n}" for n in range(60))
    assert set(consumed(engine).values()) == {"SUCCESS"}
    said = Counter((result.send_id, result.state) for result in results(client))
    assert said == Counter({(message.properties["dmq.send_id"], SUCCESS): 3 for message in sent if message.properties})


def test_the_same_message_at_many_members_at_once_has_one_effect(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)
    message = outgoing("once")
    client.producer().send_many("orders", [message] * 16)
    taken = client.consumer("orders", "stock").pull(16)
    assert len(taken) == 16
    start = threading.Barrier(8)

    def go(which: int) -> None:
        start.wait()
        for at in range(which, 16, 8):
            inbox.consumes_messages(write)(taken[at])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(go, range(8)))
    assert effects(engine) == ["once"]
    assert [result.state for result in results(client)] == [SUCCESS] * 16


def test_a_refusal_keeps_the_row_and_its_reason_but_nothing_of_the_business(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)

    @inbox.consumes_messages
    def refuse(session: Session, message: ReceivedMessage) -> BusinessState:
        session.execute(effect("undone"))
        if message.body == b"told":
            raise Rollback("no stock")
        return ROLLBACK

    told, plain = outgoing("told"), outgoing("plain")
    client.producer().send_many("orders", [told, plain, told, plain])
    with running(client, refuse):
        until(lambda: is_done(client))
    assert effects(engine) == []
    assert sorted(consumed(engine).values()) == ["ROLLBACK", "ROLLBACK"]
    said = {(result.send_id, result.state, result.reason) for result in results(client)}
    ids = [message.properties["dmq.send_id"] for message in (told, plain) if message.properties]
    assert said == {(ids[0], ROLLBACK, "no stock"), (ids[1], ROLLBACK, "")}
    assert len(results(client)) == 4


@pytest.mark.parametrize("how", ["raises", "unknown", "nothing"])
def test_what_fails_or_stays_unknown_leaves_nothing_and_comes_again(engine: Engine, client: Client, how: str) -> None:
    inbox = Inbox(engine, client)
    calls: list[int] = []

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState | None:
        session.execute(effect(f"try {len(calls)}"))
        calls.append(message.attempt)
        if len(calls) == 3:
            return SUCCESS
        if how == "raises":
            raise ValueError("no")
        assert consumed(engine) == {}
        return UNKNOWN if how == "unknown" else None

    client.producer().send_many("orders", [outgoing("m")])
    with running(client, handle):
        until(lambda: results(client))
        until(lambda: is_done(client))
    assert effects(engine) == ["try 2"]
    # An error is tried again where it happened, a result that is not known comes from the broker again.
    assert calls == ([1, 1, 2] if how == "raises" else [1, 2, 3])
    assert [result.state for result in results(client)] == [SUCCESS]


def test_messages_of_any_producer_have_their_effect_once_and_no_result(engine: Engine, client: Client) -> None:
    inbox = Inbox(sessionmaker(engine), client)
    receipt = client.producer().send("orders", b"plain")
    consumer = client.consumer("orders", "stock")
    message = consumer.pull(1)[0]
    handler = inbox.consumes_messages(write)
    handler(message)
    handler(message)
    assert effects(engine) == ["plain"]
    assert consumed(engine) == {str(receipt.id): "SUCCESS"}
    assert results(client) == []


def test_groups_consume_the_same_message_each_for_itself(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)
    handler = inbox.consumes_messages(write)
    client.producer().send_many("orders", [outgoing("m")])
    for group in ("stock", "mail"):
        handler(client.consumer("orders", group).pull(1)[0])
    assert effects(engine) == ["m", "m"]
    assert sorted(result.group for result in results(client)) == ["mail", "stock"]


def test_a_handler_that_commits_by_itself_is_told_so(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        session.rollback()
        return SUCCESS

    client.producer().send_many("orders", [outgoing("m")])
    message = client.consumer("orders", "stock").pull(1)[0]
    with pytest.raises(dmq.InvalidRequest, match="leave commit and rollback to the inbox"):
        handle(message)
    assert consumed(engine) == {}


def test_a_method_is_a_handler_too(engine: Engine, client: Client) -> None:
    inbox = Inbox(engine, client)

    class Stock:
        name = "shelf"

        @inbox.consumes_messages
        def take(self, session: Session, message: ReceivedMessage) -> BusinessState:
            session.execute(effect(self.name))
            return SUCCESS

    client.producer().send_many("orders", [outgoing("m")])
    with running(client, Stock().take):
        until(lambda: results(client))
    assert effects(engine) == ["shelf"]


def test_a_coroutine_is_refused_with_a_sentence(engine: Engine, client: Client) -> None:
    async def handle(session: object, message: object) -> None: ...

    with pytest.raises(dmq.InvalidSettings, match="AioInbox"):
        Inbox(engine, client).consumes_messages(handle)


def test_a_broker_that_is_away_between_commit_and_result_changes_nothing(
    broker: TestBroker, engine: Engine, client: Client
) -> None:
    inbox = Inbox(engine, client)
    client.producer().send_many("orders", [outgoing("m")])
    killed = threading.Event()

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        session.execute(effect("m"))
        if not killed.is_set():
            killed.set()
            broker.kill()
        return SUCCESS

    with running(client, handle):
        until(killed.is_set)
        until(lambda: consumed(engine))
        broker.start()
        until(lambda: is_done(client))
    assert effects(engine) == ["m"]
    assert {result.state for result in results(client)} == {SUCCESS}


def test_the_decorator_works_without_an_inbox_at_hand(engine: Engine, client: Client) -> None:
    @consumes_messages(engine, client)
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        return write(session, message)

    client.producer().send_many("orders", [outgoing("m")] * 2)
    with running(client, handle):
        until(lambda: len(results(client)) == 2)
    assert effects(engine) == ["m"]
    with pytest.raises(dmq.InvalidSettings, match=r"dmq\.aio\.connect"):
        consumes_messages(create_async_engine("sqlite+aiosqlite:///x.db"), client)
