"""Waiting for other threads."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["eventually"]

PATIENCE_S = 20.0


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)
