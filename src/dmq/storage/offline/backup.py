"""Backups of a data directory, taken beside a running broker, and their return.

The journal is the truth and only grows: a prefix of it that ends with a whole unit is a consistent cut, with positions,
delays and transactions as they were there, and whatever else a directory holds is built from it. So a backup is that
prefix, the store's identity, and a copy of the dead letters' SQLite database:

    <target>/20300131T120000Z/          one backup
        MANIFEST.json                   what belongs to it, with sizes and CRC-32C; written last
        STORE
        journal/00000000000000000000.journal
        deadletters/letters.db
        settings/dmq.toml

What always holds: everything that was acknowledged before the backup began is in it; a folder without a leading dot is
a complete backup, since it gets that name when all of it is flushed; the segments are opened before the first is
copied, so that retention takes none away meanwhile; a segment that the backup before has already is linked to that one;
nothing in the data directory is locked or changed. A directory is restored under another name, verified, and then
renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from crc32c import crc32c

from dmq.errors import Damaged, DirectoryInUse, StorageError, WrongFormat
from dmq.storage.file_pool import FilePool
from dmq.storage.files import OsFiles, storage_error
from dmq.storage.journal.journal import FOLDER, Journal
from dmq.storage.journal.scanner import Scanner
from dmq.storage.offline.inspection import open_journal
from dmq.storage.offline.verification import verify as verify_directory
from dmq.storage.upkeep.identity import IDENTITY, Identity, read_identity, write_identity
from dmq.version import __version__

__all__ = ["Backup", "BackupSource", "backups", "prune", "restore", "take"]

MANIFEST: Final = "MANIFEST.json"
_FORMAT: Final = 1
_CHUNK: Final = 4 << 20
_TRIES: Final = 5
_LETTERS: Final = "deadletters"


class BackupSource(NamedTuple):
    """What is backed up: a data directory, and the settings that belong to it."""

    directory: Path
    settings: Path | None = None


class Backup:
    """One complete backup.

    Raises:
        WrongFormat: the folder is none, or one of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
            if self.facts["format"] != _FORMAT:
                raise WrongFormat(
                    f"{folder} has format {self.facts['format']}, this DMQ reads {_FORMAT}: use a newer one"
                )
            self.files: dict[str, dict[str, int]] = self.facts["files"]
            self.bytes = sum(entry["bytes"] for entry in self.files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise WrongFormat(f"{folder} is not a complete backup: name a folder that dmq backup made") from None

    def check(self) -> None:
        """Read everything and compare.

        Raises:
            Damaged: a file is missing, or not what was written.
        """
        for name, entry in self.files.items():
            path = self.folder / name
            try:
                found = path.stat().st_size, _checksum(path)
            except OSError as error:
                raise Damaged(f"{path} cannot be read: {error.strerror}; use another backup") from None
            if found != (entry["bytes"], entry["crc32c"]):
                raise Damaged(f"{path} is not what was backed up: its checksum differs; use another backup")


def backups(target: Path) -> list[Backup]:
    """The complete backups in a folder, the oldest first."""
    found = []
    for folder in sorted(target.iterdir()) if target.is_dir() else ():
        if folder.is_dir() and not folder.name.startswith("."):
            with contextlib.suppress(WrongFormat):
                found.append(Backup(folder))
    return found


def take(source: BackupSource, target: Path, progress: Callable[[int, int], None] | None = None) -> Backup:
    """Back up a directory, which may be in use.

    Parameters:
        progress: called with the journal bytes done and in all.

    Raises:
        RecordCorrupt, ForeignFile, WrongFormat: it is not a data directory.
        Damaged: part of the journal cannot be read; such a backup is not made.
        DirectoryInUse: another backup into the target is under way.
        StorageError, DiskFull: the target cannot be written.
    """
    with _mapped("back up into", target), _locked(target):
        before = backups(target)
        name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        while (target / name).exists():
            name += "+"
        partial = target / f".{name}.partial"
        _forget_partial(target)
        partial.mkdir()
        try:
            with _Cut(source.directory) as cut:
                files = _copy_all(cut, source, partial, before[-1] if before else None, progress=progress)
                facts = {
                    "format": _FORMAT,
                    "dmq": __version__,
                    "taken_at_ms": time.time_ns() // 1_000_000,
                    "journal_id": f"{cut.journal_id:016x}",
                    "journal_start": cut.start,
                    "journal_end": cut.end,
                    "files": files,
                }
            _write(partial / MANIFEST, json.dumps(facts, indent=2).encode())
            for folder in (*(path for path in partial.iterdir() if path.is_dir()), partial):
                _sync(folder)
            partial.rename(target / name)
            _sync(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return Backup(target / name)


def prune(target: Path, keep: int) -> list[str]:
    """Delete all but the newest backups; returns the names of those that went."""
    with _mapped("delete backups in", target), _locked(target):
        gone = backups(target)[: -keep or None]
        for backup in gone:
            # First it no longer looks complete.
            hidden = backup.folder.with_name(f".{backup.folder.name}.partial")
            backup.folder.rename(hidden)
            shutil.rmtree(hidden)
    return [backup.folder.name for backup in gone]


def restore(backup: Backup, directory: Path) -> None:
    """Make a data directory of a backup.

    Raises:
        DirectoryInUse: there is something in the directory already.
        Damaged: the backup is not what was written.
        StorageError, DiskFull: the directory cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DirectoryInUse(f"{directory} is not empty: name a new directory, or move that one away")
    backup.check()
    partial = directory.with_name(f".{directory.name}.restore")
    with _mapped("restore", directory):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            for name, entry in backup.files.items():
                if name.startswith("settings/"):
                    continue
                path = partial / name
                path.parent.mkdir(exist_ok=True)
                with (backup.folder / name).open("rb") as stream:
                    _copy(stream.fileno(), path, entry["bytes"])
            (partial / "RUNNING").touch()  # opened as after a crash: the whole journal is looked at
            _draw_replica(OsFiles(partial, create=False))
            _sync(partial / FOLDER)
            _sync(partial)
            report = verify_directory(OsFiles(partial, create=False))
            if any(finding.kind == "damage" for finding in report.findings):
                raise Damaged(f"what was restored from {backup.folder} does not verify: use another backup")
            partial.rename(directory)
            _sync(directory.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _draw_replica(files: OsFiles) -> None:
    """The directory of a shard's member comes back as another replica: it lacks what that one confirmed since."""
    try:
        identity = read_identity(files)
    except ValueError:
        return  # the verification tells
    if identity is not None and identity.member is not None:
        member = msgspec.structs.replace(identity.member, replica_id=secrets.randbits(64) or 1, life=0)
        write_identity(files, Identity(identity.version, identity.journal_id, member))


class _Cut:
    """The segments of a directory, held open, and where the last whole unit of them ends."""

    def __init__(self, directory: Path) -> None:
        _raise_file_limit()
        self._held: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        files = OsFiles(directory, create=False)
        for left in reversed(range(_TRIES)):
            pool = FilePool(files, 64)
            try:
                journal = open_journal(files, pool)
                for segment in journal.segments:
                    self._held[segment.path] = os.open(directory / segment.path, os.O_RDONLY)
                self.start, self.journal_id = journal.start, journal.id
                self.end = _whole_units(journal)
                self.sizes = {segment.path: segment.size for segment in journal.segments}
                self.sizes[journal.tail.path] = self.end - journal.tail.start
                if not self.sizes[journal.tail.path]:
                    del self.sizes[journal.tail.path]  # just begun: nothing of it is whole yet
                return
            except FileNotFoundError:
                # Retention took a segment between the list and the open: what is there now is a cut as well.
                self.close()
                if not left:
                    raise
            except BaseException:
                self.close()
                raise
            finally:
                pool.close()

    def fd(self, path: str) -> int:
        return self._held[path]

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    def __enter__(self) -> _Cut:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_units(journal: Journal) -> int:
    """Where the last whole unit of the last segment ends.

    Raises:
        Damaged: there are units behind one that cannot be read.
    """
    end, stuck_at = journal.tail.start, -1
    while True:
        scanner = Scanner(journal)
        while end < journal.tail.end and (unit := scanner.unit_at(end)) is not None:
            end += unit.header.length
        if end >= journal.tail.end or not scanner.was_durable(end):
            return end
        # A unit that was being written a moment ago is whole now; one that is not is damaged.
        if end == stuck_at:
            raise _damage(end, journal.tail.path)
        stuck_at = end


def _damage(offset: int, path: str) -> Damaged:
    return Damaged(
        f"the journal is damaged at {offset}, in {path}: dmq journal verify tells more; a backup of it is not made",
        offset=offset,
    )


def _copy_all(
    cut: _Cut, source: BackupSource, partial: Path, before: Backup | None, progress: Callable[[int, int], None] | None
) -> dict[str, dict[str, int]]:
    """Copy what belongs to a backup; returns its files."""
    files: dict[str, dict[str, int]] = {}
    (partial / FOLDER).mkdir()
    # The dead letters first, as near to the cut as can be. They may know more than the journal, which then says it
    # again; were they older, letters that the journal has handed over would be nowhere.
    for database in sorted((source.directory / _LETTERS).glob("*.db")):
        (partial / _LETTERS).mkdir(exist_ok=True)
        _copy_database(database, partial / _LETTERS / database.name)
        files[f"{_LETTERS}/{database.name}"] = _entry(partial / _LETTERS / database.name)
    shutil.copyfile(source.directory / IDENTITY, partial / IDENTITY)
    _sync(partial / IDENTITY)
    files[IDENTITY] = _entry(partial / IDENTITY)
    if source.settings is not None:
        (partial / "settings").mkdir()
        shutil.copyfile(source.settings, partial / "settings" / source.settings.name)
        files[f"settings/{source.settings.name}"] = _entry(partial / "settings" / source.settings.name)
    known = {} if before is None or before.facts["journal_id"] != f"{cut.journal_id:016x}" else before.files
    done, total = 0, sum(cut.sizes.values())
    for path, size in cut.sizes.items():
        entry = known.get(path)
        if entry is None or entry["bytes"] != size or before is None or not _link(before.folder / path, partial / path):
            _copy(cut.fd(path), partial / path, size)
            entry = _entry(partial / path)
        files[path] = entry
        done += size
        if progress is not None:
            progress(done, total)
    _verify(partial, {path for path in cut.sizes if known.get(path) != files[path]})
    return files


def _verify(partial: Path, new: set[str]) -> None:
    """Check every unit of the segments that were not in the backup before."""
    pool = FilePool(OsFiles(partial, create=False), 64)
    try:
        journal = open_journal(OsFiles(partial, create=False), pool)
        scanner = Scanner(journal)
        for segment in journal.segments:
            at = segment.start
            while segment.path in new and at < segment.end:
                unit = scanner.unit_at(at)
                if unit is None:
                    raise _damage(at, segment.path)
                at += unit.header.length
    finally:
        pool.close()


def _copy(source: int, path: Path, size: int) -> None:
    """Copy the first bytes of a file, flushed; file systems that can share them do."""
    with path.open("xb") as stream:
        at = 0
        while at < size:
            try:
                copied = os.copy_file_range(source, stream.fileno(), min(size - at, 1 << 30), at, at)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                copied = 0
            if not copied:
                chunk = os.pread(source, min(_CHUNK, size - at), at)
                if not chunk:
                    raise Damaged(f"{path.name} is shorter than it was: {at} bytes instead of {size}")
                copied = os.pwrite(stream.fileno(), chunk, at)
            at += copied
        os.fsync(stream.fileno())


def _copy_database(source: Path, path: Path) -> None:
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True, timeout=30)) as reader,
            contextlib.closing(sqlite3.connect(path)) as writer,
        ):
            reader.backup(writer)
    except sqlite3.Error as error:
        raise StorageError(f"{source} cannot be backed up: {error}") from None
    _sync(path)


def _link(source: Path, path: Path) -> bool:
    """Whether a file of the backup before could be linked."""
    try:
        os.link(source, path)
    except OSError:
        return False
    return True


def _entry(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32c": _checksum(path)}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = crc32c(chunk, value)
    return value


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One backup at a time; the lock goes with the process."""
    target.mkdir(parents=True, exist_ok=True)
    fd = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(f"another backup into {target} is under way: wait for it") from None
        yield
    finally:
        os.close(fd)


def _forget_partial(target: Path) -> None:
    """Remove what a backup left that was killed."""
    for left in target.glob(".*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _mapped(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, what, os.fspath(error.filename or path)) from error
