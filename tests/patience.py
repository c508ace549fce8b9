"""Waiting for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["eventually"]

PATIENCE_S = 120.0


def eventually(holds: Callable[[], object], what: str = "it never happened", *, seconds: float = PATIENCE_S) -> None:
    """Wait until something holds; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
