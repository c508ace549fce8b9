"""The mirror of a registry in SQL: its metadata, in a table that the views for people show.

One thread uses a store. What always holds: the registry that is mirrored is never written; of several name servers that
mirror into one database one writes, and another takes over when it is gone; a mirror of another cluster is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, delete, func, insert, literal_column, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.sql.dml import Delete

from dmq.deadletters.url import check_url, shown
from dmq.errors import DatabaseDown, WrongFormat
from dmq.registry.name_server.engine import make_registry_engine
from dmq.registry.name_server.expiry import NOW_MS
from dmq.registry.name_server.schema import MIRRORED, SOURCES, make_mirror
from dmq.registry.name_server.views import make_views
from dmq.registry.registry import Entry, parent_of

__all__ = ["MirrorSource", "MirrorStore"]

T = TypeVar("T")

_KEY: Final = "--database"
_AWAY_MS: Final = 15_000  # a name server that has not written for so long is gone
_ROWS_MAX: Final = 500  # in a transaction


class MirrorSource(NamedTuple):
    """What is mirrored, and how far.

    Attributes:
        change: the version of `/dmq/change` that is mirrored whole; -1 if nothing is.
        mirrored_at_ms: when the mirror was last as the registry, by the database's clock.
    """

    url: str
    cluster: str
    change: int = -1
    mirrored_at_ms: int = 0


class MirrorStore:
    """The mirror of one database.

    Parameters:
        url: where the database is.
        name: of the name server, the same after a restart, and no other's.
    """

    def __init__(self, url: str, name: str) -> None:
        url = check_url(url, _KEY)
        self.shown = shown(url)
        self._engine = make_registry_engine(url, lambda _: None)
        self._now: ColumnElement[Any] = literal_column(NOW_MS[self._engine.dialect.name])
        self._name = name

    def open(self, url: str, cluster: str) -> MirrorSource:
        """Make what is missing; returns how far the mirror is.

        Parameters:
            url: of the registry, without passwords.
            cluster: its id.

        Raises:
            WrongFormat: the database holds something else, or the mirror of another cluster.
            DatabaseDown: it cannot be used.
        """
        try:
            make_mirror(self._engine)
            make_views(self._engine, MIRRORED.name)
            try:
                with self._engine.begin() as connection:
                    ours = {"url": url, "cluster": cluster, "change": -1, "mirrored_at": 0}
                    connection.execute(insert(SOURCES).values(id=1, writer="", written_at=0, **ours))
            except IntegrityError:
                pass  # it is there
        except SQLAlchemyError as error:
            raise self._down(error) from error
        found = self.source()
        if found.cluster != cluster:
            raise WrongFormat(
                f"the database {self.shown} mirrors the cluster {found.cluster}, and {url} is {cluster}: use another "
                "database, or drop its tables dmq_mirror_entry and dmq_mirror_source"
            )
        return found

    def close(self) -> None:
        self._engine.dispose()

    def source(self) -> MirrorSource:
        def work(connection: Connection) -> MirrorSource:
            row = connection.execute(select(SOURCES)).one()
            return MirrorSource(row.url, row.cluster, row.change, row.mirrored_at)

        return self._do(work)

    def is_ours(self) -> bool:
        """Whether this name server is the one that writes; it becomes that if none does."""
        return self._do(self._take)

    def paths(self) -> dict[str, int]:
        """What is mirrored: paths, and their versions."""
        rows = select(MIRRORED.c.path, MIRRORED.c.version)
        return self._do(lambda connection: {row.path: row.version for row in connection.execute(rows)})

    def put(self, entries: Sequence[Entry], gone: Iterable[str]) -> int:
        """Write entries as they are now, and take out what is gone; returns how many rows became others.

        Raises:
            DatabaseDown: some of it may be written; write it again.
        """
        changed = 0
        for start in range(0, len(entries), _ROWS_MAX):
            part = entries[start : start + _ROWS_MAX]
            changed += self._do(lambda connection, part=part: self._put(connection, part))  # type: ignore[misc]
        paths = list(gone)
        for start in range(0, len(paths), _ROWS_MAX):
            out = delete(MIRRORED).where(MIRRORED.c.path.in_(paths[start : start + _ROWS_MAX]))
            changed += self._do(lambda connection, out=out: self._out(connection, out))  # type: ignore[misc]
        return changed

    def mark(self, change: int, url: str) -> None:
        """The mirror is as the registry was at this version of `/dmq/change`."""

        def work(connection: Connection) -> None:
            if self._take(connection):
                connection.execute(update(SOURCES).values(change=change, mirrored_at=self._now, url=url))

        self._do(work)

    def count(self) -> int:
        return self._do(lambda connection: connection.execute(select(func.count()).select_from(MIRRORED)).scalar_one())

    # --- in a transaction -------------------------------------------------------------------------------------------

    def _take(self, connection: Connection) -> bool:
        row = connection.execute(select(SOURCES.c.writer, SOURCES.c.written_at).with_for_update()).one()
        now = int(connection.execute(select(self._now)).scalar_one())
        if row.writer not in ("", self._name) and 0 <= now - row.written_at < _AWAY_MS:
            return False
        connection.execute(update(SOURCES).values(writer=self._name, written_at=now))
        return True

    def _put(self, connection: Connection, entries: Sequence[Entry]) -> int:
        if not self._take(connection):
            return 0
        here = select(MIRRORED).where(MIRRORED.c.path.in_([entry.path for entry in entries])).with_for_update()
        before = {row.path: (bytes(row.value), row.version) for row in connection.execute(here)}
        changed = [entry for entry in entries if before.get(entry.path) != (entry.value, entry.version)]
        for entry in changed:
            values = {"value": entry.value, "version": entry.version}
            if entry.path in before:
                connection.execute(update(MIRRORED).where(MIRRORED.c.path == entry.path).values(**values))
            else:
                connection.execute(insert(MIRRORED).values(path=entry.path, parent=parent_of(entry.path), **values))
        return len(changed)

    def _out(self, connection: Connection, statement: Delete) -> int:
        return connection.execute(statement).rowcount if self._take(connection) else 0

    def _do(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            raise self._down(error) from error

    def _down(self, error: SQLAlchemyError) -> DatabaseDown:
        words = " ".join(str(getattr(error, "orig", None) or error).split())[:300]
        return DatabaseDown(f"the database {self.shown} of the mirror cannot be used now: {words}")
