"""Where messages with an id, a key or a business id stand, out of the table `key_index`.

The directory says which files may have a hash. A file of the index is sorted by hash. Its footer says which hashes each
row group has, so that of a file one group is read: its hashes first, and the rest of it only if the hash is there. The
oldest files come first, and those that can only have younger places than were found are not opened.

What always holds: a place is of the very text that was asked for, whatever its hash is; at most `OPEN_MAX` files are
open between questions.

The files of the index that may have a hash: out of the archive's directory, and those that it does not name.

What always holds: a file is left out only if a run of the directory names it and has no entry for the hash. What was
read of a run is kept as long as the run is there; at most `RUNS_OPEN_MAX` files of entries are open between questions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import date
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dmq.errors import Damaged
from dmq.pipeline.archive.key_directory import EntryFile, hash_prefix, is_names, read_names, run_of
from dmq.pipeline.archive.key_index import bucket_of, text_hash
from dmq.pipeline.archive.table_store import Archive, Table
from dmq.pipeline.lookup.file_list import Listing
from dmq.pipeline.object_store import open_parquet
from dmq.pipeline.tables import KEY_DIRECTORY, KEY_INDEX, SCHEMAS

__all__ = ["IndexEntry", "KeyIndex"]

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
