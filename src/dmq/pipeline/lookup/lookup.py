"""Finding archived messages: by id, key, business id or time, and what became of one.

The index table says where a message stands by the hash of what it is looked up by; it and the messages are sorted, so
that of each file one row group is read, and of most files none. The directory (`Directory`) says which files of the
index may have a hash. A file of the index has a footer that says which hashes each row group has, so that of a file one
group is read: its hashes first, and the rest of it only if the hash is there. The oldest files come first, and those
that can only have younger places than were found are not opened. Files of messages are chosen by the statistics in the
tables' logs (`Listing`).

What always holds: whatever is found has the very id, key or business id that was asked for, whatever its hash is; what
was in the tables `fresh_seconds` before a question is found; a body that is given out matches its checksum. A file of a
table is left out only if the log says that it has nothing of the kind; a list of files is at most so old as was asked
for. A file of the index is left out only if a run of the directory names it and has no entry for the hash. At most
`OPEN_MAX` files of the index and `RUNS_OPEN_MAX` files of a directory's entries are open between questions; what was
read of a run is kept as long as the run is there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from dmq.errors import Damaged, InvalidRequest
from dmq.pipeline.archive.key_index import (
    BUSINESS_ID,
    KEY,
    MESSAGE_ID,
    EntryFile,
    bucket_of,
    hash_prefix,
    is_names,
    read_names,
    run_of,
    text_hash,
)
from dmq.pipeline.archive.parquet import DT
from dmq.pipeline.archive.table_store import Archive, Table
from dmq.pipeline.lookup.engine import Bounds as EngineBounds
from dmq.pipeline.lookup.engine import Engine, Result
from dmq.pipeline.object_store import open_parquet
from dmq.pipeline.tables import CONSUME_EVENT, COPY, KEY_DIRECTORY, KEY_INDEX, MESSAGE, SCHEMAS

__all__ = ["IndexEntry", "KeyIndex", "Life", "Listing", "Lookup", "Row", "run_sql"]

Row: TypeAlias = dict[str, Any]

LIMIT: Final = 100
_FRESH_SECONDS: Final = 1.0
_COLUMNS: Final = [name for name in SCHEMAS[MESSAGE].names if name != "body"]
_TIMES: Final = frozenset(field.name for field in SCHEMAS[MESSAGE] if pa.types.is_timestamp(field.type))
_ASKED: Final = {name: f"epoch_us({name})" if name in _TIMES else name for name in SCHEMAS[MESSAGE].names} | {
    "body_bytes": "octet_length(body)"
}
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Life(NamedTuple):
    """What the archive knows of one message: its rows, the copies made of it, and the words said of it."""

    messages: list[Row]
    copies: list[Row]
    events: list[Row]


class Lookup:
    """The archive, opened once for many questions. A context manager; used by one thread at a time.

    Parameters:
        uri: where the tables lie.
        fresh_seconds: for how long the list of a table's files is taken for true.

    Raises:
        StorageError: there is no archive, or its store does not answer; see `Archive.open`.
    """

    def __init__(self, uri: str, *, fresh_seconds: float = _FRESH_SECONDS) -> None:
        self.archive: Final = Archive.open(uri)
        self._engine = Engine()
        self._engine.reach(self.archive.uri)
        self._listings = {
            name: Listing(self.archive.table(name), fresh_seconds) for name in (MESSAGE, COPY, CONSUME_EVENT)
        }
        self._index = KeyIndex(self.archive, fresh_seconds)

    # --- messages ---------------------------------------------------------------------------------------------------

    def by_id(self, message_id: str, topic: str = "", *, bodies: bool = True, limit: int = LIMIT) -> list[Row]:
        """The message with an id, and what was replayed under it, oldest first."""
        return self._by(MESSAGE_ID, message_id, topic, bodies, limit=limit)

    def by_key(self, key: str, topic: str = "", *, bodies: bool = True, limit: int = LIMIT) -> list[Row]:
        """Messages with a key, oldest first."""
        return self._by(KEY, key, topic, bodies, limit=limit)

    def by_business_id(
        self, business_id: str, topic: str = "", *, bodies: bool = True, limit: int = LIMIT
    ) -> list[Row]:
        """Messages with a business id, oldest first."""
        return self._by(BUSINESS_ID, business_id, topic, bodies, limit=limit)

    def by_time(
        self, topic: str, since: datetime | None, until: datetime | None, *, bodies: bool = True, limit: int = LIMIT
    ) -> list[Row]:
        """Messages of a topic that were stored from a moment on and before another, oldest first."""
        bounds: dict[str, tuple[Any, Any]] = {"topic": (topic, topic)}
        if since is not None or until is not None:
            bounds["stored_at"] = (since, until)
        files = self._listings[MESSAGE].files(where=bounds, days=_days(since, until))
        said = (
            ["topic = $topic"]
            + ["stored_at >= $since"] * (since is not None)
            + ["stored_at < $until"] * (until is not None)
        )
        values = {"topic": topic} | ({"since": since} if since else {}) | ({"until": until} if until else {})
        return self._messages(files, " AND ".join(said), values, bodies, limit=limit)

    def _by(self, kind: str, text: str, topic: str, bodies: bool, limit: int) -> list[Row]:
        if limit < 1:
            raise InvalidRequest(f"at least one message is asked for, not {limit}")
        if not self._index.is_there():
            # Made by an older job, or not made yet: slower, and true all the same.
            files = self._listings[MESSAGE].files(where={"topic": (topic, topic)} if topic else None)
            said = f"{kind} = $text" + (" AND topic = $topic" if topic else "")
            return self._messages(
                files, said, {"text": text} | ({"topic": topic} if topic else {}), bodies, limit=limit
            )
        places = self._index.places(kind, text, topic, limit)
        listing = self._listings[MESSAGE]
        chosen: set[str] = set()
        for place in places:
            here = (place.queue_offset, place.queue_offset)
            at = (place.journal_offset, place.journal_offset)
            bounds = {"journal_offset": at, "queue_offset": here, "topic": (place.topic, place.topic)}
            chosen.update(listing.files(where=bounds, days=(place.day, place.day)))
        if not chosen:
            return []
        # Written out: of a list that is a parameter DuckDB does not know which row groups it leaves out.
        offsets = ", ".join(map(str, sorted({place.queue_offset for place in places})))
        journal_offsets = ", ".join(map(str, sorted({place.journal_offset for place in places})))
        said = f"queue_offset IN ({offsets}) AND journal_offset IN ({journal_offsets}) AND {kind} = $text"
        values = {"text": text}
        if topic:
            said, values = f"{said} AND topic = $topic", values | {"topic": topic}
        return sorted(self._messages(sorted(chosen), said, values, bodies, limit=None), key=_by_time)[:limit]

    def _messages(
        self, files: Sequence[str], said: str, values: Mapping[str, Any], bodies: bool, limit: int | None
    ) -> list[Row]:
        """The oldest messages of some files; without a limit all, in no order, which is cheaper."""
        if not files:
            return []
        names = [*_COLUMNS, "body_bytes", *(["body"] if bodies else [])]
        query = f"SELECT {', '.join(_ASKED[name] for name in names)} FROM read_parquet($files) WHERE {said}"
        asked = dict(values) | {"files": files}
        if limit is not None:
            query, asked = f"{query} ORDER BY stored_at, journal_offset LIMIT $limit", asked | {"limit": limit}
        rows = self._engine.tuples(query, asked)
        return [_row(names, row) for row in rows]

    # --- what became of one -----------------------------------------------------------------------------------------

    def life(self, message_id: str, *, bodies: bool = False) -> Life:
        """Everything the archive knows of a message."""
        messages = self.by_id(message_id, bodies=bodies)
        # Copies are made before, too, as of a delayed message: from when it was sent on, by a clock that may be wrong.
        since = min(messages[0]["sent_at"] or _EPOCH, messages[0]["stored_at"]) - _DAY if messages else None
        found: list[list[Row]] = []
        for name, order in ((COPY, "stored_at"), (CONSUME_EVENT, '"at"')):
            files = self._listings[name].files(where={"message_id": (message_id, message_id)}, days=_days(since, None))
            query = (
                f"SELECT * FROM read_parquet($files) WHERE message_id = $id ORDER BY {order}, journal_offset LIMIT 1000"
            )
            found.append(self._engine.rows(query, {"files": files, "id": message_id}).to_pylist() if files else [])
        return Life(messages, *found)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_sql(uri: str, query: str, bounds: EngineBounds | None = None) -> Result:
    """What a SELECT over the archive's tables, under their names, gives.

    Raises:
        InvalidRequest: it is not a SELECT, or cannot be understood.
        LimitReached, TimedOut: it takes more than the bounds allow.
        StorageError: there is no archive, or its store does not answer; see `Archive.open`.
    """
    archive = Archive.open(uri)
    archive.check_logs(SCHEMAS)
    with Engine(bounds) as engine:
        every: list[str] = []
        for name, schema in SCHEMAS.items():
            files = archive.table(name).files()
            engine.show(name, files, schema)
            every += files
        engine.confine(every)
        return engine.ask(query)


def _row(names: Sequence[str], values: Sequence[Any]) -> Row:
    """A message as a dictionary: moments as such, headers as properties.

    Raises:
        Damaged: its body is not what was archived; Parquet has no checksum of its own.
    """
    row = dict(zip(names, values, strict=True))
    if "body" in row and row["body_crc"] not in (None, crc32c(row["body"] or b"")):
        raise Damaged(
            f"the body of message {row['message_id']} is not what was archived: a file of table message is damaged, "
            "put it back from a copy; without bodies the message can be looked up"
        )
    for name in _TIMES:
        row[name] = None if row[name] is None else _EPOCH + timedelta(microseconds=row[name])
    row["properties"] = {one["key"]: bytes(one["value"]).decode() for one in row.pop("headers") or ()}
    return row


def _by_time(row: Row) -> tuple[datetime, int]:
    return row["stored_at"], row["journal_offset"]


def _days(since: datetime | None, until: datetime | None) -> tuple[date | None, date | None]:
    """The days that hold a stretch of time."""
    return (
        None if since is None else since.astimezone(UTC).date(),
        None if until is None else until.astimezone(UTC).date(),
    )


OPEN_MAX: Final = 256
_BUCKET: Final = SCHEMAS[KEY_INDEX].get_field_index("bucket")
_HASH: Final = SCHEMAS[KEY_INDEX].get_field_index("hash")
_ANY: Final = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


class IndexEntry(NamedTuple):
    """Where a message stands."""

    day: date
    journal_offset: int
    topic: str
    queue: int
    queue_offset: int


class KeyIndex:
    """The index, opened once for many questions. Used by one thread at a time."""

    def __init__(self, archive: Archive, fresh_seconds: float) -> None:
        self._listing = Listing(archive.table(KEY_INDEX), fresh_seconds)
        directory = archive.table(KEY_DIRECTORY)
        self._directory = Directory(directory, Listing(directory, fresh_seconds), self._listing)
        self._open: dict[str, _File] = {}

    def is_there(self) -> bool:
        """Whether anything was ever indexed."""
        return bool(self._listing.paths())

    def places(self, kind: str, text: str, topic: str, limit: int) -> list[IndexEntry]:
        """Where the oldest messages with a text stand, oldest first.

        Parameters:
            kind: what the text is, one of `KINDS`.
            topic: of this one only; empty is any.

        Raises:
            Damaged: a file of the index is gone, or cannot be read.
        """
        hashed = text_hash(text)
        bucket = bucket_of(hashed)
        found: list[IndexEntry] = []
        for day, offset, path in self._listing.by_age(self._directory_files(hashed)):
            if len(found) >= limit and (day, offset) > found[limit - 1][:2]:
                break
            try:
                for rows in self._file(self._listing.address(path)).having(bucket, hashed):
                    found += _places(rows, kind, text, topic, limit=limit)
            except (OSError, pa.ArrowException) as error:
                raise Damaged(f"a file of the index cannot be read, look at {path}: {error}") from error
            found = sorted(found)[:limit]
        return found

    def _directory_files(self, hashed: int) -> set[str]:
        try:
            return self._directory.files(hashed)
        except (OSError, pa.ArrowException) as error:
            raise Damaged(f"a file of the index's directory cannot be read: {error}") from error

    def _file(self, path: str) -> _File:
        file = self._open.pop(path, None) or _File(path)
        self._open[path] = file  # the last one that was asked is the last
        if len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]
        return file


class _File:
    """A file of the index, and which hashes its row groups have."""

    def __init__(self, path: str) -> None:
        self._parquet = open_parquet(path)
        self._buckets = _bounds(self._parquet.metadata, _BUCKET)
        self._hashes = _bounds(self._parquet.metadata, _HASH)

    def having(self, bucket: int, hashed: int) -> Iterator[pa.Table]:
        """The rows with a hash, by row group."""
        # A group across the middle of the buckets has the greatest of all hashes and the least: its bounds say nothing.
        may_have = _covers(self._buckets, bucket) & _covers(self._hashes, hashed)
        for group in np.flatnonzero(may_have).tolist():
            hashes = self._read(group, ["hash"])["hash"].to_numpy()
            at = np.flatnonzero(hashes == hashed)
            if len(at):
                yield self._read(group, ["kind", "key", *IndexEntry._fields[1:], "dt"]).take(at)

    def _read(self, group: int, columns: list[str]) -> pa.Table:
        return self._parquet.read_row_group(group, columns=columns, use_threads=False)


def _bounds(said: pq.FileMetaData, column: int) -> npt.NDArray[np.int64]:
    """Least and greatest values of a column, by row group; all there can be where the footer does not say."""
    known = (said.row_group(group).column(column).statistics for group in range(said.num_row_groups))
    return np.array([(one.min, one.max) if one and one.has_min_max else _ANY for one in known], np.int64).reshape(-1, 2)


def _covers(bounds: npt.NDArray[np.int64], value: int) -> npt.NDArray[np.bool_]:
    covered: npt.NDArray[np.bool_] = (bounds[:, 0] <= value) & (value <= bounds[:, 1])
    return covered


def _places(rows: pa.Table, kind: str, text: str, topic: str, limit: int) -> list[IndexEntry]:
    """The oldest of the rows that are meant; all of them are of one day."""
    asked = {"kind": kind, "key": text} | ({"topic": topic} if topic else {})
    # With their type, since Arrow takes longer to find that out than for everything else here.
    wanted: Any = [pc.equal(rows[name], pa.scalar(value, pa.string())) for name, value in asked.items()]
    rows = rows.filter(functools.reduce(pc.and_, wanted))
    if rows.num_rows > limit:
        rows = rows.take(pc.select_k_unstable(rows, limit, [("journal_offset", "ascending")]))
    columns = [rows[name].to_pylist() for name in ("dt", *IndexEntry._fields[1:])]
    return [IndexEntry(*values) for values in zip(*columns, strict=True)]


RUNS_OPEN_MAX: Final = 64


class Directory:
    """The directory, opened once for many questions. Used by one thread at a time.

    Parameters:
        table: the directory's.
        listing: of the same table.
        index: of the index.
    """

    def __init__(self, table: Table, listing: Listing, index: Listing) -> None:
        self._folder = table.folder
        self._listing = listing
        self._index = index
        self._names: dict[str, list[str]] = {}  # by run
        self._open: dict[str, EntryFile] = {}
        self._versions = (-1, -1)  # of the directory and of the index, that the following are of
        self._live: frozenset[str] = frozenset()
        self._uncovered: frozenset[str] = frozenset()

    def files(self, hashed: int) -> set[str]:
        """Files of the index, by their paths below its folder.

        Raises:
            OSError, pyarrow.ArrowException: a file of the directory cannot be read.
        """
        self._refresh()
        prefix = hash_prefix(hashed)
        found = set(self._uncovered)
        for path in self._listing.paths(where={"hash": (prefix, prefix)}):
            if not is_names(path):
                names = self._names[run_of(path)]
                for _, files in self._file(path).between(prefix, prefix):
                    found.update(names[number] for number in files.tolist())
        return found & self._live

    def _refresh(self) -> None:
        """See which files of the index no run names."""
        versions = (self._listing.version(), self._index.version())
        if versions == self._versions:
            return
        named = {run_of(path): path for path in self._listing.paths() if is_names(path)}
        self._names = {
            run: self._names[run] if run in self._names else read_names(self._folder, path)
            for run, path in named.items()
        }
        self._live = frozenset(self._index.paths())
        self._uncovered = self._live.difference(*self._names.values())
        self._versions = versions

    def _file(self, path: str) -> EntryFile:
        file = self._open.pop(path, None) or EntryFile(self._folder, path)
        self._open[path] = file  # the last one that was asked is the last
        if len(self._open) > RUNS_OPEN_MAX:
            del self._open[next(iter(self._open))]
        return file


Days = tuple[date | None, date | None]
_Bounds: TypeAlias = Mapping[str, tuple[Any, Any]]
_EPOCH_DAY: Final = date(1970, 1, 1)


class Listing:
    """The files of one table, read again when they are too old.

    Parameters:
        fresh_seconds: how old the list may be.
        now: seconds that never go back.
    """

    def __init__(self, table: Table, fresh_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._folder = table.folder
        self._fresh_seconds = fresh_seconds
        self._now = now
        self._delta: DeltaTable | None = None
        self._listed: pa.Table | None = None
        self._paths: list[str] = []
        self._places: dict[str, int] = {}  # of paths in the list, once they are asked for
        self._columns: dict[str, _Values | None] = {}  # of the list, as far as they were asked for
        self._version = -1
        self._read_at = float("-inf")

    def version(self) -> int:
        """The version of the table that is listed; -1 if there is none."""
        return self._version if self._fresh() else -1

    def address(self, path: str) -> str:
        """The address of a file."""
        return f"{self._folder.uri}/{path}"

    def files(self, where: _Bounds | None = None, days: Days = (None, None)) -> list[str]:
        """Addresses of the files that may have rows of some days with values within bounds, the bounds included."""
        return [self.address(path) for path in self.paths(where, days)]

    def paths(self, where: _Bounds | None = None, days: Days = (None, None)) -> list[str]:
        """As `files`: paths below the table's folder."""
        if not self._fresh():
            return []
        left = np.arange(len(self._paths))
        first, last = (None if day is None else (day - _EPOCH_DAY).days for day in days)
        bounds = {DT: (first, last), **(where or {})}
        # Numbers before texts: numpy leaves few files to compare texts of.
        for name, (least, greatest) in sorted(bounds.items(), key=lambda item: isinstance(item[1][0], str)):
            if least is not None and (high := self._bound("max", name)) is not None:
                left = high.at_least(least, left)
            if greatest is not None and (low := self._bound("min", name)) is not None:
                left = low.at_most(greatest, left)
        return [self._paths[at] for at in left.tolist()]

    def by_age(self, paths: set[str]) -> list[tuple[date, int, str]]:
        """Files, by the day and the least journal offset of what they have."""
        if not self._fresh():
            return []
        if not self._places:
            self._places = {path: at for at, path in enumerate(self._paths)}
        low = self._bound("min", "journal_offset")
        found = []
        for path in paths & self._places.keys():
            offset = None if low is None else low.value(self._places[path])
            found.append((date.fromisoformat(path.partition("/")[0].partition("=")[2]), offset or 0, path))
        return sorted(found)

    def _bound(self, which: str, name: str) -> _Values | None:
        """The least or greatest value of a column in each file; None if the log has none."""
        column = f"partition.{DT}" if name == DT else f"{which}.{name}"
        if column not in self._columns:
            assert self._listed is not None
            known = column in self._listed.column_names
            self._columns[column] = _Values(self._listed[column].combine_chunks()) if known else None
        return self._columns[column]

    def _fresh(self) -> bool:
        """See that the list is new enough; whether there is a table."""
        now = self._now()
        if now - self._read_at < self._fresh_seconds:
            return self._listed is not None
        try:
            if self._delta is None:
                self._delta = self._folder.delta()
            else:
                self._delta.update_incremental()
        except TableNotFoundError:
            self._delta = self._listed = None
        else:
            version = self._delta.version()
            if self._listed is None or version != self._version:
                self._listed = pa.table(self._delta.get_add_actions(flatten=True))
                self._paths = self._listed["path"].to_pylist()
                self._columns, self._places, self._version = {}, {}, version
        self._read_at = now
        return self._listed is not None


class _Values:
    """One value for each file, or none where the log does not say: numbers and days for numpy, others for Python."""

    def __init__(self, said: pa.Array) -> None:
        self._texts: list[Any] | None = None
        if pa.types.is_date32(said.type):
            said = said.cast(pa.int32())
        if pa.types.is_integer(said.type):
            self._numbers: npt.NDArray[np.int64] = said.fill_null(0).to_numpy()
            self._unknown: npt.NDArray[np.bool_] = said.is_null().to_numpy(zero_copy_only=False)
        else:
            self._texts = said.to_pylist()

    def value(self, at: int) -> Any:
        if self._texts is not None:
            return self._texts[at]
        return None if self._unknown[at] else int(self._numbers[at])

    def at_least(self, bound: Any, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of some files that may have a value from the bound on."""
        if self._texts is not None:
            texts = self._texts
            return np.array([at for at in left.tolist() if texts[at] is None or texts[at] >= bound], np.int64)
        found: npt.NDArray[np.int64] = left[(self._numbers[left] >= bound) | self._unknown[left]]
        return found

    def at_most(self, bound: Any, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of some files that may have a value up to the bound."""
        if self._texts is not None:
            texts = self._texts
            return np.array([at for at in left.tolist() if texts[at] is None or texts[at] <= bound], np.int64)
        found: npt.NDArray[np.int64] = left[(self._numbers[left] <= bound) | self._unknown[left]]
        return found
