"""Failing and retry, through a broker in memory (J-02, J-05, A-06, D-17, R-13): what a user relies on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer import Consumer
from dmq.client.received import ReceivedMessage
from dmq.client.reports import Lag
from dmq.records import DeadReason, RecordView
from dmq.testing import FakeClock, TestBroker

PATIENCE = 30.0
T = TypeVar("T")


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect()
    client.admin.create_topic("orders", queues=1)
    return client


def send(client: Client, *bodies: str, topic: str = "orders", **options: object) -> list[dmq.Receipt]:
    producer = client.producer()
    receipts = [producer.send(topic, body, **options) for body in bodies]  # type: ignore[arg-type]
    producer.close()
    return receipts


def lag(client: Client, group: str = "billing", topic: str = "orders") -> Lag:
    return client.admin.lag(topic, group)


def counts(client: Client, group: str = "billing", topic: str = "orders") -> tuple[int, int]:
    """Lag, and messages that wait for another attempt."""
    found = lag(client, group, topic)
    return found.total, found.retrying


def letters(broker: TestBroker, group: str = "billing") -> list[RecordView]:
    """The dead letters of a group, as the journal has them."""

    def read() -> list[RecordView]:
        assert broker._server is not None
        store = broker._server.broker.store
        name = f"%DLQ%{group}"
        if store.find_topic(name) is None:
            return []
        first, following = store.bounds(name, 0)
        return [*store.read(name, 0, first, following - first, 1 << 30).records()] if following > first else []

    return in_loop(broker, read)


def in_loop(broker: TestBroker, call: Callable[[], T]) -> T:
    assert broker._loop is not None

    async def run() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(run(), broker._loop).result(PATIENCE)


class running:  # noqa: N801
    """A consumer whose `run` goes on in a thread."""

    def __init__(self, consumer: Consumer, handler: Callable[[ReceivedMessage], object]) -> None:
        self._consumer = consumer
        self._thread = threading.Thread(target=consumer.run, args=(handler,))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def settle_all(consumer: Consumer, count: int) -> list[tuple[str, int]]:
    """Ack the next messages; their bodies and attempts."""
    found: list[tuple[str, int]] = []
    while len(found) < count:
        batch = consumer.pull(wait=PATIENCE)
        assert batch, "there is less than expected"
        found += [(message.body.decode(), message.attempt) for message in batch]
        consumer.ack(batch)
    return sorted(found)


def retry_messages(client: Client) -> int:
    """How many messages came into retry topics so far."""
    return sum(topic.messages for topic in client.admin.topics("%RETRY%", system=True))


def fail_next(consumer: Consumer, attempt: int, **options: object) -> ReceivedMessage:
    """Nack the one message there is, which must be at this attempt."""
    (message,) = consumer.pull(wait=PATIENCE)
    assert message.attempt == attempt
    message.nack(**options)  # type: ignore[arg-type]
    return message


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
        (message,) = consumer.pull(wait=PATIENCE)
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
        (message,) = consumer.pull(1, wait=PATIENCE)
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
            batch = consumer.pull(queue=queue, wait=PATIENCE)
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
        (message,) = consumer.pull(1, wait=PATIENCE)
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
        batch = consumer.pull(wait=PATIENCE)
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
        (message,) = consumer.pull(wait=PATIENCE)
        assert message.attempt == attempt
        broker.clock.advance(11)
        eventually(lambda: len(letters(broker)) == 1 or lag(client).retrying == 1)
    assert len(consumer.pull(wait=0.1)) == 0
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
        (message,) = consumer.pull(1, wait=PATIENCE)
        message.nack(delay=3600)
    eventually(lambda: counts(client) == (0, 10))
    broker.clock.advance(3601)
    assert settle_all(consumer, 10) == [(f"{n}", 2) for n in range(10)]


# --- in place ---------------------------------------------------------------------------------------------------------


def test_an_ordered_group_retries_in_place_and_the_queue_waits(broker: TestBroker, client: Client) -> None:
    """J-14, R-11."""
    send(client, *"abc", business_id="u-7", ordered=True)
    consumer = client.consumer("orders", "billing", ordered=True)
    for attempt, seconds in ((1, 1), (2, 3), (3, 9)):
        batch = consumer.pull(wait=PATIENCE)
        assert (batch[0].body, batch[0].attempt) == (b"a", attempt)
        batch[0].nack()
        eventually(lambda: lag(client).queues[0].leased == 0)
        broker.clock.advance(seconds - 0.9)
        assert len(consumer.pull(wait=0.0)) == 0
        broker.clock.advance(0.9)
    batch = consumer.pull(wait=PATIENCE)
    assert [(message.body, message.attempt) for message in batch] == [(b"a", 4)]
    consumer.ack(batch)
    batch = consumer.pull(wait=PATIENCE)
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
        batch = consumer.pull(wait=PATIENCE)
        assert (batch[0].body, batch[0].attempt) == (b"a", attempt)
        batch[0].nack(delay=0)
    assert letters(broker) == []
    assert counts(client) == (2, 0)


def test_a_poison_message_of_an_ordered_group_ends_among_the_dead_letters(broker: TestBroker, client: Client) -> None:
    send(client, *"ab", business_id="u-7", ordered=True)
    consumer = client.consumer("orders", "billing", ordered=True, max_attempts=2, lease=10.0)
    for attempt in (1, 2):
        (message,) = consumer.pull(1, wait=PATIENCE)
        assert (message.body, message.attempt) == (b"a", attempt)
        broker.clock.advance(11)
        eventually(lambda: lag(client).queues[0].leased == 0)
    assert settle_all(consumer, 1) == [("b", 1)]
    assert [letter.body for letter in letters(broker)] == [b"a"]


def test_each_member_of_a_broadcast_group_retries_for_itself(broker: TestBroker, client: Client) -> None:
    send(client, *"ab")
    one = broker.connect(client_id="one").consumer("orders", "screens", broadcast=True, max_attempts=2)
    two = broker.connect(client_id="two").consumer("orders", "screens", broadcast=True, max_attempts=2)
    for message in one.pull(wait=PATIENCE):
        message.nack(delay=5)
    assert settle_all(two, 2) == [("a", 1), ("b", 1)]
    assert len(one.pull(wait=0.0)) == 0
    broker.clock.advance(6)
    batch = one.pull(wait=PATIENCE)
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
        old.pull(wait=PATIENCE)
    assert settle_all(client.consumer("orders", "billing", tags="paid || created", version=3), 1) == [("b", 1)]
    client.admin.delete_group("billing")
    assert settle_all(client.consumer("orders", "billing", tags="created"), 1) == [("a", 1)]


# --- who waits for it -------------------------------------------------------------------------------------------------


def test_a_producer_that_waits_to_be_consumed_waits_for_the_attempt_that_succeeds(client: Client) -> None:
    """D-20: a retry move does not count."""
    consumer = client.consumer("orders", "billing")
    future = client.producer().send_async("orders", b"a", durability="consumed", consumed_by="billing")
    fail_next(consumer, 1, delay=0)
    (message,) = consumer.pull(wait=PATIENCE)
    assert message.attempt == 2
    assert not future.done()
    message.ack()
    assert future.result(PATIENCE).durability == "consumed"


def test_a_message_that_only_ever_fails_was_not_consumed(broker: TestBroker, client: Client) -> None:
    consumer = client.consumer("orders", "billing", max_attempts=2)
    producer = client.producer(timeout=PATIENCE)
    future = producer.send_async("orders", b"a", durability="consumed", consumed_by="billing")
    fail_next(consumer, 1, delay=0)
    fail_next(consumer, 2, delay=0)
    eventually(lambda: len(letters(broker)) == 1)
    assert not future.done()
    broker.clock.advance(3600)
    with pytest.raises(dmq.ConsumeTimeout):
        future.result(PATIENCE)
