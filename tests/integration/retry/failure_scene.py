"""What tests of failing and retry share: a broker in memory, and short ways to send, fail and look."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

import dmq
from dmq.client.admin.reports import Lag
from dmq.client.client import Client
from dmq.client.consumer.consumer import Consumer
from dmq.client.consumer.message import ReceivedMessage
from dmq.records import RecordView
from dmq.testing import TestBroker
from tests.patience import PATIENCE_S

T = TypeVar("T")


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    return client


def send(client: Client, *bodies: str, topic: str = "orders", **options: object) -> list[dmq.Receipt]:
    producer = client.producer()
    receipts = [producer.send(topic, body, **options) for body in bodies]  # type: ignore[arg-type]
    producer.close()
    return receipts


def lag(client: Client, group: str = "billing", topic: str = "orders") -> Lag:
    return client.admin.lag(topic, group)


def counts(client: Client, group: str = "billing", topic: str = "orders") -> tuple[int, int]:
    """Lag, and messages that wait for another attempt."""
    found = lag(client, group, topic)
    return found.total, found.retrying


def letters(broker: TestBroker, group: str = "billing") -> list[RecordView]:
    """The dead letters of a group, as the journal has them."""

    def read() -> list[RecordView]:
        assert broker._server is not None
        store = broker._server.broker.store
        name = f"%DLQ%{group}"
        if store.queries.find_topic(name) is None:
            return []
        first, following = store.queries.bounds(name, 0)
        return [*store.queries.read(name, 0, first, following - first, 1 << 30).records()] if following > first else []

    return in_loop(broker, read)


def in_loop(broker: TestBroker, call: Callable[[], T]) -> T:
    assert broker._loop is not None

    async def run() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(run(), broker._loop).result(PATIENCE_S)


class running:  # noqa: N801
    """A consumer whose `run` goes on in a thread."""

    def __init__(self, consumer: Consumer, handler: Callable[[ReceivedMessage], object]) -> None:
        self._consumer = consumer
        self._thread = threading.Thread(target=consumer.run, args=(handler,))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def settle_all(consumer: Consumer, count: int) -> list[tuple[str, int]]:
    """Ack the next messages; their bodies and attempts."""
    found: list[tuple[str, int]] = []
    while len(found) < count:
        batch = consumer.pull(wait=PATIENCE_S)
        assert batch, "there is less than expected"
        found += [(message.body.decode(), message.attempt) for message in batch]
        consumer.ack(batch)
    return sorted(found)


def retry_messages(client: Client) -> int:
    """How many messages came into retry topics so far."""
    return sum(topic.messages for topic in client.admin.topics("%RETRY%", system=True))


def fail_next(consumer: Consumer, attempt: int, **options: object) -> ReceivedMessage:
    """Nack the one message there is, which must be at this attempt."""
    (message,) = consumer.pull(wait=PATIENCE_S)
    assert message.attempt == attempt
    message.nack(**options)  # type: ignore[arg-type]
    return message
