"""Writing into topics with `format("dmq")`, in batches and as a stream."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import dmq
from dmq.client.client import Client
from dmq.testing.processes import BrokerProcess, free_port
from tests.integration.pipeline.test_sink import stored


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One that may be restarted."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", ("--port", str(free_port()))) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with dmq.connect(broker.url, timeout=60.0) as client:
        yield client


def servers(broker: BrokerProcess) -> str:
    return broker.url.removeprefix("dmq://")


def numbered(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count, numPartitions=2).selectExpr("cast(id as string) as value", "concat('k-', id) as key")


def numbers(count: int) -> Counter[bytes]:
    return Counter(str(number).encode() for number in range(count))


def write(rows: DataFrame, broker: BrokerProcess, **options: str) -> None:
    writer = rows.write.format("dmq").mode("append").option("dmq.bootstrap.servers", servers(broker))
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def test_a_batch_arrives_with_everything_a_row_has(spark: SparkSession, broker: BrokerProcess, client: Client) -> None:
    client.admin.create_topic("whole", queues=2)
    rows = spark.range(500, numPartitions=2).select(
        f.col("id").cast("string").cast("binary").alias("value"),
        f.concat(f.lit("k-"), f.col("id")).alias("key"),
        f.lit("whole").alias("topic"),
        f.when(f.col("id") % 2 == 0, f.lit("even")).alias("tag"),
        f.concat(f.lit("u-"), f.col("id") % 7).alias("business_id"),
        (f.col("id") % 10).cast("int").alias("priority"),
        f.create_map(f.lit("n"), f.col("id").cast("string")).alias("headers"),
        f.lit(0.0).alias("delay"),
    )
    write(rows, broker, ordered="true", app="etl")
    found = stored(client, "whole", 500)
    assert Counter(message.body for message in found) == numbers(500)
    for message in found:
        number = int(message.body)
        assert message.key == f"k-{number}"
        assert message.tag == (None if number % 2 else "even")
        assert message.business_id == f"u-{number % 7}"
        assert message.priority == number % 10
        assert message.properties == {"n": str(number)}
        assert message.app == "etl"


def test_a_job_that_is_run_again_under_its_name_writes_nothing_twice(
    spark: SparkSession, broker: BrokerProcess, client: Client
) -> None:
    client.admin.create_topic("again", queues=3)
    for _ in range(2):
        write(numbered(spark, 9000), broker, **{"topic": "again", "dmq.producer.id": "nightly-2024-05-01"})
    assert Counter(message.body for message in stored(client, "again", 9000)) == numbers(9000)


def test_a_task_that_fails_is_repeated_without_doubles(
    spark: SparkSession, broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    """Local tasks are tried once, so the job is run again, under one name, after a row that could not be written."""
    client.admin.create_topic("failing", queues=2)
    flag = tmp_path / "failed"

    def fails_once(number: int) -> str:
        if number == 15_000 and not flag.exists():
            flag.touch()
            raise RuntimeError("on purpose")
        return str(number)

    rows = spark.range(20_000, numPartitions=1).select(f.udf(fails_once, useArrow=False)("id").alias("value"))
    options = {"topic": "failing", "dmq.producer.id": "job"}
    with pytest.raises(PySparkException, match="on purpose"):
        write(rows, broker, **options)
    assert 0 < client.admin.topic("failing").messages < 20_000, "it failed in the middle"
    write(rows, broker, **options)
    assert Counter(message.body for message in stored(client, "failing", 20_000)) == numbers(20_000)


def test_the_broker_restarts_during_a_write(spark: SparkSession, broker: BrokerProcess, client: Client) -> None:
    client.admin.create_topic("restarted", queues=2)
    count = 400_000

    def restart() -> None:
        while client.admin.topic("restarted").messages < count // 10:
            pass
        broker.kill()
        broker.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    write(numbered(spark, count), broker, topic="restarted")
    restarting.join()
    assert Counter(message.body for message in stored(client, "restarted", count)) == numbers(count)


def test_a_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    client.admin.create_topic("streamed", queues=2)
    source = tmp_path / "source"
    source.mkdir()
    for part in range(3):
        rows = [json.dumps({"value": str(number)}) for number in range(part * 1000, part * 1000 + 1000)]
        (source / f"{part}.json").write_text("\n".join(rows))
        query = (
            spark.readStream.schema("value string").json(str(source)).writeStream.format("dmq")
            .option("dmq.bootstrap.servers", servers(broker)).option("topic", "streamed")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
    assert Counter(message.body for message in stored(client, "streamed", 3000)) == numbers(3000)


def test_errors_say_what_to_do(spark: SparkSession, broker: BrokerProcess) -> None:
    with pytest.raises(PySparkException, match="option 'topics' is unknown when writing to dmq: did you mean 'topic'"):
        write(numbered(spark, 1), broker, topics="orders")
    with pytest.raises(PySparkException, match="columns body cannot be written: select value, key"):
        write(numbered(spark, 1).withColumn("body", f.lit(1)), broker, topic="orders")
    with pytest.raises(PySparkException, match="nowhere"):
        write(numbered(spark, 1), broker, topic="nowhere")
