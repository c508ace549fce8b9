"""Rows of `rollup_part`: what messages and events add to the figures of their minutes.

DuckDB adds up what is new, in the driver; Spark adds up whole days, where nothing is known of them yet, or where old
rows and new ones lie in the same files. Both run the same queries. Kinds of rows:

- `in`: messages by minute, topic, app and latency, with their bytes;
- `out`: what groups settled, by minute, topic, group and outcome, and by latency where it was acked;
- `end`: how far a queue had been filled at the end of a minute;
- `position`: how far a group had settled a queue at the end of a minute, by first attempts;
- `retry`: a failure, or an event of a later attempt. These are kept one by one: what a later attempt means depends on
  whether there was a failure before.

A latency is rounded where it is over a second, to 9 binary digits: so many latencies, so few rows. The place of an
event's message is the one that was stored last before the event, on the same broker and in the same topic, within the
lateness window; a message has several if it was replayed or carried forward.

What always holds: in whatever portions messages and events come, and with DuckDB or Spark, the parts add up to the
same. An event belongs to its dt: one settled just before midnight and stored just after is of the first minute of the
new day. A clock that was wrong takes nothing to another day.

Where the messages lie that new events are about.

Most events come soon after their messages, so files of `message` are searched from the newest on, a few at first, until
every event has its message.

What always holds: only ids, places and times are read; rows of other messages are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dmq.pipeline.jobs.frames import OFFERED_AT, frame_of
from dmq.pipeline.lookup.engine import Bounds, Engine, quoted
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, ROLLUP_PART, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["MESSAGE_COLUMNS", "parts_of_days", "parts_of_news", "rounded"]

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
            found += [_whole(ask(query, message=_read(files))) for query in (_IN, _END)]
        for files in _pieces(events):
            engine.register("happened", ask(HAPPENED, event=_read(files)))
            keys = ask(f"SELECT DISTINCT {EVENT_KEY} FROM happened WHERE message_id IS NOT NULL")
            engine.register("places", find_places(engine, archive.table(MESSAGE), keys, lateness))
            settled = _SETTLED.replace("{days}", str(lateness.days))
            engine.register("settled", ask(settled, happened="happened", place="places"))
            found += [_whole(ask(query, settled="settled")) for query in (_OUT, _POSITION, _RETRY)]
    return pa.concat_tables(found)


def _read(files: Sequence[LiveFile]) -> str:
    from dmq.pipeline.lookup.engine import quoted

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
