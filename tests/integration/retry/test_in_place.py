"""Groups that retry in place, ordered and broadcast ones, and versions of a subscription (J-14, R-11)."""

from __future__ import annotations

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import TestBroker
from tests.integration.retry.failure_scene import (
    broker,
    client,
    counts,
    lag,
    letters,
    running,
    send,
    settle_all,
)
from tests.patience import PATIENCE_S, eventually

__all__ = ["broker", "client"]  # fixtures

# --- in place ---------------------------------------------------------------------------------------------------------


def test_an_ordered_group_retries_in_place_and_the_queue_waits(broker: TestBroker, client: Client) -> None:
    """J-14, R-11."""
    send(client, *"abc", business_id="u-7", ordered=True)
    consumer = client.consumer("orders", "billing", ordered=True)
    for attempt, seconds in ((1, 1), (2, 3), (3, 9)):
        batch = consumer.pull(wait=PATIENCE_S)
        assert (batch[0].body, batch[0].attempt) == (b"a", attempt)
        batch[0].nack()
        eventually(lambda: lag(client).queues[0].leased == 0)
        broker.clock.advance(seconds - 0.9)
        assert len(consumer.pull(wait=0.0)) == 0
        broker.clock.advance(0.9)
    batch = consumer.pull(wait=PATIENCE_S)
    assert [(message.body, message.attempt) for message in batch] == [(b"a", 4)]
    consumer.ack(batch)
    batch = consumer.pull(wait=PATIENCE_S)
    assert [(message.body, message.attempt) for message in batch] == [(b"b", 1), (b"c", 1)]
    consumer.ack(batch)
    eventually(lambda: counts(client) == (0, 0))


def test_an_ordered_group_lets_a_message_go_after_its_last_attempt_and_goes_on_in_order(
    broker: TestBroker, client: Client
) -> None:
    send(client, *"abcd", business_id="u-7", ordered=True)
    done: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        if message.body == b"b":
            raise dmq.Retry(f"no {message.attempt}", after=0)
        done.append(message.body)

    with running(client.consumer("orders", "billing", ordered=True, max_attempts=3), handle):
        eventually(lambda: len(done) == 3)
    assert done == [b"a", b"c", b"d"]
    (letter,) = letters(broker)
    assert (letter.body, letter.attributes.attempt, letter.attributes.reason) == (b"b", 3, "no 3")


def test_an_ordered_group_without_a_limit_blocks_its_queue(broker: TestBroker, client: Client) -> None:
    send(client, *"ab", business_id="u-7", ordered=True)
    consumer = client.consumer("orders", "billing", ordered=True, max_attempts=None)
    for attempt in range(1, 25):
        batch = consumer.pull(wait=PATIENCE_S)
        assert (batch[0].body, batch[0].attempt) == (b"a", attempt)
        batch[0].nack(delay=0)
    assert letters(broker) == []
    assert counts(client) == (2, 0)


def test_a_poison_message_of_an_ordered_group_ends_among_the_dead_letters(broker: TestBroker, client: Client) -> None:
    send(client, *"ab", business_id="u-7", ordered=True)
    consumer = client.consumer("orders", "billing", ordered=True, max_attempts=2, lease=10.0)
    for attempt in (1, 2):
        (message,) = consumer.pull(1, wait=PATIENCE_S)
        assert (message.body, message.attempt) == (b"a", attempt)
        broker.clock.advance(11)
        eventually(lambda: lag(client).queues[0].leased == 0)
    assert settle_all(consumer, 1) == [("b", 1)]
    assert [letter.body for letter in letters(broker)] == [b"a"]


def test_each_member_of_a_broadcast_group_retries_for_itself(broker: TestBroker, client: Client) -> None:
    send(client, *"ab")
    one = broker.connect(client_id="one").consumer("orders", "screens", broadcast=True, max_attempts=2)
    two = broker.connect(client_id="two").consumer("orders", "screens", broadcast=True, max_attempts=2)
    for message in one.pull(wait=PATIENCE_S):
        message.nack(delay=5)
    assert settle_all(two, 2) == [("a", 1), ("b", 1)]
    assert len(one.pull(wait=0.0)) == 0
    broker.clock.advance(6)
    batch = one.pull(wait=PATIENCE_S)
    assert [(message.body, message.attempt) for message in batch] == [(b"a", 2), (b"b", 2)]
    batch[0].nack(reason="enough")
    batch[1].ack()
    eventually(lambda: [letter.body for letter in letters(broker, "screens")] == [b"a"])
    assert len(one.pull(wait=0.05)) == 0
    assert len(two.pull(wait=0.05)) == 0


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_an_old_version_that_comes_first_after_a_restart_passes_over_nothing(
    broker: TestBroker, client: Client, how: str
) -> None:
    send(client, "a", tag="created")
    new = client.consumer("orders", "billing", tags="created || paid", version=3)
    assert settle_all(new, 1) == [("a", 1)]
    new.close()
    send(client, "b", tag="paid")
    if how == "restart":
        broker.restart()
    else:
        broker.kill()
        broker.start()
    old = client.consumer("orders", "billing", tags="created", version=2)
    with pytest.raises(dmq.SubscriptionSuperseded, match="version 3"):
        old.pull(wait=PATIENCE_S)
    assert settle_all(client.consumer("orders", "billing", tags="paid || created", version=3), 1) == [("b", 1)]
    client.admin.delete_group("billing")
    assert settle_all(client.consumer("orders", "billing", tags="created"), 1) == [("a", 1)]
