"""Job `rollup`: figures by minute into `metrics_1m`, and the position of each group at the end of each day.

What is new is added up into rows of `rollup_part` (`parts.rollup_parts`), and from the first minute that it touches on,
both tables are made of the parts (`parts.day_metrics`). Lag runs on from minute to minute and from day to day, so later
rows change, too; but parts are small, and messages and events are read once. The first time, and where the log does not
say which rows are new, Spark adds up whole days anew.

What always holds: parts and the marks that say what they are made of change in one commit, so that nothing is counted
twice or left out, wherever a run is killed. Metrics and positions follow from the parts alone; their mark is the last
that changes, and until then they are made again. Positions of a day come before its metrics.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.jobs.changes import News, keep_up, mark_of, news_of, source_of, undisturbed
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.jobs.parts.day_metrics import day_metrics
from dmq.pipeline.jobs.parts.rollup_parts import parts_of_days, parts_of_news
from dmq.pipeline.jobs.table_files import SORT, staged
from dmq.pipeline.object_store import open_parquet, store_errors
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, METRICS_1M, POSITION_DAILY, ROLLUP_PART, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["add_parts", "make_metrics", "run"]

NEW_ROWS_MAX = 20_000_000  # of both sources that the driver adds up; more is for Spark


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Add up what is new, and make what it touches; see `dmq.pipeline.jobs.job`."""
    began = time.monotonic()
    rebuilt = undisturbed(lambda: add_parts(spark, archive, context))
    rows, dts = undisturbed(lambda: make_metrics(archive, context, rebuilt))
    return JobResult("rollup", rows, dts, time.monotonic() - began)


# --- parts ------------------------------------------------------------------------------------------------------------


def add_parts(spark: SparkSession, archive: Archive, context: JobContext) -> frozenset[date]:
    """Bring `rollup_part` up to its sources; returns the days that were added up anew.

    Raises:
        ArchiveConflict: another run did that meanwhile.
    """
    part, lateness = archive.table(ROLLUP_PART), lateness_of(context)
    everything = flag_option(context, EVERYTHING)
    # Events first: a message is committed before what is said of it, so that none is left without its message.
    events, messages = (
        source_of(archive.table(name), part, everything=everything) for name in (CONSUME_EVENT, MESSAGE)
    )
    new = events.new_files() + messages.new_files()
    if not new:
        keep_up(part, {each.table: each.news for each in (events, messages)})
        return frozenset()
    marks, after = messages.marks | events.marks, messages.after | events.after
    if events.is_told and messages.is_told and sum(file.rows for file in new) <= NEW_ROWS_MAX:
        context.progress(Progress("rollup", "adding up", 0, 0, total=len(new), unit="files"))
        rows = parts_of_news(archive, messages.new_files(), events.new_files(), lateness)
        part.edit([], write_days(rows, part.folder, sort_by=SORT[ROLLUP_PART]), marks, after)
        return frozenset()
    dts = sorted(events.news.dts | messages.news.dts)
    made = parts_of_days(spark, messages.live, events.live, lateness)
    removes = part.live_files(dts)
    written = []
    for index, dt in enumerate(dts):
        context.progress(Progress("rollup", f"adding up {dt}", 0, index, total=len(dts), unit="days"))
        written += staged(part, made(dt))
    part.edit(removes, written, marks, after)
    return frozenset(dts)


# --- what is made of them ---------------------------------------------------------------------------------------------


def make_metrics(
    archive: Archive, context: JobContext, rebuilt: frozenset[date] = frozenset()
) -> tuple[Mapping[str, int], frozenset[date]]:
    """Bring metrics and positions up to the parts, day by day; returns rows by table, and the days.

    Parameters:
        rebuilt: days that are made from their first minute on, whatever is new.
    """
    part, metrics, position = (archive.table(name) for name in (ROLLUP_PART, METRICS_1M, POSITION_DAILY))
    rows = {METRICS_1M: 0, POSITION_DAILY: 0}
    news = news_of(part, metrics, everything=flag_option(context, EVERYTHING))
    if not news.dts:
        keep_up(metrics, {part: news})
        return rows, frozenset()
    first, lateness = min(news.dts), lateness_of(context)
    live = part.live_files()
    is_whole = first in rebuilt or metrics.version_of(mark_of(part)) is None
    since = _midnight(first) if is_whole else _first_minute(part, news, first)
    days = _days(first, max(file.dt for file in live))
    opening = _read(position, [dt for dt in position.days() if dt < first][-1:])
    for index, dt in enumerate(days):
        context.progress(Progress("rollup", f"making {dt}", sum(rows.values()), index, total=len(days), unit="days"))
        begin = since if dt == first else _midnight(dt)
        made = day_metrics(
            dt,
            begin,
            [file for file in live if file.dt == dt],
            [file for file in live if dt - lateness <= file.dt < dt],
            opening=opening,
        )
        opening = made.positions
        position.replace([dt], write_days(made.positions, position.folder, sort_by=SORT[POSITION_DAILY]))
        _put(metrics, begin, made.metrics, {mark_of(part): news.version} if dt == days[-1] else {})
        rows[METRICS_1M] += made.metrics.num_rows
        rows[POSITION_DAILY] += made.positions.num_rows
    return rows, frozenset(days)


def _first_minute(part: Table, news: News, dt: date) -> datetime:
    """The first minute of a day that anything is new of."""
    bounds = part.bounds("minute", [dt])
    new = set(news.files)
    least = [bounds.get(file.path, (None, None))[0] for file in part.live_files(dt) if file.uri in new]
    return _midnight(dt) if not least or None in least else min(least)


def _put(metrics: Table, since: datetime, rows: pa.Table, marks: Mapping[str, int]) -> None:
    """Put rows in the place of those of the day from a minute on."""
    dt = since.date()
    bounds = metrics.bounds("minute", [dt])
    removes = [
        file
        for file in metrics.live_files(dt)
        if (latest := bounds.get(file.path, (None, None))[1]) is None or latest >= since
    ]
    kept = _rows_of(METRICS_1M, removes)
    kept = kept.filter(pc.less(kept["minute"], pa.scalar(since, kept.schema.field("minute").type)))
    order = SORT[METRICS_1M]
    written = [file for some in (kept, rows) for file in write_days(some, metrics.folder, sort_by=order)]
    metrics.edit(removes, written, marks)


def _read(table: Table, dts: Sequence[date]) -> pa.Table:
    return _rows_of(table.name, table.live_files(dts) if dts else [])


def _rows_of(name: str, files: Sequence[LiveFile]) -> pa.Table:
    schema = SCHEMAS[name]
    found = [schema.empty_table()]
    for file in files:
        with store_errors(file.uri), open_parquet(file.uri) as opened:
            found.append(opened.read(use_threads=False).select(schema.names).cast(schema))
    return pa.concat_tables(found)


def _midnight(dt: date) -> datetime:
    return datetime(dt.year, dt.month, dt.day, tzinfo=UTC)


def _days(first: date, last: date) -> list[date]:
    """Every day from one to another, both included."""
    return [first + timedelta(days=n) for n in range((last - first).days + 1)]
