"""What a job on the archive is given, and what it gives back.

What always holds: a job may be run again at any time, also after it was killed: it finds out by itself what is missing,
or does again exactly what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.store import Archive

__all__ = ["Job", "JobContext", "JobResult", "Progress", "no_progress"]


@dataclass(frozen=True)
class Progress:
    """How far a job is, to be shown."""

    job: str
    step: str  # what it does now, in a word or two
    rows: int = 0  # so far
    done: float = 0.0  # of `total`, in `unit`; without a total nobody knows how much there is
    total: float = 0.0
    unit: str = ""


def no_progress(progress: Progress) -> None:
    """For jobs that nobody looks at."""


@dataclass(frozen=True)
class JobContext:
    """What jobs are told.

    `dts` are the days that changed since the derived tables were made, None for all; a job that makes a table by day
    makes these anew. `broker` and `outbox_urls` are for jobs that ask others than the archive.
    """

    tables: str  # address of the archive
    now: datetime  # UTC; nothing looks at another clock
    dts: frozenset[date] | None = None
    broker: str | None = None
    outbox_urls: tuple[str, ...] = ()
    lateness_days: int = 3  # how long after its day an event may come; a broker keeps messages for three, unless told
    options: Mapping[str, str] = field(default_factory=dict)  # of single jobs, as --set has them
    progress: Callable[[Progress], None] = no_progress


@dataclass(frozen=True)
class JobResult:
    """What a job did."""

    job: str
    rows: Mapping[str, int] = field(default_factory=dict)  # by table, written
    dts: frozenset[date] = frozenset()  # days it changed
    seconds: float = 0.0
    notes: tuple[str, ...] = ()  # for the summary, a sentence each


Job = Callable[["SparkSession", "Archive", JobContext], JobResult]
