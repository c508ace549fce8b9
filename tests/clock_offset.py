"""A wall clock that a test sets for another process: off by what stands in a file, which may change at any time.

The file's name is in the environment variable `TEST_CLOCK_OFFSET`. Only processes of tests look there: the product asks
the machine's own clock. Monotonic clocks are left alone, as a step of a machine's wall clock leaves them.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from dmq.clock import SystemClock

__all__ = ["VARIABLE", "install_clock_offset", "set_clock_offset"]

VARIABLE = "TEST_CLOCK_OFFSET"
_OFFSET = struct.Struct("<q")


def set_clock_offset(file: Path, seconds: float) -> None:
    """Step the wall clock of the processes that were started with this file."""
    if not file.exists():
        file.write_bytes(bytes(_OFFSET.size))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), _OFFSET.size) as shared:
        _OFFSET.pack_into(shared, 0, round(seconds * 1000))


def install_clock_offset() -> None:
    """In the process whose clock is off: from now on `SystemClock` has the file's offset, if there is a file."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    with open(name, "rb") as opened:
        shared = mmap.mmap(opened.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)

    def now_ms(clock: object) -> int:
        return time.time_ns() // 1_000_000 + int(_OFFSET.unpack_from(shared, 0)[0])

    setattr(SystemClock, "now_ms", now_ms)  # noqa: B010
