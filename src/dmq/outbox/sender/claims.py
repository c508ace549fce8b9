"""Which rows of the sender table a relay may send: claims, the rows that hold others back, and what becomes of them.

A claim is two columns: who, and until when. Where the database can skip locked rows, several relays claim side by side
without waiting for each other; elsewhere one statement claims, and the database lets one at a time write. A row is held
back by an unsent row before it, of the same topic and business id, that another relay is to send.

What always holds: of two relays that ask at once, no row goes to both; a row that its owner does not finish is free
again when its claim is over; a row that has ended is never touched here. Rows are checked for blockers after they were
claimed, so that everything committed before them is seen; a row that is just being sent holds back, since only its mark
says that a broker has it. Blockers are found by the index of unsent rows, however many rows have ended, and whatever
the database believes of the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

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
    not_,
    select,
    text,
    update,
)

from dmq.outbox.engines import among, array_text, background, go_by_index, is_mysql, skips_locked
from dmq.outbox.sender.message_row import columns_of
from dmq.outbox.states import SendState

__all__ = ["Blocker", "Blockers", "Claims", "Place"]


Place = tuple[str, str]  # topic and business id: within one, order is kept


class Blocker(NamedTuple):
    """The first unsent row of a place that is not among those asked about, and comes before the last of them."""

    number: int
    due_at_ms: int
    is_claimed: bool  # somebody is about to send it; else it waits until it is due


class Blockers:
    """The sender table, as one that keeps an order sees it. Thread-safe."""

    def __init__(self, engine: Engine, send: Table) -> None:
        self._engine = background(engine)
        self._kind = engine.dialect.name
        self._send = send
        # Compared as a text in the database, so that there is nothing to read where nothing is in the way. A query for
        # each place, since the planner, left to join, takes any index but the right one on a table that has just grown.
        self._heads = text(
            f"""
            SELECT asked.at, head.numbers
            FROM unnest(CAST(:topics AS varchar[]), CAST(:ids AS varchar[]), CAST(:counts AS int[]),
                CAST(:numbers AS text[])) WITH ORDINALITY AS asked(topic, business_id, count, numbers, at)
            CROSS JOIN LATERAL (
                SELECT string_agg(CAST(unsent.number AS text), ',') AS numbers
                FROM (
                    SELECT number FROM {engine.dialect.identifier_preparer.format_table(send)}
                    WHERE state = '{SendState.NEW}' AND business_id = asked.business_id
                        AND topic = asked.topic AND is_ordered = 1
                    ORDER BY number LIMIT asked.count
                ) AS unsent
            ) AS head
            WHERE head.numbers IS DISTINCT FROM asked.numbers
            """
        )

    def of(self, rows: Sequence[Row[Any]]) -> dict[Place, Blocker]:
        """By place, what holds back rows of it; these come in the order of their numbers."""
        places: dict[Place, list[int]] = {}
        for row in rows:
            if row.is_ordered:
                places.setdefault((row.topic, row.business_id), []).append(row.number)
        if not places:
            return {}
        with self._engine.connect() as connection:
            look = self._by_heads if self._kind == "postgresql" else self._by_number
            found = look(connection, places)
            return self._facts(connection, found) if found else {}

    def _by_heads(self, connection: Connection, places: Mapping[Place, Sequence[int]]) -> dict[Place, int]:
        """Of a place with n rows of ours, look at the first n that are unsent: they must be ours."""
        listed = [*places.items()]
        asked = {
            "topics": array_text([place[0] for place in places]),
            "ids": array_text([place[1] for place in places]),
            "counts": array_text([*map(len, places.values())]),
            "numbers": array_text([",".join(map(str, numbers)) for numbers in places.values()]),
        }
        found: dict[Place, int] = {}
        for at, numbers in connection.execute(self._heads, asked):
            place, ours = listed[at - 1]
            # None if all of them have ended meanwhile; then nothing is known to be in the way, and nothing is.
            others = {*map(int, numbers.split(","))}.difference(ours) if numbers else ()
            first = min((number for number in others if number < ours[-1]), default=None)
            if first is not None:
                found[place] = first
        return found

    def _by_number(self, connection: Connection, places: Mapping[Place, Sequence[int]]) -> dict[Place, int]:
        """Look at all that is unsent of these business ids, up to the last of ours."""
        columns = self._send.c
        ours = [number for numbers in places.values() for number in numbers]
        first = (
            select(columns.topic, columns.business_id, func.min(columns.number))
            .where(
                columns.state == SendState.NEW.value,
                among(self._kind, columns.business_id, {business_id for _, business_id in places}),
                columns.number < max(ours),
                not_(among(self._kind, columns.number, ours)),
                columns.is_ordered == 1,
            )
            .group_by(columns.topic, columns.business_id)
        )
        found = {(topic, business_id): number for topic, business_id, number in connection.execute(first)}
        return {place: found[place] for place in found.keys() & places.keys() if found[place] < places[place][-1]}

    def _facts(self, connection: Connection, found: Mapping[Place, int]) -> dict[Place, Blocker]:
        columns = self._send.c
        asked = select(columns.number, columns.due_at_ms, columns.claimed_by).where(
            among(self._kind, columns.number, found.values()), columns.state == SendState.NEW.value
        )
        facts = {row[0]: row for row in connection.execute(asked)}
        # One that was sent meanwhile blocks all the same: there may be another one behind it.
        return {
            place: Blocker(number, facts[number].due_at_ms, facts[number].claimed_by is not None)
            if number in facts
            else Blocker(number, 0, False)
            for place, number in found.items()
        }


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
