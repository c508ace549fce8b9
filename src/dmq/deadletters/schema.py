"""The table of dead letters, the same on every database, and its making.

What always holds: making it twice, or by two brokers at once, does no harm; a table that a newer DMQ made is left
alone, with one sentence that says so. Names compare byte by byte everywhere. Times are milliseconds since 1970.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
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
    insert,
    select,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DatabaseError, IntegrityError

from dmq.deadletters.letter import TEXT_CHARS_MAX
from dmq.errors import WrongFormat

__all__ = ["LETTERS", "VERSION", "make_schema"]

VERSION: Final = 1
_NAME: Final = "dmq_dead_letter"
_TRIES: Final = 10
_THERE_CODES: Final = (1050, 1061)  # MySQL's: of a table, of an index
_THERE_STATES: Final = ("42P07", "42710")  # PostgreSQL's

_metadata = MetaData()
_OPTIONS: Final[dict[str, Any]] = {
    f"{kind}_{name}": value
    for kind in ("mysql", "mariadb")
    for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}

_Number = BigInteger().with_variant(Integer, "sqlite")
_LongText = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
_Bytes = LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def _text(name: str, *, optional: bool = False) -> Column[str]:
    return Column(name, String(TEXT_CHARS_MAX), nullable=optional)


LETTERS: Final = Table(
    _NAME,
    _metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),
    Column("message_id", String(26), nullable=False),
    _text("group"),
    Column("attempts", BigInteger, nullable=False),
    _text("broker"),
    _text("topic"),
    Column("queue", SmallInteger),
    Column("offset", BigInteger),
    _text("key", optional=True),
    _text("tag", optional=True),
    _text("business_id", optional=True),
    _text("app"),
    Column("priority", SmallInteger, nullable=False),
    Column("reason", String(32), nullable=False),
    Column("first_error", _LongText, nullable=False),
    Column("last_error", _LongText, nullable=False),
    Column("properties", _LongText, nullable=False),  # JSON
    Column("body", _Bytes, nullable=False),
    Column("body_bytes", BigInteger, nullable=False),
    Column("codec", SmallInteger, nullable=False),
    Column("sent_codec", SmallInteger, nullable=False),
    Column("flags", SmallInteger, nullable=False),
    Column("tag_hash", Integer, nullable=False),
    Column("attributes", _Bytes, nullable=False),
    Column("sent_at_ms", BigInteger, nullable=False),
    Column("dead_at_ms", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    _text("claimed_by", optional=True),
    Column("changed_by", String(512), nullable=True),
    Column("changed_at_ms", BigInteger, nullable=True),
    UniqueConstraint("message_id", "group", "attempts", name="dmq_dead_letter_once"),
    Index("dmq_dead_letter_by_state", "state", "number"),
    Index("dmq_dead_letter_by_group", "group", "state", "number"),
    Index("dmq_dead_letter_by_topic", "topic", "state", "number"),
    Index("dmq_dead_letter_by_claim", "claimed_by"),
    sqlite_autoincrement=True,  # a number is never given twice
    **_OPTIONS,
)

_VERSIONS: Final = Table(
    "dmq_schema",
    _metadata,
    Column("name", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    **_OPTIONS,
)


def make_schema(engine: Engine) -> None:
    """Make the tables that are missing.

    Raises:
        WrongFormat: another version of DMQ made them.
        SQLAlchemyError: the database does not answer, or refuses us.
    """
    for left in range(_TRIES, 0, -1):
        try:
            found = _make(engine)
            break
        except DatabaseError as error:
            # Another broker makes them at the same moment: each try finds more of them there.
            if left == 1 or not _is_there(error):
                raise
    if found != VERSION:
        raise WrongFormat(
            f"the table {_NAME} has version {found}, this DMQ knows {VERSION}: use the DMQ that made it, or another "
            "database for broker.dead_letters_url",
            version=found,
        )


def _make(engine: Engine) -> int:
    """Make what is missing; returns the version of what is there."""
    _metadata.create_all(engine)
    with engine.begin() as connection:
        found = _version(connection)
        if found is None:
            connection.execute(insert(_VERSIONS).values(name=_NAME, version=VERSION))
            found = VERSION
    return found


def _is_there(error: DatabaseError) -> bool:
    """Whether something could not be made because it exists already."""
    cause = error.orig
    code = cause.args[0] if cause is not None and cause.args else None
    state = getattr(cause, "sqlstate", None)
    # By number where there is one: texts come in the server's language.
    is_there = code in _THERE_CODES or state in _THERE_STATES or "already exists" in str(cause)
    return isinstance(error, IntegrityError) or is_there


def _version(connection: Connection) -> int | None:
    found: int | None = connection.scalar(select(_VERSIONS.c.version).where(_VERSIONS.c.name == _NAME))
    return found
