"""The archive job, compared with the producers' own log: nothing lost, nothing twice, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import dmq
from dmq.errors import ArchiveConflict, OffsetGone, OutOfRetries, StorageError
from dmq.pipeline.archive import job as job_module
from dmq.pipeline.archive import settlement_join
from dmq.pipeline.archive.job import TABLES, ArchiveJob, ArchiveOptions, Extraction, app_id_of
from dmq.pipeline.archive.run import Run, RunOptions
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs.job import Progress
from dmq.pipeline.spark_session import task_errors
from dmq.pipeline.tables import COPY, MESSAGE
from dmq.testing.processes import BrokerProcess, free_port
from tests.object_store import ObjectStore
from tests.patience import eventually
from tests.spark.producer_logs import Sent, check_archive, consume_all, outcomes, rows_of, send_logged
from tests.spark.python_workers import kill_workers

# After each of these the job is torn down, once.
POINTS = (
    "extracted",
    "committed message",
    "committed copy",
    "committed key_index",
    "resolved",
    "committed consume_event",
)


class Killed(BaseException):
    """What nobody catches."""


def killing(point: str) -> Callable[[str], None]:
    def step(name: str) -> None:
        if name == point:
            raise Killed(point)

    return step


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as started:
        yield started


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive.create(str(tmp_path / "archive"))


@pytest.mark.parametrize(
    ("small", "piece"),
    [(0, 250_000), (250_000, 250_000), (250_000, 50)],
    ids=["joined by tasks", "joined by the driver", "joined in pieces"],
)
def test_everything_sent_is_archived_once_with_what_became_of_it(
    spark: SparkSession,
    broker: BrokerProcess,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    small: int,
    piece: int,
) -> None:
    monkeypatch.setattr(settlement_join, "SMALL", small)
    monkeypatch.setattr(settlement_join, "PIECE", piece)
    seen: list[Progress] = []
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=3)
        log = send_logged(client, "orders", 600, seed=1)
        failed = consume_all(client, "orders", "billing", 600, fail_every=50)
        with client.producer() as producer:
            later = producer.send("orders", b"later", delay=3600.0)
    job = ArchiveJob(spark, archive, broker.url, progress=seen.append)
    result = job.run()
    check_archive(archive, log)
    assert failed > 5
    assert outcomes(archive) == {
        ("billing", "delivered", 1): 600,
        ("billing", "failed", 1): failed,
        ("billing", "acked", 1): 600 - failed,
        ("billing", "delivered", 2): failed,
        ("billing", "acked", 2): failed,
    }
    copies = rows_of(archive, COPY).to_pylist()
    waiting = [row for row in copies if row["topic"] == "%SCHEDULE%" and row["group"] is None]
    assert [(row["message_id"], row["origin_topic"]) for row in waiting] == [(str(later.id), "orders")]
    assert {row["group"] for row in copies if row["topic"].startswith("%RETRY%")} == {"billing"}
    assert result.rows[MESSAGE] == 600
    assert (seen[-1].done, seen[-1].rows) == (seen[-1].total, sum(result.rows.values()))
    # The broker knows, and a run that finds nothing new changes nothing.
    versions = [archive.table(name).version() for name in TABLES]
    with dmq.connect(broker.url, app="shop") as client:
        told = client.admin.archived()
        assert told.archived == job.archived_to(told.journal_id) > 0
    assert ArchiveJob(spark, archive, broker.url).run().rows == {}
    assert [archive.table(name).version() for name in TABLES] == versions


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_torn_down_anywhere_is_made_good_by_the_next(
    spark: SparkSession, broker: BrokerProcess, archive: Archive, point: str
) -> None:
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = send_logged(client, "orders", 100, seed=1)
        consume_all(client, "orders", "billing", 100)
        with pytest.raises(Killed):
            ArchiveJob(spark, archive, broker.url, step=killing(point)).run()
        log += send_logged(client, "orders", 50, seed=2)
    ArchiveJob(spark, archive, broker.url).run()
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): 100, ("billing", "acked", 1): 100}
    with dmq.connect(broker.url, app="shop") as client:
        told = client.admin.archived()
    assert {archive.table(name).version_of(app_id_of(told.journal_id)) for name in TABLES} == {told.archived}


def test_many_small_batches_have_the_same_rows_as_one(
    spark: SparkSession, broker: BrokerProcess, archive: Archive
) -> None:
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = send_logged(client, "orders", 300, seed=1)
        consume_all(client, "orders", "billing", 300)
    # Batches that end in the middle of units, and one whose settlements are of messages of an earlier one.
    ArchiveJob(spark, archive, broker.url, ArchiveOptions(batch_bytes=70_001)).run()
    assert archive.table(MESSAGE).version() > 3
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): 300, ("billing", "acked", 1): 300}


def test_the_next_batch_is_extracted_while_the_last_is_committed_and_thrown_away_if_that_fails(
    spark: SparkSession, broker: BrokerProcess, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    seen: list[tuple[str, int]] = []  # steps, and how many extractions had begun by then

    class Counted(Extraction):
        def __init__(self, *given: Any, **more: Any) -> None:
            begun.append(len(begun))
            super().__init__(*given, **more)

    def step(name: str) -> None:
        seen.append((name, len(begun)))
        if seen.count((name, 2)) and name == "committed copy":
            raise Killed(name)

    monkeypatch.setattr(job_module, "Extraction", Counted)
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=3)
        log = send_logged(client, "orders", 600, seed=1)
        consume_all(client, "orders", "billing", 600)
    options = ArchiveOptions(batch_bytes=100_000)
    with pytest.raises(Killed):
        ArchiveJob(spark, archive, broker.url, options, step=step).run()
    assert ("extracted", 1) in seen
    assert ("committed message", 2) in seen  # the second batch had begun before the first was committed
    staging = Path(archive.uri) / "_staging"
    assert not staging.exists() or not list(staging.iterdir())
    ArchiveJob(spark, archive, broker.url, options).run()
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): 600, ("billing", "acked", 1): 600}


def test_of_two_runs_at_once_one_is_refused_and_nothing_is_there_twice(
    spark: SparkSession, broker: BrokerProcess, archive: Archive
) -> None:
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = send_logged(client, "orders", 100, seed=1)

        def another(name: str) -> None:
            if name == "extracted":
                log.extend(send_logged(client, "orders", 100, seed=2))
                ArchiveJob(spark, Archive(archive.uri), broker.url).run()

        with pytest.raises(ArchiveConflict, match="one run at a time"):
            ArchiveJob(spark, archive, broker.url, step=another).run()
    check_archive(archive, log)


def test_a_topic_that_appears_during_a_run_is_archived_by_the_next_batch(
    spark: SparkSession, broker: BrokerProcess, archive: Archive
) -> None:
    log: list[Sent] = []
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        log += send_logged(client, "orders", 50, seed=1)

        def appear(name: str) -> None:
            if name == "extracted" and not client.admin.topics("new"):
                client.admin.create_topic("new", queues=1)
                log.extend(send_logged(client, "new", 50, seed=2))

        ArchiveJob(spark, archive, broker.url, step=appear).run()
        assert {row["topic"] for row in rows_of(archive, MESSAGE).to_pylist()} == {"orders"}
        ArchiveJob(spark, archive, broker.url).run()
    check_archive(archive, log)


def test_a_broker_that_restarts_during_a_run_is_waited_for(
    spark: SparkSession, tmp_path: Path, archive: Archive
) -> None:
    port = ("--port", str(free_port()))
    with BrokerProcess(tmp_path / "data", port) as broker:
        with dmq.connect(broker.url, app="shop") as client:
            client.admin.create_topic("orders", queues=1)
            log = send_logged(client, "orders", 100, seed=1)
        starting: list[threading.Thread] = []

        def restart(name: str) -> None:
            if name == "extracted" and not starting:
                broker.kill()
                starting.append(threading.Thread(target=broker.start))
                starting[0].start()

        ArchiveJob(spark, archive, broker.url, step=restart).run()
        starting[0].join()
        ArchiveJob(spark, archive, broker.url).run()
        check_archive(archive, log)


def test_what_retention_took_first_is_said_and_may_be_accepted(
    spark: SparkSession, tmp_path: Path, archive: Archive
) -> None:
    sizes = {"body_bytes_max": "64KiB", "unit_bytes_max": "256KiB", "segment_bytes": "1MiB", "retention_bytes": "1MiB"}
    small = [word for name, size in sizes.items() for word in ("--set", f"store.{name}={size}")]
    with BrokerProcess(tmp_path / "data", small) as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        send_logged(client, "orders", 100, seed=1)
        ArchiveJob(spark, archive, broker.url).run()
        report = client.admin.archived()
        number = 2
        while client.admin.archived().first <= report.archived:
            send_logged(client, "orders", 500, seed=number)
            number += 1
        with pytest.raises(OffsetGone, match="retention took what lay between"):
            ArchiveJob(spark, archive, broker.url).run()
        result = ArchiveJob(spark, archive, broker.url, ArchiveOptions(accept_loss=True)).run()
        assert result.rows[MESSAGE] > 0


def test_archives_of_two_brokers_share_the_tables(spark: SparkSession, tmp_path: Path, archive: Archive) -> None:
    log: list[Sent] = []
    with BrokerProcess(tmp_path / "one") as one, BrokerProcess(tmp_path / "two") as two:
        for seed, broker in enumerate((one, two)):
            with dmq.connect(broker.url, app="shop") as client:
                client.admin.create_topic("orders", queues=1)
                log += send_logged(client, "orders", 50, seed=seed)
                consume_all(client, "orders", "billing", 50)
        (result,) = Run(RunOptions(archive.uri, (one.url, two.url), ("archive",))).run(spark=spark)
    check_archive(archive, log)
    assert outcomes(archive)["billing", "acked", 1] == 100
    assert len([note for note in result.notes if note.startswith("journal")]) == 2


def test_a_disk_that_refuses_a_file_is_told_in_a_sentence_and_the_next_run_goes_on(
    spark: SparkSession, broker: BrokerProcess, archive: Archive
) -> None:
    today = datetime.now(UTC).date()
    folder = Path(archive.uri, "copy")
    folder.mkdir(parents=True)
    obstacles = [folder / f"dt={today + timedelta(days=number)}" for number in range(2)]
    for obstacle in obstacles:
        obstacle.write_text("where a folder should be")
    run = Run(RunOptions(archive.uri, (broker.url,), ("archive",)))
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = send_logged(client, "orders", 50, seed=1)
        consume_all(client, "orders", "billing", 50, fail_every=5)  # so that there are copies
        with pytest.raises(StorageError, match=r"could not use .*/archive/copy"):
            run.run(spark=spark)
        assert not any(archive.table(name).rows() for name in TABLES), "nothing was committed"
        for obstacle in obstacles:
            obstacle.unlink()
        run.run(spark=spark)
    check_archive(archive, log)
    assert archive.table(COPY).rows()


@pytest.mark.parametrize("place", ["folder", "object store"])
def test_workers_that_are_killed_in_their_tasks_are_told_and_the_next_run_goes_on(
    spark: SparkSession, broker: BrokerProcess, object_store: ObjectStore, tmp_path: Path, place: str
) -> None:
    archive = Archive.create(str(tmp_path / "tables") if place == "folder" else f"{object_store.bucket()}/tables")
    tracker = spark.sparkContext.statusTracker()
    killed: list[int] = []

    def step(name: str) -> None:
        if killed:
            return
        if name == "extracted":
            os.kill(broker.pid, signal.SIGSTOP)  # the tasks of the next batch wait for it
        elif name == "committed message":
            try:
                eventually(tracker.getActiveStageIds)
                while tracker.getActiveStageIds():
                    killed.extend(kill_workers())
            finally:
                os.kill(broker.pid, signal.SIGCONT)

    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = send_logged(client, "orders", 120, seed=1)
        consume_all(client, "orders", "billing", 120)
    options = ArchiveOptions(batch_bytes=40_000)
    with pytest.raises(OutOfRetries, match=r"a task of Spark failed: .*; go on"), task_errors("go on"):
        ArchiveJob(spark, archive, broker.url, options, step=step).run()
    assert killed
    assert archive.table(MESSAGE).rows(), "the batch before is there"
    ArchiveJob(spark, archive, broker.url, options).run()
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): 120, ("billing", "acked", 1): 120}
