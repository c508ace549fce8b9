"""Who may send which rows: claims on the sender table, and what becomes of the rows.

A claim is two columns: who, and until when. Where the database can skip locked rows, several relays claim side by side
without waiting for each other; elsewhere one statement claims, and the database lets one at a time write.

What always holds: of two relays that ask at once, no row goes to both; a row that nobody finishes is free again when
its claim is over, whatever happened to its owner; a row that has ended is never touched here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Table,
    and_,
    any_,
    bindparam,
    func,
    select,
    update,
)

from dmq.outbox.engines import background, go_by_index, is_mysql, skips_locked
from dmq.outbox.lists import among
from dmq.outbox.rows import columns_of
from dmq.outbox.states import SendState

__all__ = ["Claims"]

_ERROR_CHARS_MAX: Final = 1000
_number: Final = itemgetter(0)  # of a row of `columns_of`, which begins with it


class Claims:
    """The sender table, as relays see it. Thread-safe: every call is one transaction."""

    def __init__(self, engine: Engine, send: Table) -> None:
        self._engine = background(engine)
        self._send = send
        columns = send.c
        self._is_new = columns.state == SendState.NEW.value
        # Of rows that are known by their numbers. PostgreSQL might go through its index of all unsent rows instead.
        self._is_still_new = self._is_new if is_mysql(engine) else columns.state.concat("") == SendState.NEW.value
        self._columns = columns_of(send)
        due = (
            select(columns.number)
            .where(self._is_new, columns.due_at_ms <= bindparam("now"))
            .order_by(columns.due_at_ms, columns.number)
            .limit(bindparam("limit"))
        )
        self._due = due
        self._pick = due.with_only_columns(*self._columns).with_for_update(skip_locked=True)
        self._pick_waiting = due.with_only_columns(*self._columns).with_for_update()
        own = update(send).values(claimed_by=bindparam("owner"), due_at_ms=bindparam("until")).returning(*self._columns)
        if engine.dialect.name == "postgresql":
            # As an array: for a join the planner may read the whole table.
            picked = func.array(due.with_for_update(skip_locked=True).scalar_subquery())
            self._own = own.where(columns.number == any_(picked))
        else:
            self._own = own.where(columns.number.in_(due.scalar_subquery()))

    # --- getting rows -------------------------------------------------------------------------------------------------

    def claim(self, limit: int, owner: str, now_ms: int, until_ms: int) -> list[Row[Any]]:
        """Unsent rows whose time has come, in the order of their insertion; ours until a moment."""
        asked = {"now": now_ms, "limit": limit}
        with self._engine.connect() as connection:
            if is_mysql(self._engine):
                pick = self._pick if skips_locked(self._engine) else self._pick_waiting
                rows = connection.execute(pick, asked).all()
                if rows:
                    self._put(connection, [row.number for row in rows], claimed_by=owner, due_at_ms=until_ms)
            else:
                # A write would lock out everybody else of SQLite: look first.
                is_sqlite = connection.dialect.name == "sqlite"
                if is_sqlite and connection.execute(self._due, asked | {"limit": 1}).first() is None:
                    return []
                go_by_index(connection)
                rows = connection.execute(self._own, asked | {"owner": owner, "until": until_ms}).all()
            connection.commit()
        return sorted(rows, key=_number)

    def look(self, send_ids: Sequence[str]) -> list[Row[Any]]:
        """Those of these rows that are committed, with `claimed_by` and `due_at_ms`."""
        send = self._send
        asked = select(*self._columns, send.c.claimed_by, send.c.due_at_ms).where(self._among(send.c.send_id, send_ids))
        with self._engine.connect() as connection:
            return sorted(connection.execute(asked), key=_number)

    def keep(self, numbers: Sequence[int], owner: str, until_ms: int) -> list[int]:
        """Make claims of ours last longer; those that still are ours."""
        columns = self._send.c
        with self._engine.begin() as connection:
            is_ours = and_(self._among(columns.number, numbers), self._is_new, columns.claimed_by == owner)
            connection.execute(update(self._send).where(is_ours).values(due_at_ms=until_ms))
            return [*connection.scalars(select(columns.number).where(is_ours, columns.due_at_ms == until_ms))]

    # --- what becomes of them -----------------------------------------------------------------------------------------

    def sent(self, rows: Iterable[Row[Any]], now_ms: int, ask_at_ms: int) -> None:
        """A broker has these: results are waited for until a moment, or nothing more is expected."""
        waiting: list[int] = []
        ended: list[int] = []
        for row in rows:
            (ended if row.expected_groups == "" else waiting).append(row.number)
        attempts = self._send.c.attempts + 1
        common: dict[str, Any] = {"claimed_by": None, "attempts": attempts, "sent_at_ms": now_ms, "last_error": None}
        with self._engine.begin() as connection:
            if waiting:
                self._put(connection, waiting, state=SendState.SENT.value, due_at_ms=ask_at_ms, **common)
            if ended:
                self._put(connection, ended, state=SendState.DONE.value, ended_at_ms=now_ms, **common)

    def failed(self, rows: Sequence[Row[Any]], error: str, due_at_ms: int) -> None:
        """These rows of one topic were refused: to be tried again, and with them all that waits behind them."""
        columns = self._send.c
        said = error[:_ERROR_CHARS_MAX].replace("\0", "\u2400")
        ordered = [row for row in rows if row.is_ordered]
        with self._engine.begin() as connection:
            self._put(
                connection,
                [row.number for row in rows],
                attempts=columns.attempts + 1,
                last_error=said,
                claimed_by=None,
                due_at_ms=due_at_ms,
            )
            if ordered:
                # At one stroke: a long tail would else be claimed, found blocked and given back piece by piece.
                behind = and_(
                    self._is_new,
                    self._among(columns.business_id, {row.business_id for row in ordered}),
                    columns.topic == ordered[0].topic,
                    columns.is_ordered == 1,
                    columns.number > min(row.number for row in ordered),
                    columns.due_at_ms < due_at_ms,
                )
                connection.execute(update(self._send).where(behind).values(due_at_ms=due_at_ms))

    def release(self, numbers: Sequence[int], due_at_ms: int | None = None) -> None:
        """Give rows back, to be looked at at a moment; left out, at once, and before all that came behind them."""
        if numbers:
            due = self._send.c.created_at_ms if due_at_ms is None else due_at_ms
            with self._engine.begin() as connection:
                self._put(connection, numbers, claimed_by=None, due_at_ms=due)

    def _among(self, column: Column[Any], values: Collection[Any]) -> ColumnElement[bool]:
        return among(self._engine.dialect.name, column, values)

    def _put(self, connection: Connection, numbers: Sequence[int], **values: Any) -> None:
        # A result may have come meanwhile and ended the row; its number says enough otherwise.
        chosen = self._among(self._send.c.number, numbers)
        connection.execute(update(self._send).where(chosen, self._is_still_new).values(**values))
