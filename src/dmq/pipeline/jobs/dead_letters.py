"""Job `dead-letters`: how many messages died each day, why, and examples, into `dead_letter_daily`.

New letters are added up into rows of `dead_letter_part`, and the rows of their days are made of the parts. Of new
letters the driver looks up whether they are known. The first time, and where the log does not say which rows are new,
Spark counts whole days anew.

What always holds: a message that died counts once for each group and attempt, on the day it was first stored as a dead
letter; letters that the broker wrote again, to outlive the segment they lay in, are not new ones as long as the first
lies within the lateness window. In whatever portions letters come, the parts add up to the same; parts and the mark
that says what they are made of change in one commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dmq.model import DLQ_PREFIX
from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.jobs.changes import keep_up, news_of, remember, source_of, undisturbed
from dmq.pipeline.jobs.frames import SORT, frame_of, staged
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.lookup.engine import Bounds, Engine, quoted
from dmq.pipeline.tables import COPY, DEAD_LETTER_DAILY, DEAD_LETTER_PART, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["ERRORS_MAX", "ERROR_CHARS_MAX", "SAMPLES_MAX", "daily_rows", "letters_of_days", "letters_of_news", "run"]

NEW_ROWS_MAX = 20_000_000  # that the driver looks at; more is for Spark


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Add up what is new, and make the days of it; see `dmq.pipeline.jobs.job`."""
    began = time.monotonic()
    undisturbed(lambda: add_parts(spark, archive, context))
    part, daily = archive.table(DEAD_LETTER_PART), archive.table(DEAD_LETTER_DAILY)
    news = news_of(part, daily, everything=flag_option(context, EVERYTHING))
    # A day that lost its only letter to one that was stored before has no parts any more.
    dts = news.dts | (frozenset(daily.days()) & frozenset(archive.table(COPY).days()) - frozenset(part.days()))
    rows = 0
    if dts:
        made = daily_rows(part.live_files(dts))
        daily.replace(dts, write_days(made, daily.folder, sort_by=SORT[DEAD_LETTER_DAILY]))
        rows = made.num_rows
        remember(daily, {part: news})
    else:
        keep_up(daily, {part: news})
    return JobResult("dead-letters", {DEAD_LETTER_DAILY: rows}, dts, time.monotonic() - began)


def add_parts(spark: SparkSession, archive: Archive, context: JobContext) -> None:
    """Bring `dead_letter_part` up to `copy`.

    Raises:
        ArchiveConflict: another run did that meanwhile.
    """
    part, lateness = archive.table(DEAD_LETTER_PART), lateness_of(context)
    source = source_of(archive.table(COPY), part, everything=flag_option(context, EVERYTHING))
    new = source.new_files()
    if not new:
        keep_up(part, {source.table: source.news})
        return
    if source.is_told and sum(file.rows for file in new) <= NEW_ROWS_MAX:
        rows = letters_of_news(source.table, new, lateness)
        if rows is not None:
            part.edit([], write_days(rows, part.folder, sort_by=SORT[DEAD_LETTER_PART]), source.marks, source.after)
            return
    # A letter may be one that was first stored on a day before, or stored again on one after: those count anew.
    stored = {file.dt for file in source.live}
    dts = sorted(dt for dt in stored if any(abs(dt - new_dt) <= lateness for new_dt in source.news.dts))
    removes = part.live_files(dts)
    made, written = letters_of_days(spark, source.live, lateness), []
    for index, dt in enumerate(dts):
        context.progress(Progress("dead-letters", f"counting {dt}", 0, index, total=len(dts), unit="days"))
        written += staged(part, made(dt))
    part.edit(removes, written, source.marks, source.after)


ERRORS_MAX: Final = 5
SAMPLES_MAX: Final = 5
ERROR_CHARS_MAX: Final = 300
_MEMORY_BYTES: Final = 1 << 30
_TOPICS: Final = (DLQ_PREFIX, f"{DLQ_PREFIX}\U0010ffff")
_COLUMNS: Final = (
    *("message_id", "broker", "journal_offset", "topic", "origin_topic", "group", "attempt"),
    *("reason", "error", "stored_at", "dt"),
)

# Queries in words that DuckDB and Spark both know, but for the quotes.
_LETTERS: Final = f"""
    SELECT message_id, "group", attempt, broker, journal_offset, stored_at, dt, origin_topic AS topic,
           coalesce(reason, '') AS reason,
           left(trim(split_part(coalesce(error, ''), chr(10), 1)), {ERROR_CHARS_MAX}) AS error
    FROM (
        SELECT *, row_number() OVER (PARTITION BY message_id, "group", attempt
                                     ORDER BY stored_at, broker, journal_offset) AS number
        FROM {{copy}} WHERE substr(topic, 1, 5) = '%DLQ%'
    ) AS copies WHERE number = 1
"""
_PARTS: Final = f"""
    SELECT topic, "group", reason, error, count(*) AS "count", CAST(NULL AS VARCHAR(30)) AS message_id,
           CAST(NULL AS TIMESTAMP) AS stored_at, dt
    FROM {{letter}} GROUP BY topic, "group", reason, error, dt
    UNION ALL
    SELECT topic, "group", reason, CAST(NULL AS VARCHAR(30)), 0, message_id, stored_at, dt
    FROM (
        SELECT *, row_number() OVER (PARTITION BY dt, topic, "group", reason ORDER BY stored_at, message_id) AS number
        FROM {{letter}}
    ) AS numbered WHERE number <= {SAMPLES_MAX}
"""
# Letters of new ones that exist already.
_KNOWN: Final = """
    SELECT message_id, "group", attempt, stored_at, broker, journal_offset, dt
    FROM read_parquet([{files}], hive_partitioning = false)
    WHERE substr(topic, 1, 5) = '%DLQ%' AND message_id IN (SELECT message_id FROM letters)
"""
_SAME: Final = """
    l.message_id = k.message_id AND l."group" IS NOT DISTINCT FROM k."group"
    AND l.attempt IS NOT DISTINCT FROM k.attempt AND k.dt BETWEEN l.dt - {days} AND l.dt + {days}
"""
_DAILY: Final = f"""
    WITH sums AS (
        SELECT dt, topic, "group", reason, error, sum("count") AS n FROM part GROUP BY ALL
    ), errors AS (
        SELECT *, row_number() OVER (PARTITION BY dt, topic, "group", reason ORDER BY n DESC, error) AS number
        FROM sums WHERE error <> ''
    ), top AS (
        SELECT dt, topic, "group", reason,
               list({{'error': error, 'count': CAST(n AS BIGINT)}} ORDER BY number) AS top_errors
        FROM errors WHERE number <= {ERRORS_MAX} GROUP BY ALL
    ), samples AS (
        SELECT dt, topic, "group", reason, list(message_id ORDER BY number) AS samples FROM (
            SELECT *, row_number() OVER (PARTITION BY dt, topic, "group", reason
                                         ORDER BY stored_at, message_id) AS number
            FROM part WHERE message_id IS NOT NULL
        ) WHERE number <= {SAMPLES_MAX} GROUP BY ALL
    ), totals AS (
        SELECT dt, topic, "group", reason, sum(n) AS n FROM sums GROUP BY ALL
    )
    SELECT t.topic, t."group", t.reason, CAST(t.n AS BIGINT) AS "count", coalesce(e.top_errors, []) AS top_errors,
           coalesce(s.samples, []) AS samples, t.dt
    FROM totals t
    LEFT JOIN top e ON {{e}}
    LEFT JOIN samples s ON {{s}}
"""


def _of_one(other: str) -> str:
    names = ("topic", '"group"')
    equal = " AND ".join(f"t.{name} IS NOT DISTINCT FROM {other}.{name}" for name in names)
    return f"t.dt = {other}.dt AND t.reason = {other}.reason AND {equal}"


def letters_of_news(copy: Table, new: Sequence[LiveFile], lateness: timedelta) -> pa.Table | None:
    """What new files of `copy` add; None if a letter came before one that was counted, so that days count anew."""
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        engine.reach(copy.uri)
        letters = engine.rows(_LETTERS.format(copy=f"read_parquet([{_listed(new)}], hive_partitioning = false)"), {})
        days = {dt + timedelta(days=n) for dt in _dts(letters) for n in range(-lateness.days, lateness.days + 1)}
        paths = {file.path for file in new}
        old = [file for file in copy.live_files(days, {"topic": _TOPICS}) if file.path not in paths]
        engine.register("letters", letters)
        if old and len(letters):
            engine.register("known", engine.rows(_KNOWN.format(files=_listed(old)), {}))
            same = _SAME.format(days=lateness.days)
            earlier = "(k.stored_at, k.broker, k.journal_offset) > (l.stored_at, l.broker, l.journal_offset)"
            if engine.rows(f"SELECT 1 AS one FROM letters l JOIN known k ON {same} AND {earlier} LIMIT 1", {}).num_rows:
                return None
            letters = engine.rows(f"SELECT l.* FROM letters l ANTI JOIN known k ON {same}", {})
            engine.register("letters", letters)
        return engine.rows(_PARTS.format(letter="letters"), {}).cast(SCHEMAS[DEAD_LETTER_PART])


def letters_of_days(
    spark: SparkSession, copies: Sequence[LiveFile], lateness: timedelta
) -> Callable[[date], DataFrame]:
    """What all letters of a day add up to.

    Parameters:
        copies: the files of the table; those of the lateness window before the days are looked at, too.
    """
    from pyspark.sql.functions import col

    def ask(query: str, **frames: Any) -> DataFrame:
        return spark.sql(query.replace('"', "`"), **frames)

    def day(dt: date) -> DataFrame:
        files = [file.uri for file in copies if dt - lateness <= file.dt <= dt]
        letters = ask(_LETTERS, copy=frame_of(spark, COPY, files, _COLUMNS)).where(col("dt") == dt)
        return ask(_PARTS, letter=letters)

    return day


def daily_rows(parts: Sequence[LiveFile]) -> pa.Table:
    """The rows of `dead_letter_daily` of some days, made of their parts."""
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        engine.reach(*(file.uri for file in parts))
        rows = SCHEMAS[DEAD_LETTER_PART].empty_table()
        if parts:
            rows = engine.rows(f"SELECT * FROM read_parquet([{_listed(parts)}], hive_partitioning = false)", {})
        engine.register("part", rows)
        query = _DAILY.replace("{e}", _of_one("e")).replace("{s}", _of_one("s"))
        return engine.rows(query, {}).cast(SCHEMAS[DEAD_LETTER_DAILY])


def _listed(files: Sequence[LiveFile]) -> str:
    return ", ".join(quoted(file.uri) for file in files)


def _dts(rows: pa.Table) -> list[date]:
    found: list[date] = pc.unique(rows["dt"]).to_pylist()
    return found
