"""Job `compact`: many small files of a day become few large ones, with exactly the same rows, sorted; the directory of
the index follows.

What always holds: rows that others append meanwhile stay, since a swap names the files it takes away and no others; if
one of those is gone by then, nothing is changed and the day is looked at again; no row is gained or lost, or nothing is
committed. The files that were replaced stay on the disk until the job `retain` sweeps, so that who reads them can go
on. Files that a derived table has still to take in stay apart: among old rows nobody could tell them as new.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.errors import ArchiveConflict, Damaged
from dmq.pipeline.archive.key_index import cover
from dmq.pipeline.archive.parquet import FILE_BYTES
from dmq.pipeline.jobs.changes import mark_of, news_of
from dmq.pipeline.jobs.frames import frame_of, staged
from dmq.pipeline.jobs.job import JobContext, JobResult, Progress, count_option
from dmq.pipeline.tables import (
    CONSUME_EVENT,
    COPY,
    DEAD_LETTER_PART,
    KEY_DIRECTORY,
    MESSAGE,
    ROLLUP_PART,
    SCHEMAS,
    TRACE,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.table_store import Archive, LiveFile, Table

__all__ = ["Portion", "portions", "run", "waiting_files"]

SOURCES: Final = {MESSAGE: (ROLLUP_PART, TRACE), CONSUME_EVENT: (ROLLUP_PART, TRACE), COPY: (DEAD_LETTER_PART,)}
WAITING_MAX = 100  # files that a derived table has not taken in; with more, nobody makes it any more
SMALL_BYTES: Final = FILE_BYTES // 4
FILES_MIN: Final = 4
_TRIES: Final = 5


class Portion(NamedTuple):
    """Files of one day that become `parts` new ones."""

    dt: date
    files: tuple[LiveFile, ...]
    parts: int


def portions(files: Iterable[LiveFile], files_min: int = FILES_MIN, file_bytes: int = FILE_BYTES) -> list[Portion]:
    """What is worth merging: small files of one day and of similar size, if there are so many of them.

    A file is similar to others of its power of four. So a row is written again once for each power, and not whenever
    some more files came to its day; large files stay as they are.
    """
    small: dict[tuple[date, int], list[LiveFile]] = defaultdict(list)
    for file in files:
        if file.bytes < file_bytes // 4:
            small[file.dt, file.bytes.bit_length() // 2].append(file)
    return [
        Portion(dt, tuple(found), -(-sum(file.bytes for file in found) // file_bytes))
        for (dt, _), found in sorted(small.items())
        if len(found) >= max(2, files_min)
    ]


def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
    """Merge what is small in every table; see `dmq.pipeline.jobs.job`."""
    began = time.monotonic()
    files_min = count_option(context, "compact.files_min", FILES_MIN)
    rows: dict[str, int] = {}
    dts: set[date] = set()
    before = after = 0
    for name in SCHEMAS:
        if name == KEY_DIRECTORY:
            continue  # it merges its own, below
        table = archive.table(name)
        live = table.live_files()
        # In this order: a file that comes in between is in neither, and is left for the next time.
        ready = frozenset(file.uri for file in live) - waiting_files(archive, name)
        for dt in [portion.dt for portion in portions(_of(live, ready), files_min)]:
            context.progress(Progress("compact", f"{name} of {dt}", sum(rows.values())))
            merged, made = _merge(spark, table, _Day(dt, ready), files_min)
            before, after = before + len(merged), after + made
            rows[name] = rows.get(name, 0) + sum(file.rows for file in merged)
            dts.add(dt)
    notes = [f"{before} files became {after}"] if before else []
    covered = cover(archive)
    if covered.files:
        notes.append(f"{covered.files} files of the index are in its directory now, which has {covered.runs} runs")
    return JobResult("compact", rows, frozenset(dts), time.monotonic() - began, notes=tuple(notes))


def waiting_files(archive: Archive, name: str) -> frozenset[str]:
    """The files of a table that a derived table has still to take in."""
    source, waiting = archive.table(name), set[str]()
    for derived in map(archive.table, SOURCES.get(name, ())):
        if derived.version_of(mark_of(source)) is not None:
            files = news_of(source, derived).files
            waiting.update(files if len(files) <= WAITING_MAX else ())
    return frozenset(waiting)


class _Day(NamedTuple):
    """A day whose files are merged; of all files, those are `ready` that every derived table has taken in."""

    dt: date
    ready: frozenset[str]


def _of(files: Iterable[LiveFile], ready: frozenset[str]) -> list[LiveFile]:
    return [file for file in files if file.uri in ready]


def _merge(spark: SparkSession, table: Table, day: _Day, files_min: int) -> tuple[tuple[LiveFile, ...], int]:
    """Merge the small files of a day; returns them, and how many they became."""
    dt = day.dt
    for left in range(_TRIES, 0, -1):
        found = portions(_of(table.live_files(dt), day.ready), files_min)
        if not found:  # somebody else has merged or replaced them
            break
        portion = found[0]
        source = frame_of(spark, table.name, [file.uri for file in portion.files])
        files = staged(table, source, portion.parts)
        read, wrote = sum(file.rows for file in portion.files), sum(file.rows for file in files)
        if read != wrote or {file.dt for file in files} != {dt}:
            raise Damaged(
                f"{len(portion.files)} files of table {table.name} of {dt} say that they have {read} rows, but "
                f"have {wrote}; they are left as they are: look at the folder {table.uri}"
            )
        try:
            table.swap(portion.files, files)
            return portion.files, len(files)
        except ArchiveConflict:
            if left == 1:
                raise
    return (), 0
