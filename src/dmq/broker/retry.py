"""The retry schedule: how long a message that failed waits for its next attempt (J-05).

Pure code. What always holds: the wait is never longer than the cap, and never shorter for a later attempt in the
default schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["RETRY_DELAY_MAX_MS", "retry_delay_ms"]

RETRY_DELAY_MAX_MS: Final = 2 * 60 * 60 * 1000
_CAPPED_FROM: Final = 10  # 3 ** 9 seconds are over five hours; greater powers need not be computed


def retry_delay_ms(attempt: int, table: Sequence[int] | None = None) -> int:
    """How long to wait after a failed attempt.

    Parameters:
        attempt: which one failed; the first is 1.
        table: milliseconds after the first, second, ... attempt; its last entry holds for all further ones. None means
            3^(n-1) seconds after the n-th, two hours at most.

    Raises:
        ValueError: the attempt is below 1, or the table is empty or has a negative entry.
    """
    if attempt < 1:
        raise ValueError(f"attempts count from 1, not {attempt}")
    if table is None:
        return RETRY_DELAY_MAX_MS if attempt >= _CAPPED_FROM else min(3 ** (attempt - 1) * 1000, RETRY_DELAY_MAX_MS)
    if not table or min(table) < 0:
        raise ValueError("a retry table needs at least one entry, and none below 0")
    return table[min(attempt, len(table)) - 1]
