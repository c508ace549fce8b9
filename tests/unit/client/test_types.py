"""What a type checker knows of the public door. mypy reads this file; running it shows that it is true."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, assert_type

import msgspec

import dmq
import dmq.aio
from dmq.testing import TestBroker


@dataclass
class Order:
    number: int


class Refund(msgspec.Struct):
    cents: int


def test_a_consumer_with_a_type_gives_messages_of_that_type(dmq_broker: TestBroker) -> None:
    client = dmq_broker.connect()
    producer = client.producer()
    producer.send("orders", Order(7))
    producer.send_many("orders", [dmq.Message({"number": 8}), dmq.Message('{"number": 9}')])
    consumer = client.consumer("orders", group="billing", type=Order)
    assert_type(consumer, dmq.Consumer[Order])
    found: list[int] = []
    while len(found) < 3:
        batch = consumer.pull(wait=5.0)
        assert_type(batch, dmq.Batch[dmq.ReceivedMessage[Order]])
        for message in batch:
            assert_type(message, dmq.ReceivedMessage[Order])
            found.append(message.body.number)
        consumer.ack(batch)
    assert sorted(found) == [7, 8, 9]


def test_a_consumer_without_a_type_gives_bytes(dmq_broker: TestBroker) -> None:
    client = dmq_broker.connect()
    client.producer().send("plain", b"x", durability="stored")
    consumer = client.consumer("plain", group="billing", lease=5.0)
    assert_type(consumer, dmq.Consumer[bytes])
    for message in consumer:
        assert_type(message.body, bytes)
        assert message.body == b"x"
        message.ack()
        break


def test_a_handler_may_take_messages_of_a_type_or_any(dmq_broker: TestBroker) -> None:
    client = dmq_broker.connect()
    client.producer().send("refunds", Refund(5))
    consumer = client.consumer("refunds", group="ledger", type=Refund)
    seen: list[int] = []

    def book(message: dmq.ReceivedMessage[Refund]) -> None:
        seen.append(message.body.cents)
        consumer.close()

    consumer.run(book)
    assert seen == [5]
    either = client.consumer("refunds", group="audit", type=Refund | None)
    assert_type(either, dmq.Consumer[Any])


def test_asyncio_has_the_same_types() -> None:
    async def main() -> None:
        async with TestBroker() as broker:
            client = await broker.aio_connect()
            await client.producer().send("orders", Order(7))
            consumer = client.consumer("orders", group="billing", type=Order)
            assert_type(consumer, dmq.aio.AioConsumer[Order])
            batch = await consumer.pull(wait=5.0)
            assert_type(batch[0], dmq.aio.AioMessage[Order])
            assert [message.body.number for message in batch] == [7]

    asyncio.run(main())
