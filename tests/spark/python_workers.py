"""The Python workers of Spark's JVMs, in which tasks run; to be killed."""

from __future__ import annotations

import os
import signal

from tests.spark.cluster import command_line, descendants

__all__ = ["kill_workers"]

_DAEMON = "pyspark.daemon"


def kill_workers() -> list[int]:
    """End the Python workers of this process's JVM, but for the daemons that they come from; returns which."""
    daemons = [pid for pid in descendants(os.getpid()) if _DAEMON in command_line(pid)]
    workers = [pid for daemon in daemons for pid in descendants(daemon)]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    return workers
