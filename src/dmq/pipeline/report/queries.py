"""The questions a report asks of the archive's tables, in DuckDB's SQL. $since is included, $until is not."""

from __future__ import annotations

from typing import Final

__all__ = ["DEAD_LETTERS", "DIFFERENCES", "GROUPS", "OUTCOMES", "SERIES", "SLOWEST", "TOPICS"]

_WITHIN: Final = "minute >= $since AND minute < $until"

TOPICS: Final = f"""
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
"""

GROUPS: Final = f"""
    SELECT topic, "group", sum(messages_out)::BIGINT AS acked, sum(retries)::BIGINT AS retries,
           sum(dead)::BIGINT AS dead, median(latency_p50_ms) AS p50_ms, max(latency_p99_ms) AS p99_ms,
           max(latency_max_ms) AS max_ms, arg_max(lag, minute) AS lag, max(lag) AS lag_max
    FROM metrics_1m WHERE {_WITHIN} AND "group" IS NOT NULL
    GROUP BY topic, "group" ORDER BY acked DESC, topic, "group" LIMIT $limit
"""

# By step of the charts; a step counts what its minutes have, and lag as it is at its end.
SERIES: Final = f"""
    SELECT time_bucket(to_seconds($step), minute, $since) AS starts_at, topic, "group",
           sum(messages_in)::DOUBLE AS messages_in, sum(messages_out)::DOUBLE AS messages_out,
           sum(retries)::DOUBLE AS retries, sum(dead)::DOUBLE AS dead,
           max(latency_p99_ms) AS p99_ms, arg_max(lag, minute)::DOUBLE AS lag
    FROM metrics_1m WHERE {_WITHIN} GROUP BY ALL ORDER BY starts_at
"""

OUTCOMES: Final = """
    SELECT topic, "group", outcome, count(*) AS count FROM trace
    WHERE stored_at >= $since AND stored_at < $until
    GROUP BY topic, "group", outcome ORDER BY topic, "group" NULLS LAST, count DESC, outcome
"""

SLOWEST: Final = """
    SELECT message_id, topic, "group", stored_at, delivery_latency_ms AS delivery_ms, ack_latency_ms AS ack_ms, attempts
    FROM trace WHERE stored_at >= $since AND stored_at < $until AND ack_latency_ms IS NOT NULL
    ORDER BY ack_latency_ms DESC, message_id, "group" LIMIT $limit
"""

DEAD_LETTERS: Final = """
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
"""

DIFFERENCES: Final = """
    SELECT problem, topic, "group", send_id, business_id, detail, count(*) OVER (PARTITION BY problem) AS count
    FROM reconcile_diff WHERE found_at = $at
    QUALIFY row_number() OVER (PARTITION BY problem ORDER BY send_id, "group") <= $limit
    ORDER BY count DESC, problem, send_id, "group"
"""
