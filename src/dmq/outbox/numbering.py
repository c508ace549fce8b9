"""Strict order: the messages of a topic and business id are numbered in the sender's own transaction (T-09).

What always holds: numbers begin with 1 and have no gap; the counter's row stays locked until the transaction ends, so
two transactions of the same business id come one after the other, and one that rolls back gives its numbers back.
"""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import Dialect, Table, TextClause, text

__all__ = ["Executes", "Numbering"]


class Executes(Protocol):
    """A session or a connection."""

    def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...


class Numbering:
    """The counters of a database.

    Parameters:
        dialect: of the database.
        sequence: the table with the counters.
    """

    def __init__(self, dialect: Dialect, sequence: Table) -> None:
        # As text, which is compiled once: SQLAlchemy compiles its own upserts anew each time, which takes longer than
        # all the rest of a send.
        name = dialect.identifier_preparer.format_table(sequence)
        values = "(topic, business_id, last) VALUES (:topic, :business_id, 1)"
        where = "topic = :topic AND business_id = :business_id"
        self._ask: TextClause | None = None
        if dialect.name in ("mysql", "mariadb"):
            self._put = text(f"INSERT INTO {name} {values} ON DUPLICATE KEY UPDATE last = last + 1")
            self._ask = text(f"SELECT last FROM {name} WHERE {where}")
        else:
            self._put = text(
                f"INSERT INTO {name} AS counter {values} "
                "ON CONFLICT (topic, business_id) DO UPDATE SET last = counter.last + 1 RETURNING last"
            )

    def next(self, session: Executes, topic: str, business_id: str) -> int:
        """The next number of a topic and business id, in the transaction of this session."""
        place = {"topic": topic, "business_id": business_id}
        put = session.execute(self._put, place)
        # The row is ours until the end of the transaction: what we read is what we wrote.
        return int((put if self._ask is None else session.execute(self._ask, place)).scalar_one())
