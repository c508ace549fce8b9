"""A Spark driver in a process of its own, for tests in which it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["run_driver"]

SECONDS = 600.0


def run_driver(scratch: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a driver until it has ended or died; neither its JVM nor a worker of it is left then."""
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(scratch), "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-m", module, *arguments]
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
