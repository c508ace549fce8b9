"""Disk space: how full the disk is, and whether new messages are refused for it. The one source of that figure.

In use is what `df` says: blocks that are reserved for root are neither used nor available.

Two things make it refuse. Over the mark (`store.disk_refuse`) new messages are refused; what the broker itself moves
(retries, due delays, commits), settles and admin commands are written. Where a write found no space at all, the ballast
is given up: its room is for settles, new groups and admin commands alone, so every message is refused, until there is
space enough to make the ballast anew.

What always holds: a change is logged once, with the figures; nothing that was written is dropped here.

The ballast: a file that takes space while there is some, and is given up when a write finds none.

It is a plain file of the data directory, so `df` and `du` agree on it, and an operator may delete it in need.

What always holds: its blocks exist on the disk, also where a file system keeps none for zeros; it takes at most a
twentieth of the disk; it is made only where as much again is left.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from dmq.errors import DiskFull, StorageError
from dmq.event_log import EventLog
from dmq.settings import StoreSettings, format_size
from dmq.storage.files import DiskUsage, Files

__all__ = ["BALLAST", "DiskSpace"]

log = EventLog(__name__)

# Below the mark by so much it ends: a disk at its mark is not reported over and over.
_SLACK: Final = 0.005


class DiskSpace:
    """The disk of one data directory.

    Attributes:
        usage: when it was last looked at.
        is_refusing: new messages are refused, for either reason.
        is_full: a write found no space; what is left is the room of the ballast.
    """

    def __init__(self, files: Files, settings: StoreSettings) -> None:
        self._files = files
        self._settings = settings
        self.usage = files.disk_usage()
        self.ballast = Ballast(files, settings.ballast_bytes)
        self.is_full = False
        self.is_over_mark = False
        self.is_refusing = False

    def begin(self) -> None:
        """Before anything is accepted: see to the ballast, and look."""
        self.ballast.fit(self.usage)
        self.look()

    @property
    def is_crowded(self) -> bool:
        """Whether all that is past the retention is to go at once."""
        return self.usage.share > self._settings.disk_clean

    def look(self) -> None:
        """Look at the disk, and go on or stop refusing accordingly. Costs a few microseconds."""
        try:
            self.usage = usage = self._files.disk_usage()
        except (StorageError, FileNotFoundError) as error:
            log.error("the disk cannot be asked how full it is", once_for=(), error=error)
            return
        mark = self._settings.disk_refuse
        was_over = self.is_over_mark
        self.is_over_mark = usage.share > (mark - _SLACK if was_over and mark < 1 else mark)
        if self.is_over_mark != was_over:
            self._tell_mark()
        if not self.ballast.bytes and self.ballast.take(usage) and self.is_full:
            self.is_full = False
            self.usage = self._files.disk_usage()
            log.warning("the disk has space again: messages are taken", **self._facts())
        self.is_refusing = self.is_over_mark or self.is_full

    def ran_out(self) -> bool:
        """A write found no space. The ballast goes; returns whether that made some."""
        if self.is_full or not self.ballast.wanted(self.usage):
            return False
        with contextlib.suppress(StorageError):
            self.usage = self._files.disk_usage()
        freed = self.ballast.give_up()
        self.is_full = self.is_refusing = True
        log.error(
            "the disk is full: messages are refused, the ballast is given up for settles and admin commands",
            **self._facts(),
            ballast=format_size(freed),
        )
        return freed > 0

    def refusal(self) -> DiskFull:
        """Why a message is not written."""
        where, share = self._files.describe(""), f"{self.usage.share:.1%}"
        if self.is_full:
            text = (
                f"no space is left on the disk of {where}: free some space; messages are taken again by themselves then"
            )
        else:
            text = (
                f"the disk of {where} is {share} in use, and over {self._settings.disk_refuse:.0%} (store.disk_refuse) "
                "no message is taken: free some space; sending goes on by itself then"
            )
        return DiskFull(f"{text}, and consumers are served meanwhile", used=self.usage.used, free=self.usage.available)

    def _tell_mark(self) -> None:
        mark = f"{self._settings.disk_refuse:.0%}"
        if self.is_over_mark:
            log.warning("the disk is over its mark: messages are refused, consumers go on", **self._facts(), mark=mark)
        else:
            log.warning("the disk is below its mark again: messages are taken", **self._facts(), mark=mark)

    def _facts(self) -> dict[str, Any]:
        return {
            "directory": self._files.describe(""),
            "in_use": f"{self.usage.share:.1%}",
            "available": f"{self.usage.available / (1 << 20):.1f}MiB",
        }


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
