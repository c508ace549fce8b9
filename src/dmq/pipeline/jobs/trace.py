"""Job `trace`: the life of each message with each group, one row for both.

New rows are merged into those that are there (`merge`): work in proportion to what is new. The rows of a message are
together in one file. New messages become new files. An event about a message that is traced already takes the rows of
this message out of their file: the file is written anew without them, and they go, with the event, to the new rows.
Files are searched from the newest on, until every message is found. The driver does this with DuckDB, without Spark.

Where there is too much that is new, or no telling what is new, whole days of messages are made anew by Spark: those
with new messages, and those whose messages have new events. An event may come days after its message; it counts as long
as it comes within the lateness window.

What always holds: a message that no group has settled has one row, without a group and with the outcome `stored`; a row
is the same however often and in whatever portions the events came. `outcome_at` and `error_at` say which of two
portions has the last word. Rows and marks of the sources change in one commit. Of a message that was replayed on a
later day the later row has what came after.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dmq.errors import ArchiveConflict
from dmq.pipeline.archive.parquet import FILE_BYTES, write_days
from dmq.pipeline.jobs.changes import News, mark_of, news_of, portions, remember
from dmq.pipeline.jobs.frames import BLOOM, OFFERED_AT, SORT, frame, frame_of, staged
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.object_store import open_parquet, store_errors
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, SCHEMAS, TRACE
from dmq.records.layout import REPLAYED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["Merged", "merge", "run", "touched_days", "trace_rows"]

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


NEW_ROWS_MAX = 1_000_000  # of both sources at a time; one commit with more is for Spark
OLD_ROWS_MAX: Final = 5_000_000  # of files that are written anew
_MEMORY_BYTES: Final = 2 << 30

_FRESH: Final = f"""
    SELECT message_id, dt, arg_min(topic, stored_at) AS topic, arg_min(sent_at, stored_at) AS sent_at,
           min(stored_at) AS stored_at,
           (epoch_us(min(stored_at)) - epoch_us(arg_min({OFFERED_AT}, stored_at))) // 1000 AS store_latency_ms,
           bool_or(flags & {REPLAYED} <> 0) AS is_replayed
    FROM read_parquet($files, hive_partitioning = false) GROUP BY message_id, dt
"""
_NEW_EVENTS: Final = """
    SELECT message_id, "group", attempt, outcome, "at", error, broker, journal_offset, dt
    FROM read_parquet($files, hive_partitioning = false) WHERE message_id IS NOT NULL
"""
# The parts of a life are those that were traced before and that of the new events.
_ROWS: Final = """
    WITH known AS (
        SELECT message_id, dt, arg_min(topic, stored_at) AS topic, arg_min(sent_at, stored_at) AS sent_at,
               arg_min(store_latency_ms, stored_at) AS store_latency_ms, min(stored_at) AS stored_at
        FROM (SELECT message_id, dt, topic, sent_at, store_latency_ms, stored_at FROM fresh
              UNION ALL SELECT message_id, dt, topic, sent_at, store_latency_ms, stored_at FROM old)
        GROUP BY message_id, dt
    ), parts AS (
        SELECT k.message_id, k.dt, e."group",
               min(e."at") FILTER (WHERE outcome = 'delivered') AS delivered_at,
               min(e."at") FILTER (WHERE outcome = 'acked') AS acked_at, max(attempt) AS attempts,
               arg_max(outcome, row(e."at", attempt, outcome <> 'delivered', broker, journal_offset)) AS outcome,
               max(e."at") AS outcome_at,
               arg_max(error, row(e."at", attempt, broker, journal_offset))
                   FILTER (WHERE error <> '' AND outcome <> 'delivered') AS last_error,
               max(e."at") FILTER (WHERE error <> '' AND outcome <> 'delivered') AS error_at
        FROM known k JOIN events e ON k.message_id = e.message_id AND e.dt BETWEEN k.dt AND k.dt + $lateness
        GROUP BY k.message_id, k.dt, e."group"
        UNION ALL
        SELECT message_id, dt, "group", delivered_at, acked_at, attempts, outcome, outcome_at, last_error, error_at
        FROM old WHERE "group" IS NOT NULL
    ), lives AS (
        SELECT message_id, dt, "group", min(delivered_at) AS delivered_at, min(acked_at) AS acked_at,
               max(attempts) AS attempts,
               arg_max(outcome, row(outcome_at, attempts, outcome <> 'delivered')) AS outcome,
               max(outcome_at) AS outcome_at, arg_max(last_error, row(error_at, attempts)) AS last_error,
               max(error_at) AS error_at
        FROM parts GROUP BY message_id, dt, "group"
    )
    SELECT k.message_id, k.topic, l."group", k.sent_at, k.stored_at, l.delivered_at, l.acked_at, k.store_latency_ms,
           (epoch_us(l.delivered_at) - epoch_us(k.stored_at)) // 1000 AS delivery_latency_ms,
           (epoch_us(l.acked_at) - epoch_us(k.stored_at)) // 1000 AS ack_latency_ms,
           coalesce(l.attempts, 0) AS attempts, coalesce(l.outcome, 'stored') AS outcome, l.last_error, k.dt,
           l.outcome_at, l.error_at
    FROM known k LEFT JOIN lives l ON k.message_id = l.message_id AND k.dt = l.dt
"""


class Merged(NamedTuple):
    """What was written, and the days it is of."""

    rows: int
    dts: frozenset[date]


def merge(archive: Archive, messages: News, events: News, lateness: timedelta) -> Merged | None:
    """Merge news into `trace` and commit it; None if days have to be made anew: there is too much, or no telling.

    Where there is much, it is committed in portions, and some of it is done when the answer is None.

    Raises:
        ArchiveConflict: another job changed the table meanwhile; nothing was done.
    """
    trace = archive.table(TRACE)
    sources = {archive.table(MESSAGE): messages, archive.table(CONSUME_EVENT): events}
    if any(news.has_old or trace.version_of(mark_of(source)) is None for source, news in sources.items()):
        return None
    if sum(_rows(source, news) for source, news in sources.items()) > NEW_ROWS_MAX:
        return _merge_portions(archive, messages, events, lateness)
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        engine.reach(archive.uri)
        fresh = _read(engine, _FRESH, messages, MESSAGE)
        said = _read(engine, _NEW_EVENTS, events, CONSUME_EVENT)
        wanted = _traced_before(archive.table(MESSAGE), messages, fresh, said)
        days = set(messages.dts) | {late - timedelta(days=n) for late in events.dts for n in range(lateness.days + 1)}
        found = _having(trace, days, wanted)
        if sum(file.rows for file in found) > OLD_ROWS_MAX:
            return None
        kept, old = _divided(found, pa.concat_arrays([wanted, *fresh["message_id"].chunks]) if found else wanted)
        if pc.any(pc.and_(pc.is_valid(old["group"]), pc.is_null(old["outcome_at"]))).as_py():
            return None  # written before there was such a column
        for name, table in (("fresh", fresh), ("events", said), ("old", old)):
            engine.register(name, table)
        rows = engine.rows(_ROWS, {"lateness": lateness.days}).cast(SCHEMAS[TRACE])
    # Apart from what is kept, so that the next late events take a small file and not an ever larger one.
    written = [
        file
        for part in (*kept, rows)
        for file in write_days(part, trace.folder, sort_by=SORT[TRACE], bloom=BLOOM[TRACE])
    ]
    trace.edit(found, written, {mark_of(source): news.version for source, news in sources.items() if news.version >= 0})
    return Merged(rows.num_rows, frozenset(pc.unique(rows["dt"]).to_pylist()))


def _merge_portions(archive: Archive, messages: News, events: News, lateness: timedelta) -> Merged | None:
    """`merge` for many rows, some commits at a time; None if one commit has too many, or a portion cannot be merged.

    Messages come first: an event is about a message of the same commits, or of earlier ones.
    """
    message, event, trace = archive.table(MESSAGE), archive.table(CONSUME_EVENT), archive.table(TRACE)
    done = Merged(0, frozenset())
    for source, news in ((message, messages), (event, events)):
        for portion in portions(source, trace, news, NEW_ROWS_MAX):
            if _rows(source, portion) > NEW_ROWS_MAX:
                return None
            still = {table: News(trace.version_of(mark_of(table)) or 0, frozenset(), ()) for table in (message, event)}
            parts = still | {source: portion}
            merged = merge(archive, parts[message], parts[event], lateness)
            if merged is None:
                return None
            done = Merged(done.rows + merged.rows, done.dts | merged.dts)
    return done


def _rows(source: Table, news: News) -> int:
    if not news.files:
        return 0
    new = set(news.files)
    return sum(file.rows for file in source.live_files(news.dts) if file.uri in new)


def _read(engine: Engine, query: str, news: News, name: str) -> pa.Table:
    if news.files:
        return engine.rows(query, {"files": [*news.files]})
    # The columns of the answer, without rows.
    engine.register("nothing", SCHEMAS[name].empty_table())
    return engine.rows(query.replace("read_parquet($files, hive_partitioning = false)", "nothing"), {})


def _traced_before(message: Table, news: News, fresh: pa.Table, events: pa.Table) -> pa.Array:
    """The messages that may have rows already: those of events, and new ones that may be stored twice."""
    fresh_ids = fresh["message_id"].combine_chunks()
    late = events.filter(pc.invert(pc.is_in(events["message_id"], value_set=fresh_ids)))["message_id"]
    # A message is stored twice by a replay, or by two brokers after a failover.
    brokers = {name for bounds in message.bounds("broker", news.dts).values() for name in bounds}
    twice = fresh_ids if len(brokers) > 1 else fresh.filter(fresh["is_replayed"])["message_id"].combine_chunks()
    return pc.unique(pa.concat_arrays([late.combine_chunks(), twice]))


def _having(trace: Table, days: Iterable[date], wanted: pa.Array) -> list[LiveFile]:
    """The files with rows of some messages, searched from the newest on until all are found."""
    if not len(wanted):
        return []
    live = trace.live_files(days)
    newest = trace.bounds("stored_at", days)
    edges = trace.bounds("message_id", days)
    left, found, ids = wanted, [], set()
    for file in sorted(live, key=lambda file: (file.dt, str(newest.get(file.path, ("", ""))[1])), reverse=True):
        if not len(left):
            break
        with store_errors(file.uri), open_parquet(file.uri) as opened:
            there = opened.read(["message_id"], use_threads=False)["message_id"].combine_chunks()
        mine = left.filter(pc.is_in(left, value_set=there))
        if len(mine):
            found.append(file)
            ids.update(mine.to_pylist())
            left = left.filter(pc.invert(pc.is_in(left, value_set=mine)))
    # Where one file ends and another begins, a message may have rows in both.
    there_too = [file for file in live if file not in found and ids.intersection(edges.get(file.path, ()))]
    return found + there_too


def _divided(files: Sequence[LiveFile], ids: pa.Array) -> tuple[list[pa.Table], pa.Table]:
    """By file, the rows about other messages; and those of all files about these."""
    schema = SCHEMAS[TRACE]
    others, mine = [], [schema.empty_table()]
    for file in files:
        with store_errors(file.uri), open_parquet(file.uri) as opened:
            table = opened.read(use_threads=False)
        columns = [
            table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
            for field in schema
        ]
        rows = pa.table(columns, schema=schema)
        is_mine = pc.is_in(rows["message_id"], value_set=ids)
        mine.append(rows.filter(is_mine))
        others.append(rows.filter(pc.invert(is_mine)))
    return others, pa.concat_tables(mine)
