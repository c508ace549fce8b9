"""The archive's tables: which files they are made of now, and the commits that change that.

A table is a Delta table, so every engine that knows the format reads it; commits go through delta-rs and need no Java.
Files are written before (`dmq.pipeline.archive.parquet`). A commit names them and, in the same atomic step, says how
far its writer has come: a version under an app id of its own. That pair makes a write happen once.

What always holds: a commit is made on exactly the state of the table it was decided on. If another writer was quicker,
the table is read again and all is decided anew, since the log itself does not refuse a version that already exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from dmq.errors import ArchiveConflict, Damaged, InvalidSettings, StorageError
from dmq.pipeline.archive.folder import Folder, normal_uri
from dmq.pipeline.archive.parquet import DT, Written
from dmq.pipeline.object_store import delta_options, store_errors
from dmq.pipeline.tables import ARCHIVED, SCHEMAS

__all__ = ["Archive", "ColumnBounds", "LiveFile", "Table"]

ColumnBounds = Mapping[str, tuple[Any, Any]]  # by column, the least and the greatest value wanted; None means no bound

_TRIES: Final = 20
_PAUSE_SECONDS: Final = 0.05
_SETTINGS: Final = {"delta.checkpointInterval": "25", "delta.deletedFileRetentionDuration": "interval 7 days"}
_ANY: Final = -2


class LiveFile(NamedTuple):
    """A file that belongs to a table now."""

    path: str  # below the table's folder
    uri: str
    rows: int
    bytes: int
    dt: date


class Table:
    """One table of an archive; made by its first commit, until then it has no files."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.name = name
        self.schema = SCHEMAS[name]
        self.folder = folder.below(name)
        self._delta: DeltaTable | None = None

    @property
    def uri(self) -> str:
        """The address of its folder."""
        return self.folder.uri

    # --- what it is now ---------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether anything was ever committed to it."""
        return self._load() is not None

    def version(self) -> int:
        """How many commits it has had, less one; -1 if it does not exist."""
        delta = self._load()
        return -1 if delta is None else delta.version()

    def version_of(self, app_id: str) -> int | None:
        """The version last committed under an app id."""
        delta = self._load()
        return None if delta is None else delta.transaction_version(app_id)

    def files(self, dt: date | Iterable[date] | None = None, where: ColumnBounds | None = None) -> list[str]:
        """Addresses of the files that may have rows of some days with values within bounds; see `live_files`."""
        return [file.uri for file in self.live_files(dt, where)]

    def live_files(self, dt: date | Iterable[date] | None = None, where: ColumnBounds | None = None) -> list[LiveFile]:
        """The files that may have what is wanted, going by the log's statistics, oldest day first.

        Parameters:
            dt: a day, or several; None is all.
            where: bounds of columns, both inclusive; files whose values all lie outside of one are left out.
        """
        delta = self._load()
        return [] if delta is None else self._live(delta, dt, where)

    def days(self) -> list[date]:
        """The days it has rows of."""
        return sorted({file.dt for file in self.live_files()})

    def rows(self) -> int:
        """How many rows it has."""
        return sum(file.rows for file in self.live_files())

    def _live(self, delta: DeltaTable, dt: date | Iterable[date] | None, where: ColumnBounds | None) -> list[LiveFile]:
        found = pa.table(delta.get_add_actions(flatten=True))
        keep = None
        if dt is not None:
            days = [dt] if isinstance(dt, date) else list(dt)
            keep = pc.is_in(found[f"partition.{DT}"], pa.array(days, pa.date32()))
        for column, (least, greatest) in (where or {}).items():
            for part in _within(found, column, least, greatest):
                keep = part if keep is None else pc.and_(keep, part)
        if keep is not None:
            found = found.filter(keep)
        columns = ("path", "num_records", "size_bytes", f"partition.{DT}")
        rows = zip(*(found[column].to_pylist() for column in columns), strict=True)
        live = [LiveFile(path, f"{self.uri}/{path}", count or 0, size, dt=day) for path, count, size, day in rows]
        return sorted(live, key=lambda file: (file.dt, file.path))

    def make(self) -> None:
        """See that it has a log; to be called before data files are written for its first commit."""
        self._made()

    def _load(self) -> DeltaTable | None:
        """As it is at this moment.

        Raises:
            Damaged: its log cannot be read.
        """
        try:
            with store_errors(self.uri):
                if self._delta is None:
                    self._delta = self.folder.delta()
                else:
                    self._delta.update_incremental()
        except TableNotFoundError:
            self._delta = None
        except DeltaError as error:
            raise Damaged(f"the log of {self.uri} cannot be read, put _delta_log back from a copy: {error}") from error
        return self._delta

    # --- changing it ------------------------------------------------------------------------------------------------

    def commit(self, adds: Sequence[Written], *, app_id: str, version: int, after: int | None = _ANY) -> bool:
        """Append files, once: a version that already exists under this app id is not committed again.

        Parameters:
            adds: the files; none is a step, too, that moves the version on.
            app_id, version: who appends, and how far it has come with that.
            after: the version that must stand there until then, None for none at all; left out, any lower one.

        Returns:
            Whether it was committed now; False if that had been done before.

        Raises:
            ArchiveConflict: somebody else is further, or not where this one began.
        """

        def decide(delta: DeltaTable) -> list[AddAction | RemoveAction] | None:
            there = delta.transaction_version(app_id)
            if there == version:
                return None
            if (there is not None and there > version) or after not in (_ANY, there):
                raise ArchiveConflict(
                    f"{app_id} came to {there} in table {self.name} while this run was about to take it from "
                    f"{None if after == _ANY else after} to {version}: let one run at a time write it",
                    table=self.name,
                    app_id=app_id,
                )
            return [_add(file) for file in adds]

        return self._commit(decide, Transaction(app_id, version))

    def replace(
        self,
        dts: Iterable[date],
        adds: Sequence[Written],
        *,
        app_id: str | None = None,
        version: int | None = None,
    ) -> bool:
        """Put files in the place of all that some days have; without files the days are empty after.

        Parameters:
            app_id, version: if given, this is done once for that version.

        Returns:
            Whether it was done now.
        """
        days = set(dts)
        strange = {file.dt for file in adds} - days
        if strange:
            raise ValueError(f"files of {sorted(strange)} cannot replace those of other days")

        def decide(delta: DeltaTable) -> list[AddAction | RemoveAction] | None:
            if app_id is not None and version is not None:
                there = delta.transaction_version(app_id)
                if there is not None and there >= version:
                    return None
            # A commit whose answer was lost is decided again, and finds what it has added.
            mine = {file.path for file in adds}
            old = [file for file in self._live(delta, days, None) if file.path not in mine]
            return [_add(file) for file in adds] + [_remove(file) for file in old]

        marked = [] if app_id is None or version is None else [Transaction(app_id, version)]
        return self._commit(decide, *marked)

    def swap(self, removes: Sequence[LiveFile], adds: Sequence[Written]) -> bool:
        """Put files with the same rows in the place of others, as compaction does.

        Raises:
            ArchiveConflict: one of those others does not exist any more.
        """

        def decide(delta: DeltaTable) -> list[AddAction | RemoveAction] | None:
            live = {file.path for file in self._live(delta, {file.dt for file in removes}, None)}
            gone = [file.path for file in removes if file.path not in live]
            if gone:
                raise ArchiveConflict(
                    f"{gone[0]} of table {self.name} was replaced meanwhile: run this again", table=self.name
                )
            return [_add(file, is_new=False) for file in adds] + [_remove(file, is_new=False) for file in removes]

        return self._commit(decide)

    def edit(
        self,
        removes: Sequence[LiveFile],
        adds: Sequence[Written],
        marks: Mapping[str, int],
        after: Mapping[str, int | None] | None = None,
    ) -> None:
        """Put files with other rows in the place of some, and say how far the writer has come, in one step.

        Parameters:
            marks: versions by app id.
            after: the versions that must stand there until then, None for none at all; left out, none that is higher.

        Raises:
            ArchiveConflict: one of the files does not exist any more, or another writer has come further.
        """

        def decide(delta: DeltaTable) -> list[AddAction | RemoveAction] | None:
            live = {file.path for file in self._live(delta, {file.dt for file in removes}, None)}
            if after is None:
                is_done = any((delta.transaction_version(app) or -1) > version for app, version in marks.items())
            else:
                is_done = any(delta.transaction_version(app) != version for app, version in after.items())
            if is_done or any(file.path not in live for file in removes):
                raise ArchiveConflict(f"table {self.name} was changed meanwhile: run this again", table=self.name)
            return [_add(file) for file in adds] + [_remove(file) for file in removes]

        self._commit(decide, *(Transaction(app, version) for app, version in marks.items()))

    def bounds(self, column: str, dts: Iterable[date]) -> dict[str, tuple[Any, Any]]:
        """By the path of each file of some days, the least and greatest value that the log says it has of a column."""
        delta = self._load()
        if delta is None:
            return {}
        found = pa.table(delta.get_add_actions(flatten=True))
        found = found.filter(pc.is_in(found[f"partition.{DT}"], pa.array([*dts], pa.date32())))
        if f"min.{column}" not in found.column_names:
            return {}
        least, greatest = (found[f"{which}.{column}"].to_pylist() for which in ("min", "max"))
        return dict(zip(found["path"].to_pylist(), zip(least, greatest, strict=True), strict=True))

    def vacuum(self, retention_hours: int, *, dry_run: bool = False) -> list[str]:
        """Delete files that have belonged to no version for this time, those of runs that were killed, too."""
        delta = self._load()
        if delta is None:
            return []
        return list(delta.vacuum(retention_hours, dry_run=dry_run, enforce_retention_duration=False, full=True))

    def _commit(
        self, decide: Callable[[DeltaTable], list[AddAction | RemoveAction] | None], *marks: Transaction
    ) -> bool:
        for turn in range(_TRIES):
            delta = self._made()
            actions = decide(delta)
            if actions is None:
                return False
            try:
                with store_errors(self.uri):
                    delta.create_write_transaction(
                        actions,
                        "append",
                        self.schema,
                        partition_by=[DT],
                        # No retries: they would commit on a state that nobody has looked at.
                        commit_properties=CommitProperties(max_commit_retries=0, app_transactions=[*marks] or None),
                    )
            except CommitFailedError:
                time.sleep(_PAUSE_SECONDS * (turn + 1))
                continue
            delta.update_incremental()
            self.folder.sync(f"_delta_log/{delta.version():020d}.json")
            return True
        raise ArchiveConflict(
            f"table {self.name} is written by others all the time: {_TRIES} commits lost the race", table=self.name
        )

    def _made(self) -> DeltaTable:
        """The table, created if it does not exist, with all columns that its schema has by now."""
        delta = self._load()
        if delta is None:
            try:
                delta = DeltaTable.create(
                    self.uri,
                    self.schema,
                    mode="ignore",
                    partition_by=[DT],
                    name=self.name,
                    configuration=_SETTINGS,
                    storage_options=delta_options(self.uri),
                )
            except DeltaError:  # somebody else created it at this moment
                delta = self.folder.delta()
            self._delta = delta
        known = {field.name for field in delta.schema().fields}
        missing = [field for field in self.schema if field.name not in known]
        if missing:
            delta.alter.add_columns(Schema.from_arrow(cast(Any, pa.schema(missing))).fields)
        return delta


def _add(file: Written, *, is_new: bool = True) -> AddAction:
    return AddAction(file.path, file.bytes, {DT: file.dt.isoformat()}, file.written_at_ms, is_new, file.stats)


def _remove(file: LiveFile, *, is_new: bool = True) -> RemoveAction:
    return RemoveAction(file.path, is_new, int(time.time() * 1000), file.bytes, {DT: file.dt.isoformat()})


def _within(found: pa.Table, column: str, least: Any, greatest: Any) -> Iterable[pa.ChunkedArray]:
    """Which files may have values of a column between bounds; what nothing is known about may."""
    names = set(found.column_names)
    if least is not None and f"max.{column}" in names:
        yield pc.fill_null(pc.greater_equal(found[f"max.{column}"], least), True)
    if greatest is not None and f"min.{column}" in names:
        yield pc.fill_null(pc.less_equal(found[f"min.{column}"], greatest), True)
    if f"null_count.{column}" in names:
        yield pc.fill_null(pc.less(found[f"null_count.{column}"], found["num_records"]), True)


class Archive:
    """All tables below one address."""

    def __init__(self, uri: str) -> None:
        self.folder = Folder.at(uri)
        self.uri = self.folder.uri
        self._tables: dict[str, Table] = {}

    @classmethod
    def create(cls, uri: str) -> Archive:
        """The archive at an address that may be empty yet; nothing is made before the first commit.

        Raises:
            InvalidSettings: something else lies there.
            Damaged: see `check_logs`.
        """
        archive = cls(normal_uri(uri))
        archive.folder.check()
        archive.check_logs(ARCHIVED)
        return archive

    @classmethod
    def open(cls, uri: str) -> Archive:
        """The archive at an address, to look into.

        Raises:
            StorageError: there is none, or its store does not answer.
            InvalidSettings: a file lies there.
            Damaged: see `check_logs`.
        """
        archive = cls(normal_uri(uri))
        archive.folder.check()
        archive.check_logs(ARCHIVED)
        if not archive.exists():
            raise StorageError(f"there is no archive at {archive.uri}: `dmq archive run --tables …` makes one")
        return archive

    def table(self, name: str) -> Table:
        """One of the tables of `dmq.pipeline.tables`."""
        if name not in self._tables:
            if name not in SCHEMAS:
                raise InvalidSettings(f"the archive has no table {name!r}: there are {', '.join(SCHEMAS)}")
            self._tables[name] = Table(self.folder, name)
        return self._tables[name]

    def check_logs(self, names: Iterable[str]) -> None:
        """See that none of some tables has data files without a log, which would be taken for an empty one.

        Raises:
            Damaged: one has.
        """
        for name in self.folder.below_without(names, "_delta_log"):
            if any(below.startswith(f"{DT}=") for below in self.folder.below(name).folders()):
                remedy = (
                    "put _delta_log back from a copy, or move the folder away to archive anew what brokers still have"
                    if name in ARCHIVED
                    else f"move the folder away, and run the job that makes {name}"
                )
                raise Damaged(
                    f"{self.uri}/{name} has data files, but no log (_delta_log) that says which of them count: {remedy}"
                )

    def exists(self) -> bool:
        """Whether any table is there."""
        return any(self.table(name).exists() for name in SCHEMAS)
