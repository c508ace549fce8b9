"""Job `rollup`: figures by minute into `metrics_1m`, and the position of each group at the end of each day.

Lag runs on from day to day, so with a day all later ones are made anew; a day begins with the end of the one before,
kept in `position_daily`. The views of the queries: {message} and {event} are rows of the days that are made anew, which
follow each other without a gap; {event} has failures of the days before, too. {place} is where messages of these days
and of the lateness window before lie. {opening} has the rows of `position_daily` at the end of the day before.

The lag of a queue is how far the group's position is behind the end of the queue, plus the messages that failed and
wait to be tried again. The position follows what the group settled last, so it goes back with a group that is put back;
a queue counts from the first message that the group settled in it. Each queue's change counts in the minute it happens
in, and the changes of all queues add up. When a topic is made again after it was deleted, what was left of the old one
no longer counts.

What always holds: made twice, or in other portions, the rows are the same; a day's rows of both tables come from the
same state of the archive. An event belongs to its dt: one settled just before midnight and stored just after is of the
first minute of the new day. A clock that was wrong takes nothing to another day.
"""

from __future__ import annotations

import time
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.pipeline.jobs.changes import news_of, remember
from dmq.pipeline.jobs.frames import OFFERED_AT, frame
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.jobs.staged_files import collected
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, METRICS_1M, POSITION_DAILY, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = ["IN_ROWS", "LAG", "OUT_ROWS", "POSITIONS", "SETTLED", "STEPS", "Rollup", "rollup_rows", "run"]


IN_ROWS: Final = f"""
    SELECT date_trunc('MINUTE', stored_at) AS minute, topic, app, CAST(NULL AS STRING) AS `group`,
           count(*) AS messages_in, sum(CAST(octet_length(body) AS BIGINT)) AS bytes_in,
           CAST(NULL AS BIGINT) AS messages_out, CAST(NULL AS BIGINT) AS retries, CAST(NULL AS BIGINT) AS dead,
           percentile(took_ms, 0.5) AS latency_p50_ms, percentile(took_ms, 0.99) AS latency_p99_ms,
           CAST(max(took_ms) AS DOUBLE) AS latency_max_ms, CAST(NULL AS BIGINT) AS lag, dt
    FROM (SELECT *, (unix_micros(stored_at) - unix_micros({OFFERED_AT})) DIV 1000 AS took_ms FROM {{message}})
    GROUP BY date_trunc('MINUTE', stored_at), topic, app, dt
"""

# What groups settled, with the place of the message; `was_moved`: it had failed before, so this came from a retry.
SETTLED: Final = """
    SELECT e.*, p.broker AS message_broker, p.topic_id, p.queue, p.queue_offset,
           (unix_micros(e.happened_at) - unix_micros(p.stored_at)) DIV 1000 AS took_ms,
           coalesce(e.happened_at > min(CASE WHEN e.outcome = 'failed' THEN e.happened_at END) OVER life, FALSE)
               AND e.attempt > 1 AS was_moved
    FROM (
        SELECT message_id, topic, `group`, attempt, outcome, dt,
               least(greatest(at, CAST(dt AS TIMESTAMP)),
                     CAST(date_add(dt, 1) AS TIMESTAMP) - INTERVAL '0.000001' SECOND) AS happened_at
        FROM {event} WHERE outcome <> 'delivered'
    ) e LEFT JOIN {place} p ON e.message_id = p.message_id
    WINDOW life AS (PARTITION BY e.message_id, e.`group`)
"""

OUT_ROWS: Final = """
    SELECT date_trunc('MINUTE', happened_at) AS minute, topic, `group`, dt,
           count_if(outcome = 'acked') AS messages_out, count_if(outcome = 'failed') AS retries,
           count_if(outcome IN ('dead', 'expired')) AS dead,
           percentile(took_ms, 0.5) FILTER (WHERE outcome = 'acked') AS latency_p50_ms,
           percentile(took_ms, 0.99) FILTER (WHERE outcome = 'acked') AS latency_p99_ms,
           CAST(max(took_ms) FILTER (WHERE outcome = 'acked') AS DOUBLE) AS latency_max_ms
    FROM {settled} WHERE dt >= :first
    GROUP BY date_trunc('MINUTE', happened_at), topic, `group`, dt
"""

# By queue and group, every minute in which anything changes, with how things stand after it.
STEPS: Final = """
    WITH moved AS (
        SELECT topic, `group`, message_broker AS broker, topic_id, queue, date_trunc('MINUTE', happened_at) AS minute,
               max(queue_offset) + 1 AS position, max(happened_at) AS settled_at
        FROM {settled} WHERE dt >= :first AND NOT was_moved AND queue IS NOT NULL
        GROUP BY ALL
    ), tried AS (
        SELECT topic, `group`, message_broker AS broker, topic_id, queue, failed_at,
               min(happened_at) FILTER (WHERE outcome <> 'failed' AND happened_at >= failed_at) AS over_at
        FROM (
            SELECT *, min(CASE WHEN outcome = 'failed' THEN happened_at END)
                OVER (PARTITION BY message_id, `group`) AS failed_at
            FROM {settled} WHERE queue IS NOT NULL
        ) WHERE failed_at IS NOT NULL
        GROUP BY message_id, topic, `group`, message_broker, topic_id, queue, failed_at
    ), waiting AS (
        SELECT topic, `group`, broker, topic_id, queue, date_trunc('MINUTE', failed_at) AS minute, 1 AS more
        FROM tried WHERE failed_at >= CAST(:first AS TIMESTAMP)
        UNION ALL
        SELECT topic, `group`, broker, topic_id, queue, date_trunc('MINUTE', over_at), -1
        FROM tried WHERE over_at >= CAST(:first AS TIMESTAMP)
    ), ends AS (
        SELECT topic, broker, topic_id, queue,
               greatest(date_trunc('MINUTE', stored_at), CAST(:first AS TIMESTAMP) - INTERVAL 1 MINUTE) AS minute,
               max(queue_offset) + 1 AS queue_end
        FROM {place} GROUP BY ALL
    ), incarnations AS (
        SELECT topic, broker, topic_id, min(minute) AS since FROM (
            SELECT topic, broker, topic_id, minute FROM ends
            UNION ALL
            SELECT topic, broker, topic_id, CAST(:first AS TIMESTAMP) - INTERVAL 1 MINUTE FROM {opening}
        ) GROUP BY topic, broker, topic_id
    ), closed AS (
        SELECT o.topic, o.broker, o.topic_id, min(n.since) AS closed_at
        FROM incarnations o JOIN incarnations n
            ON o.topic = n.topic AND o.broker = n.broker AND o.topic_id < n.topic_id
        GROUP BY o.topic, o.broker, o.topic_id
    ), pairs AS (
        SELECT topic, `group`, broker, topic_id, queue FROM {opening}
        UNION SELECT topic, `group`, broker, topic_id, queue FROM moved
        UNION SELECT topic, `group`, broker, topic_id, queue FROM waiting
    ), changes AS (
        SELECT topic, `group`, broker, topic_id, queue, CAST(:first AS TIMESTAMP) - INTERVAL 1 MINUTE AS minute,
               queue_end, position, retrying AS more, settled_at
        FROM {opening}
        UNION ALL
        SELECT topic, `group`, broker, topic_id, queue, minute, NULL, position, 0, settled_at FROM moved
        UNION ALL
        SELECT topic, `group`, broker, topic_id, queue, minute, NULL, NULL, more, NULL FROM waiting
        UNION ALL
        SELECT p.topic, p.`group`, p.broker, p.topic_id, p.queue, e.minute, e.queue_end, NULL, 0, NULL
        FROM pairs p JOIN ends e
            ON p.topic = e.topic AND p.broker = e.broker AND p.topic_id = e.topic_id AND p.queue = e.queue
        UNION ALL
        SELECT p.topic, p.`group`, p.broker, p.topic_id, p.queue, c.closed_at, NULL, NULL, 0, NULL
        FROM pairs p JOIN closed c ON p.topic = c.topic AND p.broker = c.broker AND p.topic_id = c.topic_id
    ), minutes AS (
        SELECT topic, `group`, broker, topic_id, queue, minute, max(queue_end) AS queue_end, max(position) AS position,
               sum(more) AS more, max(settled_at) AS settled_at
        FROM changes GROUP BY ALL
    )
    SELECT topic, `group`, broker, topic_id, queue, minute,
           max(queue_end) OVER sofar AS queue_end, last_value(position, TRUE) OVER sofar AS position,
           greatest(sum(more) OVER sofar, 0) AS retrying, max(settled_at) OVER sofar AS settled_at,
           coalesce(minute >= closed_at, FALSE) AS is_closed
    FROM minutes LEFT JOIN closed USING (topic, broker, topic_id)
    WINDOW sofar AS (PARTITION BY topic, `group`, broker, topic_id, queue ORDER BY minute
                     ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""

LAG: Final = """
    WITH standing AS (
        SELECT *, CASE WHEN is_closed THEN 0
                       ELSE coalesce(greatest(queue_end - position, 0), 0) + retrying END AS behind
        FROM {steps}
    ), changes AS (
        SELECT topic, `group`, minute, settled_at,
               behind - coalesce(lag(behind) OVER (PARTITION BY topic, `group`, broker, topic_id, queue
                                                   ORDER BY minute), 0) AS more
        FROM standing
    ), sums AS (
        SELECT topic, `group`, minute, sum(more) AS more, max(settled_at) AS settled_at
        FROM changes GROUP BY topic, `group`, minute
    )
    SELECT topic, `group`, minute, sum(more) OVER sofar AS lag, max(settled_at) OVER sofar AS settled_at
    FROM sums
    WINDOW sofar AS (PARTITION BY topic, `group` ORDER BY minute ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""

# How things stand at the end of each of the days in {days}.
POSITIONS: Final = """
    SELECT s.topic, s.`group`, s.broker, s.topic_id, s.queue, max_by(s.queue_end, s.minute) AS queue_end,
           max_by(s.position, s.minute) AS position, max_by(s.retrying, s.minute) AS retrying,
           max_by(s.settled_at, s.minute) AS settled_at, d.dt
    FROM {steps} s JOIN {days} d ON s.minute < CAST(date_add(d.dt, 1) AS TIMESTAMP)
    GROUP BY s.topic, s.`group`, s.broker, s.topic_id, s.queue, d.dt
    HAVING NOT max_by(s.is_closed, s.minute)
"""


_IDLE_DAYS: Final = 30  # a group that settled nothing of a topic for this time is taken for gone, and no longer shown
_KEPT_DAYS: Final = 60  # its positions are kept this long, should it come back
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
        context.progress(Progress("rollup", "adding up", 0, 0, total=len(dts), unit="days"))
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
        before=frame(spark, message, window, _PLACE),
        opening=frame(spark, position, earlier[-1:]),
    )


def _days(first: date, last: date) -> list[date]:
    """Every day from one to another, both included."""
    return [first + timedelta(days=n) for n in range((last - first).days + 1)]
