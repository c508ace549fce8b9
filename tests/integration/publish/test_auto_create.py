"""A broker that creates topics when they are named creates none for what it refuses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator

import pytest

import dmq
from dmq.client.client import Client
from dmq.model import Durability
from dmq.protocol import Command, error_from_status
from dmq.protocol.produce import Produce, ProduceFlag
from dmq.testing import TestBroker
from tests.integration.broken_records import record
from tests.integration.frame_client import RawClient, port_of

YEARS = 3 * 365 * 86_400
REFUSED: dict[str, Callable[[dmq.Producer], object]] = {
    "delay": lambda producer: producer.send("none", b"x", delay=YEARS),
    "ttl": lambda producer: producer.send("none", b"x", ttl=-1),
    "key": lambda producer: producer.send("none", b"x", key="k" * 70_000),
    "async": lambda producer: producer.send_async("none", b"x", delay=YEARS),
    "known": lambda producer: producer.send("none", dmq.Message(b"x", "k" * 70_000)),
    "many": lambda producer: producer.send_many("none", [dmq.Message(b"x")], delay=YEARS),
    "one of many": lambda producer: producer.send_many("none", [dmq.Message(b"x"), dmq.Message(b"x", priority=10)]),
}


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create=True) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    return broker.connect()


@pytest.mark.parametrize("how", REFUSED)
def test_a_message_that_cannot_be_sent_creates_no_topic(client: Client, how: str) -> None:
    with pytest.raises(dmq.InvalidMessage):
        REFUSED[how](client.producer())
    assert client.admin.topics() == []


def test_asyncio_has_the_same(broker: TestBroker, client: Client) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="shop") as other:
            producer = other.producer()
            with pytest.raises(dmq.InvalidMessage):
                await producer.send("none", b"x", delay=YEARS)
            with pytest.raises(dmq.InvalidMessage):
                await producer.send_async("none", b"x", ttl=-1)
            with pytest.raises(dmq.InvalidMessage):
                await producer.send_many("none", [dmq.Message(b"x")], delay=YEARS)

    asyncio.run(main())
    assert client.admin.topics() == []


@pytest.mark.parametrize("is_due_too_late", [True, False])
def test_a_client_that_does_not_look_itself_is_refused_before_the_topic_is_made(
    broker: TestBroker, client: Client, is_due_too_late: bool
) -> None:
    good = record("none")
    data = good if is_due_too_late else good[:-1]
    flags = ProduceFlag.DUES if is_due_too_late else ProduceFlag(0)
    header = Produce("none", 0, 1, 0, 77, 1, 0, durability=Durability.STORED, flags=int(flags))
    dues = struct.pack(">Q", 9_000_000_000_000) if is_due_too_late else b""
    with RawClient(port_of(broker.url)) as raw:
        answer = raw.ask(Command.PRODUCE, header, struct.pack(">I", len(data)) + dues + data)
    error = error_from_status(answer.status, answer.header)
    assert isinstance(error, dmq.InvalidMessage if is_due_too_late else dmq.RecordCorrupt), error
    assert client.admin.topics() == []
