"""An archive in an object store: all of the pipeline, through a real S3 server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dmq
from dmq.pipeline.archive import settlement_join
from dmq.pipeline.archive.job import TABLES, ArchiveJob
from dmq.pipeline.archive.run import Run, RunOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.lookup import Lookup, run_sql
from dmq.pipeline.replay.plan import Selection
from dmq.pipeline.replay.replay import ReplayRequest, execute
from dmq.pipeline.report.collector import collect
from dmq.pipeline.tables import METRICS_1M, TRACE
from dmq.testing.processes import BrokerProcess
from tests.object_store import ObjectStore
from tests.spark.producer_logs import check_archive, consume_all, outcomes, send_logged
from tests.spark.quick_queries import quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 60
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def few_rows(spark: SparkSession) -> Iterator[None]:
    with quick(spark):
        yield


def _check_guide(spark: SparkSession, uri: str) -> None:
    """What the guide shows works: looking a message up, and reading a table."""
    page = (ROOT / "docs" / "guide" / "archive.md").read_text().replace("s3://bucket/archive", uri)
    query = re.search(rf"^\$ dmq (archive query --tables {uri} --key) ", page, re.MULTILINE)
    block = re.search(r"^```python\n(from dmq.pipeline.jobs.frames.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert query is not None
    assert block is not None
    command = [sys.executable, "-m", "dmq.cli", *query[1].split(), "key-0-1", "--format", "json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [row["key"] for row in found] == ["key-0-1"]
    exec(block[1].replace(".show()", ""), {"spark": spark, "Archive": Archive})


class Killed(Exception):
    """The job ends here."""


def test_the_whole_pipeline_works_in_an_object_store(
    spark: SparkSession, object_store: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uri = f"{object_store.bucket()}/company/archive"
    folder = tmp_path_factory.mktemp("broker")
    with BrokerProcess(folder / "data") as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        client.admin.create_topic("again", queues=2)
        log = []
        for number in range(2):
            log += send_logged(client, "orders", COUNT, seed=number)
            consume_all(client, "orders", f"group-{number}", len(log), fail_every=7)
            Run(RunOptions(uri, (broker.url,), jobs=("archive",))).run(spark=spark)
        jobs = ("rollup", "trace", "dead-letters", "compact", "retain")
        options = {"compact.files_min": "2", "retain.sweep_hours": "1"}
        results = {result.job: result for result in Run(RunOptions(uri, jobs=jobs, options=options)).run(spark=spark)}
        archive = Archive.open(uri)
        check_archive(archive, log)
        assert results["trace"].rows == {TRACE: 3 * COUNT}
        assert results["compact"].notes
        assert archive.table(METRICS_1M).rows()
        with Lookup(uri) as lookup:
            sent = next(one for one in log if one.key)
            assert [row["message_id"] for row in lookup.by_key(str(sent.key))] == [sent.id]
            assert len(lookup.life(sent.id).events) >= 4
        acked = run_sql(uri, "SELECT count(*) AS n FROM trace WHERE outcome = 'acked'").table["n"].to_pylist()
        assert acked == [3 * COUNT]
        report = collect(uri, datetime.now(UTC))
        assert [(topic.topic, topic.messages) for topic in report.topics] == [("orders", len(log))]
        _check_guide(spark, uri)
        request = ReplayRequest(Selection(topic="orders"), "again", "once")
        assert [execute(archive, broker.url, request).sent for _ in range(2)] == [len(log), 0]
    assert object_store.paths(f"{uri}/_staging") == []


@pytest.mark.parametrize(
    "is_spark", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["joined by the driver", "joined by Spark"]
)
def test_a_job_that_ends_at_any_commit_leaves_no_row_out_and_none_twice(
    spark: SparkSession,
    object_store: ObjectStore,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    is_spark: bool,
) -> None:
    if is_spark:
        monkeypatch.setattr(settlement_join, "SMALL", 0)
    archive = Archive.create(f"{object_store.bucket()}/archive")
    points = ["extracted", *(f"committed {name}" for name in TABLES), "resolved", "acknowledged"]
    folder = tmp_path_factory.mktemp("broker")
    with BrokerProcess(folder / "data") as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = []
        settled: dict[tuple[str, str, int], int] = {}
        for number, point in enumerate(points[-2:] if is_spark else points):
            log += send_logged(client, "orders", 20, seed=number)
            consume_all(client, "orders", f"group-{number}", len(log))
            settled |= {(f"group-{number}", outcome, 1): len(log) for outcome in ("delivered", "acked")}

            def step(name: str, point: str = point) -> None:
                if name == point:
                    raise Killed

            with pytest.raises(Killed):
                ArchiveJob(spark, archive, broker.url, step=step).run()
        ArchiveJob(spark, archive, broker.url).run()
    check_archive(archive, log)
    assert outcomes(archive) == settled
