"""The tables of a registry in SQL, the same on every database, and their making.

What always holds: making them twice does no harm; tables that a newer DMQ made are left alone, with one sentence that
says so. Paths compare byte by byte everywhere.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Engine, Index, Integer, LargeBinary, MetaData, String, Table, insert, select
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError

from dmq.errors import WrongFormat
from dmq.registry.registry import PATH_BYTES_MAX, ROOT

__all__ = ["CHANGES", "ENTRIES", "SESSIONS", "VERSION", "make_schema"]

VERSION: Final = 1
_NAME: Final = "dmq_registry"
_TRIES: Final = 10
_THERE: Final = (1050, 1061, "42P07", "42710", "23505")  # MariaDB's numbers, PostgreSQL's states

_metadata = MetaData()
_OPTIONS: Final[dict[str, Any]] = {
    f"{kind}_{name}": value
    for kind in ("mysql", "mariadb")
    for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}
_Path = String(PATH_BYTES_MAX).with_variant(String(PATH_BYTES_MAX, collation="C"), "postgresql")
_Bytes = LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")

ENTRIES: Final = Table(
    "dmq_registry_entry",
    _metadata,
    Column("path", _Path, primary_key=True),
    Column("parent", _Path, nullable=False),
    Column("value", _Bytes, nullable=False),
    Column("version", BigInteger, nullable=False),  # of the root: how many changes there were
    Column("session", BigInteger, nullable=False),
    Index("dmq_registry_entry_by_parent", "parent"),
    Index("dmq_registry_entry_by_session", "session"),
    **_OPTIONS,
)

SESSIONS: Final = Table(
    "dmq_registry_session",
    _metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", String(255), nullable=False),
    Column("number", BigInteger, nullable=False),  # of its last write
    Column("expires_at", BigInteger, nullable=False),  # milliseconds by the database's clock
    **_OPTIONS,
)

CHANGES: Final = Table(
    "dmq_registry_change",
    _metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("path", _Path, nullable=False),
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
    """Make the tables that are missing, and the root.

    Raises:
        WrongFormat: another version of DMQ made them.
        SQLAlchemyError: the database is not there, or does not let us.
    """
    for left in range(_TRIES, 0, -1):
        try:
            _metadata.create_all(engine)
            break
        except (ProgrammingError, IntegrityError, OperationalError) as error:
            # Another name server makes them at the same moment: each try finds more of them there.
            if left == 1 or not _is_there(error):
                raise
    for statement in (
        insert(_VERSIONS).values(name=_NAME, version=VERSION),
        insert(ENTRIES).values(path=ROOT, parent="", value=b"", version=0, session=0),
    ):
        try:
            with engine.begin() as connection:
                connection.execute(statement)
        except IntegrityError:
            pass  # it is there
    with engine.begin() as connection:
        found = connection.scalar(select(_VERSIONS.c.version).where(_VERSIONS.c.name == _NAME))
    if found != VERSION:
        raise WrongFormat(
            f"the registry's tables are of version {found}, and this DMQ knows version {VERSION}: use the DMQ that "
            "made them, or another database"
        )


def _is_there(error: DBAPIError) -> bool:
    """Whether a table could not be made because there is one."""
    cause = error.orig
    code = cause.args[0] if cause is not None and cause.args else None
    return getattr(cause, "sqlstate", None) in _THERE or code in _THERE
