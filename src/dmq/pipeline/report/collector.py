"""Collecting a report's figures from the tables.

What always holds: nothing is changed, no Spark is started; a table that does not exist leaves its part of the report
empty, with a note that says which job makes it; what is shown is bounded, however large the archive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple

from dmq.errors import InvalidSettings
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs.reconcile import APP_ID
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.report import queries
from dmq.pipeline.report.model import (
    Contents,
    DeadLetters,
    Difference,
    GroupFigures,
    HourFigures,
    KeyFigures,
    Outcomes,
    Point,
    Reconciled,
    Report,
    RetryFigures,
    Series,
    SlowTrace,
    TopicFigures,
    Totals,
)
from dmq.pipeline.report.queries import Question, command
from dmq.pipeline.tables import (
    CONSUME_EVENT,
    DEAD_LETTER_DAILY,
    MESSAGE,
    METRICS_1M,
    RECONCILE_DIFF,
    SCHEMAS,
    TRACE,
)

__all__ = ["collect"]

_MEMORY_BYTES: Final = 2 << 30
_ROWS_MAX: Final = 50  # of a list
_SHORT: Final = 10
_COUNTED_MAX: Final = 2_000_000  # messages whose keys are counted; of more, a sample finds the frequent ones
_LINES_MAX: Final = 6  # of a chart
_STEPS: Final = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400]
_POINTS_MAX: Final = 150
_DEFAULT: Final = timedelta(hours=24)
_LEAST: Final = timedelta(minutes=10)
_MAKERS: Final = {METRICS_1M: "rollup", TRACE: "trace", DEAD_LETTER_DAILY: "dead-letters"}
Row = dict[str, Any]


def collect(tables: str, now: datetime, since: datetime | None = None, until: datetime | None = None) -> Report:
    """The report on an archive.

    Parameters:
        since, until: the period; without them the last 24 hours that the archive has, or less if it has less.

    Raises:
        StorageError: there is no archive, or its store does not answer.
        InvalidSettings: the period ends before it begins.
    """
    archive = Archive.open(tables)
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        oldest, newest = _ends(archive, engine)
        since, until = _period(oldest or now, newest or now, since, until)
        span = _Span(since, until, _step(until - since))
        messages = _show(archive, engine, span)
        ask = _Asker(archive.uri, engine, span)
        steps = ask(queries.THROUGHPUT)
        return Report(
            archive.uri,
            now,
            since,
            until,
            step=span.step,
            newest=newest,
            contents=tuple(_contents(archive, name) for name in SCHEMAS),
            totals=Totals(**ask(queries.TOTALS)[0]),
            topics=tuple(TopicFigures(**row | {"apps": tuple(row["apps"] or ())}) for row in ask(queries.TOPICS)),
            groups=tuple(GroupFigures(**row) for row in ask(queries.GROUPS)),
            outcomes=_outcomes(ask(queries.OUTCOMES)),
            dead_letters=tuple(map(_letters, ask(queries.DEAD_LETTERS))),
            slowest=tuple(SlowTrace(**row) for row in ask(queries.SLOWEST, limit=_SHORT)),
            reconciled=_reconciled(archive, ask),
            throughput=_throughput(steps, span),
            latency=_lines(ask(queries.LATENCY, limit=_LINES_MAX), span),
            lag=_lines(ask(queries.LAG, limit=_LINES_MAX), span, carry=True),
            trouble=_trouble(steps, span),
            retries=tuple(RetryFigures(**row) for row in ask(queries.RETRIES, limit=_SHORT)),
            reasons=tuple((row["reason"] or "", row["count"]) for row in ask(queries.REASONS, limit=_SHORT)),
            keys=_keys(ask, messages),
            hours=tuple(HourFigures(**row) for row in ask(queries.HOURS)),
            commands=ask.commands,
            notes=_notes(archive),
        )


class _Span(NamedTuple):
    """The period, and the step of its charts."""

    since: datetime
    until: datetime
    step: timedelta


class _Asker:
    """Asks questions about a period, and keeps the commands that ask the same."""

    def __init__(self, tables: str, engine: Engine, span: _Span) -> None:
        self._tables = tables
        self._engine = engine
        self._span = span
        self.commands: dict[str, str] = {}

    def __call__(self, question: Question, *, sql: str = "", limit: int = _ROWS_MAX, **more: Any) -> list[Row]:
        """The rows; by another SQL, if that gives the same rows for less."""
        since, until, step = self._span
        values = {"since": since, "until": until, "step": step.total_seconds(), "limit": limit} | more
        self.commands[question.name] = command(self._tables, question.sql, values)
        asked = sql or question.sql
        wanted = {name: value for name, value in values.items() if f"${name}" in asked}
        found: list[Row] = self._engine.rows(asked, wanted).to_pylist()
        return found


def _show(archive: Archive, engine: Engine, span: _Span) -> int:
    """Make the tables visible, as far as the period needs them; returns how many messages that may be."""
    first, last = span.since.date(), span.until.date()
    for name in (METRICS_1M, TRACE, DEAD_LETTER_DAILY, RECONCILE_DIFF):
        days = [dt for dt in archive.table(name).days() if name == RECONCILE_DIFF or first <= dt <= last]
        engine.show(name, archive.table(name).files(days), SCHEMAS[name])
    message = archive.table(MESSAGE)
    days = [dt for dt in message.days() if first <= dt <= last]
    files = message.live_files(days, {"stored_at": (span.since, span.until)})
    engine.show(MESSAGE, [file.uri for file in files], SCHEMAS[MESSAGE])
    return sum(file.rows for file in files)


# --- the period -------------------------------------------------------------------------------------------------------


def _ends(archive: Archive, engine: Engine) -> tuple[datetime | None, datetime | None]:
    """When the first and the last message that are archived were stored."""
    table = archive.table(MESSAGE)
    days = table.days()
    if not days:
        return None, None
    engine.show(MESSAGE, table.files([days[0], days[-1]]), SCHEMAS[MESSAGE])
    query = "SELECT min(stored_at) AS oldest, max(stored_at) AS newest FROM message"
    found: Row = engine.rows(query, {}).to_pylist()[0]
    return found["oldest"], found["newest"]


def _period(
    oldest: datetime, newest: datetime, since: datetime | None, until: datetime | None
) -> tuple[datetime, datetime]:
    # A whole minute more, so that what is newest is in it.
    end = until or max(newest, since or newest).replace(second=0, microsecond=0) + timedelta(minutes=1)
    # An archive that has just begun would be a needle at the end of an empty day.
    start = since or max(end - _DEFAULT, min(oldest, end - _LEAST))
    start, end = start.astimezone(UTC), end.astimezone(UTC)
    if start >= end:
        raise InvalidSettings(f"a report needs a period: {start.isoformat()} is not before {end.isoformat()}")
    return start.replace(second=0, microsecond=0), end


def _step(length: timedelta) -> timedelta:
    """The finest step of the charts that does not draw too many points."""
    for seconds in _STEPS:
        if length.total_seconds() / seconds <= _POINTS_MAX:
            return timedelta(seconds=seconds)
    return timedelta(days=-(-length.days // _POINTS_MAX))


# --- the parts --------------------------------------------------------------------------------------------------------


def _contents(archive: Archive, name: str) -> Contents:
    files = archive.table(name).live_files()
    days: list[date] = sorted({file.dt for file in files})
    size = sum(file.bytes for file in files)
    first, last = (days[0], days[-1]) if days else (None, None)
    return Contents(name, sum(file.rows for file in files), size, len(files), first=first, last=last)


def _outcomes(rows: Iterable[Row]) -> tuple[Outcomes, ...]:
    found: dict[tuple[str, str | None], list[tuple[str, int]]] = defaultdict(list)
    for row in rows:
        found[row["topic"], row["group"]].append((row["outcome"], row["count"]))
    return tuple(Outcomes(topic, group, tuple(counts)) for (topic, group), counts in [*found.items()][:_ROWS_MAX])


def _letters(row: Row) -> DeadLetters:
    errors = tuple((one["error"], one["count"]) for one in row["errors"] or ())
    return DeadLetters(
        row["topic"] or "",
        row["group"] or "",
        row["reason"] or "",
        row["count"],
        errors=errors,
        samples=tuple(row["samples"] or ()),
    )


def _reconciled(archive: Archive, ask: _Asker) -> Reconciled | None:
    last_ms = archive.table(RECONCILE_DIFF).version_of(APP_ID)
    if last_ms is None:
        return None
    at = datetime.fromtimestamp(last_ms / 1000, UTC)
    rows = ask(queries.DIFFERENCES, limit=5, at=at)
    counts = {row["problem"]: row.pop("count") for row in rows}
    return Reconciled(at, tuple(counts.items()), tuple(Difference(**row) for row in rows))


def _keys(ask: _Asker, messages: int) -> tuple[KeyFigures, ...]:
    percent = 100 * _COUNTED_MAX // messages if messages > _COUNTED_MAX else 100
    sql = "" if percent == 100 else queries.SAMPLED_KEYS.format(percent=max(1, percent))
    return tuple(KeyFigures(**row) for row in ask(queries.KEYS, sql=sql, limit=_SHORT))


def _notes(archive: Archive) -> tuple[str, ...]:
    notes = []
    for name, job in _MAKERS.items():
        source = archive.table(MESSAGE if job != "dead-letters" else CONSUME_EVENT)
        if not archive.table(name).exists() and source.exists():
            notes.append(f"the table {name} does not exist yet: `dmq archive run --job {job}` makes it")
    return tuple(notes)


# --- lines of charts --------------------------------------------------------------------------------------------------


def _throughput(steps: list[Row], span: _Span) -> tuple[Series, ...]:
    """Messages a second, in and out, over all topics."""
    seconds = span.step.total_seconds()
    columns = (("in", "messages_in"), ("out", "messages_out")) if steps else ()
    return tuple(
        Series(name, _filled({row["starts_at"]: row[column] / seconds for row in steps}, span, missing=0.0))
        for name, column in columns
    )


def _trouble(steps: list[Row], span: _Span) -> tuple[Series, ...]:
    return tuple(
        Series(column, _filled({row["starts_at"]: row[column] for row in steps}, span, missing=0.0))
        for column in ("retries", "dead")
        if any(row[column] for row in steps)
    )


def _lines(rows: list[Row], span: _Span, *, carry: bool = False) -> tuple[Series, ...]:
    """A line for each topic and group."""
    values: dict[str, dict[datetime, float]] = defaultdict(dict)
    for row in rows:
        values[f"{row['group']} of {row['topic']}"][row["starts_at"]] = row["value"]
    return tuple(Series(name, _filled(found, span, missing=None, carry=carry)) for name, found in values.items())


def _filled(
    values: Mapping[datetime, float], span: _Span, missing: float | None, *, carry: bool = False
) -> tuple[Point, ...]:
    """A point for every step; with `carry` the last value holds on."""
    points: list[Point] = []
    at, last = span.since, missing
    while at < span.until:
        value = values.get(at, last if carry else missing)
        points.append(Point(at, value))
        last = value
        at += span.step
    return tuple(points)
