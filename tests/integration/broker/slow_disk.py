"""A disk that stands still when a test says so: reads or flushes wait until it goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dmq.storage.files import Buffer, File
from dmq.testing import MemoryFiles

PATIENCE = 60.0


class Gate:
    """While it is closed, threads that come to it wait; `waiting` has their number."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0
        self.passed = 0

    def pass_through(self) -> None:
        self.waiting += 1
        assert self._open.wait(PATIENCE), "a test left the disk standing still"
        self.waiting -= 1
        self.passed += 1

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


class GatedFile:
    """A file behind the disk's gates."""

    def __init__(self, file: File, disk: SlowFiles, path: str) -> None:
        self._file = file
        self._disk = disk
        self._path = path

    def read(self, position: int, size: int) -> bytes:
        self._disk.reads.pass_through()
        return self._file.read(position, size)

    read_aside = read

    def sync(self) -> None:
        if self._path.startswith("journal"):
            self._disk.flushes.pass_through()
        self._file.sync()

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._file.write(position, buffers)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def allocate(self, size: int) -> None:
        self._file.allocate(size)

    def reserve(self, start: int, end: int) -> bool:
        return self._file.reserve(start, end)

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


class SlowFiles(MemoryFiles):
    """Files in memory; `reads` and `flushes` (of the journal) can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Gate()
        self.flushes = Gate()

    def open(  # type: ignore[override]
        self, path: str, *, create: bool = False, write: bool = False
    ) -> File:
        return GatedFile(super().open(path, create=create, write=write), self, path)
