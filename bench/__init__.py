"""What we measure, and how. Each module is a program of its own.

What always holds: one that is told to end, as `timeout` does, ends the brokers it started and removes what it wrote.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, lambda *_: None)  # `timeout` sends it twice, and cleaning up takes a while
    sys.exit(128 + number)


if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, _end)
