"""Collecting a report's figures from the tables.

What always holds: nothing is changed, no Spark is started; a table that is not there leaves its part of the report
empty, with a note that says which job makes it; what is shown is bounded, however large the archive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

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
    Outcomes,
    Point,
    Reconciled,
    Report,
    Series,
    SlowTrace,
    TopicFigures,
)
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
_SLOWEST: Final = 10
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
        StorageError: there is no archive.
        InvalidSettings: the period ends before it begins.
        Unsupported: the archive lies in an object store.
    """
    archive = Archive.open(tables)
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        oldest, newest = _ends(archive, engine)
        since, until = _period(oldest or now, newest or now, since, until)
        step = _step(until - since)
        for name in (METRICS_1M, TRACE, DEAD_LETTER_DAILY, RECONCILE_DIFF):
            days = [
                dt for dt in archive.table(name).days() if name == RECONCILE_DIFF or since.date() <= dt <= until.date()
            ]
            engine.show(name, archive.table(name).files(days), SCHEMAS[name])
        ask = _asker(engine, since, until)
        series = ask(queries.SERIES, step=step.total_seconds())
        return Report(
            archive.uri,
            now,
            since,
            until,
            step=step,
            newest=newest,
            contents=tuple(_contents(archive, name) for name in SCHEMAS),
            topics=tuple(TopicFigures(**row | {"apps": tuple(row["apps"] or ())}) for row in ask(queries.TOPICS)),
            groups=tuple(GroupFigures(**row) for row in ask(queries.GROUPS)),
            outcomes=_outcomes(ask(queries.OUTCOMES)),
            dead_letters=tuple(map(_letters, ask(queries.DEAD_LETTERS))),
            slowest=tuple(SlowTrace(**row) for row in ask(queries.SLOWEST, limit=_SLOWEST)),
            reconciled=_reconciled(archive, ask),
            throughput=_throughput(series, since, until, step),
            latency=_lines(series, "p99_ms", since, until, step=step),
            lag=_lines(series, "lag", since, until, step=step, carry=True),
            trouble=_trouble(series, since, until, step),
            notes=_notes(archive),
        )


def _asker(engine: Engine, since: datetime, until: datetime) -> Callable[..., list[Row]]:
    def ask(query: str, **more: Any) -> list[Row]:
        given: dict[str, Any] = {"since": since, "until": until, "limit": _ROWS_MAX} | more
        wanted = {name: value for name, value in given.items() if f"${name}" in query}
        found: list[Row] = engine.rows(query, wanted).to_pylist()
        return found

    return ask


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


def _reconciled(archive: Archive, ask: Callable[..., list[Row]]) -> Reconciled | None:
    last_ms = archive.table(RECONCILE_DIFF).version_of(APP_ID)
    if last_ms is None:
        return None
    at = datetime.fromtimestamp(last_ms / 1000, UTC)
    rows = ask(queries.DIFFERENCES, at=at, limit=5)
    counts = {row["problem"]: row.pop("count") for row in rows}
    return Reconciled(at, tuple(counts.items()), tuple(Difference(**row) for row in rows))


def _notes(archive: Archive) -> tuple[str, ...]:
    notes = []
    for name, job in _MAKERS.items():
        source = archive.table(MESSAGE if job != "dead-letters" else CONSUME_EVENT)
        if not archive.table(name).exists() and source.exists():
            notes.append(f"the table {name} is not there yet: `dmq archive run --job {job}` makes it")
    return tuple(notes)


# --- lines of charts --------------------------------------------------------------------------------------------------


def _throughput(series: list[Row], since: datetime, until: datetime, step: timedelta) -> tuple[Series, ...]:
    """Messages a second, in and out, over all topics."""
    seconds = step.total_seconds()
    found = []
    for name, column in (("in", "messages_in"), ("out", "messages_out")):
        values: dict[datetime, float] = defaultdict(float)
        for row in series:
            values[row["starts_at"]] += (row[column] or 0.0) / seconds
        found.append(Series(name, _filled(values, since, until, step, missing=0.0)))
    return tuple(found) if series else ()


def _trouble(series: list[Row], since: datetime, until: datetime, step: timedelta) -> tuple[Series, ...]:
    found = []
    for column in ("retries", "dead"):
        values: dict[datetime, float] = defaultdict(float)
        for row in series:
            values[row["starts_at"]] += row[column] or 0.0
        if any(values.values()):
            found.append(Series(column, _filled(values, since, until, step, missing=0.0)))
    return tuple(found)


def _lines(
    series: list[Row], column: str, since: datetime, until: datetime, step: timedelta, *, carry: bool = False
) -> tuple[Series, ...]:
    """A line for each topic and group, those with the highest values."""
    values: dict[str, dict[datetime, float]] = defaultdict(dict)
    for row in series:
        if row["group"] is not None and row[column] is not None:
            values[f"{row['group']} of {row['topic']}"][row["starts_at"]] = row[column]
    chosen = sorted(values, key=lambda name: (-max(values[name].values()), name))[:_LINES_MAX]
    return tuple(Series(name, _filled(values[name], since, until, step, missing=None, carry=carry)) for name in chosen)


def _filled(
    values: Mapping[datetime, float],
    since: datetime,
    until: datetime,
    step: timedelta,
    missing: float | None,
    *,
    carry: bool = False,
) -> tuple[Point, ...]:
    """A point for every step; with `carry` the last value holds on."""
    points: list[Point] = []
    at, last = since, missing
    while at < until:
        value = values.get(at, last if carry else missing)
        points.append(Point(at, value))
        last = value
        at += step
    return tuple(points)
