"""Which sessions are over: by the database's clock if several name servers share it, else by the server's own.

What always holds: a session ends only if it was not heard for a full term *while it could have been*. After a time in
which sessions could not be renewed (no name server looked at the database for a third of a term: all were away or stood
still, or the database was) or a step of the database's clock by more than a second, each lives for another full term,
and no longer. Name servers that share a database note there when they look: one that was away while another looked
gives nobody more time, so that a name server that comes and goes does not keep the dead alive.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Protocol

from sqlalchemy import ColumnElement, Connection, insert, literal_column, select, true, update

from dmq.clock import Clock
from dmq.errors import InvalidSettings
from dmq.event_log import EventLog
from dmq.registry.name_server.schema import LOOKS, SESSIONS

__all__ = ["NOW_MS", "DatabaseExpiry", "Expiry", "ServerExpiry"]

log = EventLog(__name__)

STEP_SECONDS: Final = 1.0
_OUTAGE_SHARE: Final = 1 / 3  # of a term; clients are heard four times in it
_OUTAGE_SECONDS_MIN: Final = 1.0
_LEFT_MS: Final = 10_000  # name servers that have not looked for so long count as gone

# The clock of each kind of database.
NOW_MS: Final = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
    "mysql": "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
    "mariadb": "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)",
}


class Expiry(Protocol):
    """Called within the transactions of a store, by its one thread."""

    def begin(self, connection: Connection) -> None:
        """
        Raises:
            InvalidSettings: another name server lets sessions live for another time.
        """
        ...

    def renew(self, connection: Connection, sessions: Collection[int]) -> None:
        """These were heard; each has its row."""
        ...

    def alive(self, connection: Connection, sessions: Collection[int]) -> list[int]:
        """Those whose time is not over; their rows are locked."""
        ...

    def due(self, connection: Connection) -> list[int]:
        """The sessions to end now; to be called often."""
        ...

    def looked(self) -> None:
        """What `due` did last is committed."""
        ...

    def forget(self, session: int) -> None:
        """A session has no row any more."""
        ...


class ServerExpiry:
    """By the clock of the one name server, which forgets all times when it restarts: then each has a full term."""

    def __init__(self, clock: Clock, session_seconds: float) -> None:
        self._clock = clock
        self._session_seconds = session_seconds
        self._outage_seconds = _outage_seconds(session_seconds)
        self._looked_at = float("-inf")
        self._expires_at: dict[int, float] = {}

    def begin(self, connection: Connection) -> None:
        pass

    def renew(self, connection: Connection, sessions: Collection[int]) -> None:
        self._expires_at.update(dict.fromkeys(sessions, self._clock.boottime() + self._session_seconds))

    def alive(self, connection: Connection, sessions: Collection[int]) -> list[int]:
        now = self._clock.boottime()
        found = connection.scalars(select(SESSIONS.c.id).where(SESSIONS.c.id.in_(sessions)))
        return [one for one in found if self._was_away(now) or self._expires_at.get(one, now) >= now]

    def due(self, connection: Connection) -> list[int]:
        now = self._clock.boottime()
        sessions = list(connection.scalars(select(SESSIONS.c.id)))
        if self._was_away(now):
            self._expires_at = dict.fromkeys(sessions, now + self._session_seconds)
        self._looked_at = now
        return [one for one in sessions if self._expires_at.setdefault(one, now + self._session_seconds) < now]

    def looked(self) -> None:
        pass

    def forget(self, session: int) -> None:
        self._expires_at.pop(session, None)

    def _was_away(self, now: float) -> bool:
        return now - self._looked_at > self._outage_seconds


class DatabaseExpiry:
    """By the database's clock, for name servers that share it."""

    def __init__(self, clock: Clock, session_seconds: float, kind: str) -> None:
        self._clock = clock
        self._session_ms = int(session_seconds * 1000)
        self._outage_ms = _outage_seconds(session_seconds) * 1000
        self._now: ColumnElement[Any] = literal_column(NOW_MS[kind])
        self._looked_at = float("-inf")  # when we did, by our clock
        self._database_ms = 0  # and by the database's
        self._look = self._looked_at, self._database_ms  # the same of the last look, which may not be committed

    def begin(self, connection: Connection) -> None:
        row = connection.execute(select(LOOKS).with_for_update()).one_or_none()
        if row is None:
            connection.execute(insert(LOOKS).values(id=1, looked_at=0, session_ms=self._session_ms))
        elif row.session_ms != self._session_ms:
            if abs(self._database_now_ms(connection) - row.looked_at) < _LEFT_MS:
                raise self._other_term()
            connection.execute(update(LOOKS).values(session_ms=self._session_ms))

    def renew(self, connection: Connection, sessions: Collection[int]) -> None:
        self._extend(connection, SESSIONS.c.id.in_(sessions))

    def alive(self, connection: Connection, sessions: Collection[int]) -> list[int]:
        rows = select(SESSIONS.c.id, SESSIONS.c.expires_at < self._now).where(SESSIONS.c.id.in_(sessions))
        found = list(connection.execute(rows.order_by(SESSIONS.c.id).with_for_update()))
        if any(is_over for _, is_over in found) and not self._was_away(connection):
            return [session for session, is_over in found if not is_over]
        return [session for session, _ in found]

    def due(self, connection: Connection) -> list[int]:
        if self._was_away(connection):
            log.info("sessions have another term, since nobody could be heard or the database's clock was set")
            self._extend(connection, true())
        self._look = self._clock.boottime(), self._database_now_ms(connection)
        ours = update(LOOKS).where(LOOKS.c.session_ms == self._session_ms)
        if connection.execute(ours.values(looked_at=self._look[1])).rowcount == 0:
            raise self._other_term()
        due = select(SESSIONS.c.id).where(SESSIONS.c.expires_at < self._now).with_for_update()
        return list(connection.scalars(due))

    def looked(self) -> None:
        self._looked_at, self._database_ms = self._look

    def forget(self, session: int) -> None:
        pass

    def _extend(self, connection: Connection, which: ColumnElement[bool]) -> None:
        connection.execute(update(SESSIONS).where(which).values(expires_at=self._now + self._session_ms))

    def _database_now_ms(self, connection: Connection) -> int:
        return int(connection.execute(select(self._now)).scalar_one())

    def _other_term(self) -> InvalidSettings:
        return InvalidSettings(
            f"this name server lets sessions live {self._session_ms / 1000:g} s, and another one of the same database "
            "has another time: give all the same --session, after stopping all of them"
        )

    def _was_away(self, connection: Connection) -> bool:
        """Whether sessions could not be renewed meanwhile, or the database's clock was set."""
        gone_ms = (self._clock.boottime() - self._looked_at) * 1000
        now_ms = self._database_now_ms(connection)
        if gone_ms <= self._outage_ms:
            return abs(now_ms - self._database_ms - gone_ms) > STEP_SECONDS * 1000
        # We did not look, but another name server may have.
        looked_ms = connection.scalar(select(LOOKS.c.looked_at))
        return looked_ms is None or abs(now_ms - looked_ms) > self._outage_ms


def _outage_seconds(session_seconds: float) -> float:
    return max(_OUTAGE_SECONDS_MIN, session_seconds * _OUTAGE_SHARE)
