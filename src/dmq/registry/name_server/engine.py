"""The database of a registry: an engine whose connections neither wait nor hold others up for long.

What always holds: a transaction of a name server that stands still is ended by the database after `IDLE_SECONDS`, and
its locks go with it: PostgreSQL and MariaDB do so, MySQL cannot. A name server that waits for a lock, or for an answer,
gives up after seconds. Times are in UTC, whatever the server's time zone is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url

from dmq.deadletters.engines import make_engine

__all__ = ["IDLE_SECONDS", "hang_up", "make_registry_engine"]

IDLE_SECONDS: Final = 2
_LOCK_SECONDS: Final = 3  # longer than another name server that stands still can hold it
_ANSWER_SECONDS: Final = 5

# Of connections, unless the URL says something else.
_OPTIONS: Final[dict[str, dict[str, str]]] = {
    "pymysql": {
        "connect_timeout": "3",
        "read_timeout": str(_ANSWER_SECONDS),
        "write_timeout": str(_ANSWER_SECONDS),
    },
    "psycopg": {
        "connect_timeout": "3",
        "tcp_user_timeout": str(_ANSWER_SECONDS * 1000),
        "keepalives_idle": "2",
        "keepalives_interval": "1",
        "keepalives_count": "3",
    },
}
_POSTGRESQL: Final = (
    f"SET idle_in_transaction_session_timeout = {IDLE_SECONDS * 1000}",
    f"SET lock_timeout = {_LOCK_SECONDS * 1000}",
    f"SET statement_timeout = {_ANSWER_SECONDS * 1000}",
)
_MYSQL: Final = ("SET SESSION time_zone = '+00:00'", f"SET SESSION innodb_lock_wait_timeout = {_LOCK_SECONDS}")
_MARIADB: Final = (f"SET SESSION idle_transaction_timeout = {IDLE_SECONDS}",)
_MARIADB_IS: Final = "SELECT VERSION() LIKE '%MariaDB%'"


def make_registry_engine(url: str, connected: Callable[[Any], None]) -> Engine:
    """An engine that has not connected yet.

    Parameters:
        connected: hears of each connection of the driver.

    Raises:
        StorageError: the folder of a SQLite file cannot be made.
    """
    parsed = make_url(url)
    ours = _OPTIONS.get(parsed.get_driver_name(), {})
    parsed = parsed.update_query_dict({name: value for name, value in ours.items() if name not in parsed.query})
    engine = make_engine(parsed.render_as_string(hide_password=False))
    kind = engine.dialect.name
    if kind == "sqlite":
        return engine

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connected(connection)
        cursor = connection.cursor()
        statements: tuple[str, ...] = _POSTGRESQL
        if kind != "postgresql":
            cursor.execute(_MARIADB_IS)
            statements = _MYSQL + (_MARIADB if cursor.fetchone()[0] else ())
        for statement in statements:
            cursor.execute(statement)
        cursor.close()
        connection.commit()

    # A row that was waited for is then seen as it is, not as it was when the transaction began.
    return engine.execution_options(isolation_level="READ COMMITTED")


def hang_up(connection: Any) -> None:
    """End a connection of the driver from another thread, if the driver has no limit for the time of an answer."""
    fileno = getattr(connection, "fileno", None)
    if fileno is None:
        return
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
