"""When to merge files that checkpoints leave behind (index runs, lookup files, wheel runs).

Pure code. Each checkpoint adds one small file; reading must look into all of them; so from time to time the newest are
merged into one, and only when they amount to something does that touch the large old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["merge_from"]

RUNS_MAX: Final = 8
_RATIO: Final = 4


def merge_from(sizes: Sequence[int], runs_max: int = RUNS_MAX) -> int | None:
    """Which files to merge: all from this index on, or None for none yet.

    Parameters:
        sizes: of the files, oldest first.
        runs_max: how many may stand before any are merged.

    A file takes part only if those newer than it have at least a quarter of its size, so each byte is rewritten about
    once for every fivefold growth.
    """
    if len(sizes) <= runs_max:
        return None
    newer = 0
    first = len(sizes)
    for at in range(len(sizes) - 1, -1, -1):
        if at < len(sizes) - 2 and newer * _RATIO < sizes[at]:
            break
        newer += sizes[at]
        first = at
    return first
