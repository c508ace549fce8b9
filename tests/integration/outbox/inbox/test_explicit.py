"""The explicit form (T-11): prepare and consumed in a transaction of one's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, GapPolicy, Inbox, MessageService
from dmq.testing import FakeClock
from tests.integration.outbox.effects import (
    consumed,
    effect,
    effects,
    outgoing,
    results,
)

SUCCESS, ROLLBACK, UNKNOWN = BusinessState.SUCCESS, BusinessState.ROLLBACK, BusinessState.UNKNOWN


@pytest.fixture
def service(engine: Engine, client: Client) -> Iterator[MessageService]:
    service = MessageService(engine, client)
    yield service
    service.close()


def pulled(client: Client, *bodies: str) -> list[ReceivedMessage]:
    client.producer().send_many("orders", [outgoing(body) for body in bodies])
    return [*client.consumer("orders", "stock").pull(len(bodies))]


def test_a_result_goes_out_with_the_commit_and_a_duplicate_is_answered_again(
    engine: Engine, client: Client, service: MessageService
) -> None:
    (message,) = pulled(client, "m")
    with Session(engine) as session:
        assert service.prepare(session, message) is message
        session.execute(effect("m"))
        service.consumed(session, message, SUCCESS)
        with session.begin_nested():
            session.execute(effect("more"))
        assert results(client) == []  # a savepoint is no commit
        session.commit()
        assert [result.state for result in results(client)] == [SUCCESS]
        assert service.prepare(session, message) is None
        session.rollback()
    assert effects(engine) == ["m", "more"]
    assert [result.state for result in results(client)] == [SUCCESS, SUCCESS]


def test_a_refusal_undoes_what_was_done_since_prepare_and_no_more(
    engine: Engine, client: Client, service: MessageService
) -> None:
    first, second = pulled(client, "first", "second")
    with Session(engine) as session, session.begin():
        session.execute(effect("before"))
        assert service.prepare(session, first)
        session.execute(effect("undone"))
        service.consumed(session, first, ROLLBACK, "no stock")
        assert service.prepare(session, second)
        session.execute(effect("second"))
        service.consumed(session, second, SUCCESS)
    assert effects(engine) == ["before", "second"]
    assert [(result.state, result.reason) for result in results(client)] == [(ROLLBACK, "no stock"), (SUCCESS, "")]


def test_without_a_result_nothing_is_committed(engine: Engine, client: Client, service: MessageService) -> None:
    (message,) = pulled(client, "m")
    with Session(engine) as session:
        service.prepare(session, message)
        session.execute(effect("m"))
        with pytest.raises(dmq.InvalidRequest, match="is UNKNOWN"):
            session.commit()
        session.rollback()
        # The business's own savepoints are its own affair.
        service.prepare(session, message)
        with session.begin_nested():
            session.execute(effect("m"))
        with pytest.raises(dmq.Retry, match="UNKNOWN"):
            service.consumed(session, message, UNKNOWN)
        session.rollback()
    assert effects(engine) == []
    assert consumed(engine) == {}
    assert results(client) == []


def test_a_rollback_forgets_what_was_said(engine: Engine, client: Client, service: MessageService) -> None:
    (message,) = pulled(client, "m")
    with Session(engine) as session:
        service.prepare(session, message)
        service.consumed(session, message, SUCCESS)
        session.rollback()
        session.execute(effect("other"))
        session.commit()
    assert results(client) == []
    assert consumed(engine) == {}


def test_messages_are_prepared_one_after_another(engine: Engine, client: Client, service: MessageService) -> None:
    first, second = pulled(client, "first", "second")
    with Session(engine) as session:
        with pytest.raises(dmq.InvalidRequest, match=r"call prepare\(\) first"):
            service.consumed(session, first, SUCCESS)
        service.prepare(session, first)
        with pytest.raises(dmq.InvalidRequest, match="then prepare the next"):
            service.prepare(session, second)
        with pytest.raises(dmq.InvalidRequest, match=r"call prepare\(\) first"):
            service.consumed(session, second, SUCCESS)


def test_a_gap_leaves_nothing_and_does_not_block_itself(engine: Engine, client: Client) -> None:
    clock = FakeClock()
    inbox = Inbox(engine, client, gaps=GapPolicy("skip", seconds=60.0), clock=clock)
    client.producer().send_many("orders", [outgoing("a2", 2, "a")])
    (message,) = client.consumer("orders", "stock").pull(1)
    for _ in range(2):
        with Session(engine) as session:
            session.execute(effect("before"))
            with pytest.raises(dmq.Retry, match="number 2 waits for number 1"):
                inbox.prepare(session, message)
            session.commit()  # of nothing: it was rolled back
        assert effects(engine) == []
        assert consumed(engine) == {}
    clock.advance(61)
    with Session(engine) as session, session.begin():
        session.execute(effect("before"))
        assert inbox.prepare(session, message) is message
        session.execute(effect("a2"))
        inbox.consumed(session, message, SUCCESS)
    assert effects(engine) == ["before", "a2"]
    assert [result.state for result in results(client)] == [SUCCESS]
