"""Messages and records for the tests of this folder, and a CRC that shares no code with the one under test."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from dmq.model import Message

SENT_AT_MS = 1_700_000_000_000  # 0x18BCFE56800


def slow_crc32c(data: bytes) -> int:
    """CRC-32C bit by bit: polynomial 0x1EDC6F41, reflected, start and end inverted."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that no codec makes smaller."""
    return random.Random(seed).randbytes(size)


texts = st.text(max_size=12)
messages = st.builds(
    Message,
    body=st.binary(max_size=300) | st.integers(0, 400).map(lambda size: b"abc" * size),
    key=st.none() | texts,
    tag=st.none() | st.sampled_from(["paid", "open", "späť"]) | texts,
    business_id=st.none() | texts,
    ordered=st.booleans(),
    priority=st.integers(0, 9),
    properties=st.none() | st.dictionaries(st.text(min_size=1, max_size=8), texts, max_size=3),
)
batches = st.lists(messages, max_size=40)
