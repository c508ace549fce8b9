"""Bitmaps: which offsets of a range are meant, as one whole number.

Pure code. Bit i of a mask stands for the offset `start + i`. A whole number is the fastest set of neighbouring offsets
that Python has: a lease of a hundred messages is one machine object, and taking offsets out of it is one operation.
`dmq.offset_runs` turns a mask into ranges.

What always holds: masks are never negative; bits are never set beyond the range they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np

__all__ = ["Ranges", "full", "lowest", "mask_of_offsets", "mask_of_ranges", "pieces"]

Ranges = Iterable[tuple[int, int]]  # (start, stop), stop excluded

# The longest bitmap in one event.
PIECE_MAX: Final = 65_536
_FEW: Final = 8  # ranges; so many are joined one by one


def full(count: int) -> int:
    """A mask with the lowest `count` bits set."""
    return (1 << count) - 1


def mask_of_ranges(ranges: Ranges, start: int, stop: int) -> int:
    """The mask, from `start`, of those offsets of the ranges that lie in [start, stop)."""
    rest = iter(ranges)
    mask = 0
    for first, last in islice(rest, _FEW):
        first, last = max(first, start), min(last, stop)
        if first < last:
            mask |= ((1 << (last - first)) - 1) << (first - start)
    if many := list(rest):
        mask |= _mask_of_many(many, start, stop)
    return mask


def _mask_of_many(ranges: list[tuple[int, int]], start: int, stop: int) -> int:
    """The same with a byte for each offset: joining whole numbers costs time by their length for each range."""
    marked = bytearray(max(stop - start, 0))
    for first, last in ranges:
        first, last = max(first, start), min(last, stop)
        if first < last:
            marked[first - start : last - start] = b"\1" * (last - first)
    return int.from_bytes(np.packbits(np.frombuffer(marked, np.uint8), bitorder="little").tobytes(), "little")


def mask_of_offsets(offsets: Iterable[int], start: int, stop: int) -> int:
    """The mask, from `start`, of those offsets that lie in [start, stop)."""
    bits = bytearray((max(stop - start, 0) + 7) // 8)
    for offset in offsets:
        if start <= offset < stop:
            bits[(offset - start) >> 3] |= 1 << ((offset - start) & 7)
    return int.from_bytes(bits, "little")


def lowest(mask: int, count: int) -> int:
    """The lowest `count` set bits of a mask; all of them if there are no more."""
    if mask.bit_count() <= count:
        return mask
    low, high = count, mask.bit_length()  # so many bits of the mask hold enough set ones
    while low < high:
        middle = (low + high) // 2
        if (mask & full(middle)).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return mask & full(low)


def pieces(start: int, mask: int) -> Iterator[tuple[int, int, bytes]]:
    """A mask as (start, count, bitmap) for events; an empty bitmap means the whole of the range.

    Long runs become ranges of their own; what is between them is cut so that no bitmap is longer than `PIECE_MAX`.
    """
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        start += skip
        count = (~mask & (mask + 1)).bit_length() - 1
        bitmap = b""
        if count < PIECE_MAX and mask.bit_length() > count:
            chunk = mask & full(PIECE_MAX)
            count = chunk.bit_length()
            if chunk != full(count):
                bitmap = chunk.to_bytes((count + 7) // 8, "little")
        yield start, count, bitmap
        mask >>= count
        start += count
