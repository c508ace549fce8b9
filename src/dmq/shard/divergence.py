"""Divergence: where the journals of two members part. Pure code.

An epoch has one leader, which wrote it from its start on, so two journals that have the same epoch (number, leader,
start) are equal up to where the shorter of the two has its end of that epoch. Of the newest epoch that both have, that
end is the last place at which they are surely equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmq.storage.state.state import EpochRow

__all__ = ["common_end"]


def common_end(mine: Sequence[EpochRow], my_end: int, theirs: Sequence[EpochRow], their_end: int) -> int | None:
    """Up to where two journals are equal; None if no epoch is known that both have.

    Parameters:
        mine, theirs: the newest epochs of each, in their order.
        my_end, their_end: where each journal ends.
    """
    known = {*theirs}
    shared = next((row for row in reversed(mine) if row in known), None)
    if shared is None:
        return None
    return min(_end_of(shared, mine, my_end), _end_of(shared, theirs, their_end))


def _end_of(epoch: EpochRow, rows: Sequence[EpochRow], journal_end: int) -> int:
    """Where a journal has its end of an epoch: where the next one begins."""
    return min((row.start for row in rows if row.epoch > epoch.epoch), default=journal_end)
