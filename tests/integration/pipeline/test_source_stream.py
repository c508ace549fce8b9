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


def test_a_batch_that_is_planned_again_has_the_same_tasks(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=2)
    client.admin.create_topic("others", queues=2)
    send(client, "orders", range(300))
    send(client, "others", range(300))
    reader = Stream(served.url, subscribe="orders", startingOffsets="earliest", minPartitions=5).reader
    start = reader.initialOffset()
    half = reader.latestOffset(start, ReadMaxRows(150))
    planned = {
        way: [pickle.dumps(part) for part in reader.partitions(*way_of)]
        for way, way_of in (
            ("first", (start, half)),
            ("second", (half, reader.latestOffset(half, EVERYTHING))),
        )
    }
    end = reader.latestOffset(half, EVERYTHING)
    with client.producer() as producer:
        producer.send_many("orders", [dmq.Message(b"9" * 5000) for _ in range(50)])
    assert [pickle.dumps(part) for part in reader.partitions(start, half)] == planned["first"]
    assert [pickle.dumps(part) for part in reader.partitions(half, end)] == planned["second"]
    assert len(planned["first"]) >= 5


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
    with pytest.raises(OffsetGone, match=r"'orders' was deleted and created again.*failOnDataLoss"):
        strict.batch()
    assert lenient.batch() == [70, 71, 72]
    assert lenient.is_at_rest()
    for stream in (strict, lenient):
        stream.reader.stop()


def test_a_topic_made_again_with_more_messages_than_before_is_read_from_its_beginning(
    served: ServedBroker, client: dmq.Client
) -> None:
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(5))
    options = {"subscribe": "orders", "startingOffsets": "earliest", "maxOffsetsPerTrigger": 4}
    strict, lenient = Stream(served.url, **options), Stream(served.url, **options, failOnDataLoss="false")
    assert strict.batch() == lenient.batch() == [*range(5)]
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(70, 80))
    before = strict.at
    with pytest.raises(OffsetGone, match=r"'orders' was deleted and created again"):
        strict.batch()
    assert strict.at == before, "the checkpoint does not get a batch that cannot be read"
    limit = lenient.reader.getDefaultReadLimit()
    assert [lenient.batch(limit) for _ in range(3)] == [[70, 71, 72, 73], [74, 75, 76, 77], [78, 79]]
    assert lenient.is_at_rest()
    # A checkpoint that failed goes on once its user does not mind, and is strict again afterwards.
    mended = Stream(served.url, **options, failOnDataLoss="false")
    mended.at = strict.at
    assert mended.batch() == [*range(70, 80)]
    strict.at = mended.at
    send(client, "orders", range(80, 82))
    assert strict.batch() == [80, 81]
    for stream in (strict, lenient, mended):
        stream.reader.stop()


def test_a_batch_that_was_planned_before_its_topic_was_made_again(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(5))
    options = {"subscribe": "orders", "startingOffsets": "earliest"}
    strict, lenient = Stream(served.url, **options), Stream(served.url, **options, failOnDataLoss="false")
    start = strict.reader.initialOffset()
    end = strict.reader.latestOffset(start, EVERYTHING)
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(70, 80))
    with pytest.raises(OffsetGone, match="since this batch was planned"):
        strict.reader.partitions(start, end)
    assert lenient.reader.partitions(start, end) == []
    lenient.at = end
    assert lenient.batch() == [*range(70, 80)], "all of the new topic comes in the next batch"
    for stream in (strict, lenient):
        stream.reader.stop()


def test_a_checkpoint_without_incarnations_goes_on_and_learns_them(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(5))
    stream = Stream(served.url, subscribe="orders", startingOffsets="earliest")
    stream.at = {"orders": {"0": 3}}
    assert stream.batch() == [3, 4]
    assert stream.at["orders"].keys() == {"0", "incarnation"}
    # Behind the end: such a checkpoint can only be of an earlier topic.
    stream.at = {"orders": {"0": 9}}
    with pytest.raises(OffsetGone, match="from offset 9 on, and ends at 5"):
        stream.batch()
    stream.reader.stop()
    lenient = Stream(served.url, subscribe="orders", failOnDataLoss="false")
    lenient.at = {"orders": {"0": 9}}
    assert lenient.batch() == [*range(5)]
    lenient.reader.stop()


def test_a_named_topic_that_is_deleted_stops_no_stream_that_does_not_mind(
    served: ServedBroker, client: dmq.Client
) -> None:
    for topic in ("orders", "bills"):
        client.admin.create_topic(topic, queues=1)
        send(client, topic, range(3))
    options = {"subscribe": "orders,bills", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    stream = Stream(served.url, **options)
    assert stream.batch() == [0, 0, 1, 1, 2, 2]
    client.admin.delete_topic("orders")
    send(client, "bills", range(3, 5))
    assert stream.batch() == [3, 4]
    stream.reader.prepareForTriggerAvailableNow()
    assert stream.is_at_rest()
    stream.reader.stop()
    # A query that begins has lost nothing yet: its name is a mistake.
    new = Stream(served.url, **options)
    with pytest.raises(UnknownTopic, match="'orders' does not exist"):
        new.batch()
    new.reader.stop()


def test_offsets_that_a_user_copies_from_a_query_keep_their_incarnation(
    served: ServedBroker, client: dmq.Client
) -> None:
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(5))
    stream = Stream(served.url, subscribe="orders", startingOffsets="earliest")
    stream.batch()
    copied = json.dumps(stream.at)
    send(client, "orders", range(5, 7))
    following = Stream(served.url, subscribe="orders", startingOffsets=copied)
    assert following.batch() == [5, 6]
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    send(client, "orders", range(70, 80))
    strict = Stream(served.url, subscribe="orders", startingOffsets=copied)
    with pytest.raises(OffsetGone, match="before it was deleted and created again"):
        strict.batch()
    for one in (stream, following, strict):
        one.reader.stop()


def test_the_drivers_connection_outlives_the_broker(served: ServedBroker, client: dmq.Client) -> None:
    client.admin.create_topic("orders", queues=2)
    send(client, "orders", range(5))
    stream = Stream(served.url, subscribe="orders", startingOffsets="earliest")
    assert stream.batch() == [*range(5)]
    served.restart()
    send(client, "orders", range(5, 9))
    assert stream.batch() == [*range(5, 9)]
    stream.reader.stop()
