"""Waiting for other threads, tasks and processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["PATIENCE_S", "eventually", "eventually_async"]

# Long enough for a machine that runs several test runs at once: it limits how long a failure takes, nothing else.
PATIENCE_S = 120.0


def eventually(
    holds: Callable[[], object],
    what: str = "it never happened",
    *,
    seconds: float = PATIENCE_S,
    look_seconds: float = 0.005,
) -> None:
    """Wait until something holds; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(look_seconds)


async def eventually_async(holds: Callable[[], object], what: str = "it never happened") -> None:
    """Let other tasks go on until something holds; fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)
