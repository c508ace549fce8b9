"""The databases an outbox works on: what each of them can, and the SQL that differs between them.

What always holds: background work runs at READ COMMITTED, so that on MariaDB and MySQL it never locks gaps into which
users insert; a database that two connections cannot share is refused, since our commits would be the user's. A
condition over a long list of values says the same on every database. On PostgreSQL it is one parameter however long the
list, written as a text: its driver takes longer over a list than the server over the statement. The planner goes by an
index there, whatever its statistics say, which for a queue are always old.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    String,
    any_,
    bindparam,
    cast,
    create_engine,
    func,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from dmq.deadletters.engines import make_engine
from dmq.deadletters.url import check_url, shown
from dmq.errors import DatabaseDown, InvalidSettings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = [
    "Engine",
    "among",
    "array_text",
    "background",
    "go_by_index",
    "is_mysql",
    "open_engine",
    "sentence",
    "skips_locked",
    "sync_engine",
    "usable",
]


# PostgreSQL's, for one transaction. JIT is for queries that cost much, as any does that has to do what is off.
_BY_INDEX: Final = text(
    "SELECT "
    + ", ".join(
        f"set_config('{name}', 'off', true)" for name in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
    )
)

# asyncio driver -> the driver of the same database that blocks
_SYNC: Final = {
    "sqlite+aiosqlite": "sqlite+pysqlite",
    "mysql+aiomysql": "mysql+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
    "postgresql+asyncpg": "postgresql+psycopg",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def is_mysql(engine: Engine) -> bool:
    """MariaDB or MySQL."""
    return engine.dialect.name in ("mysql", "mariadb")


def sync_engine(engine: Engine | AsyncEngine) -> Engine:
    """The engine for background threads: the user's own, or for an asyncio one another one on the same database.

    Raises:
        InvalidSettings: there can be none.
    """
    behind = getattr(engine, "sync_engine", None)
    if behind is None:
        assert isinstance(engine, Engine)
        _check_shared(engine)
        return engine
    _check_shared(behind)
    url = behind.url
    driver = _SYNC.get(url.drivername)
    if driver is None:
        raise InvalidSettings(
            f"the outbox's background work needs an engine that blocks, and knows none for {url.drivername}: make one "
            "and pass it as sync_engine="
        )
    given = check_url(url.set(drivername=driver).render_as_string(hide_password=False), "sync_engine=")
    return create_engine(given, pool_pre_ping=True)


def _check_shared(engine: Engine) -> None:
    in_memory = engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:")
    if in_memory or isinstance(engine.pool, StaticPool | SingletonThreadPool):
        raise InvalidSettings(
            "the outbox needs a database that several connections can share: use a file instead of SQLite in memory, "
            "and no StaticPool"
        )


def background(engine: Engine) -> Engine:
    """The same engine, for work that no user sees."""
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


def go_by_index(connection: Connection) -> None:
    """Have rows found by walking an index, in this transaction. A queue's table is never as it was when PostgreSQL last
    counted it: of a backlog that it takes for a few rows, it would read and sort all for every batch."""
    if connection.dialect.name == "postgresql":
        connection.execute(_BY_INDEX)


def skips_locked(engine: Engine) -> bool:
    """Whether it has SELECT … FOR UPDATE SKIP LOCKED; known once it has been connected to."""
    dialect: Any = engine.dialect
    if dialect.name == "postgresql":
        return True
    if not is_mysql(engine):
        return False
    version = dialect.server_version_info or (0,)
    return bool(version >= ((10, 6) if dialect.is_mariadb else (8, 0, 1)))


def open_engine(url: str, option: str) -> Engine:
    """An engine for a command.

    Parameters:
        url: as SQLAlchemy writes it; the driver may be left out.
        option: what the user calls it, for the messages.

    Raises:
        InvalidSettings: the URL can never work.
        DatabaseDown: it names a SQLite file that does not exist.
    """
    from pathlib import Path

    from sqlalchemy.engine import make_url

    full = check_url(url, option)
    parsed = make_url(full)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        raise DatabaseDown(f"{option} names no database: there is no file {parsed.database or ':memory:'}")
    return make_engine(full)


@contextmanager
def usable(engine: Engine) -> Iterator[None]:
    """Around work on a database: its errors become one of ours, and its connections are closed at the end.

    Raises:
        DatabaseDown: it cannot be used.
    """
    try:
        yield
    except SQLAlchemyError as error:
        raise DatabaseDown(sentence(error, engine)) from error
    finally:
        engine.dispose()


def sentence(error: SQLAlchemyError, engine: Engine) -> str:
    """What the database said, on one line, and which one it was."""
    cause = getattr(error, "orig", None) or error
    said = " ".join(str(part) for part in (getattr(cause, "args", None) or (cause,)))
    line = said.strip().splitlines()[0] if said.strip() else type(cause).__name__
    where = shown(engine.url.render_as_string(hide_password=False))
    return f"the database {where} cannot be used: {line[:300]}"


def array_text(values: Collection[Any]) -> str:
    """Numbers or texts as PostgreSQL writes an array of them."""
    if not values or isinstance(next(iter(values)), int):
        return "{" + ",".join(map(str, values)) + "}"
    # All at one stroke, with a NUL between them, which no column has: one with a NUL in it equals none of its values.
    joined = "\0".join([value for value in values if "\0" not in value])
    quoted = joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","')
    return f'{{"{quoted}"}}'


def among(kind: str, column: Column[Any], values: Collection[Any]) -> ColumnElement[bool]:
    """Whether a column has one of these values, numbers or texts.

    Parameters:
        kind: the dialect's name.
    """
    if kind == "postgresql":
        listed = bindparam("listed", array_text(values), type_=String, unique=True)
        # By way of a query of its own: it is read once, and its length is nothing that a plan could go by.
        return column == any_(func.array(select(func.unnest(cast(listed, ARRAY(column.type)))).scalar_subquery()))
    return column.in_([*values])
