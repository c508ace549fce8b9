"""A continuous run: batches are committed while a job of Spark has more tasks than there are cores."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dmq
from dmq.pipeline.archive import run as running
from dmq.pipeline.archive.run import Run, RunOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs.job import JobContext, JobResult
from dmq.pipeline.tables import MESSAGE
from dmq.testing.processes import BrokerProcess
from tests.patience import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = 150
COMMITS = 2


def test_batches_are_committed_before_a_long_job_beside_them_has_ended(
    spark: SparkSession, shared_broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, enough = Archive.create(str(tmp_path / "archive")), str(tmp_path / "enough")
    begun, ended, over = threading.Event(), threading.Event(), threading.Event()

    def task(number: int) -> int:
        if not os.path.exists(enough):
            time.sleep(1.0)
        return number

    def long_job(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
        begun.set()
        spark.sparkContext.parallelize(range(TASKS), TASKS).map(task).count()
        ended.set()
        return JobResult("rollup")

    monkeypatch.setattr(running, "_jobs", lambda: {"rollup": long_job})
    options = RunOptions(archive.uri, (shared_broker.url,), is_continuous=True, every_seconds=0.1, derive_seconds=600.0)

    def committed() -> int:
        return archive.table(MESSAGE).version()

    with dmq.connect(shared_broker.url, app="shop") as client, ThreadPoolExecutor(1) as thread:
        client.admin.create_topic("beside")
        producer = client.producer()
        producer.send("beside", b"first")
        done = thread.submit(Run(options).run, over, spark=spark)
        try:
            eventually(lambda: begun.is_set() or done.done(), "the job never began")
            for number in range(COMMITS):
                before = committed()
                producer.send("beside", b"%d" % number)
                eventually(lambda before=before: committed() > before or done.done(), "nothing is committed")  # type: ignore[misc]
            assert not ended.is_set(), "batches waited for the job beside them"
        finally:
            Path(enough).touch()
            over.set()
            done.result()
    assert ended.is_set()
