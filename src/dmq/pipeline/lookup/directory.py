"""The files of the index that may have a hash: out of the archive's directory, and those that it does not name.

What always holds: a file is left out only if a run of the directory names it and has no entry for the hash. What was
read of a run is kept as long as the run is there; at most `OPEN_MAX` files of entries are open between questions.
"""

from __future__ import annotations

from typing import Final

from dmq.pipeline.archive.key_directory import EntryFile, hash_prefix, is_names, read_names, run_of
from dmq.pipeline.archive.table_store import Table
from dmq.pipeline.lookup.file_list import Listing

__all__ = ["Directory"]

OPEN_MAX: Final = 64


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
        if len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]
        return file
