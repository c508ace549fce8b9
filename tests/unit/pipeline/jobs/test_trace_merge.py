"""New messages and events merged into the traces that are there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from dmq.errors import ArchiveConflict
from dmq.pipeline.archive.parquet import write_days
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import trace as trace_job
from dmq.pipeline.jobs.changes import mark_of, news_of
from dmq.pipeline.jobs.trace import merge
from dmq.pipeline.tables import CONSUME_EVENT, MESSAGE, TRACE
from dmq.records.layout import REPLAYED
from tests.archive_rows import MIDNIGHT, Days, Row, archive_rows, made, table_rows
from tests.spark import plain_tables

LATENESS = timedelta(days=3)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An archive that was derived when it had nothing."""
    archive = Archive(str(tmp_path))
    for name in (MESSAGE, CONSUME_EVENT):
        table = archive.table(name)
        table.commit([], app_id="begin", version=1)
        archive.table(TRACE).commit([], app_id=mark_of(table), version=table.version())
    return archive


def merge_news(archive: Archive) -> trace_job.Merged | None:
    trace = archive.table(TRACE)
    events = news_of(archive.table(CONSUME_EVENT), trace)
    return merge(archive, news_of(archive.table(MESSAGE), trace), events, LATENESS)


def check(archive: Archive, days: Days) -> None:
    found = table_rows(archive, TRACE)
    assert sorted(found, key=lambda row: (row["message_id"], row["group"] or "")) == plain_tables.trace(days)


def portions(days: Days, chance: random.Random) -> Iterator[Days]:
    """Everything in the order of its time, some rows at a time; a settlement is not divided."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in days.events:
        groups.setdefault((row["message_id"], row["journal_offset"]), []).append(row)
    steps = [(row["stored_at"], Days([row])) for row in days.messages]
    steps += [(max(row["at"] for row in rows), Days([], rows)) for rows in groups.values()]
    steps.sort(key=lambda step: step[0])
    while steps:
        count = chance.choice((1, 7, 40, 200))
        part, steps = [step for _, step in steps[:count]], steps[count:]
        yield Days([row for step in part for row in step.messages], [row for step in part for row in step.events])


@pytest.mark.parametrize("seed", range(3))
def test_in_whatever_portions_rows_come_the_traces_are_the_same(archive: Archive, seed: int) -> None:
    chance, days = random.Random(seed), made(seed=seed)
    for version, part in enumerate(portions(days, chance)):
        archive_rows(archive, part, version)
        assert merge_news(archive) is not None
    check(archive, days)
    version = archive.table(TRACE).version()
    for _ in range(2):  # nothing is new
        merged = merge_news(archive)
        assert merged is not None
        assert not merged.rows
    assert archive.table(TRACE).version() >= version
    check(archive, days)


@pytest.mark.parametrize("seed", range(2))
def test_much_that_is_new_is_merged_some_commits_at_a_time(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, days = random.Random(seed), made(seed=seed)
    for version, part in enumerate(portions(days, chance)):
        archive_rows(archive, part, version)
    rows_max = max(file.rows for name in (MESSAGE, CONSUME_EVENT) for file in archive.table(name).live_files()) * 2
    monkeypatch.setattr(trace_job, "NEW_ROWS_MAX", rows_max)
    news = sum(archive.table(name).rows() for name in (MESSAGE, CONSUME_EVENT))
    before = archive.table(TRACE).version()
    assert merge_news(archive) is not None
    assert 2 * news / rows_max + 2 > archive.table(TRACE).version() - before > news / rows_max > 2
    check(archive, days)
    sources = [archive.table(name) for name in (MESSAGE, CONSUME_EVENT)]
    assert [news_of(source, archive.table(TRACE)).files for source in sources] == [(), ()]


def test_a_message_with_rows_in_two_files_is_taken_out_of_both(archive: Archive) -> None:
    days = Days()
    message = days.message("orders", 0, 0, MIDNIGHT)
    for group in ("first", "second"):
        days.settle(message, group, "failed", MIDNIGHT + timedelta(seconds=1), error="no")
    archive_rows(archive, days, 1)
    merge_news(archive)
    trace = archive.table(TRACE)
    (file,) = trace.live_files()
    rows = pa.Table.from_pylist(table_rows(archive, TRACE), trace.schema)
    trace.swap([file], [written for at in (0, 1) for written in write_days(rows.slice(at, 1), trace.folder)])
    more = Days(journal_offset=10_000)
    more.settle(message, "second", "acked", MIDNIGHT + timedelta(seconds=2), attempt=2)
    archive_rows(archive, more, 2)
    merge_news(archive)
    check(archive, Days(days.messages, days.events + more.events))


def test_a_message_that_was_replayed_the_same_day_stays_one(archive: Archive) -> None:
    days = Days()
    message = days.message("orders", 0, 0, MIDNIGHT)
    archive_rows(archive, days, 1)
    merge_news(archive)
    again = message | {"flags": REPLAYED, "stored_at": MIDNIGHT + timedelta(hours=1), "journal_offset": 10_000}
    archive_rows(archive, Days([again]), 2)
    merge_news(archive)
    check(archive, days)


def test_days_are_left_to_spark_where_there_is_too_much_or_no_telling(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_rows(archive, made(count=20), 1, chunk=5)
    monkeypatch.setattr(trace_job, "NEW_ROWS_MAX", 4)
    assert merge_news(archive) is None
    monkeypatch.undo()
    message = archive.table(MESSAGE)
    day = message.days()[0]
    old = message.live_files(day)
    rows = pa.Table.from_pylist([row for row in table_rows(archive, MESSAGE) if row["dt"] == day], message.schema)
    message.swap(old, write_days(rows, message.folder))
    assert merge_news(archive) is None  # merged files have old rows and new ones


def test_a_table_that_changed_meanwhile_is_not_edited(archive: Archive) -> None:
    days = made(count=5)
    archive_rows(archive, days, 1)
    trace, event = archive.table(TRACE), archive.table(CONSUME_EVENT)
    events = news_of(event, trace)
    messages = news_of(archive.table(MESSAGE), trace)
    assert merge(archive, messages, events, LATENESS) is not None
    with pytest.raises(ArchiveConflict, match="changed meanwhile"):
        trace.edit([], [], {mark_of(event): events.version - 1})
    check(archive, days)
