"""The data directory when it is opened: whose it is, what is in it, and what a crash did to it.

What always holds: a directory is taken only by one process; a directory of another format, or with strange files in its
journal, is left untouched; an empty one becomes a new store.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Final, NamedTuple

import msgspec

from dmq.errors import DiskFull, ForeignFile, InvalidSettings, RecordCorrupt, WrongFormat
from dmq.event_log import EventLog
from dmq.settings import StoreSettings
from dmq.storage.disk_space import BALLAST
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files, read_readable
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.journal.journal import FOLDER as JOURNAL_FOLDER
from dmq.storage.journal.journal import Journal, Segment, list_segments
from dmq.storage.journal.scanner import Scanner
from dmq.storage.journal.unit import HEADER_BYTES, SNAPSHOT, UNIT_VERSION, Header, is_intact, read_header
from dmq.storage.state.derived import Checkpoint, Derived, read_checkpoint, read_positions
from dmq.storage.upkeep.checkpointer import FOLDERS, Checkpointer
from dmq.storage.upkeep.identity import (
    FORMAT,
    IDENTITY,
    RECORD,
    TEMPORARY,
    Identity,
    read_identity,
    was_alone,
    write_identity,
)
from dmq.storage.upkeep.recovery import (
    SALVAGE,
    JournalTail,
    Recovered,
    check_tail,
    cut_journal,
    own_durable,
    recover_journal,
    replay,
    scan_tail,
    start_derived,
    usable,
)
from dmq.storage.upkeep.scrub import SCRUB

__all__ = ["Disk", "Opened", "mark_running", "open_directory", "open_replica", "rebuild", "unmark_running"]

log = EventLog(__name__)

_RUNNING: Final = "RUNNING"
_KNOWN: Final = frozenset(
    (
        "LOCK",
        _RUNNING,
        IDENTITY,
        TEMPORARY,
        RECORD,
        f"{RECORD}.tmp",
        "checkpoint",
        "checkpoint.tmp",
        "lost+found",
        SALVAGE,
        JOURNAL_FOLDER,
        BALLAST,
        SCRUB,
        f"{SCRUB}.tmp",
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


class _Found(NamedTuple):
    """A directory before anything is applied or mended."""

    identity: Identity
    scanner: Scanner
    checkpointer: Checkpointer
    unclean: bool

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.checkpointer.in_force


def open_directory(disk: Disk) -> Opened:
    """Recover what a locked directory holds.

    Raises:
        WrongFormat, ForeignFile: it is not ours to open.
        InvalidSettings: it is a member of a shard.
        StorageError: the disk does not do what it should.
    """
    files = disk.files
    found = _look(disk, _identify(files))
    if (member := found.identity.member) is not None:
        raise InvalidSettings(
            f"{files.describe('')} is a member of shard {member.shard!r} of cluster {member.cluster!r}, and a broker "
            f"by itself cannot open it: start it with --registry and --shard {member.shard}; 'dmq journal' reads it "
            "as it is, and 'dmq shard leave' makes it one of a broker by itself",
            path=files.describe(""),
        )
    journal, checkpoint, checkpointer = found.scanner.journal, found.checkpoint, found.checkpointer
    recovered = Recovered()
    known = 0 if checkpoint is None else checkpoint.offset
    derived = None if checkpoint is None else _restored(disk, found.scanner, checkpoint)
    if derived is not None:
        try:
            torn = replay(derived, found.scanner, recovered, end=None, known_durable=known, checkpoint=lambda: None)
        except DerivedDamaged as error:
            log.error("derived files damaged", error=error)
            derived = None
    if derived is None:
        recovered = Recovered()
        recovered.rebuilt = journal.end > journal.start
        derived, torn = rebuild(disk, found.scanner, checkpointer, recovered, end=None, known_durable=known)
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
        journal, derived, checkpointer, recovered, next_offset=next_offset, unclean=found.unclean or torn is not None
    )


def open_replica(disk: Disk) -> tuple[Identity, Opened, JournalTail]:
    """Recover what the directory of a shard's member holds: nothing beyond its checkpoint is applied.

    Only what its checkpoint covers is known to be committed and durable here. A unit beyond it that does not check out
    is a torn tail whatever later units say, since their `flushed_through` is the leader's: it is cut, and the member is
    doubtful, which is noted before the cut.

    Except for a member that was alone in the in-sync set: what later units of epochs that it led itself say of its disk
    is true, all that was durable there is committed, and nobody else has it. A bad unit below that is damage, as in
    the store of a lone broker.

    Raises:
        WrongFormat, ForeignFile: it is not ours to open.
        InvalidSettings: it is not a member's.
        StorageError: the disk does not do what it should.
    """
    files = disk.files
    identity = _identify(files)
    member = identity.member
    if member is None:
        raise InvalidSettings(f"{files.describe('')} is not a member of a shard: join it to one first")
    found = _look(disk, identity)
    journal, scanner, checkpoint = found.scanner.journal, found.scanner, found.checkpoint
    recovered = Recovered()
    if checkpoint is not None and checkpoint.offset > journal.end:
        log.error("the journal ends before its checkpoint", end=journal.end, checkpoint=checkpoint.offset)
        identity = _doubt(files, identity)
        found.checkpointer.forget_all()
        checkpoint = None
    known = 0 if checkpoint is None else checkpoint.offset
    derived = None if checkpoint is None else _restored(disk, scanner, checkpoint)
    if checkpoint is None and journal.segments and scanner.unit_at(journal.start) is None:
        # Nothing can be placed without the snapshot that it opens with, and nothing is known to be committed here.
        identity = _doubt(files, identity)
        cut_journal(journal, journal.start, recovered)
    if derived is None:
        recovered.rebuilt = journal.end > journal.start
        end = max(known, journal.start)
        derived, _ = rebuild(disk, scanner, found.checkpointer, recovered, end=end, known_durable=known)
    if checkpoint is not None:
        recovered.epoch, recovered.stored_at_ms = checkpoint.epoch, checkpoint.stored_at_ms
    tail = scan_tail(scanner, derived.applied, recovered)
    if tail.end < journal.end and was_alone(files, member):
        durable = own_durable(scanner, [*derived.state.epochs, *tail.epochs], tail.end, member.replica_id)
        if durable > tail.end:
            # All of it, since the next leader begins with a snapshot of what is applied, which heals what is passed.
            end = scan_tail(scanner, durable, recovered).end
            replay(derived, scanner, recovered, end=end, known_durable=durable, checkpoint=lambda: None)
            known, tail = durable, JournalTail(end)
    _drop_empty_tail(files, journal)
    torn = tail.end if tail.end < journal.end else None
    if torn is not None:
        if was_alone(files, member):
            check_tail(scanner, torn)  # nobody else has it
        identity = _doubt(files, identity)
    # Where the leader's disk was durable says nothing of ours: all beyond the checkpoint is written again.
    recovered.flushed_through = 0
    recover_journal(journal, torn, recovered, known)
    opened = Opened(
        journal,
        derived,
        found.checkpointer,
        recovered,
        next_offset=journal.end,
        unclean=found.unclean or torn is not None,
    )
    return identity, opened, tail


def _doubt(files: Files, identity: Identity) -> Identity:
    """Note that this member may have lost something it had confirmed."""
    assert identity.member is not None
    doubted = msgspec.structs.replace(identity, member=msgspec.structs.replace(identity.member, doubtful=True))
    write_identity(files, doubted)
    return doubted


def _look(disk: Disk, identity: Identity) -> _Found:
    """See what is there."""
    files, pool, _ = disk
    unclean = files.exists(_RUNNING)
    for folder in (JOURNAL_FOLDER, *FOLDERS):
        files.mkdir(folder)
    journal = Journal(files, pool, identity.journal_id, list_segments(files))
    _check_segments(files, journal)
    checkpoint = _checkpoint(files, pool)
    if not usable(checkpoint, journal):
        if checkpoint is not None:
            log.error("checkpoint does not fit the journal", offset=checkpoint.offset)
        checkpoint = None
    return _Found(identity, Scanner(journal), Checkpointer(files, pool, journal.id, checkpoint), unclean)


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


def _identify(files: Files) -> Identity:
    """Whose the directory is; if it is new, it becomes a store now."""
    strangers = [name for name in files.listdir("") if name not in _KNOWN]
    try:
        identity = read_identity(files)
    except ValueError as error:
        found = _id_of_journal(files)
        if found is None:
            raise WrongFormat(
                f"{files.describe(IDENTITY)} cannot be read and there is no journal to tell what it said: "
                "restore the directory from a backup",
                path=files.describe(IDENTITY),
            ) from error
        log.error("identity file damaged; taken from the journal", journal_id=found)
    else:
        if identity is not None:
            return identity
        if strangers:
            raise WrongFormat(
                f"{files.describe('')} holds {strangers[0]!r} and is not a DMQ data directory: choose an empty one",
                path=files.describe(""),
            )
        found = _id_of_journal(files) or secrets.randbits(64) or 1
    identity = Identity(FORMAT, found)
    write_identity(files, identity)
    return identity


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
        header = read_header(read_readable(file.read, 0, HEADER_BYTES))
        if header is None or not whole:
            return header
        raw = read_readable(file.read, 0, min(header.length, segment.size))
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
