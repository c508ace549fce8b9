"""Settlements joined with the messages that they are about, as rows of `consume_event`.

A settlement names offsets of a queue. A message is delivered from where it was stored, or, after a failure, from a
retry topic; so both `message` and `copy` are read, and of them only the files that may have these offsets. DuckDB
joins, some settlements at a time: in the driver if they are few, else in Spark's tasks, one for each file that was
staged.

What always holds: each settled message gives one row for its outcome and, if it was handed out, one row `delivered`. A
message that is in no table any more gives its rows without an id. Attempts count over retries, as consumers see them.
Memory is bounded by `PIECE` settled messages, and by DuckDB's limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dmq.model import SYSTEM_PREFIX, retry_topic_parts
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.parquet import Written, write_days
from dmq.pipeline.jobs.frames import SORT
from dmq.pipeline.lookup.engine import Engine
from dmq.pipeline.object_store import open_parquet, store_errors
from dmq.pipeline.tables import CONSUME_EVENT, COPY, MESSAGE, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.extract import Extracted
    from dmq.pipeline.archive.table_store import Archive, Table

__all__ = ["PIECE", "SMALL", "JoinTask", "join", "pieces", "resolved", "topic_names"]


_PLACED: Final = """
    SELECT topic_id, queue, queue_offset, message_id, {topic} AS topic, {attempts} AS attempts
    FROM read_parquet({files}) WHERE broker = $broker AND {bounds}
"""
_NOWHERE: Final = (
    "SELECT NULL::BIGINT AS topic_id, NULL::INTEGER AS queue, NULL::BIGINT AS queue_offset, "
    "NULL::VARCHAR AS message_id, NULL::VARCHAR AS topic, NULL::INTEGER AS attempts WHERE false"
)
_QUERY: Final = """
    WITH settled AS (
        SELECT * EXCLUDE (first_offset, last_offset), unnest(generate_series(first_offset, last_offset)) AS queue_offset
        FROM settlements
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


SMALL = 500_000  # settled messages that the driver joins itself
PIECE = 500_000  # settled messages that are joined at once
_TOPICS_MAX: Final = 64  # that files are chosen for one by one


class JoinTask(NamedTuple):
    """Staged settlements, and what they are joined with."""

    archive: str  # address
    broker: str  # the journal's id as the tables have it
    staged: tuple[str, ...]  # files, as those that follow
    messages: tuple[str, ...]
    copies: tuple[str, ...]
    names: Mapping[int, str]  # of users' topics by topic id


def join(task: JoinTask) -> list[Written]:
    """Write the rows of `consume_event`. Runs on executors, too."""
    folder = Folder.at(task.archive).below(CONSUME_EVENT)
    settlements = pa.concat_tables([_read(uri) for uri in task.staged])
    settlements = settlements.sort_by([(name, "ascending") for name in ("topic_id", "queue", "first_offset")])
    written: list[Written] = []
    with Engine() as engine:
        engine.reach(*task.messages, *task.copies)
        for piece in pieces(settlements):
            written += write_days(_joined(engine, task, piece), folder, sort_by=SORT[CONSUME_EVENT])
    return written


def _read(uri: str) -> pa.Table:
    with store_errors(uri), open_parquet(uri) as file:
        return file.read()


def pieces(settlements: pa.Table) -> Iterator[pa.Table]:
    """Settlements in parts of about `PIECE` messages."""
    counts = pc.add(pc.subtract(settlements["last_offset"], settlements["first_offset"]), 1).to_numpy()
    numbers = np.cumsum(counts) // PIECE
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, end in pairwise(bounds):
        if end > start:
            yield settlements.slice(start, end - start)


def _joined(engine: Engine, task: JoinTask, settlements: pa.Table) -> pa.Table:
    # Written out: of a parameter DuckDB does not know which row groups it leaves out.
    topics, first, last = (pc.min_max(settlements[name]) for name in ("topic_id", "first_offset", "last_offset"))
    bounds = (
        f"topic_id BETWEEN {topics['min'].as_py()} AND {topics['max'].as_py()} "
        f"AND queue_offset BETWEEN {first['min'].as_py()} AND {last['max'].as_py()}"
    )
    given: dict[str, Any] = {"broker": task.broker, "ids": [*task.names], "names": [*task.names.values()]}
    parts = []
    for name, files, topic, attempts in (
        ("messages", task.messages, "topic", "0"),
        ("copies", task.copies, "origin_topic", "attempt"),
    ):
        if files:
            given[name] = [*files]
            parts.append(_PLACED.format(files=f"${name}", topic=topic, attempts=attempts, bounds=bounds))
    engine.register("settlements", settlements)
    found = engine.rows(_QUERY.replace("{placed}", " UNION ALL ".join(parts) or _NOWHERE), given)
    return found.cast(SCHEMAS[CONSUME_EVENT])


def topic_names(topics: Mapping[int, str]) -> dict[int, str]:
    """Users' topics by id, also by the ids of the retry topics that belong to them."""
    found = {topic_id: name for topic_id, name in topics.items() if not name.startswith(SYSTEM_PREFIX)}
    for topic_id, name in topics.items():
        parts = retry_topic_parts(name)
        if parts is not None and parts[1] in topics:
            found[topic_id] = topics[parts[1]]
    return found


def resolved(
    spark: SparkSession, archive: Archive, broker: str, found: Extracted, topics: Mapping[int, str]
) -> list[Written]:
    """Files with rows of `consume_event`, to be committed.

    Parameters:
        broker: the journal's id as the tables have it.
        found: the settlements, as tasks have staged them.
        topics: names by id, for what is in no table.
    """
    messages, copies = (tuple(_may_have(archive.table(name), broker, found.bounds)) for name in (MESSAGE, COPY))
    staged = [tuple(found.staged)] if found.settled <= SMALL else [(uri,) for uri in found.staged]
    names = topic_names(topics)
    tasks = [JoinTask(archive.uri, broker, files, messages, copies=copies, names=names) for files in staged]
    if found.settled <= SMALL:
        return join(tasks[0])
    every = spark.sparkContext.parallelize(tasks, len(tasks)).map(join).collect()
    return [file for files in every for file in files]


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
