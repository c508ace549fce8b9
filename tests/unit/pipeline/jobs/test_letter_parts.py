"""New dead letters added to the counts that are there, without Spark."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs import dead_letters
from dmq.pipeline.jobs.changes import mark_of
from dmq.pipeline.jobs.dead_letters import letters_of_news
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.tables import COPY, DEAD_LETTER_DAILY, DEAD_LETTER_PART
from tests.archive_rows import MIDNIGHT, Days, archive_rows, made, table_rows
from tests.spark import plain_tables

NOW = datetime(2030, 2, 2, tzinfo=UTC)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """An archive that was counted when it had nothing."""
    archive = Archive(str(tmp_path))
    copy = archive.table(COPY)
    copy.commit([], app_id="begin", version=1)
    archive.table(DEAD_LETTER_PART).commit([], app_id=mark_of(copy), version=copy.version())
    return archive


def run(archive: Archive) -> None:
    """Run the job where Spark would be refused."""
    dead_letters.run(MagicMock(spec=[]), archive, JobContext(archive.uri, NOW))


@pytest.mark.parametrize("seed", range(2))
def test_in_whatever_portions_letters_come_the_counts_are_the_same(archive: Archive, seed: int) -> None:
    days, chance = made(seed=seed), random.Random(seed)
    letters = sorted(days.copies, key=lambda row: row["stored_at"])
    again = [row | {"journal_offset": 10**6 + number} for number, row in enumerate(chance.sample(letters, 5))]
    version = 0
    while letters:
        count = chance.choice((1, 3, 9))
        version += 1
        archive_rows(archive, Days(copies=letters[:count]), version)
        letters = letters[count:]
        run(archive)
    # Written again, to outlive their segments: they are no new ones.
    archive_rows(archive, Days(copies=[row | {"stored_at": NOW, "dt": NOW.date()} for row in again]), version + 1)
    run(archive)
    run(archive)
    names = ("count", "top_errors", "samples")
    found = {
        (row["dt"], row["topic"], row["group"], row["reason"]): {name: row[name] for name in names}
        for row in table_rows(archive, DEAD_LETTER_DAILY)
    }
    assert found == plain_tables.dead_letters(days)
    assert len(found) > 2


def test_a_letter_that_came_before_one_that_was_counted_is_left_to_spark(archive: Archive) -> None:
    days = Days()
    message = days.message("orders", 0, 0, MIDNIGHT)
    later = days.dead(message, "clumsy", MIDNIGHT + timedelta(days=1), "REJECTED", "no")
    archive_rows(archive, Days(copies=[later]), 1)
    run(archive)
    copy = archive.table(COPY)
    known = {file.path for file in copy.live_files()}
    archive_rows(archive, Days(copies=[later | {"stored_at": MIDNIGHT, "dt": MIDNIGHT.date()}]), 2)
    new = [file for file in copy.live_files() if file.path not in known]
    assert letters_of_news(copy, new, timedelta(days=3)) is None
    assert letters_of_news(copy, new, timedelta(days=0)) is not None
