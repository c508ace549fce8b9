"""What a run says, what it refuses, and how a task gets past damage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from py4j.protocol import Py4JNetworkError

from dmq.errors import Damaged, InvalidSettings, NotConnected
from dmq.model import Message
from dmq.pipeline.archive import run as running
from dmq.pipeline.archive.run import Run, RunOptions, progress_line, result_lines
from dmq.pipeline.decode.journal_reader import Fetched, unit_starts
from dmq.pipeline.decode.units import decode_fetched
from dmq.pipeline.jobs.job import JobResult, Progress
from tests.unit.pipeline.journals import batch_of, journal, new_store


def test_a_line_of_progress_has_rows_rate_and_what_is_left() -> None:
    progress = Progress("archive", "archived", 20_000, 300, 1000, "bytes")
    assert progress_line(progress, 4.0) == "archive: archived, 20,000 rows, 5,000 rows/s, 300 of 1,000 bytes, 700 left"
    assert progress_line(Progress("trace", "begins"), 0.0) == "trace: begins"


def test_the_summary_says_what_went_where() -> None:
    results = [JobResult("archive", {"message": 1200, "copy": 0}, seconds=2.5, notes=("a note",)), JobResult("trace")]
    assert result_lines(results) == [
        "archive: 1,200 into message in 2.5 s",
        "  a note",
        "trace: nothing new in 0.0 s",
    ]


def test_an_unknown_job_and_a_missing_broker_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="there is no job 'bake': there are archive, "):
        Run(RunOptions(str(tmp_path), jobs=("bake",)))
    with pytest.raises(InvalidSettings, match="--broker"):
        Run(RunOptions(str(tmp_path)))
    Run(RunOptions(str(tmp_path), jobs=("compact",)))


class Ended:
    """A session whose JVM has ended."""

    def stop(self) -> None:
        raise ConnectionRefusedError


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_ends_well_if_java_ended_with_it_and_not_if_java_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    run, over = Run(RunOptions(str(tmp_path), jobs=("compact",))), threading.Event()

    def work(spark: object, over: threading.Event, results: dict[str, JobResult]) -> None:
        results["compact"] = JobResult("compact")
        if is_over:
            over.set()
        raise Py4JNetworkError("Answer from Java side is empty")

    monkeypatch.setattr(running, "spark_session", lambda *_, **__: Ended())
    monkeypatch.setattr(run, "_run", work)
    with contextlib.nullcontext() if is_over else pytest.raises(Py4JNetworkError):
        assert run.run(over) == [JobResult("compact")]


def continuous_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    archive_job: Callable[[str], JobResult],
    compact_job: Callable[[], JobResult],
) -> Run:
    """A run of two jobs over two journals that never pauses."""

    class FakeJob:
        def __init__(self, spark: object, archive: object, servers: str, *_: object, **__: object) -> None:
            self._servers = servers

        def run(self, is_over: object) -> JobResult:
            return archive_job(self._servers)

    monkeypatch.setattr(running, "ArchiveJob", FakeJob)
    monkeypatch.setattr(running, "_jobs", lambda: {"compact": lambda *_: compact_job()})
    monkeypatch.setattr(running, "spark_session", lambda *_, **__: MagicMock())
    monkeypatch.setattr(running, "shard_servers", lambda broker, *_, **__: {1: broker})
    return Run(RunOptions(str(tmp_path), ("one", "two"), is_continuous=True, every_seconds=0.0, derive_seconds=0.0))


def test_archiving_goes_on_while_other_tables_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, begun, enough = threading.Event(), threading.Event(), threading.Event()
    archived: list[str] = []

    def archive_job(servers: str) -> JobResult:
        if begun.is_set():
            archived.append(servers)
            if len(archived) >= 10:
                enough.set()
        return JobResult("archive", {"message": 1})

    def compact_job() -> JobResult:
        begun.set()
        assert enough.wait(30), "nothing was archived meanwhile"
        over.set()
        return JobResult("compact", {"message": 5})

    results = continuous_run(tmp_path, monkeypatch, archive_job, compact_job).run(over)
    assert {result.job: dict(result.rows) for result in results}["compact"] == {"message": 5}
    assert {"one", "two"} == set(archived)


def test_journals_are_archived_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, both = threading.Event(), threading.Barrier(2, timeout=30)

    def archive_job(servers: str) -> JobResult:
        both.wait()  # each waits for the other
        over.set()
        return JobResult("archive", {"message": 1})

    results = continuous_run(tmp_path, monkeypatch, archive_job, lambda: JobResult("compact")).run(over)
    assert dict(results[0].rows) == {"message": 2}


def test_a_journal_that_fails_ends_the_run_and_the_job_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    jobs = 0

    def archive_job(servers: str) -> JobResult:
        if servers == "two" and begun.is_set():
            raise NotConnected("it is away")
        return JobResult("archive", {"message": 1})

    def compact_job() -> JobResult:
        nonlocal jobs
        jobs += 1
        begun.set()
        return JobResult("compact")

    with pytest.raises(NotConnected, match="it is away"):
        continuous_run(tmp_path, monkeypatch, archive_job, compact_job).run(threading.Event())
    assert jobs >= 1


def test_a_job_that_fails_beside_the_archive_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compact_job() -> JobResult:
        raise InvalidSettings("no such thing")

    with pytest.raises(InvalidSettings, match="no such thing"):
        continuous_run(tmp_path, monkeypatch, lambda _: JobResult("archive"), compact_job).run(threading.Event())


def test_a_damaged_unit_is_passed_over_and_said() -> None:
    with new_store("orders") as store:
        for number in range(3):
            store.append([batch_of([Message(b"body %d" % number)], first_sequence=number)])
        body = bytearray(journal(store))
        starts = [*unit_starts(body, store.queries.start)]
        start, end = starts[-2]
        body[end - store.queries.start - 3] ^= 0xFF
        fetched = Fetched(
            store.queries.start,
            store.queries.visible,
            store.queries.start,
            store.queries.visible,
            store.queries.journal_id,
            memoryview(body),
        )
        damaged: list[Damaged] = []
        parts = [*decode_fetched(fetched, damaged.append, columns=("body",))]
    assert [(error.detail["start"], error.detail["end"]) for error in damaged] == [(start, end)]
    assert [len(part) for part in parts] == [1, 1]
