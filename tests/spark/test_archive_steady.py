"""A continuous run at a steady rate, for an hour in ./scripts/soak: nothing that it uses grows.

Lag, files, memory and the time that the other jobs take are looked at all the time, and printed as a curve.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import dmq
from dmq.pipeline.archive.run import Run, RunOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs.job import Progress
from dmq.pipeline.tables import MESSAGE, SCHEMAS
from dmq.testing.processes import BrokerProcess, resident_bytes
from tests.sampling import sample_size
from tests.spark.cluster import descendants
from tests.spark.quick_queries import quick
from tests.spark.steady_load import GROUP, TOPIC

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RATE = 300
SECONDS = sample_size(share=60, whole=3600)
EVERY = 5.0  # seconds between two looks of the run
DERIVE = 20.0
LOOK = 5.0
FILES_MAX = 60  # of a table, of one day
MEMORY_SLACK = 100 << 20
HEAP_BYTES = 1 << 30  # as the session of the tests has it
JAVA_BYTES = 512 << 20  # beside the heap


class Look(NamedTuple):
    """What was seen at a moment."""

    second: float
    lag_bytes: int  # of the journal, flushed and not archived
    files: int  # of the table that has most
    driver_bytes: int  # of this process, which makes the other tables; this and the next two are memory
    java_bytes: int
    worker_bytes: int  # of all workers together
    heap_bytes: int  # what Java still needs once it has collected the rest

    def line(self) -> str:
        memory = "  ".join(
            f"{name} {size >> 20:4} MB"
            for name, size in (
                ("driver", self.driver_bytes),
                ("java", self.java_bytes),
                ("workers", self.worker_bytes),
                ("heap", self.heap_bytes),
            )
        )
        return f"{self.second:5.0f} s  lag {self.lag_bytes:9} bytes  files {self.files:4}  {memory}"


def memory_of(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        try:
            total += resident_bytes(pid)
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue  # a worker that has just ended
    return total


def heap_of(spark: SparkSession) -> int:
    assert spark._jvm is not None
    runtime = spark._jvm.java.lang.Runtime.getRuntime()
    runtime.gc()
    return int(runtime.totalMemory() - runtime.freeMemory())


class DeriveTimes:
    """How long the other jobs took, each time: from when the first one begins until the last one does."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.gaps: list[float] = []  # between two batches of the archive job
        self.by_job: dict[str, list[float]] = {}
        self._began = self._job_began = 0.0
        self._job = ""
        self._archived = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.job == "archive":
            if self._archived:
                self.gaps.append(now - self._archived)
            self._archived = now
        elif progress.step == "begins":
            if progress.job == "rollup":
                self._began = now
            else:
                self.by_job.setdefault(self._job, []).append(now - self._job_began)
            if progress.job == "retain":
                self.seconds.append(now - self._began)
            self._job, self._job_began = progress.job, now


def early_and_late(values: list[float]) -> tuple[float, float]:
    """The medians of the second and of the last quarter; what grows with the time more than doubles between them."""
    step = max(1, len(values) // 4)
    return statistics.median(values[step : 2 * step] or values), statistics.median(values[-step:])


@pytest.mark.soak
def test_nothing_grows_in_a_continuous_run_at_a_steady_rate(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark import SparkContext

    assert SparkContext._gateway is not None
    java = SparkContext._gateway.proc.pid
    tables, times, looks = str(tmp_path / "archive"), DeriveTimes(), list[Look]()
    with quick(spark), BrokerProcess(tmp_path / "data") as broker:
        with dmq.connect(broker.url, app="shop") as client:
            client.admin.create_topic(TOPIC, queues=4)
            client.admin.create_group(GROUP, TOPIC)
        options = RunOptions(
            tables,
            (broker.url,),
            ("archive", "rollup", "trace", "dead-letters", "compact", "retain"),
            is_continuous=True,
            every_seconds=EVERY,
            derive_seconds=DERIVE,
        )
        over = threading.Event()
        load = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.steady_load", broker.url, str(RATE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with ThreadPoolExecutor(1) as thread, dmq.connect(broker.url, app="watch") as client:
            running = thread.submit(Run(options, times).run, over, spark=spark)
            began = time.monotonic()
            archive = Archive.create(tables)
            while (second := time.monotonic() - began) < SECONDS and not running.done():
                time.sleep(LOOK)
                told = client.admin.archived()
                files = max(len(archive.table(name).live_files()) for name in SCHEMAS)
                looks.append(
                    Look(
                        second,
                        told.flushed - told.archived,
                        files,
                        driver_bytes=memory_of([os.getpid()]),
                        java_bytes=memory_of([java]),
                        worker_bytes=memory_of(descendants(java)),
                        heap_bytes=heap_of(spark),
                    )
                )
                print(looks[-1].line())
            said, _ = load.communicate("")
            over.set()
            running.result()
        Run(RunOptions(tables, (broker.url,), ("archive",))).run(spark=spark)
    sent, settled = map(int, said.split())
    print(f"sent {sent}, settled {settled}; seconds of the other jobs {[round(each, 1) for each in times.seconds]}")
    print(f"longest time between two batches {max(times.gaps):.1f} s")
    assert Archive(tables).table(MESSAGE).rows() == sent
    check(looks, times)


def check(looks: list[Look], times: DeriveTimes) -> None:
    """The last quarter is like the second one; the first one warms up."""
    early, late = early_and_late([float(look.lag_bytes) for look in looks])
    slack = RATE * 600 * (EVERY + DERIVE)  # bytes of a message, its events and index, for one round
    assert late <= 2 * early + slack, "the lag grows"
    assert max(look.files for look in looks) <= FILES_MAX, "files are not merged"
    for name in ("driver_bytes", "worker_bytes", "heap_bytes"):
        early, late = early_and_late([float(getattr(look, name)) for look in looks])
        print(f"{name}: {int(early) >> 20} MB early, {int(late) >> 20} MB late")
        assert late <= 1.3 * early + MEMORY_SLACK, f"memory grows: {name}"
    assert max(look.java_bytes for look in looks) <= HEAP_BYTES + JAVA_BYTES, "memory of Java grows"
    for name, seconds in times.by_job.items():
        print(f"{name}: {[round(each, 1) for each in seconds]}")
    early, late = early_and_late(times.seconds)
    print(f"seconds of the other jobs: {early:.1f} early, {late:.1f} late")
    if len(times.seconds) >= 12:  # fewer say nothing on a machine that does something else, too
        assert late <= 1.8 * early + 5, "the other jobs take longer and longer"
