"""What an outbox has done and what waits in it: counters and gauges, for Prometheus and for `dmq outbox status`.

What always holds: a counter never falls, and any thread may add to it; the gauges read only rows that have not ended,
by an index, so that a table with years of ended rows costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import Engine, func, select

from dmq.outbox.engines import background
from dmq.outbox.schema import OutboxTables
from dmq.outbox.states import OPEN, SendState

__all__ = ["SENDER_COUNTS", "Counts", "TopicStatus", "exposition", "status", "waiting"]


# What a sender counts: there from the beginning, so that a rate over them is right from the beginning, too.
SENDER_COUNTS: Final = (
    "sent", "sent_directly", "relayed", "refused", "held_back", "database_errors", "resent",
    "results", "results_unknown", "results_ignored", "results_unreadable", "result_errors",
    "done", "rolled_back", "reversed", "reverse_failed",
    "alerts_send", "alerts_reverse", "alerts_no_result",
)  # fmt: skip


class Counts:
    """Counters by name.

    Parameters:
        names: of those that are to be there before they are first added to.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._mutex = threading.Lock()
        self._counts: dict[str, int] = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._mutex:
                self._counts[name] = self._counts.get(name, 0) + count

    def get(self, name: str) -> int:
        return self._counts.get(name, 0)

    def all(self) -> dict[str, int]:
        with self._mutex:
            return dict(self._counts)


def exposition(counts: Mapping[str, int], gauges: Mapping[str, float], app: str) -> str:
    """The text format of Prometheus."""
    escaped = app.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'{{app="{escaped}"}}'
    lines: list[str] = []
    for name, value in sorted(counts.items()):
        lines += [f"# TYPE dmq_outbox_{name}_total counter", f"dmq_outbox_{name}_total{labels} {value}"]
    for name, level in sorted(gauges.items()):
        lines += [f"# TYPE dmq_outbox_{name} gauge", f"dmq_outbox_{name}{labels} {level:g}"]
    return "\n".join(lines) + "\n"


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
