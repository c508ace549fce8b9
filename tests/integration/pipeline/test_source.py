"""The source of `format("dmq")` without Spark around it: partitions and rows as Spark would ask for them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan, LessThanOrEqual
from pyspark.sql.types import StructField, StructType

import dmq
from dmq.errors import Damaged, DMQError, InvalidSettings, OffsetGone, UnknownTopic
from dmq.pipeline import DmqDataSource
from dmq.pipeline.source.columns import ALL_COLUMNS, column_kind
from dmq.pipeline.source.data_source import BatchReader, PiecePartition
from dmq.pipeline.source.partition_plan import JournalPiece, QueuePiece
from dmq.settings import StoreSettings
from dmq.testing import MemoryFiles
from tests.integration.broker_thread import ServedBroker
from tests.spark.sample_messages import Published, publish


@pytest.fixture(scope="module")
def published() -> Iterator[Published]:
    """Messages of every shape in topic `src.orders`, with a topic of large ones between them in the journal."""
    with ServedBroker() as broker:
        yield publish(broker.url, "src")


def reader_of(at: str, columns: tuple[str, ...] = ALL_COLUMNS, **options: Any) -> BatchReader:
    schema = StructType([StructField(name, column_kind(name)) for name in columns])
    texts = {name.lower(): str(value) for name, value in options.items()}
    reader = DmqDataSource({"dmq.bootstrap.servers": at, **texts}).reader(schema)
    assert isinstance(reader, BatchReader)
    return reader


def rows_of(reader: BatchReader) -> list[dict[str, Any]]:
    reader, partitions = pickle.loads(pickle.dumps((reader, reader.partitions())))
    return [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]


def read(at: str, **options: Any) -> list[dict[str, Any]]:
    return rows_of(reader_of(at, **options))


def test_every_column_is_what_was_sent(published: Published) -> None:
    rows = {row["message_id"]: row for row in read(published.servers, subscribe="src.orders")}
    assert len(rows) == len(published.messages)
    for receipt, message in published.messages:
        row = rows[str(receipt.id)]
        key = None if message.key is None else message.key.encode()
        headers = [{"key": k, "value": v.encode()} for k, v in (message.properties or {}).items()]
        assert (row["key"], row["value"], row["headers"]) == (key, message.body, headers or None)
        assert (row["tag"], row["business_id"], row["priority"]) == (message.tag, message.business_id, message.priority)
        assert (row["topic"], row["app"], row["timestampType"]) == ("src.orders", "shop", 1)
        assert (row["queue"], row["partition"], row["offset"]) == (receipt.queue, receipt.queue, receipt.offset)
        assert row["sent_at"] <= row["received_at"] <= row["stored_at"] == row["timestamp"]
        assert row["client"].startswith("127.0.0.1:")


def kinds(reader: BatchReader) -> set[type]:
    return {type(part.piece) for part in reader.partitions() if isinstance(part, PiecePartition)}


def test_a_few_messages_among_many_bytes_are_gathered_and_are_the_same(published: Published) -> None:
    gathered, ranged = (
        reader_of(published.url, subscribe="src.orders"),
        reader_of(published.url, subscribe="src.orders,src.large"),
    )
    assert (kinds(gathered), kinds(ranged)) == ({QueuePiece}, {JournalPiece})
    place = "journal_offset"
    few = sorted(rows_of(gathered), key=lambda row: row[place])
    both = sorted(rows_of(ranged), key=lambda row: row[place])
    assert few == [row for row in both if row["topic"] == "src.orders"]
    assert len(both) == len(few) + published.large
    assert [row[place] for row in both] == sorted({row[place] for row in both})


@pytest.mark.parametrize("topics", ["src.orders", "src.orders,src.large"])
def test_partitions_do_not_change_what_is_read(published: Published, topics: str) -> None:
    plain = reader_of(published.url, subscribe=topics)
    divided = reader_of(published.url, subscribe=topics, minPartitions=9)
    assert len(divided.partitions()) >= 9
    assert [p.piece for p in divided.partitions()] == [p.piece for p in divided.partitions()]  # type: ignore[attr-defined]
    order = lambda row: row["journal_offset"]  # noqa: E731
    assert sorted(rows_of(divided), key=order) == sorted(rows_of(plain), key=order)


def test_offsets_from_and_to(published: Published) -> None:
    starting = {"src.orders": {"0": 5, "1": -2, "2": 7, "3": -2}}
    ending = {"src.orders": {"0": 9, "1": 3, "2": 7, "3": -1}}
    rows = read(
        published.url, subscribe="src.orders", startingOffsets=json.dumps(starting), endingOffsets=json.dumps(ending)
    )
    found = {queue: sorted(row["offset"] for row in rows if row["queue"] == queue) for queue in range(4)}
    in_third = sum(receipt.queue == 3 for receipt, _ in published.messages)
    assert found == {0: [5, 6, 7, 8], 1: [0, 1, 2], 2: [], 3: [*range(in_third)]}
    assert {row["partition"] for row in read(published.url, assign='{"src.orders": [2]}')} == {2}


def test_times_from_and_to(published: Published) -> None:
    late = read(published.url, subscribe="src.orders", startingTimestamp=published.middle_ms)
    early = read(published.url, subscribe="src.orders", endingTimestamp=published.middle_ms)
    assert (len(early), len(late)) == (published.before_middle, len(published.messages) - published.before_middle)
    assert read(published.url, subscribe="src.orders", startingTimestamp=4_000_000_000_000) == []
    none = read(published.url, subscribe="src.orders", startingTimestamp=4_000_000_000_000, endingTimestamp=1)
    assert none == []


def test_times_for_each_partition(published: Published) -> None:
    late, never = published.middle_ms, 4_000_000_000_000

    def at(*times_ms: int) -> str:
        return json.dumps({"src.orders": {str(queue): time_ms for queue, time_ms in enumerate(times_ms)}})

    everything = read(published.url, subscribe="src.orders")
    rows = read(published.url, subscribe="src.orders", startingOffsetsByTimestamp=at(0, late, never, 0))
    moment = datetime.fromtimestamp(late / 1000, UTC)
    assert sorted((row["queue"], row["offset"]) for row in rows) == sorted(
        (row["queue"], row["offset"])
        for row in everything
        if row["queue"] in (0, 3) or (row["queue"] == 1 and row["stored_at"] >= moment)
    )
    early = read(published.url, subscribe="src.orders", endingOffsetsByTimestamp=at(late, 0, never, 0))
    assert sorted((row["queue"], row["offset"]) for row in early) == sorted(
        (row["queue"], row["offset"])
        for row in everything
        if row["queue"] == 2 or (row["queue"] == 0 and row["stored_at"] < moment)
    )
    strict = {"subscribe": "src.orders", "startingOffsetsByTimestampStrategy": "error"}
    assert len(read(published.url, **strict, startingOffsetsByTimestamp=at(0, 0, 0, 0))) == len(everything)
    with pytest.raises(OffsetGone, match=r"partition 2 of topic 'src\.orders' has no message of the starting time"):
        read(published.url, **strict, startingOffsetsByTimestamp=at(0, 0, never, 0))
    with pytest.raises(InvalidSettings, match=r"has no offset for src\.orders 3"):
        read(published.url, subscribe="src.orders", startingOffsetsByTimestamp=at(0, 0, 0))


def test_topics_by_pattern_leave_out_those_of_the_broker_itself(published: Published) -> None:
    assert {row["topic"] for row in read(published.url, subscribePattern=".*")} == {"src.orders", "src.large"}
    assert read(published.url, subscribePattern="nothing like it") == []


def test_filters_leave_out_and_never_too_much(published: Published) -> None:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=published.middle_ms)
    every = {row["message_id"]: row for row in read(published.url, subscribePattern=".*")}
    for filters, holds in (
        ([EqualTo(("topic",), "src.orders")], lambda row: row["topic"] == "src.orders"),
        ([In(("partition",), (0, 3))], lambda row: row["partition"] in (0, 3)),
        ([GreaterThanOrEqual(("offset",), 5), LessThan(("offset",), 8)], lambda row: 5 <= row["offset"] < 8),
        ([GreaterThanOrEqual(("timestamp",), moment)], lambda row: row["timestamp"] >= moment),
        ([LessThanOrEqual(("timestamp",), moment)], lambda row: row["timestamp"] <= moment),
        ([EqualTo(("offset",), 3), EqualTo(("topic",), "nothing")], lambda row: False),
    ):
        reader = reader_of(published.url, subscribePattern=".*")
        assert [*reader.pushFilters(filters)] == filters, "Spark still applies them"
        found = {row["message_id"] for row in rows_of(reader)}
        assert found == {key for key, row in every.items() if holds(row)}, filters


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (UnknownTopic, {"subscribe": "src.nothing"}, "'src.nothing' does not exist: there are src.large, src.orders"),
        (UnknownTopic, {"assign": '{"src.orders": [4]}'}, "partitions 0 to 3, not 4"),
        (InvalidSettings, {"subscribe": "src.orders", "startingOffsets": '{"src.orders": {"0": 1}}'}, "src.orders 1"),
        (
            InvalidSettings,
            {"subscribe": "src.large", "startingOffsets": '{"src.large": {"0": 1, "1": 1, "7": 0}}'},
            "is not read: src.large 7",
        ),
        (
            InvalidSettings,
            {
                "assign": '{"src.large": [0]}',
                "startingOffsets": '{"src.large": {"0": 5}}',
                "endingOffsets": '{"src.large": {"0": 4}}',
            },
            "after its endingOffsets 4",
        ),
        (
            OffsetGone,
            {"assign": '{"src.large": [0]}', "startingOffsets": '{"src.large": {"0": 9999}}'},
            "from offset 9999 on",
        ),
        (
            OffsetGone,
            {"assign": '{"src.large": [0]}', "endingOffsets": '{"src.large": {"0": 9999}}'},
            "offsets 0 to 9999 of topic 'src.large', partition 0, were asked for; it has 0 to",
        ),
    ],
)
def test_what_does_not_exist_is_told(
    published: Published, kind: type[DMQError], options: dict[str, str], words: str
) -> None:
    with pytest.raises(kind) as caught:
        read(published.url, **options)
    assert words in caught.value.message


def test_what_retention_took_is_an_error_or_left_out() -> None:
    small = StoreSettings(
        segment_bytes=1 << 17, unit_bytes_max=1 << 16, body_bytes_max=1 << 15, retention_bytes=1 << 18
    )
    with ServedBroker(store=small) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("gone", queues=1)
        with client.producer(compression="none") as producer:
            producer.send_many("gone", [dmq.Message(b"x" * 1000)] * 200)
            stale = reader_of(broker.url, subscribe="gone", failOnDataLoss="false")
            strict = reader_of(broker.url, subscribe="gone")
            parts, strict_parts = stale.partitions(), strict.partitions()
            while client.admin.offsets("gone")[0].first_offset < 100:
                producer.send_many("gone", [dmq.Message(b"y" * 1000)] * 200)
        queue = client.admin.offsets("gone")[0]
        options = {"subscribe": "gone", "startingOffsets": '{"gone": {"0": 0}}'}
        with pytest.raises(OffsetGone, match=rf"it has {queue.first_offset} to {queue.next_offset}.*failOnDataLoss"):
            read(broker.url, **options)
        left = [row["offset"] for row in read(broker.url, **options, failOnDataLoss="false")]
        assert left == [*range(queue.first_offset, queue.next_offset)]
        # It went after the read was planned.
        with pytest.raises(OffsetGone, match="failOnDataLoss"):
            [*strict.read(strict_parts[0])]
        late = [row["offset"] for part in parts for batch in stale.read(part) for row in batch.to_pylist()]
        assert late == [*range(min(queue.first_offset, 200), 200)]


def spoil(files: MemoryFiles, mark: bytes) -> None:
    """Flip a bit within a message."""
    for name in files.listdir("journal"):
        path = f"journal/{name}"
        file = files.open(path, write=True)
        try:
            data = file.read(0, files.size(path))
            if mark in data:
                file.write(data.index(mark), [b"X"])
                return
        finally:
            file.close()
    raise AssertionError("no journal has it")


@pytest.mark.parametrize("topics", ["orders", "orders,large"])
def test_a_damaged_unit_is_an_error_or_passed_over(topics: str) -> None:
    files = MemoryFiles()
    with ServedBroker(files, store=StoreSettings(read_cache_bytes=1 << 20)) as broker:
        with dmq.connect(broker.url) as client, client.producer(compression="none") as producer:
            for topic in ("orders", "large"):
                client.admin.create_topic(topic, queues=1)
            for number in range(5):
                producer.send_many("orders", [dmq.Message(b"message %d of %d" % (i, number)) for i in range(10)])
                producer.send_many("large", [dmq.Message(b"z" * 60_000)] * 10)
        broker.restart()  # whatever it had in memory it reads anew
        spoil(files, b"message 3 of 2")
        columns = ("value", "topic", "offset")
        with pytest.raises(Damaged, match="failOnDataLoss"):
            rows_of(reader_of(broker.url, columns, subscribe=topics))
        rows = rows_of(reader_of(broker.url, columns, subscribe=topics, failOnDataLoss="false"))
        left = [row["offset"] for row in rows if row["topic"] == "orders"]
        assert sorted(left) == [*range(20), *range(30, 50)]
        assert len(rows) - len(left) == (50 if "large" in topics else 0)
