"""What a report says, before anybody has decided how it looks.

What always holds: times are UTC; a figure that nothing is known about is None, not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

__all__ = [
    "Contents",
    "DeadLetters",
    "Difference",
    "GroupFigures",
    "HourFigures",
    "KeyFigures",
    "Outcomes",
    "Point",
    "Reconciled",
    "Report",
    "RetryFigures",
    "Series",
    "SlowTrace",
    "TopicFigures",
    "Totals",
]


@dataclass(frozen=True)
class Contents:
    """What a table has, in all its days."""

    table: str
    rows: int
    bytes: int
    files: int
    first: date | None
    last: date | None


@dataclass(frozen=True)
class TopicFigures:
    """What came into a topic in the period."""

    topic: str
    messages: int
    bytes: int
    apps: tuple[str, ...]
    peak_minute: int  # messages in the fullest minute
    p50_ms: float | None  # sent → stored, in the typical minute
    p99_ms: float | None  # in the worst minute
    max_ms: float | None


@dataclass(frozen=True)
class GroupFigures:
    """What a group made of a topic in the period."""

    topic: str
    group: str
    acked: int
    retries: int
    dead: int
    p50_ms: float | None  # stored → acked, in the typical minute
    p99_ms: float | None  # in the worst minute
    max_ms: float | None
    lag: int | None  # at the end
    lag_max: int | None


@dataclass(frozen=True)
class RetryFigures:
    """What failed in a group in the period, and was tried again."""

    topic: str
    group: str
    retries: int
    dead: int


@dataclass(frozen=True)
class KeyFigures:
    """A key that several messages of the period have."""

    topic: str
    key: str
    messages: int


@dataclass(frozen=True)
class HourFigures:
    """What came in during an hour of the day, UTC, on all days of the period."""

    hour: int
    messages: int


@dataclass(frozen=True)
class Totals:
    """Of the period, over everything: the report's lists end somewhere."""

    topics: int = 0
    groups: int = 0
    messages: int = 0
    acked: int = 0
    retries: int = 0
    dead: int = 0


@dataclass(frozen=True)
class DeadLetters:
    """Messages that died for one reason."""

    topic: str
    group: str
    reason: str
    count: int
    errors: tuple[tuple[str, int], ...]  # the most frequent, with how often
    samples: tuple[str, ...]  # ids of messages


@dataclass(frozen=True)
class SlowTrace:
    """A message that took long from stored to acked."""

    message_id: str
    topic: str
    group: str
    stored_at: datetime
    delivery_ms: int | None
    ack_ms: int
    attempts: int


@dataclass(frozen=True)
class Outcomes:
    """What became of the messages stored in the period, in a topic with a group; without a group nobody had them."""

    topic: str
    group: str | None
    counts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Difference:
    """Something on which tables and archive disagree."""

    problem: str
    topic: str | None
    group: str | None
    send_id: str | None
    business_id: str | None
    detail: str | None


@dataclass(frozen=True)
class Reconciled:
    """The last comparison with the outbox's tables."""

    at: datetime
    counts: tuple[tuple[str, int], ...]
    first: tuple[Difference, ...]


@dataclass(frozen=True)
class Point:
    """A value of a chart at a time; None where nothing is known."""

    at: datetime
    value: float | None


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Report:
    """Everything the report says."""

    tables: str
    made_at: datetime
    since: datetime
    until: datetime
    step: timedelta  # of the charts
    newest: datetime | None  # stored_at of the last message archived
    contents: tuple[Contents, ...] = ()
    topics: tuple[TopicFigures, ...] = ()
    groups: tuple[GroupFigures, ...] = ()
    outcomes: tuple[Outcomes, ...] = ()
    dead_letters: tuple[DeadLetters, ...] = ()
    slowest: tuple[SlowTrace, ...] = ()
    reconciled: Reconciled | None = None
    throughput: tuple[Series, ...] = ()  # messages a second
    latency: tuple[Series, ...] = ()  # p99 in ms, stored → acked
    lag: tuple[Series, ...] = ()
    trouble: tuple[Series, ...] = ()  # retries and dead letters
    totals: Totals = Totals()
    retries: tuple[RetryFigures, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()  # of dead letters, with how many
    keys: tuple[KeyFigures, ...] = ()
    hours: tuple[HourFigures, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)  # by part of the report, what gives its rows
    notes: tuple[str, ...] = field(default=())  # what is missing in it, and how to get it
