"""How often a message is tried, and that attempts outlive brokers, topics and groups (J-05, D-17, R-13)."""

from __future__ import annotations

import pytest

from dmq.client.client import Client
from dmq.records import DeadReason
from dmq.testing import TestBroker
from tests.integration.retry.failure_scene import (
    broker,
    client,
    counts,
    fail_next,
    lag,
    letters,
    send,
    settle_all,
)
from tests.patience import PATIENCE_S, eventually

__all__ = ["broker", "client"]  # fixtures

# --- enough -----------------------------------------------------------------------------------------------------------


def test_after_its_last_attempt_a_message_is_a_dead_letter(broker: TestBroker, client: Client) -> None:
    """R-13, J-05."""
    (receipt,) = send(client, "a", key="o-1")
    consumer = client.consumer("orders", "billing", max_attempts=3)
    for attempt in (1, 2, 3):
        fail_next(consumer, attempt, delay=0, reason=f"error {attempt}")
    eventually(lambda: counts(client) == (0, 0))
    (letter,) = letters(broker)
    said = letter.attributes
    assert (letter.body, said.key, said.message_id) == (b"a", "o-1", receipt.id)
    assert (said.reason_code, said.attempt, said.group) == (DeadReason.RETRIES_EXHAUSTED, 3, "billing")
    assert (said.first_error, said.reason) == ("error 1", "error 3")
    assert (said.original_topic, said.original_queue, said.original_queue_offset) == ("orders", 0, receipt.offset)
    assert len(consumer.pull(wait=0.05)) == 0


def test_one_attempt_means_that_the_first_failure_is_the_last(broker: TestBroker, client: Client) -> None:
    send(client, "a", "b")
    consumer = client.consumer("orders", "billing", max_attempts=1)
    first, second = consumer.pull()
    first.nack(delay=100, reason="once is enough")
    second.ack()
    eventually(lambda: counts(client) == (0, 0) and [letter.body for letter in letters(broker)] == [b"a"])


def test_without_a_limit_a_message_is_sent_again_without_end(broker: TestBroker, client: Client) -> None:
    """D-17."""
    send(client, "a")
    consumer = client.consumer("orders", "billing", max_attempts=None)
    for attempt in range(1, 40):
        fail_next(consumer, attempt, delay=0)
    assert settle_all(consumer, 1) == [("a", 40)]
    assert letters(broker) == []


def test_a_message_whose_lease_runs_out_each_time_ends_among_the_dead_letters(broker: TestBroker) -> None:
    """A poison message says nothing: it kills its consumer."""
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    send(client, "poison", "good")
    consumer = client.consumer("orders", "billing", max_attempts=3, lease=10.0)
    for attempt in (1, 2, 3):
        batch = consumer.pull(wait=PATIENCE_S)
        assert {message.attempt for message in batch} == {attempt}
        for message in batch:
            if message.body == b"good":
                message.ack()
        broker.clock.advance(11)
        eventually(lambda: lag(client).queues[0].leased == 0)
    assert len(consumer.pull(wait=0.05)) == 0
    eventually(lambda: counts(client) == (0, 0))
    (letter,) = letters(broker)
    assert (letter.body, letter.attributes.attempt) == (b"poison", 3)
    assert letter.attributes.reason_code == DeadReason.RETRIES_EXHAUSTED
    assert "lease ran out" in (letter.attributes.reason or "")


def test_failures_before_and_after_a_move_count_together(broker: TestBroker, client: Client) -> None:
    send(client, "poison")
    consumer = client.consumer("orders", "billing", max_attempts=4, lease=10.0)
    fail_next(consumer, 1, delay=0)
    fail_next(consumer, 2, delay=0, reason="said so")
    for attempt in (3, 4):
        (message,) = consumer.pull(wait=PATIENCE_S)
        assert message.attempt == attempt
        broker.clock.advance(11)
        eventually(lambda: len(letters(broker)) == 1 or lag(client).retrying == 1)
    assert len(consumer.pull(wait=1.0)) == 0  # it lives, which the broker asks before the lease ends
    eventually(lambda: len(letters(broker)) == 1)
    assert letters(broker)[0].attributes.attempt == 4
    assert counts(client) == (0, 0)


# --- over restarts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_retries_and_their_attempts_outlive_the_broker(broker: TestBroker, client: Client, how: str) -> None:
    send(client, "waits", "offered", "dead", "plain")
    consumer = client.consumer("orders", "billing", max_attempts=2)
    for message in consumer.pull():
        if message.body == b"waits":
            message.nack(delay=3600)
        elif message.body == b"offered":
            message.nack(delay=0)
        elif message.body == b"dead":
            message.reject()
        else:
            message.ack()
    eventually(lambda: counts(client) == (0, 2) and len(letters(broker)) == 1)
    consumer.close()
    if how == "restart":
        broker.restart()
    else:
        broker.kill()
        broker.start()
    eventually(lambda: counts(client) == (0, 2))
    consumer = client.consumer("orders", "billing", max_attempts=2)
    assert settle_all(consumer, 1) == [("offered", 2)]
    broker.clock.advance(3601)
    fail_next(consumer, 2)
    eventually(lambda: sorted(letter.body for letter in letters(broker)) == [b"dead", b"waits"])
    assert counts(client) == (0, 0)


def test_a_topic_or_group_that_is_deleted_takes_its_retries_along(broker: TestBroker, client: Client) -> None:
    def retry_topics() -> list[str]:
        return [topic.name for topic in client.admin.topics(system=True) if topic.name.startswith("%RETRY%")]

    send(client, "a", "b")
    for group in ("billing", "shipping"):
        consumer = client.consumer("orders", group)
        for message in consumer.pull():
            message.nack(delay=0)
        eventually(lambda group=group: counts(client, group) == (0, 2))  # type: ignore[misc]
        consumer.close()
    assert len(retry_topics()) == 2
    client.admin.delete_group("billing")
    assert len(retry_topics()) == 1
    client.admin.delete_topic("orders")
    assert retry_topics() == []
    client.admin.create_topic("orders", queues=1)
    send(client, "c")
    consumer = client.consumer("orders", "billing")
    assert settle_all(consumer, 1) == [("c", 1)]
    assert len(consumer.pull(wait=0.05)) == 0


def test_a_topic_that_grew_has_retries_in_its_new_queues(broker: TestBroker, client: Client) -> None:
    send(client, "a")
    consumer = client.consumer("orders", "billing")
    fail_next(consumer, 1, delay=0)
    assert settle_all(consumer, 1) == [("a", 2)]
    client.admin.update_topic("orders", queues=5)
    other = broker.connect().producer()
    receipts = [other.send("orders", f"{n}") for n in range(10)]
    assert {receipt.queue for receipt in receipts} >= {3, 4}
    for _ in range(10):
        (message,) = consumer.pull(1, wait=PATIENCE_S)
        message.nack(delay=3600)
    eventually(lambda: counts(client) == (0, 10))
    broker.clock.advance(3601)
    assert settle_all(consumer, 10) == [(f"{n}", 2) for n in range(10)]
