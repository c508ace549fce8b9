"""The jobs on the archive's tables, by name, in the order they are run in; the archive job itself comes before them.

In reading order: `job` is what a job is given and gives back; `changes` says which days are to be made anew,
`frames` reads tables and writes them, also where Spark itself cannot. The jobs: `rollup` with `day_metrics`,
`dead_letters`, `trace`, `reconcile`, `compact`, `retain`.

What always holds: a job's module is imported when it is run and not before, so that a worker which needs one of them
does not load all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from dmq.pipeline.jobs.job import Job, JobContext, JobResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = ["JOBS"]


def _from(module: str) -> Job:
    def run(spark: SparkSession, archive: Archive, context: JobContext) -> JobResult:
        job: Job = importlib.import_module(f"dmq.pipeline.jobs.{module}").run
        return job(spark, archive, context)

    return run


JOBS: Final[Mapping[str, Job]] = {
    "rollup": _from("rollup"),
    "trace": _from("trace"),
    "dead-letters": _from("dead_letters"),
    "reconcile": _from("reconcile"),
    "compact": _from("compact"),
    "retain": _from("retain"),
}
