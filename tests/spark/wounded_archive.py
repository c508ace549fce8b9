"""An archive job whose executors and Python workers die, for `spark-submit`: `URL TABLES PIDS`.

PIDS are the processes of the cluster, separated by commas. At each step of the job, the first time a Python worker's
daemon is ended with kill -9, and the second time an executor. Tasks join the settlements. At the end it prints what was
ended, as JSON: pairs of a step and a kind of process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter

from dmq.pipeline.archive import settlement_join
from dmq.pipeline.archive.job import ArchiveJob, ArchiveOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.spark_session import spark_session
from tests.spark.cluster import command_line, descendants

KINDS = ("pyspark.daemon", "CoarseGrainedExecutorBackend")


def main(url: str, tables: str, pids: str) -> None:
    settlement_join.SMALL = 0
    seen: Counter[str] = Counter()
    killed: list[tuple[str, str]] = []

    def step(name: str) -> None:
        seen[name] += 1
        for kind in KINDS[seen[name] - 1 : seen[name]]:
            found = [pid for root in pids.split(",") for pid in descendants(int(root)) if kind in command_line(pid)]
            for pid in found[-1:]:
                os.kill(pid, signal.SIGKILL)
                killed.append((name, kind))

    spark = spark_session()
    ArchiveJob(spark, Archive.create(tables), url, ArchiveOptions(batch_bytes=1 << 20), step=step).run()
    spark.stop()
    print(json.dumps(killed), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
