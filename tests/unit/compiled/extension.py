"""The extension under test, also where `DMQ_PURE` declines it; where it was not built, these tests are skipped."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable

import pytest

speed = pytest.importorskip("_dmq_speed", reason="the compiled loops are not built here: see dmq doctor")


def grown_kb(work: Callable[[], object], times: int) -> int:
    """How much memory the process takes more after so many calls; a tenth of them come before."""
    for _ in range(times // 10):
        work()
    gc.collect()
    before = resident_kb()
    for _ in range(times):
        work()
    gc.collect()
    return resident_kb() - before


def resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024
