"""Rows of `bench.pipeline` about reading: Kafka's seven columns, one topic of four, and the plan of a large read.

What always holds: what is compared lies in the page cache, is read by the same session in turns, and has the same
number of rows.
"""

from __future__ import annotations

import pickle
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import dmq
from bench.pipeline_load import BODY_BYTES, TOPIC
from dmq.pipeline.decode.journal_reader import ClusterReader, JournalReader
from dmq.pipeline.source.data_source import PiecePartition
from dmq.pipeline.source.filters import FilterBounds
from dmq.pipeline.source.options import source_options
from dmq.pipeline.source.resolver import Resolver
from dmq.protocol.read import Location, TopicLocations, TopicPoints
from dmq.testing.benchmark.benchmark import Load
from dmq.testing.processes import BrokerProcess

__all__ = ["columns", "plan", "topic"]

T = TypeVar("T")
Row = dict[str, Any]

TOPICS: Final = ("one", "two", "three", "four")
PLAN_TOPICS: Final = 4
PLAN_QUEUES: Final = 250  # of each
PLAN_MESSAGES: Final = 200_000
PLAN_BYTES: Final = 10**12


class Rig(Protocol):
    """What rows share."""

    rounds: int
    messages: int
    folder: Path

    @property
    def broker(self) -> BrokerProcess: ...

    @property
    def spark(self) -> Any: ...


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _in_turns(rounds: int, *works: Callable[[], Any]) -> list[list[float]]:
    """Seconds of each, by turns, after three rounds that do not count."""
    taken = [[_seconds(work) for work in works] for _ in range(3 + rounds)][3:]
    return [*map(list, zip(*taken, strict=True))]


def _frame(spark: Any, url: str, topic: str) -> Any:
    reader = spark.read.format("dmq").option("dmq.bootstrap.servers", url.removeprefix("dmq://"))
    return reader.option("subscribe", topic).load()


def _take(frame: Any) -> None:
    """Every column of every row, and nothing done with them."""
    frame.write.format("noop").mode("overwrite").save()


def columns(rig: Rig) -> Row:
    """Kafka's seven columns, beside the same rows out of Parquet files that Spark wrote."""
    url, spark = rig.broker.url, rig.spark
    files = str(rig.folder / "seven")
    _frame(spark, url, TOPIC).write.parquet(files)
    assert spark.read.parquet(files).count() == rig.messages
    mine, theirs = _in_turns(
        rig.rounds, lambda: _take(_frame(spark, url, TOPIC)), lambda: _take(spark.read.parquet(files))
    )
    ratios = [parquet / taken for taken, parquet in zip(mine, theirs, strict=True)]
    return {
        "messages": rig.messages,
        "rows_per_second": rig.messages / statistics.median(mine),
        "parquet_rows_per_second": rig.messages / statistics.median(theirs),
        "of_parquet": statistics.median(ratios),
        "of_parquet_spread": [min(ratios), max(ratios)],
        "bar": ">= 0.55 of Parquet",
    }


def topic(rig: Rig) -> Row:
    """One topic of four that four producers filled at the same time, beside the same topic in a broker of its own."""
    spark, count = rig.spark, rig.messages // 2
    with (
        BrokerProcess(rig.folder / "alone") as alone,
        BrokerProcess(rig.folder / "four") as four,
    ):
        _fill(alone.url, TOPICS[:1], count)
        _fill(four.url, TOPICS, count)
        assert _frame(spark, four.url, TOPICS[0]).count() == count
        brokers = (four, alone)
        cpu = [broker.cpu_seconds() for broker in brokers]
        mine, theirs = _in_turns(rig.rounds, *(_reading(spark, broker, TOPICS[0]) for broker in brokers))
        spent = [broker.cpu_seconds() - before for broker, before in zip(brokers, cpu, strict=True)]
    ratios = [taken_alone / taken for taken, taken_alone in zip(mine, theirs, strict=True)]
    reads = (3 + rig.rounds) * count
    return {
        "messages": count,
        "rows_per_second": count / statistics.median(mine),
        "alone_rows_per_second": count / statistics.median(theirs),
        "of_alone": statistics.median(ratios),
        "of_alone_spread": [min(ratios), max(ratios)],
        "broker_us": spent[0] / reads * 1e6,
        "broker_us_alone": spent[1] / reads * 1e6,
        "bar": ">= 0.9 of the topic alone",
    }


def _reading(spark: Any, broker: BrokerProcess, name: str) -> Callable[[], None]:
    return lambda: _take(_frame(spark, broker.url, name))


def _fill(url: str, topics: Sequence[str], count: int) -> None:
    """So many messages in each topic, each from a producer of its own, all at once."""

    def send(number: int) -> None:
        with dmq.connect(url, app="bench") as client:
            client.admin.create_topic(topics[number], queues=4)
            producer = client.producer(compression="none", timeout=120.0)
            for first in range(0, count, 10_000):
                load = Load(min(10_000, count - first), BODY_BYTES, 500, seed=first + number + 1)
                for at, group in enumerate(load.groups(load.bodies())):
                    producer.send_many(topics[number], load.made(group, first + at * load.batch), durability="stored")

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(topics))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Stretched:
    """The readers of a cluster, whose journal seems to be a terabyte: places are multiplied, nothing else."""

    def __init__(self, reader: ClusterReader, factor: int) -> None:
        self._reader = reader
        self._factor = factor

    def ask_all(self, ask: Callable[[int, Any], T]) -> dict[int, T]:
        return self._reader.ask_all(lambda shard, reader: ask(shard, _StretchedShard(reader, self._factor)))


class _StretchedShard:
    def __init__(self, reader: JournalReader, factor: int) -> None:
        self._reader = reader
        self._factor = factor

    def locate(self, topics: Sequence[TopicPoints]) -> list[TopicLocations]:
        def stretched(at: Location) -> Location:
            factor = self._factor
            sizes = {"start_bytes": at.start_bytes * factor, "before_bytes": at.before_bytes * factor}
            return Location(at.offset, at.start * factor, before=at.before * factor, **sizes)

        return [
            TopicLocations(
                found.topic,
                found.topic_id,
                [
                    type(queue)(queue.queue, queue.first_offset, queue.next_offset, [*map(stretched, queue.locations)])
                    for queue in found.queues
                ],
            )
            for found in self._reader.locate(topics)
        ]


def plan(rig: Rig) -> Row:
    """The plan of a read of 1,000 queues and 1 TB.

    The queues and their index are there, on a broker that was started again after it had stored messages in all of
    them; the journal is small, and its places are multiplied on their way to the planner. What Spark itself does is not
    counted.
    """
    names = [f"plan-{number}" for number in range(PLAN_TOPICS)]
    with BrokerProcess(rig.folder / "plan") as broker, dmq.connect(broker.url, app="bench") as client:
        producer = client.producer(compression="none", timeout=120.0)
        for name in names:
            client.admin.create_topic(name, queues=PLAN_QUEUES)
            load = Load(PLAN_MESSAGES // PLAN_TOPICS, 20, 100, seed=1)
            for group in load.groups(load.bodies()):
                producer.send_many(name, load.made(group, 0), durability="stored")
        broker.stop()
        broker.start()
        options = source_options(
            {"dmq.bootstrap.servers": broker.url.removeprefix("dmq://"), "subscribe": ",".join(names)}, is_stream=False
        )
        taken, size, pieces, spent = [], 0, 0, broker.cpu_seconds()
        for _ in range(1 + rig.rounds):
            began = time.perf_counter()
            with ClusterReader(options.servers) as reader:
                stretched: Any = _Stretched(reader, PLAN_BYTES // reader.of(0).offsets(names[0]).visible_journal_offset)
                planned = Resolver(stretched, options).batch(FilterBounds())
            made = [pickle.dumps(PiecePartition(piece)) for piece in planned]
            taken.append(time.perf_counter() - began)
            size, pieces = sum(map(len, made)), len(made)
        spent = broker.cpu_seconds() - spent
    return {
        "queues": PLAN_TOPICS * PLAN_QUEUES,
        "journal_bytes": PLAN_BYTES,
        "pieces": pieces,
        "seconds": statistics.median(taken[1:]),
        "seconds_first": taken[0],
        "bytes": size,
        "broker_cpu_seconds": spent / len(taken),
        "bar": "<= 0.5 s and <= 5 MB",
    }
