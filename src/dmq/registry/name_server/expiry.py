"""Which sessions are over: by the database's clock if several name servers share it, else by the server's own.

What always holds: a session ends only if it was not heard for a full term *while it could have been*. After a time in
which sessions could not be renewed (the name server or the database was away or stood still) or a step of the
database's clock, each lives for another full term.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from sqlalchemy import ColumnElement, Connection, literal_column, select, update

from dmq.clock import Clock
from dmq.registry.name_server.schema import SESSIONS

__all__ = ["DatabaseExpiry", "Expiry", "ServerExpiry"]

OUTAGE_SECONDS: Final = 1.0

_NOW_MS: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "mysql": "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
    "mariadb": "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
}


class Expiry(Protocol):
    """Called within the transactions of a store, by its one thread."""

    def renew(self, connection: Connection, session: int) -> None:
        """A session was heard; it has its row."""
        ...

    def is_over(self, connection: Connection, session: int) -> bool:
        """Whether the time of a session is over that still has its row."""
        ...

    def due(self, connection: Connection) -> list[int]:
        """The sessions to end now; to be called often."""
        ...

    def forget(self, session: int) -> None:
        """A session has no row any more."""
        ...


class ServerExpiry:
    """By the clock of the one name server, which forgets all times when it restarts: then each has a full term."""

    def __init__(self, clock: Clock, session_seconds: float) -> None:
        self._clock = clock
        self._session_seconds = session_seconds
        self._looked_at = float("-inf")
        self._expires_at: dict[int, float] = {}

    def renew(self, connection: Connection, session: int) -> None:
        self._expires_at[session] = self._clock.boottime() + self._session_seconds

    def is_over(self, connection: Connection, session: int) -> bool:
        now = self._clock.boottime()
        return now - self._looked_at <= OUTAGE_SECONDS and self._expires_at.get(session, now) < now

    def due(self, connection: Connection) -> list[int]:
        now = self._clock.boottime()
        sessions = list(connection.scalars(select(SESSIONS.c.id)))
        if now - self._looked_at > OUTAGE_SECONDS:
            self._expires_at = dict.fromkeys(sessions, now + self._session_seconds)
        self._looked_at = now
        return [one for one in sessions if self._expires_at.setdefault(one, now + self._session_seconds) < now]

    def forget(self, session: int) -> None:
        self._expires_at.pop(session, None)


class DatabaseExpiry:
    """By the database's clock, for name servers that share it."""

    def __init__(self, clock: Clock, session_seconds: float, kind: str) -> None:
        self._clock = clock
        self._session_ms = int(session_seconds * 1000)
        self._now: ColumnElement[Any] = literal_column(_NOW_MS[kind])
        self._looked_at = float("-inf")
        self._database_ms = 0

    def renew(self, connection: Connection, session: int) -> None:
        self._extend(connection, SESSIONS.c.id == session)

    def is_over(self, connection: Connection, session: int) -> bool:
        over = select(SESSIONS.c.id).where(SESSIONS.c.id == session, SESSIONS.c.expires_at < self._now)
        return connection.scalar(over) is not None and not self._was_away(connection)

    def due(self, connection: Connection) -> list[int]:
        if self._was_away(connection):
            self._extend(connection, SESSIONS.c.expires_at < self._now + self._session_ms)
        self._looked_at = self._clock.boottime()
        self._database_ms = self._database_now_ms(connection)
        due = select(SESSIONS.c.id).where(SESSIONS.c.expires_at < self._now).with_for_update()
        return list(connection.scalars(due))

    def forget(self, session: int) -> None:
        pass

    def _extend(self, connection: Connection, which: ColumnElement[bool]) -> None:
        connection.execute(update(SESSIONS).where(which).values(expires_at=self._now + self._session_ms))

    def _database_now_ms(self, connection: Connection) -> int:
        return int(connection.execute(select(self._now)).scalar_one())

    def _was_away(self, connection: Connection) -> bool:
        """Whether sessions could not be renewed meanwhile, or the database's clock was set."""
        gone = self._clock.boottime() - self._looked_at
        if gone > OUTAGE_SECONDS:
            return True
        step_ms = self._database_now_ms(connection) - self._database_ms - gone * 1000
        return abs(step_ms) > OUTAGE_SECONDS * 1000
