"""Strict order: the messages of a topic and business id are numbered in the sender's own transaction (T-09).

What always holds: numbers begin with 1 and have no gap; the counter's row stays locked until the transaction ends, so
two transactions of the same business id come one after the other, and one that rolls back gives its numbers back.
"""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy import Connection, Dialect, Engine, Table, text
from sqlalchemy.orm import Session

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
        columns = "(topic, business_id, last) VALUES (:topic, :business_id,"
        where = "topic = :topic AND business_id = :business_id"
        self._is_mysql = dialect.name in ("mysql", "mariadb")
        if self._is_mysql:
            self._look = text(f"SELECT 1 FROM {name} WHERE {where}")
            self._begin = text(f"INSERT IGNORE INTO {name} {columns} 0)")
            self._put = text(f"UPDATE {name} SET last = LAST_INSERT_ID(last + 1) WHERE {where}")
        else:
            self._put = text(
                f"INSERT INTO {name} AS counter {columns} 1) "
                "ON CONFLICT (topic, business_id) DO UPDATE SET last = counter.last + 1 RETURNING last"
            )

    def next(self, session: Session | Connection, topic: str, business_id: str) -> int:
        """The next number of a topic and business id, in the transaction of this session."""
        place = {"topic": topic, "business_id": business_id}
        if not self._is_mysql:
            return int(session.execute(self._put, place).scalar_one())
        if session.execute(self._look, place).first() is None:
            # Not in this transaction: InnoDB ends those who wait for a row that is inserted and rolled back with a
            # deadlock. And not after an update that found nothing, whose lock on the gap we would wait for ourselves.
            with _engine_of(session).begin() as connection:
                connection.execute(self._begin, place)
        put: Any = session.execute(self._put, place)
        return int(put.lastrowid)


def _engine_of(session: Session | Connection) -> Engine:
    bind = session if isinstance(session, Connection) else session.get_bind()
    return bind.engine
