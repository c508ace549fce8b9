"""Expiry, through a broker in memory: a message is delivered in time, or is a dead letter that says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.consumer import Consumer
from dmq.records import DeadReason
from dmq.testing import TestBroker
from tests.integration.retry.failure_scene import counts, letters, send, settle_all
from tests.patience import eventually


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    return client


def drained(consumer: Consumer) -> Callable[[], bool]:
    """A pull finds nothing for the user; looking is what finds the expired ones."""
    return lambda: len(consumer.pull(wait=0.0)) == 0


def test_a_message_that_expired_is_a_dead_letter_when_it_would_be_handed_out(
    broker: TestBroker, client: Client
) -> None:
    (receipt,) = send(client, "soon", key="o-1", ttl=60)
    send(client, "late", ttl=7200)
    send(client, "never")
    broker.clock.advance(61)
    consumer = client.consumer("orders", "billing")
    assert settle_all(consumer, 2) == [("late", 1), ("never", 1)]
    eventually(lambda: counts(client) == (0, 0))
    (letter,) = letters(broker)
    said = letter.attributes
    assert (letter.body, said.key, said.message_id) == (b"soon", "o-1", receipt.id)
    assert (said.reason_code, said.attempt, said.group) == (DeadReason.EXPIRED, 0, "billing")


def test_what_comes_in_time_is_delivered(broker: TestBroker, client: Client) -> None:
    send(client, "a", ttl=60)
    broker.clock.advance(50)
    assert settle_all(client.consumer("orders", "billing"), 1) == [("a", 1)]
    assert letters(broker) == []


def test_a_topic_may_give_its_messages_a_time_to_live_and_take_it_back(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("news", queues=1, ttl=100)
    send(client, "old", topic="news")
    send(client, "short", topic="news", ttl=10)
    broker.clock.advance(90)
    send(client, "new", topic="news")
    consumer = client.consumer("news", "readers")
    broker.clock.advance(20)
    assert settle_all(consumer, 1) == [("new", 1)]
    eventually(lambda: sorted(letter.body for letter in letters(broker, "readers")) == [b"old", b"short"])
    assert {letter.attributes.reason_code for letter in letters(broker, "readers")} == {DeadReason.EXPIRED}
    send(client, "kept", topic="news")
    client.admin.update_topic("news", ttl=None)
    broker.clock.advance(200)
    assert settle_all(consumer, 1) == [("kept", 1)]


def test_a_retry_expires_when_its_message_does(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("news", queues=1, ttl=100)
    send(client, "own", ttl=100)
    send(client, "topics", topic="news")
    for topic in ("orders", "news"):
        consumer = client.consumer(topic, "billing")
        (message,) = consumer.pull()
        message.nack(delay=200)
        eventually(lambda topic=topic: counts(client, topic=topic) == (0, 1))  # type: ignore[misc]
        broker.clock.advance(1)
        consumer.close()
    broker.clock.advance(250)
    for topic in ("orders", "news"):
        consumer = client.consumer(topic, "billing")
        eventually(lambda topic=topic, consumer=consumer: drained(consumer)() and counts(client, topic=topic) == (0, 0))  # type: ignore[misc]
    assert sorted(letter.body for letter in letters(broker)) == [b"own", b"topics"]
    assert {letter.attributes.reason_code for letter in letters(broker)} == {DeadReason.EXPIRED}
    assert {letter.attributes.attempt for letter in letters(broker)} == {1}


def test_thousands_of_expired_messages_do_not_hold_up_a_small_pull(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("news", queues=1, ttl=100)
    producer = client.producer()
    producer.send_many("news", [dmq.Message(b"%d" % n) for n in range(20_000)])
    broker.clock.advance(101)
    send(client, "fresh", topic="news")
    consumer = client.consumer("news", "readers")
    (message,) = consumer.pull(1, wait=30.0)
    assert message.body == b"fresh"
    message.ack()
    eventually(lambda: counts(client, "readers", "news") == (0, 0))
    assert client.admin.topics("%DLQ%readers", system=True)[0].messages == 20_000


def test_an_ordered_group_goes_on_behind_what_expired(broker: TestBroker, client: Client) -> None:
    send(client, "a", business_id="u-7", ordered=True)
    send(client, "b", business_id="u-7", ordered=True, ttl=5)
    send(client, "c", business_id="u-7", ordered=True)
    broker.clock.advance(6)
    consumer = client.consumer("orders", "billing", ordered=True)
    done: list[bytes] = []
    deadline = time.monotonic() + 120
    while len(done) < 2:
        assert time.monotonic() < deadline
        for message in consumer.pull(wait=1.0):
            done.append(message.body)
            message.ack()
    assert done == [b"a", b"c"]
    eventually(lambda: [letter.body for letter in letters(broker)] == [b"b"])


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_expiry_is_known_after_a_restart(broker: TestBroker, client: Client, how: str) -> None:
    send(client, "a", ttl=60)
    send(client, "b")
    if how == "restart":
        broker.restart()
    else:
        broker.kill()
        broker.start()
    broker.clock.advance(61)
    assert settle_all(client.consumer("orders", "billing"), 1) == [("b", 1)]
    eventually(lambda: [letter.body for letter in letters(broker)] == [b"a"])


def test_a_delayed_message_that_expired_on_its_way_is_not_delivered(broker: TestBroker, client: Client) -> None:
    send(client, "a", delay=100, ttl=50)
    send(client, "b", delay=100, ttl=5000)
    broker.clock.advance(101)
    consumer = client.consumer("orders", "billing")
    assert settle_all(consumer, 1) == [("b", 1)]
    # Both fall due at once, and either may come first: "a" is found expired when it would be handed out.
    eventually(lambda: not consumer.pull(wait=0.05) and [letter.body for letter in letters(broker)] == [b"a"])
