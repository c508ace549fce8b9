"""Origins: when records were stored and from where, as runs, out of the units they stand in."""

from __future__ import annotations

import itertools
import random

import numpy as np

from dmq.model import Message
from dmq.records import encode_batch
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.read.record_origin import OriginRun
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

ADDRESSES = [bytes(10) + b"\xff\xff\x0a\x00\x00" + bytes((last,)) for last in (1, 2)]


def batch(count: int, sequence: int, address: bytes, queue: int) -> Batch:
    # Sent in the future: what the records themselves say of their store time is wrong then.
    encoded = encode_batch("orders", "shop", [Message(b"x")] * count, sent_at_ms=1 << 45)
    return Batch(
        topic="orders",
        queue=queue,
        data=encoded.data,
        lengths=encoded.lengths,
        producer_id=5,
        first_sequence=sequence,
        address=address,
        port=5672,
    )


def runs_of(store: MessageStore, offset: int, count: int, queue: int = 0) -> list[OriginRun]:
    found = store.queries.read("orders", queue, offset, count)
    return store.queries.origins(store.queries.topic("orders"), queue, found.offsets, found.pieces)


def test_each_record_has_the_time_and_the_address_of_its_batch() -> None:
    clock = FakeClock()
    store = MessageStore(MemoryFiles(), clock=clock)
    store.create_topic("orders")
    rng = random.Random(4)
    expected: list[list[tuple[int, bytes]]] = [[], []]
    sequence = 0
    for _ in range(40):
        parts = []
        for _ in range(rng.randrange(1, 4)):
            queue, count, address = rng.randrange(2), rng.randrange(1, 30), rng.choice(ADDRESSES)
            parts.append(batch(count, sequence, address, queue))
            sequence += count
            expected[queue] += [(clock.now_ms(), address + b"\x16\x28")] * count
        store.append(parts)
        clock.advance(rng.choice([0.0, 0.001, 5.0]))
    store.flush()
    for queue in (0, 1):
        total = len(expected[queue])
        for _ in range(50):
            offset = rng.randrange(total)
            count = rng.randrange(1, total - offset + 1)
            runs = runs_of(store, offset, count, queue)
            flat = [(stored_at_ms, address) for count, stored_at_ms, address in runs for _ in range(count)]
            assert flat == expected[queue][offset : offset + count]
            assert all(a[1:] != b[1:] for a, b in itertools.pairwise(runs)), "equal ones are one run"


def test_nothing_has_no_origins() -> None:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    store.create_topic("orders")
    assert store.queries.origins(store.queries.topic("orders"), 0, np.empty(0, np.uint64), []) == []
