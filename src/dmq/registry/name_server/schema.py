"""The tables of a registry in SQL, the same on every database, and their making.

What always holds: making them twice, or by two name servers at once, does no harm; tables that a newer DMQ made are
left alone, with one sentence that says so. Paths compare byte by byte everywhere. A database holds a registry or the
mirror of one, never both. The root's value is drawn once: by it a client knows name servers of one database.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.sql.dml import Insert

from dmq.errors import WrongFormat
from dmq.registry.registry import PATH_BYTES_MAX, ROOT

__all__ = ["CHANGES", "ENTRIES", "LOOKS", "MIRRORED", "SESSIONS", "SOURCES", "VERSION", "make_mirror", "make_schema"]

VERSION: Final = 1
_REGISTRY: Final = "dmq_registry"
_MIRROR: Final = "dmq_mirror"
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

# One row: when a name server looked last, so that another one knows whether sessions could be renewed.
LOOKS: Final = Table(
    "dmq_registry_look",
    _metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("looked_at", BigInteger, nullable=False),  # milliseconds by the database's clock
    Column("session_ms", BigInteger, nullable=False),  # how long sessions live; the same for all name servers
    **_OPTIONS,
)

_VERSIONS: Final = Table(
    "dmq_schema",
    _metadata,
    Column("name", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    **_OPTIONS,
)

# Metadata of a registry that is elsewhere.
MIRRORED: Final = Table(
    "dmq_mirror_entry",
    _metadata,
    Column("path", _Path, primary_key=True),
    Column("parent", _Path, nullable=False),
    Column("value", _Bytes, nullable=False),
    Column("version", BigInteger, nullable=False),
    Index("dmq_mirror_entry_by_parent", "parent"),
    **_OPTIONS,
)

# One row: of which registry, and how far.
SOURCES: Final = Table(
    "dmq_mirror_source",
    _metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("url", String(1024), nullable=False),
    Column("cluster", String(64), nullable=False),
    Column("change", BigInteger, nullable=False, quote=True),  # version of /dmq/change that is mirrored whole
    Column("mirrored_at", BigInteger, nullable=False),  # when the mirror was last as the registry, milliseconds
    Column("writer", String(64), nullable=False),  # the name server that writes it
    Column("written_at", BigInteger, nullable=False),  # when that was heard last, by the database's clock
    **_OPTIONS,
)


def make_schema(engine: Engine) -> str:
    """Make the tables of a registry that are missing, and the root; returns the registry's id.

    Raises:
        WrongFormat: another version of DMQ made them, or the database is a mirror.
        SQLAlchemyError: the database does not answer, or refuses us.
    """
    _make(engine, _REGISTRY, [ENTRIES, SESSIONS, CHANGES, LOOKS, _VERSIONS])
    root = ENTRIES.c.path == ROOT
    _insert_once(engine, insert(ENTRIES).values(path=ROOT, parent="", value=b"", version=0, session=0))
    with engine.begin() as connection:
        drawn = secrets.token_hex(8).encode()
        connection.execute(update(ENTRIES).where(root, ENTRIES.c.value == b"").values(value=drawn))
    with engine.begin() as connection:
        return bytes(connection.execute(select(ENTRIES.c.value).where(root)).scalar_one()).decode()


def make_mirror(engine: Engine) -> None:
    """Make the tables of a mirror that are missing; raises as `make_schema` does."""
    _make(engine, _MIRROR, [MIRRORED, SOURCES, _VERSIONS])


def _make(engine: Engine, name: str, tables: list[Table]) -> None:
    for left in range(_TRIES, 0, -1):
        try:
            _metadata.create_all(engine, tables)
            break
        except (ProgrammingError, IntegrityError, OperationalError) as error:
            # Another name server makes them at the same moment: each try finds more of them there.
            if left == 1 or not _is_there(error):
                raise
    found = _versions(engine)
    other = _REGISTRY if name == _MIRROR else _MIRROR
    if other in found:
        what = "the registry itself" if other == _REGISTRY else "a mirror of a registry that is elsewhere"
        raise WrongFormat(f"the database holds {what}, which goes with nothing else: use another database")
    if name not in found:
        _insert_once(engine, insert(_VERSIONS).values(name=name, version=VERSION))
        found = _versions(engine)
    if found.get(name) != VERSION:
        raise WrongFormat(
            f"the registry's tables are of version {found.get(name)}, and this DMQ knows version {VERSION}: use the "
            "DMQ that made them, or another database"
        )


def _versions(engine: Engine) -> dict[str, int]:
    with engine.begin() as connection:
        return {row.name: row.version for row in connection.execute(select(_VERSIONS))}


def _insert_once(engine: Engine, statement: Insert) -> None:
    try:
        with engine.begin() as connection:
            connection.execute(statement)
    except IntegrityError:
        pass  # it is there


def _is_there(error: DBAPIError) -> bool:
    """Whether a table could not be made because there is one."""
    cause = error.orig
    code = cause.args[0] if cause is not None and cause.args else None
    return getattr(cause, "sqlstate", None) in _THERE or code in _THERE
