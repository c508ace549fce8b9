"""The attributes of many records, read side by side: the first entry of every record, then the second, and so on.

What always holds: no byte outside its record is believed. Where a record's entries are not well-formed, those before
the first bad one count and the rest do not: a client can store such a message, and a reader of a whole journal must get
past it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.records.attributes import ENTRY, PROPERTY
from dmq.records.layout import gather

__all__ = ["NOTHING", "Found", "walk"]

Positions: TypeAlias = npt.NDArray[np.int64]

# From this many records down, one after the other is cheaper; and a record may have thousands of entries.
FEW: Final = 24
_HEAD_BYTES: Final = ENTRY.size


class Found(NamedTuple):
    """Entries of one kind: whose they are, and where their values begin and end; in the order of the bytes."""

    record: Positions
    at: Positions
    end: Positions


_NONE: Final[Positions] = np.empty(0, np.int64)
NOTHING: Final = Found(_NONE, _NONE, _NONE)


class _Gathered:
    """The entries of one kind as they are met."""

    def __init__(self) -> None:
        self._pieces: list[Found] = []
        self._few: list[tuple[int, int, int]] = []

    def add(self, record: Positions, at: Positions, end: Positions) -> None:
        self._pieces.append(Found(record, at, end))

    def add_one(self, record: int, at: int, end: int) -> None:
        self._few.append((record, at, end))

    def found(self, *, is_single: bool) -> Found:
        """All of them, in the order of the bytes; only the first of each record if there may be but one."""
        pieces = self._pieces
        if self._few:
            pieces = [*pieces, Found(*np.array(self._few, np.int64).T)]
        if not pieces:
            return NOTHING
        if len(pieces) == 1 and not self._few:
            return pieces[0]
        record, at, end = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
        order = np.argsort(at, kind="stable")
        if is_single:
            whose = record[order]
            order = order[np.concatenate(([True], whose[1:] != whose[:-1]))]
        return Found(record[order], at[order], end[order])


def walk(buffer: memoryview, starts: Positions, ends: Positions, kinds: Collection[int]) -> dict[int, Found]:
    """The entries of the given kinds; of each but `PROPERTY` a record has one at most.

    Parameters:
        buffer: where the records stand.
        starts: where the attributes of each begin, behind their length.
        ends: where they end.
        kinds: which are wanted, `PROPERTY` for the user's properties.
    """
    octets = np.frombuffer(buffer, np.uint8)
    gathered = {kind: _Gathered() for kind in kinds}
    bits = {kind: np.uint32(1 << number) for number, kind in enumerate(gathered)}
    everything = np.uint32((1 << len(bits)) - 1)
    have = np.zeros(len(starts), np.uint32)
    record = np.flatnonzero(ends - starts >= _HEAD_BYTES)
    at, end = (starts, ends) if len(record) == len(starts) else (starts[record], ends[record])
    while len(record) > FEW:
        kind = octets[at]
        value_at = at + _HEAD_BYTES
        value_end = value_at + gather(buffer, at, 1, ">u2")
        is_good = value_end <= end
        lowest, highest = int(kind.min()), int(kind.max())
        for wanted, place in gathered.items():
            if not lowest <= wanted <= highest:
                continue
            hit = is_good if lowest == highest else is_good & (kind == wanted)
            if hit.all():
                place.add(record, value_at, value_end)
                if len(gathered) == 1 and wanted != PROPERTY:
                    return {wanted: place.found(is_single=True)}  # nobody wants more
            elif hit.any():
                place.add(record[hit], value_at[hit], value_end[hit])
            if wanted != PROPERTY:
                have[record[hit]] |= bits[wanted]
        # A record that has all that is wanted is done; none has all properties before the end.
        is_open = is_good & (value_end <= end - _HEAD_BYTES) & (have[record] != everything)
        if is_open.all():
            at = value_end
        else:
            record, at, end = record[is_open], value_end[is_open], end[is_open]
    for number, first, stop in zip(record.tolist(), at.tolist(), end.tolist(), strict=True):
        _walk_one(buffer, number, first, stop, gathered=gathered)
    return {kind: place.found(is_single=kind != PROPERTY) for kind, place in gathered.items()}


def _walk_one(buffer: memoryview, number: int, at: int, end: int, gathered: dict[int, _Gathered]) -> None:
    while end - at >= _HEAD_BYTES:
        kind, size = ENTRY.unpack_from(buffer, at)
        at += _HEAD_BYTES
        if size > end - at:
            return
        place = gathered.get(kind)
        if place is not None:
            place.add_one(number, at, at + size)
        at += size
