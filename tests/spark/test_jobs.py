"""The derived tables, each figure compared with plain Python over the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import dead_letters, rollup, trace
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.tables import DEAD_LETTER_DAILY, METRICS_1M, POSITION_DAILY, TRACE
from tests.archive_rows import MIDNIGHT, Days, archive_rows, made, table_rows
from tests.spark import plain_tables
from tests.spark.plain_tables import check_metrics
from tests.spark.quick_queries import quick

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime(2030, 2, 2, tzinfo=UTC)


@pytest.fixture(autouse=True)
def few_rows(spark: SparkSession) -> Iterator[None]:
    with quick(spark):
        yield


def context(archive: Archive, **more: object) -> JobContext:
    return JobContext(archive.uri, NOW, lateness_days=2, **more)  # type: ignore[arg-type]


def check_trace(archive: Archive, days: Days) -> None:
    found = table_rows(archive, TRACE)
    assert sorted(found, key=lambda row: (row["message_id"], row["group"] or "")) == plain_tables.trace(days)


def check_dead_letters(archive: Archive, days: Days) -> None:
    names = ("count", "top_errors", "samples")
    found = {
        (row["dt"], row["topic"], row["group"], row["reason"]): {name: row[name] for name in names}
        for row in table_rows(archive, DEAD_LETTER_DAILY)
    }
    assert found == plain_tables.dead_letters(days)
    assert len(found) > 2


def test_every_figure_is_what_plain_python_finds_and_a_second_run_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    archive, days = Archive(str(tmp_path)), made()
    archive_rows(archive, days, 1, chunk=400)
    jobs = {METRICS_1M: rollup.run, TRACE: trace.run, DEAD_LETTER_DAILY: dead_letters.run}
    for job in jobs.values():
        job(spark, archive, context(archive))
    check_metrics(table_rows(archive, METRICS_1M), days)
    check_trace(archive, days)
    check_dead_letters(archive, days)
    before = {name: archive.table(name).version() for name in (*jobs, POSITION_DAILY)}
    for job in jobs.values():
        assert not job(spark, archive, context(archive)).dts
    assert {name: archive.table(name).version() for name in before} == before
    for name in (TRACE, DEAD_LETTER_DAILY):
        rows = table_rows(archive, name)
        assert MIDNIGHT.date() in jobs[name](spark, archive, context(archive, options={"derive.all": "true"})).dts
        assert table_rows(archive, name) == rows
        assert archive.table(name).version() > before[name]


def test_a_letter_written_again_to_outlive_its_segment_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), Days()
    message = days.message("orders", 0, 0, MIDNIGHT)
    for day in range(2):
        days.dead(message, "clumsy", MIDNIGHT + timedelta(days=day), "REJECTED", "no")
    archive_rows(archive, days, 1)
    dead_letters.run(spark, archive, context(archive))
    assert [(row["dt"], row["count"]) for row in table_rows(archive, DEAD_LETTER_DAILY)] == [(MIDNIGHT.date(), 1)]


def test_what_comes_in_portions_over_midnight_ends_as_if_it_had_come_at_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Late events, lag that runs on from the day before, retries that wait over midnight."""
    archive, days = Archive(str(tmp_path)), made(seed=3)
    for version, until in enumerate([MIDNIGHT + timedelta(minutes=3), MIDNIGHT + timedelta(hours=3), NOW]):
        portion = Days(
            [row for row in days.messages if _came(row["stored_at"], version, until)],
            [row for row in days.events if _came(_stored(row), version, until)],
        )
        archive_rows(archive, portion, version)
        for job in (rollup.run, trace.run):
            job(spark, archive, context(archive))
    made_of_parts = {name: table_rows(archive, name) for name in (METRICS_1M, POSITION_DAILY)}
    rollup.run(spark, archive, context(archive, options={"derive.all": "true"}))
    assert {name: table_rows(archive, name) for name in made_of_parts} == made_of_parts
    assert archive.table(POSITION_DAILY).days() == [MIDNIGHT.date() + timedelta(days=n) for n in (-1, 0, 1)]
    check_metrics(table_rows(archive, METRICS_1M), days)
    check_trace(archive, days)


def _stored(event: dict[str, object]) -> datetime:
    """When an event was stored: with what it settles, also the row that says when it was delivered."""
    at = event["at"]
    assert isinstance(at, datetime)
    return at + timedelta(milliseconds=40) if event["outcome"] == "delivered" else at


def _came(at: datetime, version: int, until: datetime) -> bool:
    since = [datetime.min.replace(tzinfo=UTC), MIDNIGHT + timedelta(minutes=3), MIDNIGHT + timedelta(hours=3)][version]
    return since <= at < until


def test_a_late_event_is_taken_in_within_the_window_and_not_after(spark: SparkSession, tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), Days()
    message = days.message("orders", 0, 0, MIDNIGHT)
    archive_rows(archive, days, 1)
    trace.run(spark, archive, context(archive))
    assert [row["outcome"] for row in table_rows(archive, TRACE)] == ["stored"]
    for version, (late, dts, outcome) in enumerate(
        [(2, {MIDNIGHT.date()}, "failed"), (3, set[date](), "failed")], start=2
    ):
        more = Days(journal_offset=version * 10_000)
        more.settle(message, "slow", "failed" if late == 2 else "acked", MIDNIGHT + timedelta(days=late), error="no")
        archive_rows(archive, more, version)
        assert trace.run(spark, archive, context(archive)).dts == dts
        assert [row["outcome"] for row in table_rows(archive, TRACE)] == [outcome]


def test_lag_over_midnight_after_being_put_back_and_of_a_group_that_is_gone(
    spark: SparkSession, tmp_path: Path
) -> None:
    archive, days = Archive(str(tmp_path)), Days()
    minute = timedelta(minutes=1)
    messages = [days.message("orders", 0, n, MIDNIGHT - minute) for n in range(100)]
    # Settled before midnight, stored after: of the new day.
    days.settle(messages[99], "back", "acked", MIDNIGHT - timedelta(microseconds=1), dt=MIDNIGHT.date())
    days.settle(messages[9], "back", "acked", MIDNIGHT + 3 * minute)
    # A clock that was ahead takes nothing to another day either.
    days.settle(messages[0], "ahead", "acked", MIDNIGHT + 5 * minute, dt=(MIDNIGHT - minute).date())
    archive_rows(archive, days, 1)
    rollup.run(spark, archive, context(archive))
    later = [MIDNIGHT + timedelta(days=n) for n in (10, 45)]  # more comes, but nobody consumes it
    more = Days()
    for number, at in enumerate(later):
        more.message("orders", 0, 100 + number, at)
    # The topic is deleted and made again: what was left of the old one is nobody's any more.
    again = more.message("orders", 0, 0, later[0] + minute, topic_id=99, message_id="again")
    more.settle(again, "back", "acked", later[0] + 3 * minute)
    more.message("orders", 0, 1, later[0] + 4 * minute, topic_id=99, message_id="more")
    archive_rows(archive, more, 2)
    rollup.run(spark, archive, context(archive))
    ahead = [row for row in table_rows(archive, METRICS_1M) if row["group"] == "ahead" and row["messages_out"]]
    assert [row["minute"] for row in ahead] == [MIDNIGHT - minute]
    rows = [row for row in table_rows(archive, METRICS_1M) if row["group"] == "back"]
    assert {row["minute"]: (row["dt"], row["messages_out"], row["lag"]) for row in rows} == {
        MIDNIGHT: (MIDNIGHT.date(), 1, 0),
        MIDNIGHT + 3 * minute: (MIDNIGHT.date(), 1, 90),
        later[0]: (later[0].date(), 0, 91),
        later[0] + minute: (later[0].date(), 0, 0),
        later[0] + 3 * minute: (later[0].date(), 1, 0),
        later[0] + 4 * minute: (later[0].date(), 0, 1),
    }
