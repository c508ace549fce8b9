"""`spark.readStream.format("dmq")`: every message once, over checkpoints, limits, restarts and new topics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dmq
from dmq.pipeline.source.stream_lag import StreamLagListener, stream_lag
from dmq.testing.processes import BrokerProcess, free_port
from tests.patience import eventually
from tests.spark.sample_messages import reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WAIT = 120


class Collected:
    """What the micro-batches of a query gave; before each `during` is called with its number."""

    def __init__(self, during: Callable[[int], None] | None = None) -> None:
        self.batches: dict[int, list[str]] = {}
        self.during = during

    def take(self, frame: DataFrame, number: int) -> None:
        if self.during is not None:
            self.during(number)
        self.batches[number] = [bytes(row.value).decode() for row in frame.select("value").collect()]

    def all(self) -> list[str]:
        return sorted(body for bodies in self.batches.values() for body in bodies)


def run(spark: SparkSession, url: str, folder: Path, collected: Collected, **options: Any) -> StreamingQuery:
    """A query that reads all that is there, and ends."""
    frame = reading(spark, url, stream=True, **{"startingOffsets": "earliest", **options}).load()
    query: StreamingQuery = (
        frame.writeStream.foreachBatch(collected.take)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT), "a run of what is available now ends"
    return query


def send(client: dmq.Client, topic: str, numbers: range) -> list[str]:
    bodies = [f"{topic} {number:05}" for number in numbers]
    with client.producer() as producer:
        for at in range(0, len(bodies), 10):  # each goes to another queue
            producer.send_many(topic, [dmq.Message(body.encode()) for body in bodies[at : at + 10]])
    return bodies


@pytest.fixture
def client(shared_broker: BrokerProcess) -> Iterator[dmq.Client]:
    with dmq.connect(shared_broker.url) as client:
        yield client


def test_a_micro_batch_waits_for_enough_messages_and_the_lag_is_known(
    spark: SparkSession, shared_broker: BrokerProcess, client: dmq.Client, tmp_path: Path
) -> None:
    client.admin.create_topic("stream.min", queues=2)
    send(client, "stream.min", range(10))
    collected = Collected()
    listener = StreamLagListener()
    spark.streams.addListener(listener)
    limits = {"minOffsetsPerTrigger": 50, "maxTriggerDelay": "1h", "startingOffsets": "earliest"}
    frame = reading(spark, shared_broker.url, stream=True, subscribe="stream.min", **limits).load()
    query = (
        frame.writeStream.foreachBatch(collected.take)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        eventually(lambda: len(collected.all()) == 10, seconds=WAIT)
        for first in range(10, 90, 10):
            send(client, "stream.min", range(first, first + 10))
        eventually(lambda: len(collected.all()) >= 60, seconds=WAIT)
        eventually(lambda: sum(lag.offsets_behind_latest for lag in listener.of(query)) <= 30, seconds=WAIT)
        eventually(lambda: any(lag.processed_rows_per_second > 0 for lag in listener.of(query)), seconds=WAIT)
        progress = query.lastProgress
        assert progress is not None
        assert stream_lag(progress)[0].max_offsets_behind_latest <= 30
    finally:
        query.stop()
        query.awaitTermination(WAIT)
        spark.streams.removeListener(listener)
    sizes = [len(bodies) for bodies in collected.batches.values()]
    assert sizes[0] == 10, "the first does not wait"
    assert sizes[1:]
    assert min(sizes[1:]) >= 50


def test_a_limit_is_kept_and_the_checkpoint_resumed(
    spark: SparkSession, shared_broker: BrokerProcess, client: dmq.Client, tmp_path: Path
) -> None:
    client.admin.create_topic("stream.a", queues=3)
    sent = send(client, "stream.a", range(250))
    collected = Collected()
    run(spark, shared_broker.url, tmp_path, collected, subscribe="stream.a", maxOffsetsPerTrigger=100)
    assert collected.all() == sent
    assert [len(bodies) for bodies in collected.batches.values()] == [100, 100, 50]
    more = send(client, "stream.a", range(250, 300))
    following = Collected()
    query = run(spark, shared_broker.url, tmp_path, following, subscribe="stream.a", maxOffsetsPerTrigger=1000)
    assert following.all() == more, "what came since, and nothing twice"
    assert list(following.batches) == [3]
    progress = query.lastProgress
    assert progress is not None
    queues = client.admin.offsets("stream.a")
    assert all(queue.next_offset for queue in queues), "all of them were read"
    at = ", ".join(f'"{queue.queue}": {queue.next_offset}' for queue in queues)
    end = progress["sources"][0]["endOffset"]
    expected = rf'{{"stream\.a": {{{re.escape(at)}, "incarnation": {{"0": \d+}}}}}}'
    assert re.fullmatch(expected, end), "Kafka's JSON, in one order"


def test_a_topic_that_appears_is_read_from_its_beginning_and_a_run_still_ends(
    spark: SparkSession, shared_broker: BrokerProcess, client: dmq.Client, tmp_path: Path
) -> None:
    client.admin.create_topic("appear.a", queues=2)
    sent = send(client, "appear.a", range(20))
    later: list[str] = []

    def during(number: int) -> None:
        if not later:
            client.admin.create_topic("appear.b", queues=1)
            later.extend(send(client, "appear.b", range(10)))

    collected = Collected(during)
    run(spark, shared_broker.url, tmp_path, collected, subscribePattern=r"appear\..*")
    assert collected.all() == sent, "what came after the run began is the next one's"
    run(spark, shared_broker.url, tmp_path, collected, subscribePattern=r"appear\..*")
    assert collected.all() == [*sent, *later]


def test_a_topic_made_again_is_an_error_and_then_read_whole(
    spark: SparkSession, shared_broker: BrokerProcess, client: dmq.Client, tmp_path: Path
) -> None:
    client.admin.create_topic("anew", queues=2)
    sent = send(client, "anew", range(100))
    collected = Collected()
    run(spark, shared_broker.url, tmp_path, collected, subscribe="anew")
    assert collected.all() == sent
    client.admin.delete_topic("anew")
    client.admin.create_topic("anew", queues=2)
    again = send(client, "anew", range(500, 650))
    for _ in range(2):  # the checkpoint stays as it was
        with pytest.raises(Exception, match="was deleted and created again"):
            run(spark, shared_broker.url, tmp_path, Collected(), subscribe="anew")
    lenient = Collected()
    run(spark, shared_broker.url, tmp_path, lenient, subscribe="anew", failOnDataLoss="false")
    assert lenient.all() == again
    more = send(client, "anew", range(650, 660))
    strict = Collected()
    run(spark, shared_broker.url, tmp_path, strict, subscribe="anew")
    assert strict.all() == more


def test_a_broker_that_restarts_during_a_run_costs_nothing_but_time(spark: SparkSession, tmp_path: Path) -> None:
    port = free_port()
    with BrokerProcess(tmp_path / "data", ["--port", str(port)]) as broker:
        with dmq.connect(broker.url) as client:
            client.admin.create_topic("restart", queues=2)
            sent = send(client, "restart", range(300))

        def during(number: int) -> None:
            if number == 1:
                broker.kill()
                broker.start()

        collected = Collected(during)
        run(spark, broker.url, tmp_path, collected, subscribe="restart", maxOffsetsPerTrigger=100)
    assert collected.all() == sent
    assert Counter(len(bodies) for bodies in collected.batches.values()) == {100: 3}
