"""Job `retain`: drop days that are old enough, and sweep files that belong to no version any more.

Options: `retain.days`, how many days of messages, copies, events, their index and traces are kept;
`retain.derived_days`, the same of metrics, positions, dead-letter counts and differences; without them all is kept.
`retain.sweep_hours`, how long a file stays on the disk after the last commit that named it, so that nobody who reads it
loses it: 168 unless told.

What always holds: today counts as the first day; a day is dropped in one commit a table, and never partly; nothing that
a live version names is deleted, nor a file young enough to be in the middle of a commit.
"""

from __future__ import annotations

import time
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Final

from dmq.pipeline.jobs.job import JobContext, JobResult, Progress, count_option, optional_count
from dmq.pipeline.tables import (
    CONSUME_EVENT,
    COPY,
    DEAD_LETTER_DAILY,
    DEAD_LETTER_PART,
    KEY_DIRECTORY,
    KEY_INDEX,
    MESSAGE,
    METRICS_1M,
    POSITION_DAILY,
    RECONCILE_DIFF,
    ROLLUP_PART,
    TRACE,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = ["DERIVED", "RAW", "oldest_kept", "run"]

# The index goes before what it points to, and its directory before it.
RAW: Final = (KEY_DIRECTORY, KEY_INDEX, MESSAGE, COPY, CONSUME_EVENT, TRACE)
DERIVED: Final = (ROLLUP_PART, METRICS_1M, POSITION_DAILY, DEAD_LETTER_PART, DEAD_LETTER_DAILY, RECONCILE_DIFF)
_SWEEP_HOURS: Final = 168


def oldest_kept(now: datetime, days: int) -> date:
    """The first of the last `days` days."""
    return now.date() - timedelta(days=days - 1)


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Drop and sweep; Spark is not asked. See `dmq.pipeline.jobs.job`."""
    began = time.monotonic()
    limits = {name: optional_count(context, "retain.days") for name in RAW}
    limits |= {name: optional_count(context, "retain.derived_days") for name in DERIVED}
    sweep_hours = count_option(context, "retain.sweep_hours", _SWEEP_HOURS)
    dropped: set[date] = set()
    rows = swept = 0
    for name, days in limits.items():
        table = archive.table(name)
        if not table.exists():
            continue
        context.progress(Progress("retain", name, rows))
        if days is not None:
            old = [file for file in table.live_files() if file.dt < oldest_kept(context.now, days)]
            if old:
                table.replace({file.dt for file in old}, [])
                dropped |= {file.dt for file in old}
                rows += sum(file.rows for file in old)
        swept += len(table.vacuum(sweep_hours))
    notes = []
    if dropped:
        notes.append(f"{rows} rows of {len(dropped)} days were dropped")
    if swept:
        notes.append(f"{swept} files that belong to no version were deleted")
    return JobResult("retain", {}, frozenset(dropped), time.monotonic() - began, notes=tuple(notes))
