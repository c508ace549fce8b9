"""A registry in SQL: entries, sessions and changes in three tables.

One thread uses a store. A write loads the rows it is about, applies its operations to them in memory (`Tree`, the same
code as for a registry in memory), and writes what has changed, in one transaction. The rows are locked while they are
loaded, in the order of their paths, so that name servers that share a database do not meet. Every change takes the next
number from the root's row, which is locked last: so changes become visible in the order of their numbers, and a name
server that looks for what is new misses none.

What always holds: an error before the commit means that nothing was written; one of the commit itself is
`WriteUnknown`. A write whose session is over, or whose number is not above that of the session's last write, changes
nothing, and a write that does not apply still counts as the last. A database file of SQLite has one name server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from dmq.clock import Clock, SystemClock
from dmq.deadletters.url import check_url, shown
from dmq.errors import (
    DatabaseDown,
    DirectoryInUse,
    InvalidRequest,
    RegistryConflict,
    SessionExpired,
    StorageError,
    WriteUnknown,
)
from dmq.event_log import EventLog
from dmq.protocol.cluster.registry import PAGE_BYTES_MAX
from dmq.registry.name_server.backend import News
from dmq.registry.name_server.engine import hang_up, make_registry_engine
from dmq.registry.name_server.expiry import DatabaseExpiry, Expiry, ServerExpiry
from dmq.registry.name_server.schema import CHANGES, ENTRIES, SESSIONS, make_schema
from dmq.registry.name_server.views import make_views
from dmq.registry.registry import (
    OPERATIONS_MAX,
    ROOT,
    SESSION_SECONDS,
    Create,
    Delete,
    Entry,
    Operation,
    parent_of,
    unknown_entry,
)
from dmq.registry.tree import Applied, Tree

__all__ = ["EntryPage", "SqlStore", "expired"]

log = EventLog(__name__)

T = TypeVar("T")

CHANGES_KEPT: Final = 10_000
_NEWS_MAX: Final = 1000
_TRIES: Final = 5
_TRIES_SECONDS: Final = 3.0
_KEY: Final = "--database"
_SQLITE: Final = "sqlite"
# Two transactions waited for each other, and the database ended this one: PostgreSQL's states, MariaDB's numbers.
_COLLISIONS: Final = ("40001", "40P01", 1213, 1205, 1020)
# Those of them that, answered to a commit, mean that it did not happen.
_ROLLED_BACK: Final = ("40001", "40P01", 1213)


class EntryPage(NamedTuple):
    """Some of the entries below a path."""

    entries: list[Entry]
    more: bool


class SqlStore:
    """The registry of a database.

    Parameters:
        url: where the database is, as SQLAlchemy writes it.
        shared: other name servers may use it too; not with SQLite. None: every database but SQLite is.

    Attributes:
        registry_id: drawn when the tables were made: name servers with one id share a database.
        shown: the database, for logs.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        session_seconds: float = SESSION_SECONDS,
        shared: bool | None = None,
    ) -> None:
        url = check_url(url, _KEY)
        self.shown = shown(url)
        self._driver_connection: Any = None
        self._engine: Engine = make_registry_engine(url, self._connected)
        kind = self._engine.dialect.name
        self._lock = _lock_file(self._engine.url.database) if kind == _SQLITE else -1
        clock = clock or SystemClock()
        is_shared = kind != _SQLITE if shared is None else shared
        self._expiry: Expiry = (
            DatabaseExpiry(clock, session_seconds, kind) if is_shared else ServerExpiry(clock, session_seconds)
        )
        self.session_seconds = session_seconds
        self.registry_id = ""

    def open(self) -> int:
        """Make what is missing; returns the number of the last change.

        Raises:
            WrongFormat: another version of DMQ made the tables.
            InvalidSettings: another name server of the database lets sessions live for another time.
            DatabaseDown: the database cannot be used.
        """
        try:
            self.registry_id = make_schema(self._engine)
            make_views(self._engine, ENTRIES.name)
        except SQLAlchemyError as error:
            raise self._down(error) from error
        self._do(self._expiry.begin)
        return self._do(_last_seq)

    def close(self) -> None:
        self._engine.dispose()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connected(self, connection: Any) -> None:
        self._driver_connection = connection

    def interrupt(self) -> None:
        """From another thread: give up what the database does not answer."""
        if self._driver_connection is not None:
            hang_up(self._driver_connection)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, session: int, owner: str) -> int:
        """Go on with a session, or begin another one; returns its number."""

        def work(connection: Connection) -> int:
            if session and self._expiry.alive(connection, [session]):
                self._expiry.renew(connection, [session])
                return session
            made = secrets.randbits(62) or 1
            connection.execute(insert(SESSIONS).values(id=made, owner=owner, number=0, expires_at=0))
            self._expiry.renew(connection, [made])
            return made

        return self._do(work)

    def renew(self, sessions: Collection[int]) -> frozenset[int]:
        """Let sessions live on; returns those that are over."""

        def work(connection: Connection) -> frozenset[int]:
            alive = self._expiry.alive(connection, sessions)
            if alive:
                self._expiry.renew(connection, alive)
            return frozenset(sessions).difference(alive)

        return self._do(work)

    def close_session(self, session: int) -> None:
        """End a session; does nothing if it is over."""
        if not session:
            return  # what is nobody's stays
        self._do(lambda connection: self._end(connection, [session]))
        self._expiry.forget(session)

    def expire(self) -> int:
        """End the sessions whose time is over; to be called often. Returns how many."""

        def work(connection: Connection) -> dict[int, str]:
            due = self._expiry.due(connection)
            if not due:
                return {}
            owners = select(SESSIONS.c.id, SESSIONS.c.owner).where(SESSIONS.c.id.in_(due))
            found = {row.id: row.owner for row in connection.execute(owners)}
            self._end(connection, due)
            return found

        over = self._do(work)
        self._expiry.looked()
        for session, owner in over.items():
            self._expiry.forget(session)
            log.info("session expired", owner=owner, session=f"{session:x}", silent_seconds=self.session_seconds)
        return len(over)

    def _end(self, connection: Connection, sessions: Sequence[int]) -> None:
        theirs = ENTRIES.c.session.in_(sessions)
        paths = sorted(connection.scalars(select(ENTRIES.c.path).where(theirs)))
        connection.execute(delete(ENTRIES).where(theirs))
        connection.execute(delete(SESSIONS).where(SESSIONS.c.id.in_(sessions)))
        self._record(connection, paths)

    # --- entries ----------------------------------------------------------------------------------------------------

    def read(self, path: str) -> Entry | None:
        if path == ROOT:
            return Entry(ROOT, b"", 0)
        found = self._do(lambda connection: _load(connection, [path], is_locked=False))
        return found[0] if found else None

    def children(self, path: str, after: str, limit: int, bytes_max: int = PAGE_BYTES_MAX) -> EntryPage:
        """Entries right below a path, in the order of their paths, after one of them; at least one if there is any.

        Raises:
            UnknownEntry: the path does not exist.
        """

        def work(connection: Connection) -> EntryPage:
            if connection.scalar(select(ENTRIES.c.path).where(ENTRIES.c.path == path)) is None:
                raise unknown_entry(path)
            query = (
                select(ENTRIES.c.path, func.length(ENTRIES.c.value).label("size"))
                .where(ENTRIES.c.parent == path, ENTRIES.c.path > after)
                .order_by(ENTRIES.c.path)
                .limit(limit + 1)
            )
            found = list(connection.execute(query))
            fit, size = 0, 0
            for row in found[:limit]:
                size += len(row.path.encode()) + row.size
                if fit and size > bytes_max:
                    break
                fit += 1
            return EntryPage(_load(connection, [row.path for row in found[:fit]], is_locked=False), fit < len(found))

        return self._do(work)

    def write(self, session: int, number: int, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        """Carry out a write that was checked.

        Raises:
            RegistryConflict, SessionExpired, InvalidRequest, DatabaseDown: nothing was written.
            WriteUnknown: the database did not say whether it has committed.
        """

        def work(connection: Connection) -> Applied | RegistryConflict:
            if not self._expiry.alive(connection, [session]):
                raise expired(session)
            this = update(SESSIONS).where(SESSIONS.c.id == session, SESSIONS.c.number < number)
            if connection.execute(this.values(number=number)).rowcount != 1:
                raise InvalidRequest("a later write of this session was carried out before: this one never will be")
            self._expiry.renew(connection, [session])
            return self._apply(connection, operations, session)

        applied = self._do(work)
        if isinstance(applied, RegistryConflict):
            raise applied
        return applied.versions

    def _apply(
        self, connection: Connection, operations: Sequence[Operation], session: int
    ) -> Applied | RegistryConflict:
        paths = {operation.path for operation in operations} - {ROOT}
        parents = {parent_of(operation.path) for operation in operations if isinstance(operation, Create)} - {ROOT}
        before = {entry.path: entry for entry in _load(connection, sorted(paths | parents), is_locked=True)}
        left = _children(connection, [operation.path for operation in operations if isinstance(operation, Delete)])
        tree = Tree([*before.values(), *(entry for entry in left if entry.path not in before)])
        try:
            applied = tree.apply(operations, session)
        except RegistryConflict as error:
            return error
        for path in sorted(paths):
            _store(connection, path, before.get(path), tree.read(path))
        self._record(connection, applied.changed)
        return applied

    # --- changes ----------------------------------------------------------------------------------------------------

    def news(self, seq: int) -> News:
        """What has changed since a number."""

        def work(connection: Connection) -> News:
            query = select(CHANGES).where(CHANGES.c.seq > seq).order_by(CHANGES.c.seq).limit(_NEWS_MAX + 1)
            found = list(connection.execute(query))
            if not found:
                last = _last_seq(connection)
                return News(last, (), last != seq)  # all were dropped meanwhile, or the database is another
            if len(found) > _NEWS_MAX or found[0].seq != seq + 1:
                return News(_last_seq(connection), (), True)
            return News(found[-1].seq, tuple(dict.fromkeys(row.path for row in found)), False)

        return self._do(work)

    def count(self) -> tuple[int, int]:
        """How many sessions there are, and entries."""

        def work(connection: Connection) -> tuple[int, int]:
            counts = [select(func.count()).select_from(table) for table in (SESSIONS, ENTRIES)]
            sessions, entries = (connection.execute(count).scalar_one() for count in counts)
            return sessions, entries

        return self._do(work)

    def trim(self) -> None:
        """Drop changes that every name server has seen long ago."""

        def work(connection: Connection) -> None:
            connection.execute(delete(CHANGES).where(CHANGES.c.seq <= _last_seq(connection) - CHANGES_KEPT))

        self._do(work)

    def _record(self, connection: Connection, paths: Iterable[str]) -> None:
        changed = list(paths)
        if changed:
            root = ENTRIES.c.path == ROOT
            connection.execute(update(ENTRIES).where(root).values(version=ENTRIES.c.version + len(changed)))
            first = _last_seq(connection) - len(changed) + 1
            rows = [{"seq": first + index, "path": path} for index, path in enumerate(changed)]
            connection.execute(insert(CHANGES), rows)

    # --- transactions -----------------------------------------------------------------------------------------------

    def _do(self, work: Callable[[Connection], T]) -> T:
        """Do something in a transaction; again if it collided with that of another name server.

        Raises:
            DatabaseDown: nothing was written.
            WriteUnknown: the commit failed.
        """
        until = time.monotonic() + _TRIES_SECONDS
        for left in range(_TRIES, 0, -1):
            try:
                with self._engine.connect() as connection:
                    transaction = connection.begin()
                    try:
                        result = work(connection)
                    except BaseException:
                        transaction.rollback()
                        raise
                    try:
                        transaction.commit()
                    except SQLAlchemyError as error:
                        with contextlib.suppress(Exception):
                            connection.connection.rollback()  # it must not go on with the next one
                        if _code(error) in _ROLLED_BACK:
                            raise
                        raise WriteUnknown(
                            f"the database {self.shown} did not say whether it has committed ({_words(error)}): "
                            "settle it by another write"
                        ) from error
                    return result
            except SQLAlchemyError as error:
                if left == 1 or not _is_collision(error) or time.monotonic() > until:
                    raise self._down(error) from error
        raise AssertionError("unreachable")

    def _down(self, error: SQLAlchemyError) -> DatabaseDown:
        return DatabaseDown(f"the database {self.shown} of the registry cannot be used now: {_words(error)}")


def _load(connection: Connection, paths: Sequence[str], *, is_locked: bool) -> list[Entry]:
    """Entries by their paths, in the order of those."""
    if not paths:
        return []
    query = select(ENTRIES).where(ENTRIES.c.path.in_(paths)).order_by(ENTRIES.c.path)
    rows = connection.execute(query.with_for_update() if is_locked else query)
    return [Entry(row.path, bytes(row.value), row.version, row.session) for row in rows]


def _children(connection: Connection, paths: Sequence[str]) -> list[Entry]:
    """Enough of the entries below these paths to know whether a write leaves some; without their values."""
    if not paths:
        return []
    query = select(ENTRIES.c.path, ENTRIES.c.parent, ENTRIES.c.version, ENTRIES.c.session)
    found = []
    for path in dict.fromkeys(paths):
        rows = connection.execute(query.where(ENTRIES.c.parent == path).limit(OPERATIONS_MAX + 1))
        found += [Entry(row.path, b"", row.version, row.session) for row in rows]
    return found


def _store(connection: Connection, path: str, before: Entry | None, after: Entry | None) -> None:
    """Write what has become of one entry."""
    if after == before:
        return
    if after is None:
        connection.execute(delete(ENTRIES).where(ENTRIES.c.path == path))
        return
    values = {"value": after.value, "version": after.version, "session": after.session}
    if before is None:
        connection.execute(insert(ENTRIES).values(path=path, parent=parent_of(path), **values))
    else:
        connection.execute(update(ENTRIES).where(ENTRIES.c.path == path).values(**values))


def _last_seq(connection: Connection) -> int:
    return int(connection.execute(select(ENTRIES.c.version).where(ENTRIES.c.path == ROOT)).scalar_one())


def expired(session: int) -> SessionExpired:
    return SessionExpired(
        "nothing was written: the name server has had no sign of this client for longer than its session lives; its "
        "ephemeral entries are gone, and must be created again",
        session=session,
    )


def _is_collision(error: SQLAlchemyError) -> bool:
    # Two that create the same entry at once: the second finds it there when it tries again.
    return type(error).__name__ == "IntegrityError" or _code(error) in _COLLISIONS


def _code(error: SQLAlchemyError) -> object:
    """What the database calls an error: PostgreSQL's state, or MariaDB's number."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    code = cause.args[0] if cause is not None and cause.args else None
    if isinstance(code, dict):
        return code.get("C")  # pg8000
    return getattr(cause, "sqlstate", None) or code


def _words(error: SQLAlchemyError) -> str:
    return " ".join(str(getattr(error, "orig", None) or error).split())[:300]


def _lock_file(database: str | None) -> int:
    """Keep other name servers away from a file of SQLite.

    Raises:
        DirectoryInUse: another one has it.
    """
    if database in (None, "", ":memory:"):
        return -1
    path = f"{database}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"the file {path} cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryInUse(
            f"another name server has {database} open: SQLite takes one name server; stop the other, or use a database "
            "server"
        ) from None
    return fd
