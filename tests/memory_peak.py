"""How much memory Python and numpy take at most while something is done."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator

__all__ = ["memory_peak"]


@contextlib.contextmanager
def memory_peak() -> Iterator[list[int]]:
    """Within this; the list has the bytes afterwards."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
