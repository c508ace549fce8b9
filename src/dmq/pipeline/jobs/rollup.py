"""Job `rollup`: figures by minute into `metrics_1m`, and where each group stood at the end of each day.

Lag runs on from day to day, so with a day all later ones are made anew; what a day begins with is the end of the one
before, kept in `position_daily`.

What always holds: made twice, or in other portions, the rows are the same; a day's rows of both tables come from the
same state of the archive.
"""

from __future__ import annotations

import time
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.pipeline.jobs.job import JobContext, JobResult, Progress
from dmq.pipeline.jobs.news import news_of, remember
from dmq.pipeline.jobs.options import EVERYTHING, flag_option, lateness_of
from dmq.pipeline.jobs.reading import frame
from dmq.pipeline.jobs.rollup_sql import IN_ROWS, LAG, OUT_ROWS, POSITIONS, SETTLED, STEPS
from dmq.pipeline.jobs.staging import collected
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, METRICS_1M, POSITION_DAILY, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.store import Archive

__all__ = ["Rollup", "rollup_rows", "run"]

_IDLE_DAYS: Final = 30  # a group that settled nothing of a topic for so long is taken for gone, and no longer shown
_KEPT_DAYS: Final = 60  # so long its positions are kept, should it come back
_PLACE: Final = ("message_id", "broker", "topic", "topic_id", "queue", "queue_offset", "stored_at")


class Rollup(NamedTuple):
    """The rows of both tables for some days."""

    metrics: DataFrame
    positions: DataFrame


def rollup_rows(
    spark: SparkSession, dts: list[date], messages: DataFrame, events: DataFrame, before: DataFrame, opening: DataFrame
) -> Rollup:
    """The rows about some days that follow each other.

    Parameters:
        messages: of these days.
        events: of these days, and failures of the lateness window before.
        before: messages of the lateness window before.
        opening: rows of `position_daily` of the last day before.
    """
    first = {"first": dts[0]}
    place = messages.select(*_PLACE).unionByName(before.select(*_PLACE))
    known = spark.sql(
        "SELECT * FROM {opening} WHERE settled_at >= CAST(:first AS TIMESTAMP) - make_interval(0, 0, 0, :kept)",
        args={**first, "kept": _KEPT_DAYS},
        opening=opening,
    )
    # Worked out once, and from then on a plan of one step: as parts of each other they take longer to plan than to run.
    settled = spark.sql(SETTLED, event=events, place=_first_stored(spark, place)).localCheckpoint()
    steps = spark.sql(STEPS, args=first, settled=settled, place=place, opening=known).localCheckpoint()
    metrics = spark.sql(
        """
        SELECT minute, topic, CAST(NULL AS STRING) AS app, `group`, CAST(NULL AS BIGINT) AS messages_in,
               CAST(NULL AS BIGINT) AS bytes_in, coalesce(messages_out, 0) AS messages_out,
               coalesce(retries, 0) AS retries, coalesce(dead, 0) AS dead,
               latency_p50_ms, latency_p99_ms, latency_max_ms, lag, CAST(minute AS DATE) AS dt
        FROM (
            SELECT *, coalesce(last_value(known_lag, TRUE) OVER (PARTITION BY topic, `group` ORDER BY minute), 0) AS lag
            FROM (SELECT topic, `group`, minute, lag AS known_lag, settled_at FROM {lag}) FULL JOIN {out}
                USING (topic, `group`, minute)
        )
        WHERE minute >= CAST(:first AS TIMESTAMP)
          AND (messages_out IS NOT NULL OR settled_at >= date_trunc('DAY', minute) - make_interval(0, 0, 0, :idle))
        """,
        args={**first, "idle": _IDLE_DAYS},
        lag=spark.sql(LAG, steps=steps),
        out=spark.sql(OUT_ROWS, args=first, settled=settled).drop("dt"),
    )
    came = spark.sql(IN_ROWS, message=messages)
    rows = came.unionByName(metrics).select(*(f"`{name}`" for name in SCHEMAS[METRICS_1M].names))
    days = spark.sql("SELECT explode(sequence(:first, :last, INTERVAL 1 DAY)) AS dt", args={**first, "last": dts[-1]})
    return Rollup(rows, spark.sql(POSITIONS, steps=steps, days=days))


def _first_stored(spark: SparkSession, place: DataFrame) -> DataFrame:
    """One row for each message, also where two brokers have it."""
    return spark.sql(
        "SELECT message_id, min_by(struct(broker, topic_id, queue, queue_offset, stored_at), stored_at) AS at_first "
        "FROM {place} GROUP BY message_id",
        place=place,
    ).select("message_id", "at_first.*")


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Make the days anew that something came to, and those after; see `dmq.pipeline.jobs.job`."""
    began, everything = time.monotonic(), flag_option(context, EVERYTHING)
    message, event = archive.table(MESSAGE), archive.table(CONSUME_EVENT)
    metrics, position = archive.table(METRICS_1M), archive.table(POSITION_DAILY)
    news = {
        message: news_of(message, metrics, everything=everything),
        event: news_of(event, metrics, everything=everything),
    }
    stored = set(message.days()) | set(event.days())
    changed = news[message].dts | news[event].dts
    dts: list[date] = []
    rows = {METRICS_1M: 0, POSITION_DAILY: 0}
    if changed:
        dts = _days(min(changed), max(stored))
        context.progress(Progress("rollup", "adding up", 0, 0, len(dts), "days"))
        made = _made(spark, archive, dts, context)
        # Positions first: if the second commit does not come, the same news is found again, and both are made anew.
        for table, frame_made in ((position, made.positions), (metrics, made.metrics)):
            files = collected(table, frame_made)
            table.replace(dts, files)
            rows[table.name] = sum(file.rows for file in files)
    remember(metrics, news)
    return JobResult("rollup", rows, frozenset(dts), time.monotonic() - began)


def _made(spark: SparkSession, archive: Archive, dts: list[date], context: JobContext) -> Rollup:
    message, event, position = archive.table(MESSAGE), archive.table(CONSUME_EVENT), archive.table(POSITION_DAILY)
    window = _days(dts[0] - lateness_of(context), dts[0] - timedelta(days=1))
    events = frame(spark, event, dts).unionByName(frame(spark, event, window).where("outcome = 'failed'"))
    earlier = [dt for dt in position.days() if dt < dts[0]]
    return rollup_rows(
        spark,
        dts,
        frame(spark, message, dts),
        events,
        frame(spark, message, window),
        frame(spark, position, earlier[-1:]),
    )


def _days(first: date, last: date) -> list[date]:
    """Every day from one to another, both included."""
    return [first + timedelta(days=n) for n in range((last - first).days + 1)]
