"""What waits in the sender table: counts and ages, for metrics and for `dmq outbox status`.

What always holds: it reads only what has not ended, by an index; a table with years of ended rows costs nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Engine, func, select

from dmq.outbox.engines import background
from dmq.outbox.schema import OutboxTables
from dmq.outbox.states import OPEN, SendState

__all__ = ["TopicStatus", "status", "waiting"]


class TopicStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The open rows of one topic."""

    topic: str
    new: int = 0  # not yet at a broker
    sent: int = 0  # waiting for results
    alerted: int = 0
    failing: int = 0  # of the new ones, those that were refused
    oldest_ms: int = 0  # age of the oldest open row
    last_error: str = ""


def status(engine: Engine, tables: OutboxTables, now_ms: int) -> list[TopicStatus]:
    """By topic, what is open.

    Raises:
        SQLAlchemyError: the database cannot be used.
    """
    columns = tables.send.c
    asked = (
        select(
            columns.topic,
            columns.state,
            func.count().label("rows"),
            func.min(columns.created_at_ms).label("oldest"),
            func.count(columns.last_error).label("failing"),
            func.max(columns.last_error).label("error"),
        )
        .where(columns.state.in_([*map(str, OPEN)]))
        .group_by(columns.topic, columns.state)
    )
    found: dict[str, dict[str, Any]] = {}
    with background(engine).connect() as connection:
        for row in connection.execute(asked):
            facts = found.setdefault(row.topic, {"topic": row.topic, "oldest_ms": 0})
            facts[row.state.lower()] = row.rows
            facts["oldest_ms"] = max(facts["oldest_ms"], now_ms - row.oldest)
            if row.state == SendState.NEW:
                facts |= {"failing": row.failing, "last_error": row.error or ""}
    return [TopicStatus(**facts) for _, facts in sorted(found.items())]


def waiting(engine: Engine, tables: OutboxTables, now_ms: int) -> dict[str, float]:
    """The same for metrics, over all topics."""
    topics = status(engine, tables, now_ms)
    return {
        "waiting_new": float(sum(topic.new for topic in topics)),
        "waiting_sent": float(sum(topic.sent for topic in topics)),
        "waiting_alerted": float(sum(topic.alerted for topic in topics)),
        "waiting_failing": float(sum(topic.failing for topic in topics)),
        "oldest_seconds": max((topic.oldest_ms for topic in topics), default=0) / 1000,
    }
