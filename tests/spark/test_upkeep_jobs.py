"""Compaction and retention of the archive: what they change, and what they must not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from dmq.errors import Damaged
from dmq.pipeline.archive.parquet import Written, write_days
from dmq.pipeline.archive.table_store import Archive, LiveFile
from dmq.pipeline.jobs import compact, frames, retain, trace
from dmq.pipeline.jobs.changes import news_of
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.lookup.lookup import Lookup
from dmq.pipeline.tables import CONSUME_EVENT, KEY_INDEX, MESSAGE, SCHEMAS, TRACE
from tests.archive_rows import MIDNIGHT, Days, archive_rows, arrow, made, table_rows
from tests.spark.quick_queries import quick
from tests.unit.pipeline.archives import commit_messages, message_row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime(2030, 2, 2, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def few_rows(spark: SparkSession) -> Iterator[None]:
    with quick(spark):
        yield


def context(archive: Archive, **options: str) -> JobContext:
    named = {name.replace("__", "."): value for name, value in options.items()}
    return JobContext(archive.uri, NOW, options=named)


def test_compaction_keeps_every_row_and_sorts_them(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    days = made(count=80)
    days.messages[0] |= {"headers": [{"key": "ü", "value": b"\x00\xff"}], "body": bytes(range(256)), "tag": "t"}
    archive_rows(archive, days, 1, chunk=7)
    before = {name: table_rows(archive, name) for name in SCHEMAS}
    counts = {name: len(archive.table(name).files()) for name in SCHEMAS}
    result = compact.run(spark, archive, context(archive, compact__files_min="2"))
    assert {name: table_rows(archive, name) for name in SCHEMAS} == before
    for name in (MESSAGE, CONSUME_EVENT):
        files = archive.table(name).live_files()
        assert len(files) < counts[name]
        assert len(files) == len({file.dt for file in files})
        assert sum(file.rows for file in files) == len(before[name])
    for uri in archive.table(MESSAGE).files():
        found = pq.read_table(uri, columns=["topic", "queue", "queue_offset"], partitioning=None).to_pylist()
        assert found == sorted(found, key=lambda row: (row["topic"], row["queue"], row["queue_offset"]))
    assert result.rows[MESSAGE] == len(days.messages)
    assert not compact.run(spark, archive, context(archive, compact__files_min="2")).rows, (
        "there is nothing left to merge"
    )


def test_statistics_of_compacted_files_still_find_rows(spark: SparkSession, tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), made(count=40)
    archive_rows(archive, days, 1, chunk=5)
    compact.run(spark, archive, context(archive))
    table = archive.table(MESSAGE)
    last = max(row["stored_at"] for row in days.messages)
    assert table.files(where={"stored_at": (last, last)})
    assert not table.files(where={"stored_at": (last + timedelta(days=1), None)})
    assert not table.files(where={"topic": ("zzz", None)})


def test_lookups_read_as_little_of_a_file_that_was_merged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(str(tmp_path))
    monkeypatch.setitem(frames.GROUP_ROWS, KEY_INDEX, 50)
    for part in range(4):
        commit_messages(archive, [message_row(number) for number in range(part * 40, part * 40 + 40)])
    compact.run(spark, archive, context(archive))
    (path,) = archive.table(KEY_INDEX).files()
    said = pq.read_metadata(path)
    assert max(said.row_group(group).num_rows for group in range(said.num_row_groups)) <= 50
    with Lookup(str(tmp_path)) as lookup:
        for number in range(0, 160, 9):
            assert [row["body"] for row in lookup.by_key(f"order-{number}")] == [b"body %d" % number]


def test_compaction_is_no_news_for_derived_tables(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive_rows(archive, made(count=40), 1, chunk=5)
    trace.run(spark, archive, context(archive))
    compact.run(spark, archive, context(archive))
    assert not trace.run(spark, archive, context(archive)).dts


def test_rows_that_come_while_files_are_merged_stay(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, days, more = Archive(str(tmp_path)), made(count=40), Days()
    archive_rows(archive, days, 1, chunk=5)
    more.message("orders", 0, 5000, MIDNIGHT - timedelta(minutes=1), message_id="late")
    expected = sorted(table_rows(archive, MESSAGE) + arrow(MESSAGE, more.messages).to_pylist(), key=repr)
    table = archive.table(MESSAGE)
    swap = table.swap

    def late(removes: list[LiveFile], adds: list[Written]) -> bool:
        if more.messages:  # the archive job commits once everything is merged, just before the swap
            archive_rows(Archive(str(tmp_path)), more, 2)
            more.messages.clear()
        return swap(removes, adds)

    monkeypatch.setattr(table, "swap", late)
    compact.run(spark, archive, context(archive, compact__files_min="2"))
    assert not more.messages
    assert table_rows(archive, MESSAGE) == expected
    assert len(table.files()) == len(table.days()) + 1


def test_files_that_come_after_the_look_are_still_new_to_derived_tables(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged with old rows, nobody could tell which of them are new, and the whole day would be made anew."""
    archive, more = Archive(str(tmp_path)), Days()
    archive_rows(archive, made(count=40), 1, chunk=5)
    trace.run(spark, archive, context(archive))
    more.message("orders", 0, 5000, MIDNIGHT - timedelta(minutes=1), message_id="late")
    look = compact.waiting_files

    def late(archive: Archive, name: str) -> frozenset[str]:
        found = look(archive, name)
        if name == MESSAGE:  # the archive job commits while what has come before is merged
            archive_rows(Archive(str(tmp_path)), more, 2)
        return found

    monkeypatch.setattr(compact, "waiting_files", late)
    compact.run(spark, archive, context(archive, compact__files_min="2"))
    news = news_of(archive.table(MESSAGE), archive.table(TRACE))
    assert (len(news.files), news.has_old) == (1, False)


def test_files_that_vanish_meanwhile_are_planned_anew(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, days = Archive(str(tmp_path)), made(count=40)
    archive_rows(archive, days, 1, chunk=5)
    table = archive.table(MESSAGE)
    others = Archive(str(tmp_path)).table(MESSAGE)
    swap = table.swap
    raced: list[LiveFile] = []

    def late(removes: list[LiveFile], adds: list[Written]) -> bool:
        if not raced:  # somebody else rewrites the first of these files just before
            raced.append(removes[0])
            rows = pq.read_table(removes[0].uri, partitioning=None)
            others.swap([removes[0]], write_days(rows, others.folder))
        return swap(removes, adds)

    monkeypatch.setattr(table, "swap", late)
    before = table_rows(archive, MESSAGE)
    compact.run(spark, archive, context(archive, compact__files_min="2"))
    assert raced
    assert table_rows(archive, MESSAGE) == before
    assert len(table.files()) == len(table.days()) + 1, "the other one's file is left for the next time"


def test_a_file_that_lost_rows_is_not_merged(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive_rows(archive, made(count=40), 1, chunk=5)
    first = archive.table(MESSAGE).files()[0]
    pq.write_table(pq.read_table(first, partitioning=None).slice(1), first)
    count = len(archive.table(MESSAGE).files())
    with pytest.raises(Damaged, match="left as they are"):
        compact.run(spark, archive, context(archive))
    assert len(archive.table(MESSAGE).files()) == count
    assert not [*Path(archive.table(MESSAGE).uri).glob("_staging/*")]


def test_old_days_are_dropped_and_only_those(spark: SparkSession, tmp_path: Path) -> None:
    archive, days = Archive(str(tmp_path)), made()
    archive_rows(archive, days, 1)
    trace.run(spark, archive, context(archive))
    result = retain.run(spark, archive, context(archive, retain__days="3"))
    kept = [date(2030, 1, 31), date(2030, 2, 1)]
    assert archive.table(MESSAGE).days() == archive.table(TRACE).days() == kept
    assert result.dts == {date(2030, 1, 30)}
    expected = [row for row in arrow(MESSAGE, days.messages).to_pylist() if row["dt"] in kept]
    assert table_rows(archive, MESSAGE) == sorted(expected, key=repr)
    assert not retain.run(spark, archive, context(archive, retain__days="3")).dts


def test_without_a_limit_nothing_is_dropped(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive_rows(archive, made(count=30), 1)
    before = archive.table(MESSAGE).version()
    retain.run(spark, archive, context(archive))
    assert archive.table(MESSAGE).version() == before


def test_only_files_that_no_version_names_are_swept_once_they_are_old(spark: SparkSession, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path))
    archive_rows(archive, made(count=30), 1)
    table = archive.table(MESSAGE)
    rows = arrow(MESSAGE, made(seed=9, count=1).messages)
    young, old = (write_days(rows, table.folder)[0].path for _ in range(2))
    day_ago = time.time() - 86400
    os.utime(f"{table.uri}/{old}", (day_ago, day_ago))
    for uri in table.files():
        os.utime(uri, (day_ago, day_ago))
    before = table_rows(archive, MESSAGE)
    retain.run(spark, archive, context(archive, retain__sweep_hours="2"))
    assert not Path(f"{table.uri}/{old}").exists()
    assert Path(f"{table.uri}/{young}").exists()
    assert table_rows(archive, MESSAGE) == before
