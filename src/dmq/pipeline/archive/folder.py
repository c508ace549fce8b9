"""Where an archive lies: a folder of this machine, or of an object store that Arrow and Delta both know.

What always holds: the address of a local folder is an absolute path without a scheme, since every reader takes that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from dmq.errors import InvalidSettings

__all__ = ["Folder", "normal_uri"]


def normal_uri(uri: str) -> str:
    """The address as this package spells it.

    Raises:
        InvalidSettings: it is none.
    """
    if not uri.strip():
        raise InvalidSettings("where is the archive? give the folder or the address of its tables")
    parts = urlsplit(uri)
    if "://" not in uri:
        return str(Path(uri).expanduser().absolute())
    if parts.scheme == "file":
        return str(Path(unquote(parts.path)).absolute())
    return uri.rstrip("/")


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
        if "://" not in uri:
            return cls(uri, fs.LocalFileSystem(), uri, True)
        try:
            files, path = fs.FileSystem.from_uri(uri)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:  # a store is asked where it is
            raise InvalidSettings(f"no archive can lie at {uri}: {error}") from error
        return cls(uri, files, path, False)

    def below(self, name: str) -> Folder:
        """A folder in it."""
        return Folder(f"{self.uri}/{name}", self.files, f"{self.path}/{name}", self.is_local)

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
