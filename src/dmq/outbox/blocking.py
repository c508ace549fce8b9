"""What holds a row back: an unsent one before it, of the same topic and business id, that somebody else is to send.

What always holds: rows are asked about after they were claimed, so whatever was committed before them is seen; a row
that somebody is just sending holds back, since only its mark says that a broker has it. The way to the answer goes by
the index of unsent rows however many rows have ended, and whatever the database believes of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, Row, Table, func, not_, select, text

from dmq.outbox.engines import background
from dmq.outbox.lists import among, array_text
from dmq.outbox.states import SendState

__all__ = ["Blocker", "Blockers", "Place"]

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
