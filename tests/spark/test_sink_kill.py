"""The driver of a stream that writes into a topic is killed; each row is there once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import dmq
from dmq.testing.processes import BrokerProcess
from tests.integration.pipeline.test_sink import stored
from tests.spark.driver_process import run_driver
from tests.spark.mortal_sink import stream

FILES = 8
FILE_ROWS = 7000


@pytest.mark.soak  # two drivers of their own
def test_each_row_is_there_once_though_the_driver_is_killed_in_a_write_and_in_a_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    expected = []
    for number in range(FILES):
        rows = [{"value": f"{number}-{row} " + "x" * 150, "key": f"k-{number}-{row}"} for row in range(FILE_ROWS)]
        expected += [row["value"].encode() for row in rows]
        (source / f"{number}.json").write_text("\n".join(map(json.dumps, rows)))
    with BrokerProcess() as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("rows", queues=3)
        for point in ("write", "commit"):
            words = (broker.url, "rows", str(source), str(tmp_path / "checkpoint"), point)
            killed = run_driver(tmp_path / "scratch", "tests.spark.mortal_sink", *words)
            assert killed.returncode == -9, killed.stderr
        assert FILE_ROWS < client.admin.topic("rows").messages < len(expected), "it died in the middle"
        stream(spark, broker.url, "rows", str(source), str(tmp_path / "checkpoint"), "never")
        found = Counter(message.body for message in stored(client, "rows", len(expected)))
    assert found == Counter(expected)
