"""The files seam: the only way the store touches a disk.

`OsFiles` is the real one; `dmq.testing.MemoryFiles` is one that forgets, tears, fills up and fails on demand.

What always holds: paths are relative to the data directory and use `/`; a write or read either does all of what was
asked or raises a `StorageError`; nothing here retries an fsync.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from dmq.compiled import choose
from dmq.errors import (
    DirectoryInUse,
    DiskFull,
    NoPermission,
    StorageError,
    TooManyFiles,
)

__all__ = [
    "Buffer",
    "DiskUsage",
    "File",
    "Files",
    "OsFiles",
    "is_refusal",
    "read_readable",
    "storage_error",
    "write_whole",
]

Buffer = bytes | bytearray | memoryview

# Linux takes at most this many buffers in one pwritev.
_IOV_MAX = 1024
_RANDOM_BYTES = 1 << 20
_PAGE = 4096
# What reading answers where the disk does not have the bytes any more, or a file system's own checksum says so.
_REFUSALS: Final = frozenset((errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO))
_GET_GENERATION = 0x80087601  # FS_IOC_GETVERSION: another file that gets the same number has another one


class DiskUsage(NamedTuple):
    """Bytes of the file system the data directory lies on, as `df` counts them.

    Blocks that are reserved for root are neither used nor available.
    """

    used: int
    available: int

    @property
    def total(self) -> int:
        return self.used + self.available

    @property
    def share(self) -> float:
        """The share that is in use, from 0 to 1."""
        return self.used / self.total if self.total else 1.0

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> DiskUsage:
        """Of the file system that a path lies on.

        Raises:
            OSError: it cannot be asked.
        """
        s = os.statvfs(path)
        return cls((s.f_blocks - s.f_bfree) * s.f_frsize, s.f_bavail * s.f_frsize)


class File(Protocol):
    """One open file, read and written by position only."""

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Write all buffers one after another from `position` on; on an error any part of it may be in the file."""
        ...

    def read(self, position: int, size: int) -> bytes:
        """At most `size` bytes from `position`; fewer only where the file ends."""
        ...

    def read_aside(self, position: int, size: int) -> bytes:
        """As `read`, for what nobody else is about to need: the page cache is left as it was, if it can be."""
        ...

    def sync(self) -> None:
        """Return once the data, and the size, would survive a power loss."""
        ...

    def truncate(self, size: int) -> None: ...

    def allocate(self, size: int) -> None:
        """Give an empty file `size` bytes that truly take space on the disk."""
        ...

    def reserve(self, start: int, end: int) -> bool:
        """Take space on the disk for what will be written between two places; whether it was taken.

        The size stays as it is. What is not written by then is given back when the file is closed or truncated.
        """
        ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Files(Protocol):
    """A data directory."""

    def open(self, path: str, *, create: bool = False, write: bool = False) -> File:
        """Open a file. `create` makes it (empty) where it is missing; without it a missing file raises
        FileNotFoundError."""
        ...

    def exists(self, path: str) -> bool: ...

    def listdir(self, path: str) -> list[str]:
        """Sorted names in a folder; an empty list where there is no such folder."""
        ...

    def is_dir(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def mkdir(self, path: str) -> None:
        """Make a folder and its parents; fine if it exists."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None:
        """Remove a file; fine if it is gone."""
        ...

    def rmdir(self, path: str) -> None:
        """Remove an empty folder; fine if it is gone."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the entries of a folder durable: what was created, renamed or removed in it."""
        ...

    def disk_usage(self) -> DiskUsage: ...

    def lock(self) -> None:
        """Take the directory for this process.

        Raises:
            DirectoryInUse: another process has it.
        """
        ...

    def unlock(self) -> None: ...

    def place(self, path: str) -> str:
        """What tells a folder from every copy of it, as long as it is not moved to another file system; "" if nothing
        does."""
        ...

    def describe(self, path: str) -> str:
        """The path as a person knows it, for messages."""
        ...


def storage_error(error: OSError, what: str, path: str) -> StorageError:
    """The error that tells what the operating system refused, and what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"no space left to {what} {path}: free some space on that disk or shorten the retention", path=path
        )
    if error.errno == errno.EROFS:
        return NoPermission(
            f"not allowed to {what} {path}: its file system is read-only; mount it for writing, and check the disk if "
            "nobody made it read-only on purpose",
            path=path,
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return NoPermission(f"not allowed to {what} {path}: give this user read and write permission there", path=path)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TooManyFiles(
            f"out of file descriptors while trying to {what} {path}: raise the limit (ulimit -n)", path=path
        )
    return StorageError(f"could not {what} {path}: {error.strerror}", path=path, errno=error.errno)


def is_refusal(error: BaseException) -> bool:
    """Whether it was the disk that could not give the bytes, so that no other file and no other place is concerned."""
    return isinstance(error, StorageError) and error.detail.get("errno") in _REFUSALS


def read_readable(
    read: Callable[[int, int], bytes], position: int, size: int, refused: list[StorageError] | None = None
) -> bytes:
    """Bytes of a file, with zeros for the blocks that the disk cannot read.

    Parameters:
        refused: gets what the disk said, once for each of these blocks.

    Raises:
        StorageError: it is not the disk that fails.
    """
    try:
        return read(position, size)
    except StorageError as error:
        if not is_refusal(error):
            raise
    parts: list[bytes] = []
    at = position
    while at < position + size:
        want = min(_PAGE - at % _PAGE, position + size - at)
        try:
            part = read(at, want)
        except StorageError as error:
            if not is_refusal(error):
                raise
            part = bytes(want)
            if refused is not None:
                refused.append(error)
        parts.append(part)
        if len(part) < want:
            break
        at += want
    return b"".join(parts)


def write_whole(files: Files, path: str, raw: Buffer) -> None:
    """Write a file that is on the disk whole, or not there; its name is durable once its folder is synced.

    Raises:
        StorageError: it could not be written; what was there before is gone.
    """
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (raw,))
        file.sync()
    except StorageError:
        with contextlib.suppress(StorageError):
            files.unlink(path)  # a part of it would look like all of it
        raise
    finally:
        file.close()


@contextlib.contextmanager
def _mapped(what: str, path: str) -> Iterator[None]:
    """Turn the operating system's refusals into our errors; a missing file stays a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, what, path) from error


def reserve_plain(descriptor: int, at: int, size: int) -> bool:
    """Take space on the disk for a range of a file without changing its size: Python's library cannot."""
    return False


_reserve: Final = choose(reserve_plain, "reserve")


class OsFile:
    """A file by its descriptor."""

    __slots__ = ("_fd", "_has_reserve", "_path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._has_reserve = False

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        try:  # written out, since a context manager would cost as much as the call
            if len(buffers) == 1:
                data = buffers[0]
                done = os.pwrite(self._fd, data, position)
                # A view of numbers counts items, not bytes.
                if done == (data.nbytes if type(data) is memoryview else len(data)):
                    return
                buffers = [memoryview(data).cast("B")[done:]]
                position += done
            self._write_rest(position, [memoryview(b).cast("B") for b in buffers if len(b)])
        except OSError as error:
            raise storage_error(error, "write", self._path) from error

    def _write_rest(self, position: int, views: list[memoryview]) -> None:
        first = 0
        while first < len(views):
            done = os.pwritev(self._fd, views[first : first + _IOV_MAX], position)
            position += done
            while first < len(views) and done >= len(views[first]):
                done -= len(views[first])
                first += 1
            if done:
                views[first] = views[first][done:]

    def read(self, position: int, size: int) -> bytes:
        try:
            data = os.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size and (more := os.pread(self._fd, size - got, position + got)):
                parts.append(more)
                got += len(more)
        except OSError as error:
            raise storage_error(error, "read", self._path) from error
        return b"".join(parts)

    def read_aside(self, position: int, size: int) -> bytes:
        cached = self._cached(position, size)
        if cached is not None and len(cached) == size:
            return cached
        with contextlib.suppress(OSError):  # reading ahead would fill the cache with what we are to read next
            os.posix_fadvise(self._fd, position, size, os.POSIX_FADV_RANDOM)
        data = self.read(position, size)
        if cached is not None and len(data) > len(cached):
            first = position & -_PAGE
            whole = -(-(position + size - first) // _PAGE) * _PAGE
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, first, whole, os.POSIX_FADV_DONTNEED)
        return data

    def _cached(self, position: int, size: int) -> bytes | None:
        """What of it is in the page cache, up to the first byte that is not; None if nobody can tell."""
        buffer = bytearray(size)
        try:
            done = os.preadv(self._fd, (buffer,), position, os.RWF_NOWAIT)
        except BlockingIOError:
            return b""
        except OSError:  # not all file systems can
            return None
        return bytes(memoryview(buffer)[:done])

    def sync(self) -> None:
        with _mapped("flush", self._path):
            if self._fd < 0:
                # Unlike the other calls, fdatasync answers a closed file with a ValueError.
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            os.fdatasync(self._fd)

    def truncate(self, size: int) -> None:
        with _mapped("truncate", self._path):
            os.ftruncate(self._fd, size)

    def allocate(self, size: int) -> None:
        with _mapped("allocate", self._path):
            try:
                os.posix_fallocate(self._fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
        # Some file systems accept the call and allocate nothing, and some keep no blocks for zeros.
        with _mapped("look at", self._path):
            taken = os.fstat(self._fd).st_blocks * 512
        if taken < size:
            for at in range(0, size, _RANDOM_BYTES):
                self.write(at, (os.urandom(min(_RANDOM_BYTES, size - at)),))
            self.sync()

    def reserve(self, start: int, end: int) -> bool:
        if not _reserve(self._fd, start, end - start):
            return False
        self._has_reserve = True
        return True

    def size(self) -> int:
        with _mapped("look at", self._path):
            return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            if self._has_reserve:
                with contextlib.suppress(OSError):  # it is only space
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size)
            fd, self._fd = self._fd, -1
            with _mapped("close", self._path):
                os.close(fd)


class OsFiles:
    """A folder of the real file system."""

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        try:
            self._root = os.path.abspath(os.fspath(root))
        except TypeError:
            raise StorageError(f"a directory is named by a path, not by {root!r}") from None
        self._lock_fd = -1
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise StorageError(f"{self._root} is not a directory: name one for the data", path=self._root)
        if not create:
            if not os.path.isdir(self._root):
                raise StorageError(f"there is no directory {self._root}: name a data directory", path=self._root)
            return
        try:
            os.makedirs(self._root, exist_ok=True)
        except OSError as error:  # also where it cannot be: in /proc there is no place for a directory
            raise storage_error(error, "create", self._root) from error

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def open(self, path: str, *, create: bool = False, write: bool = False) -> File:
        full = self._path(path)
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with _mapped("open", full):
            return OsFile(os.open(full, flags, 0o644), full)

    def exists(self, path: str) -> bool:
        return os.path.exists(self._path(path))

    def listdir(self, path: str) -> list[str]:
        try:
            with _mapped("list", self._path(path)):
                return sorted(os.listdir(self._path(path)))
        except FileNotFoundError:
            return []

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(self._path(path))

    def size(self, path: str) -> int:
        with _mapped("look at", self._path(path)):
            return os.stat(self._path(path)).st_size

    def mkdir(self, path: str) -> None:
        with _mapped("create", self._path(path)):
            os.makedirs(self._path(path), exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        with _mapped("rename", self._path(source)):
            os.replace(self._path(source), self._path(target))

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _mapped("remove", self._path(path)):
            os.unlink(self._path(path))

    def rmdir(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _mapped("remove", self._path(path)):
            os.rmdir(self._path(path))

    def sync_dir(self, path: str) -> None:
        full = self._path(path)
        with _mapped("flush", full):
            fd = os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def disk_usage(self) -> DiskUsage:
        with _mapped("look at", self._root):
            return DiskUsage.at(self._root)

    def lock(self) -> None:
        path = self._path("LOCK")
        with _mapped("open", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise DirectoryInUse(
                f"{self._root} is in use by another process (pid {holder}): stop that one, or choose another directory",
                path=self._root,
                pid=holder,
            ) from error
        except OSError as error:
            os.close(fd)
            raise storage_error(error, "lock", path) from error
        self._lock_fd = fd
        # Only to name the holder in the message above, so a full disk must not keep the store from opening.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def place(self, path: str) -> str:
        try:
            fd = os.open(self._path(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            number = os.fstat(fd).st_ino
            generation = 0
            with contextlib.suppress(OSError):  # not all file systems have one
                generation = int.from_bytes(fcntl.ioctl(fd, _GET_GENERATION, bytes(8))[:4], sys.byteorder)
            return f"{number:x}-{generation:x}"
        finally:
            os.close(fd)

    def describe(self, path: str) -> str:
        return self._path(path)
