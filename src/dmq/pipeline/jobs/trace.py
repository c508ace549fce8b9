"""Job `trace`: the life of each message with each group, one row for both.

What is new is merged into the rows that are there (`trace_merge`). Where there is too much of it, or no telling what is
new, whole days of messages are made anew by Spark: those with new messages, and those whose messages have new events.
An event may come days after its message; it counts as long as it comes within the lateness window.

What always holds: a message that no group has settled has one row, without a group and with the outcome `stored`; a row
is the same however often and in whatever portions the events came.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

from dmq.errors import ArchiveConflict
from dmq.pipeline.archive.parquet import FILE_BYTES
from dmq.pipeline.jobs.changes import News, news_of, remember
from dmq.pipeline.jobs.frames import OFFERED_AT, frame, frame_of
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.jobs.table_files import staged
from dmq.pipeline.jobs.trace_merge import Merged, merge
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, TRACE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = ["run", "touched_days", "trace_rows"]

_COLUMNS: Final = ("message_id", "topic", "sent_at", "received_at", "stored_at", "flags", "dt")  # of messages
_ROW_BYTES: Final = 60  # of a trace row in a file, about
# The same message on two brokers, after a failover, is one: the first that was stored.
_MESSAGES: Final = f"""
    SELECT message_id, min_by(topic, stored_at) AS topic, min_by(sent_at, stored_at) AS sent_at,
           min_by({OFFERED_AT}, stored_at) AS offered_at, min(stored_at) AS stored_at, min_by(dt, stored_at) AS dt
    FROM {{message}} GROUP BY message_id
"""
# Later is what happened later; of one moment, what settles after what delivers.
_EVENTS: Final = """
    SELECT message_id, `group`,
           min(at) FILTER (WHERE outcome = 'delivered') AS delivered_at,
           min(at) FILTER (WHERE outcome = 'acked') AS acked_at,
           CAST(max(attempt) AS INT) AS attempts,
           max_by(outcome, struct(at, attempt, outcome <> 'delivered', broker, journal_offset)) AS outcome,
           max_by(error, struct(at, attempt, broker, journal_offset))
               FILTER (WHERE error <> '' AND outcome <> 'delivered') AS last_error,
           max(at) AS outcome_at, max(at) FILTER (WHERE error <> '' AND outcome <> 'delivered') AS error_at
    FROM {event} WHERE message_id IS NOT NULL GROUP BY message_id, `group`
"""
_TRACE: Final = f"""
    SELECT m.message_id, m.topic, e.`group`, m.sent_at, m.stored_at, e.delivered_at, e.acked_at,
           (unix_micros(m.stored_at) - unix_micros(m.offered_at)) DIV 1000 AS store_latency_ms,
           (unix_micros(e.delivered_at) - unix_micros(m.stored_at)) DIV 1000 AS delivery_latency_ms,
           (unix_micros(e.acked_at) - unix_micros(m.stored_at)) DIV 1000 AS ack_latency_ms,
           coalesce(e.attempts, 0) AS attempts, coalesce(e.outcome, 'stored') AS outcome, e.last_error, m.dt,
           e.outcome_at, e.error_at
    FROM ({_MESSAGES}) m LEFT JOIN ({_EVENTS}) e ON m.message_id = e.message_id
"""


def trace_rows(spark: SparkSession, messages: DataFrame, events: DataFrame) -> DataFrame:
    """The rows of `trace` about some messages, from all events about them."""
    return spark.sql(_TRACE, message=messages, event=events)


def touched_days(spark: SparkSession, messages: DataFrame, events: DataFrame) -> set[date]:
    """The days of the messages that some events are about."""
    found = spark.sql(
        "SELECT DISTINCT dt FROM {message} WHERE message_id IN (SELECT message_id FROM {event})",
        message=messages,
        event=events,
    )
    return {row.dt for row in found.collect()}


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Make the days anew that something came to; see `dmq.pipeline.jobs.job`."""
    began, everything = time.monotonic(), flag_option(context, EVERYTHING)
    message, event, trace = archive.table(MESSAGE), archive.table(CONSUME_EVENT), archive.table(TRACE)
    # Events first: a message is committed before what is said of it, so that none is left without its message.
    said = news_of(event, trace, everything=everything)
    news = {message: news_of(message, trace, everything=everything), event: said}
    merged = None if everything else _merged(archive, news[message], said, lateness_of(context))
    if merged is not None:
        return JobResult("trace", {TRACE: merged.rows}, merged.dts, time.monotonic() - began)
    stored = set(message.days())
    lateness = lateness_of(context)
    dts = set(news[message].dts)
    dts |= _touched(spark, archive, news[event], stored - dts, lateness=lateness)
    written = 0
    for index, dt in enumerate(sorted(dts)):
        context.progress(Progress("trace", f"joining {dt}", written, index, total=len(dts), unit="days"))
        rows = trace_rows(
            spark, frame(spark, message, [dt], _COLUMNS), frame(spark, event, _window(event.days(), dt, lateness))
        )
        files = staged(trace, rows, _files(archive, dt))
        trace.replace([dt], files)
        written += sum(file.rows for file in files)
    remember(trace, news)
    return JobResult("trace", {TRACE: written}, frozenset(dts), time.monotonic() - began)


def _merged(archive: Archive, messages: News, events: News, lateness: timedelta) -> Merged | None:
    if not (messages.files or events.files):
        return None
    with suppress(ArchiveConflict):  # then the days are made anew
        return merge(archive, messages, events, lateness)
    return None


def _touched(spark: SparkSession, archive: Archive, news: News, stored: set[date], lateness: timedelta) -> set[date]:
    """Of the days of messages, those that new events are about."""
    if not news.files:
        return set()
    within = {dt for dt in stored if any(dt <= late <= dt + lateness for late in news.dts)}
    if not within:
        return set()
    events = frame_of(spark, CONSUME_EVENT, news.files).select("message_id")
    return touched_days(spark, frame(spark, archive.table(MESSAGE), within, ["message_id", "dt"]), events)


def _window(days: Iterable[date], dt: date, lateness: timedelta) -> list[date]:
    """The days whose events may be about messages of a day."""
    return [day for day in days if dt <= day <= dt + lateness]


def _files(archive: Archive, dt: date) -> int:
    events = sum(file.rows for file in archive.table(CONSUME_EVENT).live_files(dt))
    messages = sum(file.rows for file in archive.table(MESSAGE).live_files(dt))
    return max(1, max(events, messages) * _ROW_BYTES // FILE_BYTES)
