"""Spark over two shards whose leaders are killed: every message once, in the stream, the sink and the archive."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dmq
from dmq.pipeline.archive.run import Run, RunOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.tables import MESSAGE
from dmq.testing.processes import DevClusterProcess
from tests.patience import eventually
from tests.sampling import sample_size
from tests.spark.producer_logs import rows_of
from tests.spark.sample_messages import reading
from tests.spark.test_source_stream import Collected, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAILOVERS = sample_size(share=1, whole=5)
BATCHES, COUNT = 12, 50


def send(client: dmq.Client, turn: int) -> list[str]:
    bodies: list[str] = []
    with client.producer(timeout=60) as producer:
        for batch in range(BATCHES):
            chosen = [f"{turn} {batch:02} {number:02}" for number in range(COUNT)]
            producer.send_many("orders", [dmq.Message(body.encode()) for body in chosen])
            bodies += chosen
    return bodies


def kill_leader(cluster: DevClusterProcess, client: dmq.Client, shard: str) -> None:
    """And wait until another member leads; the one that was killed is started again by the process above it."""
    leader = client.admin.shard(shard).leader
    os.kill(pid_of(cluster.folder / str(leader)), signal.SIGKILL)
    eventually(lambda: client.admin.shard(shard).leader not in (leader, None))


def pid_of(data: Path) -> int:
    """The member that has this directory now."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"broker" in words and str(data).encode() in words:
            return int(folder.name)
    raise AssertionError(f"nobody has {data}")


@pytest.mark.sampled
def test_each_row_comes_once_over_failovers(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path / "archive"))
    sent: list[str] = []
    read: list[str] = []
    with (
        DevClusterProcess(tmp_path / "cluster", shards=2, replicas=2) as cluster,
        dmq.connect(cluster.url, app="shop", timeout=60) as client,
    ):
        options = RunOptions(archive.uri, (cluster.url,), ("archive",))
        for topic in ("orders", "copies"):
            client.admin.create_topic(topic, queues=2)
        for turn in range(FAILOVERS + 1):
            sent += send(client, turn)
            shard = f"s{turn % 2 + 1}"

            def during(number: int, turn: int = turn, shard: str = shard) -> None:
                # The batch is planned, and not read yet.
                if turn and number % 2:
                    kill_leader(cluster, client, shard)

            collected = Collected(during)
            limits = {"subscribe": "orders", "maxOffsetsPerTrigger": BATCHES * COUNT // 2}
            run(spark, cluster.url, tmp_path, collected, **limits)
            read += collected.all()
            Run(options).run(spark=spark)
        assert Counter(read) == Counter(sent), "each once"
        rows = reading(spark, cluster.url, subscribe="orders").schema("value binary, partition int, shard int").load()
        assert {(row.shard, row.partition >> 8) for row in rows.select("shard", "partition").distinct().collect()} == {
            (1, 1),
            (2, 2),
        }
        servers = cluster.url.removeprefix("dmq://")
        copy = rows.select("value").write.format("dmq").option("dmq.bootstrap.servers", servers)
        copy.option("topic", "copies").mode("append").save()
        assert client.admin.topic("copies").messages == len(sent)
        Run(options).run(spark=spark)
    table = rows_of(archive, MESSAGE)
    assert Counter(table["topic"].to_pylist()) == {"orders": len(sent), "copies": len(sent)}
    assert len({*table["message_id"].to_pylist()}) == table.num_rows, "each once"
    assert len({*table["broker"].to_pylist()}) == 2, "both journals"
