"""Overdue rows of the sender table: sent, and no result in time; claimed by one compensator at a time.

What always holds: of two compensators that ask at once no row goes to both; a row that nobody finishes is free again
when its claim is over; a row whose result came meanwhile is not touched any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, Row, bindparam, select, update

from dmq.outbox.engines import background, skips_locked
from dmq.outbox.rows import OutboxMessage, columns_of, parse_row
from dmq.outbox.schema import OutboxTables
from dmq.outbox.states import BusinessState, SendState

__all__ = ["Overdue"]

_WAITING = (str(SendState.SENT), str(SendState.ALERTED))


class Overdue:
    """The sender table, as compensators see it. Thread-safe: every call is one transaction."""

    def __init__(self, engine: Engine, tables: OutboxTables) -> None:
        self._engine = background(engine)
        self._tables = tables
        columns = tables.send.c
        self._due = (
            select(columns.number)
            .where(columns.state.in_(_WAITING), columns.due_at_ms <= bindparam("now"))
            .order_by(columns.due_at_ms, columns.number)
            .limit(bindparam("limit"))
        )
        self._pick = self._due.with_only_columns(*columns_of(tables.send))
        self._own = (
            update(tables.send)
            .where(columns.number.in_(self._due.scalar_subquery()))
            .values(claimed_by=bindparam("owner"), due_at_ms=bindparam("until"))
            .returning(*columns_of(tables.send))
        )

    def claim(self, limit: int, owner: str, now_ms: int, until_ms: int) -> list[OutboxMessage]:
        """Rows whose result is overdue; ours until a moment."""
        asked = {"now": now_ms, "limit": limit}
        rows: Sequence[Row[Any]]
        with self._engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                # A write would lock out everybody: look first.
                if connection.execute(self._due, asked | {"limit": 1}).first() is None:
                    return []
                rows = connection.execute(self._own, asked | {"owner": owner, "until": until_ms}).all()
            else:
                rows = connection.execute(
                    self._pick.with_for_update(skip_locked=skips_locked(self._engine)), asked
                ).all()
                if rows:
                    send = self._tables.send
                    mine = update(send).where(send.c.number.in_([row.number for row in rows]))
                    connection.execute(mine.values(claimed_by=owner, due_at_ms=until_ms))
            connection.commit()
        return sorted(map(parse_row, rows), key=lambda row: row.number)

    def answered(self, send_ids: Sequence[str]) -> dict[str, set[str]]:
        """By send id, the groups whose success is known."""
        columns = self._tables.result.c
        found: dict[str, set[str]] = {}
        asked = select(columns.send_id, columns.consumer_group).where(
            columns.send_id.in_(send_ids), columns.business_state == str(BusinessState.SUCCESS)
        )
        with self._engine.connect() as connection:
            for send_id, group in connection.execute(asked):
                found.setdefault(send_id, set()).add(group)
        return found

    def put(self, rows: Sequence[OutboxMessage], owner: str, **values: Any) -> int:
        """Change rows that still are ours and have no result, and give them back; how many that were."""
        if not rows:
            return 0
        send = self._tables.send
        chosen = update(send).where(
            send.c.number.in_([row.number for row in rows]), send.c.claimed_by == owner, send.c.state.in_(_WAITING)
        )
        with self._engine.begin() as connection:
            return connection.execute(chosen.values(claimed_by=None, checks=send.c.checks + 1, **values)).rowcount
