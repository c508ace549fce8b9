"""The extraction of a batch: Spark's tasks write its rows as files while the driver does something else.

What always holds: what was extracted counts for nothing until a commit names it, so an extraction may be thrown away at
any time; its settlements, which are staged beside the tables, are deleted when it is closed.
"""

from __future__ import annotations

import uuid
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dmq.pipeline.archive.batch import split
from dmq.pipeline.archive.extract import Extracted, Task, extract

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.batch import Batch
    from dmq.pipeline.archive.table_store import Archive

__all__ = ["STAGING", "Extraction"]

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
