"""Job `rollup`: figures by minute into `metrics_1m`, and the position of each group at the end of each day.

What is new is added up into rows of `rollup_part`, and from the first minute that it touches on, both tables are made
of the parts (`day_metrics`). Lag runs on from minute to minute and from day to day, so later rows change, too; but
parts are small, and messages and events are read once. DuckDB adds up what is new, in the driver; Spark adds up whole
days, the first time, and where the log does not say which rows are new. Both run the same queries. Kinds of parts:

- `in`: messages by minute, topic, app and latency, with their bytes;
- `out`: what groups settled, by minute, topic, group and outcome, and by latency where it was acked;
- `end`: how far a queue had been filled at the end of a minute;
- `position`: how far a group had settled a queue at the end of a minute, by first attempts;
- `retry`: a failure, or an event of a later attempt. These are kept one by one: what a later attempt means depends on
  whether there was a failure before.

A latency is rounded where it is over a second, to 9 binary digits: so many latencies, so few rows. The place of an
event's message is the one that was stored last before the event, on the same broker and in the same topic, within the
lateness window; a message has several if it was replayed or carried forward. Most events come soon after their
messages, so files of `message` are searched from the newest on, a few at first, until every event has its message.

What always holds: parts and the marks that say what they are made of change in one commit, so that nothing is counted
twice or left out, wherever a run is killed. Metrics and positions follow from the parts alone; their mark is the last
that changes, and until then they are made again. Positions of a day come before its metrics. In whatever portions
messages and events come, and with DuckDB or Spark, the parts add up to the same. An event belongs to its dt: one
settled just before midnight and stored just after is of the first minute of the new day. A clock that was wrong takes
nothing to another day. Of messages that events are about only ids, places and times are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.jobs.changes import News, keep_up, mark_of, news_of, source_of, undisturbed
from dmq.pipeline.jobs.day_metrics import day_metrics
from dmq.pipeline.jobs.frames import OFFERED_AT, SORT, frame_of, staged
from dmq.pipeline.jobs.job import EVERYTHING, JobContext, JobResult, Progress, flag_option, lateness_of
from dmq.pipeline.lookup.engine import Bounds, Engine, quoted
from dmq.pipeline.object_store import open_parquet, store_errors
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, METRICS_1M, POSITION_DAILY, ROLLUP_PART, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["MESSAGE_COLUMNS", "add_parts", "make_metrics", "parts_of_days", "parts_of_news", "rounded", "run"]

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


PIECE_ROWS: Final = 1_000_000  # of new events that are joined with their messages at once
_MEMORY_BYTES: Final = 2 << 30
_EXACT_BITS: Final = 10  # a latency below 2 ** 10 ms is kept as it is
_TIME_BITS: Final = 42  # more than a century
MESSAGE_COLUMNS: Final = (
    *("topic", "app", "broker", "topic_id", "queue", "queue_offset", "flags"),
    *("sent_at", "received_at", "stored_at", "body", "dt"),
)
_EVENT_COLUMNS: Final = ("message_id", "topic", "group", "attempt", "outcome", "at", "broker", "dt")


def rounded(value: str) -> str:
    """A latency as SQL rounds it: to the middle of a step, which is a 512th of it at most."""
    steps = " ".join(f"WHEN abs({value}) < {2 << bit} THEN {2 << bit >> _EXACT_BITS}" for bit in _coarse_bits())
    step = f"(CASE {steps} ELSE {2 << _TIME_BITS >> _EXACT_BITS} END)"
    middle = f"CAST(floor(abs({value}) / {step}) AS BIGINT) * {step} + CAST(floor({step} / 2) AS BIGINT)"
    return (
        f"CASE WHEN abs({value}) < {1 << _EXACT_BITS} THEN {value} WHEN {value} < 0 THEN -({middle}) ELSE {middle} END"
    )


def _coarse_bits() -> range:
    return range(_EXACT_BITS, _TIME_BITS)


# Queries in words that DuckDB and Spark both know, but for the names in _SPARK.
_IN: Final = f"""
    SELECT 'in' AS kind, date_trunc('minute', stored_at) AS minute, topic, app, {rounded("took")} AS took_ms, dt,
           count(*) AS "count", CAST(sum(octet_length(body)) AS BIGINT) AS bytes, max(took) AS took_max_ms
    FROM (SELECT *, CAST(floor((epoch_us(stored_at) - epoch_us({OFFERED_AT})) / 1000) AS BIGINT) AS took
          FROM {{message}}) AS messages
    GROUP BY ALL
"""
_END: Final = """
    SELECT 'end' AS kind, date_trunc('minute', stored_at) AS minute, topic, broker, topic_id, queue, dt,
           max(queue_offset) + 1 AS place
    FROM {message} GROUP BY ALL
"""
HAPPENED: Final = """
    SELECT message_id, topic, "group", attempt, outcome, broker, dt,
           least(greatest("at", CAST(dt AS TIMESTAMP)),
                 CAST(dt AS TIMESTAMP) + INTERVAL 1 DAY - INTERVAL 1 MICROSECOND) AS happened_at
    FROM {event} WHERE outcome <> 'delivered'
"""
_SETTLED: Final = """
    SELECT e.*, p.topic_id, p.queue, p.queue_offset,
           CAST(floor((epoch_us(e.happened_at) - epoch_us(p.stored_at)) / 1000) AS BIGINT) AS took
    FROM {happened} e LEFT JOIN (
        SELECT *, lead(stored_at) OVER life AS until, lag(stored_at) OVER life IS NULL AS is_first
        FROM {place} WINDOW life AS (PARTITION BY message_id, broker, topic ORDER BY stored_at, queue_offset)
    ) p ON e.message_id = p.message_id AND e.broker = p.broker AND e.topic = p.topic
        AND (p.until IS NULL OR e.happened_at < p.until) AND (p.is_first OR e.happened_at >= p.stored_at)
        AND p.dt >= e.dt - INTERVAL {days} DAY
"""
_OUT: Final = f"""
    SELECT 'out' AS kind, date_trunc('minute', happened_at) AS minute, topic, "group", outcome, dt,
           CASE WHEN outcome = 'acked' THEN {rounded("took")} END AS took_ms,
           count(*) AS "count", max(CASE WHEN outcome = 'acked' THEN took END) AS took_max_ms
    FROM {{settled}} GROUP BY ALL
"""
_POSITION: Final = """
    SELECT 'position' AS kind, date_trunc('minute', happened_at) AS minute, topic, "group", broker, topic_id, queue, dt,
           max(queue_offset) + 1 AS place, max(happened_at) AS "at"
    FROM {settled} WHERE attempt <= 1 AND queue IS NOT NULL GROUP BY ALL
"""
_RETRY: Final = """
    SELECT 'retry' AS kind, date_trunc('minute', happened_at) AS minute, topic, "group", broker, topic_id, queue,
           queue_offset AS place, message_id, attempt, outcome, happened_at AS "at", dt
    FROM {settled} WHERE (outcome = 'failed' OR attempt > 1) AND queue IS NOT NULL
"""
_SPARK: Final = {'"': "`", "epoch_us(": "unix_micros("}


# --- what is new ------------------------------------------------------------------------------------------------------


def parts_of_news(
    archive: Archive, messages: Sequence[LiveFile], events: Sequence[LiveFile], lateness: timedelta
) -> pa.Table:
    """What new files of `message` and `consume_event` add."""
    found = [SCHEMAS[ROLLUP_PART].empty_table()]
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        engine.reach(archive.uri)

        def ask(query: str, **tables: str) -> pa.Table:
            return engine.rows(query.format(**tables), {})

        for files in _pieces(messages):
            found += [_whole(ask(query, message=_query_of(files))) for query in (_IN, _END)]
        for files in _pieces(events):
            engine.register("happened", ask(HAPPENED, event=_query_of(files)))
            keys = ask(f"SELECT DISTINCT {EVENT_KEY} FROM happened WHERE message_id IS NOT NULL")
            engine.register("places", find_places(engine, archive.table(MESSAGE), keys, lateness))
            settled = _SETTLED.replace("{days}", str(lateness.days))
            engine.register("settled", ask(settled, happened="happened", place="places"))
            found += [_whole(ask(query, settled="settled")) for query in (_OUT, _POSITION, _RETRY)]
    return pa.concat_tables(found)


def _query_of(files: Sequence[LiveFile]) -> str:
    return f"read_parquet([{', '.join(quoted(file.uri) for file in files)}], hive_partitioning = false)"


def _pieces(files: Sequence[LiveFile]) -> Iterator[list[LiveFile]]:
    """Files in order, so many at a time that they have `PIECE_ROWS` rows or so."""
    piece: list[LiveFile] = []
    for file in files:
        if piece and sum(one.rows for one in piece) + file.rows > PIECE_ROWS:
            yield piece
            piece = []
        piece.append(file)
    if piece:
        yield piece


def _whole(rows: pa.Table) -> pa.Table:
    """With all columns of the table."""
    schema = SCHEMAS[ROLLUP_PART]
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


# --- whole days -------------------------------------------------------------------------------------------------------


def parts_of_days(
    spark: SparkSession, messages: Sequence[LiveFile], events: Sequence[LiveFile], lateness: timedelta
) -> Callable[[date], DataFrame]:
    """What all rows of a day add up to, for the days of some files.

    Parameters:
        messages, events: the files of the table; messages of the lateness window before the days are looked at, too.
    """

    def ask(query: str, **frames: Any) -> DataFrame:
        for ours, theirs in _SPARK.items():
            query = query.replace(ours, theirs)
        return spark.sql(query, **frames)

    def of(name: str, files: Sequence[LiveFile], days: Mapping[date, None], columns: Sequence[str]) -> DataFrame:
        return frame_of(spark, name, [file.uri for file in files if file.dt in days], columns)

    def day(dt: date) -> DataFrame:
        here = {dt: None}
        window = {dt - timedelta(days=n): None for n in range(lateness.days + 1)}
        stored = of(MESSAGE, messages, here, MESSAGE_COLUMNS)
        happened = ask(HAPPENED, event=of(CONSUME_EVENT, events, here, _EVENT_COLUMNS))
        place = of(MESSAGE, messages, window, PLACE)
        settled = ask(_SETTLED.replace("{days}", str(lateness.days)), happened=happened, place=place).localCheckpoint()
        parts = [ask(query, message=stored) for query in (_IN, _END)]
        parts += [ask(query, settled=settled) for query in (_OUT, _POSITION, _RETRY)]
        whole, *others = parts
        for other in others:
            whole = whole.unionByName(other, allowMissingColumns=True)
        return whole

    return day


PLACE: Final = ("message_id", "broker", "topic", "topic_id", "queue", "queue_offset", "stored_at", "dt")
EVENT_KEY: Final = "message_id, broker, topic, happened_at, dt"
_FILES_FIRST: Final = 4
_FOUND: Final = """
    SELECT {columns} FROM read_parquet([{files}], hive_partitioning = false)
    WHERE message_id IN (SELECT message_id FROM wanted) AND {bounds}
"""
# An event whose message was stored later has met a wrong clock, or a replay; the message may lie further back.
_LEFT: Final = """
    SELECT w.* FROM wanted w ANTI JOIN found f
        ON w.message_id = f.message_id AND w.broker = f.broker AND w.topic = f.topic AND f.stored_at <= w.happened_at
"""


def find_places(engine: Engine, message: Table, events: pa.Table, lateness: timedelta) -> pa.Table:
    """The rows of messages that some events are about, in the columns `PLACE`.

    Parameters:
        events: with the columns of `EVENT_KEY`.
    """
    columns = pa.schema([message.schema.field(name) for name in PLACE])
    found = [columns.empty_table()]
    left = events
    days = {dt - timedelta(days=n) for dt in pc.unique(events["dt"]).to_pylist() for n in range(lateness.days + 1)}
    for files in _newest_first(message, days):
        if not len(left):
            break
        engine.register("wanted", left)
        ids = pc.min_max(left["message_id"])
        query = _FOUND.format(
            columns=", ".join(PLACE),
            files=", ".join(quoted(file.uri) for file in files),
            bounds=f"message_id BETWEEN {quoted(ids['min'].as_py())} AND {quoted(ids['max'].as_py())}",
        )
        found.append(engine.rows(query, {}).cast(columns))
        engine.register("found", found[-1])
        left = engine.rows(_LEFT, {})
    return pa.concat_tables(found)


def _newest_first(message: Table, days: set[date]) -> Iterator[Sequence[LiveFile]]:
    """Files of some days, twice as many each time."""
    newest = message.bounds("stored_at", days)
    files = sorted(
        message.live_files(days), key=lambda file: (file.dt, str(newest.get(file.path, ("", ""))[1])), reverse=True
    )
    start, count = 0, _FILES_FIRST
    while start < len(files):
        yield files[start : start + count]
        start, count = start + count, 2 * count
