"""What ships for tests of DMQ, and of programs that use it: a clock and a disk that do as they are told."""

from __future__ import annotations

from dmq.testing.clock import FakeClock
from dmq.testing.crash import Keep
from dmq.testing.faults import CrashNow, Fault
from dmq.testing.files import MemoryFiles

__all__ = ["CrashNow", "FakeClock", "Fault", "Keep", "MemoryFiles"]
