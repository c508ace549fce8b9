"""What a process of the long run writes down.

What always holds: a line is written when the call returns, with no buffer in between, so that what a process did is
known up to the moment it died.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

__all__ = ["STALL_S", "TICK_S", "Log", "begin"]

TICK_S: Final = 0.1
STALL_S: Final = 0.8


class Log:
    """The file that one process writes to."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **facts})
        os.write(self._fd, line.encode() + b"\n")


def begin(path: Path) -> Log:
    """A log, and a thread that notes when this process was not let run; it ends the process with its parent."""
    logging.getLogger("dmq").setLevel(logging.CRITICAL)  # handlers fail on purpose
    log = Log(path)
    parent = os.getppid()

    def watch() -> None:
        before = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            if now - before > STALL_S:
                log("stall", since=before)
            before = now
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return log
