"""The archive job: the journal of a broker, or of a shard, batch by batch, into the tables.

A batch is a range of the journal (`next_batch`). Spark's tasks write its rows as files (`Extraction`); the driver
commits them table by table, joins the settlements with the messages (`settlement_join`), commits those, and at last
tells the broker how far the archive is. While it does that, the tasks of the next batch are at work. How far each table
has come stands in its own log, written in the same commit as the files: the journal offset, under an app id that names
the journal. A table has everything of the units that start below that offset; a range holds the units that start in
it, so its ends may lie anywhere, and every unit belongs to exactly one range.

What always holds: if the job is killed, anywhere, the next run finds by the tables' logs which range each table lacks,
and gives it exactly that; no row is lost and none is there twice. A table that lags behind another, since a run was
killed between their commits, is given the same range that the other one has had. Only what outlives a power loss of the
broker is taken. Of two runs at once on one journal the slower one ends with `ArchiveConflict`. A batch is committed as
a whole before the next one is. What was extracted counts for nothing until a commit names it, so an extraction may be
thrown away at any time, as after a commit that failed; its settlements, which are staged beside the tables, are deleted
when it is closed.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import date, timedelta
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from dmq.errors import OffsetGone
from dmq.pipeline.archive.extract import Extracted, Task, extract
from dmq.pipeline.archive.settlement_join import resolved
from dmq.pipeline.decode.journal_reader import JournalReader
from dmq.pipeline.jobs.job import JobResult, Progress, no_progress
from dmq.pipeline.tables import ARCHIVED, CONSUME_EVENT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.parquet import Written
    from dmq.pipeline.archive.table_store import Archive
    from dmq.protocol.read import ArchivedReply

__all__ = [
    "TABLES",
    "ArchiveJob",
    "ArchiveOptions",
    "Batch",
    "BatchDone",
    "Extraction",
    "after",
    "app_id_of",
    "batch_size",
    "next_batch",
    "split",
]

TABLES: Final = ARCHIVED  # in the order of their commits
_IDLE_BYTES: Final = 16 << 20
_CALL_SECONDS: Final = 60.0
_NAME: Final = "archive"
_STALE: Final = timedelta(days=1)


def app_id_of(journal_id: int) -> str:
    """Under what the tables remember how far they have a journal."""
    return f"archive/{journal_id:016x}"


class BatchDone(NamedTuple):
    """What a batch did: rows by table, the days they are of, and where the journal cannot be read."""

    rows: Mapping[str, int]
    dts: frozenset[date]
    damaged: tuple[tuple[int, int], ...] = ()


class ArchiveOptions(NamedTuple):
    """How a journal is archived."""

    batch_bytes: int | None = None  # how much of the journal goes into one commit; none is by the number of workers
    accept_loss: bool = False  # go on where retention took something before it was archived, instead of an error
    committing: threading.Lock | None = None  # held during commits; jobs of one process share it, and lose no race


class ArchiveJob:
    """Archives one journal.

    Parameters:
        servers: where the broker is, or the members of its shard are, as `JournalReader` takes it.
        progress: is told how far it is.
        step: is told what was just done, in a word; a test ends the process there.
    """

    def __init__(
        self,
        spark: SparkSession,
        archive: Archive,
        servers: str,
        options: ArchiveOptions | None = None,
        *,
        progress: Callable[[Progress], None] = no_progress,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._spark = spark
        self._archive = archive
        self._servers = servers
        given = options or ArchiveOptions()
        self._batch_bytes = given.batch_bytes or batch_size(spark.sparkContext.defaultParallelism)
        self._accept_loss = given.accept_loss
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dmq-extraction")
        self._committing = given.committing or threading.Lock()
        self._progress = progress
        self._step = step
        self._acknowledged: dict[int, int] = {}
        self._idle_to = 0  # from where the tables are to here there is nothing that a table has a row of

    def run(self, is_over: Callable[[], bool] = lambda: False) -> JobResult:
        """Archive everything that is there now.

        Parameters:
            is_over: asked before every batch; True ends the run early.

        Raises:
            ArchiveConflict: another run archives the same journal.
            OffsetGone: retention took what was not archived; see `next_batch`.
            NotConnected: the broker did not answer for a minute.
        """
        began = time.monotonic()
        report = self._ask()
        rows: dict[str, int] = {}
        dts: set[date] = set()
        notes: list[str] = []
        self._sweep()
        begin = last = self.archived_to(report.journal_id)
        self._acknowledge(report, begin)
        ahead: Extraction | None = None  # the next batch, while the last one is committed
        try:
            while not is_over():
                versions = self._versions(report.journal_id)
                batch = self._next(report, versions)
                if batch is None:
                    break
                current, ahead = self._taken(ahead, report.journal_id, batch), None
                with current:
                    found = current.result()
                    self._step("extracted")
                    ahead = self._ahead(report, after(versions, batch))
                    done = self._commit_batch(report, batch, found)
                last = batch.end
                if done is None:
                    self._idle_to = batch.end
                    break
                for name, count in done.rows.items():
                    rows[name] = rows.get(name, 0) + count
                dts |= done.dts
                notes += [f"journal offsets {start} to {end} cannot be read: left out" for start, end in done.damaged]
                self._acknowledge(report, self.archived_to(report.journal_id))
                self._show("archived", report, begin, last, rows=sum(rows.values()))
        finally:
            if ahead is not None:
                ahead.close()
        seconds = time.monotonic() - began
        left = max(0, report.flushed - last)
        if left and not is_over():
            left = 0  # nothing but what the broker notes for itself
        notes.insert(0, f"journal {report.journal_id:016x}: {last - begin:,} bytes taken, {left:,} left")
        return JobResult(_NAME, rows, frozenset(dts), seconds, notes=tuple(notes))

    def _sweep(self) -> None:
        """Delete what runs that were killed have staged, once it is old enough to be nobody's."""
        self._archive.folder.below(STAGING).sweep(_STALE)

    def archived_to(self, journal_id: int) -> int:
        """The journal offset up to which all tables have everything; 0 if one of them has nothing."""
        return min(self._versions(journal_id).values(), key=lambda version: version or 0) or 0

    def _versions(self, journal_id: int) -> dict[str, int | None]:
        app_id = app_id_of(journal_id)
        return {name: self._archive.table(name).version_of(app_id) for name in TABLES}

    def _next(self, report: ArchivedReply, versions: Mapping[str, int | None]) -> Batch | None:
        batch = next_batch(versions, report.first, report.flushed, self._batch_bytes, accept_loss=self._accept_loss)
        is_idle = batch is not None and batch.end <= self._idle_to
        return None if is_idle else batch

    def _ahead(self, report: ArchivedReply, versions: Mapping[str, int | None]) -> Extraction | None:
        """Begin with the batch that follows, if there is one."""
        batch = self._next(report, versions)
        return None if batch is None else self._taken(None, report.journal_id, batch)

    def _taken(self, ahead: Extraction | None, journal_id: int, batch: Batch) -> Extraction:
        """The extraction of a batch: the one that has begun, if it is of this batch."""
        if ahead is not None:
            if ahead.batch == batch:
                return ahead
            ahead.close()  # another run has written one of the tables; its commits will say so
        for name, version in batch.after.items():
            if version is None:
                with self._committing:
                    self._archive.table(name).make()  # data files without a log are what a lost log leaves
        return Extraction(self._spark, self._archive, (self._servers, journal_id), batch, thread=self._thread)

    # --- the broker -------------------------------------------------------------------------------------------------

    def _ask(self, journal_id: int = 0, offset: int = 0) -> ArchivedReply:
        with JournalReader(self._servers, app="dmq-archive", timeout=_CALL_SECONDS) as reader:
            return reader.archived(journal_id, offset)

    def _acknowledge(self, report: ArchivedReply, offset: int) -> None:
        """Tell the broker, unless it knows: it may have been killed before we were."""
        if offset > max(report.archived, self._acknowledged.get(report.journal_id, 0)):
            self._ask(report.journal_id, offset)
            self._acknowledged[report.journal_id] = offset
            self._step("acknowledged")

    # --- a batch ----------------------------------------------------------------------------------------------------

    def _commit_batch(self, report: ArchivedReply, batch: Batch, found: Extracted) -> BatchDone | None:
        """Commit what was extracted; None if there was nothing in it, and nothing was committed."""
        if batch.end == report.flushed and self._is_idle(batch, found):
            # The broker notes our own acknowledgement in the journal. To archive that would never end.
            return None
        rows: dict[str, int] = {}
        dts: set[date] = set()
        for name in TABLES[:-1]:
            if name in batch.after:
                files = found.files.get(name, [])
                self._commit(name, files, report.journal_id, batch)
                rows[name] = sum(file.rows for file in files)
                dts |= {file.dt for file in files}
        if CONSUME_EVENT in batch.after:
            rows[CONSUME_EVENT], days = self._settle(report.journal_id, batch, found)
            dts |= days
        return BatchDone(rows, frozenset(dts), tuple(found.damaged))

    @staticmethod
    def _is_idle(batch: Batch, found: Extracted) -> bool:
        is_whole = len(batch.after) == len(TABLES)
        return found.is_empty and is_whole and not found.damaged and batch.end - batch.start < _IDLE_BYTES

    def _commit(self, name: str, files: list[Written], journal_id: int, batch: Batch) -> None:
        app_id, before = app_id_of(journal_id), batch.after[name]
        with self._committing:
            self._archive.table(name).commit(files, app_id=app_id, version=batch.end, after=before)
        self._step(f"committed {name}")

    def _settle(self, journal_id: int, batch: Batch, found: Extracted) -> tuple[int, set[date]]:
        if not found.staged:
            self._commit(CONSUME_EVENT, [], journal_id, batch)
            return 0, set()
        broker = f"{journal_id:016x}"
        with JournalReader(self._servers, app="dmq-archive") as reader:
            topics = {topic.topic_id: topic.topic for topic in reader.topics(system=True)}
        files = resolved(self._spark, self._archive, broker, found, topics=topics)
        self._step("resolved")
        self._commit(CONSUME_EVENT, files, journal_id, batch)
        return sum(file.rows for file in files), {file.dt for file in files}

    def _show(self, step: str, report: ArchivedReply, begin: int, at: int, rows: int) -> None:
        self._progress(Progress(_NAME, step, rows, at - begin, total=report.flushed - begin, unit="bytes"))


STAGING: Final = "_staging"


class Extraction:
    """One batch on its way into files; begins when it is made. A context manager, which closes it.

    Parameters:
        journal: where it is, as `JournalReader` takes it, and its id.
        thread: waits for Spark; the same one for all batches of a journal, since Java keeps a thread for each of ours.
    """

    def __init__(
        self, spark: SparkSession, archive: Archive, journal: tuple[str, int], batch: Batch, *, thread: Executor
    ) -> None:
        self.batch: Final = batch
        self._context = spark.sparkContext
        self._staging = archive.folder.below(STAGING).below(uuid.uuid4().hex)
        tables = frozenset(batch.after)
        self._tasks = [
            Task(*journal, start, end, archive=archive.uri, tables=tables, staging=self._staging.uri)
            for start, end in split(batch.start, batch.end)
        ]
        self._group = uuid.uuid4().hex
        self._running: Future[Extracted] = thread.submit(self._run)

    def result(self) -> Extracted:
        """Wait until all tasks have ended; what they wrote.

        Raises:
            Py4JError: a task failed too often, or the JVM has ended.
        """
        return self._running.result()

    def close(self) -> None:
        """Cancel what still runs, and delete what was staged."""
        if not self._running.done():
            with suppress(Exception):  # the JVM may have ended, and then there is nothing to cancel
                self._context.cancelJobGroup(self._group)
            wait([self._running])
        self._staging.delete()

    def _run(self) -> Extracted:
        self._context.setLocalProperty("spark.scheduler.pool", "archive")
        self._context.setJobGroup(self._group, f"journal from {self.batch.start} to {self.batch.end}", True)
        found = Extracted()
        for each in self._context.parallelize(self._tasks, len(self._tasks)).map(extract).collect():
            found.add(each)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


RANGE_BYTES: Final = 64 << 20  # a task holds about six times as much in memory
_RANGES_MIN: Final = 4


class Batch(NamedTuple):
    """A range of the journal, and the tables that it goes to."""

    start: int
    end: int
    after: Mapping[str, int | None]  # by table, the version that is there until then


def next_batch(
    versions: Mapping[str, int | None], first: int, end: int, size: int, *, accept_loss: bool = False
) -> Batch | None:
    """What comes next; None if all tables have everything.

    Parameters:
        versions: how far each table is; None has nothing yet.
        first, end: what the journal has.
        size: at most this many bytes.
        accept_loss: go on behind what retention took before it was archived.

    Raises:
        OffsetGone: the journal does not have any more, or not any longer, what comes next.
    """
    known = [version for version in versions.values() if version is not None]
    if known and max(known) > end:
        raise OffsetGone(
            f"the archive has this journal up to offset {max(known)}, but it ends at {end}: the broker's data is older "
            "than the archive. Find the newer data, or archive it into another folder",
            first=first,
            next=end,
        )
    if known and min(known) < first and not accept_loss:
        raise OffsetGone(
            f"the journal begins at offset {first} and the archive has it up to {min(known)}: retention took what lay "
            "between before it was archived. Say --accept-loss to go on without it; store.keep_unarchived keeps it the "
            "next time",
            first=first,
            next=end,
        )
    places = {name: max(first, version or 0) for name, version in versions.items()}
    start = min(places.values())
    stop = min((place for place in places.values() if place > start), default=end)
    if start >= stop:
        return None
    lagging = {name: versions[name] for name, place in places.items() if place == start}
    # A range that other tables have had is not cut: it would not be the same any more.
    return Batch(start, stop if len(lagging) < len(places) else min(stop, start + size), lagging)


def batch_size(workers: int) -> int:
    """How much of a journal makes a batch where nobody says: so much that every worker has a task."""
    return RANGE_BYTES * max(_RANGES_MIN, workers)


def after(versions: Mapping[str, int | None], batch: Batch) -> dict[str, int | None]:
    """How far each table is once a batch is committed."""
    return {name: batch.end if name in batch.after else version for name, version in versions.items()}


def split(start: int, end: int) -> list[tuple[int, int]]:
    """A range as ranges for tasks. Their size does not depend on who works on them, since they become files."""
    size = end - start
    count = max(-(-size // RANGE_BYTES), 1)
    bounds = [start + size * number // count for number in range(count + 1)]
    return list(pairwise(bounds))
