"""How many messages wait for another attempt follows from the journal alone, and so does who has expiring ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.model import SCHEDULE_TOPIC, Message, MessageId, TopicConfig, retry_topic_name
from dmq.records import RecordView, encode_batch
from dmq.records.attributes import Attributes
from dmq.records.copy import CopyPlan, copy_record, read_failed
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import DelaysDone, Event, Outcome, Settled, TopicDropped, pack_offsets
from dmq.storage.state.state import RetryCounts
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles


@given(st.lists(st.tuples(st.sampled_from(["left", "arrived"]), st.integers(0, 5), st.integers(1, 9))))
def test_counts_are_what_left_and_did_not_arrive(steps: list[tuple[str, int, int]]) -> None:
    counts, model = RetryCounts(), Counter[int]()
    for what, key, count in steps:
        if what == "left":
            counts.left(key, count)
            model[key] += count
        elif key in model:
            counts.arrived(key, count)
            model[key] = max(0, model[key] - count)  # what is resent arrives without having left
        else:
            counts.arrived(key, count)  # a topic nobody failed in
    assert [counts.waiting(key) for key in range(6)] == [model[key] for key in range(6)]
    again = RetryCounts()
    again.load(counts.dump())
    assert [again.waiting(key) for key in range(6)] == [model[key] for key in range(6)]


class Rig:
    """A store with one topic, one group, and its retry topic."""

    def __init__(self) -> None:
        self.files, self.clock = MemoryFiles(), FakeClock()
        self.store = MessageStore(self.files, clock=self.clock)
        self.topic = self.store.create_topic("orders", TopicConfig(queues=2))
        self.name = retry_topic_name("g", self.topic.id)
        self.store.create_topic(self.name, TopicConfig(queues=2), system=True)
        self.sequence = 0

    def write(self, *items: Batch | Event) -> None:
        self.store.append(items, atomic=True)
        self.store.flush()

    def send(self, queue: int, count: int, *, expiring: bool = False) -> None:
        encoded = encode_batch("orders", "shop", [Message(b"x")] * count, sent_at_ms=1)
        self.write(
            Batch(
                topic="orders",
                queue=queue,
                data=encoded.data,
                lengths=encoded.lengths,
                producer_id=7,
                first_sequence=self.sequence,
                expiring=expiring,
            )
        )
        self.sequence += count

    def copy(self, queue: int, offset: int, topic: str, due_ms: int | None) -> Batch:
        (record,) = self.store.queries.read("orders", queue, offset, 1).records()
        raw = bytes(memoryview(record.buffer)[record.start : record.start + record.length])
        plan = CopyPlan(
            topic, 5, ("orders", queue), says=Attributes(target_topic=self.name, target_queue=queue, group="g")
        )
        copied = copy_record(read_failed(raw, is_retry=False), plan, MessageId(7, offset).to_bytes(), 1)
        dues = [] if due_ms is None else [due_ms]
        return Batch(topic=topic, queue=queue, data=copied.record, lengths=[len(copied.record)], dues=dues, moved=True)

    def fail(self, queue: int, offset: int, due_ms: int | None) -> None:
        settled = Settled("g", self.topic.id, queue, offset, 1, Outcome.RETRIED)
        self.write(settled, self.copy(queue, offset, self.name if due_ms is None else SCHEDULE_TOPIC, due_ms))

    def fire(self, now_ms: int) -> int:
        due = self.store.take_due(now_ms, 100)
        for delay in due:
            found = self.store.queries.record_at(delay.offset)
            assert found is not None
            record = RecordView(found.record.buffer, found.record.start)
            queue = record.attributes.target_queue or 0
            raw = bytes(memoryview(record.buffer)[record.start : record.start + record.length])
            plan = CopyPlan(self.name, 6, None, says=Attributes(group="g"))
            copied = copy_record(read_failed(raw, is_retry=True), plan, b"", 1)
            batch = Batch(topic=self.name, queue=queue, data=copied.record, lengths=[len(copied.record)], moved=True)
            self.write(batch, DelaysDone(pack_offsets([delay.offset])))
        return len(due)

    def retrying(self) -> list[int]:
        return [self.store.queries.retrying("g", self.topic.id, queue) for queue in range(2)]

    def reopen(self, *, without_checkpoint: bool) -> None:
        self.store.close()
        if without_checkpoint:
            self.files.unlink("checkpoint")
        self.store = MessageStore(self.files, clock=self.clock)


@pytest.mark.parametrize("without_checkpoint", [False, True])
def test_what_waits_and_what_is_on_offer_is_counted_by_queue_also_after_a_restart(without_checkpoint: bool) -> None:
    rig = Rig()
    rig.send(0, 4)
    rig.send(1, 3)
    rig.fail(0, 0, 50)
    rig.fail(0, 1, 60)
    rig.fail(1, 0, 50)
    rig.fail(1, 2, None)
    assert rig.retrying() == [2, 2]
    rig.reopen(without_checkpoint=without_checkpoint)
    assert rig.retrying() == [2, 2]
    assert rig.fire(55) == 2
    assert rig.retrying() == [2, 2]
    retries = rig.store.queries.topic(rig.name).id
    rig.write(Settled("g", retries, 0, 0, 1), Settled("g", retries, 1, 0, 2))
    assert rig.retrying() == [1, 0]
    rig.reopen(without_checkpoint=without_checkpoint)
    assert rig.retrying() == [1, 0]
    rig.write(TopicDropped(retries))
    assert rig.retrying() == [0, 0]
    rig.store.close()


@pytest.mark.parametrize("without_checkpoint", [False, True])
def test_a_topic_with_expiring_messages_is_known_as_such_and_what_is_moved_then_may_expire(
    without_checkpoint: bool,
) -> None:
    rig = Rig()
    rig.send(0, 1)
    rig.fail(0, 0, None)
    assert rig.store.queries.expiring == set()
    rig.send(0, 1, expiring=True)
    assert rig.store.queries.expiring == {rig.topic.id}
    rig.fail(0, 1, None)
    retries = rig.store.queries.topic(rig.name).id
    rig.reopen(without_checkpoint=without_checkpoint)
    assert rig.store.queries.expiring == {rig.topic.id, retries}
    rig.store.delete_topic("orders")
    assert rig.store.queries.expiring == {retries}
    rig.store.close()
