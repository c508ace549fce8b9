"""An archive job whose driver and JVM die: `python -m tests.spark.mortal_archive URL TABLES POINT`.

POINT is a step of the job, or `task` or `resolve` for the middle of one: as soon as a first file of it appears. There
everything that belongs to the driver is ended with kill -9. Its process group must be its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from pyarrow import fs

from dmq.pipeline.archive import settlement_join
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.job import ArchiveJob, ArchiveOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.spark_session import spark_session
from tests.spark.conftest import JAVA_OPTIONS

# Where a first file shows that the middle of a step is reached.
MIDDLES = {"task": "message", "resolve": "consume_event"}  # tables


def die() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


def die_at_first(folder: Folder) -> None:
    def files() -> set[str]:
        chosen = fs.FileSelector(folder.path, recursive=True, allow_not_found=True)
        return {info.path for info in folder.files.get_file_info(chosen) if info.path.endswith(".parquet")}

    before = files()
    while not files() - before:
        time.sleep(0.001)
    die()


def main(url: str, tables: str, point: str) -> None:
    scratch = os.environ["TMPDIR"]
    conf = {
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Djava.io.tmpdir={scratch}",
        "spark.local.dir": scratch,
    }
    settlement_join.SMALL = 0  # so that it is Spark that resolves
    spark = spark_session("local[2]", conf)
    if point in MIDDLES:
        threading.Thread(target=die_at_first, args=(Archive(tables).table(MIDDLES[point]).folder,), daemon=True).start()

    def step(name: str) -> None:
        if name == point:
            die()

    ArchiveJob(spark, Archive.create(tables), url, ArchiveOptions(batch_bytes=12 << 20), step=step).run()
    spark.stop()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
