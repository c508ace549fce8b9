"""What ships for tests of DMQ, and of programs that use it: a broker in memory, a clock and a disk that do as told.

In reading order: `broker` is the broker for tests, `fixtures` gives it to pytest, `clock` its time, `disk` its disk;
`processes` runs a broker as a process, on a port of `ports`, `proxy` a network that fails; `benchmark` is behind
`dmq bench`.

Loaded when first used, since pytest imports this package wherever DMQ is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmq.testing.broker import TestBroker
    from dmq.testing.clock import FakeClock, RunningClock
    from dmq.testing.disk.crash import Keep
    from dmq.testing.disk.faults import CrashNow, Fault
    from dmq.testing.disk.files import MemoryFiles

__all__ = ["CrashNow", "FakeClock", "Fault", "Keep", "MemoryFiles", "RunningClock", "TestBroker"]

_LATER = {
    "CrashNow": "dmq.testing.disk.faults",
    "FakeClock": "dmq.testing.clock",
    "Fault": "dmq.testing.disk.faults",
    "Keep": "dmq.testing.disk.crash",
    "MemoryFiles": "dmq.testing.disk.files",
    "RunningClock": "dmq.testing.clock",
    "TestBroker": "dmq.testing.broker",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        home = _LATER.get(name)
        if home is None:
            raise AttributeError(f"module 'dmq.testing' has no attribute {name!r}")
        return getattr(import_module(home), name)
