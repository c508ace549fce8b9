"""Verification: a check of a data directory without opening it, where nothing is locked, changed or recovered.

Every unit and record of the journal, and everything on disk that is derived from it: the checkpoint, positions, every
index entry in queue files and runs, every block of lookup and wheel files. Each finding says what it means and what to
do. What always holds: damage of the journal is told from a torn tail, from damage of derived files, as the next start
would tell it, and from a record that came damaged and was stored so: its unit is intact.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from dmq.errors import RecordCorrupt, StorageError
from dmq.records.check import find_corrupt
from dmq.records.layout import JOURNAL_OFFSET_AT, gather
from dmq.storage.delay.wheel import Wheel, WheelFile
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index import lookup
from dmq.storage.index.block_file import BlockCache, DerivedDamaged
from dmq.storage.index.queue_index import Run, valid
from dmq.storage.journal.journal import Journal
from dmq.storage.journal.scanner import Scanner
from dmq.storage.journal.unit import SNAPSHOT, Unit
from dmq.storage.offline.inspection import entry_files, inspect_units, open_journal, restored_state
from dmq.storage.state.derived import Checkpoint, folder_name, read_checkpoint, read_positions
from dmq.storage.state.state import State
from dmq.storage.upkeep.identity import IDENTITY, parse_identity

__all__ = ["Finding", "Kind", "Report", "holder", "verify"]

Ranges = list[tuple[int, int]]
Kind = Literal["torn tail", "derived", "damage", "stored"]

_ADVICE: Final[dict[Kind, str]] = {
    "torn tail": "harmless: what a crash cut short; the next start moves it into salvage/",
    "derived": "nothing is lost: whatever reads it builds it anew from the journal, and so does a start without it; "
    "have the disk checked",
    "stored": "the disk is right, its unit is intact: the record came so, from a client or an earlier DMQ; a group "
    "that reaches it gets a dead letter with the reason CORRUPT instead",
    "damage": "restore it from a replica or a backup, and have the disk checked; reads of it say so, the rest is good",
}
_STALE: Final = "it was restored since: stop DMQ, delete the checkpoint, and the next start builds all of it anew"
_FINDINGS_MAX: Final = 1000
_RETRIES: Final = 5


class Finding(NamedTuple):
    """Something that does not check out, what it means and what to do."""

    kind: Kind
    where: str
    what: str
    advice: str


class Report(NamedTuple):
    """What `verify` saw."""

    segments: int
    units: int
    records: int
    bytes: int
    entries: int
    in_use_by: int | None
    findings: list[Finding]

    @property
    def is_good(self) -> bool:
        """Whether there is nothing but perhaps a torn tail."""
        return all(finding.kind == "torn tail" for finding in self.findings)


class _Findings(list[Finding]):
    def __init__(self) -> None:
        super().__init__()
        self.damaged: Ranges = []

    def add_damaged(self, start: int, end: int, what: str) -> None:
        """A range of the journal."""
        self.damaged.append((start, end))
        self.add("damage", f"journal {start}-{end}", f"{end - start} bytes {what}")

    def add(self, kind: Kind, where: str, what: str, advice: str | None = None) -> None:
        if len(self) < _FINDINGS_MAX:
            self.append(Finding(kind, where, what, advice or _ADVICE[kind]))


def holder(files: Files) -> int | None:
    """The process that has the directory open, by the mark it left; None if that one is gone."""
    try:
        file = files.open("LOCK")
    except (FileNotFoundError, StorageError):
        return None
    try:
        text = file.read(0, 32).decode("ascii", "replace").strip()
    finally:
        file.close()
    is_running = files.exists("RUNNING") and text.isdecimal() and os.path.exists(f"/proc/{text}")
    return int(text) if is_running else None


def verify(files: Files, progress: Callable[[int, int], None] | None = None) -> Report:
    """Check a whole directory.

    Parameters:
        progress: called with the journal bytes done and in all.

    Raises:
        RecordCorrupt, ForeignFile, WrongFormat: it is not a data directory this DMQ can read.
    """
    pool = FilePool(files, 64)
    try:
        owner = holder(files)
        findings = _Findings()
        # Before the segments are listed: a directory in use may get a newer checkpoint, and longer segments, any time.
        known = _checkpoint(files, pool, _Findings())
        journal = open_journal(files, pool)
        _verify_identity(files, journal, findings)
        units, records = _verify_journal(files, journal, known, owner, findings=findings, progress=progress)
        entries = _verify_derived(files, pool, journal, owner, findings=findings)
        total = sum(segment.size for segment in journal.segments)
        return Report(len(journal.segments), units, records, total, entries=entries, in_use_by=owner, findings=findings)
    finally:
        pool.close()


def _verify_identity(files: Files, journal: Journal, findings: _Findings) -> None:
    try:
        file = files.open(IDENTITY)
    except FileNotFoundError:
        findings.add("derived", IDENTITY, "is missing")
        return
    try:
        journal_id = parse_identity(file.read(0, 4096)).journal_id
        if journal_id != journal.id:
            findings.add("damage", IDENTITY, "belongs to another journal", "put the one back that belongs here")
    except ValueError as error:
        findings.add("derived", IDENTITY, str(error))
    finally:
        file.close()


# --- the journal ------------------------------------------------------------------------------------------------------


def _verify_journal(
    files: Files,
    journal: Journal,
    checkpoint: Checkpoint | None,
    owner: int | None,
    findings: _Findings,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Check all units; returns how many units and records are good."""
    scanner = Scanner(journal)
    durable = checkpoint.offset if checkpoint is not None and checkpoint.journal_id == journal.id else 0
    heads = {segment.start for segment in journal.segments}
    units = records = 0
    for found in inspect_units(journal):
        if isinstance(found, Unit):
            units += 1
            wrong = list(_bad_records(found))
            records += found.header.records - len(wrong)
            for offset, what in wrong:
                findings.add("stored", f"record {offset}", what)
            if found.start in heads and not found.header.flags & SNAPSHOT:
                findings.add("damage", f"journal {found.start}", "a segment does not begin with a snapshot")
            end = found.end
        else:
            start, end = found
            segment = journal.segment_at(start)
            if segment is not None and not files.exists(segment.path):
                pass  # its owner dropped it meanwhile
            elif end == journal.end and start >= durable and not scanner.was_durable(start):
                in_use = f"process {owner} is perhaps writing it just now; else " if owner else ""
                findings.add("torn tail", f"journal {start}-{end}", "no whole unit", in_use + _ADVICE["torn tail"])
            else:
                what = "are missing" if segment is None else "fail their checksum"
                findings.add_damaged(start, end, what)
        if progress is not None:
            progress(end - journal.start, journal.end - journal.start)
    if durable > journal.end:
        findings.add_damaged(journal.end, durable, "are missing")
    return units, records


def _bad_records(unit: Unit) -> Iterator[tuple[int, str]]:
    """Records of an intact unit that cannot be read, by their journal offsets, and why."""
    offsets = np.asarray(unit.offsets, np.int64)
    corrupt = find_corrupt(unit.buffer, offsets - unit.start, np.asarray(unit.lengths, np.int64))
    said = gather(unit.buffer, offsets - unit.start, JOURNAL_OFFSET_AT, ">u8")
    for index, offset in enumerate(offsets.tolist()):
        if index in corrupt:
            yield offset, corrupt[index]
        elif int(said[index]) != offset:
            yield offset, f"it says that it stands at {int(said[index])}"


# --- what is derived --------------------------------------------------------------------------------------------------


def _checkpoint(files: Files, pool: FilePool, findings: _Findings) -> Checkpoint | None:
    try:
        return read_checkpoint(files, pool)
    except (DerivedDamaged, FileNotFoundError) as error:
        findings.add("derived", "checkpoint", str(error))
        return None


def _verify_derived(files: Files, pool: FilePool, journal: Journal, owner: int | None, findings: _Findings) -> int:
    """Check the checkpoint and what it names; returns how many index entries are good."""
    entries = 0
    for _ in range(_RETRIES):
        found = _Findings()
        checkpoint = _checkpoint(files, pool, found)
        entries = (
            0
            if checkpoint is None
            else _verify_named(files, pool, journal, checkpoint, damaged=findings.damaged, findings=found)
        )
        pool.close()
        if not found or owner is None:
            break
        # A directory in use replaces these files: what is gone by now was not wrong.
        again = _checkpoint(files, pool, _Findings())
        if again is None or checkpoint is None or again.sequence == checkpoint.sequence:
            break
    findings.extend(found)
    return entries


def _verify_named(
    files: Files, pool: FilePool, journal: Journal, checkpoint: Checkpoint, damaged: Ranges, findings: _Findings
) -> int:
    if checkpoint.journal_id != journal.id:
        findings.add("derived", "checkpoint", "it is another journal's")
    for start, end in checkpoint.damage:
        if end > journal.start and not any(s < end and start < e for s, e in damaged):
            findings.add(
                "derived", "checkpoint", f"says that journal {start}-{end} is damaged, which it is not", _STALE
            )
    cache = BlockCache(16)
    checks: list[tuple[str, Callable[[], object]]] = [
        (checkpoint.positions, lambda: read_positions(pool, checkpoint.positions)),
        *((path, lambda p=path: _read_index(pool, cache, p)) for path in checkpoint.index),
        *((run.path, lambda r=run: _read_wheel(files, pool, cache, r)) for run in checkpoint.wheel),
    ]
    for path, check in checks:
        try:
            check()
        except (DerivedDamaged, FileNotFoundError, msgspec.MsgspecError) as error:
            findings.add("derived", path, str(error))
    try:
        state = restored_state(checkpoint)
    except RecordCorrupt as error:
        findings.add("derived", "checkpoint", str(error))
        return 0
    return _verify_entries(files, pool, checkpoint, state, findings=findings)


def _read_index(pool: FilePool, cache: BlockCache, path: str) -> int:
    return sum(len(table) for section in lookup.IndexFile(pool, cache, path).sections for table in section.pieces())


def _read_wheel(files: Files, pool: FilePool, cache: BlockCache, run: WheelFile) -> int:
    opened = Wheel(files, pool, cache, max(1, len(run.taken)))
    opened.restore([run], [])
    return sum(map(len, opened.each()))


def _verify_entries(files: Files, pool: FilePool, checkpoint: Checkpoint, state: State, findings: _Findings) -> int:
    good = 0
    broken: set[str] = set()
    keys = {key for key, _ in checkpoint.filed}
    for path in checkpoint.runs:
        try:
            keys.update(Run(pool, path).keys.tolist())
        except DerivedDamaged as error:
            findings.add("derived", path, str(error))
            broken.add(path)
    readable = msgspec.structs.replace(checkpoint, runs=[path for path in checkpoint.runs if path not in broken])
    for key in sorted(keys):
        topic = state.topics_by_id.get(key >> 8)
        if topic is None:
            continue  # the topic was deleted; the next checkpoint forgets it
        following = 0
        try:
            for path, first, entries in entry_files(files, pool, readable, folder_name(topic), key=key):
                right = valid(key, first, entries)
                good += int(right.sum())
                for at in np.flatnonzero(~right).tolist():
                    findings.add("derived", path, f"entry {first + at} of {topic.name}/{key & 255} is wrong")
                following = first + len(entries)
        except DerivedDamaged as error:
            findings.add("derived", f"{topic.name}/{key & 255}", str(error))
            continue
        expected = state.next.get(key, 0)
        if following != expected and not broken:
            findings.add("derived", f"{topic.name}/{key & 255}", f"its index ends at {following}, not at {expected}")
    return good
