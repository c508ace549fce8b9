"""`append_each`: items that have nothing to do with each other, of which some are at fault."""

from __future__ import annotations

import errno

import pytest

from dmq.errors import DiskFull, DMQError, OutOfOrder, SequenceConflict, StaleEpoch, UnknownTopic
from dmq.model import Durability, Message
from dmq.records import encode_batch
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.state.events import PositionSet
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles


def batch(
    producer: int,
    sequence: int,
    *,
    queue: int = 0,
    topic: str = "orders",
    epoch: int = 0,
    size: int = 1,
    count: int = 1,
    after: int | None = None,
) -> Batch:
    encoded = encode_batch(topic, "shop", [Message(b"x" * size)] * count, sent_at_ms=1)
    return Batch(
        topic=topic,
        queue=queue,
        data=encoded.data,
        lengths=encoded.lengths,
        producer_id=producer,
        producer_epoch=epoch,
        first_sequence=sequence,
        previous_sequence=after,
    )


def make_store(files: MemoryFiles) -> MessageStore:
    store = MessageStore(files, clock=FakeClock(), checkpoint_inline=False)
    store.create_topic("orders")
    return store


def test_who_is_at_fault_is_told_and_the_others_are_written_in_order() -> None:
    store = make_store(MemoryFiles())
    store.append([batch(1, 10, epoch=4)], Durability.STORED)
    event = PositionSet("billing", store.queries.topic("orders").id, 0, 1)
    outcomes = store.append_each(
        [
            batch(2, 0),
            batch(3, 0, topic="nowhere"),
            batch(1, 11, epoch=3),
            event,
            batch(1, 5, epoch=4),
            batch(2, 0),
            batch(4, 0),
            batch(1, 10, epoch=4),
        ],
        Durability.STORED,
    )
    kinds = [outcome.first_offset if isinstance(outcome, Placement) else type(outcome) for outcome in outcomes]
    assert kinds == [1, UnknownTopic, StaleEpoch, 0, SequenceConflict, 1, 2, 0]
    duplicates = [outcome.duplicate for outcome in outcomes if isinstance(outcome, Placement)]
    assert duplicates == [False, False, True, False, True]
    assert store.queries.bounds("orders", 0) == (0, 3)
    position = store.queries.position("billing", "orders", 0)
    assert position is not None
    store.close()


def test_nothing_is_written_if_all_are_at_fault() -> None:
    store = make_store(MemoryFiles())
    end = store.queries.end
    outcomes = store.append_each([batch(1, 0, topic="a"), batch(1, 0, topic="b")], Durability.FLUSHED)
    assert all(isinstance(outcome, DMQError) for outcome in outcomes)
    assert store.queries.end == end
    store.close()


def test_a_full_disk_tells_who_was_written_before() -> None:
    files = MemoryFiles()
    store = make_store(files)
    items = [batch(1, 0, size=4 << 20), batch(2, 0, topic="nowhere"), batch(3, 0, size=4 << 20)]
    files.fail("write", 2, errno.ENOSPC)
    with pytest.raises(DiskFull) as caught:
        store.append_each(items, Durability.STORED)
    assert [*caught.value.detail["placed"]] == [0]
    files.heal()
    first, refused, third = store.append_each(items, Durability.STORED)
    assert isinstance(first, Placement)
    assert first.duplicate
    assert isinstance(refused, UnknownTopic)
    assert isinstance(third, Placement)
    assert not third.duplicate
    assert store.queries.bounds("orders", 0) == (0, 2)
    store.close()


def kinds(outcomes: list[Placement | DMQError]) -> list[object]:
    return [outcome.first_offset if isinstance(outcome, Placement) else type(outcome) for outcome in outcomes]


def test_a_batch_is_written_only_behind_the_one_it_names() -> None:
    store = make_store(MemoryFiles())
    first, second, third = batch(1, 0, count=5), batch(1, 5, count=2, after=4), batch(1, 9, count=2, after=6)
    assert kinds(store.append_each([second, third], Durability.STORED)) == [OutOfOrder, OutOfOrder]
    assert store.queries.bounds("orders", 0) == (0, 0)
    assert kinds(store.append_each([first, third, second, third], Durability.STORED)) == [0, OutOfOrder, 5, 7]
    assert store.queries.bounds("orders", 0) == (0, 9)
    elsewhere = batch(1, 20, queue=1, after=10)
    assert kinds(store.append_each([elsewhere], Durability.STORED)) == [OutOfOrder]


def test_a_batch_that_was_written_is_known_whatever_it_names() -> None:
    store = make_store(MemoryFiles())
    first, second = batch(1, 0), batch(1, 1, after=0)
    store.append([first, second], Durability.STORED)
    again = store.append_each([batch(1, 1, after=77), first, batch(1, 1, after=0), second], Durability.STORED)
    assert kinds(again) == [1, 0, 1, 1]
    assert all(outcome.duplicate for outcome in again if isinstance(outcome, Placement))


def test_what_comes_last_is_known_after_a_crash_and_from_a_snapshot() -> None:
    files = MemoryFiles()
    store = make_store(files)
    store.append([batch(1, 0), batch(1, 1, after=0)], Durability.FLUSHED)
    store.flush()
    files.unlock()  # as a process that was killed
    store = MessageStore(files, clock=FakeClock(), checkpoint_inline=False)
    assert kinds(store.append_each([batch(1, 3, after=2)], Durability.STORED)) == [OutOfOrder]
    assert kinds(store.append_each([batch(1, 2, after=1)], Durability.STORED)) == [2]
    store.close()
    store = MessageStore(files, clock=FakeClock(), checkpoint_inline=False)
    assert kinds(store.append_each([batch(1, 4, after=3), batch(1, 3, after=2)], Durability.STORED)) == [OutOfOrder, 3]


def test_a_producer_that_is_not_known_any_more_begins_without_a_predecessor() -> None:
    store = make_store(MemoryFiles())
    store.append([batch(1, 0)], Durability.STORED)
    store.delete_topic("orders")
    store.create_topic("orders")
    assert kinds(store.append_each([batch(1, 1, after=0), batch(1, 1)], Durability.STORED)) == [OutOfOrder, 0]


def test_a_full_disk_leaves_no_gap_in_the_order() -> None:
    files = MemoryFiles()
    store = make_store(files)
    store.append([batch(1, 0)], Durability.STORED)
    files.fail("write", 1, errno.ENOSPC)
    with pytest.raises(DiskFull):
        store.append_each([batch(1, 1, after=0)], Durability.STORED)
    files.heal()
    assert kinds(store.append_each([batch(1, 2, after=1), batch(1, 1, after=0)], Durability.STORED)) == [OutOfOrder, 1]
