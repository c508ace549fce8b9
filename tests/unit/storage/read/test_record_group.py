"""Many records by their offsets are what each is alone."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import SCHEDULE_TOPIC, Message, MessageId, TopicConfig
from dmq.records import encode_batch, key_hash
from dmq.settings import StoreSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import TransactionGroup
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

NOW = 1_700_000_000_000


def batch(topic: str, queue: int, count: int, producer: int, sequence: int, *, due: bool = False) -> Batch:
    messages = [Message(b"%d" % n, key=f"k-{n}" if n % 3 else None) for n in range(count)]
    encoded = encode_batch("orders" if due else topic, "shop", messages, sent_at_ms=NOW)
    return Batch(
        topic=topic,
        queue=queue,
        data=encoded.data,
        lengths=encoded.lengths,
        hash_index=encoded.hash_index,
        hashes=encoded.hashes,
        dues=[NOW + n for n in range(count)] if due else (),
        producer_id=producer,
        first_sequence=sequence,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_many_records_by_their_offsets_are_what_each_is_alone(seed: int) -> None:
    rng = random.Random(seed)
    store = MessageStore(MemoryFiles(), clock=FakeClock(NOW))
    store.create_topic("orders", TopicConfig(queues=2))
    sequence = 0
    for _ in range(rng.randint(1, 6)):
        items = []
        for _ in range(rng.randint(1, 4)):
            count = rng.choice((1, 3, 40))
            items.append(
                batch(SCHEDULE_TOPIC, 3, count, 9, sequence, due=True)
                if rng.random() < 0.5
                else batch("orders", rng.randint(0, 1), count, 9, sequence)
            )
            sequence += count
        store.append(items)
    store.flush()
    places = [found.journal_offset for n in range(sequence) for found in store.queries.find(message_id=MessageId(9, n))]
    chosen = rng.sample(places, rng.randint(0, len(places)))
    parts, lost = store.queries.gather([*chosen, 1])
    assert lost == [1]
    seen = []
    for part in parts:
        for index, offset in enumerate(part.offsets.tolist()):
            alone = store.queries.record_at(offset)
            assert alone is not None
            assert part.message_id(index) == alone.message_id
            assert bytes(part.record(index).attribute_bytes) == bytes(alone.record.attribute_bytes)
            key = alone.record.key
            assert int(part.hashes[index]) == (0 if key is None else key_hash(key))
            is_due = alone.topic == SCHEDULE_TOPIC
            assert part.dues.tolist()[index : index + 1] == ([NOW + int(alone.record.body)] if is_due else [])
            seen.append(offset)
    assert sorted(seen) == sorted(chosen)
    store.close()


def test_records_of_many_small_units_are_put_together_by_producer_and_topic() -> None:
    store = MessageStore(MemoryFiles(), clock=FakeClock(NOW))
    for name in ("orders", "bills"):
        store.create_topic(name, TopicConfig(queues=1))
    sequences = {3: 0, 9: 0}
    wanted: dict[tuple[int, str], list[int]] = {}
    for number in range(120):
        topic, producer = ("orders", "bills")[number % 2], (3, 9)[number % 3 == 0]
        one = batch(topic, 0, 1, producer, sequences[producer])
        store.append([TransactionGroup(producer, f"g-{number}"), one])
        store.flush()
        (stored,) = store.queries.find(message_id=MessageId(producer, sequences[producer]))
        sequences[producer] += 1
        wanted.setdefault((producer, topic), []).append(stored.journal_offset)
    parts, lost = store.queries.gather([offset for offsets in wanted.values() for offset in offsets])
    assert not lost
    found = {(part.row.producer_id, part.record(0).topic): part.offsets.tolist() for part in parts}
    assert len(parts) == 4
    assert found == wanted
    for part in parts:
        assert {part.record(index).topic for index in range(len(part.offsets))} == {part.record(0).topic}
        assert np.all(np.diff(part.sequences.astype(np.int64)) > 0)
    store.close()


def test_the_group_of_a_producer_outlives_a_restart() -> None:
    files = MemoryFiles()
    store = MessageStore(files, clock=FakeClock(NOW))
    store.append([TransactionGroup(9, "pay"), batch("%HALF%", 1, 2, 9, 0)])
    store.flush()
    assert {half.group for half in store.queries.transactions().values()} == {"pay"}
    store = MessageStore(files.kill(), clock=FakeClock(NOW))
    assert {half.group for half in store.queries.transactions().values()} == {"pay"}
    store.append([batch("%HALF%", 1, 1, 9, 2)])
    store.flush()
    assert [half.group for half in store.queries.transactions().values()] == ["pay"] * 3
    store.close()


def test_the_group_of_a_producer_that_is_forgotten_goes_with_it() -> None:
    clock = FakeClock(NOW)
    store = MessageStore(MemoryFiles(), clock=clock, settings=StoreSettings(producer_expiry_hours=1.0))
    store.append([TransactionGroup(9, "pay"), batch("%HALF%", 1, 1, 9, 0)])
    store.flush()
    clock.advance(1800.0)
    store.append([TransactionGroup(8, "ship"), batch("%HALF%", 1, 1, 8, 0)])
    store.checkpoint()
    assert [store.queries.transaction_group(producer) for producer in (9, 8)] == ["pay", "ship"]
    clock.advance(1801.0)
    store.checkpoint()
    assert [store.queries.transaction_group(producer) for producer in (9, 8)] == [None, "ship"]
    # What is open was told its group when it was stored.
    assert {one.producer_id: half.group for one, half in store.queries.transactions().items()} == {9: "pay", 8: "ship"}
    store.close()
