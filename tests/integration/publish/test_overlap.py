"""Batches of one producer that are under way to one queue at once, and a broker that does not take all of them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

import dmq
from dmq.client.client import Client
from dmq.model import Durability
from dmq.protocol import Command, Status
from dmq.protocol.produce import Produce
from dmq.settings import StoreSettings
from dmq.testing import MemoryFiles, TestBroker
from tests.integration.broken_records import record
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, port_of

COUNT = 12_000  # six batches of one call


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


def make_topic(client: Client, name: str) -> None:
    client.admin.create_topic(name, queues=1)
    client.admin.create_group("all", name)


def numbered(count: int, start: int = 0) -> list[dmq.Message]:
    return [dmq.Message(b"%d" % number) for number in range(start, start + count)]


def stored(client: Client, topic: str) -> list[int]:
    """What the queue has, in its order."""
    found = []
    with client.consumer(topic, "all") as consumer:
        while batch := consumer.pull(5000, wait=0.1):
            found += [int(message.body) for message in batch]
            batch.ack()
    return found


def test_a_batch_that_does_not_follow_the_last_one_is_refused_and_nothing_of_it_is_stored(broker: TestBroker) -> None:
    client = broker.connect()
    make_topic(client, "raw")
    body = record("raw")

    def produce(sequence: int, previous: int | None) -> int:
        header = Produce(
            "raw", 0, 1, 0, producer_id=7, producer_epoch=0, first_sequence=sequence, durability=Durability.STORED,
            previous_sequence=previous,
        )  # fmt: skip
        return raw.ask(Command.PRODUCE, header, len(body).to_bytes(4, "big") + body).status

    raw = RawClient(port_of(broker.url), features=["overlap"])
    assert produce(5, 4) == Status.OUT_OF_ORDER
    assert produce(0, None) == Status.OK
    assert produce(9, 8) == Status.OUT_OF_ORDER
    assert produce(3, 0) == Status.OK
    assert produce(3, 77) == Status.OK, "it exists already"
    assert produce(9, 3) == Status.OK
    raw.sock.close()
    assert client.admin.offsets("raw")[0].next_offset == 3


def test_what_a_limit_refuses_is_told_and_the_rest_is_stored_in_order(broker: TestBroker) -> None:
    client = broker.connect()
    make_topic(client, "limited")
    client.admin.set_limit(topic="limited", messages=4500)
    producer = client.producer()
    with pytest.raises(dmq.RateLimited) as caught:
        producer.send_many("limited", numbered(COUNT), durability="stored")
    assert stored(client, "limited") == caught.value.detail["stored_indexes"]
    assert 0 < caught.value.detail["stored"] < COUNT


def test_a_disk_that_is_full_for_a_moment_costs_neither_a_message_nor_the_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = MemoryFiles()
    with (
        ServedBroker(files) as broker,
        dmq.connect(broker.url, app="shop") as client,
        client.producer(timeout=60.0, retries=20) as producer,
    ):
        make_topic(client, "full")
        producer.send("full", b"0", durability="stored")
        files.fail("write", 3, errno.ENOSPC)
        healer = threading.Timer(0.1, files.heal)
        healer.start()
        assert len(producer.send_many("full", numbered(COUNT, 1), durability="stored")) == COUNT
        healer.join()
        assert "the disk is full" in caplog.text
        assert stored(client, "full") == [*range(COUNT + 1)]


def test_a_broker_that_remembers_few_producers_takes_all_of_them() -> None:
    store = StoreSettings(producers_max=1)
    with ServedBroker(store=store) as broker, dmq.connect(broker.url, app="shop") as client:
        for name in ("a", "b"):
            make_topic(client, name)
        problems: list[BaseException] = []

        def send(topic: str) -> None:
            try:
                with dmq.connect(broker.url, app="shop") as own, own.producer() as producer:
                    for start in range(0, 3 * COUNT, COUNT):
                        producer.send_many(topic, numbered(COUNT, start), durability="stored")
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=send, args=(topic,)) for topic in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        assert stored(client, "a") == stored(client, "b") == [*range(3 * COUNT)]
