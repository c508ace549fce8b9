"""`dmq archive run`, as a user starts and ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dmq
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.tables import MESSAGE
from dmq.testing.processes import BrokerProcess
from tests.spark.producer_logs import check_archive, send_logged

SECONDS = 240.0


def wait_for_rows(archive: Archive, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while archive.table(MESSAGE).rows() < count:
        assert time.monotonic() < deadline, f"{archive.table(MESSAGE).rows()} of {count} rows"
        time.sleep(0.2)


@pytest.mark.soak
def test_a_continuous_run_takes_what_comes_and_ends_cleanly_when_told_to(tmp_path: Path) -> None:
    archive = Archive.create(str(tmp_path / "archive"))
    words = ["archive", "run", "--tables", archive.uri, "--job", "archive", "--master", "local[2]"]
    words += ["--continuous", "--every", "1s"]
    with BrokerProcess(tmp_path / "data") as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=2)
        log = send_logged(client, "orders", 200, seed=1)
        running = subprocess.Popen(
            [sys.executable, "-m", "dmq.cli", *words, "--broker", broker.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        try:
            wait_for_rows(archive, 200)
            log += send_logged(client, "orders", 100, seed=2)
            wait_for_rows(archive, 300)
            running.send_signal(signal.SIGTERM)
            said, errors = running.communicate(timeout=SECONDS)
        finally:
            running.kill()
    assert running.returncode == 0, errors
    assert "archive: 300 into message" in said
    assert "archive: archived" in errors  # progress, on the side
    check_archive(archive, log)
