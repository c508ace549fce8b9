"""Consuming, through a broker in memory: what a message says, and the ways to get it."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

import dmq
from dmq.client.client import Client
from dmq.testing import TestBroker
from tests.integration.consumer.handler_thread import PATIENCE, Handling, lag, send
from tests.patience import eventually

# --- what a message says ----------------------------------------------------------------------------------------------


def test_a_message_tells_everything_its_producer_said(client: Client) -> None:
    receipt = client.producer(app="shop").send(
        "orders", b"body", key="o-1", tag="created", business_id="u-7", priority=7, properties={"k": "v"}
    )
    message = next(client.consumer("orders", "billing"))
    assert (message.id, message.topic, message.queue, message.offset) == receipt_place(receipt)
    assert (message.body, message.value, message.key, message.tag) == (b"body", b"body", "o-1", "created")
    assert (message.business_id, message.priority, dict(message.properties)) == ("u-7", 7, {"k": "v"})
    assert (message.app, message.attempt) == ("shop", 1)
    assert message.sent_at.tzinfo is UTC
    assert timedelta(0) <= message.stored_at - message.sent_at < timedelta(minutes=1)
    assert str(message.id) in repr(message)


def receipt_place(receipt: dmq.Receipt) -> tuple[dmq.MessageId, str, int, int]:
    return receipt.id, receipt.topic, receipt.queue, receipt.offset


@pytest.mark.parametrize("count", [1, 15, 16, 300])
def test_ids_keys_and_bodies_are_right_in_batches_of_every_size(client: Client, count: int) -> None:
    producer = client.producer()
    sent = producer.send_many("orders", [dmq.Message(b"b%d" % n, key=f"k{n}" if n % 3 else None) for n in range(count)])
    batch = client.consumer("orders", "billing").pull(count)
    assert [message.id for message in batch] == [receipt.id for receipt in sent]
    assert [message.body for message in batch] == [b"b%d" % n for n in range(count)]
    assert [message.key for message in batch] == [f"k{n}" if n % 3 else None for n in range(count)]
    assert [message.offset for message in batch] == [receipt.offset for receipt in sent]


def test_ids_are_right_when_many_producers_share_a_queue(client: Client) -> None:
    producers = [client.producer() for _ in range(5)]
    sent = {producer.send("orders", f"{n}").id for n in range(8) for producer in producers}
    found = [message.id for message in client.consumer("orders", "billing").pull(100)]
    assert len(found) == 40
    assert set(found) == sent


class Order(msgspec.Struct):
    number: int


def test_a_typed_consumer_decodes_bodies(client: Client) -> None:
    client.producer().send("orders", Order(7))
    message = next(client.consumer("orders", "billing", type=Order))
    assert (message.body, message.value, message.raw) == (Order(7), Order(7), b'{"number":7}')


def test_a_typed_consumer_decodes_large_pulls_too_whatever_was_looked_at_before(client: Client) -> None:
    client.producer().send_many("orders", [dmq.Message(msgspec.json.encode(Order(n)), key=str(n)) for n in range(40)])
    consumer = client.consumer("orders", "billing", type=Order)
    messages = [*consumer.pull(40)]
    while len(messages) < 40:
        messages += consumer.pull(40)
    assert [message.key for message in messages] == [*map(str, range(40))]
    assert [message.body for message in messages] == [Order(n) for n in range(40)]


def letters(client: Client) -> list[tuple[str | None, str, int]]:
    return [(letter.key, letter.reason, letter.attempts) for letter in client.admin.dead_letters(group="billing")]


@pytest.mark.parametrize("way", ["iterate", "run", "pull"])
def test_a_body_that_is_not_of_the_type_is_a_dead_letter_at_once(client: Client, way: str) -> None:
    producer = client.producer()
    for key, body in (("bad", b"{"), ("good", b'{"number":7}'), ("worse", b"\xff")):
        producer.send("orders", body, key=key)
    consumer = client.consumer("orders", "billing", type=Order)
    found: list[object] = []
    if way == "iterate":
        threading.Timer(2.0, consumer.close).start()  # behind the good one is a bad one: nothing more comes
        for message in consumer:
            found.append(message.body)
            message.ack()
    elif way == "run":
        with Handling(consumer, lambda message: found.append(message.body), workers=1):
            eventually(lambda: found and lag(client) == 0)
    else:
        while not found:
            batch = consumer.pull()
            found += [message.body for message in batch]
            batch.ack()
    assert found == [Order(7)]
    eventually(lambda: len(letters(client)) == 2)
    assert sorted(letters(client)) == [("bad", "REJECTED", 1), ("worse", "REJECTED", 1)]
    assert "not of type Order" in client.admin.dead_letters(group="billing")[0].last_error


# --- the ways to consume ----------------------------------------------------------------------------------------------


def test_iterating_hands_out_everything_once_and_acks_settle_it(client: Client) -> None:
    send(client, *map(str, range(30)))
    consumer = client.consumer("orders", "billing")
    seen = []
    for message in consumer:
        seen.append(message.body)
        message.ack()
        if len(seen) == 30:
            break
    assert seen == [b"%d" % n for n in range(30)]
    consumer.close()
    assert lag(client) == 0
    assert list(consumer) == []


def test_an_iterator_that_waits_gets_a_message_when_it_comes_and_ends_with_the_consumer(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    seen: list[bytes] = []

    def consume() -> None:
        for message in consumer:
            seen.append(message.body)
            message.ack()

    thread = threading.Thread(target=consume)
    thread.start()
    send(client, "late")
    eventually(lambda: seen == [b"late"])
    consumer.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_pull_waits_for_messages_and_is_empty_when_none_come(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    assert len(consumer.pull(wait=0.0)) == 0
    threading.Timer(0.1, lambda: send(client, "late")).start()
    batch = consumer.pull(wait=PATIENCE)
    assert [message.body for message in batch] == [b"late"]
    consumer.ack(batch)
    eventually(lambda: lag(client) == 0)


def test_a_subscribed_consumer_does_not_pull(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    send(client, "a")
    next(consumer)
    with pytest.raises(dmq.InvalidRequest, match="another one"):
        consumer.pull()


def test_auto_ack_acks_a_message_when_the_next_is_asked_for(client: Client) -> None:
    send(client, "a", "b")
    consumer = client.consumer("orders", "billing", auto_ack=True)
    next(consumer)
    next(consumer)
    consumer.close()
    assert lag(client) == 1


def test_prefetch_bounds_what_is_out(client: Client) -> None:
    send(client, *map(str, range(50)))
    consumer = client.consumer("orders", "billing", prefetch=5, batch=2)
    for _ in range(5):
        next(consumer)
    (queue,) = client.admin.lag("orders", "billing").queues
    assert queue.leased == 5


def test_the_highest_priority_that_is_here_comes_first(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    send(client, *map(str, range(17)))
    first = [next(consumer) for _ in range(17)]  # one that keeps many is given more ahead
    client.producer().send_many("orders", [dmq.Message(b"%d" % n, priority=n) for n in range(10)])
    eventually(lambda: client.admin.lag("orders", "billing").queues[0].leased == 27)
    client.admin.topics()  # what was pushed before the answer is read with it
    assert [next(consumer).priority for _ in range(10)] == list(range(9, -1, -1))
    consumer.ack(first)


def test_tags_are_compared_exactly(client: Client) -> None:
    from dmq.records import tag_hash

    wanted = "created"
    number = next(n for n in range(1 << 20) if tag_hash(f"t{n}") == tag_hash(wanted))
    producer = client.producer()
    for tag in ("paid", f"t{number}", wanted, None, "shipped"):
        producer.send("orders", tag or "none", tag=tag)
    consumer = client.consumer("orders", "billing", tags="created || paid")
    batch = consumer.pull(wait=1.0)
    assert [message.tag for message in batch] == ["paid", "created"]
    consumer.ack(batch)
    assert len(consumer.pull(wait=0.05)) == 0
    eventually(lambda: lag(client) == 0)


@pytest.mark.parametrize(
    ("start_from", "bodies"),
    [
        ("earliest", [b"a", b"b", b"c"]),
        ("latest", []),
        (1, [b"b", b"c"]),
        (timedelta(hours=1), [b"a", b"b", b"c"]),
        (datetime(2020, 1, 1, tzinfo=UTC), [b"a", b"b", b"c"]),
        (datetime.now(UTC) + timedelta(days=1), []),
    ],
)
def test_a_new_group_begins_where_it_is_told(
    client: Client, start_from: str | int | datetime | timedelta, bodies: list[bytes]
) -> None:
    send(client, "a", "b", "c")
    consumer = client.consumer("orders", "billing", start_from=start_from)
    assert [message.body for message in consumer.pull(wait=0.05)] == bodies


def test_broadcast_gives_every_member_everything(broker: TestBroker, client: Client) -> None:
    consumers = [
        broker.connect(client_id=name).consumer("orders", "billing", broadcast=True) for name in ("one", "two")
    ]
    send(client, "a", "b")
    for consumer in consumers:
        for body in (b"a", b"b"):
            message = next(consumer)
            assert message.body == body
            message.ack()
        consumer.close()
