"""Failing and retry, through a broker in memory (J-02, J-05, A-06, D-17, R-13): what a user relies on."""

from __future__ import annotations

import asyncio
import time

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import FakeClock, TestBroker
from tests.integration.retry.failure_scene import (
    broker,
    client,
    counts,
    fail_next,
    lag,
    letters,
    retry_messages,
    running,
    send,
    settle_all,
)
from tests.patience import PATIENCE_S, eventually

__all__ = ["broker", "client"]  # fixtures

# --- when, and as what ------------------------------------------------------------------------------------------------


def test_a_message_that_fails_comes_again_after_1_3_9_seconds_and_so_on_and_never_early() -> None:
    """J-05."""
    with TestBroker(clock=FakeClock()) as broker:
        client = broker.connect()
        send(client, "a")
        consumer = client.consumer("orders", "billing")
        for attempt, seconds in enumerate((1, 3, 9, 27, 81, 243, 729, 2187, 6561, 7200, 7200), start=1):
            fail_next(consumer, attempt)
            eventually(lambda: counts(client) == (0, 1))
            broker.clock.advance(seconds - 0.01)
            time.sleep(0.12)  # more than two turns of the broker's timer
            assert len(consumer.pull(wait=0.0)) == 0
            broker.clock.advance(0.02)
        (message,) = consumer.pull(wait=PATIENCE_S)
        assert message.attempt == 12


def test_a_retry_is_the_message_it_was_but_for_its_attempt(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("two", queues=2)
    (receipt,) = send(
        client, "body", topic="two", key="o-1", tag="paid", business_id="u-7", priority=7, properties={"k": "v"}
    )
    consumer = client.consumer("two", "billing", tags="paid")
    first = next(consumer)
    sent_at = first.sent_at
    first.nack(delay=0.0, reason="boom")
    again = next(consumer)
    assert (again.id, again.topic, again.queue, again.offset) == (receipt.id, "two", receipt.queue, receipt.offset)
    assert (again.body, again.key, again.tag, again.business_id) == (b"body", "o-1", "paid", "u-7")
    assert (again.priority, dict(again.properties), again.app) == (7, {"k": "v"}, first.app)
    assert (again.sent_at, again.attempt) == (sent_at, 2)
    again.nack(delay=0.0)
    assert next(consumer).attempt == 3


def test_what_fails_does_not_hold_up_what_comes_behind_it(broker: TestBroker, client: Client) -> None:
    send(client, *"abcdef")
    consumer = client.consumer("orders", "billing", parallel=2)
    done: list[bytes] = []
    for _ in range(6):
        (message,) = consumer.pull(1, wait=PATIENCE_S)
        if message.body in (b"a", b"c"):
            message.nack(delay=3600)
        else:
            message.ack()
            done.append(message.body)
    assert done == [b"b", b"d", b"e", b"f"]
    eventually(lambda: counts(client) == (0, 2))
    assert [row.retrying for row in lag(client).queues] == [2]
    assert client.admin.group("billing").retrying == 2
    assert client.admin.group("billing").topics == ("orders",)
    broker.clock.advance(3601)
    assert settle_all(consumer, 2) == [("a", 2), ("c", 2)]
    eventually(lambda: counts(client) == (0, 0))


def test_a_handler_may_ask_for_a_retry_now_later_or_never(broker: TestBroker, client: Client) -> None:
    """A-06, also with a pool."""
    send(client, "now", "later", "never", "error", "good")
    seen: list[tuple[str, int]] = []

    def handle(message: ReceivedMessage) -> None:
        name = message.body.decode()
        seen.append((name, message.attempt))
        if name == "never":
            raise dmq.Reject("unreadable")
        if message.attempt == 1:
            if name == "now":
                raise dmq.Retry("at once", after=0)
            if name == "later":
                raise dmq.Retry("not yet", after=1000)
            if name == "error":
                raise ValueError("oops")

    consumer = client.consumer("orders", "billing")
    with running(consumer, handle):
        # An error that was not meant is tried again here first (J-02).
        eventually(lambda: len(seen) == 7)
        assert sorted(seen) == [
            ("error", 1),
            ("error", 1),
            ("good", 1),
            ("later", 1),
            ("never", 1),
            ("now", 1),
            ("now", 2),
        ]
        eventually(lambda: counts(client) == (0, 2))
        broker.clock.advance(1.1)
        eventually(lambda: ("error", 2) in seen)
        broker.clock.advance(1000)
        eventually(lambda: ("later", 2) in seen)
        eventually(lambda: counts(client) == (0, 0))
    (letter,) = letters(broker)
    assert (letter.body, letter.attributes.reason) == (b"never", "unreadable")


def test_the_table_of_waits_is_the_operators_choice_and_a_topics() -> None:
    with TestBroker(retry_table="5,50") as broker:
        client = broker.connect()
        client.admin.create_topic("orders", queues=1)
        client.admin.create_topic("quick", queues=1, properties={"retry_table": "2"})
        for topic, waits in (("orders", (5, 50, 50)), ("quick", (2, 2, 2))):
            send(client, "a", topic=topic)
            consumer = client.consumer(topic, "billing")
            for attempt, seconds in enumerate(waits, start=1):
                fail_next(consumer, attempt)
                eventually(lambda topic=topic: counts(client, topic=topic) == (0, 1))  # type: ignore[misc]
                broker.clock.advance(seconds - 1.5)
                assert len(consumer.pull(wait=0.0)) == 0
                broker.clock.advance(1.5)
            assert settle_all(consumer, 1) == [("a", 4)]


def test_a_table_that_is_none_is_refused() -> None:
    with pytest.raises(dmq.DMQError, match="retry table"), TestBroker(retry_table="soon"):
        pass
    with TestBroker() as broker, pytest.raises(dmq.InvalidSettings, match="retry table"):
        broker.connect().admin.create_topic("orders", properties={"retry_table": "later"})


# --- who gets it ------------------------------------------------------------------------------------------------------


def test_a_group_gets_retries_only_where_it_consumes(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("refunds", queues=1)
    orders, refunds = client.consumer("orders", "billing"), client.consumer("refunds", "billing")
    other = client.consumer("orders", "shipping")
    send(client, "o")
    send(client, "r", topic="refunds")
    fail_next(orders, 1, delay=0)
    fail_next(refunds, 1, delay=0)
    assert settle_all(refunds, 1) == [("r", 2)]
    assert settle_all(orders, 1) == [("o", 2)]
    assert settle_all(other, 1) == [("o", 1)]
    for consumer in (orders, refunds, other):
        assert len(consumer.pull(wait=0.05)) == 0


def test_a_pull_from_one_queue_gets_the_retries_of_that_queue(client: Client) -> None:
    client.admin.create_topic("many", queues=3)
    sent = send(client, *"abcdefghi", topic="many")
    consumer = client.consumer("many", "billing")
    for queue in range(3):
        for message in consumer.pull(queue=queue):
            message.nack(delay=0)
    eventually(lambda: counts(client, topic="many") == (0, 9))
    for queue in range(3):
        expected = sorted(receipt.offset for receipt in sent if receipt.queue == queue)
        found: list[tuple[int, int, int]] = []
        while len(found) < len(expected):
            batch = consumer.pull(queue=queue, wait=PATIENCE_S)
            found += [(message.queue, message.offset, message.attempt) for message in batch]
            consumer.ack(batch)
        assert sorted(found) == [(queue, offset, 2) for offset in expected]


def test_another_member_may_get_the_retry(broker: TestBroker, client: Client) -> None:
    send(client, "a")
    with client.consumer("orders", "billing") as first:
        fail_next(first, 1, delay=0)
        eventually(lambda: counts(client) == (0, 1))
    with broker.connect().consumer("orders", "billing") as second:
        message = next(second)
        assert message.attempt == 2
        message.ack()
        eventually(lambda: counts(client) == (0, 0))


def test_a_filter_holds_for_retries(client: Client) -> None:
    """A group that changed its tags meanwhile passes over what it no longer wants."""
    send(client, "a", tag="created")
    send(client, "b", tag="paid")
    both = client.consumer("orders", "billing", tags="created || paid")
    for message in both.pull():
        message.nack(delay=0)
    eventually(lambda: counts(client) == (0, 2))
    both.close()
    paid = client.consumer("orders", "billing", tags="paid", version=1)
    assert settle_all(paid, 1) == [("b", 2)]
    assert len(paid.pull(wait=0.05)) == 0
    eventually(lambda: counts(client) == (0, 0))


def test_retries_of_a_priority_topic_keep_their_priority(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("urgent", priority=True)
    for priority in (1, 8, 5):
        send(client, f"{priority}", topic="urgent", priority=priority)
    consumer = client.consumer("urgent", "billing")
    for _ in range(3):
        (message,) = consumer.pull(1)
        message.nack(delay=3600)
    eventually(lambda: counts(client, topic="urgent") == (0, 3))
    broker.clock.advance(3601)
    eventually(lambda: retry_messages(client) == 3)
    send(client, "9", topic="urgent", priority=9)
    send(client, "3", topic="urgent", priority=3)
    found = []
    for _ in range(5):
        (message,) = consumer.pull(1, wait=PATIENCE_S)
        found.append((message.priority, message.attempt))
        message.ack()
    # Every tenth pick goes round, so one may be out of its place.
    assert sorted(found, reverse=True) == [(9, 1), (8, 2), (5, 2), (3, 1), (1, 2)]
    assert any(
        [*found[:at], *found[at + 1 :]] == sorted([*found[:at], *found[at + 1 :]], reverse=True) for at in range(5)
    )


def test_an_asyncio_consumer_gets_retries_too(broker: TestBroker, client: Client) -> None:
    send(client, "a")

    async def main() -> list[int]:
        async with dmq.aio.connect(broker.url, app="test") as connected:
            consumer = connected.consumer("orders", "billing")
            attempts = []
            async for message in consumer:
                attempts.append(message.attempt)
                if message.attempt == 3:
                    await message.ack()
                    break
                await message.nack(delay=0)
            await consumer.close()
            return attempts

    assert asyncio.run(main()) == [1, 2, 3]


# --- who waits for it -------------------------------------------------------------------------------------------------


def test_a_producer_that_waits_to_be_consumed_waits_for_the_attempt_that_succeeds(client: Client) -> None:
    """D-20: a retry move does not count."""
    consumer = client.consumer("orders", "billing")
    future = client.producer().send_async("orders", b"a", durability="consumed", consumed_by="billing")
    fail_next(consumer, 1, delay=0)
    (message,) = consumer.pull(wait=PATIENCE_S)
    assert message.attempt == 2
    assert not future.done()
    message.ack()
    assert future.result(PATIENCE_S).durability == "consumed"


def test_a_message_that_only_ever_fails_was_not_consumed(broker: TestBroker, client: Client) -> None:
    consumer = client.consumer("orders", "billing", max_attempts=2)
    producer = client.producer(timeout=PATIENCE_S)
    future = producer.send_async("orders", b"a", durability="consumed", consumed_by="billing")
    fail_next(consumer, 1, delay=0)
    fail_next(consumer, 2, delay=0)
    eventually(lambda: len(letters(broker)) == 1)
    assert not future.done()
    broker.clock.advance(3600)
    with pytest.raises(dmq.ConsumeTimeout):
        future.result(PATIENCE_S)
