"""A bounded set of open files for reading, so that ten thousand queues do not need ten thousand descriptors."""

from __future__ import annotations

from collections import OrderedDict

from dmq.errors import TooManyFiles
from dmq.storage.files import File, Files

__all__ = ["FilePool", "remove_tree"]


class FilePool:
    """Open files by path, the longest unused closed first."""

    def __init__(self, files: Files, open_max: int) -> None:
        self._files = files
        self._open: OrderedDict[str, File] = OrderedDict()
        self._open_max = open_max

    def get(self, path: str) -> File:
        """The file, opened for reading if it was not; use it at once, do not keep it.

        Raises:
            FileNotFoundError: there is no such file.
        """
        file = self._open.get(path)
        if file is not None:
            self._open.move_to_end(path)
            return file
        if len(self._open) >= self._open_max:
            self._open.popitem(last=False)[1].close()
        try:
            file = self._files.open(path)
        except TooManyFiles:
            # The limit of the process may be below ours: give back what we hold and try once more.
            self.close()
            self._open_max = max(4, self._open_max // 2)
            file = self._files.open(path)
        self._open[path] = file
        return file

    def drop(self, path: str) -> None:
        """Close the file if it is open; for files that were replaced or removed."""
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


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
