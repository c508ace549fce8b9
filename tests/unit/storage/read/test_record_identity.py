"""Identities: the ids of records as runs, out of the batch tables of their units."""

from __future__ import annotations

import random

import pytest

from dmq.model import Message, MessageId
from dmq.records import encode_batch, moved_record
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.read.record_origin import Identities, IdRun
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles


@pytest.fixture
def store() -> MessageStore:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    store.create_topic("orders")
    return store


def batch(producer: int, sequence: int, count: int, queue: int = 0) -> Batch:
    encoded = encode_batch("orders", "shop", [Message(b"x")] * count, sent_at_ms=1)
    return Batch(
        topic="orders",
        queue=queue,
        data=encoded.data,
        lengths=encoded.lengths,
        producer_id=producer,
        first_sequence=sequence,
    )


def runs_of(store: MessageStore, offset: int, count: int, queue: int = 0) -> list[IdRun]:
    found = store.queries.read("orders", queue, offset, count)
    return store.queries.id_runs(store.queries.topic("orders"), queue, found.offsets.tolist(), found.pieces)


def newest_of(store: MessageStore, offset: int, queue: int = 0) -> list[IdRun] | None:
    """The ids of what was just stored, from an offset on; all else about it is as if it was read."""
    topic, stop = store.queries.topic("orders"), store.queries.bounds("orders", queue)[1]
    newest = store.queries.newest(topic.id << 8 | queue, offset, stop, 1 << 20)
    if newest is None:
        return None
    found = store.queries.read("orders", queue, offset, stop - offset)
    assert bytes(newest.piece) == b"".join(found.pieces)
    assert [*map(int, newest.lengths)] == found.lengths.tolist()
    assert newest.size == len(newest.piece)
    assert newest.ids == runs_of(store, offset, stop - offset, queue)
    return newest.ids


@pytest.mark.parametrize("count", [1, 3, 500])
def test_what_was_just_stored_is_what_would_be_read(store: MessageStore, count: int) -> None:
    store.append([batch(5, 100, count)])
    assert newest_of(store, 0) is None, "it is not visible yet"
    store.flush()
    assert newest_of(store, 0) == [(count, 5, 100)]
    assert newest_of(store, count - 1) == [(1, 5, 100 + count - 1)]
    store.append([batch(5, 100 + count, 2)])
    store.flush()
    assert newest_of(store, 0) is None
    assert newest_of(store, count) == [(2, 5, 100 + count)]
    store.append([batch(6, 0, 1), batch(7, 0, 1)])
    store.flush()
    assert newest_of(store, count + 2) is None, "of more than one batch the long way tells"


def test_one_large_message_is_given_whatever_the_room_and_more_only_if_they_fit(store: MessageStore) -> None:
    store.append([batch(5, 0, 2)])
    store.flush()
    key = store.queries.topic("orders").id << 8
    assert store.queries.newest(key, 0, 2, 10) is None
    assert store.queries.newest(key, 1, 2, 10) is not None


def test_what_was_moved_or_has_no_producer_has_no_ids_when_it_was_just_stored(store: MessageStore) -> None:
    store.append([batch(0, 0, 1)])
    store.flush()
    assert newest_of(store, 0) == [(1, 0, 0)]
    (record,) = store.queries.read("orders", 0, 0, 1).records()
    moved = moved_record(record, "orders", sent_at_ms=2, message_id=MessageId(5, 100))
    store.append([Batch(topic="orders", queue=0, data=moved, lengths=[len(moved)], moved=True, producer_id=9)])
    store.flush()
    assert newest_of(store, 1) == [(1, 0, 0)]


def test_batches_of_many_producers_give_a_run_each(store: MessageStore) -> None:
    store.append([batch(5, 100, 3), batch(6, 0, 2), batch(7, 9, 4, queue=1)])
    store.append([batch(6, 2, 2), batch(5, 103, 1)])
    store.flush()
    # What follows in number becomes one run, also over the border of a unit.
    assert runs_of(store, 0, 8) == [(3, 5, 100), (4, 6, 0), (1, 5, 103)]
    assert runs_of(store, 1, 5) == [(2, 5, 101), (3, 6, 0)]
    assert runs_of(store, 0, 10, queue=1) == [(4, 7, 9)]


def test_offsets_that_are_left_out_part_a_run(store: MessageStore) -> None:
    store.append([batch(5, 100, 6)])
    store.flush()
    found = store.queries.read("orders", 0, 0, 6)
    assert store.queries.id_runs(store.queries.topic("orders"), 0, [0, 1, 3, 5], found.pieces) == [
        (2, 5, 100),
        (1, 5, 103),
        (1, 5, 105),
    ]


def test_moved_records_carry_their_own_ids(store: MessageStore) -> None:
    store.append([batch(5, 100, 1)])
    store.flush()
    (record,) = store.queries.read("orders", 0, 0, 1).records()
    moved = moved_record(record, "orders", sent_at_ms=2, message_id=MessageId(5, 100))
    store.append([Batch(topic="orders", queue=0, data=moved, lengths=[len(moved)], moved=True)])
    store.flush()
    assert runs_of(store, 0, 2) == [(1, 5, 100), (1, 0, 0)]


def test_the_runs_agree_with_every_single_id(store: MessageStore) -> None:
    rng = random.Random(7)
    following: dict[int, int] = {}
    for _ in range(60):
        items = []
        for _ in range(rng.randrange(1, 6)):
            producer, count = rng.randrange(1, 5), rng.randrange(1, 40)
            items.append(batch(producer, following.get(producer, 0), count, rng.randrange(2)))
            following[producer] = following.get(producer, 0) + count
        store.append(items)
    store.flush()
    for queue in range(2):
        end = store.queries.bounds("orders", queue)[1]
        for _ in range(40):
            start = rng.randrange(end)
            found = store.queries.read("orders", queue, start, rng.randrange(1, 200))
            offsets = found.offsets.tolist()
            runs = store.queries.id_runs(store.queries.topic("orders"), queue, offsets, found.pieces)
            ids = [MessageId(producer, first + n) for count, producer, first in runs for n in range(count)]
            assert len(ids) == len(offsets)
            for index in rng.sample(range(len(ids)), min(3, len(ids))):
                where = store.queries.journal_offset("orders", queue, offsets[index])
                assert where is not None
                single = store.queries.record_at(where)
                assert single is not None
                assert single.message_id == ids[index]


def test_few_tables_are_kept(store: MessageStore) -> None:
    for sequence in range(20):
        store.append([batch(5, sequence, 1)])
    store.flush()
    reader = store._reader
    small = Identities(reader.bytes_at, lambda offset: reader.derived.lookup.unit_holding(offset), rows_max=4)
    topic = store.queries.topic("orders")
    for _ in range(2):
        for offset in range(20):
            found = store.queries.read("orders", 0, offset, 1)
            assert small.runs(topic.id, 0, [offset], found.pieces) == [(1, 5, offset)]
    assert len(small._tables) <= 4
