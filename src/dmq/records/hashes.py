"""The hashes that stand in records, index entries and the choice of a queue.

What always holds: they are part of the stored format, so the same text gives the same number in every process, on every
machine, in every version. None of them protects against anyone: code that compares hashes compares the texts
afterwards.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.model import MessageId

__all__ = ["business_hash", "id_hash", "id_hashes", "key_hash", "key_hashes", "tag_hash"]

_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15


def tag_hash(tag: str) -> int:
    """The u16 in a record's tag field: the low half of the CRC-32C of the UTF-8 bytes; 0 is "no tag", so 0 gives 1."""
    return crc32c(tag.encode()) & 0xFFFF or 1


def key_hash(key: str) -> int:
    """The u64 under which a key is indexed: CRC-32C in the high half, CRC-32 in the low; 0 gives 1.

    Two different polynomials, because a CRC is linear: one polynomial with two seeds differs, for texts of one length,
    by a constant, so both halves would collide together and 64 bits would be worth 32.
    """
    raw = key.encode()
    return crc32c(raw) << 32 | zlib.crc32(raw) or 1


def key_hashes(keys: bytes, count: int) -> npt.NDArray[np.uint64]:
    """What `key_hash` gives for so many keys of one size, back to back, but 0 where that gives 1.

    For short keys a fifth of the price of a call for each: a CRC is linear, so the one of a text is that of as many
    zero bytes, xor what each byte contributes, which depends on nothing but its value and its distance from the end.
    """
    size = len(keys) // count
    zeros = bytes(size)
    hashes = np.full(count, crc32c(zeros) << 32 | zlib.crc32(zeros), np.uint64)
    rows = np.frombuffer(keys, np.uint8).reshape(count, size)
    for at in range(size):
        hashes ^= _contributions(size - 1 - at)[rows[:, at]]
    return hashes


@lru_cache(64)
def _contributions(distance: int) -> npt.NDArray[np.uint64]:
    """What a byte contributes to `key_hashes`, by its value, if so many bytes follow it."""
    zeros = bytes(distance)
    texts = [bytes((value,)) + zeros for value in range(256)]
    hashes: npt.NDArray[np.uint64] = np.array([crc32c(text) << 32 | zlib.crc32(text) for text in texts], np.uint64)
    hashes ^= hashes[0]
    return hashes


def id_hash(message_id: MessageId) -> int:
    """The u64 under which a message id is indexed: splitmix64 over both halves; never 0.

    For one producer it is a bijection of the sequence (but for 0, which gives 1), so ids of one producer practically
    never collide with each other.
    """
    return _mix(_mix(message_id.producer_id) ^ message_id.sequence) or 1


def id_hashes(producer_id: int, sequences: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`id_hash` of many ids of one producer."""
    value = (sequences ^ np.uint64(_mix(producer_id))) + np.uint64(_GOLDEN)  # wraps, as unsigned sums of arrays do
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58_476D_1CE4_E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D0_49BB_1331_11EB)
    value ^= value >> np.uint64(31)
    value[value == 0] = 1
    return value


def business_hash(business_id: str) -> int:
    """A u64 that spreads business ids over queues: take it modulo the number of queues.

    Mixed, because the low bits of a CRC of short, similar texts are as regular as the texts.
    """
    return _mix(key_hash(business_id))


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _U64
    value = ((value ^ value >> 30) * 0xBF58_476D_1CE4_E5B9) & _U64
    value = ((value ^ value >> 27) * 0x94D0_49BB_1331_11EB) & _U64
    return value ^ value >> 31
