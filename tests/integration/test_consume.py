"""Consuming, through a broker in memory: what a user of consumers relies on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer import Consumer
from dmq.client.received import ReceivedMessage
from dmq.testing import TestBroker

PATIENCE = 20.0


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


class Handling:
    """A consumer whose `run` goes on in a thread."""

    def __init__(self, consumer: Consumer, handler: Callable[[ReceivedMessage], object], **options: object) -> None:
        self.consumer = consumer
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(handler, options))
        self._thread.start()

    def _run(self, handler: Callable[[ReceivedMessage], object], options: dict[str, object]) -> None:
        try:
            self.consumer.run(handler, **options)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Handling:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def lag(client: Client, group: str = "billing", topic: str = "orders") -> int:
    return client.admin.lag(topic, group).total


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
    assert message.value == Order(7)


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
    send(client, "first")
    first = next(consumer)
    client.producer().send_many("orders", [dmq.Message(b"%d" % n, priority=n) for n in range(10)])
    eventually(lambda: client.admin.lag("orders", "billing").queues[0].leased == 11)
    client.admin.topics()  # what was pushed before the answer is read with it
    assert [next(consumer).priority for _ in range(10)] == list(range(9, -1, -1))
    first.ack()


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


# --- failing ----------------------------------------------------------------------------------------------------------


def test_a_nacked_message_comes_again_after_its_delay_as_the_next_attempt() -> None:
    with TestBroker() as broker:
        client = broker.connect()
        send(client, "a")
        consumer = client.consumer("orders", "billing")
        (message,) = consumer.pull()
        assert message.attempt == 1
        message.nack(delay=7200, reason="not now")
        assert len(consumer.pull(wait=0.0)) == 0
        broker.clock.advance(7150)
        assert len(consumer.pull(wait=0.0)) == 0
        broker.clock.advance(60)
        (again,) = consumer.pull()
        assert (again.body, again.attempt, again.id) == (b"a", 2, message.id)


def test_a_rejected_message_is_kept_and_not_delivered_again(client: Client) -> None:
    send(client, "bad", "good")
    consumer = client.consumer("orders", "billing")
    bad, good = consumer.pull()
    bad.reject("cannot be read")
    good.ack()
    good.nack()  # the first word counts
    eventually(lambda: lag(client) == 0)
    eventually(lambda: [message.body for message in client.admin.peek("%DLQ%billing")] == [b"bad"])


def test_an_extended_message_stays_ours_and_a_late_one_is_lost() -> None:
    with TestBroker() as broker:
        client = broker.connect()
        send(client, "a")
        consumer = client.consumer("orders", "billing", lease=30.0)
        (message,) = consumer.pull()
        message.extend(100.0)
        broker.clock.advance(90)
        assert len(consumer.pull(wait=0.1)) == 0
        broker.clock.advance(20)
        (again,) = consumer.pull()
        assert again.attempt == 2
        with pytest.raises(dmq.LeaseLost):
            message.extend(10.0)


def test_what_a_handler_raises_decides_what_becomes_of_its_message(client: Client) -> None:
    send(client, "good", "retry", "reject", "bug")
    calls: list[tuple[bytes, int]] = []

    def handle(message: ReceivedMessage) -> None:
        calls.append((message.body, message.attempt))
        if message.attempt == 1:
            match message.body:
                case b"retry":
                    raise dmq.Retry(after=0.0)
                case b"reject":
                    raise dmq.Reject("never")
                case b"bug":
                    raise ValueError("a bug")

    with Handling(client.consumer("orders", "billing"), handle, workers=2):
        eventually(lambda: len(calls) == 7)
        eventually(lambda: lag(client) == 0)
    assert sorted(calls) == [
        (b"bug", 1),
        (b"bug", 1),  # once more here
        (b"bug", 2),
        (b"good", 1),
        (b"reject", 1),
        (b"retry", 1),
        (b"retry", 2),
    ]


def test_not_even_a_system_exit_kills_a_worker(client: Client) -> None:
    send(client, "a", "b")
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            raise SystemExit

    with Handling(client.consumer("orders", "billing"), handle, workers=1, policy="block"):
        eventually(lambda: sorted(seen) == [b"a", b"a", b"b"])


def test_an_ordered_group_keeps_its_order_also_when_a_handler_fails(client: Client) -> None:
    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(20)])
    done: list[int] = []
    running: list[bytes] = []
    failures = 0

    def handle(message: ReceivedMessage) -> None:
        nonlocal failures
        assert not running
        running.append(message.body)
        try:
            if message.body == b"5" and failures < 4:
                failures += 1
                raise ValueError("not yet")
            done.append(int(message.body))
        finally:
            running.clear()

    with Handling(client.consumer("orders", "billing", ordered=True), handle, workers=4):
        eventually(lambda: len(done) == 20)
    assert done == list(range(20))
    assert failures == 4


def test_a_slow_handler_keeps_its_message(client: Client) -> None:
    send(client, "slow")
    calls: list[int] = []
    others = client.consumer("orders", "billing")

    def handle(message: ReceivedMessage) -> None:
        calls.append(message.attempt)
        deadline = time.monotonic() + 3 * 0.4
        while time.monotonic() < deadline:
            assert len(others.pull(wait=0.05)) == 0
        calls.append(0)

    with Handling(client.consumer("orders", "billing", lease=0.4), handle, workers=1):
        eventually(lambda: len(calls) == 2)
    assert calls == [1, 0]
    assert lag(client) == 0


@pytest.mark.parametrize("policy", ["caller-runs", "block", "reject", dmq.RateLimit(1000)])
def test_every_policy_handles_everything(client: Client, policy: str | dmq.RateLimit) -> None:
    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(7)])
    seen: list[bytes] = []
    lock = threading.Lock()

    def handle(message: ReceivedMessage) -> None:
        with lock:
            seen.append(message.body)

    with Handling(client.consumer("orders", "billing"), handle, workers=3, policy=policy):
        eventually(lambda: len(set(seen)) == 7)
    assert len(seen) == 7
    assert lag(client) == 0


def test_a_handler_may_close_its_consumer(client: Client) -> None:
    send(client, "a", "b", "c")
    consumer = client.consumer("orders", "billing")
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        consumer.close()

    consumer.run(handle, workers=1, policy="block")
    assert len(seen) == 1
    assert lag(client) == 2


# --- members ----------------------------------------------------------------------------------------------------------


def test_parallel_bounds_what_is_out_of_one_queue(client: Client) -> None:
    send(client, *map(str, range(30)))
    one = client.consumer("orders", "billing", parallel=20, batch=10)
    two = client.consumer("orders", "billing", parallel=20, batch=10)
    assert len(one.pull(10)) == 10
    assert len(two.pull(20)) == 10
    assert len(two.pull(20, wait=0.05)) == 0


def test_two_members_share_the_work(broker: TestBroker, client: Client) -> None:
    seen: dict[str, set[bytes]] = {"one": set(), "two": set()}
    consumers = {name: broker.connect().consumer("orders", "billing", prefetch=10, batch=5) for name in seen}

    def handler(name: str) -> Callable[[ReceivedMessage], None]:
        def handle(message: ReceivedMessage) -> None:
            seen[name].add(message.body)
            time.sleep(0.001)

        return handle

    with (
        Handling(consumers["one"], handler("one"), workers=1, policy="block"),
        Handling(consumers["two"], handler("two"), workers=1, policy="block"),
    ):
        client.admin.create_group("billing", "orders")
        eventually(lambda: client.admin.group("billing").members == 2)
        client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(300)])
        eventually(lambda: len(seen["one"] | seen["two"]) == 300)
    assert seen["one"]
    assert seen["two"]
    assert not seen["one"] & seen["two"]


def test_a_member_that_closes_gives_back_what_it_had_untried(broker: TestBroker, client: Client) -> None:
    send(client, "a", "b")
    leaving = broker.connect().consumer("orders", "billing")
    next(leaving)
    leaving.close()
    assert [(m.body, m.attempt) for m in client.consumer("orders", "billing").pull()] == [(b"a", 1), (b"b", 1)]


def test_a_member_that_died_is_replaced_after_its_grace() -> None:
    with TestBroker(grace_seconds=10.0) as broker:
        client = broker.connect()
        send(client, "a")
        dying = broker.connect(reconnect=False)
        held = next(dying.consumer("orders", "billing"))
        assert held.attempt == 1
        connection = dying.transport.current()
        assert connection is not None
        connection.close(dmq.NotConnected("pulled the plug"))
        other = client.consumer("orders", "billing")
        assert len(other.pull(wait=0.1)) == 0
        broker.clock.advance(11)
        (message,) = other.pull()
        assert (message.body, message.attempt) == (b"a", 2)


def test_members_with_other_tags_are_refused_and_a_higher_version_takes_over(client: Client) -> None:
    send(client, "a", tag="x")
    old = client.consumer("orders", "billing", tags="x")
    next(old).ack()
    with pytest.raises(dmq.SubscriptionConflict, match="version"):
        next(client.consumer("orders", "billing", tags="y"))
    new = client.consumer("orders", "billing", tags="y", version=1)
    assert len(new.pull(wait=0.0)) == 0  # from now on its filter holds
    send(client, "b", tag="y")
    assert [message.body for message in new.pull()] == [b"b"]
    with pytest.raises(dmq.SubscriptionSuperseded):
        next(old)
    with pytest.raises(dmq.SubscriptionSuperseded):
        client.consumer("orders", "billing", tags="x").run(lambda message: None)


def test_an_unknown_topic_is_refused() -> None:
    with TestBroker(auto_create=False) as broker:
        consumer = broker.connect().consumer("nowhere", "billing")
        with pytest.raises(dmq.UnknownTopic):
            next(consumer)
        with pytest.raises(dmq.UnknownTopic):
            broker.connect().consumer("nowhere", "billing").pull()


# --- control ----------------------------------------------------------------------------------------------------------


def test_a_paused_consumer_gets_nothing_until_it_is_resumed(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    seen: list[bytes] = []
    with Handling(consumer, lambda message: seen.append(message.body)):
        send(client, "a")
        eventually(lambda: seen == [b"a"])
        consumer.pause()
        send(client, "b")
        client.admin.topics()
        assert seen == [b"a"]
        consumer.resume()
        eventually(lambda: seen == [b"a", b"b"])


def test_seeking_back_replays_what_was_done(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    send(client, "a", "b", "c")
    for body in (b"a", b"b"):
        message = next(consumer)
        assert message.body == body
        message.ack()
    consumer.seek("earliest")
    assert [next(consumer).body for _ in range(3)] == [b"a", b"b", b"c"]
    consumer.seek(2)
    assert next(consumer).body == b"c"
    consumer.seek("latest")
    send(client, "d")
    assert next(consumer).body == b"d"


def test_a_reset_by_an_operator_replays_too(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    send(client, "a")
    next(consumer).ack()
    eventually(lambda: lag(client) == 0)
    client.admin.reset("orders", "billing", to="earliest")
    assert next(consumer).body == b"a"


# --- connections that break -------------------------------------------------------------------------------------------


def cut(client: Client) -> None:
    connection = client.transport.current()
    assert connection is not None
    connection.close(dmq.NotConnected("cut by a test"))


def test_a_consumer_resumes_after_a_cut_with_what_it_had(client: Client) -> None:
    send(client, *map(str, range(20)))
    consumer = client.consumer("orders", "billing", batch=5)
    first = [next(consumer) for _ in range(7)]
    cut(client)
    rest = [next(consumer) for _ in range(13)]
    assert [int(m.body) for m in (*first, *rest)] == list(range(20))
    assert {m.attempt for m in (*first, *rest)} == {1}
    for message in (*first, *rest):
        message.ack()
    consumer.close()
    assert lag(client) == 0


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_consuming_goes_on_over_a_restart_of_the_broker(broker: TestBroker, client: Client, how: str) -> None:
    seen: list[tuple[bytes, int]] = []
    lock = threading.Lock()

    def handle(message: ReceivedMessage) -> None:
        with lock:
            seen.append((message.body, message.attempt))
        time.sleep(0.001)

    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(400)])
    with Handling(client.consumer("orders", "billing", prefetch=100), handle, workers=4):
        eventually(lambda: len(seen) > 50)
        if how == "kill":
            broker.kill()
            broker.start()
        else:
            broker.restart()
        eventually(lambda: len({body for body, _ in seen}) == 400)
        eventually(lambda: lag(client) == 0)
    assert {attempt for _, attempt in seen} == {1}, "a restart is no failure"
    assert len(seen) == len({body for body, _ in seen}), "what was done before is not done again"


def test_a_message_in_hand_is_not_handled_again_when_the_broker_restarts(broker: TestBroker, client: Client) -> None:
    send(client, "slow")
    may_end = threading.Event()
    calls: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        calls.append(message.attempt)
        assert may_end.wait(PATIENCE)

    consumer = client.consumer("orders", "billing")
    with Handling(consumer, handle, workers=2):
        eventually(lambda: calls == [1])
        broker.kill()
        broker.start()
        eventually(lambda: client.admin.lag("orders", "billing").queues[0].leased == 1)
        may_end.set()
        eventually(lambda: lag(client) == 0)
    assert calls == [1]


def test_a_client_that_is_closed_ends_its_consumers(broker: TestBroker) -> None:
    client = broker.connect()
    with Handling(client.consumer("orders", "billing"), lambda message: None) as handling:
        client.close()
        handling.join()
    assert handling.error is None


def test_in_plain_mode_a_broken_connection_is_an_error(broker: TestBroker) -> None:
    client = broker.connect(reconnect=False)
    with Handling(client.consumer("orders", "billing"), lambda message: None) as handling:
        eventually(lambda: client.transport.current() is not None)
        cut(client)
        handling.join()
        assert isinstance(handling.error, dmq.NotConnected)
