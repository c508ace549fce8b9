"""The benchmark of the client speaks as a broker does, as far as its stub goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_of_the_client_runs_without_a_broker() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.client", "--count", "200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "send_many, all at once" in done.stdout
