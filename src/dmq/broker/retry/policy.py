"""The retry policy: how long a message that failed waits for its next attempt (J-05).

Pure code. What always holds: the wait is never longer than the cap, and never shorter for a later attempt in the
default schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dmq.errors import InvalidSettings
from dmq.model import TopicConfig

__all__ = [
    "POWERS",
    "RETRY_DELAY_MAX_MS",
    "RETRY_TABLE",
    "check_table",
    "parse_retry_table",
    "retry_delay_ms",
    "wait_ms",
]

RETRY_DELAY_MAX_MS: Final = 2 * 60 * 60 * 1000
POWERS: Final = "3^n"
RETRY_TABLE: Final = "retry_table"  # the property of a topic
_ENTRIES_MAX: Final = 100
_ENTRY_MAX_SECONDS: Final = 30 * 24 * 3600
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


def wait_ms(attempt: int, asked_ms: int, table: Sequence[int] | None = None) -> int:
    """How long a message waits whose attempt failed: what was asked for, or what the table says.

    Parameters:
        asked_ms: below 0 leaves it to the table.
    """
    return asked_ms if asked_ms >= 0 else retry_delay_ms(attempt, table)


def parse_retry_table(text: str) -> tuple[int, ...] | None:
    """The table a person wrote, in milliseconds; None for `3^n`.

    Raises:
        InvalidSettings: it cannot be read.
    """
    if text.strip() == POWERS:
        return None
    try:
        seconds = [float(entry) for entry in text.split(",")]
    except ValueError:
        seconds = []
    if not 1 <= len(seconds) <= _ENTRIES_MAX or not all(0 <= entry <= _ENTRY_MAX_SECONDS for entry in seconds):
        raise InvalidSettings(
            f"a retry table is {POWERS!r}, or up to {_ENTRIES_MAX} times in seconds, of 30 days at most, with commas "
            f"between them, as in '1,5,60'; not {text!r}"
        )
    return tuple(round(entry * 1000) for entry in seconds)


def check_table(config: TopicConfig) -> None:
    """Raises InvalidSettings if a topic has a retry table that is none."""
    table = config.properties.get(RETRY_TABLE)
    if table is not None:
        parse_retry_table(table)
