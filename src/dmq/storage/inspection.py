"""Looking into a data directory without opening it: nothing is locked, changed or recovered.

`inspect` decodes segments unit by unit for a person; `verify` checks every unit and record of the journal, every index
entry, and the frames of the other derived files, and reports what does not check out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dmq.errors import DMQError, RecordCorrupt
from dmq.records.decoding import RecordView
from dmq.storage import journal as journals
from dmq.storage import units
from dmq.storage.checkpoint import Checkpoint, read_checkpoint, read_positions
from dmq.storage.derived import event_of, message_id_of
from dmq.storage.entries import ENTRY_BYTES, ENTRY_DTYPE, valid
from dmq.storage.files import Files
from dmq.storage.frames import DerivedDamaged
from dmq.storage.journal import Journal
from dmq.storage.pool import FilePool
from dmq.storage.queues import FOLDER as QUEUES
from dmq.storage.reading import row_of
from dmq.storage.scanning import Scanner
from dmq.storage.units import SNAPSHOT, Unit

__all__ = ["Finding", "Report", "inspect_records", "inspect_units", "open_journal", "verify"]


class Finding(NamedTuple):
    """Something that does not check out, and what it means."""

    where: str
    what: str


class Report(NamedTuple):
    """What `verify` saw."""

    segments: int
    units: int
    records: int
    bytes: int
    entries: int
    torn_at: int | None
    findings: list[Finding]


def open_journal(files: Files, pool: FilePool) -> Journal:
    """The journal of a directory, for reading only.

    Raises:
        RecordCorrupt: there is no readable journal in it.
    """
    segments = journals.list_segments(files)
    for segment in segments:
        header = units.read_header(pool.get(segment.path).read(0, units.HEADER_BYTES))
        if header is not None:
            return Journal(files, pool, header.journal_id, segments)
    raise RecordCorrupt(f"{files.describe(journals.FOLDER)} holds no readable segment: is this a DMQ data directory?")


def inspect_units(journal: Journal, start: int | None = None) -> Iterator[Unit | tuple[int, int]]:
    """The units from an offset on; a pair of offsets for each range that is not one."""
    scanner = Scanner(journal)
    at = journal.start if start is None else start
    while at < journal.end:
        unit = scanner.unit_at(at)
        if unit is not None:
            yield unit
            at = unit.end
            continue
        following = scanner.next_valid(at + 1)
        end = journal.end if following is None else following.start
        yield at, end
        at = end


def inspect_records(unit: Unit) -> Iterator[dict[str, Any]]:
    """The records of a unit, as plain data a person can read; bodies only by their size."""
    for index in range(unit.header.records):
        row, within = row_of(unit, index)
        offset = int(unit.offsets[index])
        if row.topic_id == 0:
            event = event_of(unit, index)
            yield {"offset": offset, "length": int(unit.lengths[index]), "event": type(event).__name__}
            continue
        record = RecordView(unit.buffer, offset - unit.start)
        yield {
            "offset": offset,
            "length": record.length,
            "topic": record.topic,
            "topic_id": row.topic_id,
            "queue": record.queue,
            "queue_offset": record.queue_offset,
            "id": str(message_id_of(unit, row, index, within)),
            "key": record.key,
            "tag": record.tag,
            "app": record.app,
            "business_id": record.business_id,
            "priority": record.priority,
            "flags": record.flags,
            "sent_at_ms": record.send_time_ms,
            "stored_at_ms": record.store_time_ms,
            "body_bytes": len(record.raw_body),
        }


def verify(files: Files) -> Report:
    """Check a whole directory, byte by byte where it can be."""
    pool = FilePool(files, 64)
    try:
        return _verify(files, pool)
    finally:
        pool.close()


def _verify(files: Files, pool: FilePool) -> Report:
    journal = open_journal(files, pool)
    scanner = Scanner(journal)
    findings: list[Finding] = []
    counted_units = records = 0
    torn_at = None
    for found in inspect_units(journal):
        if isinstance(found, Unit):
            counted_units += 1
            records += found.header.records
            findings += _bad_records(found)
        elif found[1] == journal.end and not scanner.was_durable(found[0]):
            torn_at = found[0]
        else:
            findings.append(Finding(f"journal {found[0]}-{found[1]}", "not a valid unit: damaged"))
    for segment in journal.segments:
        head = scanner.unit_at(segment.start)
        if head is not None and not head.header.flags & SNAPSHOT:
            findings.append(Finding(segment.path, "does not begin with a snapshot"))
    entries = _verify_derived(files, pool, findings)
    total = sum(segment.size for segment in journal.segments)
    return Report(len(journal.segments), counted_units, records, total, entries, torn_at, findings)


def _bad_records(unit: Unit) -> Iterator[Finding]:
    for index in range(unit.header.records):
        offset = int(unit.offsets[index])
        record = RecordView(unit.buffer, offset - unit.start)
        try:
            record.verify()
            if record.journal_offset != offset:
                raise RecordCorrupt(f"it says it stands at {record.journal_offset}")
        except DMQError as error:
            yield Finding(f"record {offset}", str(error))


def _verify_derived(files: Files, pool: FilePool, findings: list[Finding]) -> int:
    """Check what the checkpoint names; damage there is mended by the next start."""
    try:
        checkpoint = read_checkpoint(files, pool)
        if checkpoint is None:
            return 0
        read_positions(pool, checkpoint.positions)
    except DerivedDamaged as error:
        findings.append(Finding("checkpoint", f"{error}: the next start rebuilds what is derived"))
        return 0
    return _verify_queue_files(files, pool, checkpoint, findings)


def _verify_queue_files(files: Files, pool: FilePool, checkpoint: Checkpoint, findings: list[Finding]) -> int:
    filed = dict(checkpoint.filed)
    entries = 0
    for folder in files.listdir(QUEUES):
        topic_id = int(folder.rpartition("@")[2])
        for queue in files.listdir(f"{QUEUES}/{folder}"):
            key = topic_id << 8 | int(queue)
            for name in files.listdir(f"{QUEUES}/{folder}/{queue}"):
                path = f"{QUEUES}/{folder}/{queue}/{name}"
                first = int(name.partition(".")[0])
                count = min(files.size(path) // ENTRY_BYTES, max(0, filed.get(key, 0) - first))
                table = np.frombuffer(pool.get(path).read(0, count * ENTRY_BYTES), ENTRY_DTYPE)
                entries += count
                for wrong in np.flatnonzero(~valid(key, first, table)).tolist()[:10]:
                    findings.append(Finding(path, f"entry {first + wrong} is wrong: the next start mends it"))
    return entries
