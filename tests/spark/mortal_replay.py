"""A replay by Spark whose driver and JVM die: `python -m tests.spark.mortal_replay URL TABLES REPLAY_ID POINT`.

POINT is `task`, as soon as a task has begun to write rows; `staged`, all are written and the plan is not; `planned`;
`sending`, the broker has some of the messages; `sent`, it has all and nothing says so yet. There everything that
belongs to the driver is ended with kill -9. Its process group must be its own. `never` goes through.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.replay import spark_replay
from dmq.pipeline.replay.plan import Done, Plan, Plans, Selection
from dmq.pipeline.replay.replay import ReplayRequest, execute
from dmq.pipeline.replay.sender import ReplayProgress
from dmq.pipeline.spark_session import spark_session
from tests.spark.conftest import JAVA_OPTIONS
from tests.spark.mortal_archive import die

POINTS = ("task", "staged", "planned", "sending", "sent")
RATE = 1500.0


def die_at_first_rows(folder: Path) -> None:
    while not [*folder.glob("rows-*/*.parquet")]:
        time.sleep(0.001)
    die()


def main(url: str, tables: str, replay_id: str, point: str) -> None:
    scratch = os.environ["TMPDIR"]
    conf = {
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Djava.io.tmpdir={scratch}",
        "spark.local.dir": scratch,
    }
    keep, finish = Plans.keep, Plans.finish
    spark_replay._LOOK_SECONDS = 0.05  # type: ignore[misc]

    def reach(name: str) -> None:
        if name == point:
            die()

    def kept(self: Plans, plan: Plan) -> Plan:
        reach("staged")
        found = keep(self, plan)
        reach("planned")
        return found

    def finished(self: Plans, plan: Plan, done: Done) -> None:
        reach("sent")
        finish(self, plan, done)

    def heard(progress: ReplayProgress) -> None:
        if progress.stored:
            reach("sending")

    Plans.keep, Plans.finish = kept, finished  # type: ignore[method-assign]
    spark = spark_session("local[2]", conf)
    if point == "task":
        rows = Path(tables) / "replay" / replay_id
        threading.Thread(target=die_at_first_rows, args=(rows,), daemon=True).start()
    request = ReplayRequest(Selection(topic="orders"), "again", replay_id, None if point == "never" else RATE)
    outcome = execute(Archive(tables), url, request, heard, spark=spark)
    spark.stop()
    print(outcome.sent + outcome.found, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
