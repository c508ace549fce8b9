"""Queue index entries (22 bytes, big-endian): where each message of a queue stands in the journal.

    0  u64 journal offset · 8  u32 record length · 12  u16 tag hash · 14  u64 checksum

The checksum covers the other fields and what the entry's place claims (queue key, queue offset), so that an entry
copied to a wrong place is as wrong as one with a flipped bit. An entry of length 0 stands for a message whose unit was
lost; its journal offset tells where the unit was.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["ENTRY_BYTES", "ENTRY_DTYPE", "checksum", "pack_entries", "valid"]

ENTRY_DTYPE: Final = np.dtype([("offset", ">u8"), ("length", ">u4"), ("tag", ">u2"), ("check", ">u8")])
ENTRY_BYTES: Final = ENTRY_DTYPE.itemsize
assert ENTRY_BYTES == 22

_A: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_B: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_C: Final = np.uint64(0x94D0_49BB_1331_11EB)

Entries = npt.NDArray[np.void]


def checksum(
    key: int | npt.NDArray[np.uint64],
    queue_offsets: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint32],
    tags: npt.NDArray[np.uint16],
) -> npt.NDArray[np.uint64]:
    """splitmix64's finisher over a linear mix of the fields; a whole batch at a time."""
    x = np.asarray(offsets, np.uint64) * _A
    shape = lengths.astype(np.uint64)
    shape <<= np.uint64(16)
    shape |= tags
    shape *= _B
    x ^= shape
    place = np.asarray(queue_offsets, np.uint64) * _C
    place += np.asarray(key, np.uint64) * _A
    x += place
    x ^= x >> np.uint64(30)
    x *= _B
    x ^= x >> np.uint64(27)
    x *= _C
    x ^= x >> np.uint64(31)
    return x


def pack_entries(
    key: int | npt.NDArray[np.uint64],
    queue_offsets: npt.NDArray[np.uint64],
    offsets: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    tags: npt.NDArray[Any],
) -> Entries:
    """The entries as they stand in files."""
    entries = np.empty(len(offsets), ENTRY_DTYPE)
    entries["offset"] = offsets
    entries["length"] = lengths
    entries["tag"] = tags
    entries["check"] = checksum(key, queue_offsets, offsets, lengths, tags=tags)
    return entries


def valid(key: int, first_queue_offset: int, entries: Entries) -> npt.NDArray[np.bool_]:
    """Which entries are what was written for the queue from that offset on."""
    queue_offsets = np.arange(first_queue_offset, first_queue_offset + len(entries), dtype=np.uint64)
    checks = checksum(
        key,
        queue_offsets,
        entries["offset"].astype(np.uint64),
        entries["length"].astype(np.uint32),
        tags=entries["tag"].astype(np.uint16),
    )
    matches: npt.NDArray[np.bool_] = checks == entries["check"]
    return matches
