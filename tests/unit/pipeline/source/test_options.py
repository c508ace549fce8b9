"""Options, places, columns and filters of the source: what they mean, and what is refused."""

from __future__ import annotations

import json
import operator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.types import StructField, StructType

from dmq.errors import InvalidSettings, Unsupported
from dmq.model import place_of, place_queue, place_shard
from dmq.pipeline import DmqDataSource
from dmq.pipeline.source.columns import ALL_COLUMNS, check_schema, column_kind, default_schema
from dmq.pipeline.source.data_source import TriggerDelay
from dmq.pipeline.source.filters import FilterBounds, bounds_of
from dmq.pipeline.source.offsets import (
    EARLIEST,
    LATEST,
    StreamOffsets,
    TopicPartition,
    TopicShard,
    offsets_dict,
    parse_offsets,
    renumbered,
)
from dmq.pipeline.source.options import SourceOptions, StoreTimes, source_options, with_headers

SERVERS = {"dmq.bootstrap.servers": "127.0.0.1:9611"}
ORDERS = {**SERVERS, "subscribe": "orders"}


def options(given: dict[str, str], *, is_stream: bool = False) -> SourceOptions:
    return source_options(given, is_stream=is_stream)


def test_what_is_not_said_is_everything_that_is_there_and_for_a_stream_what_comes() -> None:
    assert options(ORDERS) == SourceOptions("127.0.0.1:9611", ("orders",), starting=EARLIEST, ending=LATEST)
    assert options(ORDERS, is_stream=True).starting == LATEST


def test_names_are_taken_in_any_case() -> None:
    chosen = options(
        {
            "DMQ.bootstrap.SERVERS": "a:1,b:2",
            "SubscribePattern": "or.*",
            "minpartitions": "7",
            "FAILONDATALOSS": "False",
            "startingtimestamp": "12",
            "endingTimestamp": "0",
            "maxOffsetsPerTrigger": "5",
            "startingOffsets": "earliest",
            "path": "whatever Spark leaves there",
        }
    )
    assert chosen == SourceOptions(
        "a:1,b:2",
        pattern="or.*",
        starting=StoreTimes(12),
        ending=StoreTimes(0),
        offsets_per_trigger=5,
        partitions_min=7,
        fail_on_data_loss=False,
    )


def test_times_for_each_partition_and_one_for_all_which_goes_before() -> None:
    each = {**ORDERS, "startingOffsetsByTimestamp": '{"orders": {"0": 5, "257": 7}}'}
    assert options(each).starting == StoreTimes(
        None, {TopicPartition("orders", 0): 5, TopicPartition("orders", 257): 7}
    )
    assert options({**each, "startingTimestamp": "9"}).starting == StoreTimes(9)
    assert not options(each).needs_start
    assert options({**each, "startingOffsetsByTimestampStrategy": "error"}).needs_start
    with pytest.raises(InvalidSettings, match="a stream has no end"):
        options({**ORDERS, "endingOffsetsByTimestamp": "{}"}, is_stream=True)


def test_how_long_a_broker_is_waited_for() -> None:
    assert options(ORDERS).patience == (60.0, 60.0, 0)
    given = {**ORDERS, "dmq.timeout": "2m", "dmq.request.timeout": "1.5", "dmq.retries": "3"}
    assert options(given).patience == (120.0, 1.5, 3)
    assert options({**ORDERS, "dmq.timeout": "5"}).patience == (5.0, 5.0, 0)
    with pytest.raises(InvalidSettings, match=r"'dmq.request.timeout' is 90 s, but 'dmq.timeout'.* is 60 s"):
        options({**ORDERS, "dmq.request.timeout": "90s"})


def test_authentication_is_kept_for_later() -> None:
    for more in ({"dmq.security.user": "me"}, {"dmq.bootstrap.servers": "dmqs://a:1"}):
        with pytest.raises(Unsupported, match="not available yet"):
            options({**ORDERS, **more})


def test_a_micro_batch_waits_for_its_minimum_but_not_for_ever() -> None:
    now = 100.0
    chosen = options({**ORDERS, "minOffsetsPerTrigger": "10", "maxTriggerDelay": "30s"}, is_stream=True)
    delay = TriggerDelay(chosen, lambda: now)
    assert not delay.holds(1), "the first does not wait"
    assert delay.holds(9)
    assert not delay.holds(10)
    now += 29
    assert delay.holds(9)
    now += 1
    assert not delay.holds(9)
    assert delay.holds(0)
    assert not TriggerDelay(options(ORDERS, is_stream=True)).holds(0)


def test_topics_by_name_pattern_or_queue() -> None:
    assert options({**SERVERS, "subscribe": " a, b,,a"}).topics == ("a", "b")
    assert options({**SERVERS, "assign": '{"a": [2, 0, 2]}'}).assigned == {"a": (0, 2)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"subscribe": "a"}, "'dmq.bootstrap.servers' is missing"),
        ({**SERVERS}, "subscribe, subscribePattern and assign: none is given"),
        ({**ORDERS, "assign": "{}"}, "subscribe and assign are given"),
        ({**SERVERS, "subscribe": " , "}, "subscribe is empty"),
        ({**SERVERS, "subscribePattern": "a("}, "not a regular expression"),
        ({**SERVERS, "assign": "[1]"}, "assign is JSON such as"),
        ({**SERVERS, "assign": '{"a": 1}'}, "1 of topic 'a' are not partitions"),
        ({**SERVERS, "assign": "nothing"}, "assign is JSON such as"),
        ({**ORDERS, "startingOffset": "earliest"}, "did you mean 'startingOffsets'?"),
        ({**ORDERS, "kafka.group.id": "x"}, "option 'kafka.group.id' is unknown"),
        ({**ORDERS, "startingOffsets": "sometime"}, "startingOffsets is JSON such as"),
        ({**ORDERS, "startingOffsets": '{"orders": {"0": -3}}'}, "'0': -3 of topic 'orders' is not an offset"),
        ({**ORDERS, "startingOffsets": '{"orders": {"x": 3}}'}, "is not an offset"),
        ({**ORDERS, "startingOffsets": '{"orders": 3}'}, "has another shape"),
        ({**ORDERS, "startingOffsets": "latest"}, "cannot be latest in a batch read"),
        ({**ORDERS, "startingOffsets": '{"orders": {"0": -1}}'}, "cannot be latest in a batch read"),
        ({**ORDERS, "endingOffsets": "earliest"}, "cannot be earliest in a batch read"),
        ({**ORDERS, "minPartitions": "0"}, "minPartitions is a whole number from 1 on"),
        ({**ORDERS, "startingTimestamp": "today"}, "in ms since 1970"),
        ({**ORDERS, "failOnDataLoss": "maybe"}, "'failOnDataLoss' is true or false"),
        ({**ORDERS, "dmq.bootstrap.servers": "dmq://"}, "dmq://"),
        ({**ORDERS, "startingOffsetsByTimestamp": "5"}, "has another shape"),
        ({**ORDERS, "startingOffsetsByTimestamp": '{"orders": {"0": -1}}'}, "'0': -1 of topic 'orders' is not a time"),
        ({**ORDERS, "endingOffsetsByTimestamp": "x"}, "endingOffsetsByTimestamp is JSON such as"),
        ({**ORDERS, "startingOffsetsByTimestampStrategy": "no"}, "Strategy is latest or error, not 'no'"),
        ({**ORDERS, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "5"}, "9 is more than maxOffsetsPerTrigger 5"),
        ({**ORDERS, "maxTriggerDelay": "soon"}, "'maxTriggerDelay' is a time above 0"),
        ({**ORDERS, "dmq.retries": "-1"}, "'dmq.retries' is a whole number from 0"),
    ],
)
def test_mistakes_are_named(given: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        options(given)
    assert words in caught.value.message


def test_a_stream_has_no_end() -> None:
    for name in ("endingOffsets", "endingTimestamp"):
        with pytest.raises(InvalidSettings, match=f"{name} is for batch reads"):
            options({**ORDERS, name: "5"}, is_stream=True)
    assert options({**ORDERS, "startingOffsets": "latest"}, is_stream=True).starting == LATEST


def test_headers_are_an_option_of_the_columns() -> None:
    assert "headers" not in DmqDataSource(ORDERS).schema().names
    assert DmqDataSource({**ORDERS, "INCLUDEHEADERS": "true"}).schema().names[-1] == "headers"
    with pytest.raises(InvalidSettings, match="includeHeaders"):
        with_headers({"includeHeaders": "yes"})


# --- places -----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.tuples(st.text(max_size=3), st.integers(0, 300)), st.integers(0, 2**62), max_size=20))
def test_equal_places_are_equal_texts(raw: dict[tuple[str, int], int]) -> None:
    places = {TopicPartition(*key): offset for key, offset in raw.items()}
    incarnations = {TopicShard(place.topic, place_shard(place.partition)): offset for place, offset in places.items()}
    offsets = StreamOffsets(places, incarnations)
    text = json.dumps(offsets_dict(offsets))
    other = StreamOffsets(dict(reversed(places.items())), dict(reversed(incarnations.items())))
    assert json.dumps(offsets_dict(other)) == text
    assert parse_offsets(text, "x") == parse_offsets(json.loads(text), "x") == offsets


def test_partitions_are_in_the_order_of_their_numbers() -> None:
    places = {TopicPartition("a", 10): 1, TopicPartition("a", 9): 2}
    assert [*offsets_dict(StreamOffsets(places, {}))["a"]] == ["9", "10"]


def test_incarnations_stand_beside_the_partitions_by_shard() -> None:
    offsets = StreamOffsets({TopicPartition("a", 1): 5}, {TopicShard("a", 0): 7, TopicShard("b", 0): 8})
    assert offsets_dict(offsets) == {"a": {"1": 5, "incarnation": {"0": 7}}}
    assert offsets.incarnation_of(TopicPartition("a", 3)) == 7
    assert offsets.incarnation_of(TopicPartition("a", 256)) is None, "which another shard has"
    for wrong in ('{"a": {"incarnation": 7}}', '{"a": {"incarnation": {"0": -1}}}', '{"a": {"incarnation": {"x": 7}}}'):
        with pytest.raises(InvalidSettings, match=r"incarnation|offset"):
            parse_offsets(wrong, "x")


def test_a_partition_stands_for_a_shard_and_a_queue() -> None:
    assert (place_of(7, 0), place_of(7, 2), place_queue(519), place_shard(519)) == (7, 519, 7, 2)


def test_offsets_of_a_lone_broker_become_those_of_the_shard_that_it_is_now() -> None:
    begun = StreamOffsets(
        {TopicPartition("a", 1): 5, TopicPartition("a", 513): 6, TopicPartition("gone", 0): 7}, {TopicShard("a", 0): 9}
    )
    found = renumbered(begun, {"a": 3})
    assert found.places == {TopicPartition("a", 769): 5, TopicPartition("a", 513): 6, TopicPartition("gone", 0): 7}
    assert found.incarnations == {TopicShard("a", 3): 9}


# --- columns ----------------------------------------------------------------------------------------------------------


def test_any_columns_in_any_order_may_be_read() -> None:
    check_schema(StructType([StructField(name, column_kind(name)) for name in reversed(ALL_COLUMNS)]))
    check_schema(default_schema(with_headers=True))
    # What may be null does not matter.
    check_schema(StructType([StructField("offset", column_kind("offset"), nullable=False)]))


def test_columns_that_there_are_not_are_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"'colour' is unknown .* key binary, value binary, .* body_crc bigint"):
        check_schema(StructType([StructField("colour", column_kind("key"))]))
    with pytest.raises(InvalidSettings, match="column 'key' is binary, not string: read it so, and cast it"):
        check_schema(StructType([StructField("key", column_kind("topic"))]))


# --- filters ----------------------------------------------------------------------------------------------------------

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp()) * 1000


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], FilterBounds()),
        ([EqualTo(("topic",), "a")], FilterBounds(topics=frozenset("a"))),
        ([In(("topic",), ("a", "b")), EqualNullSafe(("topic",), "b")], FilterBounds(topics=frozenset("b"))),
        ([EqualTo(("offset",), 5)], FilterBounds(from_offset=5, until_offset=6)),
        ([GreaterThan(("offset",), 5), LessThan(("offset",), 9)], FilterBounds(from_offset=6, until_offset=9)),
        (
            [GreaterThanOrEqual(("offset",), 5), LessThanOrEqual(("offset",), 9)],
            FilterBounds(from_offset=5, until_offset=10),
        ),
        (
            [In(("partition",), (1, 3))],
            FilterBounds(partitions=frozenset((1, 3)), from_partition=1, until_partition=4),
        ),
        ([GreaterThan(("timestamp",), NOON)], FilterBounds(from_ms=NOON_MS)),
        ([LessThan(("stored_at",), NOON)], FilterBounds(until_ms=NOON_MS + 1)),
        ([EqualTo(("timestamp",), NOON)], FilterBounds(from_ms=NOON_MS, until_ms=NOON_MS + 1)),
        ([GreaterThan(("timestamp",), NOON + timedelta(microseconds=700))], FilterBounds(from_ms=NOON_MS)),
        # What says nothing of use.
        ([IsNotNull(("offset",)), Not(EqualTo(("offset",), 5)), EqualTo(("value",), b"x")], FilterBounds()),
        (
            [EqualTo(("headers", "key"), "a"), EqualTo(("offset",), None), GreaterThan(("timestamp",), 5)],
            FilterBounds(),
        ),
        ([GreaterThan(("timestamp",), NOON.replace(tzinfo=None))], FilterBounds()),
    ],
)
def test_filters_bound_what_is_read(filters: list[Filter], expected: FilterBounds) -> None:
    assert bounds_of(filters) == expected


numbers = st.integers(0, 12)
one_filter = st.one_of(
    st.builds(lambda kind, v: kind(("offset",), v), st.sampled_from([EqualTo, GreaterThan, LessThanOrEqual]), numbers),
    st.builds(lambda kind, v: kind(("partition",), v), st.sampled_from([LessThan, GreaterThanOrEqual]), numbers),
    st.builds(lambda v: In(("partition",), tuple(v)), st.lists(numbers, max_size=3)),
)


def passes(one: Any, row: dict[str, int]) -> bool:
    value, limit = row[one.attribute[0]], one.value
    compare = {
        EqualTo: operator.eq,
        GreaterThan: operator.gt,
        GreaterThanOrEqual: operator.ge,
        LessThan: operator.lt,
        LessThanOrEqual: operator.le,
    }
    return value in limit if isinstance(one, In) else bool(compare[type(one)](value, limit))


@given(st.lists(one_filter, max_size=4), numbers, numbers)
def test_what_passes_the_filters_is_within_the_bounds(filters: list[Filter], partition: int, offset: int) -> None:
    bounds = bounds_of(filters)
    if all(passes(one, {"partition": partition, "offset": offset}) for one in filters):
        assert bounds.has_partition(partition)
        assert bounds.from_offset <= offset < bounds.until_offset
