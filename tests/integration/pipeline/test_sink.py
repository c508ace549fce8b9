"""What a task of the Spark sink does, without Spark: with brokers that are killed, and attempts that are."""

from __future__ import annotations

import base64
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructField, StructType

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.errors import DMQError, InvalidMessage, SequenceConflict, StaleEpoch, TimedOut, UnknownTopic
from dmq.pipeline import DmqDataSource
from dmq.pipeline.sink.data_writer import BATCH_ROWS_MAX, SinkOptions, Writer, sink_options, write_rows
from dmq.pipeline.sink.encoder import BLOCK_ROWS
from dmq.pipeline.source.columns import column_kind
from dmq.pipeline.source.data_source import BatchReader
from dmq.testing.processes import BrokerProcess, free_port

ROWS = 5 * BLOCK_ROWS + 700
WRITER = Writer("stream q1", 3, 7 * BATCH_ROWS_MAX, True)


class Died(Exception):
    """The end of an attempt."""


def bodies(count: int = ROWS) -> list[bytes]:
    return [b"row %d" % number for number in range(count)]


def batches(values: list[bytes], size: int = 1000, **columns: list[Any] | pa.Array) -> list[pa.RecordBatch]:
    rows = pa.record_batch({"value": pa.array(values, pa.binary()), **columns})
    return [rows.slice(start, size) for start in range(0, len(values), size)]


def dying(given: list[pa.RecordBatch], after: int) -> Iterator[pa.RecordBatch]:
    yield from given[:after]
    raise Died


def stored(client: Client, topic: str, count: int) -> list[ReceivedMessage]:
    """All messages of a topic, and a moment's wait for more than are expected."""
    found: list[ReceivedMessage] = []
    consumer = client.consumer(topic, "test", prefetch=20_000)
    while batch := consumer.pull(10_000, wait=20.0 if len(found) < count else 0.3):
        found += batch
        consumer.ack(batch)
    consumer.close()
    return found


def counted(client: Client, topic: str, count: int) -> Counter[bytes]:
    return Counter(message.body for message in stored(client, topic, count))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    port = free_port()
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", ("--port", str(port))) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with dmq.connect(broker.url, timeout=120.0) as client:
        yield client


@pytest.fixture
def topic(client: Client, request: pytest.FixtureRequest) -> str:
    name = f"t{abs(hash(request.node.nodeid))}"
    client.admin.create_topic(name, queues=3)
    return name


def options(broker: BrokerProcess, topic: str, **more: str) -> SinkOptions:
    return sink_options({"dmq.bootstrap.servers": broker.url, "topic": topic, **more})


def test_rows_are_stored_once_and_in_the_order_of_their_block(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    written = write_rows(batches(bodies()), WRITER, options(broker, topic))
    assert written == (ROWS, 0)
    found = stored(client, topic, ROWS)
    assert Counter(message.body for message in found) == Counter(bodies())
    for queue in range(3):
        numbers = [int(message.body.split()[1]) for message in found if message.queue == queue]
        assert numbers == sorted(numbers)


def test_keys_and_headers_of_any_kind_come_back_through_the_source(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    headers = [
        None,
        [("a", b"1"), ("a", b"2")],
        [("trace", bytes(range(256))), ("a", "grün".encode())],
        [("a", b"1")],
    ]
    keys = [b"plain", bytes(range(250, 256)), b"base64:AAAA", None]
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    values = [b"%d" % number for number in range(4)]
    made = batches(
        values,
        key=pa.array(keys, pa.binary()),
        headers=pa.array(
            [row and [{"key": name, "value": value} for name, value in row] for row in headers],  # type: ignore[misc]
            pairs,
        ),
        partition=pa.array([2, 2, None, 1], pa.int32()),
    )
    assert write_rows(made, WRITER, options(broker, topic)) == (4, 0)
    assert write_rows(made, WRITER, options(broker, topic)) == (4, 4), "they are recognised"
    columns = ("value", "key", "headers", "partition")
    schema = StructType([StructField(name, column_kind(name)) for name in columns])
    reader = DmqDataSource({"dmq.bootstrap.servers": broker.url, "subscribe": topic}).reader(schema)
    assert isinstance(reader, BatchReader)
    rows = sorted(
        (row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()),
        key=lambda row: row["value"],
    )
    assert [row["value"] for row in rows] == values
    assert [row["key"] for row in rows] == keys
    assert [row["headers"] and [(pair["key"], pair["value"]) for pair in row["headers"]] for row in rows] == headers
    assert [rows[number]["partition"] for number in (0, 1, 3)] == [2, 2, 1]
    found = {message.body: message for message in stored(client, topic, 4)}
    assert (found[b"0"].key, dict(found[b"3"].properties)) == ("plain", {"a": "1"})
    assert found[b"1"].key == "base64:" + base64.b64encode(keys[1] or b"").decode()
    assert found[b"1"].properties["a"] == "2"


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_attempt_that_died_is_gone_on_with(broker: BrokerProcess, client: Client, topic: str, after: int) -> None:
    """Also if the rows come in batches of another size, and if the second attempt dies as well."""
    with pytest.raises(Died):
        write_rows(dying(batches(bodies()), after), WRITER, options(broker, topic))
    with pytest.raises(Died):
        write_rows(dying(batches(bodies(), 700), after + 2), WRITER, options(broker, topic))
    write_rows(batches(bodies(), 900), WRITER, options(broker, topic))
    assert write_rows(batches(bodies()), WRITER, options(broker, topic)) == (ROWS, ROWS)
    assert counted(client, topic, ROWS) == Counter(bodies())


@pytest.mark.parametrize("ordered", ["false", "true"])
def test_rows_that_broke_off_are_gone_on_with(broker: BrokerProcess, client: Client, topic: str, ordered: str) -> None:
    """As those of a task that fails before its sink: they just end, at any row."""
    rows = batches(bodies(), 1111, business_id=pa.array([f"u-{number % 19}" for number in range(ROWS)]))
    chosen = options(broker, topic, ordered=ordered)
    assert write_rows(rows[:3], WRITER, chosen) == (3333, 0)
    assert write_rows(rows[:7], WRITER, chosen) == (7777, 3333)
    assert write_rows(rows, WRITER, chosen) == (ROWS, 7777)
    assert counted(client, topic, ROWS) == Counter(bodies())


@pytest.mark.parametrize("is_named", [True, False])
def test_two_attempts_at_once_store_nothing_twice(
    broker: BrokerProcess, client: Client, topic: str, is_named: bool
) -> None:
    """One stops in the middle, another does all the work, then the first goes on: it fails, or finds nothing to do."""
    writer = Writer("stream q9", 0, 0, is_named)
    is_over, outcomes = threading.Event(), list[object]()

    def slow() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(bodies())):
            if number == 5:
                is_half.set()
                assert is_over.wait(60)
            yield batch

    def attempt() -> None:
        try:
            outcomes.append(write_rows(slow(), writer, options(broker, topic)))
        except DMQError as error:
            outcomes.append(error)

    is_half = threading.Event()
    first = threading.Thread(target=attempt)
    first.start()
    assert is_half.wait(60)
    assert write_rows(batches(bodies()), writer, options(broker, topic)).rows == ROWS
    is_over.set()
    first.join()
    assert isinstance(outcomes[0], (StaleEpoch, SequenceConflict))
    assert counted(client, topic, ROWS) == Counter(bodies())


def test_an_anonymous_write_survives_its_tasks_too(broker: BrokerProcess, client: Client, topic: str) -> None:
    writer = Writer("write 1234", 0, 0, False)
    with pytest.raises(Died):
        write_rows(dying(batches(bodies()), 8), writer, options(broker, topic))
    assert write_rows(batches(bodies()), writer, options(broker, topic)).skipped > 0
    assert counted(client, topic, ROWS) == Counter(bodies())


def test_the_broker_is_killed_in_the_middle(broker: BrokerProcess, client: Client, topic: str) -> None:
    def restarting() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(bodies())):
            if number in (4, 8):
                broker.kill()
                broker.start()
            yield batch

    assert write_rows(restarting(), WRITER, options(broker, topic)) == (ROWS, 0)
    broker.kill()
    broker.start()
    assert write_rows(batches(bodies()), WRITER, options(broker, topic)) == (ROWS, ROWS)
    assert counted(client, topic, ROWS) == Counter(bodies())


def test_a_limit_slows_a_write_and_that_is_all(broker: BrokerProcess, client: Client, topic: str) -> None:
    client.admin.set_limit(topic=topic, messages=8000)
    assert write_rows(batches(bodies()), WRITER, options(broker, topic)) == (ROWS, 0)
    assert counted(client, topic, ROWS) == Counter(bodies())


def test_a_broker_that_never_takes_the_rows_is_given_up(broker: BrokerProcess, client: Client, topic: str) -> None:
    client.admin.set_limit(topic=topic, messages=1)
    with pytest.raises(TimedOut, match=r"rows for topic .* were not stored within 1 s \(.*dmq\.timeout"):
        write_rows(
            batches(bodies(5000)), WRITER, options(broker, topic, **{"dmq.timeout": "500ms", "dmq.retries": "1"})
        )


def test_a_broker_that_hangs_is_asked_again_until_it_goes_on(broker: BrokerProcess, client: Client, topic: str) -> None:
    """It hangs before the questions, and before the first rows: longer than an answer and one timeout may take."""
    patient = options(broker, topic, **{"dmq.timeout": "1s", "dmq.request.timeout": "200ms", "dmq.retries": "30"})

    def hanging(given: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(given):
            if number in (0, 4):
                os.kill(broker.pid, signal.SIGSTOP)
                threading.Timer(1.5, os.kill, (broker.pid, signal.SIGCONT)).start()
            yield batch

    assert write_rows(hanging(batches(bodies())), WRITER, patient) == (ROWS, 0)
    assert counted(client, topic, ROWS) == Counter(bodies())


def test_rows_in_another_order_are_all_sent_again(
    broker: BrokerProcess, client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """None may be skipped because another one is stored under its number."""
    with pytest.raises(Died):
        write_rows(dying(batches(bodies()), 8), WRITER, options(broker, topic))
    other = bodies()[1:] + bodies()[:1]
    with caplog.at_level(logging.WARNING):
        assert write_rows(batches(other), WRITER, options(broker, topic)) == (ROWS, 0)
    assert "twice" in caplog.text
    assert write_rows(batches(other), WRITER, options(broker, topic)) == (ROWS, ROWS), "from then on, this is the order"
    found = counted(client, topic, ROWS)
    assert set(found) == set(bodies())
    assert set(found.values()) == {1, 2}


def test_fewer_rows_than_the_last_time_are_sent(broker: BrokerProcess, client: Client, topic: str) -> None:
    write_rows(batches(bodies()), WRITER, options(broker, topic))
    assert write_rows(batches(bodies(100)), WRITER, options(broker, topic)) == (100, 0)
    assert counted(client, topic, ROWS + 100) == Counter(bodies()) + Counter(bodies(100))


def test_micro_batches_and_partitions_do_not_meet(broker: BrokerProcess, client: Client, topic: str) -> None:
    for base in range(3):
        for partition in range(2):
            writer = Writer("stream q2", partition, base * BATCH_ROWS_MAX, True)
            assert write_rows(batches(bodies(3000)), writer, options(broker, topic)) == (3000, 0)
            assert write_rows(batches(bodies(3000)), writer, options(broker, topic)) == (3000, 3000)
    assert set(counted(client, topic, 18_000).values()) == {6}


def test_a_name_that_begins_again_from_its_first_micro_batch_loses_nothing(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    """As a stream does whose checkpoint was removed."""
    for base in (0, 1, 0, 1):
        writer = Writer("stream q3", 0, base * BATCH_ROWS_MAX, True)
        assert write_rows(batches(bodies(3000)), writer, options(broker, topic)) == (3000, 0)
    assert set(counted(client, topic, 12_000).values()) == {4}


def test_more_queues_lose_nothing(broker: BrokerProcess, client: Client, topic: str) -> None:
    with pytest.raises(Died):
        write_rows(dying(batches(bodies()), 8), WRITER, options(broker, topic))
    client.admin.update_topic(topic, queues=5)
    write_rows(batches(bodies()), WRITER, options(broker, topic))
    assert set(counted(client, topic, ROWS)) == set(bodies())


def test_ordered_rows_stay_in_order_over_attempts(broker: BrokerProcess, client: Client, topic: str) -> None:
    users = pa.array([f"u-{number % 17}" for number in range(ROWS)])
    rows = batches(bodies(), business_id=users)
    chosen = options(broker, topic, ordered="true")
    with pytest.raises(Died):
        write_rows(dying(rows, 7), WRITER, chosen)
    assert write_rows(rows, WRITER, chosen).skipped > 0
    found = stored(client, topic, ROWS)
    assert Counter(message.body for message in found) == Counter(bodies())
    for user in {f"u-{number}" for number in range(17)}:
        mine = [message for message in found if message.business_id == user]
        assert len({message.queue for message in mine}) == 1
        assert [int(message.body.split()[1]) for message in mine] == sorted(int(m.body.split()[1]) for m in mine)


def test_topics_priorities_and_what_belongs_to_a_row(broker: BrokerProcess, client: Client, topic: str) -> None:
    client.admin.create_topic(f"{topic}-urgent", queues=10, priority=True)
    count = 6000
    headers = pa.array(
        [[{"key": "n", "value": b"%d" % number}] if number % 3 else None for number in range(count)],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    rows = batches(
        bodies(count),
        key=pa.array([None if number % 5 == 0 else f"k-{number}" for number in range(count)]),
        topic=pa.array([f"{topic}-urgent" if number % 2 else topic for number in range(count)]),
        tag=pa.array([("red", None, "blue")[number % 3] for number in range(count)]),
        business_id=pa.array([f"u-{number % 7}" for number in range(count)]),
        priority=pa.array([None if number % 4 == 0 else number % 10 for number in range(count)], pa.int32()),
        headers=headers,
    )
    by_column = sink_options({"dmq.bootstrap.servers": broker.url})
    with pytest.raises(Died):
        write_rows(dying(rows, 5), WRITER, by_column)
    write_rows(rows, WRITER, by_column)
    found = stored(client, topic, count // 2) + stored(client, f"{topic}-urgent", count // 2)
    assert Counter(message.body for message in found) == Counter(bodies(count))
    for message in found:
        number = int(message.body.split()[1])
        assert message.topic == (f"{topic}-urgent" if number % 2 else topic)
        assert message.key == (None if number % 5 == 0 else f"k-{number}")
        assert message.tag == ("red", None, "blue")[number % 3]
        assert message.business_id == f"u-{number % 7}"
        assert message.priority == (4 if number % 4 == 0 else number % 10)
        assert message.properties == ({"n": str(number)} if number % 3 else {})
        if number % 2:
            assert message.queue == message.priority


def test_delayed_rows_come_once_and_not_before_their_time(broker: BrokerProcess, client: Client, topic: str) -> None:
    count = 5000
    delays = pa.array([0.0 if number % 2 else 1.5 for number in range(count)])
    rows = batches(bodies(count), delay=delays)
    with pytest.raises(Died):
        write_rows(dying(rows, 4), WRITER, options(broker, topic))
    assert write_rows(rows, WRITER, options(broker, topic)).skipped > 0
    found = stored(client, topic, count)
    assert Counter(message.body for message in found) == Counter(bodies(count))
    for message in found:
        if not int(message.body.split()[1]) % 2:
            assert message.stored_at.timestamp() - message.sent_at.timestamp() >= 1.4


def test_large_rows_are_divided(broker: BrokerProcess, client: Client, topic: str) -> None:
    values = [bytes([number]) * 300_000 for number in range(40)]
    assert write_rows(batches(values, 7), WRITER, options(broker, topic, compression="none")) == (40, 0)
    assert write_rows(batches(values, 7), WRITER, options(broker, topic, compression="none")) == (40, 40)
    assert {message.body[0]: len(message.body) for message in stored(client, topic, 40)} == dict.fromkeys(
        range(40), 300_000
    )


def test_what_cannot_be_sent_says_why(broker: BrokerProcess, client: Client, topic: str) -> None:
    with pytest.raises(UnknownTopic, match="nowhere"):
        write_rows(batches(bodies(5)), WRITER, options(broker, "nowhere"))
    with pytest.raises(InvalidMessage, match="row 3 of the partition: value is null"):
        write_rows([pa.record_batch({"value": pa.array([b"a", b"b", b"c", None])})], WRITER, options(broker, topic))
    with pytest.raises(InvalidMessage, match="row 1 of the partition: priority is from 0 to 9, not 12"):
        write_rows(batches(bodies(2), priority=pa.array([1, 12])), WRITER, options(broker, topic))
    assert stored(client, topic, 0) == []
