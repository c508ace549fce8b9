"""Driver and JVM of the archive job are killed at five points: no row is lost, and none is there twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dmq
from dmq.pipeline.archive.job import TABLES, app_id_of
from dmq.pipeline.archive.store import Archive
from dmq.testing.processes import BrokerProcess
from tests.spark.archiving import Sent, check_archive, consume_all, outcomes, send_logged

POINTS = ("task", "extracted", "committed copy", "resolve", "committed consume_event")
MESSAGES = 4000  # a round: some megabytes, so that there are several tasks
SECONDS = 300


def run_driver(url: str, tables: Path, scratch: Path, point: str) -> subprocess.CompletedProcess[str]:
    """Run the job until it has ended or died; nothing of it is left then."""
    environment = {**os.environ, "TMPDIR": str(scratch), "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", "tests.spark.dying_archive", url, str(tables), point]
    driver = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, errors = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    deadline = time.monotonic() + SECONDS
    while _is_there(driver.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_there(driver.pid), "the JVM outlived its driver"
    return subprocess.CompletedProcess(command, driver.returncode, said, errors)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.soak
def test_each_row_is_there_once_though_driver_and_jvm_are_killed_at_five_points(tmp_path: Path) -> None:
    tables, scratch = tmp_path / "archive", tmp_path / "scratch"
    scratch.mkdir()
    log: list[Sent] = []
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=3)
        for number, point in enumerate(POINTS):
            log += send_logged(client, "orders", MESSAGES, seed=number)
            consume_all(client, "orders", f"group-{number}", len(log))
            killed = run_driver(broker.url, tables, scratch, point)
            assert killed.returncode == -9, (point, killed.stdout, killed.stderr)
        ended = run_driver(broker.url, tables, scratch, "never")
        assert ended.stdout == "ended\n", ended.stderr
        told = client.admin.archived()
    archive = Archive(str(tables))
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
