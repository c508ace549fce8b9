"""Records whose frames are right: their producer sealed what was damaged already, or what nobody can expand."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Iterator

import pytest
from crc32c import crc32c

import dmq
import dmq.aio
from dmq.model import Durability
from dmq.protocol import Command
from dmq.protocol.produce import Produce
from dmq.protocol.session import FRAME_CRC
from dmq.records import Attributes, encode_attributes, layout
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.testing.processes import BrokerProcess
from tests.integration.broken_records import SENT_AT_MS, key, record
from tests.integration.frame_client import RawClient, port_of
from tests.patience import eventually

GOOD = 40
Take = Callable[[BrokerProcess, str], list[bytes]]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[dmq.Client]:
    with dmq.connect(broker.url, app="shop") as client:
        yield client


def store(broker: BrokerProcess, client: dmq.Client, topic: str, bad: bytes) -> None:
    """A topic of one queue with good messages, each batch of which has a bad one, sent in frames with checksums."""
    client.admin.create_topic(topic, queues=1)
    with RawClient(port_of(broker.url), features=[FRAME_CRC]) as raw:
        for count in (2, GOOD - 2):  # few and many are looked at in different ways
            records = [record(topic, key(b"good"), body=b"hello") for _ in range(count)]
            records.insert(1, bad)
            header = Produce(topic, 0, len(records), 0, random.getrandbits(48), 1, 0, Durability.FLUSHED)
            lengths = struct.pack(f">{len(records)}I", *map(len, records))
            assert raw.ask(Command.PRODUCE, header, lengths + b"".join(records)).status == 0


def handled(broker: BrokerProcess, topic: str) -> list[bytes]:
    seen: list[bytes] = []
    with dmq.connect(broker.url, app="shop") as client, client.consumer(topic, "g", start_from="earliest") as consumer:

        def handle(message: dmq.ReceivedMessage) -> None:
            seen.append(message.body)
            if len(seen) == GOOD:
                consumer.stop()

        consumer.run(handle)
    return seen


def iterated(broker: BrokerProcess, topic: str, *, ordered: bool = False) -> list[bytes]:
    seen: list[bytes] = []
    with (
        dmq.connect(broker.url, app="shop") as client,
        client.consumer(topic, "g", start_from="earliest", ordered=ordered) as consumer,
    ):
        while len(seen) < GOOD:
            message = next(consumer)
            seen.append(message.body)
            message.ack()
    return seen


def iterated_in_order(broker: BrokerProcess, topic: str) -> list[bytes]:
    return iterated(broker, topic, ordered=True)


def iterated_by_asyncio(broker: BrokerProcess, topic: str) -> list[bytes]:
    async def run() -> list[bytes]:
        seen: list[bytes] = []
        client = await dmq.aio.connect(broker.url, app="shop")
        async with client, client.consumer(topic, "g", start_from="earliest") as consumer:
            async for message in consumer:
                seen.append(message.body)
                await message.ack()
                if len(seen) == GOOD:
                    break
        return seen

    return asyncio.run(run())


def pulled(broker: BrokerProcess, topic: str) -> list[bytes]:
    seen: list[bytes] = []
    with dmq.connect(broker.url, app="shop") as client, client.consumer(topic, "g", start_from="earliest") as consumer:
        while len(seen) < GOOD:
            batch = consumer.pull(wait=5)
            seen += [message.body for message in batch]
            batch.ack()
    return seen


@pytest.mark.parametrize("take", [handled, iterated, iterated_in_order, iterated_by_asyncio])
def test_no_handler_sees_a_body_that_was_sealed_with_another_checksum(
    broker: BrokerProcess, client: dmq.Client, take: Take
) -> None:
    topic = take.__name__
    store(broker, client, topic, record(topic, key(b"bad"), body=b"hello", flip=layout.BODY_AT))
    assert take(broker, topic) == [b"hello"] * GOOD
    eventually(lambda: len([*client.admin.dead_letters(topic=topic, reason="CORRUPT")]) == 2)
    assert {letter.key for letter in client.admin.dead_letters(topic=topic)} == {"bad"}
    eventually(lambda: not client.admin.lag(topic, "g").total)


@pytest.mark.parametrize("take", [handled, iterated, iterated_in_order, iterated_by_asyncio, pulled])
def test_a_body_that_does_not_expand_is_a_dead_letter_at_once(
    broker: BrokerProcess, client: dmq.Client, take: Take
) -> None:
    topic, body = f"packed-{take.__name__}", b"no zstd at all"
    store(
        broker,
        client,
        topic,
        build_record(
            record_head(layout.COMPRESSED, 0, 4),
            sent_at_ms=SENT_AT_MS,
            body=body,
            body_crc=crc32c(body),
            names=name_bytes("topic", topic) + b"\3raw\0",
            attributes=encode_attributes(Attributes(key="bad", codec=1, raw_size=100)),
        ),
    )
    assert take(broker, topic) == [b"hello"] * GOOD
    eventually(lambda: len([*client.admin.dead_letters(topic=topic)]) == 2)
    letters = [*client.admin.dead_letters(topic=topic)]
    assert {(letter.key, letter.attempts) for letter in letters} == {("bad", 1)}
    eventually(lambda: not client.admin.lag(topic, "g").total)
