"""Which entries of a queue's index one read takes: those that a filter lets through, as far as there is room. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dmq.storage.index.queue_index import Columns

__all__ = ["choose_entries"]


def _passing(hashes: npt.NDArray[np.uint16], tags: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which of the hashes a filter lets through."""
    if len(tags) == 1:
        one: npt.NDArray[np.bool_] = hashes == tags[0]
        return one
    passes = np.zeros(1 << 16, np.bool_)  # a look-up each, however many tags there are
    passes[list(tags)] = True
    return passes.take(hashes)


def choose_entries(
    columns: Columns, tags: Sequence[int] | None, room: int, space: int, *, first: bool
) -> tuple[Columns, npt.NDArray[np.uint64], int, bool]:
    """What of the entries is wanted and fits.

    Returns (entries, queue offsets, where to read on, whether the room is used up).
    """
    count = len(columns.offsets)
    wanted: npt.NDArray[np.int64] | None = None
    if tags is not None:
        wanted = np.flatnonzero(_passing(columns.tags, tags) | (columns.lengths == 0))[:room]
    fit = taken = min(count, room) if wanted is None else len(wanted)
    lengths = columns.lengths[:taken] if wanted is None else columns.lengths[wanted]
    if int(lengths.sum(dtype=np.int64)) > space:
        fit = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), space, side="right"))
    if first and taken and not fit:
        fit = 1
    full = fit < taken or fit == room
    if not full:
        after = columns.first + count
    elif not fit:
        after = columns.first
    else:
        after = columns.first + (fit if wanted is None else int(wanted[fit - 1]) + 1)
    if wanted is None:
        if fit < count:
            columns = Columns(columns.first, columns.offsets[:fit], columns.lengths[:fit], columns.tags[:fit])
        return columns, np.arange(columns.first, columns.first + fit, dtype=np.uint64), after, full
    chosen = wanted[:fit]
    entries = Columns(columns.first, columns.offsets[chosen], columns.lengths[chosen], columns.tags[chosen])
    return entries, chosen.astype(np.uint64) + np.uint64(columns.first), after, full
