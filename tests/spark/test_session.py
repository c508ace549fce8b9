"""The session that the tests share."""

from __future__ import annotations

from pyspark.sql import SparkSession


def test_the_session_runs_python_in_its_workers(spark: SparkSession) -> None:
    assert spark.range(10).rdd.map(lambda row: row.id * 2).sum() == 90
