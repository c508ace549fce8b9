"""A run of tests that is told to end in the middle leaves no process and no directory behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.frame_client import eventually

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


def test_sigterm_ends_a_run_with_the_brokers_it_has_started_and_their_directories(root: Path, tmp_path: Path) -> None:
    test, told = tmp_path / "test_endless.py", tmp_path / "told"
    test.write_text(ENDLESS)
    words = ["-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.conftest", "-n", "0"]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words, str(test)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: run.poll() is not None or (told.exists() and told.read_text()), PATIENCE_S)
        assert run.poll() is None, run.communicate()[0]
        pid, folder = told.read_text().split()
        run.terminate()
        time.sleep(0.05)
        run.terminate()  # as `timeout` does, whose child gets it once more as one of its group
        said, _ = run.communicate(timeout=PATIENCE_S)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == pytest.ExitCode.INTERRUPTED, said
    assert not Path(folder).parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
