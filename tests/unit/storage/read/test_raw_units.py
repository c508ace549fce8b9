"""Whole units for readers of the journal: from the one that holds an offset, and nobody is harmed by a bad offset."""

from __future__ import annotations

import struct

from dmq.model import Message
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.journal.unit import read_header
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles


def filled(store: MessageStore, units: int, body: bytes = b"x" * 300) -> None:
    for number in range(units):
        encoded = encode_batch("orders", "shop", [Message(body)] * 3, sent_at_ms=1)
        store.append(
            [
                Batch(
                    topic="orders",
                    queue=0,
                    data=encoded.data,
                    lengths=encoded.lengths,
                    producer_id=5,
                    first_sequence=3 * number,
                )
            ]
        )
    store.flush()


def starts_of(store: MessageStore) -> list[int]:
    starts, at = [], store.queries.start
    while at < store.queries.visible:
        starts.append(at)
        raw, at = store.queries.read_units(at, 1)
        header = read_header(raw)
        assert header is not None
        assert (header.start, header.length) == (starts[-1], len(raw))
    return starts


def test_an_offset_within_a_unit_gives_that_unit_and_marks_nothing_as_damaged() -> None:
    store = MessageStore(
        MemoryFiles(),
        clock=FakeClock(),
        settings=StoreSettings(segment_bytes=1 << 16, unit_bytes_max=1 << 15, body_bytes_max=1 << 13),
    )
    store.create_topic("orders")
    filled(store, 100)
    starts = starts_of(store)
    assert len(starts) > 100, "there is more than one segment"
    for start, following in zip(starts, [*starts[1:], store.queries.visible], strict=True):
        for offset in (start, start + 1, start + 72, following - 1):
            raw, end = store.queries.read_units(offset, 1)
            assert (end - len(raw), end) == (start, following)
    assert store.queries.read_units(store.queries.visible) == (b"", store.queries.visible)
    assert not store.queries.damage


def test_a_message_that_looks_like_a_unit_is_none() -> None:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    store.create_topic("orders")
    filled(store, 1, body=struct.pack(">4sIHHIQIIIIIIQQQ", b"DMQU", 0, 1, 0, 0, 0, 72, 0, 0, 0, 0, 0, 0, 0, 0) * 3)
    unit = starts_of(store)[-1]
    raw = bytes(store.queries.read_units(unit)[0])
    fake_at = raw.index(b"DMQU", 1)
    data, end = store.queries.read_units(unit + fake_at)
    assert (end - len(data), end) == (unit, store.queries.visible)
