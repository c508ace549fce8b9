"""The ballast: a file that takes space while there is some, and is given up when a write finds none.

It is a plain file of the data directory, so `df` and `du` agree on it, and an operator may delete it in need.

What always holds: its blocks exist on the disk, also where a file system keeps none for zeros; it takes at most a
twentieth of the disk; it is made only where as much again is left.
"""

from __future__ import annotations

import contextlib
from typing import Final

from dmq.errors import DiskFull, StorageError
from dmq.event_log import EventLog
from dmq.storage.files import DiskUsage, Files

__all__ = ["BALLAST", "Ballast"]

log = EventLog(__name__)

BALLAST: Final = "ballast"
_SHARE: Final = 20
_BLOCK: Final = 4096


class Ballast:
    """The ballast of one data directory.

    Parameters:
        bytes_max: its size on a disk that is large enough; 0 for none.

    Attributes:
        bytes: what it takes now; 0 where there is none.
    """

    def __init__(self, files: Files, bytes_max: int) -> None:
        self._files = files
        self._bytes_max = bytes_max
        self._refused = ""
        self.bytes = 0
        with contextlib.suppress(StorageError, FileNotFoundError):
            self.bytes = files.size(BALLAST)

    def wanted(self, usage: DiskUsage) -> int:
        """How large it should be on a disk like this."""
        return min(self._bytes_max, usage.total // _SHARE) // _BLOCK * _BLOCK

    def fit(self, usage: DiskUsage) -> None:
        """Make it what the settings say, at start: they may have changed, or a crash have left a part of it."""
        wanted = self.wanted(usage)
        if self.bytes and self.bytes != wanted and (not wanted or usage.available + self.bytes >= 2 * wanted):
            self.give_up()
            usage = self._files.disk_usage()
        self.take(usage)

    def take(self, usage: DiskUsage) -> bool:
        """Make it, if it is missing and there is room; returns False for want of space."""
        wanted = self.wanted(usage)
        if self.bytes or not wanted:
            return True
        if usage.available < 2 * wanted:
            return False
        try:
            file = self._files.open(BALLAST, create=True, write=True)
            try:
                file.allocate(wanted)
            finally:
                file.close()
        except StorageError as error:
            with contextlib.suppress(StorageError):
                self._files.unlink(BALLAST)
            if isinstance(error, DiskFull):
                return False
            if str(error) != self._refused:
                self._refused = str(error)
                log.error("the ballast cannot be made", bytes=wanted, error=error)
            return True
        self.bytes = wanted
        return True

    def give_up(self) -> int:
        """Remove it; returns how many bytes that frees."""
        freed = self.bytes
        try:
            self._files.unlink(BALLAST)
        except StorageError as error:
            log.error("the ballast cannot be removed", once_for=(), error=error)
            return 0
        self.bytes = 0
        return freed
