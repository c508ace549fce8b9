"""A folder that tables lie in, on this machine or in an object store.

What always holds: the address of a local folder is an absolute path without a scheme, since every reader takes that. A
file gets its final name when it is written, and is never renamed; in an object store folders are not made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from pyarrow import fs

from dmq.errors import InvalidSettings
from dmq.pipeline.object_store import delta_options, file_system, normal_uri, scheme_of, store_error, store_errors

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["Folder", "normal_uri"]


class Folder(NamedTuple):
    """A folder, and the file system it lies in."""

    uri: str
    files: fs.FileSystem
    path: str
    is_local: bool

    @classmethod
    def at(cls, uri: str) -> Folder:
        """The folder at an address; it need not be there yet.

        Raises:
            InvalidSettings: nothing here knows such an address.
        """
        uri = normal_uri(uri)
        files, path = file_system(uri)
        return cls(uri, files, path, scheme_of(uri) == "file")

    def below(self, name: str) -> Folder:
        """A folder in it."""
        return Folder(f"{self.uri}/{name}", self.files, f"{self.path}/{name}", self.is_local)

    def delta(self, version: int | None = None) -> DeltaTable:
        """The Delta table in it, as it is or as it was in a version.

        Raises:
            TableNotFoundError: there is none.
        """
        from deltalake import DeltaTable  # tasks only write files, and do not need it

        return DeltaTable(self.uri, version=version, storage_options=delta_options(self.uri))

    def claim(self, name: str, text: str) -> str:
        """Make a text the one that a name stands for, unless it stands for another; returns that of who was first.

        The first entry of a table's log is what every store that takes tables writes once. So the text is that. Of two
        who create a table at once, the later one writes a second entry, and hears of no error: what it has made is
        nobody's.

        Raises:
            StorageError: the store refuses it.
        """
        import pyarrow as pa
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        uri = f"{self.uri}/{name}"
        failure: DeltaError | None = None
        with store_errors(uri):
            try:
                columns = pa.schema([pa.field("claim", pa.string())])
                DeltaTable.create(uri, columns, description=text, storage_options=delta_options(uri))
            except DeltaError as error:
                failure = error
            first = self.claimed(name)
            if first is None:
                raise store_error(failure or FileNotFoundError(f"{uri} is gone again"), uri) from failure
        return first

    def claimed(self, name: str) -> str | None:
        """The text that a name stands for; None if nobody has claimed it."""
        from deltalake.exceptions import TableNotFoundError

        try:
            with store_errors(self.uri):
                return self.below(name).delta(version=0).metadata().description
        except TableNotFoundError:
            return None

    def folders(self) -> list[str]:
        """The names of the folders in it; none if it does not exist."""
        with store_errors(self.uri):
            found = self.files.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
            return [info.base_name for info in found if info.type == fs.FileType.Directory]

    def below_without(self, names: Iterable[str], inner: str) -> list[str]:
        """Those of some folders in it in which there is no folder of a name."""
        asked = [*names]
        with store_errors(self.uri):
            found = self.files.get_file_info([f"{self.path}/{name}/{inner}" for name in asked])
        return [name for name, info in zip(asked, found, strict=True) if info.type == fs.FileType.NotFound]

    def check(self) -> None:
        """See that the store answers, and that its bucket is there.

        Raises:
            StorageError: it does not, or is not; the message says what to do.
            InvalidSettings: a file lies there.
        """
        with store_errors(self.uri):
            if not self.is_local:
                self.files.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
            elif self.files.get_file_info(self.path).type == fs.FileType.File:
                raise InvalidSettings(f"{self.uri} is a file: give the folder of the tables")

    def make(self, name: str = "") -> None:
        """See that a folder is there to write into; an object store has none, and needs none."""
        if self.is_local:
            with store_errors(self.uri):
                self.files.create_dir(f"{self.path}/{name}" if name else self.path, recursive=True)

    def delete(self, name: str = "") -> None:
        """Delete a folder with all files in it, if it exists."""
        path = f"{self.path}/{name}" if name else self.path
        with store_errors(self.uri):
            if self.files.get_file_info(path).type == fs.FileType.Directory:
                self.files.delete_dir(path)

    def sweep(self, age: timedelta) -> None:
        """Delete the folders in it in which nothing was written for this time."""
        latest: dict[str, datetime] = {}
        with store_errors(self.uri):
            for info in self.files.get_file_info(fs.FileSelector(self.path, recursive=True, allow_not_found=True)):
                below = info.path.removeprefix(f"{self.path}/").partition("/")[0]
                if info.mtime is not None:
                    latest[below] = max(info.mtime, latest.get(below, info.mtime))
            for name, at in latest.items():
                if at < datetime.now(UTC) - age:
                    self.delete(name)

    def sync(self, name: str) -> None:
        """Make a file of it, and its name, outlive a power loss; an object store does that by itself."""
        if self.is_local:
            path = f"{self.path}/{name}"
            _sync(path)
            _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
