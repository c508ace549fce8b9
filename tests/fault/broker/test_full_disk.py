"""A disk that another program fills costs nothing that was acknowledged, and stops no consumer. (J-03, J-10)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_a_broker_on_a_full_disk_keeps_what_was_acknowledged_and_serves_consumers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault.broker.full_disk", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if "no file system" in done.stdout:
        pytest.skip("mounting is not allowed here; tests/unit/storage/test_disk_space.py has the same in memory")
    assert done.stdout.strip() == "done"
