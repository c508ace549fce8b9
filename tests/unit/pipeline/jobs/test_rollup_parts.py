"""New messages and events added to the figures that are there, without Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import duckdb
import pytest

from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import rollup
from dmq.pipeline.jobs.changes import mark_of
from dmq.pipeline.jobs.job import JobContext, JobResult
from dmq.pipeline.jobs.rollup import rounded
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, METRICS_1M, POSITION_DAILY, ROLLUP_PART
from tests.archive_rows import MIDNIGHT, Days, Row, archive_rows, made, table_rows
from tests.spark.plain_tables import check_metrics

NOW = datetime(2030, 2, 2, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An archive that was added up when it had nothing."""
    return begun(tmp_path / "archive")


def begun(path: Path) -> Archive:
    archive = Archive(str(path))
    for name in (MESSAGE, CONSUME_EVENT):
        table = archive.table(name)
        table.commit([], app_id="begin", version=1)
        archive.table(ROLLUP_PART).commit([], app_id=mark_of(table), version=table.version())
    return archive


def run(archive: Archive) -> JobResult:
    """Run the job where Spark would be refused."""
    return rollup.run(MagicMock(spec=[]), archive, JobContext(archive.uri, NOW))


def portions(days: Days, chance: random.Random, *, late: bool) -> Iterator[Days]:
    """Everything in the order of its time, some rows at a time; a settlement is not divided, and follows its message.

    Parameters:
        late: some portions of events come after all others, as those of a broker that was away.
    """
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in days.events:
        groups.setdefault((row["message_id"], row["journal_offset"]), []).append(row)
    steps = [(row["stored_at"], Days([row])) for row in days.messages]
    steps += [(max(row["at"] for row in rows), Days([], rows)) for rows in groups.values()]
    steps.sort(key=lambda step: step[0])
    later = [step for step in steps if late and step[1].events and chance.random() < 0.2]
    chance.shuffle(later)
    steps = [step for step in steps if step not in later] + later
    while steps:
        count = chance.choice((7, 40, 200))
        part, steps = [step for _, step in steps[:count]], steps[count:]
        yield Days([row for step in part for row in step.messages], [row for step in part for row in step.events])


@pytest.mark.parametrize("seed", range(2))
def test_in_whatever_portions_rows_come_the_figures_are_the_same(tmp_path: Path, seed: int) -> None:
    chance, days = random.Random(seed), made(seed=seed, count=90)
    archive, at_once = begun(tmp_path / "portions"), begun(tmp_path / "at-once")
    for version, part in enumerate(portions(days, chance, late=seed > 0)):
        archive_rows(archive, part, version)
        run(archive)
    archive_rows(at_once, days, 1)
    run(at_once)
    check_metrics(table_rows(at_once, METRICS_1M), days)
    for name in (METRICS_1M, POSITION_DAILY):
        assert table_rows(archive, name) == table_rows(at_once, name)
    versions = {name: archive.table(name).version() for name in (ROLLUP_PART, METRICS_1M, POSITION_DAILY)}
    assert not run(archive).dts  # nothing is new
    assert {name: archive.table(name).version() for name in versions} == versions


def test_two_runs_at_once_count_what_is_new_once(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    days = made(count=20)
    archive_rows(archive, days, 1)
    other = Archive(archive.uri)
    add = rollup.parts_of_news

    def beside(*given: Any) -> Any:
        monkeypatch.undo()
        run(other)
        return add(*given)

    monkeypatch.setattr(rollup, "parts_of_news", beside)
    assert not run(archive).dts  # the other one was quicker
    assert archive.table(ROLLUP_PART).rows() == other.table(ROLLUP_PART).rows() > 0
    check_metrics(table_rows(archive, METRICS_1M), days)


def test_commits_without_rows_are_not_looked_through_for_ever(archive: Archive) -> None:
    archive_rows(archive, made(count=5), 1)
    run(archive)
    part, message = archive.table(ROLLUP_PART), archive.table(MESSAGE)
    seen = part.version_of(mark_of(message))
    for number in range(30):
        message.commit([], app_id="idle", version=number)
        if number == 10:
            run(archive)
            assert part.version_of(mark_of(message)) == seen
    run(archive)
    assert part.version_of(mark_of(message)) == message.version()


def test_only_the_minutes_that_something_came_to_and_later_ones_are_written_again(archive: Archive) -> None:
    days = made(count=60)
    archive_rows(archive, days, 1)
    run(archive)
    metrics = archive.table(METRICS_1M)
    before = set(metrics.files())
    more = Days(journal_offset=1_000_000)
    at = max(row["at"] for row in days.events) + 5 * MINUTE
    more.message("orders", 0, 9999, at, message_id="new")
    archive_rows(archive, more, 2)
    assert run(archive).dts == {at.date()}
    assert before <= set(metrics.files())
    check_metrics(table_rows(archive, METRICS_1M), Days(days.messages + more.messages, days.events))


def test_a_message_that_was_replayed_or_carried_counts_where_it_was_before_the_event(archive: Archive) -> None:
    days = Days()
    message = days.message("orders", 0, 5, MIDNIGHT)
    days.settle(message, "quick", "acked", MIDNIGHT + MINUTE)
    carried = {"queue_offset": 9, "stored_at": MIDNIGHT + 3 * MINUTE, "journal_offset": 5000}
    days.messages.append(message | carried)
    days.settle(message, "slow", "acked", MIDNIGHT + 4 * MINUTE)
    for version, part in enumerate(
        (Days(days.messages[:1], days.events[:2]), Days(days.messages[1:], days.events[2:]))
    ):
        archive_rows(archive, part, version)
        run(archive)
    positions = {row["group"]: (row["position"], row["queue_end"]) for row in table_rows(archive, POSITION_DAILY)}
    assert positions == {"quick": (6, 10), "slow": (10, 10)}
    took = {row["group"]: row["latency_p50_ms"] for row in table_rows(archive, METRICS_1M) if row["messages_out"]}
    assert took == pytest.approx({"quick": 60_000, "slow": 60_000}, rel=1 / 512)


def test_what_a_later_end_says_of_a_retry_that_is_over_counts_no_more(archive: Archive) -> None:
    """A letter that was resent ends a second time."""
    days = Days()
    message = days.message("orders", 0, 0, MIDNIGHT)
    days.settle(message, "clumsy", "failed", MIDNIGHT + MINUTE)
    days.settle(message, "clumsy", "dead", MIDNIGHT + 2 * MINUTE, attempt=2)
    days.settle(message, "clumsy", "acked", MIDNIGHT + timedelta(days=1), attempt=3)
    other = days.message("orders", 0, 1, MIDNIGHT + timedelta(days=1))
    days.settle(other, "clumsy", "failed", MIDNIGHT + timedelta(days=1, minutes=1))
    archive_rows(archive, days, 1)
    run(archive)
    check_metrics(table_rows(archive, METRICS_1M), days)
    assert [row["retrying"] for row in table_rows(archive, POSITION_DAILY)] == [0, 1]


@pytest.mark.parametrize("took", [0, 1, -1, 1023, 1024, 1025, -1500, 2047, 2048, 86_400_000, 2**41, 2**50])
def test_a_latency_is_rounded_to_a_512th_at_most(took: int) -> None:
    with duckdb.connect() as engine:
        asked = engine.execute(f"SELECT {rounded('took')} FROM (SELECT CAST({took} AS BIGINT) AS took)")
        ((found,),) = asked.fetchall()
    assert found == (took if abs(took) < 1024 else pytest.approx(took, rel=1 / 1024 if abs(took) < 2**42 else 1))
