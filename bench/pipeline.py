"""What the data pipeline does: `python -m bench.pipeline [ROW …] [--scale 1.0] [--rounds 3] [--json FILE]`.

One broker in another process, one Spark session on two cores, one load: 1.5 million distinct messages of 200 bytes with
keys. Every row that has a bar in relation to something else measures that beside it, in turns, after a round that warms
both up. Memory is the most that was resident, looked at twice a second.

Rows:
    read      `spark.read.format("dmq")` with three columns, counted; beside decoding the same journal from files with
              numpy in two processes, and beside a source of Spark's whose rows are ready
    columns   Kafka's seven columns, all of them taken; beside Spark reading the same rows out of Parquet files
    topic     one topic of four that were filled at the same time; beside the same topic in a broker of its own
    plan      the plan of a read of 1,000 queues and 1 TB: seconds and bytes
    archive   the archive job into empty tables; beside Spark rewriting the tables that it wrote, Parquet to Parquet
    write     a DataFrame into a topic
    query     by id, key and business id over ten million archived messages in ten thousand files of the index, warm;
              the first one of a process; and the command line
    derive    metrics, traces and dead-letter counts after 100,000 new messages of a day that has ten million
    beside    a producer at 30 % of its maximum, alone and while the archive job reads the same broker
    steady    a producer at 5,000 messages a second, alone and beside a continuous run that keeps up with it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dmq
from bench import pipeline_derive, pipeline_read
from bench.pipeline_load import (
    TOPIC,
    Memory,
    Names,
    ack_all,
    decode_seconds,
    dump_journal,
    fill_broker,
    frame_of,
    make_archive,
    producer_at,
)
from dmq.testing.benchmark.benchmark import machine, percentile
from dmq.testing.processes import BrokerProcess

MESSAGES = 1_500_000
ARCHIVED = 10_000_000
ARCHIVE_FILES = 10_000
LOOKUPS = 100
BESIDE_SECONDS = 20.0
STEADY_RATE = 5000.0
STEADY_EVERY = 5.0  # seconds between two looks of the continuous run
READ_WARM_ROUNDS = 3  # until the JVM has compiled what it does with each row
Row = dict[str, Any]


class Rig:
    """What rows share, made when the first of them needs it."""

    def __init__(self, scale: float, rounds: int) -> None:
        self.scale = scale
        self.rounds = rounds
        self.messages = max(2000, int(MESSAGES * scale))
        self.folder = Path(tempfile.mkdtemp(prefix="dmq-bench-"))
        self.memory = Memory()
        self._broker: BrokerProcess | None = None
        self._spark: Any = None
        self._pieces: list[Path] = []

    @property
    def broker(self) -> BrokerProcess:
        """A broker with the load."""
        if self._broker is None:
            self._broker = BrokerProcess(self.folder / "broker").start()
            fill_broker(self._broker.url, self.messages)
        return self._broker

    @property
    def spark(self) -> Any:
        if self._spark is None:
            from dmq.pipeline.spark_session import spark_session

            self._spark = spark_session("local[2]", {"spark.driver.memory": "2g"}, app_name="bench")
            self.memory.start()
        return self._spark

    @property
    def pieces(self) -> list[Path]:
        """The journal in files."""
        if not self._pieces:
            self._pieces = dump_journal(self.broker.url, self.folder / "journal")
        return self._pieces

    def new_folder(self, name: str) -> Path:
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def close(self) -> None:
        self.memory.stop()
        if self._spark is not None:
            from pyspark import SparkContext

            gateway = SparkContext._gateway
            self._spark.stop()
            assert gateway is not None
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(30)
        if self._broker is not None:
            self._broker.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turns(rig: Rig, *works: Callable[[], float], warm_rounds: int = 1) -> list[list[float]]:
    """Seconds of each, by turns, after rounds that do not count."""
    rounds = [[work() for work in works] for _ in range(warm_rounds + rig.rounds)][warm_rounds:]
    return [*map(list, zip(*rounds, strict=True))]


def compared(rig: Rig, seconds: list[float], baseline: list[float], what: str, bar: str) -> Row:
    ratios = [theirs / mine for mine, theirs in zip(seconds, baseline, strict=True)]
    return {
        "messages": rig.messages,
        "rows_per_second": rig.messages / statistics.median(seconds),
        f"{what}_rows_per_second": rig.messages / statistics.median(baseline),
        f"of_{what}": statistics.median(ratios),
        f"of_{what}_spread": [min(ratios), max(ratios)],
        "bar": bar,
    }


def read(rig: Rig) -> Row:
    """Counting three columns, beside numpy and beside Spark alone."""
    from bench.ready_rows import SCHEMA, ReadyRows

    url, spark, pieces = rig.broker.url, rig.spark, rig.pieces
    spark.dataSource.register(ReadyRows)

    def of_broker() -> Any:
        reader = spark.read.format("dmq").option("dmq.bootstrap.servers", url.removeprefix("dmq://"))
        return reader.option("subscribe", TOPIC).schema(SCHEMA).load()

    tasks = of_broker().rdd.getNumPartitions()

    def ready() -> Any:
        return spark.read.format("ready").option("rows", rig.messages).option("partitions", tasks).schema(SCHEMA).load()

    def count(made: Callable[[], Any]) -> float:
        began = time.perf_counter()
        found = made().count()
        taken = time.perf_counter() - began
        assert found == rig.messages, f"{found} rows of {rig.messages}"
        return taken

    broker = rig.broker.cpu_seconds()
    seconds, baseline, alone = in_turns(
        rig,
        lambda: count(of_broker),
        lambda: decode_seconds(pieces, rig.messages),
        lambda: count(ready),
        warm_rounds=READ_WARM_ROUNDS,
    )
    broker = (rig.broker.cpu_seconds() - broker) / (READ_WARM_ROUNDS + rig.rounds)
    row = compared(rig, seconds, baseline, "numpy", ">= 0.6 of numpy in two processes; >= 1,000,000 rows/s stated")
    of_alone = compared(rig, seconds, alone, "spark_alone", row["bar"])
    return row | of_alone | {"broker_us": broker / rig.messages * 1e6, "tasks": tasks}


def archive(rig: Rig) -> Row:
    """The archive job over messages that a group has acked, beside Parquet to Parquet of the tables that it wrote."""
    from dmq.pipeline.archive.job import TABLES, ArchiveJob
    from dmq.pipeline.archive.table_store import Archive
    from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE

    url, spark = rig.broker.url, rig.spark
    ack_all(url, rig.messages)
    tables = rig.folder / "tables"

    def job() -> None:
        found = Archive.create(str(rig.new_folder("tables")))
        ArchiveJob(spark, found, url).run()
        assert found.table(MESSAGE).rows() == rig.messages
        assert found.table(CONSUME_EVENT).rows() == 2 * rig.messages

    def rewrite() -> None:
        out = rig.new_folder("rewritten")
        for name in TABLES:
            if files := Archive(str(tables)).table(name).files():
                spark.read.parquet(*files).write.option("compression", "zstd").parquet(str(out / name))

    seconds, baseline = in_turns(rig, lambda: timed(job), lambda: timed(rewrite))
    found = Archive(str(tables))
    rows = {name: found.table(name).rows() for name in TABLES}
    bar = ">= 0.8 of Spark from Parquet to Parquet, all tables counted"
    return compared(rig, seconds, baseline, "parquet", bar) | {"rows": rows}


def write(rig: Rig) -> Row:
    """A DataFrame into a topic; its rows lie in memory."""
    url, spark = rig.broker.url, rig.spark
    frame = frame_of(spark, rig.folder / "rows", rig.messages).cache()
    assert frame.count() == rig.messages
    seconds = []
    with dmq.connect(url, app="bench") as client:
        for number in range(rig.rounds + 1):
            topic = f"written-{number}"
            client.admin.create_topic(topic, queues=4)
            writer = frame.write.format("dmq").mode("append")
            writer = writer.option("dmq.bootstrap.servers", url.removeprefix("dmq://")).option("topic", topic)
            seconds.append(timed(writer.save))
            assert sum(queue.next_offset for queue in client.admin.offsets(topic)) == rig.messages
            client.admin.delete_topic(topic)
    frame.unpersist()
    counted = seconds[1:]
    rates = [rig.messages / taken for taken in counted]
    return {
        "messages": rig.messages,
        "rows_per_second": statistics.median(rates),
        "rows_per_second_spread": [min(rates), max(rates)],
        "bar": ">= 250,000 rows/s",
    }


def query(rig: Rig) -> Row:
    """Lookups in ten million archived messages."""
    from dmq.pipeline.lookup.lookup import Lookup

    count = max(2000, int(ARCHIVED * rig.scale))
    uri = str(rig.new_folder("large"))
    files = max(20, int(ARCHIVE_FILES * rig.scale))
    made = timed(lambda: make_archive(uri, count, files))
    names = Names()
    found: Row = {"messages": count, "files": files, "made_seconds": made, "bar": "<= 50 ms warm, p50"}
    chosen = random.Random(3)
    with Lookup(uri) as lookup:
        cpu = time.process_time()
        found["first_ms"] = timed(lambda: lookup.by_key(names.key(count // 2))) * 1000
        found["first_cpu_ms"] = (time.process_time() - cpu) * 1000
        ways: dict[str, Callable[[int], list[Any]]] = {
            "id": lambda number: lookup.by_id(names.message_id(number)),
            "key": lambda number: lookup.by_key(names.key(number)),
            "business_id": lambda number: lookup.by_business_id(names.business_id(number)),
            "absent_key": lambda number: lookup.by_key(f"absent-{number}"),
        }
        for name, ask in ways.items():
            ask(0)  # footers are read, code is warm
            cpu, taken = time.process_time(), []
            for _ in range(LOOKUPS):
                number = chosen.randrange(count)
                began = time.perf_counter()
                rows = ask(number)
                taken.append((time.perf_counter() - began) * 1000)
                assert len(rows) == (0 if name == "absent_key" else names.expected(name, number, count))
            ordered = sorted(taken)
            found[name] = {
                "p50_ms": percentile(ordered, 0.5),
                "p99_ms": percentile(ordered, 0.99),
                "max_ms": ordered[-1],
                "cpu_ms": (time.process_time() - cpu) / LOOKUPS * 1000,
            }
    command = [sys.executable, "-m", "dmq.cli", "archive", "query", "--tables", uri, "--key", names.key(count // 2)]
    colds = [timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) for _ in range(3)]
    return found | {"cold_command_ms": statistics.median(colds) * 1000}


def beside(rig: Rig) -> Row:
    """A paced producer beside the archive job."""
    from dmq.pipeline.archive.job import ArchiveJob
    from dmq.pipeline.archive.table_store import Archive

    url, spark = rig.broker.url, rig.spark
    seconds = max(3.0, BESIDE_SECONDS * min(1.0, rig.scale * 4))
    most = producer_at(url, None, seconds).wait()["per_second"]
    rate = 0.3 * most
    alone = producer_at(url, rate, seconds).wait()
    running = producer_at(url, rate, seconds)
    rounds = 0
    while running.is_running():  # the job takes what there is and begins anew, until the producer has ended
        found = Archive.create(str(rig.new_folder("beside")))
        ArchiveJob(spark, found, url).run(lambda: not running.is_running())
        rounds += 1
    together = running.wait()
    return {
        "most_per_second": most,
        "asked_per_second": rate,
        "alone": alone,
        "beside_the_archive_job": together,
        "archive_rounds": rounds,
        "of_asked": together["per_second"] / rate,
        "p99_of_alone": together["p99_ms"] / alone["p99_ms"],
        "bar": "keeps its rate; p99 stated against p99 alone",
    }


def steady(rig: Rig) -> Row:
    """A producer of a moderate rate beside a continuous run."""
    from dmq.pipeline.archive.run import Run, RunOptions
    from dmq.pipeline.archive.table_store import Archive
    from dmq.pipeline.tables import MESSAGE

    url, spark = rig.broker.url, rig.spark
    seconds = max(3.0, BESIDE_SECONDS * min(1.0, rig.scale * 4))
    tables = str(rig.new_folder("steady"))
    once = RunOptions(tables, (url,), ("archive",))
    Run(once).run(spark=spark)  # what is there; only what comes is archived beside the producer
    commits = Archive(tables).table(MESSAGE).version()
    alone, together = [], []
    for _ in range(rig.rounds):
        alone.append(producer_at(url, STEADY_RATE, seconds).wait())
        Run(once).run(spark=spark)
        over = threading.Event()
        run = Run(dataclasses.replace(once, is_continuous=True, every_seconds=STEADY_EVERY))
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(run.run, over, spark=spark)
            together.append(producer_at(url, STEADY_RATE, seconds).wait())
            over.set()
            running.result()
    p99 = [statistics.median(each["p99_ms"] for each in found) for found in (alone, together)]
    return {
        "asked_per_second": STEADY_RATE,
        "alone": alone,
        "beside_a_continuous_run": together,
        "commits": Archive(tables).table(MESSAGE).version() - commits,
        "of_asked": min(each["per_second"] for each in together) / STEADY_RATE,
        "p99_of_alone": p99[1] / p99[0],
        "bar": "p99 <= 3 x alone",
    }


ROWS: dict[str, Callable[[Rig], Row]] = {
    "read": read,
    "columns": pipeline_read.columns,
    "topic": pipeline_read.topic,
    "plan": pipeline_read.plan,
    "archive": archive,
    "write": write,
    "query": query,
    "derive": pipeline_derive.derive,
    "beside": beside,
    "steady": steady,
}


def versions() -> dict[str, str]:
    import deltalake
    import duckdb
    import pyarrow
    import pyspark

    return {module.__name__: module.__version__ for module in (pyspark, pyarrow, deltalake, duckdb)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="which; all if left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--rounds", type=int, default=3, help="that count")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    rig = Rig(arguments.scale, arguments.rounds)
    results: dict[str, Row] = {}
    try:
        for name in [name for name in ROWS if not arguments.rows or name in arguments.rows]:  # writing comes late
            rig.memory.begin()
            results[name] = ROWS[name](rig) | {"memory_mb": rig.memory.most()}
            print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    finally:
        rig.close()
    if arguments.json:
        about = {"machine": machine(), "versions": versions(), "scale": arguments.scale, "rounds": arguments.rounds}
        Path(arguments.json).write_text(json.dumps(about | {"rows": results}, indent=2) + os.linesep)


if __name__ == "__main__":
    main()
