"""Delayed messages, through a broker in memory whose clock is moved: what a user relies on. (D-14, D-18, R-10)"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import dmq
import dmq.aio
from dmq.client.admin.reports import StoredMessage
from dmq.client.client import Client
from dmq.testing import TestBroker
from tests.patience import PATIENCE_S, eventually


def stored(client: Client, topic: str = "orders") -> list[StoredMessage]:
    return client.admin.peek(topic, limit=1000)


def bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.body for message in stored(client, topic)]


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create=False) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    return client


def test_a_delayed_message_is_invisible_until_it_is_due_and_comes_once(broker: TestBroker, client: Client) -> None:
    receipt = client.producer().send("orders", b"later", key="k-1", delay=60.0)
    assert (receipt.queue, receipt.offset) == (-1, -1)
    consumer = client.consumer("orders", group="billing")
    broker.clock.advance(59.0)
    assert len(consumer.pull(10, wait=0.3)) == 0
    assert [report.id for report in client.admin.delays()] == [receipt.id]
    broker.clock.advance(1.5)
    batch = consumer.pull(10, wait=PATIENCE_S)
    assert [(message.id, message.body, message.key) for message in batch] == [(receipt.id, b"later", "k-1")]
    consumer.ack(batch)
    assert len(consumer.pull(10, wait=0.3)) == 0
    assert client.admin.delays() == []


def test_everything_a_message_says_of_itself_is_kept(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    sent_at = datetime.fromtimestamp(broker.clock.now_ms() / 1000, UTC)
    producer.send(
        "orders", b"x", tag="paid", business_id="u-7", ordered=True, priority=7, ttl=7200.0, properties={"a": "b"},
        delay=3600.0,
    )  # fmt: skip
    broker.clock.advance(3601.0)
    (message,) = client.consumer("orders", group="g", tags="paid").pull(1, wait=PATIENCE_S)
    assert (message.tag, message.business_id, message.priority) == ("paid", "u-7", 7)
    assert dict(message.properties) == {"a": "b"}
    assert abs(message.sent_at - sent_at) < timedelta(seconds=60)
    assert message.stored_at - message.sent_at > timedelta(seconds=3600)
    assert message.topic == "orders"


def test_messages_come_in_the_order_of_their_times(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    for delay in (30, 10, 20, 5, 25):
        producer.send("orders", b"%d" % delay, delay=float(delay), business_id="u", ordered=True)
    broker.clock.advance(40.0)
    eventually(lambda: len(stored(client)) == 5)
    assert bodies(client) == [b"5", b"10", b"20", b"25", b"30"]


def test_ordered_messages_go_to_the_queue_of_their_business_id(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("many", queues=7)
    producer = client.producer()
    ids = [f"u-{number}" for number in range(20)]
    plain = {one: producer.send("many", b"now", business_id=one, ordered=True).queue for one in ids}
    for one in ids:
        producer.send("many", b"later", business_id=one, ordered=True, delay=5.0)
    broker.clock.advance(6.0)
    eventually(lambda: len(stored(client, "many")) == 40)
    assert all(message.queue == plain[str(message.business_id)] for message in stored(client, "many"))


def test_a_priority_topic_gets_them_in_the_queue_of_their_priority(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("urgent", queues=10, priority=True)
    producer = client.producer()
    for priority in range(10):
        producer.send("urgent", b"x", priority=priority, delay=5.0)
    broker.clock.advance(6.0)
    eventually(lambda: len(stored(client, "urgent")) == 10)
    assert all(message.queue == message.priority for message in stored(client, "urgent"))


def test_deliver_at_and_levels_name_a_moment_too(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    now = datetime.fromtimestamp(broker.clock.now_ms() / 1000, UTC)
    producer.send("orders", b"at", deliver_at=now + timedelta(days=700))
    producer.send("orders", b"level", delay=dmq.delay_level("2h"))
    broker.clock.advance(7205.0)
    eventually(lambda: bodies(client) == [b"level"])
    broker.clock.advance(700 * 86_400.0)
    eventually(lambda: bodies(client) == [b"level", b"at"])


def test_more_than_two_years_is_refused_by_client_and_broker(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    with pytest.raises(dmq.InvalidMessage, match="two years"):
        producer.send("orders", b"x", delay=3 * 366 * 86_400.0)
    broker.clock.set_wall_ms(broker.clock.now_ms() + 400 * 86_400_000)  # the client's wall clock is ahead
    with pytest.raises(dmq.InvalidMessage, match="over two years"):
        producer.send("orders", b"x", delay=500 * 86_400.0)


def test_the_time_in_which_the_machine_was_suspended_counts(broker: TestBroker, client: Client) -> None:
    client.producer().send("orders", b"x", delay=3600.0)
    broker.clock.suspend(3601.0)
    eventually(lambda: bodies(client) == [b"x"])
    assert round(client.admin.stats("broker_clock")["broker_clock_behind_seconds"]) == 0


def test_a_clock_that_is_set_while_the_broker_runs_is_told(
    broker: TestBroker, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.producer().send("orders", b"x", delay=60.0)
    broker.clock.set_wall_ms(broker.clock.now_ms() + 3_600_000)
    eventually(lambda: "the machine's clock was set" in caplog.text)
    assert bodies(client) == [], "nothing comes early by that"
    assert round(client.admin.stats("broker_clock")["broker_clock_behind_seconds"]) == 3600
    broker.clock.set_wall_ms(broker.clock.now_ms() - 3_600_000)
    eventually(lambda: caplog.text.count("the machine's clock was set") == 2)
    broker.clock.advance(61.0)
    eventually(lambda: bodies(client) == [b"x"])


def test_many_at_once_are_delayed_alike(broker: TestBroker, client: Client) -> None:
    receipts = client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(5000)], delay=10.0)
    assert len({receipt.id for receipt in receipts}) == 5000
    assert len(client.admin.delays(limit=100_000)) == 5000
    broker.clock.advance(11.0)
    eventually(lambda: client.admin.stats("broker_delays")["broker_delays_fired"] == 5000)
    read: list[StoredMessage] = []
    at = 0
    while len(read) < 5000:
        page, at = client.admin.read("orders", 0, at, limit=1000)
        read += page
    assert [message.body for message in read] == [b"%d" % n for n in range(5000)]
    assert [message.id for message in read] == [receipt.id for receipt in receipts]


def test_a_delay_can_be_taken_back_once_and_only_while_it_waits(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    kept = producer.send("orders", b"kept", delay=30.0)
    gone = producer.send("orders", b"gone", delay=30.0)
    client.admin.cancel_delay(gone.id)
    with pytest.raises(dmq.UnknownMessage, match="delivered or cancelled"):
        client.admin.cancel_delay(gone.id)
    assert [report.id for report in client.admin.delays()] == [kept.id]
    broker.clock.advance(31.0)
    eventually(lambda: bodies(client) == [b"kept"])
    with pytest.raises(dmq.UnknownMessage):
        client.admin.cancel_delay(str(kept.id))
    assert client.admin.stats("store_delays")["store_delays"] == 0


def test_what_was_taken_back_stays_so_over_restarts(broker: TestBroker, client: Client) -> None:
    receipts = [client.producer().send("orders", b"%d" % n, delay=30.0) for n in range(10)]
    for receipt in receipts[::2]:
        client.admin.cancel_delay(receipt.id)
    broker.kill()
    broker.start()
    broker.restart()
    broker.clock.advance(31.0)
    eventually(lambda: sorted(bodies(client)) == [b"1", b"3", b"5", b"7", b"9"])


def test_delays_are_listed_by_topic_and_in_pages(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("other", queues=1)
    producer = client.producer()
    for number in range(30):
        producer.send("other" if number % 3 else "orders", b"x", delay=100.0 - number)
    assert len(client.admin.delays("orders")) == 10
    everything = client.admin.delays(limit=7)
    assert len(everything) == 7
    assert [r.due_at_ms for r in everything] == sorted(r.due_at_ms for r in client.admin.delays())[:7]


def test_a_message_whose_topic_was_deleted_becomes_a_dead_letter(broker: TestBroker, client: Client) -> None:
    receipt = client.producer().send("orders", b"orphan", delay=10.0)
    client.admin.delete_topic("orders")
    broker.clock.advance(11.0)
    eventually(lambda: client.admin.stats("broker_delays")["broker_delays_dead"] == 1)
    (letter,) = stored(client, "%DLQ%test")
    assert (letter.id, letter.body) == (receipt.id, b"orphan")
    assert client.admin.stats("store_delays")["store_delays"] == 0


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_new_topic_of_the_same_name_gets_nothing_that_was_meant_for_the_old_one(
    broker: TestBroker, client: Client, is_restarted: bool
) -> None:
    producer = client.producer()
    old = producer.send("orders", b"old", delay=10.0)
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    client.admin.update_topic("orders", queues=2)  # changes nothing of when it was made
    new = producer.send("orders", b"new", delay=10.0)
    assert [report.id for report in client.admin.delays("orders")] == [new.id]
    assert [report.id for report in client.admin.delays()] == [new.id]
    assert "was deleted since: it becomes a dead letter" in client.admin.why(old.id).text
    if is_restarted:
        broker.restart()
        client = broker.connect()
    broker.clock.advance(11.0)
    eventually(lambda: client.admin.stats("broker_delays")["broker_delays_dead"] == 1)
    eventually(lambda: bodies(client) == [b"new"])
    (letter,) = stored(client, "%DLQ%test")
    assert (letter.id, letter.body) == (old.id, b"old")


def test_a_delayed_message_to_no_topic_is_refused_at_once(client: Client) -> None:
    with pytest.raises(dmq.UnknownTopic):
        client.producer().send("nowhere", b"x", delay=10.0)


def test_a_delayed_message_that_fails_is_told_from_others_by_its_id(broker: TestBroker, client: Client) -> None:
    receipt = client.producer().send("orders", b"x", key="k", delay=10.0)
    broker.clock.advance(11.0)
    consumer = client.consumer("orders", group="g")
    (message,) = consumer.pull(1, wait=PATIENCE_S)
    message.nack(delay=0.0)
    (again,) = consumer.pull(1, wait=PATIENCE_S)
    assert (again.id, again.topic, again.key, again.attempt) == (receipt.id, "orders", "k", 2)
    again.ack()


def test_the_asyncio_client_delays_lists_and_cancels(broker: TestBroker, client: Client) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="test") as aio:
            producer = aio.producer()
            kept = await producer.send("orders", b"kept", delay=3600.0)
            gone = await producer.send("orders", b"gone", delay=3600.0)
            many = await producer.send_many("orders", [dmq.Message(b"m")], delay=3600.0)
            assert {r.id for r in await aio.admin.delays()} == {kept.id, gone.id, many[0].id}
            await aio.admin.cancel_delay(gone.id)

    asyncio.run(main())
    broker.clock.advance(3700.0)
    eventually(lambda: sorted(bodies(client)) == [b"kept", b"m"])


def test_a_spooled_message_is_delayed_too(broker: TestBroker, client: Client, tmp_path: object) -> None:
    with client.producer(spool=f"{tmp_path}/spool") as producer:
        producer.send("orders", b"spooled", delay=30.0)
    assert len(client.admin.delays()) == 1
    broker.clock.advance(31.0)
    eventually(lambda: bodies(client) == [b"spooled"])
