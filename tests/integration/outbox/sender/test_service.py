"""Sending with the business's own transaction: a commit sends its messages, a rollback never does (T-01)."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import dmq
from dmq.client.client import Client
from dmq.outbox import MessageService, SendState, sends_messages, tables
from dmq.outbox.sender.envelope import unpack
from dmq.testing import TestBroker
from tests.integration.outbox.effects import effect, effects, open_aio, until
from tests.integration.outbox.shop import TABLES, arrived, bodies, order, send_ids, shop, states


def test_a_commit_sends_what_it_inserted_and_a_rollback_nothing(engine: Engine, client: Client) -> None:
    with shop(engine, client) as service:
        kept = order(service, engine, "kept", key="k", tag="t", business_id="u-1", properties={"a": "b"}, priority=7)
        with suppress(KeyError), Session(engine) as session, session.begin():
            session.execute(effect(service.send(session, "orders", "undone")))
            raise KeyError
        (message,) = arrived(client, 1)
        assert service.flush()
    assert (message.raw, message.key, message.tag, message.business_id) == (b"kept", "k", "t", "u-1")
    assert message.priority == 7
    assert message.properties["a"] == "b"
    envelope = unpack(message)
    assert envelope is not None
    assert (envelope.send_id, envelope.result_to, envelope.sequence) == (kept, "shop", None)
    assert effects(engine) == [kept]  # the id was stored with the business (T-10)
    assert states(engine) == {"SENT": 1}


def test_what_a_savepoint_rolled_back_does_not_go_out(engine: Engine, client: Client) -> None:
    with shop(engine, client) as service:
        with Session(engine) as session, session.begin():
            service.send(session, "orders", "before")
            with suppress(KeyError), session.begin_nested():
                service.send(session, "orders", "within")
                raise KeyError
            with session.begin_nested():
                service.send(session, "orders", "kept within")
            service.send(session, "orders", "after")
        assert sorted(bodies(arrived(client, 3))) == ["after", "before", "kept within"]


def test_messages_of_asyncio_sessions_go_out(engine: Engine, client: Client) -> None:
    import asyncio

    url = engine.url.render_as_string(hide_password=False)

    @sends_messages
    async def place(service: MessageService, session: AsyncSession, body: str) -> str:
        async with session.begin():
            send_id = await service.send_async(session, "orders", body, business_id="u", strict=True)
            await session.execute(effect(send_id))
        return send_id

    async def run() -> list[str]:
        aio = open_aio(url)
        with shop(engine, client) as service:
            async with AsyncSession(aio) as session:
                placed = [await place(service, session, f"{number}") for number in range(3)]
                with suppress(KeyError):
                    async with session.begin():
                        await service.send_async(session, "orders", "undone")
                        raise KeyError
            async with aio.begin() as connection:
                placed.append(await service.send_async(connection, "orders", "by a connection"))
            await asyncio.to_thread(service.flush)
        await aio.dispose()
        return placed

    placed = asyncio.run(run())
    assert sorted(send_ids(arrived(client, 4))) == sorted(placed)


def test_a_service_on_an_asyncio_engine_works_behind_it(engine: Engine, client: Client) -> None:
    import asyncio

    url = engine.url.render_as_string(hide_password=False)

    async def run() -> str:
        aio = open_aio(url)
        service = MessageService(aio, client, poll=0.05)
        service.start()
        async with AsyncSession(aio) as session, session.begin():
            send_id = await service.send_async(session, "orders", "x")
        await asyncio.to_thread(service.flush)
        await asyncio.to_thread(service.close)
        await aio.dispose()
        return send_id

    send_id = asyncio.run(run())
    assert send_ids(arrived(client, 1)) == [send_id]


def test_strict_messages_are_numbered_without_gaps_by_transactions_at_once(engine: Engine, client: Client) -> None:
    def place(service: MessageService, seed: int) -> None:
        for number in range(12):
            with Session(engine) as session:
                session.begin()
                service.send(session, "orders", f"{seed}-{number}", business_id=f"u-{number % 2}", strict=True)
                session.rollback() if number % 3 == seed % 3 else session.commit()

    with shop(engine, client) as service:
        threads = [threading.Thread(target=place, args=(service, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = arrived(client, 24)
    sequences: dict[str, list[int]] = {}
    for message in found:
        envelope = unpack(message)
        assert envelope is not None
        assert envelope.sequence is not None
        sequences.setdefault(message.business_id or "", []).append(envelope.sequence)
    # Also in the order of their numbers: the counter's row lets one transaction at a time through.
    assert sequences == {"u-0": [*range(1, 13)], "u-1": [*range(1, 13)]}


def test_a_plain_connection_sends_when_it_commits(plain: Engine, client: Client) -> None:
    with shop(plain, client, relay=False) as service:
        with plain.begin() as connection:
            service.send(connection, "orders", "kept")
        with suppress(KeyError), plain.begin() as connection:
            service.send(connection, "orders", "undone")
            raise KeyError
        assert bodies(arrived(client, 1)) == ["kept"]


def test_a_method_that_sends_messages_sends_them_when_it_returns(plain: Engine, client: Client) -> None:
    @sends_messages
    def place(service: MessageService, body: str, fails: bool) -> int:
        raw = plain.raw_connection()  # commits in a way that nobody tells us of
        try:
            with plain.connect() as connection:
                transaction = connection.begin()
                service.send(connection, "orders", body)
                transaction.rollback() if fails else transaction.commit()
        finally:
            raw.close()
        if fails:
            raise KeyError
        return len(body)

    with shop(plain, client, relay=False) as service:
        assert place(service, "kept", False) == 4
        with pytest.raises(KeyError):
            place(service, "undone", True)
        assert bodies(arrived(client, 1)) == ["kept"]


def test_a_scoped_session_and_one_bound_by_class_can_send(plain: Engine, client: Client) -> None:
    with shop(plain, client) as service:
        scoped = scoped_session(sessionmaker(plain))
        service.send(scoped, "orders", "scoped")
        scoped.commit()
        scoped.remove()
        with Session(binds={object: plain}) as session:
            service.send(session, "orders", "by class", business_id="u", strict=True)
            session.commit()
        assert sorted(bodies(arrived(client, 2))) == ["by class", "scoped"]


@pytest.mark.parametrize("engine", ["mariadb", "postgresql"], indirect=True)  # SQLite's driver begins too late
def test_a_session_within_somebody_elses_transaction_sends_only_when_that_commits(
    engine: Engine, client: Client
) -> None:
    with shop(engine, client, grace=0.3, timeout=0.1, lease=1.0) as service:
        service.start()
        with engine.connect() as connection:
            outer = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                service.send(session, "orders", "x")
                session.commit()
            assert arrived(client, 1, seconds=1.0) == []
            outer.commit()
        assert bodies(arrived(client, 1)) == ["x"]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"topic": "no such!"}, dmq.InvalidName, "topic name 'no such!' is not allowed"),
        ({"ordered": True}, dmq.InvalidMessage, "ordered=True needs a business_id"),
        ({"strict": True}, dmq.InvalidMessage, "needs a business_id"),
        ({"business_id": "u", "strict": True, "ordered": False}, dmq.InvalidMessage, "does not go with ordered=False"),
        ({"key": "k" * 300}, dmq.InvalidMessage, "key is longer than 255 characters"),
        ({"properties": {"dmq.send_id": "x"}}, dmq.InvalidMessage, "'dmq.send_id' is DMQ's own"),
        ({"properties": {"n": 5}}, dmq.InvalidMessage, "propert"),
        ({"priority": 12}, dmq.InvalidMessage, "priority"),
        ({"body": 3.5}, dmq.InvalidMessage, "a body is bytes"),
        ({"groups": "billing"}, dmq.InvalidSettings, "write ['billing']"),
        ({"groups": ["a b"]}, dmq.InvalidName, "group name 'a b'"),
    ],
)
def test_what_could_never_be_sent_is_refused_before_the_business_runs(
    plain: Engine, options: dict[str, object], error: type[Exception], said: str
) -> None:
    with shop(plain, None) as service, Session(plain) as session:
        with pytest.raises(error) as raised:
            service.send(session, **{"topic": "orders", "body": b"x", **options})  # type: ignore[arg-type]
        assert said in str(raised.value)
        session.commit()
    assert states(plain) == {}


def test_a_body_that_is_too_large_is_refused(plain: Engine) -> None:
    import os

    with shop(plain, None) as service, Session(plain) as session, pytest.raises(dmq.MessageTooLarge):
        service.send(session, "orders", os.urandom(5 << 20))


def test_an_insert_that_fails_stops_the_business(plain: Engine, client: Client) -> None:
    with (
        shop(plain, client, tables=tables(prefix="not_there_")) as service,
        pytest.raises(DatabaseError),
        Session(plain) as session,
        session.begin(),
    ):
        session.execute(effect(service.send(session, "orders", "x")))
    assert effects(plain) == []


def test_an_asyncio_session_is_told_which_method_to_use(plain: Engine) -> None:
    with shop(plain, None) as service:
        with pytest.raises(dmq.InvalidSettings, match="await send_async"):
            service.send(AsyncSession(), "orders", b"")  # type: ignore[arg-type]
        with pytest.raises(dmq.InvalidSettings, match="not Engine"):
            service.send(plain, "orders", b"")  # type: ignore[arg-type]


def test_without_a_client_rows_wait_for_a_relay_elsewhere(plain: Engine, client: Client) -> None:
    with shop(plain, None) as service:
        order(service, plain, "x")
        assert states(plain) == {"NEW": 1}
    with shop(plain, client) as other:
        other.start()
        assert bodies(arrived(client, 1)) == ["x"]


def test_a_message_that_expects_no_result_is_done_when_it_is_sent(plain: Engine, client: Client) -> None:
    with shop(plain, client, groups={"orders": []}) as service:
        order(service, plain, "x")
        (message,) = arrived(client, 1)
        envelope = unpack(message)
        assert envelope is not None
        assert envelope.result_to == ""
        until(lambda: states(plain) == {"DONE": 1})


def test_a_broker_that_is_away_fails_no_business_and_gets_the_messages_when_it_is_back(
    broker: TestBroker, plain: Engine
) -> None:
    client = broker.connect()
    with shop(plain, client, timeout=0.5, lease=1.0) as service:
        service.start()
        order(service, plain, "before", business_id="u")
        until(lambda: states(plain) == {"SENT": 1})
        broker.stop()
        for number in range(3):
            order(service, plain, f"{number}", business_id="u")
        until(lambda: service.flush(0.1) or service.counts.get("sent") == 1)
        assert states(plain) == {"NEW": 3, "SENT": 1}
        broker.start()
        until(lambda: states(plain) == {"SENT": 4})
        found = arrived(client, 4)
    first = [body for index, body in enumerate(bodies(found)) if body not in bodies(found)[:index]]
    assert first == ["before", "0", "1", "2"]


def test_rows_are_found_by_their_send_id(plain: Engine) -> None:
    with shop(plain, None, groups={"orders": ["stock", "billing"]}) as service:
        send_id = order(service, plain, "x", business_id="u", properties={"a": "ä"}, strict=True)
        found = service.find(send_id)
        assert service.find("0" * 32) is None
    assert found is not None
    assert (found.topic, found.body, found.business_id, found.sequence) == ("orders", b"x", "u", 1)
    assert (found.state, found.groups, found.properties) == (SendState.NEW, ("billing", "stock"), {"a": "ä"})


def test_tables_of_other_names_in_the_users_own_metadata(tmp_path: Path, client: Client) -> None:
    from sqlalchemy import MetaData, create_engine

    own = MetaData()
    mine = tables("shop_", own, names={"send": "orders_out"})
    assert tables("shop_", own, names={"send": "orders_out"}).send is mine.send
    assert sorted(own.tables) == [
        "orders_out",
        "shop_msgconsumer",
        "shop_msgposition",
        "shop_msgresult",
        "shop_msgsequence",
    ]
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    own.create_all(engine)
    with shop(engine, client, tables=mine) as service:
        service.start()
        with Session(engine) as session, session.begin():
            send_id = service.send(session, "orders", b"x")
        assert send_ids(arrived(client, 1)) == [send_id]
        with engine.connect() as connection:
            assert [*connection.scalars(select(mine.send.c.send_id))] == [send_id]
    engine.dispose()
    assert TABLES.send.name == "m_msgsend"
