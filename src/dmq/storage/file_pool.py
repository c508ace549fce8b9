"""The file pool: a bounded set of files open for reading, so that 10,000 queues do not need 10,000 descriptors.

A thread that must not wait for a disk asks under `deferring`: a read that was not prepared raises `NeedsDisk`, another
thread does that read, and the question is asked again.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from dmq.errors import TooManyFiles
from dmq.storage.files import File, Files

__all__ = ["FilePool", "NeedsDisk", "Prepared", "remove_tree"]


class NeedsDisk(Exception):
    """Not an error: what has to be read before the question can be answered."""

    def __init__(self, path: str, position: int, size: int) -> None:
        super().__init__(path, position, size)
        self.path = path
        self.position = position
        self.size = size

    @property
    def key(self) -> tuple[str, int, int]:
        return self.path, self.position, self.size


# What was read beforehand, or what came of trying.
Prepared: TypeAlias = dict[tuple[str, int, int], bytes | Exception]


class _Deferral(threading.local):
    """What the thread that asks has prepared; None while it reads by itself."""

    prepared: Prepared | None = None


class FilePool:
    """Open files by path, the longest unused closed first. While somebody holds it, other threads may read too."""

    def __init__(self, files: Files, open_max: int) -> None:
        self._files = files
        self._open: OrderedDict[str, File] = OrderedDict()
        self._open_max = min(open_max, _descriptors_left_to_us())
        self._lock = threading.RLock()
        self._holders = 0
        self._parked: list[File] = []
        self._deferral = _Deferral()

    def get(self, path: str) -> File:
        """The file, opened for reading if it was not; use it at once, do not keep it.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with self._lock:
            file = self._open.get(path)
            if file is not None:
                self._open.move_to_end(path)
                return file
            if len(self._open) >= self._open_max:
                self._retire(self._open.popitem(last=False)[1])
            try:
                file = self._files.open(path)
            except TooManyFiles:
                # The limit of the process may be below ours: give back what we hold and try once more.
                self._close_open()
                self._open_max = max(4, self._open_max // 2)
                file = self._files.open(path)
            self._open[path] = file
            return file

    def read(self, path: str, position: int, size: int) -> bytes:
        """Bytes of a file, fewer only where it ends.

        Raises:
            FileNotFoundError: there is no such file.
            NeedsDisk: this thread defers its reads, and this one is not prepared.
        """
        prepared = self._deferral.prepared
        if prepared is None:
            return self.get(path).read(position, size)
        found = prepared.get((path, position, size))
        if found is None:
            raise NeedsDisk(path, position, size)
        if isinstance(found, Exception):
            raise found
        return found

    @contextlib.contextmanager
    def deferring(self, prepared: Prepared | None) -> Iterator[bool]:
        """Within this, the thread reads only what is prepared; with None, by itself. Tells whether it deferred before.

        What it defers to another thread may be read there only between `hold` and `release`.
        """
        before, self._deferral.prepared = self._deferral.prepared, prepared
        try:
            yield before is not None
        finally:
            self._deferral.prepared = before

    def drop(self, path: str) -> None:
        """Close the file if it is open; for files that were replaced or removed."""
        with self._lock:
            file = self._open.pop(path, None)
            if file is not None:
                self._retire(file)

    def _retire(self, file: File) -> None:
        # While two threads read, the other one may be using it.
        if self._holders:
            self._parked.append(file)
        else:
            file.close()

    def _close_open(self) -> None:
        for file in self._open.values():
            self._retire(file)
        self._open.clear()

    def hold(self) -> None:
        """Another thread reads too: close nothing until its `release`."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """That thread reads no more."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._close_parked()

    def _close_parked(self) -> None:
        for file in self._parked:
            file.close()
        self._parked.clear()

    def close(self) -> None:
        with self._lock:
            self._holders = 0
            self._close_parked()
            self._close_open()


def _descriptors_left_to_us() -> int:
    """Half of what the process may open: the other half is for writing, folders, and everybody else's sockets."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if allowed == resource.RLIM_INFINITY else max(4, allowed // 2)


def remove_tree(files: Files, pool: FilePool, path: str) -> None:
    """Remove a folder and everything in it."""
    for name in files.listdir(path):
        inner = f"{path}/{name}"
        if files.is_dir(inner):
            remove_tree(files, pool, inner)
        else:
            pool.drop(inner)
            files.unlink(inner)
    files.rmdir(path)
