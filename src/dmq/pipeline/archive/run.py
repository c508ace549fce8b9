"""A whole run: the archive job for every journal, then the jobs on its tables; once, or until it is told to end.

Journals are archived side by side. A run that goes on makes the other tables beside the archive job, in a thread of
their own and a scheduler pool of their own, so that they never hold archiving up.

What always holds: a signal to end lets the current batch end, and nothing after it begins. The jobs are told which days
changed, so that they need not look for them. Of the other jobs one runs at a time. An error of one journal, or of a
job, ends the run once what runs beside it has come to an end of its own.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from dmq.errors import InvalidSettings
from dmq.pipeline.archive.job import ArchiveJob, ArchiveOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.decode.journal_reader import shard_servers
from dmq.pipeline.jobs.job import Job, JobContext, JobResult, Progress, check_options, no_progress
from dmq.pipeline.spark_session import spark_session, task_errors

if TYPE_CHECKING:
    from datetime import date

    from pyspark.sql import SparkSession

__all__ = ["ARCHIVE", "Run", "RunOptions", "job_names", "progress_line", "result_lines", "stopping"]

ARCHIVE: Final = "archive"
_APP: Final = "dmq-archive"
_JOURNALS_MAX: Final = 16  # at a time
_POOL: Final = "spark.scheduler.pool"
_ADVICE: Final = "what was committed stays, and the next run goes on from there"


@dataclass(frozen=True)
class RunOptions:
    """What to run, and where."""

    tables: str
    brokers: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()  # all if none is named
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    outbox_urls: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    is_continuous: bool = False
    every_seconds: float = 10.0  # how often a continuous run looks for more
    derive_seconds: float = 300.0  # how often it makes the other tables anew
    batch_bytes: int | None = None  # none is by the number of workers
    accept_loss: bool = False


def job_names() -> list[str]:
    """All jobs, in the order they are run in."""
    return [ARCHIVE, *_jobs()]


def _jobs() -> Mapping[str, Job]:
    from dmq.pipeline.jobs import JOBS

    return JOBS


class Run:
    """One run, made ready: its jobs are checked before Spark starts.

    Raises:
        InvalidSettings: a job is not known, no broker was named, or Spark cannot start.
    """

    def __init__(self, options: RunOptions, progress: Callable[[Progress], None] = no_progress) -> None:
        known = job_names()
        unknown = [name for name in options.jobs if name not in known]
        if unknown:
            raise InvalidSettings(f"there is no job {unknown[0]!r}: there are {', '.join(known)}")
        check_options(options.options)
        self._names = [name for name in known if not options.jobs or name in options.jobs]
        if ARCHIVE in self._names and not options.brokers:
            raise InvalidSettings("say which broker to archive: --broker dmq://host:port")
        self._options = options
        self._progress = progress
        self._archive = Archive.create(options.tables)
        self._telling = threading.Lock()
        self._is_begun = False

    def run(self, over: threading.Event | None = None, *, spark: SparkSession | None = None) -> list[JobResult]:
        """Run once, or until `over` is set.

        Parameters:
            spark: a session to use; without it one is made, and stopped at the end.

        Returns:
            What was done, one result for each job, added up.
        """
        over = over or threading.Event()
        mine = spark is None
        spark = spark or spark_session(self._options.master, self._options.conf, app_name="dmq archive")
        results: dict[str, JobResult] = {}
        try:
            with stopping(over), task_errors(_ADVICE), _jvm_may_end(over):
                self._run(spark, over, results)
        finally:
            if mine:
                _stop(spark)
        return list(results.values())

    def _run(self, spark: SparkSession, over: threading.Event, results: dict[str, JobResult]) -> None:
        options = self._options
        archive = _Journals(spark, self._archive.uri, options, self._tell)
        derived_at = -options.derive_seconds
        failed = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="dmq-derive") as thread:
            deriving: Future[list[JobResult]] | None = None
            try:
                while True:
                    looked_at = time.monotonic()
                    if ARCHIVE in self._names:
                        _add(results, archive.run(self._journals(), over), keep_notes=False)
                    deriving = _ended(deriving, results)
                    is_time = not options.is_continuous or looked_at - derived_at >= options.derive_seconds
                    if is_time and deriving is None and not over.is_set():
                        changed = results[ARCHIVE].dts if ARCHIVE in results else None
                        deriving = thread.submit(self._derive, spark, changed, lambda: over.is_set() or failed.is_set())
                        derived_at = looked_at
                    pause = max(0.0, looked_at + options.every_seconds - time.monotonic())
                    if not options.is_continuous or over.wait(pause):
                        break
            except BaseException:
                failed.set()  # so that the other jobs end soon
                raise
            if deriving is not None:
                _add_all(results, deriving.result())

    def _journals(self) -> list[str]:
        """Where each journal is: the brokers that were named, and all shards of the clusters that they belong to."""
        # A broker that never was there is an error at once; one that goes away is waited for.
        found = [shard_servers(broker, _APP, is_patient=self._is_begun) for broker in self._options.brokers]
        self._is_begun = True
        return list(dict.fromkeys(where for shards in found for where in shards.values()))

    def _derive(
        self, spark: SparkSession, changed: frozenset[date] | None, is_over: Callable[[], bool]
    ) -> list[JobResult]:
        spark.sparkContext.setLocalProperty(_POOL, "derive")
        archive = Archive.create(self._archive.uri)  # the archive job uses the other one at the same time
        done: list[JobResult] = []
        for name, job in _jobs().items():
            if name in self._names and not is_over():
                self._tell(Progress(name, "begins"))
                context = JobContext(
                    archive.uri,
                    datetime.now(UTC),
                    changed,
                    self._options.brokers[0] if self._options.brokers else None,
                    outbox_urls=self._options.outbox_urls,
                    options=self._options.options,
                    progress=self._tell,
                )
                done.append(job(spark, archive, context))
        return done

    def _tell(self, progress: Progress) -> None:
        with self._telling:
            self._progress(progress)


class _Journals:
    """The archive jobs of all journals, side by side."""

    def __init__(
        self, spark: SparkSession, tables: str, options: RunOptions, progress: Callable[[Progress], None]
    ) -> None:
        self._spark = spark
        self._tables = tables
        self._options = ArchiveOptions(options.batch_bytes, options.accept_loss, threading.Lock())
        self._progress = progress
        self._jobs: dict[str, ArchiveJob] = {}
        self._threads = ThreadPoolExecutor(_JOURNALS_MAX, thread_name_prefix="dmq-archive")

    def run(self, journals: list[str], over: threading.Event) -> JobResult:
        """Archive what each of them has now."""
        running = [self._threads.submit(self._job(servers).run, over.is_set) for servers in journals]
        wait(running)
        every: dict[str, JobResult] = {}
        for one in running:
            _add(every, one.result())
        return every[ARCHIVE]

    def _job(self, servers: str) -> ArchiveJob:
        if servers not in self._jobs:
            archive = Archive.create(self._tables)
            self._jobs[servers] = ArchiveJob(self._spark, archive, servers, self._options, progress=self._progress)
        return self._jobs[servers]


def _ended(deriving: Future[list[JobResult]] | None, results: dict[str, JobResult]) -> Future[list[JobResult]] | None:
    """Take what the other jobs did, once they have ended; what still runs."""
    if deriving is None or not deriving.done():
        return deriving
    _add_all(results, deriving.result())
    return None


@contextmanager
def _jvm_may_end(over: threading.Event) -> Iterator[None]:
    """Who ends this process may end Java with it, as a service manager does: then the batch is for the next run."""
    from py4j.protocol import Py4JError

    try:
        yield
    except (Py4JError, ConnectionError):
        if not over.is_set():
            raise


def _stop(spark: SparkSession) -> None:
    from py4j.protocol import Py4JError

    with suppress(Py4JError, ConnectionError):  # it has ended before; what was done is committed
        spark.stop()


def _add_all(results: dict[str, JobResult], every: list[JobResult]) -> None:
    for more in every:
        _add(results, more, keep_notes=False)


def _add(results: dict[str, JobResult], more: JobResult, *, keep_notes: bool = True) -> None:
    """Add up; of a run that goes on, only the last word is kept."""
    before = results.get(more.job)
    if before is not None:
        rows = dict(before.rows)
        for name, count in more.rows.items():
            rows[name] = rows.get(name, 0) + count
        notes = before.notes + more.notes if keep_notes else more.notes
        more = JobResult(more.job, rows, before.dts | more.dts, before.seconds + more.seconds, notes=notes)
    results[more.job] = more


@contextmanager
def stopping(over: threading.Event) -> Iterator[None]:
    """While this lasts, SIGINT and SIGTERM set an event, once; the second one ends the process as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def end(number: int, frame: Any) -> None:
        over.set()
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)

    for ending in (signal.SIGINT, signal.SIGTERM):
        before[ending] = signal.signal(ending, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- as text ----------------------------------------------------------------------------------------------------------


def progress_line(progress: Progress, seconds: float) -> str:
    """How far a job is, on one line: rows, rate, and what is left.

    Parameters:
        seconds: since it began.
    """
    parts = [progress.step]
    if progress.rows:
        parts.append(f"{progress.rows:,} rows")
        if seconds > 0:
            parts.append(f"{progress.rows / seconds:,.0f} rows/s")
    if progress.total:
        done, total = round(progress.done), round(progress.total)
        parts.append(f"{done:,} of {total:,} {progress.unit}, {total - done:,} left")
    return f"{progress.job}: {', '.join(parts)}"


def result_lines(results: list[JobResult]) -> list[str]:
    """What was done, for the end of a run."""
    lines: list[str] = []
    for result in results:
        rows = ", ".join(f"{count:,} into {name}" for name, count in result.rows.items() if count)
        lines.append(f"{result.job}: {rows or 'nothing new'} in {result.seconds:.1f} s")
        lines += [f"  {note}" for note in result.notes]
    return lines
