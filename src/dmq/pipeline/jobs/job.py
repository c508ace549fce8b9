"""A job on the archive: what it is given, its options, and what it gives back.

What always holds: a job may be run again at any time, also after it was killed: it finds by itself what is missing, or
does again exactly what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Final

from dmq.errors import InvalidSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dmq.pipeline.archive.table_store import Archive

__all__ = [
    "EVERYTHING",
    "KNOWN",
    "Job",
    "JobContext",
    "JobResult",
    "Progress",
    "check_options",
    "count_option",
    "flag_option",
    "lateness_of",
    "no_progress",
    "optional_count",
]


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


EVERYTHING: Final = "derive.all"  # true: make all days of derived tables anew, not only those that something came to

LATENESS: Final = "derive.lateness_days"  # how long after its message's day an event may come

KNOWN: Final = (
    EVERYTHING,
    LATENESS,
    "reconcile.days",
    "reconcile.grace_minutes",
    "reconcile.resend",
    "reconcile.prefix",
    "reconcile.tasks",
    "compact.files_min",
    "retain.days",
    "retain.derived_days",
    "retain.sweep_hours",
)


def check_options(options: Iterable[str]) -> None:
    """Refuse names that no job knows.

    Raises:
        InvalidSettings: one of them is such a name.
    """
    for name in options:
        if name not in KNOWN:
            raise InvalidSettings(f"no job has an option {name!r}: there are {', '.join(KNOWN)}")


def lateness_of(context: JobContext) -> timedelta:
    """How long after its message's day an event may come."""
    return timedelta(days=count_option(context, LATENESS, context.lateness_days))


def count_option(context: JobContext, name: str, default: int) -> int:
    """A number of things, 1 or more.

    Raises:
        InvalidSettings: it is not one.
    """
    found = optional_count(context, name)
    return default if found is None else found


def optional_count(context: JobContext, name: str) -> int | None:
    """A number of things, 1 or more, or None where nothing is said.

    Raises:
        InvalidSettings: it is not one.
    """
    text = context.options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InvalidSettings(f"{name} is a whole number over 0, not {text!r}")
    return int(text)


def flag_option(context: JobContext, name: str) -> bool:
    """Whether something is wanted.

    Raises:
        InvalidSettings: it is neither true nor false.
    """
    text = context.options.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidSettings(f"{name} is true or false, not {text!r}")
    return text == "true"
