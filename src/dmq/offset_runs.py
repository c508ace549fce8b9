"""Runs of offsets: rising offsets, a mask, or a bitmap as ranges [start, stop).

Pure code. Leases, settlements and commands name messages as a few ranges; consumers, cursors and events hold them as
lists, as masks (a whole number whose bit i stands for the offset `start + i`), and as bitmaps (the bytes of a mask).

What always holds: ranges come lowest first, none is empty, and no two of them touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

__all__ = ["bitmap_runs", "mask_runs", "offset_runs"]

Runs = Iterable[tuple[int, int]]

# Bits of a mask. A shift costs time by the length of the number, so a longer mask is looked through as an array.
_FEW: Final = 1024


def offset_runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges of rising offsets, each of them given once."""
    if not offsets:
        return
    if offsets[-1] - offsets[0] == len(offsets) - 1:  # the usual case
        yield offsets[0], offsets[-1] + 1
        return
    start = stop = offsets[0]
    for offset in offsets:
        if offset != stop:
            yield start, stop
            start = offset
        stop = offset + 1
    yield start, stop


def mask_runs(start: int, mask: int) -> Iterator[tuple[int, int]]:
    """The ranges of a mask."""
    if mask & (mask + 1) == 0:  # one range from the start on: the usual case
        if mask:
            yield start, start + mask.bit_length()
        return
    if mask.bit_length() > _FEW:
        yield from _array_runs(start, mask.bit_length(), mask.to_bytes(-(-mask.bit_length() // 8), "little"))
        return
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        start += skip
        count = (~mask & (mask + 1)).bit_length() - 1
        yield start, start + count
        mask >>= count
        start += count


def bitmap_runs(start: int, count: int, bitmap: bytes) -> Runs:
    """The ranges a bitmap marks within [start, start + count); an empty bitmap marks all of it."""
    if not bitmap:
        return ((start, start + count),) if count else ()
    if len(bitmap) > _FEW // 8:
        return _array_runs(start, count, bitmap)
    return mask_runs(start, int.from_bytes(bitmap, "little") & ((1 << count) - 1))


def _array_runs(start: int, count: int, bitmap: bytes) -> Runs:
    marked = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:count]
    edges = (np.flatnonzero(np.diff(marked, prepend=np.uint8(0), append=np.uint8(0))) + start).tolist()
    return zip(edges[::2], edges[1::2], strict=True)
