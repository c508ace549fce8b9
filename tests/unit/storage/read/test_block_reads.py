"""Reads of messages whose bodies stand in blocks, beside others, whatever the cache has."""

from __future__ import annotations

import random

import pytest

from dmq.model import Durability, Message
from dmq.records import Compressor, EncodeOptions, encode_batch
from dmq.settings import StoreSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

LINES = b", ".join(b'{"sku": "s-%d", "quantity": 1, "currency": "EUR"}' % line for line in range(5))
BODY = b'{"order": %d, "customer": "somebody", "status": "paid", "lines": [' + LINES + b"]}"


def batch(first: int, count: int, *, blocks: bool) -> Batch:
    messages = [Message(BODY % number) for number in range(first, first + count)]
    made = encode_batch(
        "orders",
        "shop",
        messages,
        sent_at_ms=1,
        options=EncodeOptions(compressor=Compressor("lz4" if blocks else "none"), blocks=blocks),
    )
    return Batch(
        topic="orders",
        queue=0,
        data=made.data,
        lengths=made.lengths,
        block_bytes=made.block_bytes,
        producer_id=7,
        first_sequence=first,
    )


@pytest.mark.parametrize("cache_bytes", [0, 32 << 20])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_blocks_are_found_wherever_the_bytes_come_from(cache_bytes: int, is_reopened: bool) -> None:
    files, clock, settings = MemoryFiles(), FakeClock(), StoreSettings(read_cache_bytes=cache_bytes)
    store = MessageStore(files, settings, clock)
    store.create_topic("orders")
    at = 0
    for count, blocks in ((60, True), (60, False), (3, False), (60, True), (60, False)):
        store.append([batch(at, count, blocks=blocks)], Durability.STORED)
        at += count
    if is_reopened:
        store.close()
        store = MessageStore(files.crash(random.Random(1)), settings, clock)
    queries = store.queries
    topic = queries.topic("orders")
    for offset, count in ((0, at), (0, 10), (60, 60), (100, 30), (120, 3), (122, 61), (183, at), (50, 100)):
        found = queries.plain(queries.read_of(topic, 0, offset, count, max_bytes=1 << 20))
        bodies = [bytes(record.body) for record in found.records()]
        assert bodies == [BODY % number for number in range(offset, min(offset + count, at))]
    assert queries.read_of(topic, 0, 60, 60, max_bytes=1 << 20).blocks is None
    assert queries.read_of(topic, 0, 0, 60, max_bytes=1 << 20).blocks is not None
