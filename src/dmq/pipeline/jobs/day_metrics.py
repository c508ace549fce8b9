"""The rows of `metrics_1m` and `position_daily` of a day, made of parts.

The tables of the queries: `part` has the parts of the day, `before` those of the lateness window before that still
matter, `opening` the rows of `position_daily` at the end of the day before.

The lag of a queue is how far the group's position is behind the end of the queue, plus the messages that failed and
wait to be tried again. The position follows what the group settled last, so it goes back with a group that is put back;
a queue counts from the first message that the group settled in it. Each queue's change counts in the minute it happens
in, and the changes of all queues add up. When a topic is made again after it was deleted, what was left of the old one
no longer counts. An event of an attempt above 1 after a failure came from the retry topic: it does not move the
position, and the first one that is not a failure ends the waiting.

What always holds: the same parts give the same rows, however they are divided into rows and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from dmq.pipeline.lookup.engine import Bounds, Engine, quoted
from dmq.pipeline.tables import METRICS_1M, POSITION_DAILY, ROLLUP_PART, SCHEMAS

if TYPE_CHECKING:
    from dmq.pipeline.archive.table_store import LiveFile

__all__ = ["DayMetrics", "day_metrics"]

_MEMORY_BYTES: Final = 2 << 30
_IDLE_DAYS: Final = 30  # a group that settled nothing of a topic for this time is taken for gone, and no longer shown
_KEPT_DAYS: Final = 60  # its positions are kept this long, should it come back

# Ranks as in other percentiles: between the two values around it, in proportion. A rounded latency may be above the
# greatest.
_LATENCY: Final = """
    WITH steps AS (
        SELECT minute, topic, {who}, took_ms, sum("count") AS n, max(took_max_ms) AS took_max_ms
        FROM part WHERE kind = '{kind}' AND took_ms IS NOT NULL AND minute >= $since GROUP BY ALL
    ), ranks AS (
        SELECT *, sum(n) OVER (key ORDER BY took_ms) AS upto, sum(n) OVER key - 1 AS last FROM steps
        WINDOW key AS (PARTITION BY minute, topic, {who})
    )
    SELECT minute, topic, {who}, CAST(max(took_max_ms) AS DOUBLE) AS latency_max_ms,
           {p50} AS latency_p50_ms, {p99} AS latency_p99_ms
    FROM ranks GROUP BY minute, topic, {who}
"""
_RANK: Final = """least(max(took_max_ms),
    min(took_ms) FILTER (WHERE upto > floor({p} * last)) + any_value({p} * last - floor({p} * last))
        * (min(took_ms) FILTER (WHERE upto > ceil({p} * last)) - min(took_ms) FILTER (WHERE upto > floor({p} * last))))
"""


def _latency(kind: str, who: str) -> str:
    ranks = {f"p{percent}": _RANK.format(p=f"(CAST({percent} AS DOUBLE) / 100)") for percent in (50, 99)}
    return _LATENCY.format(kind=kind, who=who, **ranks)


_IN_ROWS: Final = f"""
    WITH latency AS ({_latency("in", "app")}), sums AS (
        SELECT minute, topic, app, sum("count") AS messages_in, sum(bytes) AS bytes_in
        FROM part WHERE kind = 'in' AND minute >= $since GROUP BY ALL
    )
    SELECT s.minute, s.topic, s.app, messages_in, bytes_in, latency_p50_ms, latency_p99_ms, latency_max_ms
    FROM sums s LEFT JOIN latency l
        ON s.minute = l.minute AND s.topic = l.topic AND s.app IS NOT DISTINCT FROM l.app
"""
_OUT_ROWS: Final = f"""
    WITH latency AS ({_latency("out", '"group"')}), sums AS (
        SELECT minute, topic, "group", sum("count") FILTER (WHERE outcome = 'acked') AS messages_out,
               sum("count") FILTER (WHERE outcome = 'failed') AS retries,
               sum("count") FILTER (WHERE outcome IN ('dead', 'expired')) AS dead
        FROM part WHERE kind = 'out' AND minute >= $since GROUP BY ALL
    )
    SELECT s.minute, s.topic, s."group", coalesce(messages_out, 0) AS messages_out, coalesce(retries, 0) AS retries,
           coalesce(dead, 0) AS dead, latency_p50_ms, latency_p99_ms, latency_max_ms
    FROM sums s LEFT JOIN latency l
        ON s.minute = l.minute AND s.topic IS NOT DISTINCT FROM l.topic AND s."group" = l."group"
"""
# By queue and group, every minute in which anything changes, with how things stand after it. What was before the day
# counts in the minute before its first.
_STEPS: Final = """
    WITH known AS (
        SELECT * FROM opening WHERE settled_at >= $first - to_days($kept)
    ), retries AS (
        SELECT *, min("at") FILTER (WHERE outcome = 'failed') OVER (PARTITION BY message_id, "group") AS failed_at
        FROM (SELECT * FROM part WHERE kind = 'retry' UNION ALL BY NAME SELECT * FROM before WHERE kind = 'retry')
    ), moved AS (
        SELECT topic, "group", broker, topic_id, queue, minute, max(place) AS position, max("at") AS settled_at
        FROM (
            SELECT topic, "group", broker, topic_id, queue, minute, place, "at" FROM part WHERE kind = 'position'
            UNION ALL
            SELECT topic, "group", broker, topic_id, queue, minute, place + 1, "at" FROM retries
            WHERE dt = CAST($first AS DATE) AND attempt > 1 AND NOT coalesce("at" > failed_at, FALSE)
        ) GROUP BY ALL
    ), tried AS (
        SELECT topic, "group", broker, topic_id, queue, failed_at,
               min("at") FILTER (WHERE outcome <> 'failed' AND attempt > 1 AND "at" >= failed_at) AS over_at
        FROM retries WHERE failed_at IS NOT NULL
        GROUP BY message_id, topic, "group", broker, topic_id, queue, failed_at
    ), waiting AS (
        SELECT topic, "group", broker, topic_id, queue, date_trunc('minute', failed_at) AS minute, 1 AS more
        FROM tried WHERE failed_at >= $first
        UNION ALL
        SELECT topic, "group", broker, topic_id, queue, date_trunc('minute', over_at), -1
        FROM tried WHERE over_at >= $first
    ), ends AS (
        SELECT topic, broker, topic_id, queue, minute, max(place) AS queue_end
        FROM (SELECT topic, broker, topic_id, queue, minute, place FROM part WHERE kind = 'end'
              UNION ALL
              SELECT topic, broker, topic_id, queue, $first - INTERVAL 1 MINUTE, place FROM before WHERE kind = 'end')
        GROUP BY ALL
    ), incarnations AS (
        SELECT topic, broker, topic_id, min(minute) AS since FROM (
            SELECT topic, broker, topic_id, minute FROM ends
            UNION ALL
            SELECT topic, broker, topic_id, $first - INTERVAL 1 MINUTE FROM known
        ) GROUP BY topic, broker, topic_id
    ), closed AS (
        SELECT o.topic, o.broker, o.topic_id, min(n.since) AS closed_at
        FROM incarnations o JOIN incarnations n
            ON o.topic = n.topic AND o.broker = n.broker AND o.topic_id < n.topic_id
        GROUP BY o.topic, o.broker, o.topic_id
    ), pairs AS (
        SELECT topic, "group", broker, topic_id, queue FROM known
        UNION SELECT topic, "group", broker, topic_id, queue FROM moved
        UNION SELECT topic, "group", broker, topic_id, queue FROM waiting
    ), changes AS (
        SELECT topic, "group", broker, topic_id, queue, $first - INTERVAL 1 MINUTE AS minute,
               queue_end, position, retrying AS more, settled_at
        FROM known
        UNION ALL
        SELECT topic, "group", broker, topic_id, queue, minute, NULL, position, 0, settled_at FROM moved
        UNION ALL
        SELECT topic, "group", broker, topic_id, queue, minute, NULL, NULL, more, NULL FROM waiting
        UNION ALL
        SELECT p.topic, p."group", p.broker, p.topic_id, p.queue, e.minute, e.queue_end, NULL, 0, NULL
        FROM pairs p JOIN ends e
            ON p.topic = e.topic AND p.broker = e.broker AND p.topic_id = e.topic_id AND p.queue = e.queue
        UNION ALL
        SELECT p.topic, p."group", p.broker, p.topic_id, p.queue, c.closed_at, NULL, NULL, 0, NULL
        FROM pairs p JOIN closed c ON p.topic = c.topic AND p.broker = c.broker AND p.topic_id = c.topic_id
    ), minutes AS (
        SELECT topic, "group", broker, topic_id, queue, minute, max(queue_end) AS queue_end, max(position) AS position,
               sum(more) AS more, max(settled_at) AS settled_at
        FROM changes GROUP BY ALL
    )
    SELECT topic, "group", broker, topic_id, queue, minute,
           max(queue_end) OVER sofar AS queue_end, last_value(position IGNORE NULLS) OVER sofar AS position,
           greatest(sum(more) OVER sofar, 0) AS retrying, max(settled_at) OVER sofar AS settled_at,
           coalesce(minute >= closed_at, FALSE) AS is_closed
    FROM minutes LEFT JOIN closed USING (topic, broker, topic_id)
    WINDOW sofar AS (PARTITION BY topic, "group", broker, topic_id, queue ORDER BY minute
                     ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""
# A row for every minute in which something came to the topic, also to a queue that the group has nothing of yet: so it
# does not depend on what the group does later.
_LAG: Final = """
    WITH standing AS (
        SELECT *, CASE WHEN is_closed THEN 0
                       ELSE coalesce(greatest(queue_end - position, 0), 0) + retrying END AS behind
        FROM steps
    ), changes AS (
        SELECT topic, "group", minute, settled_at,
               behind - coalesce(lag(behind) OVER (PARTITION BY topic, "group", broker, topic_id, queue
                                                   ORDER BY minute), 0) AS more
        FROM standing
    ), came AS (
        SELECT topic, "group", minute, 0 AS more, NULL AS settled_at
        FROM (SELECT DISTINCT topic, "group" FROM steps)
        JOIN (SELECT DISTINCT topic, minute FROM part WHERE kind = 'end') USING (topic)
    ), sums AS (
        SELECT topic, "group", minute, sum(more) AS more, max(settled_at) AS settled_at
        FROM (FROM changes UNION ALL BY NAME FROM came) GROUP BY topic, "group", minute
    )
    SELECT topic, "group", minute, sum(more) OVER sofar AS known_lag, max(settled_at) OVER sofar AS settled_at
    FROM sums
    WINDOW sofar AS (PARTITION BY topic, "group" ORDER BY minute ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
"""
_METRICS: Final = """
    SELECT minute, topic, app, NULL AS "group", messages_in, bytes_in, NULL AS messages_out, NULL AS retries,
           NULL AS dead, latency_p50_ms, latency_p99_ms, latency_max_ms, NULL AS lag, CAST($first AS DATE) AS dt
    FROM came
    UNION ALL
    SELECT minute, topic, NULL, "group", NULL, NULL, coalesce(messages_out, 0), coalesce(retries, 0),
           coalesce(dead, 0), latency_p50_ms, latency_p99_ms, latency_max_ms, lag, CAST($first AS DATE)
    FROM (
        SELECT *, coalesce(last_value(known_lag IGNORE NULLS)
                           OVER (PARTITION BY topic, "group" ORDER BY minute), 0) AS lag
        FROM lags FULL JOIN went USING (topic, "group", minute)
    )
    WHERE minute >= $since AND (messages_out IS NOT NULL OR settled_at >= $first - to_days($idle))
"""
# How things stand at the end of the day.
_POSITIONS: Final = """
    SELECT topic, "group", broker, topic_id, queue, arg_max(queue_end, minute) AS queue_end,
           arg_max(position, minute) AS position, arg_max(retrying, minute) AS retrying,
           arg_max(settled_at, minute) AS settled_at, CAST($first AS DATE) AS dt
    FROM steps GROUP BY topic, "group", broker, topic_id, queue HAVING NOT arg_max(is_closed, minute)
"""
# Of the days before, where each queue ended, and what failed and may still be tried.
_BEFORE: Final = """
    SELECT kind, NULL AS message_id, topic, NULL AS "group", broker, topic_id, queue, max(place) AS place,
           NULL AS attempt, NULL AS outcome, NULL AS "at", NULL AS minute, NULL AS dt
    FROM {files} WHERE kind = 'end' GROUP BY ALL
    UNION ALL
    SELECT kind, message_id, topic, "group", broker, topic_id, queue, place, attempt, outcome, "at", minute, dt
    FROM {files} WHERE kind = 'retry'
"""
# Percentiles need the minutes that are made, lag the whole day.
_PART: Final = """
    SELECT * FROM {files} WHERE kind IN ('end', 'position', 'retry') OR minute >= $since
"""


class DayMetrics(NamedTuple):
    """The rows of both tables."""

    metrics: pa.Table
    positions: pa.Table


def day_metrics(
    dt: date, since: datetime, parts: Sequence[LiveFile], before: Sequence[LiveFile], opening: pa.Table
) -> DayMetrics:
    """Positions at the end of a day, and the metrics of its minutes from one on.

    Parameters:
        parts: the files of the day.
        before: those of the lateness window before.
        opening: rows of `position_daily` of the last day before.
    """
    first = datetime.combine(dt, time(), UTC)
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        engine.reach(*(file.uri for file in (*parts, *before)))
        engine.register("opening", opening)
        engine.register("part", engine.rows(_PART.format(files=_read(engine, parts)), {"since": since}))
        engine.register("before", engine.rows(_BEFORE.format(files=_read(engine, before)), {}))
        engine.register("steps", engine.rows(_STEPS, {"first": first, "kept": _KEPT_DAYS}))
        engine.register("lags", engine.rows(_LAG, {}))
        engine.register("came", engine.rows(_IN_ROWS, {"since": since}))
        engine.register("went", engine.rows(_OUT_ROWS, {"since": since}))
        metrics = engine.rows(_METRICS, {"first": first, "since": since, "idle": _IDLE_DAYS})
        positions = engine.rows(_POSITIONS, {"first": first})
    return DayMetrics(metrics.cast(SCHEMAS[METRICS_1M]), positions.cast(SCHEMAS[POSITION_DAILY]))


def _read(engine: Engine, files: Sequence[LiveFile]) -> str:
    if files:
        return f"read_parquet([{', '.join(quoted(file.uri) for file in files)}], hive_partitioning = false)"
    engine.register("nothing", SCHEMAS[ROLLUP_PART].empty_table())
    return "nothing"
