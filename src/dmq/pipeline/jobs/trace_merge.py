"""New rows of `trace`, merged into those that are there: work in proportion to what is new.

The rows of a message are together in one file. New messages become new files. An event about a message that is traced
already takes the rows of this message out of their file: the file is written anew without them, and they go, with the
event, to the new rows. Files are searched from the newest on, until every message is found. The driver does this with
DuckDB, without Spark.

What always holds: merged in whatever portions, the rows are those of all events at once. `outcome_at` and `error_at`
say which of two portions has the last word. Rows and marks of the sources change in one commit. Of a message that was
replayed on a later day the later row has what came after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.jobs.changes import News, mark_of, portions
from dmq.pipeline.jobs.frames import OFFERED_AT
from dmq.pipeline.jobs.table_files import BLOOM, SORT
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.object_store import open_parquet, store_errors
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, SCHEMAS, TRACE
from dmq.records.layout import REPLAYED

if TYPE_CHECKING:
    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["Merged", "merge"]

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
_EVENTS: Final = """
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
        said = _read(engine, _EVENTS, events, CONSUME_EVENT)
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
