"""A comparison of tables and archive whose driver and JVM die: `… mortal_reconcile TABLES NOW POINT URL…`.

POINT is `task`, as soon as a task has written a page of rows; `copied`, all tables are read; `written`, the differences
are a file that no commit names; `committed`, and no resend is ordered yet. There everything that belongs to the driver
is ended with kill -9. Its process group must be its own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import reconcile
from dmq.pipeline.jobs.frames import STAGING
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.spark_session import spark_session
from dmq.pipeline.tables import RECONCILE_DIFF
from tests.spark.conftest import JAVA_OPTIONS
from tests.spark.mortal_archive import die, die_at_first

__all__ = ["POINTS", "main"]

POINTS = ("task", "copied", "written", "committed")
# What has just been done when one of these returns, or is about to be when it is called.
_AFTER = {"copied": "copy_tables", "written": "write_days"}
_BEFORE = {"committed": "_send_again"}


def main(tables: str, now: str, point: str, *urls: str) -> None:
    scratch = os.environ["TMPDIR"]
    conf = {
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Djava.io.tmpdir={scratch}",
        "spark.local.dir": scratch,
    }
    for name, is_after in ((_AFTER.get(point), True), (_BEFORE.get(point), False)):
        if name is not None:
            setattr(reconcile, name, _deadly(getattr(reconcile, name), is_after=is_after))
    spark = spark_session("local[2]", conf)
    archive = Archive.create(tables)
    if point == "task":
        folder = archive.table(RECONCILE_DIFF).folder.below(STAGING)
        threading.Thread(target=die_at_first, args=(folder,), daemon=True).start()
    options = {"reconcile.tasks": "3", "reconcile.resend": "true"}
    reconcile.run(spark, archive, JobContext(tables, datetime.fromisoformat(now), outbox_urls=urls, options=options))


def _deadly(function: Callable[..., Any], *, is_after: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> None:
        if is_after:
            function(*arguments, **named)
        die()

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
