"""Random histories: whatever happens to messages, broker and archive job, the tables have the truth, once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dmq.pipeline.archive.table_store import Archive
from dmq.testing.processes import BrokerProcess, free_port
from tests.object_store import ObjectStore
from tests.sampling import SEED, sample_size
from tests.spark.archive_history import POINTS, History
from tests.spark.driver_process import run_driver
from tests.spark.quick_queries import quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STEPS = 24


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(sample_size(share=1, whole=40)))
def test_the_tables_have_the_truth_whatever_happens(spark: SparkSession, tmp_path: Path, number: int) -> None:
    seed = SEED + number
    print(f"seed {seed}")
    port = ("--port", str(free_port()))
    with quick(spark), BrokerProcess(tmp_path / "data", port) as broker:
        history = History(seed, spark, broker, Archive.create(str(tmp_path / "archive")))
        history.run(STEPS)
    print(dict(history.done))


@pytest.mark.soak
@pytest.mark.parametrize("place", ["files", "object store"])
def test_the_tables_have_the_truth_though_driver_and_jvm_are_killed(
    spark: SparkSession, object_store: ObjectStore, tmp_path: Path, place: str
) -> None:
    tables = str(tmp_path / "archive") if place == "files" else f"{object_store.bucket()}/archive"
    scratch = tmp_path / "scratch"
    killed: list[str] = []

    def kill(point: str) -> None:
        ended = run_driver(scratch, "tests.spark.mortal_archive", broker.url, tables, point)
        assert ended.returncode in (0, -9), ended.stderr  # 0: it never came there, since there was nothing new
        killed.append(point)

    print(f"seed {SEED}")
    port = ("--port", str(free_port()))
    with quick(spark), BrokerProcess(tmp_path / "data", port) as broker:
        history = History(SEED, spark, broker, Archive.create(tables), kill)
        history.run(sample_size(share=10, whole=80))
    assert set(killed) <= set(POINTS)
