"""A bounded set of open files for reading, so that ten thousand queues do not need ten thousand descriptors."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict

from dmq.errors import TooManyFiles
from dmq.storage.files import File, Files

__all__ = ["FilePool", "remove_tree"]


class FilePool:
    """Open files by path, the longest unused closed first. May be used from the owner's and one more thread."""

    def __init__(self, files: Files, open_max: int) -> None:
        self._files = files
        self._open: OrderedDict[str, File] = OrderedDict()
        self._open_max = min(open_max, _descriptors_left_to_us())
        self._lock = threading.RLock()
        self._held = False
        self._parked: list[File] = []

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

    def drop(self, path: str) -> None:
        """Close the file if it is open; for files that were replaced or removed."""
        with self._lock:
            file = self._open.pop(path, None)
            if file is not None:
                self._retire(file)

    def _retire(self, file: File) -> None:
        # While two threads read, the other one may be using it.
        if self._held:
            self._parked.append(file)
        else:
            file.close()

    def _close_open(self) -> None:
        for file in self._open.values():
            self._retire(file)
        self._open.clear()

    def hold(self) -> None:
        """Another thread reads too: close nothing until `release`."""
        self._held = True

    def release(self) -> None:
        """Only the owner reads again."""
        with self._lock:
            self._held = False
            for file in self._parked:
                file.close()
            self._parked.clear()

    def close(self) -> None:
        with self._lock:
            self.release()
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
