"""An engine for each kind of database: what must be said to it so that it neither cuts silently nor waits for ever.

What always holds: what is committed is flushed; a text that does not fit is an error, never cut; a database that does
not answer is given up after seconds, not minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import StaticPool
from sqlalchemy.sql.dml import Insert

from dmq.deadletters.schema import LETTERS
from dmq.errors import StorageError

__all__ = ["insert_new", "make_engine"]

_CONNECT_SECONDS: Final = 5
_ANSWER_SECONDS: Final = 10


def make_engine(url: str) -> Engine:
    """An engine that has not connected yet.

    Raises:
        StorageError: the folder of a SQLite file cannot be made.
    """
    parsed = make_url(url)
    match parsed.get_backend_name():
        case "sqlite":
            return _sqlite(parsed)
        case "mysql" | "mariadb":
            return _mysql(parsed)
        case _:
            return _postgresql(parsed)


def _sqlite(url: URL) -> Engine:
    options: dict[str, Any] = {"connect_args": {"timeout": _ANSWER_SECONDS, "check_same_thread": False}}
    in_memory = url.database in (None, "", ":memory:")
    if in_memory:
        options["poolclass"] = StaticPool
    else:
        folder = Path(str(url.database)).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"the folder {folder} for the database cannot be made: {error.strerror}") from error
    engine = create_engine(url, **options)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        if not in_memory:
            cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    return engine


def _mysql(url: URL) -> Engine:
    arguments = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _ANSWER_SECONDS,
        "write_timeout": _ANSWER_SECONDS,
        "charset": "utf8mb4",
    }
    given = set(url.query)
    engine = create_engine(
        url,
        pool_pre_ping=True,
        pool_size=1,
        connect_args={name: value for name, value in arguments.items() if name not in given},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            # Without it some servers cut what is too long, with no more than a warning.
            cursor.execute("SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')")

    return engine


def _postgresql(url: URL) -> Engine:
    arguments: dict[str, Any] = {}
    if url.get_driver_name() == "psycopg":
        arguments = {
            "connect_timeout": _CONNECT_SECONDS,
            "options": f"-c statement_timeout={_ANSWER_SECONDS * 1000}",
            "tcp_user_timeout": _ANSWER_SECONDS * 1000,
        }
    given = set(url.query)
    return create_engine(
        url,
        pool_pre_ping=True,
        pool_size=1,
        connect_args={name: value for name, value in arguments.items() if name not in given},
    )


def insert_new(kind: str) -> Insert:
    """Insert a letter unless it exists already; then it stays as it is, with its state.

    Parameters:
        kind: the dialect's name.
    """
    if kind in ("mysql", "mariadb"):
        # Not INSERT IGNORE: that takes all errors for warnings.
        return mysql.insert(LETTERS).on_duplicate_key_update(number=LETTERS.c.number)
    once = ["message_id", "group", "attempts"]
    if kind == "postgresql":
        return postgresql.insert(LETTERS).on_conflict_do_nothing(index_elements=once)
    return sqlite.insert(LETTERS).on_conflict_do_nothing(index_elements=once)
