"""Which range of a journal the archive takes next, and how the work on it is divided. Pure code.

How far a table has come is a journal offset: it has everything of the units that start below. A range holds the units
that start in it, so its ends may lie anywhere, and every unit belongs to exactly one range.

What always holds: a table that lags behind another, since a run was killed between their commits, is given the same
range that the other one has had.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from dmq.errors import OffsetGone

__all__ = ["Batch", "after", "batch_size", "next_batch", "split"]

RANGE_BYTES: Final = 64 << 20  # a task holds about six times as much in memory
_RANGES_MIN: Final = 4


class Batch(NamedTuple):
    """A range of the journal, and the tables that it goes to."""

    start: int
    end: int
    after: Mapping[str, int | None]  # by table, the version that is there until then


def next_batch(
    versions: Mapping[str, int | None], first: int, end: int, size: int, *, accept_loss: bool = False
) -> Batch | None:
    """What comes next; None if all tables have everything.

    Parameters:
        versions: how far each table is; None has nothing yet.
        first, end: what the journal has.
        size: at most this many bytes.
        accept_loss: go on behind what retention took before it was archived.

    Raises:
        OffsetGone: the journal does not have any more, or not any longer, what comes next.
    """
    known = [version for version in versions.values() if version is not None]
    if known and max(known) > end:
        raise OffsetGone(
            f"the archive has this journal up to offset {max(known)}, but it ends at {end}: the broker's data is older "
            "than the archive. Find the newer data, or archive it into another folder",
            first=first,
            next=end,
        )
    if known and min(known) < first and not accept_loss:
        raise OffsetGone(
            f"the journal begins at offset {first} and the archive has it up to {min(known)}: retention took what lay "
            "between before it was archived. Say --accept-loss to go on without it; store.keep_unarchived keeps it the "
            "next time",
            first=first,
            next=end,
        )
    places = {name: max(first, version or 0) for name, version in versions.items()}
    start = min(places.values())
    stop = min((place for place in places.values() if place > start), default=end)
    if start >= stop:
        return None
    lagging = {name: versions[name] for name, place in places.items() if place == start}
    # A range that other tables have had is not cut: it would not be the same any more.
    return Batch(start, stop if len(lagging) < len(places) else min(stop, start + size), lagging)


def batch_size(workers: int) -> int:
    """How much of a journal makes a batch where nobody says: so much that every worker has a task."""
    return RANGE_BYTES * max(_RANGES_MIN, workers)


def after(versions: Mapping[str, int | None], batch: Batch) -> dict[str, int | None]:
    """How far each table is once a batch is committed."""
    return {name: batch.end if name in batch.after else version for name, version in versions.items()}


def split(start: int, end: int) -> list[tuple[int, int]]:
    """A range as ranges for tasks. Their size does not depend on who works on them, since they become files."""
    size = end - start
    count = max(-(-size // RANGE_BYTES), 1)
    bounds = [start + size * number // count for number in range(count + 1)]
    return list(pairwise(bounds))
