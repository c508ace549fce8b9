"""Settlements joined with the messages that they are about, as rows of `consume_event`.

A settlement names offsets of a queue. A message is delivered from where it was stored, or, after a failure, from a
retry topic; so both `message` and `copy` are read, and of them only the files that may have these offsets. Spark joins;
the driver itself joins a few settlements (`resolved_here`), at a tenth of what a query of Spark costs.

What always holds: each settled message gives one row for its outcome and, if it was handed out, one row `delivered`. A
message that is in no table any more gives its rows without an id. Attempts count over retries, as consumers see them.
Both joins give the same rows; the memory of the driver's is bounded by DuckDB's limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dmq.model import SYSTEM_PREFIX, retry_topic_parts
from dmq.pipeline.archive.parquet import Written, write_days
from dmq.pipeline.archive.settlements import SETTLEMENT
from dmq.pipeline.jobs.frames import file_frame, frame_of
from dmq.pipeline.jobs.staged_files import SORT, staged
from dmq.pipeline.lookup.engine import Engine
from dmq.pipeline.tables import CONSUME_EVENT, COPY, MESSAGE, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dmq.pipeline.archive.extract import Extracted
    from dmq.pipeline.archive.table_store import Archive, Table

__all__ = ["SMALL", "resolved", "resolved_here", "topic_names"]


_PLACED: Final = """
    SELECT topic_id, queue, queue_offset, message_id, {topic} AS topic, {attempts} AS attempts
    FROM read_parquet({files}) WHERE broker = $broker
"""
_NOWHERE: Final = (
    "SELECT NULL::BIGINT AS topic_id, NULL::INTEGER AS queue, NULL::BIGINT AS queue_offset, "
    "NULL::VARCHAR AS message_id, NULL::VARCHAR AS topic, NULL::INTEGER AS attempts WHERE false"
)
_QUERY: Final = """
    WITH settled AS (
        SELECT * EXCLUDE (first_offset, last_offset), unnest(generate_series(first_offset, last_offset)) AS queue_offset
        FROM read_parquet($settlements)
    ), placed AS ({placed}), names AS (
        SELECT unnest($ids::BIGINT[]) AS topic_id, unnest($names::VARCHAR[]) AS name
    ), known AS (
        SELECT s.* EXCLUDE (attempt), p.message_id, coalesce(p.topic, n.name) AS topic,
               s.attempt + coalesce(p.attempts, 0) AS attempt
        FROM settled s
        LEFT JOIN placed p ON s.topic_id = p.topic_id AND s.queue = p.queue AND s.queue_offset = p.queue_offset
        LEFT JOIN names n ON s.topic_id = n.topic_id
    )
    SELECT message_id, topic, "group", member, attempt, 'delivered' AS outcome, leased_at AS "at",
           NULL::VARCHAR AS error, $broker AS broker, journal_offset, dt
    FROM known WHERE leased_at IS NOT NULL
    UNION ALL
    SELECT message_id, topic, "group", member, attempt, outcome, settled_at AS "at",
           error, $broker AS broker, journal_offset, dt
    FROM known
"""


def resolved_here(
    broker: str,
    settlements: Sequence[str],
    messages: Sequence[str],
    copies: Sequence[str],
    names: Mapping[int, str],
) -> pa.Table:
    """Rows of `consume_event`.

    Parameters:
        broker: the journal's id as the tables have it.
        settlements, messages, copies: files.
        names: of users' topics by topic id.
    """
    given: dict[str, Any] = {
        "broker": broker,
        "settlements": [*settlements],
        "ids": [*names],
        "names": [*names.values()],
    }
    parts = []
    for name, files, topic, attempts in (
        ("messages", messages, "topic", "0"),
        ("copies", copies, "origin_topic", "attempt"),
    ):
        if files:
            given[name] = [*files]
            parts.append(_PLACED.format(files=f"${name}", topic=topic, attempts=attempts))
    with Engine() as engine:
        engine.reach(*settlements, *messages, *copies)
        found = engine.rows(_QUERY.replace("{placed}", " UNION ALL ".join(parts) or _NOWHERE), given)
    return found.cast(SCHEMAS[CONSUME_EVENT])


SMALL = 500_000  # settled messages that the driver joins itself
_FILE_ROWS: Final = 2_000_000
_PLACED_BY: Final = ("broker", "topic_id", "queue", "queue_offset", "message_id")
_TOPICS_MAX: Final = 64  # that files are chosen for one by one

_SPARK_QUERY: Final = """
    WITH settled AS (
        SELECT *, explode(sequence(first_offset, last_offset)) AS queue_offset FROM {settlements}
    ), placed AS (
        SELECT topic_id, queue, queue_offset, message_id, topic, 0 AS attempts FROM {messages} WHERE broker = :broker
        UNION ALL
        SELECT topic_id, queue, queue_offset, message_id, origin_topic, attempt FROM {copies} WHERE broker = :broker
    ), known AS (
        SELECT s.* EXCEPT (attempt), p.message_id, coalesce(p.topic, n.name) AS topic,
               s.attempt + coalesce(p.attempts, 0) AS attempt
        FROM settled s
        LEFT JOIN placed p
            ON s.topic_id = p.topic_id AND s.queue = p.queue AND s.queue_offset = p.queue_offset
        LEFT JOIN {names} n ON s.topic_id = n.topic_id
    )
    SELECT message_id, topic, `group`, member, attempt, step.outcome AS outcome, step.at AS at, step.error AS error,
           :broker AS broker, journal_offset, dt
    FROM (
        SELECT *, explode(array(
            named_struct('outcome', 'delivered', 'at', leased_at, 'error', CAST(NULL AS STRING)),
            named_struct('outcome', outcome, 'at', settled_at, 'error', error)
        )) AS step
        FROM known
    )
    WHERE step.at IS NOT NULL
"""


def topic_names(topics: Mapping[int, str]) -> dict[int, str]:
    """Users' topics by id, also by the ids of the retry topics that belong to them."""
    found = {topic_id: name for topic_id, name in topics.items() if not name.startswith(SYSTEM_PREFIX)}
    for topic_id, name in topics.items():
        parts = retry_topic_parts(name)
        if parts is not None and parts[1] in topics:
            found[topic_id] = topics[parts[1]]
    return found


@contextmanager
def resolved(
    spark: SparkSession, archive: Archive, broker: str, found: Extracted, topics: Mapping[int, str]
) -> Iterator[list[Written]]:
    """Files with rows of `consume_event`, to be committed inside of this.

    Parameters:
        broker: the journal's id as the tables have it.
        found: the settlements, as tasks have staged them.
        topics: names by id, for what is in no table.
    """
    messages, copies = (_may_have(archive.table(name), broker, found.bounds) for name in (MESSAGE, COPY))
    table = archive.table(CONSUME_EVENT)
    if found.settled <= SMALL:
        rows_here = resolved_here(broker, found.staged, messages, copies, names=topic_names(topics))
        yield write_days(rows_here, table.folder, sort_by=SORT[CONSUME_EVENT])
        return
    rows = spark.sql(
        _SPARK_QUERY,
        args={"broker": broker},
        settlements=file_frame(spark, found.staged, SETTLEMENT),
        messages=frame_of(spark, MESSAGE, messages, [*_PLACED_BY, "topic"]),
        copies=frame_of(spark, COPY, copies, [*_PLACED_BY, "origin_topic", "attempt"]),
        names=_names(spark, topics),
    )
    yield staged(table, rows, max(1, -(-2 * found.settled // _FILE_ROWS)))


def _may_have(table: Table, broker: str, bounds: Mapping[int, tuple[int, int]]) -> list[str]:
    """The files of a table that may have the offsets."""
    wanted: set[str] = set()
    if len(bounds) <= _TOPICS_MAX:
        chosen = [{topic_id: offsets} for topic_id, offsets in bounds.items()]
    else:
        chosen = [dict(bounds)]
    for some in chosen:
        offsets = (min(least for least, _ in some.values()), max(greatest for _, greatest in some.values()))
        where = {"broker": (broker, broker), "topic_id": (min(some), max(some)), "queue_offset": offsets}
        wanted.update(table.files(where=where))
    return sorted(wanted)


def _names(spark: SparkSession, topics: Mapping[int, str]) -> DataFrame:
    rows = ", ".join(f"({topic_id}, {_text(name)})" for topic_id, name in sorted(topic_names(topics).items()))
    if not rows:
        return spark.sql("SELECT CAST(NULL AS BIGINT) AS topic_id, CAST(NULL AS STRING) AS name")
    return spark.sql(f"SELECT CAST(id AS BIGINT) AS topic_id, name FROM VALUES {rows} AS names(id, name)")


def _text(name: str) -> str:
    return "'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'"
