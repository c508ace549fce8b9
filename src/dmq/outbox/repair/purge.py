"""Purge: deletes rows of the sender table that ended long ago, with their answers, and old consumer rows.

What always holds: a message that is not at its end stays, however old; answers go with their row, in one transaction;
rows go a batch at a time, so that nobody waits for long. The counters of strict sequences, the sender's and the
consumer's, stay for ever: without them the next message of a business id would be a gap, or too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Engine, Table, and_, delete, exists, func, inspect, not_, select

from dmq.clock import Clock, SystemClock
from dmq.errors import InvalidSettings
from dmq.outbox.engines import among, background
from dmq.outbox.schema import OutboxTables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.envelope import floor_send_id
from dmq.outbox.states import ENDS

__all__ = ["SECONDS_MIN", "Purged", "purge"]

SECONDS_MIN: Final = 86_400.0
_BATCH: Final = 1000


class Purged(msgspec.Struct, frozen=True):
    """What was deleted from one table, or would be."""

    table: str
    rows: int


def purge(
    engine: Engine,
    older_than: float,
    *,
    tables: OutboxTables | None = None,
    execute: bool = False,
    batch: int = _BATCH,
    clock: Clock | None = None,
) -> list[Purged]:
    """Delete what ended, or was consumed, longer ago than this; by table, how many rows.

    Parameters:
        older_than: seconds. Longer than a message may come again, or it has its effect twice: than the broker keeps
            it, and than somebody may resend it from dead letters.
        tables: those that are there; one that only sends, or only consumes, need not have the others.
        execute: without it, rows are only counted.
        batch: rows of one transaction at most.

    Raises:
        InvalidSettings: a value makes no sense, or there is no such table.
        SQLAlchemyError: the database cannot be used; what was deleted before stays so.
    """
    if not older_than >= SECONDS_MIN:
        raise InvalidSettings(
            f"older than {older_than:g} s is too young to be purged: a message may still come again; keep rows for "
            "a day at least, and for longer than the broker keeps messages"
        )
    if batch < 1:
        raise InvalidSettings(f"batch= is above 0, not {batch!r}")
    found = inspect(engine)
    known = tables or default_tables()
    there = [one for one in (known.send, known.consumer) if found.has_table(one.name, schema=one.schema)]
    if not there:
        raise InvalidSettings(f"there is neither {known.send.name} nor {known.consumer.name} in this database")
    before_ms = (clock or SystemClock()).now_ms() - round(older_than * 1000)
    purger = _Purger(background(engine), known, before_ms, batch)
    return [counted for table in there for counted in purger.of(table, execute)]


class _Purger:
    """One run of it."""

    def __init__(self, engine: Engine, tables: OutboxTables, before_ms: int, batch: int) -> None:
        self._engine = engine
        self._tables = tables
        self._before_ms = before_ms
        self._batch = batch

    def of(self, table: Table, execute: bool) -> Iterator[Purged]:
        is_send = table is self._tables.send
        is_over = self._is_ended() if is_send else table.c.consumed_at_ms < self._before_ms
        answers = self._tables.result
        if not execute:
            with self._engine.connect() as connection:
                yield Purged(table.name, connection.scalar(select(func.count()).select_from(table).where(is_over)) or 0)
                if is_send:
                    chosen = answers.c.send_id.in_(select(table.c.send_id).where(is_over))
                    asked = select(func.count()).select_from(answers).where(chosen)
                    yield Purged(answers.name, connection.scalar(asked) or 0)
            return
        rows, answered = self._delete(table, is_over)
        yield Purged(table.name, rows)
        if is_send:
            yield Purged(answers.name, answered)

    def _is_ended(self) -> ColumnElement[bool]:
        columns = self._tables.send.c
        return and_(
            columns.state.in_([*map(str, ENDS)]),
            columns.ended_at_ms < self._before_ms,
            # It was made before it ended, and a send id begins with the time: there is an index for that.
            columns.send_id < floor_send_id(self._before_ms),
        )

    def _delete(self, table: Table, is_over: ColumnElement[bool]) -> tuple[int, int]:
        """All of them, in the order of the primary or unique key; how many rows, and answers of theirs."""
        rows = answered = 0
        key = table.c.send_id
        page = select(key).where(is_over).order_by(key).limit(self._batch)
        last: str | None = None
        while True:
            with self._engine.connect() as connection:
                asked = page if last is None else page.where(key > last)
                send_ids = [*connection.scalars(asked)]
            if not send_ids:
                return rows, answered
            last = send_ids[-1]
            chosen = among(self._engine.dialect.name, key, send_ids)
            with self._engine.begin() as connection:
                # Asked once more: a refusal that came just now has begun its time anew.
                rows += connection.execute(delete(table).where(chosen, is_over)).rowcount
                if table is self._tables.send:
                    answered += connection.execute(self._orphans(send_ids)).rowcount

    def _orphans(self, send_ids: list[str]) -> Any:
        """The answers of those rows that are gone."""
        send, answers = self._tables.send, self._tables.result
        has_row = exists().where(send.c.send_id == answers.c.send_id)
        return delete(answers).where(among(self._engine.dialect.name, answers.c.send_id, send_ids), not_(has_row))
