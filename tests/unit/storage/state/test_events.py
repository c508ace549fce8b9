"""Events as they are applied when they are written, and as they are read back from the journal."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.storage.journal.unit import parse_unit, read_header
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import (
    Archived,
    DelaysDone,
    Event,
    KeyPut,
    LimitPut,
    Outcome,
    PositionDropped,
    PositionSet,
    Settled,
    SubscriptionPut,
    TopicDropped,
    TopicPut,
    TransactionEnded,
    TransactionsEnded,
    TransactionsJoined,
    decode_event,
    encode_event,
    pack_offsets,
)
from dmq.storage.state.state import Snapshot
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

groups, ids, numbers = st.sampled_from(["billing", "audit"]), st.integers(16, 18), st.integers(0, 40)
names = st.binary(min_size=16, max_size=16)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        Settled,
        groups,
        ids,
        st.integers(0, 2),
        numbers,
        count=st.integers(1, 24),
        outcome=st.sampled_from([int(outcome) for outcome in Outcome]),
        bitmap=st.sampled_from([b"", b"\x05", b"\xff\x01", b"\x01\x00\x80"]),
        member=st.sampled_from(["", "m-1"]),
        attempt=st.integers(1, 3),
        leased_at_ms=numbers,
        settled_at_ms=numbers,
        error=st.sampled_from(["", "it failed"]),
    ),
    st.builds(PositionSet, groups, ids, st.integers(0, 2), numbers),
    st.builds(PositionDropped, groups, st.none() | ids),
    st.builds(TopicPut, ids, st.sampled_from(["orders", "bills"]), st.builds(TopicConfig, queues=st.integers(1, 4))),
    st.builds(TopicDropped, ids),
    st.builds(KeyPut, groups, st.sampled_from(["a", "b"]), st.none() | st.binary(max_size=4), numbers),
    st.builds(LimitPut, st.just(0) | ids, groups, st.none() | st.integers(1, 9), st.none() | st.integers(1, 9)),
    st.builds(SubscriptionPut, groups, ids, st.just("red"), st.integers(1, 3), is_ordered=st.booleans()),
    st.builds(TransactionEnded, names, st.just("committed")),
    st.builds(TransactionsEnded, st.lists(names, max_size=3).map(b"".join), st.just("committed")),
    st.builds(TransactionsJoined, st.lists(names, max_size=2).map(lambda pair: b"".join(pair * 2))),
    st.builds(Archived, numbers),
    st.builds(DelaysDone, st.lists(numbers, max_size=3).map(pack_offsets)),
)


def batch(count: int) -> Batch:
    encoded = encode_batch("orders", "shop", [Message(b"x")] * count, sent_at_ms=1)
    return Batch(topic="orders", queue=0, data=encoded.data, lengths=encoded.lengths)


def snapshot(store: MessageStore) -> Snapshot:
    """The state, but for the epoch that a start after a crash begins."""
    return msgspec.structs.replace(store.queries.derived.state.set_aside(store.queries.end), epochs=[])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(events, min_size=1, max_size=6), max_size=6), st.booleans())
def test_what_is_applied_as_it_is_written_is_what_is_read_back(written: list[list[Event]], atomic: bool) -> None:
    files, clock = MemoryFiles(), FakeClock()
    store = MessageStore(files, clock=clock)
    store.create_topic("orders", TopicConfig(queues=3))
    for together in written:
        assert [decode_event(encode_event(event)) for event in together] == together
        items: list[Batch | Event] = [*together]
        if "orders" in store.queries.derived.state.topics:
            items.insert(len(together) // 2, batch(2))
        placements = store.append(items, atomic=atomic)
        assert len(placements) == len(items)
        store.flush()
    live = snapshot(store)
    read_back = MessageStore(files.crash(random.Random(1)), clock=clock)
    assert snapshot(read_back) == live
    assert snapshot(read_back).encode() == live.encode()


def test_acks_that_are_written_together_share_one_batch_of_their_unit() -> None:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    store.create_topic("orders", TopicConfig(queues=1))
    begin = store.queries.end
    store.append([batch(3), *(Settled("billing", 16, 0, at, 1) for at in range(3)), batch(1)])
    store.flush()
    raw, _ = store.queries.read_units(begin)
    header = read_header(raw)
    assert header is not None
    unit = parse_unit(header, raw)
    assert [(row.topic_id, row.records) for row in unit.rows] == [(16, 3), (0, 3), (16, 1)]
    position = store.queries.position("billing", "orders", 0)
    assert position is not None
    assert position.floor == 3


def test_a_large_event_has_a_batch_of_its_own() -> None:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    store.create_topic("orders", TopicConfig(queues=1))
    begin = store.queries.end
    small, large = Settled("billing", 16, 0, 0, 1), Settled("billing", 16, 0, 0, 9, bitmap=b"\x01\x01")
    store.append([small, large, small, KeyPut("app", "key", b"value"), small])
    store.flush()
    raw, _ = store.queries.read_units(begin)
    header = read_header(raw)
    assert header is not None
    assert [row.records for row in parse_unit(header, raw).rows] == [2, 2, 1]


def test_more_acks_than_a_batch_takes_are_written_all_the_same() -> None:
    store = MessageStore(MemoryFiles(), clock=FakeClock())
    store.create_topic("orders", TopicConfig(queues=1))
    count = 1000
    placements = store.append([Settled("billing", 16, 0, at, 1) for at in range(count)])
    store.flush()
    assert len(placements) == count
    position = store.queries.position("billing", "orders", 0)
    assert position is not None
    assert position.floor == count
