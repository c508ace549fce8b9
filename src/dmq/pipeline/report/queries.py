"""The questions a report asks of the archive's tables, in DuckDB's SQL. $since is included, $until is not.

What always holds: a question with its values written out (`command`) gives the same rows by `dmq archive query`.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from dmq.pipeline.lookup.engine import quoted

__all__ = [
    "DEAD_LETTERS",
    "DIFFERENCES",
    "GROUPS",
    "HOURS",
    "KEYS",
    "LAG",
    "LATENCY",
    "OUTCOMES",
    "REASONS",
    "RETRIES",
    "SAMPLED_KEYS",
    "SLOWEST",
    "THROUGHPUT",
    "TOPICS",
    "TOTALS",
    "Question",
    "command",
]


class Question(NamedTuple):
    """One question, under the name of the part of the report that it answers."""

    name: str
    sql: str


_WITHIN: Final = "minute >= $since AND minute < $until"
_STORED: Final = "stored_at >= $since AND stored_at < $until"
_STEP: Final = "time_bucket(to_seconds($step), minute, $since) AS starts_at"
_ROWS_MAX: Final = 1000  # more than any of them has
_VALUE: Final = re.compile(r"\$([a-z]+)")

TOTALS: Final = Question(
    "totals",
    f"""
    SELECT count(DISTINCT topic) FILTER ("group" IS NULL) AS topics,
           count(DISTINCT (topic, "group")) FILTER ("group" IS NOT NULL) AS groups,
           coalesce(sum(messages_in), 0)::BIGINT AS messages, coalesce(sum(messages_out), 0)::BIGINT AS acked,
           coalesce(sum(retries), 0)::BIGINT AS retries, coalesce(sum(dead), 0)::BIGINT AS dead
    FROM metrics_1m WHERE {_WITHIN}
    """,
)

TOPICS: Final = Question(
    "topics",
    f"""
    WITH minutes AS (
        SELECT topic, minute, sum(messages_in) AS messages, sum(bytes_in) AS bytes,
               median(latency_p50_ms) AS p50, max(latency_p99_ms) AS p99, max(latency_max_ms) AS most
        FROM metrics_1m WHERE {_WITHIN} AND "group" IS NULL GROUP BY topic, minute
    ), apps AS (
        SELECT topic, list(DISTINCT app ORDER BY app) AS apps
        FROM metrics_1m WHERE {_WITHIN} AND "group" IS NULL AND app IS NOT NULL GROUP BY topic
    )
    SELECT topic, sum(messages)::BIGINT AS messages, sum(bytes)::BIGINT AS bytes, any_value(apps) AS apps,
           max(messages)::BIGINT AS peak_minute, median(p50) AS p50_ms, max(p99) AS p99_ms, max(most) AS max_ms
    FROM minutes LEFT JOIN apps USING (topic) GROUP BY topic ORDER BY messages DESC, topic LIMIT $limit
    """,
)

GROUPS: Final = Question(
    "groups",
    f"""
    SELECT topic, "group", sum(messages_out)::BIGINT AS acked, sum(retries)::BIGINT AS retries,
           sum(dead)::BIGINT AS dead, median(latency_p50_ms) AS p50_ms, max(latency_p99_ms) AS p99_ms,
           max(latency_max_ms) AS max_ms, arg_max(lag, minute) AS lag, max(lag) AS lag_max
    FROM metrics_1m WHERE {_WITHIN} AND "group" IS NOT NULL
    GROUP BY topic, "group" ORDER BY acked DESC, topic, "group" LIMIT $limit
    """,
)

# Charts over time: a step counts what its minutes have, and lag as it is at its end.
THROUGHPUT: Final = Question(
    "throughput",
    f"""
    SELECT {_STEP},
           coalesce(sum(messages_in), 0)::DOUBLE AS messages_in, coalesce(sum(messages_out), 0)::DOUBLE AS messages_out,
           coalesce(sum(retries), 0)::DOUBLE AS retries, coalesce(sum(dead), 0)::DOUBLE AS dead
    FROM metrics_1m WHERE {_WITHIN} GROUP BY ALL ORDER BY starts_at
    """,
)


def _lines(name: str, value: str) -> Question:
    """A line for each of the groups with the highest values."""
    return Question(
        name,
        f"""
    WITH steps AS (
        SELECT {_STEP}, topic, "group", {value}::DOUBLE AS value
        FROM metrics_1m WHERE {_WITHIN} AND "group" IS NOT NULL GROUP BY ALL HAVING value IS NOT NULL
    ), highest AS (
        SELECT topic, "group", max(value) AS most FROM steps
        GROUP BY ALL ORDER BY most DESC, topic, "group" LIMIT $limit
    )
    SELECT starts_at, topic, "group", value FROM steps JOIN highest USING (topic, "group")
    ORDER BY most DESC, topic, "group", starts_at
    """,
    )


LAG: Final = _lines("lag", "arg_max(lag, minute)")
LATENCY: Final = _lines("latency", "max(latency_p99_ms)")

RETRIES: Final = Question(
    "retries",
    f"""
    SELECT topic, "group", sum(retries)::BIGINT AS retries, sum(dead)::BIGINT AS dead
    FROM metrics_1m WHERE {_WITHIN} AND "group" IS NOT NULL
    GROUP BY ALL HAVING sum(retries) > 0 ORDER BY retries DESC, topic, "group" LIMIT $limit
    """,
)

HOURS: Final = Question(
    "hours",
    f"""
    SELECT date_part('hour', minute)::INT AS hour, sum(messages_in)::BIGINT AS messages
    FROM metrics_1m WHERE {_WITHIN} AND messages_in IS NOT NULL GROUP BY ALL ORDER BY hour
    """,
)

OUTCOMES: Final = Question(
    "outcomes",
    f"""
    SELECT topic, "group", outcome, count(*) AS count FROM trace WHERE {_STORED}
    GROUP BY topic, "group", outcome ORDER BY topic, "group" NULLS LAST, count DESC, outcome
    """,
)

SLOWEST: Final = Question(
    "slowest",
    f"""
    SELECT message_id, topic, "group", stored_at, delivery_latency_ms AS delivery_ms, ack_latency_ms AS ack_ms, attempts
    FROM trace WHERE {_STORED} AND ack_latency_ms IS NOT NULL
    ORDER BY ack_latency_ms DESC, message_id, "group" LIMIT $limit
    """,
)

KEYS: Final = Question(
    "keys",
    f"""
    SELECT topic, key, count(*) AS messages FROM message WHERE {_STORED} AND key IS NOT NULL
    GROUP BY ALL HAVING count(*) > 1 ORDER BY messages DESC, topic, key LIMIT $limit
    """,
)

# The same where counting every key would take too much memory: what is frequent is frequent in a sample, too.
SAMPLED_KEYS: Final = f"""
    WITH likely AS (
        SELECT topic, key FROM (
            SELECT topic, key FROM (SELECT topic, key FROM message WHERE {_STORED} AND key IS NOT NULL)
            USING SAMPLE {{percent}} PERCENT (system, 1)
        ) GROUP BY ALL ORDER BY count(*) DESC LIMIT 200
    )
    SELECT topic, key, count(*) AS messages FROM message SEMI JOIN likely USING (topic, key) WHERE {_STORED}
    GROUP BY ALL HAVING count(*) > 1 ORDER BY messages DESC, topic, key LIMIT $limit
"""

REASONS: Final = Question(
    "reasons",
    """
    SELECT reason, sum(count)::BIGINT AS count FROM dead_letter_daily
    WHERE dt >= $since::DATE AND dt <= $until::DATE
    GROUP BY reason ORDER BY count DESC, reason LIMIT $limit
    """,
)

DEAD_LETTERS: Final = Question(
    "dead_letters",
    """
    WITH chosen AS (SELECT * FROM dead_letter_daily WHERE dt >= $since::DATE AND dt <= $until::DATE),
    errors AS (
        SELECT topic, "group", reason, one.error AS error, sum(one.count) AS count
        FROM (SELECT topic, "group", reason, unnest(top_errors) AS one FROM chosen) GROUP BY ALL
    ), ranked AS (
        SELECT topic, "group", reason,
               list({error: error, count: count::BIGINT} ORDER BY count DESC, error)[:3] AS errors
        FROM errors GROUP BY ALL
    )
    SELECT c.topic, c."group", c.reason, sum(c.count)::BIGINT AS count, any_value(r.errors) AS errors,
           list_distinct(flatten(list(c.samples ORDER BY c.dt DESC)))[:3] AS samples
    FROM chosen c LEFT JOIN ranked r ON c.topic IS NOT DISTINCT FROM r.topic
        AND c."group" IS NOT DISTINCT FROM r."group" AND c.reason IS NOT DISTINCT FROM r.reason
    GROUP BY c.topic, c."group", c.reason ORDER BY count DESC, c.topic, c."group", c.reason LIMIT $limit
    """,
)

DIFFERENCES: Final = Question(
    "differences",
    """
    SELECT problem, topic, "group", send_id, business_id, detail, count(*) OVER (PARTITION BY problem) AS count
    FROM reconcile_diff WHERE found_at = $at
    QUALIFY row_number() OVER (PARTITION BY problem ORDER BY send_id, "group") <= $limit
    ORDER BY count DESC, problem, send_id, "group"
    """,
)


def command(tables: str, sql: str, values: Mapping[str, Any]) -> str:
    """What to type for the same rows: `dmq archive query` with the question, its values written out."""
    written = _VALUE.sub(lambda found: _literal(values[found[1]]), textwrap.dedent(sql).strip())
    inside = re.sub(r'([\\"$`])', r"\\\1", written)
    return f'dmq archive query --tables {shlex.quote(tables)} --limit {_ROWS_MAX} --sql "{inside}"'


def _literal(value: Any) -> str:
    if isinstance(value, datetime):
        return f"TIMESTAMPTZ {quoted(value.astimezone(UTC).isoformat(sep=' '))}"
    return quoted(value) if isinstance(value, str) else repr(value)
