"""A client over two brokers: topics at either, and a topic whose queues lie at both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.connection.router import Listeners
from tests.integration.client.route_tables import QUEUES, Cluster, numbered, spread, two_brokers
from tests.patience import PATIENCE_S, eventually


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with two_brokers() as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.connect() as connected:
        yield connected


def iterated(consumer: dmq.Consumer, count: int) -> list[bytes]:
    """So many messages, acked."""
    found = []
    for message in consumer:
        found.append(message.body)
        message.ack()
        if len(found) == count:
            return sorted(found)
    raise AssertionError("the consumer ended")


def pulled(consumer: dmq.Consumer, count: int) -> list[bytes]:
    """So many messages, acked by the batch."""
    found: list[bytes] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline, found
        batch = consumer.pull(max_messages=7, wait=1.0)
        found += [message.body for message in batch]
        consumer.ack(batch)
    return sorted(found)


def test_each_topic_is_sent_to_and_consumed_from_its_broker(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    for topic in ("orders", "bills"):
        producer.send(topic, b"0000")
        assert producer.send_async(topic, b"0001").result(PATIENCE_S).topic == topic
        producer.send_many(topic, [dmq.Message(body) for body in numbered(50, 2)])
    assert cluster.bodies("orders") == (numbered(52), [])
    assert cluster.bodies("bills") == ([], numbered(52))
    for topic in ("orders", "bills"):
        with client.consumer(topic, "push") as consumer:
            assert iterated(consumer, 52) == numbered(52)
        with client.consumer(topic, "pull") as consumer:
            assert pulled(consumer, 52) == numbered(52)
    with cluster.second.connect() as second:
        assert second.admin.lag("bills", "push").total == second.admin.lag("bills", "pull").total == 0
    assert client.admin.topic("bills").name == "bills"


def test_messages_of_a_topic_at_both_brokers_go_to_the_broker_of_their_queue(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    for body in numbered(16):
        producer.send("split", body)
    futures = [producer.send_async("split", body) for body in numbered(1000, 16)]
    assert all(future.result(PATIENCE_S).topic == "split" for future in futures)
    receipts = producer.send_many("split", [dmq.Message(body) for body in numbered(5000, 1016)])
    assert len({receipt.id for receipt in receipts}) == 5000
    first, second = cluster.bodies("split")
    assert sorted(first + second) == numbered(6016)
    assert cluster.queues("split") == ({0, 1}, {2, 3})


def test_ordered_messages_find_the_broker_of_their_queue(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    receipts = [producer.send("split", b"x", business_id=f"u-{n}", ordered=True) for n in range(40)]
    assert {receipt.queue for receipt in receipts} == set(range(QUEUES))
    assert cluster.queues("split") == ({0, 1}, {2, 3})


def test_many_threads_send_to_both_brokers_at_once(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    problems: list[Exception] = []

    def send(start: int) -> None:
        try:
            for body in numbered(50, start):
                producer.send("split", body)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=send, args=(50 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    first, second = cluster.bodies("split")
    assert sorted(first + second) == numbered(400)


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"parallel": 2}, {"strategy": "average"}], ids=str)
def test_pushes_come_from_both_brokers_and_acks_go_back_to_each(
    cluster: Cluster, client: Client, options: dict[str, object]
) -> None:
    client.producer().send_many("split", spread(300))
    with client.consumer("split", "billing", prefetch=20, **options) as consumer:  # type: ignore[call-overload]
        assert iterated(consumer, 300) == numbered(300)
        assert consumer.queues == (tuple(range(QUEUES)) if "strategy" in options else None)
    assert cluster.unacked("split", "billing") == 0


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"parallel": 2}], ids=str)
def test_pulls_come_from_both_brokers_and_acks_go_back_to_each(
    cluster: Cluster, client: Client, options: dict[str, object]
) -> None:
    client.producer().send_many("split", spread(300))
    with client.consumer("split", "billing", **options) as consumer:  # type: ignore[call-overload]
        assert pulled(consumer, 300) == numbered(300)
        assert len(consumer.pull(wait=0.1)) == 0
    assert cluster.unacked("split", "billing") == 0


def test_a_pull_waits_for_whichever_broker_has_something_first(client: Client) -> None:
    producer = client.producer()
    consumer = client.consumer("split", "billing")
    for business_id in ("u-1", "u-2", "u-3", "u-4", "u-5", "u-6"):
        timer = threading.Timer(
            0.1, lambda name=business_id: producer.send("split", name.encode(), business_id=name, ordered=True)
        )
        timer.start()
        batch = consumer.pull(wait=PATIENCE_S)
        assert [message.body for message in batch] == [business_id.encode()]
        consumer.ack(batch)


def test_one_queue_is_pulled_from_its_broker(client: Client) -> None:
    client.producer().send_many("split", spread(4000))
    for queue in range(QUEUES):
        consumer = client.consumer("split", f"group-{queue}")
        batch = consumer.pull(queue=queue)
        assert {message.queue for message in batch} <= {queue}


def test_handlers_run_for_messages_of_both_brokers(cluster: Cluster, client: Client) -> None:
    client.producer().send_many("split", spread(200))
    consumer = client.consumer("split", "billing")
    seen: list[bytes] = []

    def handle(message: dmq.ReceivedMessage) -> None:
        seen.append(message.body)
        if len(seen) == 200:
            consumer.stop()

    consumer.run(handle, workers=3)
    assert sorted(seen) == numbered(200)
    assert cluster.unacked("split", "billing") == 0


def test_the_prefetch_is_shared_out_among_the_brokers(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    for body in numbered(40):
        producer.send("split", body)
    consumer = client.consumer("split", "billing", prefetch=10)
    held = [next(consumer) for _ in range(10)]
    threading.Timer(0.5, consumer.stop).start()
    assert [*consumer] == [], "nothing more comes before an ack"
    assert len({message.id for message in held}) == 10
    for message in held:
        message.ack()
    consumer.close()
    assert cluster.unacked("split", "billing") == 30


def test_a_consumer_pauses_resumes_seeks_and_extends_at_both_brokers(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    producer.send_many("split", spread(100))
    with client.consumer("split", "billing") as consumer:
        assert iterated(consumer, 100) == numbered(100)
        consumer.pause()
        for body in numbered(8, 100):
            producer.send("split", body)
        time.sleep(0.2)
        assert consumer._core.prefetched == (0, 0)
        consumer.resume()
        assert iterated(consumer, 8) == numbered(8, 100)
        eventually(lambda: cluster.unacked("split", "billing") == 0)
        consumer.seek("earliest")
        again = [next(consumer) for _ in range(108)]
        assert sorted(message.body for message in again) == numbered(108)
        for message in again:
            message.extend(60.0)
            message.nack(delay=0.0)
        assert iterated(consumer, 108) == numbered(108)


def test_one_broker_stops_and_comes_back_while_the_other_goes_on(cluster: Cluster) -> None:
    events: list[str] = []
    listeners = Listeners(None, lambda: events.append("interrupted"), lambda: events.append("resumed"))
    with cluster.connect(listeners) as client, client.producer(timeout=20.0) as producer:
        consumer = client.consumer("split", "billing")
        producer.send_many("split", spread(100))
        found = iterated(consumer, 100)
        cluster.second.stop()
        eventually(lambda: events == ["interrupted"])
        for body in numbered(20, 100):
            assert producer.send("split", body).queue < QUEUES // 2
        found += iterated(consumer, 20)
        producer.send_many("split", [dmq.Message(body) for body in numbered(100, 120)])
        found += iterated(consumer, 100)
        pinned = [producer.send_async("split", b"u-%d" % n, business_id=f"u-{n}", ordered=True) for n in range(40)]
        stranded = [future for future in pinned if not future.done()]
        assert stranded, "some of them wait for the second broker"
        cluster.second.start()
        assert {future.result(20).queue for future in pinned} == set(range(QUEUES))
        eventually(lambda: events == ["interrupted", "resumed"])
        found += iterated(consumer, 40)
        assert sorted(found) == sorted(numbered(220) + [b"u-%d" % n for n in range(40)])
        consumer.close()
        assert cluster.unacked("split", "billing") == 0


def test_pulls_go_on_while_one_broker_is_away(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    consumer = client.consumer("split", "billing")
    producer.send_many("split", spread(50))
    assert pulled(consumer, 50) == numbered(50)
    cluster.first.stop()
    eventually(lambda: client._router.link_for("split", 0) is None)
    producer.send_many("split", [dmq.Message(body) for body in numbered(50, 50)])
    assert pulled(consumer, 50) == numbered(50, 50)
    cluster.first.start()
    eventually(lambda: client._router.link_for("split", 0) is not None)
    for body in numbered(8, 100):
        producer.send("split", body)
    assert pulled(consumer, 8) == numbered(8, 100)
    consumer.close()
    assert cluster.unacked("split", "billing") == 0


def test_a_pull_without_any_broker_says_so(cluster: Cluster, client: Client) -> None:
    consumer = client.consumer("split", "billing")
    cluster.first.stop()
    cluster.second.stop()
    with pytest.raises(dmq.NotConnected, match="no broker could be reached within"):
        consumer.pull(wait=0.3)


def test_a_broker_has_one_connection_for_all_that_goes_there(cluster: Cluster, client: Client) -> None:
    producer = client.producer()
    consumers = [client.consumer(topic, "billing") for topic in ("orders", "bills", "split")]
    for topic in ("orders", "bills", "split"):
        producer.send_many(topic, [dmq.Message(body) for body in numbered(20)])
    for consumer in consumers:
        iterated(consumer, 20)
    assert len(client._router._pools) == 2
    assert client._router.link_for("orders") is client._router.link_for("split", 0)
    assert client._router.link_for("bills") is client._router.link_for("split", 3)
