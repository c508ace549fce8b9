"""Options of single jobs, as the caller has them: texts by name."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from dmq.errors import InvalidSettings
from dmq.pipeline.jobs.job import JobContext

__all__ = ["EVERYTHING", "KNOWN", "check_options", "count_option", "flag_option", "lateness_of", "optional_count"]

EVERYTHING: Final = "derive.all"  # true: make all days of derived tables anew, not only those that something came to

LATENESS: Final = "derive.lateness_days"  # how long after its message's day an event may come

KNOWN: Final = (
    EVERYTHING,
    LATENESS,
    "reconcile.days",
    "reconcile.grace_minutes",
    "reconcile.resend",
    "reconcile.prefix",
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
        InvalidSettings: it is none.
    """
    found = optional_count(context, name)
    return default if found is None else found


def optional_count(context: JobContext, name: str) -> int | None:
    """A number of things, 1 or more, or None where nothing is said.

    Raises:
        InvalidSettings: it is none.
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
