"""The data directory when it is opened: whose it is, what is in it, and what a crash did to it.

What always holds: a directory is taken only by one process; a directory of another format, or with strange files in its
journal, is left untouched; an empty one becomes a new store.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from dmq.errors import DiskFull, ForeignFile, RecordCorrupt, WrongFormat
from dmq.event_log import EventLog
from dmq.settings import StoreSettings
from dmq.storage.ballast import BALLAST
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.journal.journal import FOLDER as JOURNAL_FOLDER
from dmq.storage.journal.journal import Journal, Segment, list_segments
from dmq.storage.journal.scanner import Scanner
from dmq.storage.journal.unit import HEADER_BYTES, SNAPSHOT, UNIT_VERSION, Header, is_intact, read_header
from dmq.storage.state.checkpoint import Checkpoint, read_checkpoint, read_positions
from dmq.storage.state.derived import Derived
from dmq.storage.upkeep.checkpointer import FOLDERS, Checkpointer
from dmq.storage.upkeep.recovery import SALVAGE, Recovered, recover_journal, replay, start_derived, usable

__all__ = ["FORMAT", "IDENTITY", "Opened", "open_directory", "parse_identity"]

log = EventLog(__name__)

FORMAT: Final = 1
IDENTITY: Final = "STORE"
_RUNNING: Final = "RUNNING"
_KNOWN: Final = frozenset(
    (
        "LOCK",
        _RUNNING,
        IDENTITY,
        "STORE.tmp",
        "checkpoint",
        "checkpoint.tmp",
        "lost+found",
        SALVAGE,
        JOURNAL_FOLDER,
        BALLAST,
        "deadletters",  # SQLite's, of dead letters; not the store's
    )
).union(FOLDERS)


class Disk(NamedTuple):
    """A data directory, as everything that is derived from its journal needs it."""

    files: Files
    pool: FilePool
    settings: StoreSettings


class Opened:
    """What opening found."""

    def __init__(
        self,
        journal: Journal,
        derived: Derived,
        checkpointer: Checkpointer,
        recovered: Recovered,
        next_offset: int,
        unclean: bool,
    ) -> None:
        self.journal = journal
        self.derived = derived
        self.checkpointer = checkpointer
        self.recovered = recovered
        self.next_offset = next_offset  # where the journal goes on; beyond its end where the end is missing
        # What follows needs a snapshot before it: without one, opening without a checkpoint could not place it.
        self.needs_segment = not journal.segments or next_offset > journal.end or derived.incomplete
        self.unclean = unclean


def open_directory(disk: Disk) -> Opened:
    """Recover what a locked directory holds.

    Raises:
        WrongFormat, ForeignFile: it is not ours to open.
        StorageError: the disk does not do what it should.
    """
    files, pool, _ = disk
    journal_id = _identify(files)
    unclean = files.exists(_RUNNING)
    for folder in (JOURNAL_FOLDER, *FOLDERS):
        files.mkdir(folder)
    journal = Journal(files, pool, journal_id, list_segments(files))
    _check_segments(files, journal)
    scanner = Scanner(journal)
    recovered = Recovered()
    checkpoint = _checkpoint(files, pool)
    if not usable(checkpoint, journal):
        if checkpoint is not None:
            log.error("checkpoint does not fit the journal", offset=checkpoint.offset)
        checkpoint = None
    known = 0 if checkpoint is None else checkpoint.offset
    checkpointer = Checkpointer(files, pool, journal.id, checkpoint)
    derived: Derived | None = None
    if checkpoint is not None:
        derived = _restored(disk, scanner, checkpoint)
    if derived is not None:
        try:
            torn = replay(derived, scanner, recovered, end=None, known_durable=known, checkpoint=lambda: None)
        except DerivedDamaged as error:
            log.error("derived files damaged", error=error)
            derived = None
    if derived is None:
        recovered = Recovered()
        recovered.rebuilt = journal.end > journal.start
        derived, torn = rebuild(disk, scanner, checkpointer, recovered, end=None, known_durable=known)
    if checkpoint is not None:
        recovered.epoch = max(recovered.epoch, checkpoint.epoch)
        recovered.stored_at_ms = max(recovered.stored_at_ms, checkpoint.stored_at_ms)
    _drop_empty_tail(files, journal)
    recover_journal(journal, torn, recovered, known)
    next_offset = max(derived.applied, known, journal.end)
    if next_offset > journal.end:
        begin = journal.end if checkpoint is None else max(journal.end, checkpoint.journal_start)
        derived.pass_damage(begin, next_offset)
    derived.applied = next_offset
    return Opened(
        journal, derived, checkpointer, recovered, next_offset=next_offset, unclean=unclean or torn is not None
    )


def rebuild(
    disk: Disk,
    scanner: Scanner,
    checkpointer: Checkpointer,
    recovered: Recovered,
    *,
    end: int | None,
    known_durable: int,
) -> tuple[Derived, int | None]:
    """Build everything derived anew from the journal; see `replay`.

    Returns what was built, and the offset of a torn tail.
    """
    journal = scanner.journal
    if journal.end > journal.start:
        log.warning("rebuilding derived files", start=journal.start, end=journal.end)
    checkpointer.forget_all()
    derived = Derived(*disk, journal.start)
    start_derived(derived, scanner)

    def save() -> None:
        # Keeps memory bounded, and a crash from starting over.
        if derived.queues.buffered >= disk.settings.checkpoint_records:
            with contextlib.suppress(DiskFull):
                plan = checkpointer.begin(derived, journal.start, recovered.epoch, recovered.stored_at_ms)
                try:
                    plan.write()
                except BaseException:
                    plan.abandon()
                    raise
                checkpointer.finish(plan, derived)

    torn = replay(derived, scanner, recovered, end=end, known_durable=known_durable, checkpoint=save)
    return derived, torn


def _identify(files: Files) -> int:
    """The journal id of the directory, given to it now if it is new."""
    strangers = [name for name in files.listdir("") if name not in _KNOWN]
    if not files.exists(IDENTITY):
        if strangers:
            raise WrongFormat(
                f"{files.describe('')} holds {strangers[0]!r} and is not a DMQ data directory: choose an empty one",
                path=files.describe(""),
            )
        return _write_identity(files, _id_of_journal(files) or secrets.randbits(64) or 1)
    file = files.open(IDENTITY)
    try:
        raw = file.read(0, 4096)
    finally:
        file.close()
    try:
        version, journal_id = parse_identity(raw)
    except ValueError as error:
        found = _id_of_journal(files)
        if found is None:
            raise WrongFormat(
                f"{files.describe(IDENTITY)} cannot be read and there is no journal to tell what it said: "
                "restore the directory from a backup",
                path=files.describe(IDENTITY),
            ) from error
        log.error("identity file damaged; taken from the journal", journal_id=found)
        return _write_identity(files, found)
    if version != FORMAT:
        raise WrongFormat(
            f"{files.describe('')} has format version {version}, this DMQ reads {FORMAT}: use the DMQ that wrote it",
            version=version,
        )
    return journal_id


def parse_identity(raw: bytes) -> tuple[int, int]:
    """(format version, journal id) from the file that says whose the directory is.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        identity: Any = json.loads(raw)
        version, journal_id = int(identity["format"]), int(identity["journal_id"], 16)
        check = identity.get("check", _check_of(version, journal_id))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    # A flipped bit must neither make it another store nor another version's.
    if check != _check_of(version, journal_id):
        raise ValueError("it fails its checksum")
    return version, journal_id


def _check_of(version: int, journal_id: int) -> str:
    return f"{crc32c(f'{version} {journal_id:016x}'.encode()):08x}"


def _write_identity(files: Files, journal_id: int) -> int:
    identity = {"format": FORMAT, "journal_id": f"{journal_id:016x}", "check": _check_of(FORMAT, journal_id)}
    file = files.open("STORE.tmp", create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (json.dumps(identity).encode() + b"\n",))
        file.sync()
    finally:
        file.close()
    files.rename("STORE.tmp", IDENTITY)
    files.sync_dir("")
    return journal_id


def _id_of_journal(files: Files) -> int | None:
    """The journal id the first intact unit at the head of a segment tells; None if there is no journal.

    Raises:
        WrongFormat: there is one, but nothing in it tells.
    """
    segments = list_segments(files)
    for segment in segments:
        header = _head(files, segment, whole=True)
        if header is not None:
            return header.journal_id
    if any(segment.size for segment in segments):
        # A new id would make all of it look like a torn tail.
        raise WrongFormat(
            f"{files.describe(JOURNAL_FOLDER)} holds segments, but {IDENTITY} is lost and none of them can be read "
            "to tell what it said: restore the directory from a replica or a backup",
            path=files.describe(JOURNAL_FOLDER),
        )
    return None


def _head(files: Files, segment: Segment, *, whole: bool) -> Header | None:
    """The header a segment begins with; with `whole`, only if its unit is intact.

    Raises:
        WrongFormat: the unit is intact, and of another version.
    """
    file = files.open(segment.path)
    try:
        header = read_header(file.read(0, HEADER_BYTES))
        if header is None or not whole:
            return header
        raw = file.read(0, min(header.length, segment.size))
        return header if is_intact(header, raw) else None
    finally:
        file.close()


def _check_segments(files: Files, journal: Journal) -> None:
    for segment in journal.segments:
        header = _head(files, segment, whole=False)
        if header is not None and not _is_ours(header, journal, segment):
            # A flipped bit may look the same; a stranger's unit is intact.
            header = _head(files, segment, whole=True)
        if header is None:
            continue  # damaged or torn: recovery's affair
        if not _is_ours(header, journal, segment):
            raise ForeignFile(
                f"{files.describe(segment.path)} belongs to another journal: move it elsewhere and start again",
                path=segment.path,
            )
        segment.stored_at_ms = header.stored_at_ms


def _is_ours(header: Header, journal: Journal, segment: Segment) -> bool:
    return header.journal_id == journal.id and header.start == segment.start and header.version == UNIT_VERSION


def _checkpoint(files: Files, pool: FilePool) -> Checkpoint | None:
    try:
        return read_checkpoint(files, pool)
    except DerivedDamaged as error:
        log.error("checkpoint damaged", error=error)
        return None


def _restored(disk: Disk, scanner: Scanner, checkpoint: Checkpoint) -> Derived | None:
    derived, journal = Derived(*disk, 0), scanner.journal
    try:
        derived.restore(checkpoint, read_positions(disk.pool, checkpoint.positions))
        if journal.start != checkpoint.journal_start and journal.segments:
            # Segments went after the checkpoint: queues begin where the new first one says.
            unit = scanner.unit_at(journal.start)
            if unit is None or not unit.header.flags & SNAPSHOT:
                raise DerivedDamaged("the first segment's snapshot cannot be read")
            derived.begin_at(journal.start, derived.firsts_of(derived.snapshot_in(unit)))
    except (DerivedDamaged, RecordCorrupt) as error:
        log.error("derived files damaged", error=error)
        return None
    return derived


def _drop_empty_tail(files: Files, journal: Journal) -> None:
    """A crash while a segment was begun leaves an empty file."""
    while journal.segments and not journal.tail.size:
        files.unlink(journal.tail.path)
        journal.forget(journal.tail)


def mark_running(files: Files) -> None:
    """Leave the mark by which the next start knows that this one did not end well."""
    with contextlib.suppress(DiskFull):  # it only helps; a full disk must not keep the store from opening
        files.open(_RUNNING, create=True, write=True).close()
    files.sync_dir("")  # for the folders made at first start, too


def unmark_running(files: Files) -> None:
    """This one ended well."""
    files.unlink(_RUNNING)
    files.sync_dir("")
