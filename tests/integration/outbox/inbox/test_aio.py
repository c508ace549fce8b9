"""The inbox with asyncio: sessions, handlers, and the explicit form."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession

import dmq
import dmq.aio
from dmq.client.aio.client import AioClient
from dmq.client.aio.message import AioMessage
from dmq.outbox.inbox.aio_inbox import AioInbox
from dmq.outbox.inbox.consumption import Rollback
from dmq.outbox.repair.confirm_service import ask_address
from dmq.outbox.states import BusinessState
from dmq.testing import TestBroker
from tests.integration.outbox.effects import (
    SECONDS,
    consumed,
    effect,
    effects,
    open_aio,
    outgoing,
    results,
)

SUCCESS, ROLLBACK, UNKNOWN = BusinessState.SUCCESS, BusinessState.ROLLBACK, BusinessState.UNKNOWN


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(retry_table="0.05") as broker:
        yield broker


@asynccontextmanager
async def inbox_at(broker: TestBroker, engine: Engine) -> AsyncIterator[tuple[AioClient, AioInbox]]:
    url = engine.url.render_as_string(hide_password=False)
    database = open_aio(url)
    async with dmq.aio.connect(broker.url) as client:
        yield client, AioInbox(database, client)
    await database.dispose()


async def until(is_done: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await asyncio.to_thread(is_done):
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(client: AioClient, handler: Callable[[AioMessage], Awaitable[None]]) -> AsyncIterator[None]:
    consumer = client.consumer("orders", "stock", max_attempts=None)
    task = asyncio.create_task(consumer.run(handler))
    try:
        yield
    finally:
        await consumer.close()
        with suppress(asyncio.CancelledError):
            await task


def test_every_message_has_its_effect_once_and_its_result(broker: TestBroker, engine: Engine) -> None:
    plain = broker.connect()
    sent = [outgoing(f"m{n}") for n in range(30)] + [outgoing("no") for _ in range(3)]
    failed: set[bytes] = set()

    async def go() -> None:
        async with inbox_at(broker, engine) as (client, inbox):

            @inbox.consumes_messages
            async def handle(session: AsyncSession, message: AioMessage) -> BusinessState:
                await session.execute(effect(message.body.decode()))
                if message.body == b"no":
                    raise Rollback("never")
                if message.body not in failed and message.body.endswith(b"7"):
                    failed.add(message.body)
                    return UNKNOWN
                return SUCCESS

            async with running(client, handle):
                await until(lambda: len(results(plain)) == 66)
            assert inbox.counts.get("consumed") == 30
            assert inbox.counts.get("refused") == 3
            assert inbox.counts.get("duplicates") == 33

    plain.producer().send_many("orders", [*sent, *sent])
    asyncio.run(go())
    assert Counter(effects(engine)) == Counter(f"m{n}" for n in range(30))
    assert Counter(consumed(engine).values()) == {"SUCCESS": 30, "ROLLBACK": 3}
    assert {result.reason for result in results(plain) if result.state is ROLLBACK} == {"never"}


def test_the_explicit_form_works_with_asyncio_sessions(broker: TestBroker, engine: Engine) -> None:
    plain = broker.connect()
    plain.producer().send_many("orders", [outgoing("yes"), outgoing("no"), outgoing("later")])

    async def go() -> None:
        async with inbox_at(broker, engine) as (client, inbox):
            consumer = client.consumer("orders", "stock")
            messages: list[AioMessage] = []
            while len(messages) < 3:
                messages += [*await consumer.pull(3)]
            sessions = inbox.sessions
            for message in messages:
                async with sessions() as session, session.begin():
                    assert await inbox.prepare(session, message) == message
                    await session.execute(effect(message.body.decode()))
                    if message.body == b"later":
                        with pytest.raises(dmq.Retry):
                            await inbox.consumed(session, message, UNKNOWN)
                        await session.rollback()
                        break
                    state = SUCCESS if message.body == b"yes" else ROLLBACK
                    await inbox.consumed(session, message, state, "why")
                    assert not any(said.send_id == message.properties["dmq.send_id"] for said in results(plain))
            for message in messages:
                if message.body != b"later":
                    async with sessions() as session, session.begin():
                        assert await inbox.prepare(session, message) is None

    asyncio.run(go())
    assert effects(engine) == ["yes"]
    assert Counter(consumed(engine).values()) == {"SUCCESS": 1, "ROLLBACK": 1}
    assert Counter(result.state for result in results(plain)) == {SUCCESS: 2, ROLLBACK: 2}


def test_the_confirm_service_is_there_while_a_consumer_runs(broker: TestBroker, engine: Engine) -> None:
    plain = broker.connect()
    message = outgoing("m")
    plain.producer().send_many("orders", [message])
    assert message.properties is not None
    send_id = message.properties["dmq.send_id"]

    async def go() -> None:
        async with inbox_at(broker, engine) as (client, inbox):

            @inbox.consumes_messages
            async def handle(session: AsyncSession, message: AioMessage) -> BusinessState:
                return SUCCESS

            async with running(client, handle):
                await until(lambda: results(plain) and plain.registry.entries("dmq.confirm", "stock/"))
                (address,) = plain.registry.entries("dmq.confirm").values()
                found = await asyncio.to_thread(ask_address, address.decode(), "stock", [send_id, "f" * 32], 5.0)
                assert {one: said.state for one, said in found.items()} == {send_id: SUCCESS}

    asyncio.run(go())
    assert plain.registry.entries("dmq.confirm") == {}


def test_a_plain_function_is_refused_with_a_sentence(broker: TestBroker, engine: Engine) -> None:
    async def go() -> None:
        async with inbox_at(broker, engine) as (_, inbox):
            with pytest.raises(dmq.InvalidSettings, match=r"dmq\.outbox\.Inbox"):
                inbox.consumes_messages(lambda session, message: SUCCESS)  # type: ignore[arg-type,return-value]

    asyncio.run(go())
