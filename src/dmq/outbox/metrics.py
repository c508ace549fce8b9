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


_COUNTS: Final = {
    "sent": "Messages that a broker took.",
    "sent_directly": "Of those, messages sent right after their commit.",
    "relayed": "Of those, messages that the relay found in the table.",
    "refused": "Rows that a broker refused.",
    "held_back": "Rows that waited behind another of their business id.",
    "database_errors": "Tries that failed because of the database.",
    "resent": "Rows that were sent and are to be sent again.",
    "results": "Results that were consumed.",
    "results_unknown": "Results of rows that do not exist.",
    "results_ignored": "Refusals that changed nothing.",
    "results_unreadable": "Messages among the results that are not results.",
    "result_errors": "Tries that failed on the way to results.",
    "done": "Rows that ended well.",
    "rolled_back": "Rows whose business was refused.",
    "reversed": "Of those, rows whose business was reversed.",
    "reverse_failed": "Tries of a reverse business that failed.",
    "alerts_send": "Alerts of rows that could not be sent.",
    "alerts_reverse": "Alerts of rows that could not be reversed.",
    "alerts_no_result": "Alerts of rows without a result.",
    "asked": "Rows that the compensator asked about.",
}
_GAUGES: Final = {
    "waiting_new": "Rows that no broker has yet.",
    "waiting_sent": "Rows that wait for results.",
    "waiting_alerted": "Rows that somebody must look at.",
    "waiting_failing": "Rows that no broker has yet because they were refused.",
    "oldest_seconds": "Age of the oldest row that has not ended.",
}

# What a sender counts: there from the beginning, so that a rate over them is right from the beginning, too.
SENDER_COUNTS: Final = (*(name for name in _COUNTS if name != "asked"),)


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
        lines += _sample(f"dmq_outbox_{name}_total", "counter", _COUNTS[name], f"{labels} {value}")
    for name, level in sorted(gauges.items()):
        lines += _sample(f"dmq_outbox_{name}", "gauge", _GAUGES[name], f"{labels} {level:g}")
    return "\n".join(lines) + "\n"


def _sample(name: str, kind: str, text: str, sample: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{sample}"]


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
