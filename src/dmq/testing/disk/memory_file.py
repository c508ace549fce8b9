"""One open file of the memory file system.

What always holds: it works on after its file was unlinked, replaced or renamed; a write that fails or that the crash
cuts short leaves a first part of its bytes, perhaps none.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from dmq.storage.files import Buffer
from dmq.testing.disk.faults import Kind, Machine, refuse
from dmq.testing.disk.nodes import FileNode
from dmq.testing.disk.space import Space

__all__ = ["MemoryFile"]

_BLOCK = 512


class MemoryFile:
    """A file by its node."""

    __slots__ = ("_machine", "_mutex", "_node", "_open", "_path", "_space", "_writable")

    def __init__(self, machine: Machine, space: Space, node: FileNode, path: str, writable: bool) -> None:
        self._machine = machine
        self._mutex = machine.mutex
        self._space = space
        self._node = node
        self._path = path
        self._writable = writable
        self._open = True
        node.handles += 1
        machine.handles += 1

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        with self._mutex:
            self._check("write", position, writes=errno.EBADF)
            machine = self._machine
            end = position + len(data)
            lacking = self._space.lacking(end - len(self._node.data)) if data else 0
            fits = max(0, len(data) - lacking)
            if machine.count("write", self._path, position, len(data)):
                self._put(position, data[: machine.rng.choice((0, machine.rng.randint(0, fits), fits))])
                machine.die()
            if machine.faults and (fault := machine.struck("write", self._path)):
                self._put(position, data[: min(fits, int(len(data) * fault.written))])
                raise refuse(fault.error, "write", self._path)
            if lacking:
                # As Linux does: what fits is written.
                self._put(position, data[:fits])
                raise refuse(errno.ENOSPC, "write", self._path)
            self._put(position, data)
            if self._node.bad:  # a disk gives a block that was written another place
                self._node.bad -= {at for at in self._node.bad if position <= at and at + _BLOCK <= end}

    def read(self, position: int, size: int) -> bytes:
        with self._mutex:
            self._check("read", position)
            self._machine.look("read", self._path, position, size)
            if self._node.bad and any(at < position + size and position < at + _BLOCK for at in self._node.bad):
                raise refuse(errno.EIO, "read", self._path)
            return bytes(memoryview(self._node.data)[position : position + size])

    read_aside = read

    def sync(self) -> None:
        with self._mutex:
            self._check("sync")
            self._machine.sync("sync", self._path, self._node)

    def truncate(self, size: int) -> None:
        with self._mutex:
            self._check("truncate", size, writes=errno.EINVAL)
            if self._space.lacking(size - len(self._node.data)):
                raise refuse(errno.ENOSPC, "truncate", self._path)
            self._machine.change("truncate", self._path, lambda: self._put(size, None))

    def allocate(self, size: int) -> None:
        # A disk without a capacity has room whatever a file takes of it; the memory is spared.
        if self._space.capacity_bytes is not None:
            self.truncate(size)

    def reserve(self, start: int, end: int) -> bool:
        return False

    def size(self) -> int:
        with self._mutex:
            self._check("size")
            return len(self._node.data)

    def close(self) -> None:
        with self._mutex:
            if self._open:
                self._open = False
                self._machine.handles -= 1
                self._space.closed(self._node)

    def _check(self, kind: Kind, position: int = 0, *, writes: int = 0) -> None:
        """Refuse what Linux refuses; `writes` is its answer for a file opened to be read only."""
        self._machine.alive()
        if not self._open:
            raise refuse(errno.EBADF, kind, self._path)
        if writes and not self._writable:
            raise refuse(writes, kind, self._path)
        if position < 0:
            raise refuse(errno.EINVAL, kind, self._path)

    def _put(self, position: int, piece: bytes | None) -> None:
        before = len(self._node.data)
        self._node.change(self._machine.operations, position, piece)
        self._space.used_bytes += len(self._node.data) - before
