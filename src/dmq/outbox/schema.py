"""The outbox's and inbox's tables, the same on SQLite, MariaDB / MySQL and PostgreSQL, and their making.

What always holds: names are the user's to choose, columns are ours; ids and names compare byte by byte everywhere;
times are milliseconds since 1970; making the tables twice, or from two processes at once, does no harm. They join any
`MetaData`, so that a migration tool sees them as the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DatabaseError, IntegrityError

from dmq.errors import InvalidSettings
from dmq.outbox.sender.envelope import SEND_ID_CHARS
from dmq.outbox.states import SendState

__all__ = ["PREFIX", "OutboxTables", "check_tables", "create_tables", "tables"]

PREFIX: Final = "m_"
_TRIES: Final = 10
_THERE_CODES: Final = (1050, 1061)  # MySQL's: of a table, of an index
_THERE_STATES: Final = ("42P07", "42710")  # PostgreSQL's
NAME_CHARS_MAX: Final = 255

_MYSQL: Final = ("mysql", "mariadb")
_OPTIONS: Final[dict[str, Any]] = {
    f"{kind}_{name}": value
    for kind in _MYSQL
    for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only what is INTEGER
_LongText = Text().with_variant(mysql.MEDIUMTEXT(), *_MYSQL)
_Bytes = LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)


@dataclass(frozen=True)
class OutboxTables:
    """The tables. A sender needs `send`, `result` and `sequence`; a consumer `consumer` and `position`."""

    metadata: MetaData
    send: Table
    result: Table
    sequence: Table
    consumer: Table
    position: Table

    def all(self) -> tuple[Table, ...]:
        return (self.send, self.result, self.sequence, self.consumer, self.position)


def tables(
    prefix: str = PREFIX,
    metadata: MetaData | None = None,
    *,
    names: Mapping[str, str] | None = None,
    schema: str | None = None,
) -> OutboxTables:
    """The tables' definitions.

    Parameters:
        prefix: stands before every name: `m_` gives `m_msgsend` and so on.
        metadata: where they are to be; one of their own if left out. Asked twice, it gives the same tables.
        names: other names, by what a table is: `send`, `result`, `sequence`, `consumer`, `position`.
        schema: the database schema they are in, if not the connection's own.

    Raises:
        InvalidSettings: `names` has a word that is not a table of ours.
    """
    unknown = sorted(set(names or ()) - set(_MAKERS))
    if unknown:
        raise InvalidSettings(f"names= knows {', '.join(_MAKERS)}, not {unknown[0]!r}")
    kept = MetaData() if metadata is None else metadata
    made: dict[str, Table] = {}
    for what, maker in _MAKERS.items():
        name = (names or {}).get(what) or f"{prefix}msg{what}"
        full = name if schema is None else f"{schema}.{name}"
        made[what] = kept.tables[full] if full in kept.tables else maker(name, kept, schema)
    return OutboxTables(kept, **made)


def _name(name: str, *, optional: bool = False) -> Column[str]:
    return Column(name, String(NAME_CHARS_MAX), nullable=optional)


def _send_id(**options: Any) -> Column[str]:
    return Column("send_id", String(SEND_ID_CHARS), nullable=False, **options)


def _time(name: str, *, optional: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=optional)


def _send(name: str, metadata: MetaData, schema: str | None) -> Table:
    unsent = text(f"state = '{SendState.NEW}'")
    return Table(
        name,
        metadata,
        Column("number", _Number, primary_key=True, autoincrement=True),  # the order of insertion
        _send_id(),
        _name("app"),  # who sent it, and gets its results
        _name("topic"),
        _name("business_id", optional=True),
        Column("sequence", BigInteger, nullable=True),  # strict messages only
        Column("is_ordered", SmallInteger, nullable=False),
        _name("message_key", optional=True),
        _name("tag", optional=True),
        Column("priority", SmallInteger, nullable=False),
        Column("body", _Bytes, nullable=False),
        Column("properties", _LongText, nullable=True),  # JSON
        Column("expected_groups", _LongText, nullable=True),  # with commas; NULL: any one; empty: none
        Column("state", String(16), nullable=False),
        Column("attempts", Integer, nullable=False),  # to send it
        Column("checks", Integer, nullable=False),  # by the compensator
        Column("claimed_by", String(64), nullable=True),
        # A relay or a compensator takes rows whose time has come: unsent ones to send, sent ones to ask about.
        _time("due_at_ms"),
        _time("created_at_ms"),
        _time("sent_at_ms", optional=True),
        _time("ended_at_ms", optional=True),
        Column("last_error", _LongText, nullable=True),
        UniqueConstraint("send_id", name=f"{name}_send_id"),
        Index(f"{name}_by_due", "state", "due_at_ms", "number"),
        # What holds back the later messages of a business id; small where a database has partial indexes.
        Index(f"{name}_by_business", "business_id", "state", "number", postgresql_where=unsent, sqlite_where=unsent),
        schema=schema,
        sqlite_autoincrement=True,  # a number is never given twice
        **_OPTIONS,
    )


def _result(name: str, metadata: MetaData, schema: str | None) -> Table:
    return Table(
        name,
        metadata,
        _send_id(primary_key=True),
        Column("consumer_group", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        Column("business_state", String(16), nullable=False),
        _name("consumer_id"),
        Column("reason", _LongText, nullable=True),
        _time("consumed_at_ms"),
        _time("received_at_ms"),
        schema=schema,
        **_OPTIONS,
    )


def _sequence(name: str, metadata: MetaData, schema: str | None) -> Table:
    return Table(
        name,
        metadata,
        Column("topic", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        Column("business_id", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        Column("last", BigInteger, nullable=False),
        schema=schema,
        **_OPTIONS,
    )


def _consumer(name: str, metadata: MetaData, schema: str | None) -> Table:
    return Table(
        name,
        metadata,
        _send_id(primary_key=True),
        Column("consumer_group", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        _name("topic"),
        _name("business_id", optional=True),
        Column("sequence", BigInteger, nullable=True),
        Column("business_state", String(16), nullable=False),
        _name("consumer_id"),
        Column("reason", _LongText, nullable=True),
        _time("created_at_ms"),
        _time("consumed_at_ms", optional=True),
        schema=schema,
        **_OPTIONS,
    )


def _position(name: str, metadata: MetaData, schema: str | None) -> Table:
    return Table(
        name,
        metadata,
        Column("consumer_group", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        Column("topic", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        Column("business_id", String(NAME_CHARS_MAX), primary_key=True, nullable=False),
        Column("last", BigInteger, nullable=False),  # the last sequence consumed
        _time("changed_at_ms"),
        _time("waiting_since_ms", optional=True),  # since when a gap is open
        schema=schema,
        **_OPTIONS,
    )


_MAKERS: Final[dict[str, Callable[[str, MetaData, str | None], Table]]] = {
    "send": _send,
    "result": _result,
    "sequence": _sequence,
    "consumer": _consumer,
    "position": _position,
}


def create_tables(engine: Engine, tables: OutboxTables) -> None:
    """Make the tables that are missing.

    Raises:
        SQLAlchemyError: the database does not answer, or refuses us.
    """
    for left in range(_TRIES, 0, -1):
        try:
            tables.metadata.create_all(engine, tables=tables.all())
            return
        except DatabaseError as error:
            # Another process makes them at the same moment: each try finds more of them there.
            if left == 1 or not _is_there(error):
                raise


def _is_there(error: DatabaseError) -> bool:
    """Whether something could not be made because it exists already."""
    cause = error.orig
    code = cause.args[0] if cause is not None and cause.args else None
    state = getattr(cause, "sqlstate", None)
    # By number where there is one: texts come in the server's language.
    is_there = code in _THERE_CODES or state in _THERE_STATES or "already exists" in str(cause)
    return isinstance(error, IntegrityError) or is_there


def check_tables(engine: Engine, wanted: tuple[Table, ...]) -> None:
    """See that these tables are there with all their columns.

    Raises:
        InvalidSettings: one is missing, or lacks a column.
        SQLAlchemyError: the database does not answer.
    """
    found = inspect(engine)
    for table in wanted:
        if not found.has_table(table.name, schema=table.schema):
            raise InvalidSettings(
                f"the table {table.name} is missing: make it with dmq.outbox.create_tables(engine, tables) or with "
                "your migration tool"
            )
        there = {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
        missing = [column.name for column in table.columns if column.name not in there]
        if missing:
            raise InvalidSettings(
                f"the table {table.name} lacks the column {missing[0]}: bring it up to date with your migration tool"
            )
