"""Jobs that are killed before any of their commits, on files and in an object store: nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from dmq.pipeline.archive.table_store import Archive, Table
from dmq.pipeline.jobs import dead_letters, rollup, trace
from dmq.pipeline.jobs.changes import mark_of
from dmq.pipeline.jobs.job import JobContext
from dmq.pipeline.tables import (
    CONSUME_EVENT,
    COPY,
    DEAD_LETTER_DAILY,
    DEAD_LETTER_PART,
    MESSAGE,
    METRICS_1M,
    POSITION_DAILY,
    ROLLUP_PART,
    TRACE,
)
from tests.archive_rows import MIDNIGHT, Days, archive_rows, table_rows
from tests.object_store import ObjectStore

NOW = datetime(2030, 2, 2, tzinfo=UTC)
SOURCES = {ROLLUP_PART: (MESSAGE, CONSUME_EVENT), TRACE: (MESSAGE, CONSUME_EVENT), DEAD_LETTER_PART: (COPY,)}
MADE = (METRICS_1M, POSITION_DAILY, TRACE, DEAD_LETTER_DAILY)


class Killed(Exception):
    """The job ends here."""


@pytest.fixture(params=["files", "object store"])
def new_archive(request: pytest.FixtureRequest, tmp_path: Path, object_store: ObjectStore) -> Callable[[str], Archive]:
    """Makes archives that jobs followed when they had nothing, so that they need no Spark."""

    def make(name: str) -> Archive:
        archive = Archive.create(f"{tmp_path if request.param == 'files' else object_store.bucket()}/{name}")
        for source in map(archive.table, (MESSAGE, CONSUME_EVENT, COPY)):
            source.commit([], app_id="begin", version=1)
            for derived, sources in SOURCES.items():
                if source.name in sources:
                    archive.table(derived).commit([], app_id=mark_of(source), version=source.version())
        return archive

    return make


def run(archive: Archive) -> None:
    """Run the jobs where Spark would be refused."""
    for job in (rollup.run, trace.run, dead_letters.run):
        job(MagicMock(spec=[]), archive, JobContext(archive.uri, NOW))


def two_portions() -> tuple[Days, Days]:
    """Messages that fail, and later are acked or die."""
    first, second = Days(), Days(journal_offset=100_000)
    for number in range(4):
        message = first.message("orders", 0, number, MIDNIGHT + timedelta(minutes=number))
        first.settle(message, "clumsy", "failed", MIDNIGHT + timedelta(minutes=number + 1))
        second.settle(message, "clumsy", "dead" if number % 2 else "acked", MIDNIGHT + timedelta(hours=1), attempt=2)
        if number == 1:
            first.dead(message, "clumsy", MIDNIGHT + timedelta(minutes=30), "REJECTED", "no", attempt=2)
        if number % 2:  # one of them written again, to outlive its segment
            second.dead(message, "clumsy", MIDNIGHT + timedelta(hours=1), "REJECTED", "no", attempt=2)
    return first, second


def test_jobs_that_are_killed_before_any_commit_end_as_if_they_had_not(
    new_archive: Callable[[str], Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_portions()
    whole = new_archive("whole")
    for version, portion in enumerate((first, second)):
        archive_rows(whole, portion, version)
    run(whole)
    archive = new_archive("killed")
    archive_rows(archive, first, 0)
    run(archive)
    archive_rows(archive, second, 1)
    commit, left, killed = Table._commit, 0, list[str]()

    def mortal(table: Table, *given: Any) -> bool:
        nonlocal left
        if left == 0:
            killed.append(table.name)
            raise Killed
        left -= 1
        return commit(table, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Table, "_commit", mortal)
        for commits in (0, 1, 1, 2, 1, 1, 1):
            left = commits
            with pytest.raises(Killed):
                run(archive)
    assert killed == [ROLLUP_PART, POSITION_DAILY, METRICS_1M, TRACE, DEAD_LETTER_PART, *2 * [DEAD_LETTER_DAILY]]
    run(archive)
    for name in MADE:
        assert table_rows(archive, name) == table_rows(whole, name), name
