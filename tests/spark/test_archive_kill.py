"""Driver and JVM of the archive job are killed at each of its steps: no row is lost, and none is there twice."""

from __future__ import annotations

from pathlib import Path

import pytest

import dmq
from dmq.pipeline.archive.job import TABLES, app_id_of
from dmq.pipeline.archive.table_store import Archive
from dmq.testing.processes import BrokerProcess
from tests.object_store import ObjectStore
from tests.spark.archive_history import POINTS as STEPS
from tests.spark.driver_process import run_driver
from tests.spark.producer_logs import Sent, check_archive, consume_all, outcomes, send_logged

POINTS = ("task", *STEPS, "resolve")
MESSAGES = 2500  # a round: some megabytes, so that there are several tasks


@pytest.mark.soak
@pytest.mark.parametrize("place", ["folder", "object store"])
def test_each_row_is_there_once_though_driver_and_jvm_are_killed_at_each_step(
    tmp_path: Path, object_store: ObjectStore, place: str
) -> None:
    scratch = tmp_path / "scratch"
    tables = str(tmp_path / "archive") if place == "folder" else f"{object_store.bucket()}/archive"
    log: list[Sent] = []
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=3)
        for number, point in enumerate(POINTS):
            log += send_logged(client, "orders", MESSAGES, seed=number)
            consume_all(client, "orders", f"group-{number}", len(log))
            killed = run_driver(scratch, "tests.spark.mortal_archive", broker.url, tables, point)
            assert killed.returncode == -9, (point, killed.stdout, killed.stderr)
        ended = run_driver(scratch, "tests.spark.mortal_archive", broker.url, tables, "never")
        assert ended.stdout == "ended\n", ended.stderr
        told = client.admin.archived()
    archive = Archive(tables)
    check_archive(archive, log)
    expected = {
        (f"group-{number}", outcome, 1): MESSAGES * (number + 1)
        for number in range(len(POINTS))
        for outcome in ("delivered", "acked")
    }
    assert outcomes(archive) == expected
    assert {archive.table(name).version_of(app_id_of(told.journal_id)) for name in TABLES} == {told.archived}
    # What the killed runs left behind belongs to no table, and goes.
    assert archive.table("message").vacuum(0)
    check_archive(archive, log)
