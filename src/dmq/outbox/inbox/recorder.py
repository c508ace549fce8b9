"""Recording a consumption: what the inbox asks of the consumer table, as conversations. No I/O.

A conversation is a generator that yields a statement with its parameters and is sent the cursor's result; `run` holds
it with a plain session or connection, `aio_run` with one of asyncio. So the steps are written once.

What always holds: everything here happens in the transaction of the caller. `take` either puts the row of a
message into the table, where it waits for a transaction that is putting the same one, or tells what the earlier
consumption came to; of two that race, one gets `Contended` or the database's own error for that, and starts again.
Messages of a strict sequence move their position with their row, by one, or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from sqlalchemy import Executable, Insert, Table, bindparam, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError

from dmq.errors import StorageError
from dmq.outbox.schema import OutboxTables
from dmq.outbox.states import BusinessState

__all__ = [
    "CONTENTION_TRIES",
    "Contended",
    "Earlier",
    "Gap",
    "Recorder",
    "Row",
    "Steps",
    "aio_run",
    "is_contention",
    "pause_after",
    "run",
]

CONTENTION_TRIES: Final = 8

T = TypeVar("T")
Step: TypeAlias = tuple[Any, Mapping[str, Any] | list[Mapping[str, Any]]]
Steps: TypeAlias = Generator[Step, Any, T]

_DUPLICATE: Final = 1062  # MySQL's
_MYSQL: Final = ("mysql", "mariadb")
# Two transactions in each other's way: one is to start again.
_CONTENTION_CODES: Final = (1020, 1205, 1213)  # MySQL's: changed since last read, lock wait, deadlock
_CONTENTION_STATES: Final = ("40001", "40P01", "55P03")  # PostgreSQL's: serialization, deadlock, lock not available


class Row(msgspec.Struct, frozen=True):
    """A consumption as the consumer table has it."""

    send_id: str
    group: str
    topic: str
    business_id: str | None
    sequence: int | None
    consumer_id: str
    at_ms: int


class Earlier(msgspec.Struct, frozen=True):
    """What a message came to that was consumed before."""

    state: BusinessState
    consumer_id: str
    reason: str
    at_ms: int


class Gap(Exception):
    """Not an error: a message of a strict sequence came before the one it follows.

    Parameters:
        last: the last one consumed; 0 if there was none.
        waiting_since_ms: when that was first noticed, if it was.
    """

    def __init__(self, last: int, waiting_since_ms: int | None) -> None:
        super().__init__(f"the last one consumed is {last}")
        self.last = last
        self.waiting_since_ms = waiting_since_ms


class Contended(Exception):
    """Another transaction was quicker: start again."""


def run(steps: Steps[T], execute: Callable[..., Any]) -> T:
    """Hold a conversation with `Session.execute` or the like."""
    try:
        step = next(steps)
        while True:
            try:
                answer = execute(*step)
            except IntegrityError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def aio_run(steps: Steps[T], execute: Callable[..., Awaitable[Any]]) -> T:
    """The same with `AsyncSession.execute` or the like."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await execute(*step)
            except IntegrityError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def is_contention(error: BaseException) -> bool:
    """Whether a transaction failed only because of another one, so that the same again may work."""
    if isinstance(error, Contended):
        return True
    if not isinstance(error, DBAPIError) or error.orig is None:
        return False
    cause = error.orig
    code = cause.args[0] if cause.args else None
    state = getattr(cause, "sqlstate", None)
    return code in _CONTENTION_CODES or state in _CONTENTION_STATES or "database is locked" in str(cause)


def pause_after(tries: int) -> float:
    """How long to wait before a transaction that another one was in the way of is tried again."""
    return random.uniform(0.5, 1.0) * min(1.0, 0.01 * 2.0**tries)


class Recorder:
    """The statements for one kind of database, made once.

    Parameters:
        kind: the dialect's name.
    """

    def __init__(self, tables: OutboxTables, kind: str) -> None:
        consumer, position = tables.consumer, tables.position
        self._is_mysql = kind in _MYSQL
        self._insert = insert_new(consumer, kind)
        self._insert_many = insert(consumer)
        self._insert_position = insert_new(position, kind)
        earlier = select(
            consumer.c.business_state, consumer.c.consumer_id, consumer.c.reason, consumer.c.consumed_at_ms
        ).where(consumer.c.send_id == bindparam("one_id"), consumer.c.consumer_group == bindparam("one_group"))
        place = select(position.c.last, position.c.waiting_since_ms).where(*_at(position))
        if self._is_mysql:
            # A plain read might show what was there when the transaction began.
            earlier, place = earlier.with_for_update(read=True), place.with_for_update(read=True)
        self._earlier, self._place = earlier, place
        self._many = select(
            consumer.c.send_id,
            consumer.c.business_state,
            consumer.c.consumer_id,
            consumer.c.reason,
            consumer.c.consumed_at_ms,
        ).where(
            consumer.c.send_id.in_(bindparam("some_ids", expanding=True)),
            consumer.c.consumer_group == bindparam("one_group"),
        )
        self._end = (
            update(consumer)
            .where(consumer.c.send_id == bindparam("one_id"), consumer.c.consumer_group == bindparam("one_group"))
            .values(business_state=bindparam("to_state"), reason=bindparam("to_reason"))
        )
        moved: dict[str, Any] = {
            "last": bindparam("to_last"),
            "changed_at_ms": bindparam("now_ms"),
            "waiting_since_ms": None,
        }
        self._advance = (
            update(position).where(*_at(position), position.c.last == bindparam("from_last")).values(**moved)
        )
        self._jump = update(position).where(*_at(position), position.c.last < bindparam("to_last")).values(**moved)
        self._wait = (
            update(position)
            .where(*_at(position), position.c.last == bindparam("from_last"), position.c.waiting_since_ms.is_(None))
            .values(waiting_since_ms=bindparam("now_ms"))
        )

    # --- one message ------------------------------------------------------------------------------------------------

    def take(self, row: Row, state: BusinessState, reason: str = "", *, jumps: bool = False) -> Steps[Earlier | None]:
        """Put a row into the table with what it will have come to when the transaction commits.

        Parameters:
            jumps: a gap before it is passed over.

        Returns:
            None, or what the message came to before. A message of a strict sequence that comes too late is put into
            the table as rolled back, and that is returned.

        Raises:
            Gap: the message before it is still to come.
            Contended: another transaction was quicker.
        """
        if not (yield from self._insert_new(row, state, reason)):
            earlier = yield from self.find(row.send_id, row.group)
            if earlier is None:
                raise Contended
            return earlier
        if row.sequence is not None and row.business_id is not None:
            last = yield from self._move(row, row.sequence, jumps)
            if last is not None:
                late = f"number {row.sequence} came when {last} was consumed already: it is passed over"
                yield from self.end(row, BusinessState.ROLLBACK, late)
                return Earlier(BusinessState.ROLLBACK, row.consumer_id, late, row.at_ms)
        return None

    def _insert_new(self, row: Row, state: BusinessState, reason: str) -> Steps[bool]:
        return (yield from self._tries(self._insert, _values(row, state, reason)))

    def _tries(self, statement: Executable, values: Mapping[str, Any]) -> Steps[bool]:
        """Whether a row could be inserted; on MySQL a duplicate is an error that harms the statement alone."""
        try:
            result = yield statement, values
        except IntegrityError as error:
            if not self._is_mysql or error.orig is None or error.orig.args[0] != _DUPLICATE:
                raise
            return False
        if result.rowcount not in (0, 1):
            raise StorageError(f"the database's driver does not tell whether a row was inserted: {result.rowcount}")
        return bool(result.rowcount)

    def find(self, send_id: str, group: str) -> Steps[Earlier | None]:
        """What a message came to, if it was consumed."""
        found = (yield self._earlier, {"one_id": send_id, "one_group": group}).one_or_none()
        return None if found is None else Earlier(BusinessState(found[0]), found[1], found[2] or "", found[3] or 0)

    def find_many(self, send_ids: list[str], group: str) -> Steps[dict[str, Earlier]]:
        """What each of these came to that was consumed."""
        found = (yield self._many, {"some_ids": send_ids, "one_group": group}).all()
        return {one[0]: Earlier(BusinessState(one[1]), one[2], one[3] or "", one[4] or 0) for one in found}

    def end(self, row: Row, state: BusinessState, reason: str = "") -> Steps[None]:
        """Say what a message came to whose row this transaction has put there."""
        yield self._end, {"one_id": row.send_id, "one_group": row.group, "to_state": state, "to_reason": reason or None}

    # --- many at once -----------------------------------------------------------------------------------------------

    def put_many(self, rows: list[Row]) -> Steps[None]:
        """Put rows that do not exist, as successes, with one statement.

        Raises:
            Contended: one of them is there by now.
        """
        try:
            yield self._insert_many, [_values(row, BusinessState.SUCCESS, "") for row in rows]
        except IntegrityError as error:
            raise Contended from error

    # --- strict sequences -------------------------------------------------------------------------------------------

    def _move(self, row: Row, sequence: int, jumps: bool) -> Steps[int | None]:
        """Move the position of a sequence to this message; returns the last one consumed if it comes too late."""
        where = _where(row)
        moved = {**where, "to_last": sequence, "now_ms": row.at_ms}
        if (yield self._advance, {**moved, "from_last": sequence - 1}).rowcount == 1:
            return None
        found = (yield self._place, where).one_or_none()
        if found is None:
            if sequence > 1 and not jumps:
                raise Gap(0, None)
            if not (yield from self._tries(self._insert_position, _position(row, sequence))):
                raise Contended
            return None
        if found[0] >= sequence:
            return int(found[0])
        if not jumps:
            if found[0] == sequence - 1:
                raise Contended  # it moved just now
            raise Gap(found[0], found[1])
        if (yield self._jump, moved).rowcount != 1:
            raise Contended
        return None

    def note_gap(self, row: Row, last: int) -> Steps[None]:
        """Remember since when a message waits for the one before it, unless that is known."""
        if last == 0:
            values = {**_position(row, 0), "waiting_since_ms": row.at_ms}
            if (yield from self._tries(self._insert_position, values)):
                return
        yield self._wait, {**_where(row), "from_last": last, "now_ms": row.at_ms}


def insert_new(table: Table, kind: str) -> Executable:
    """An insert of all columns that changes nothing where the key is there already; on MySQL it raises."""
    made: Insert
    dialect: Any
    if kind == "postgresql":
        made, dialect = postgresql.insert(table).on_conflict_do_nothing(), postgresql.dialect
    elif kind == "sqlite":
        made, dialect = sqlite.insert(table).on_conflict_do_nothing(), sqlite.dialect
    else:
        return insert(table).execution_options(preserve_rowcount=True)
    # SQLAlchemy would compile it anew every time, which costs as much as the statement; as a text it does not.
    compiled = made.compile(dialect=dialect(paramstyle="named"), column_keys=[*table.columns.keys()])
    return text(str(compiled)).execution_options(preserve_rowcount=True)


def _at(position: Table) -> tuple[Any, ...]:
    return (
        position.c.consumer_group == bindparam("one_group"),
        position.c.topic == bindparam("one_topic"),
        position.c.business_id == bindparam("one_business"),
    )


def _where(row: Row) -> dict[str, Any]:
    return {"one_group": row.group, "one_topic": row.topic, "one_business": row.business_id}


def _position(row: Row, last: int) -> dict[str, Any]:
    return {
        "consumer_group": row.group,
        "topic": row.topic,
        "business_id": row.business_id,
        "last": last,
        "changed_at_ms": row.at_ms,
        "waiting_since_ms": None,
    }


def _values(row: Row, state: BusinessState, reason: str) -> dict[str, Any]:
    return {
        "send_id": row.send_id,
        "consumer_group": row.group,
        "topic": row.topic,
        "business_id": row.business_id,
        "sequence": row.sequence,
        "business_state": str(state),
        "consumer_id": row.consumer_id,
        "reason": reason or None,
        "created_at_ms": row.at_ms,
        "consumed_at_ms": row.at_ms,
    }
