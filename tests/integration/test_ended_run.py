"""A run of tests that is told to end in the middle leaves no process and no directory behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import eventually

PATIENCE_S = 180.0
ENDLESS = """
import pathlib
import threading

from dmq.testing.processes import BrokerProcess


def test_endless():
    with BrokerProcess() as broker:
        told = pathlib.Path(__file__).with_name("told")
        told.write_text(f"{broker.pid} {broker.folder}\\n")
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([signal.SIGTERM] * 2, id="SIGTERM, twice as timeout sends it"),
        pytest.param([signal.SIGINT], id="SIGINT, in the background of a shell"),
    ],
)
def test_a_run_ends_with_the_brokers_it_has_started_and_their_directories(
    root: Path, tmp_path: Path, sent: list[signal.Signals]
) -> None:
    test, told = tmp_path / "test_endless.py", tmp_path / "told"
    test.write_text(ENDLESS)
    words = ["-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.conftest", "-n", "0"]
    # A shell without job control starts processes in the background so.
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    run = subprocess.Popen(
        [*background, sys.executable, "-m", "pytest", *words, str(test)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: run.poll() is not None or (told.exists() and told.read_text()), seconds=PATIENCE_S)
        assert run.poll() is None, run.communicate()[0]
        pid, folder = told.read_text().split()
        for number in sent:
            run.send_signal(number)
            time.sleep(0.05)
        said, _ = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == pytest.ExitCode.INTERRUPTED, said
    assert not Path(folder).parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
