"""Options and columns of the sink: each mistake has a sentence that names it."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t

from dmq.errors import DMQError, InvalidMessage, InvalidSettings
from dmq.model import Durability
from dmq.pipeline.decode.journal_reader import Patience
from dmq.pipeline.sink.data_writer import SinkOptions, batch_writer, check_columns, sink_options, stream_writer

HEADERS = t.ArrayType(t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())]))
KINDS = {
    "binary": t.BinaryType(), "string": t.StringType(), "int": t.IntegerType(), "long": t.LongType(),
    "double": t.DoubleType(), "pairs": HEADERS, "strings": t.ArrayType(t.StringType()),
    "map": t.MapType(t.StringType(), t.StringType()),
}  # fmt: skip
SERVERS = {"dmq.bootstrap.servers": "127.0.0.1:9611"}
OPTIONS = sink_options({**SERVERS, "topic": "orders"})


def schema(columns: str) -> t.StructType:
    """As in "value binary, key string"; Spark's own way to read that needs a session."""
    pairs = [column.split() for column in columns.split(", ")]
    return t.StructType([t.StructField(name, KINDS[kind]) for name, kind in pairs])


def test_options_are_read_whatever_their_case() -> None:
    given = {
        "DMQ.Bootstrap.Servers": "a:1,b:2", "Topic": "orders", "durability": "STORED", "ordered": "True", "app": "etl",
        "compression": "none", "dmq.producer.id": "job", "dmq.timeout": "7.5", "DMQ.Request.Timeout": "500ms",
        "dmq.retries": "2", "checkpointLocation": "/somewhere",
    }  # fmt: skip
    assert sink_options(given) == SinkOptions(
        "dmq://a:1,b:2", "orders", Durability.STORED, True, "etl", "none", "job", Patience(7.5, 0.5, 2)
    )
    assert sink_options(SERVERS) == SinkOptions("dmq://127.0.0.1:9611")


def test_how_long_a_broker_is_waited_for() -> None:
    assert sink_options(SERVERS).patience == (120.0, 30.0, 0)
    assert sink_options({**SERVERS, "dmq.timeout": "10s"}).patience == (10.0, 10.0, 0)
    assert sink_options({**SERVERS, "dmq.timeout": "10s", "dmq.retries": "2"}).patience.whole_seconds == 30.0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "option 'dmq.bootstrap.servers' is missing"),
        ({**SERVERS, "dmq.producerid": "x"}, "unknown when writing to dmq: did you mean 'dmq.producer.id'"),
        (
            {**SERVERS, "zzz": "x"},
            "option 'zzz' is unknown when writing to dmq: there are dmq.bootstrap.servers, topic",
        ),
        ({**SERVERS, "durability": "none"}, "'durability' is stored, flushed or replicated, not 'none'"),
        ({**SERVERS, "ordered": "yes"}, "'ordered' is true or false, not 'yes'"),
        ({**SERVERS, "dmq.timeout": "soon"}, "'dmq.timeout' is a time above 0, such as 30, 500ms or 15m, not 'soon'"),
        ({**SERVERS, "dmq.timeout": "nan"}, "'dmq.timeout' is a time above 0"),
        ({**SERVERS, "dmq.timeout": "-1s"}, "'dmq.timeout' is a time above 0"),
        ({**SERVERS, "dmq.request.timeout": "0"}, "'dmq.request.timeout' is a time above 0"),
        ({**SERVERS, "dmq.request.timeout": "121"}, "'dmq.request.timeout' is 121 s, but 'dmq.timeout'"),
        ({**SERVERS, "dmq.retries": "-1"}, "'dmq.retries' is a whole number from 0 to 1000000, not '-1'"),
        ({**SERVERS, "dmq.retries": "1.5"}, "'dmq.retries' is a whole number"),
        ({**SERVERS, "dmq.retrys": "1"}, "did you mean 'dmq.retries'"),
        ({**SERVERS, "topic": "%SCHEDULE%"}, "%SCHEDULE%"),
        ({**SERVERS, "dmq.security.protocol": "TLS"}, "'dmq.security.protocol' is not available yet"),
        ({"dmq.bootstrap.servers": "dmqs://a:1"}, "'dmqs://a:1' asks for TLS, which is not available yet"),
    ],
)
def test_a_bad_option_is_named(given: dict[str, str], told: str) -> None:
    with pytest.raises(DMQError) as raised:
        sink_options(given)
    assert told in raised.value.message


@pytest.mark.parametrize(
    "columns",
    [
        "value binary",
        "VALUE string, Key binary",
        "value string, key string, topic string, tag string, business_id string, priority int, delay double, "
        "headers map",
        "value string, headers pairs, priority long, delay int, partition int",
    ],
)
def test_these_columns_can_be_written(columns: str) -> None:
    check_columns(schema(columns), OPTIONS)


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("key string", "there is no column value"),
        ("value string, shard int, offset long", "columns shard, offset cannot be written: select value, key"),
        ("value string, partition string", "column partition is string: cast it to int"),
        ("value int", "column value is int: cast it to binary or string"),
        ("value string, priority double", "column priority is double: cast it to int"),
        ("value string, headers strings", "column headers is array<string>: cast it to array<struct<"),
        ("value string, delay string", "column delay is string: cast it to double or int, in seconds"),
        ("value string, VALUE string", "columns value occur more than once"),
    ],
)
def test_a_column_that_cannot_be_written_is_named(columns: str, told: str) -> None:
    with pytest.raises(InvalidMessage) as raised:
        check_columns(schema(columns), OPTIONS)
    assert told in raised.value.message


def test_rows_need_a_topic_and_ordered_ones_a_business_id() -> None:
    with pytest.raises(InvalidSettings, match="no topic"):
        check_columns(schema("value string"), sink_options(SERVERS))
    check_columns(schema("value string, topic string"), sink_options(SERVERS))
    with pytest.raises(InvalidMessage, match="business_id"):
        check_columns(schema("value string"), sink_options({**SERVERS, "topic": "t", "ordered": "true"}))


@pytest.mark.parametrize("make", [batch_writer, stream_writer])
def test_a_topic_is_not_overwritten(make: type) -> None:
    make({**SERVERS, "topic": "orders"}, schema("value string"))
    with pytest.raises(InvalidSettings, match="append"):
        make({**SERVERS, "topic": "orders"}, schema("value string"), True)
