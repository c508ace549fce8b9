"""`spark.read.format("dmq")`: what is published is what Spark gets, with its own columns, filters and errors.

Everything about what is read stands in tests/integration/pipeline/test_source.py, which needs no Spark to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from dmq.pipeline.source.columns import column_kind
from dmq.testing.processes import BrokerProcess
from tests.spark.sample_messages import Published, publish, reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def published(shared_broker: BrokerProcess) -> Published:
    """Messages of every shape in topic `src.orders`, with a topic of large ones between them in the journal."""
    return publish(shared_broker.url, "src")


def test_kafkas_columns_of_all_messages(spark: SparkSession, published: Published) -> None:
    frame = reading(spark, published.url, subscribe="src.orders", includeHeaders="true").load()
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    rows = {(row.partition, row.offset): row for row in frame.collect()}
    assert len(rows) == len(published.messages)
    for receipt, message in published.messages:
        row = rows[receipt.queue, receipt.offset]
        headers = None if row.headers is None else {header.key: bytes(header.value).decode() for header in row.headers}
        assert bytes(row.value) == message.body
        assert (None if row.key is None else bytes(row.key).decode()) == message.key
        assert (row.topic, row.timestampType, headers) == ("src.orders", 1, message.properties or None)


def test_the_columns_that_a_schema_names_by_sql(spark: SparkSession, published: Published) -> None:
    names = [
        "body_crc", "value", "stored_at", "sent_at", "message_id", "journal_offset", "tag", "business_id", "priority",
        "app", "client", "queue", "flags", "received_at",
    ]  # fmt: skip
    schema = ", ".join(f"{name} {column_kind(name).simpleString()}" for name in names)
    frame = reading(spark, published.url, subscribePattern=r"src\.ord.*", minPartitions=3).schema(schema).load()
    assert frame.columns == names
    frame.createOrReplaceTempView("dmq_src")
    (row,) = spark.sql(
        "select count(*) n, count(distinct journal_offset) places, count(distinct message_id) ids, count(tag) tags, "
        "bool_and(sent_at <= stored_at and received_at <= stored_at and stored_at > timestamp '2020-01-01') ordered, "
        "sum(length(value)) bytes, sum(priority) priority, count(body_crc) crcs from dmq_src where app = 'shop'"
    ).collect()
    count = len(published.messages)
    assert row.asDict() == {
        "n": count,
        "places": count,
        "ids": count,
        "tags": sum(message.tag is not None for _, message in published.messages),
        "ordered": True,
        "bytes": sum(len(message.body) for _, message in published.messages),
        "priority": sum(message.priority for _, message in published.messages),
        "crcs": count,
    }


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[Callable[[bool], None]]:
    before = str(spark.conf.get(PUSHDOWN))
    yield lambda on: spark.conf.set(PUSHDOWN, str(on).lower())
    spark.conf.set(PUSHDOWN, before)


def test_filters_give_the_same_rows_pushed_down_or_not(
    spark: SparkSession, published: Published, pushdown: Callable[[bool], None]
) -> None:
    condition = (
        "topic = 'src.orders' and offset >= 5 and partition in (1, 3) and timestamp > '2020-01-01' and key like 'k%'"
    )
    expected = sum(
        receipt.offset >= 5 and receipt.queue in (1, 3) and (message.key or "").startswith("k")
        for receipt, message in published.messages
    )
    for is_on in (True, False):
        pushdown(is_on)
        frame = reading(spark, published.url, subscribePattern=r"src\..*").load().where(condition)
        assert frame.count() == expected > 0


def test_a_read_of_nothing_is_empty(spark: SparkSession, published: Published) -> None:
    assert reading(spark, published.url, subscribePattern="nothing like it").load().count() == 0


def check_failure(frame: Callable[[], DataFrame], *words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        frame().count()
    for word in words:
        assert word in str(caught.value)


def test_mistakes_reach_the_user_in_a_sentence(spark: SparkSession, published: Published) -> None:
    def read(**options: Any) -> Any:
        return reading(spark, published.url, **{"subscribe": "src.orders", **options})

    check_failure(lambda: read(subscribe="src.nothing").load(), "'src.nothing' does not exist", "src.orders")
    check_failure(
        lambda: read(startingOffset="x").load(), "'startingoffset' is unknown", "did you mean 'startingOffsets'?"
    )
    check_failure(
        lambda: read().schema("offset long, colour string").load(), "'colour' is unknown", "business_id string"
    )
