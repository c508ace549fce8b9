"""Units for a reader of the journal, in one answer: all of them, or what concerns some topics.

What always holds: an answer has one unit at least if there is any, and no more than a frame has room for. Of topics
that few units concern, `LOOKED_MAX` bytes of the journal are looked at before there is an answer, even without a unit;
its `end` says how far they reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from dmq.protocol.read import Fetch
from dmq.storage.files import Buffer
from dmq.storage.read.topic_units import units_of

__all__ = ["LOOKED_MAX", "UnitFetch", "fetch_units"]

LOOKED_MAX: Final = 32 << 20
_HEADER_BYTES: Final = 4096
_WINDOW_MIN: Final = 64 << 10

ReadUnits = Callable[[int, int], Awaitable[tuple[Buffer, int]]]
"""Whole units from the one on that holds an offset, about so many bytes of them; and where they end."""


class UnitFetch(NamedTuple):
    """What concerns a reader of the units from journal offset `start` to `end`."""

    start: int
    end: int
    pieces: list[Buffer]


async def fetch_units(asked: Fetch, size: int, visible: int, read: ReadUnits) -> UnitFetch:
    """The units of one answer.

    Parameters:
        size: of an answer, more or less; a frame has room for twice as much.
        visible: how far the journal may be read.
    """
    stop = min(asked.end or visible, visible)
    units, end = await read(asked.journal_offset, max(1, min(size, stop - asked.journal_offset)))
    start = end - len(units)
    if not asked.topic_ids or not len(units):
        return UnitFetch(start, end, [units])
    topic_ids = frozenset(asked.topic_ids)
    pieces: list[Buffer] = []
    taken = 0
    while True:
        kept = units_of(units, topic_ids)
        if pieces and taken + len(kept) > 2 * size - _HEADER_BYTES:
            return UnitFetch(start, end - len(units), pieces)  # the next answer has room for it
        pieces.append(kept)
        taken += len(kept)
        if taken >= size or end >= stop or end - start >= LOOKED_MAX:
            return UnitFetch(start, end, pieces)
        # As much of the journal as the rest of the answer is to be found in, if the next units are like these.
        window = min(2 * size, max(_WINDOW_MIN, (size - taken) * len(units) // max(1, len(kept))))
        await asyncio.sleep(0)  # others want to be served, too
        units, end = await read(end, min(window, stop - end))
        if not len(units):
            return UnitFetch(start, end, pieces)
