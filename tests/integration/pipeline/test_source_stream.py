"""The stream of `format("dmq")` without Spark around it: places from places, whatever happens to topics meanwhile."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructField, StructType

import dmq
from dmq.errors import OffsetGone, UnknownTopic
from dmq.pipeline import DmqDataSource
from dmq.pipeline.source.columns import column_kind
from dmq.pipeline.source.data_source import StreamReader
from dmq.testing.processes import free_port
from tests.integration.broker_thread import ServedBroker

EVERYTHING = ReadAllAvailable()


@pytest.fixture
def served() -> Iterator[ServedBroker]:
    with ServedBroker(port=free_port()) as broker:
        yield broker


@pytest.fixture
def client(served: ServedBroker) -> Iterator[dmq.Client]:
    with dmq.connect(served.url) as client:
        yield client


class Stream:
    """A query: it goes on where it was, as Spark would with its checkpoint."""

    def __init__(self, url: str, **options: Any) -> None:
        schema = StructType([StructField("value", column_kind("value"))])
        texts = {name.lower(): str(value) for name, value in options.items()}
        reader = DmqDataSource({"dmq.bootstrap.servers": url, **texts}).streamReader(schema)
        assert isinstance(reader, StreamReader)
        self.reader = reader
        self.at: dict[str, Any] | None = None

    def batch(self, limit: Any = EVERYTHING) -> list[int]:
        start = self.reader.initialOffset() if self.at is None else self.at
        end = json.loads(json.dumps(self.reader.latestOffset(start, limit)))
        partitions = self.reader.partitions(start, end)
        executor, partitions = pickle.loads(pickle.dumps((self.reader, partitions)))
        self.at = end
        return sorted(
            int(row["value"]) for part in partitions for batch in executor.read(part) for row in batch.to_pylist()
        )

    def is_at_rest(self) -> bool:
        assert self.at is not None
        return json.dumps(self.reader.latestOffset(self.at, EVERYTHING)) == json.dumps(self.at)


def send(client: dmq.Client, topic: str, numbers: range) -> None:
    with client.producer() as producer:
        for number in numbers:
            producer.send(topic, b"%d" % number, durability="stored")


def test_a_stream_begins_with_what_comes_unless_told_otherwise(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=3)
    send(client, "orders", range(10))
    new, all_of_it = (
        Stream(served.url, subscribe="orders"),
        Stream(served.url, subscribe="orders", startingOffsets="earliest"),
    )
    assert new.batch() == []
    assert all_of_it.batch() == [*range(10)]
    send(client, "orders", range(10, 15))
    assert new.batch() == all_of_it.batch() == [*range(10, 15)]
    assert new.is_at_rest()
    assert new.reader.reportLatestOffset() == new.at
    for stream in (new, all_of_it):
        stream.reader.commit(stream.at or {})
        stream.reader.stop()


def test_a_limit_is_the_options_and_triggers_may_ask_for_all(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=3)
    send(client, "orders", range(30))
    stream = Stream(served.url, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger=12)
    limit = stream.reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(12)
    assert len(first := stream.batch(limit)) == 12
    assert sorted(first + stream.batch()) == [*range(30)]
    stream.reader.stop()


def test_what_came_after_the_beginning_is_not_of_what_is_available_now(
    served: ServedBroker, client: dmq.Client
) -> None:
    client.admin.create_topic("orders.a", queues=1)
    send(client, "orders.a", range(5))
    stream = Stream(served.url, subscribePattern="orders.*", startingOffsets="earliest")
    stream.reader.prepareForTriggerAvailableNow()
    send(client, "orders.a", range(5, 8))
    client.admin.create_topic("orders.b", queues=1)
    send(client, "orders.b", range(100, 103))
    assert stream.batch() == [*range(5)]
    assert stream.is_at_rest()
    late = Stream(served.url, subscribe="orders.a")
    late.reader.prepareForTriggerAvailableNow()
    send(client, "orders.a", range(8, 10))
    assert late.batch() == [], "places never fall"
    stream.reader.prepareForTriggerAvailableNow()
    assert stream.batch() == [*range(5, 10), *range(100, 103)]
    for one in (stream, late):
        one.reader.stop()


def test_a_topic_that_is_deleted_is_an_error_or_left_out(served: ServedBroker, client: dmq.Client) -> None:
    for topic in ("orders.a", "orders.b"):
        client.admin.create_topic(topic, queues=1)
        send(client, topic, range(3))
    strict = Stream(served.url, subscribePattern="orders.*", startingOffsets="earliest")
    lenient = Stream(served.url, subscribePattern="orders.*", startingOffsets="earliest", failOnDataLoss="false")
    named = Stream(served.url, subscribe="orders.b", startingOffsets="earliest")
    for stream in (strict, lenient, named):
        stream.batch()
    client.admin.delete_topic("orders.b")
    with pytest.raises(OffsetGone, match=r"'orders\.b' is gone.*failOnDataLoss"):
        strict.batch()
    with pytest.raises(UnknownTopic, match=r"'orders\.b' does not exist"):
        named.batch()
    send(client, "orders.a", range(3, 5))
    assert lenient.batch() == [3, 4]
    assert lenient.is_at_rest()
    # Under the same name it is another topic.
    client.admin.create_topic("orders.b", queues=1)
    send(client, "orders.b", range(50, 52))
    assert lenient.batch() == [50, 51]
    for stream in (strict, lenient, named):
        stream.reader.stop()


def test_a_topic_that_was_deleted_and_made_again_between_two_batches(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(5))
    strict = Stream(served.url, subscribe="orders", startingOffsets="earliest")
    lenient = Stream(served.url, subscribe="orders", startingOffsets="earliest", failOnDataLoss="false")
    assert strict.batch() == lenient.batch() == [*range(5)]
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(70, 73))
    with pytest.raises(OffsetGone, match="from offset 5 on, and has 0 to 3"):
        strict.batch()
    assert lenient.batch() == [70, 71, 72]
    assert lenient.is_at_rest()
    for stream in (strict, lenient):
        stream.reader.stop()


def test_the_drivers_connection_outlives_the_broker(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=2)
    send(client, "orders", range(5))
    stream = Stream(served.url, subscribe="orders", startingOffsets="earliest")
    assert stream.batch() == [*range(5)]
    served.restart()
    send(client, "orders", range(5, 9))
    assert stream.batch() == [*range(5, 9)]
    stream.reader.stop()
