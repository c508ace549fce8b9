"""Pulling batch after batch: what is read ahead is in order, bounded, and given back untried if nobody wants it."""

from __future__ import annotations

from dmq.client.client import Client
from dmq.client.consumer.consumer import Consumer
from dmq.model import Message
from dmq.testing import TestBroker
from tests.integration.consumer.handler_thread import lag
from tests.patience import eventually

COUNT = 100


def filled(client: Client, count: int = COUNT) -> list[bytes]:
    """So many messages in one queue, which are returned."""
    sent = [b"%d" % number for number in range(count)]
    with client.producer() as producer:
        producer.send_many("orders", [Message(body) for body in sent])
    return sent


def begin(consumer: Consumer, size: int = 10) -> list[bytes]:
    """Two full batches: from then on the consumer reads ahead."""
    taken = []
    for _ in range(2):
        batch = consumer.pull(size, wait=5.0)
        taken += [message.body for message in batch]
        batch.ack()
    return taken


def out(client: Client) -> int:
    """Messages that are with members."""
    return sum(row.leased for row in client.admin.lag("orders", "billing").queues)


def test_everything_comes_once_and_in_order(client: Client) -> None:
    sent = filled(client)
    consumer = client.consumer("orders", "billing")
    taken: list[bytes] = []
    while len(taken) < COUNT:
        batch = consumer.pull(7, wait=5.0)
        assert {message.attempt for message in batch} == {1}
        taken += [message.body for message in batch]
        batch.ack()
    assert taken == sent
    assert len(consumer.pull(7, wait=0.0)) == 0
    consumer.close()
    eventually(lambda: lag(client) == 0)


def test_what_was_read_ahead_goes_back_when_the_consumer_closes_as_not_tried(client: Client) -> None:
    sent = filled(client)
    first = client.consumer("orders", "billing")
    taken = begin(first)
    eventually(lambda: out(client) == 10)
    first.close()
    second = client.consumer("orders", "billing")
    while len(taken) < COUNT:
        batch = second.pull(50, wait=5.0)
        assert {message.attempt for message in batch} == {1}
        taken += [message.body for message in batch]
        batch.ack()
    assert sorted(taken) == sorted(sent)


def test_what_is_in_hand_and_read_ahead_is_never_more_than_the_prefetch(broker: TestBroker, client: Client) -> None:
    """So another member of the group gets everything else."""
    filled(client)
    slow = client.consumer("orders", "billing", prefetch=20)
    begin(slow)
    held = slow.pull(10, wait=5.0)
    eventually(lambda: out(client) == 20)
    other = broker.connect().consumer("orders", "billing")
    got = 0
    while batch := other.pull(100, wait=0.2):
        got += len(batch)
        batch.ack()
    assert got == COUNT - 20 - 20  # done before, and with the slow one
    held.ack()
    slow.close()
    assert len(other.pull(100, wait=5.0)) == 10


def test_a_pause_gives_back_what_was_read_ahead(broker: TestBroker, client: Client) -> None:
    filled(client)
    consumer = client.consumer("orders", "billing")
    begin(consumer)
    eventually(lambda: out(client) == 10)
    consumer.pause()
    eventually(lambda: out(client) == 0)
    other = broker.connect().consumer("orders", "billing")
    got = [message for _ in range(2) for message in other.pull(COUNT, wait=5.0)]
    assert len(got) == COUNT - 20
    assert {message.attempt for message in got} == {1}


def test_a_seek_drops_what_was_read_ahead(client: Client) -> None:
    sent = filled(client)
    consumer = client.consumer("orders", "billing")
    begin(consumer)
    consumer.seek("earliest")
    assert [message.body for message in consumer.pull(10, wait=5.0)] == sent[:10]


def test_what_was_read_ahead_outlives_a_restart_of_the_broker(broker: TestBroker, client: Client) -> None:
    sent = filled(client)
    consumer = client.consumer("orders", "billing")
    taken = begin(consumer)
    broker.restart()
    while len(set(taken)) < COUNT:
        batch = consumer.pull(10, wait=5.0)
        taken += [message.body for message in batch]
        batch.ack()
    assert sorted(set(taken)) == sorted(sent)
    eventually(lambda: lag(client) == 0)
