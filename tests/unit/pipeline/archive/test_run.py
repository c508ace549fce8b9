"""What a run says, what it refuses, and how a task gets past damage."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError

from dmq.errors import Damaged, InvalidSettings
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
