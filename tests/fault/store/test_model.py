"""Any sequence of what a store can be asked for, against a plain list. (J-03, J-10, R-05, D-14, D-15, D-18, D-20)"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dmq.errors import OffsetGone, StaleEpoch, StorageError, TopicExists, UnknownTopic
from dmq.model import Durability, TopicConfig
from dmq.records import RecordView, tag_hash
from dmq.settings import StoreSettings
from dmq.storage.delay.wheel import Delay
from dmq.storage.read.reader import TagFilter
from dmq.storage.state.events import DelaysDone, PositionDropped, pack_offsets
from dmq.storage.upkeep.checkpointer import CheckpointPlan
from tests.fault.store.comparison import check_resend
from tests.fault.store.model import Expected
from tests.fault.store.rig import SMALL, Rig
from tests.sampling import sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

TOPICS = ("orders", "events", "%DLQ%billing")
DERIVED = ("queue", "runs", "offset", "index", "delay", "checkpoint")
# With the second, checkpoints happen inside of appends.
SETTINGS = (SMALL, msgspec.structs.replace(SMALL, checkpoint_bytes=9000, keep_unconsumed=True))

durabilities = st.sampled_from((Durability.STORED, Durability.FLUSHED))
sizes = st.sampled_from((1, 2, 5, 15, 16, 17, 60, 150))


def raw_of(record: RecordView) -> bytes:
    return bytes(record.buffer[record.start : record.start + record.length])


class Life(RuleBasedStateMachine):
    """A store and its model; rules do to both what may be done to a store."""

    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Delay] = []
        self.plan: CheckpointPlan | None = None
        self.epochs = dict.fromkeys((1, 2, 3), 0)

    @initialize(seed=st.integers(0, 1 << 32), which=st.sampled_from(SETTINGS))
    def begin(self, seed: int, which: StoreSettings) -> None:
        self.rig = Rig(seed, which)

    # --- topics -----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(TOPICS), queues=st.integers(1, 3))
    def create_topic(self, name: str, queues: int) -> None:
        if name in self.rig.names:
            with pytest.raises(TopicExists):
                self.rig.store.create_topic(name, system=True)
            return
        carry_for = "billing" if name == "%DLQ%billing" else None
        self.rig.create(name, TopicConfig(queues=queues, carry_for=carry_for))

    @rule(name=st.sampled_from(TOPICS))
    def delete_topic(self, name: str) -> None:
        if name in self.rig.names:
            self.rig.delete(name)
        else:
            with pytest.raises(UnknownTopic):
                self.rig.store.delete_topic(name)

    def queue(self, data: st.DataObject) -> tuple[str, int]:
        name = data.draw(st.sampled_from(self.rig.names))
        return name, data.draw(st.integers(0, self.rig.store.queries.topic(name).config.queues - 1))

    @property
    def has_topics(self) -> bool:
        return bool(self.rig.names)

    # --- writing ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.has_topics)
    @rule(data=st.data(), count=sizes, durability=durabilities, producer=st.sampled_from((0, 1, 2, 3)))
    def append(self, data: st.DataObject, count: int, durability: Durability, producer: int) -> None:
        name, queue = self.queue(data)
        body_bytes = 9000 if count == 1 else 60
        sent = self.rig.batch(
            name,
            queue,
            self.rig.messages(count, body_bytes),
            producer=producer,
            epoch=self.epochs.get(producer, 0),
            named=producer == 3,
        )
        placement = self.rig.append([sent], durability)[0]
        assert (placement.count, placement.duplicate) == (count, False)
        if durability == Durability.FLUSHED and self.rig.store.queries.flushed < placement.unit_end:
            assert self.rig.store.queries.visible < placement.unit_end

    @precondition(lambda self: self.has_topics)
    @rule(data=st.data(), count=st.integers(2, 6), durability=durabilities, atomic=st.booleans())
    def append_several(self, data: st.DataObject, count: int, durability: Durability, atomic: bool) -> None:
        items: list[Expected] = []
        for _ in range(count):
            name, queue = self.queue(data)
            large = data.draw(st.sampled_from((50, 9000)))
            items.append(self.rig.batch(name, queue, self.rig.messages(3, large), producer=8))
        placements = self.rig.append(items, durability, atomic=atomic)
        assert len({p.unit_start for p in placements}) == 1 or not atomic

    @precondition(lambda self: self.rig.remembered())
    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        places = self.rig.remembered()
        check_resend(self.rig.store, places[data.draw(st.integers(0, len(places) - 1))])

    @precondition(lambda self: self.has_topics)
    @rule(data=st.data(), producer=st.sampled_from((1, 2)))
    def replace_producer(self, data: st.DataObject, producer: int) -> None:
        name, queue = self.queue(data)
        self.epochs[producer] += 1
        new = self.rig.batch(name, queue, self.rig.messages(2), producer=producer, epoch=self.epochs[producer])
        self.rig.append([new])
        old = self.rig.batch(name, queue, self.rig.messages(1), producer=producer, epoch=self.epochs[producer] - 1)
        with pytest.raises(StaleEpoch):
            self.rig.store.append([old.batch])

    # --- reading ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.has_topics)
    @rule(
        data=st.data(),
        limit=st.sampled_from((1, 7, 1000)),
        space=st.sampled_from((1, 500, 1 << 20)),
        tags=st.sampled_from((None, ("paid",), ("open", "späť"), ("nobody",))),
        look=st.sampled_from((1, 9, 1 << 17)),
    )
    def read(self, data: st.DataObject, limit: int, space: int, tags: tuple[str, ...] | None, look: int) -> None:
        name, queue = self.queue(data)
        first, following = self.rig.store.queries.bounds(name, queue)
        start = data.draw(st.integers(first, following))
        messages = self.rig.model.seen.queues.get((self.rig.id_of(name), queue), [])
        hashes = None if tags is None else [tag_hash(tag) for tag in tags]
        tag_filter = None if hashes is None else TagFilter(hashes, look)
        at, found = start, []
        for _ in range(3):
            part = self.rig.store.queries.read(name, queue, at, limit, max_bytes=space, tags=tag_filter)
            assert len(part) <= limit
            assert hashes is None or part.next_offset <= at + look
            assert len(part) <= 1 or int(part.lengths.sum()) <= space
            assert at == following or part.next_offset > at
            found += list(zip(part.offsets.tolist(), map(raw_of, part.records()), strict=True))
            at = part.next_offset
        wanted = [
            (offset, message.raw)
            for offset, message in enumerate(messages[start:at], start)
            if hashes is None or int.from_bytes(message.raw[7:9], "big") in hashes
        ]
        assert found == wanted

    @precondition(lambda self: self.has_topics)
    @rule(data=st.data())
    def read_outside(self, data: st.DataObject) -> None:
        name, queue = self.queue(data)
        first, following = self.rig.store.queries.bounds(name, queue)
        for offset in (first - 1, following + 1):
            with pytest.raises(OffsetGone) as caught:
                self.rig.store.queries.read(name, queue, offset)
            assert (caught.value.detail["first"], caught.value.detail["next"]) == (first, following)

    # --- positions --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.has_topics)
    @rule(
        data=st.data(), group=st.sampled_from(("audit", "billing")), bits=st.binary(max_size=4), durability=durabilities
    )
    def settle(self, data: st.DataObject, group: str, bits: bytes, durability: Durability) -> None:
        name, queue = self.queue(data)
        following = self.rig.store.queries.bounds(name, queue)[1]
        start = data.draw(st.integers(0, following))
        count = data.draw(st.integers(1, 40))
        self.rig.append([self.rig.settle(group, name, queue, start, min(count, following - start), bits)], durability)

    @precondition(lambda self: self.has_topics)
    @rule(data=st.data())
    def set_position(self, data: st.DataObject) -> None:
        name, queue = self.queue(data)
        offset = data.draw(st.integers(0, self.rig.store.queries.bounds(name, queue)[1]))
        self.rig.append([self.rig.put_at("audit", name, queue, offset)])

    @rule()
    def drop_group(self) -> None:
        self.rig.append([PositionDropped("audit")])

    # --- delays and transactions ------------------------------------------------------------------------------------

    @rule(
        fragment=st.integers(0, 9),
        ahead=st.lists(st.integers(0, 9_000_000), min_size=1, max_size=20),
        durability=durabilities,
    )
    def schedule(self, fragment: int, ahead: list[int], durability: Durability) -> None:
        dues = [self.rig.clock.now_ms() + ms for ms in ahead]
        self.rig.append([self.rig.delayed(fragment, self.rig.messages(len(dues)), dues, "orders")], durability)

    @rule(limit=st.integers(1, 30))
    def take_due(self, limit: int) -> None:
        now_ms = self.rig.clock.now_ms()
        taken = self.rig.store.take_due(now_ms, limit)
        held = {delay.offset for delay in self.taken}
        pending = self.rig.model.seen.delays.keys() & self.rig.model.written.delays.keys() - held
        due = [offset for offset in pending if self.rig.model.seen.delays[offset][0] <= now_ms]
        assert len(taken) == min(limit, len(due)), "some were due, and were not handed out"
        assert {delay.offset for delay in taken} <= set(due), "handed out twice, or too early"
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(deliver=st.booleans(), durability=durabilities)
    def end_delay(self, deliver: bool, durability: Durability) -> None:
        delay = self.taken.pop(0)
        if deliver:
            self.rig.deliver(delay, durability)
        else:
            self.rig.store.release_due([delay.offset])

    @precondition(lambda self: self.rig.model.written.delays.keys() - {delay.offset for delay in self.taken})
    @rule(data=st.data(), durability=durabilities)
    def cancel_delay(self, data: st.DataObject, durability: Durability) -> None:
        pending = sorted(self.rig.model.written.delays.keys() - {delay.offset for delay in self.taken})
        offset = data.draw(st.sampled_from(pending))
        self.rig.append([DelaysDone(pack_offsets([offset]), "cancelled")], durability)

    @rule(count=st.integers(1, 3), durability=durabilities)
    def prepare(self, count: int, durability: Durability) -> None:
        self.rig.append([self.rig.half(0, self.rig.messages(count), "orders")], durability)

    @precondition(lambda self: self.rig.model.written.transactions)
    @rule(data=st.data(), commit=st.booleans())
    def end_transaction(self, data: st.DataObject, commit: bool) -> None:
        self.rig.flush()
        message_id = data.draw(st.sampled_from(sorted(self.rig.model.seen.transactions)))
        self.rig.end_transaction(message_id, commit=commit)

    # --- upkeep -----------------------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.rig.flush()
        assert self.rig.store.queries.visible == self.rig.store.queries.flushed == self.rig.store.queries.end

    @precondition(lambda self: self.plan is None)
    @rule()
    def checkpoint(self) -> None:
        self.rig.checkpoint()

    @precondition(lambda self: self.plan is None and self.rig.settings is SMALL)
    @rule()
    def begin_checkpoint(self) -> None:
        """In steps, as a broker does it: whatever comes between them is not in it."""
        self.rig.upkeep(self._begin_checkpoint)

    def _begin_checkpoint(self) -> None:
        self.plan = self.rig.store.begin_checkpoint()

    @precondition(lambda self: self.plan is not None)
    @rule(fails_at=st.sampled_from((None, None, 1, 3, 6, 9)))
    def finish_checkpoint(self, fails_at: int | None) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        problem: StorageError | None = None
        fault = self.rig.files.fail("write", fails_at or 1 << 30)
        try:
            plan.write()
        except StorageError as error:
            problem = error
        self.rig.files.heal(fault)
        self.rig.upkeep(lambda: self.rig.store.finish_checkpoint(plan, problem))

    @rule(minutes=st.integers(1, 50))
    def let_time_pass(self, minutes: int) -> None:
        self.rig.clock.advance(60.0 * minutes)

    @precondition(lambda self: self.plan is None)
    @rule()
    def retain(self) -> None:
        self.rig.retain()

    @rule()
    def check(self) -> None:
        self.give_back()
        self.rig.check()

    # --- ends and beginnings ----------------------------------------------------------------------------------------

    def give_back(self) -> None:
        self.rig.store.release_due([delay.offset for delay in self.taken])
        self.taken.clear()

    @precondition(lambda self: self.plan is None)
    @rule()
    def close_and_reopen(self) -> None:
        self.taken.clear()
        self.rig.close()
        self.rig.check()

    @rule()
    def kill_and_reopen(self) -> None:
        self.taken.clear()
        self.plan = None
        self.rig.kill()
        self.rig.check()

    @rule(seed=st.integers(0, 1 << 32))
    def crash_and_reopen(self, seed: int) -> None:
        self.taken.clear()
        self.plan = None
        self.rig.crash(random.Random(seed))
        self.rig.check()

    @precondition(lambda self: self.plan is None)
    @rule(which=st.sets(st.sampled_from(DERIVED), min_size=1))
    def lose_derived_files(self, which: set[str]) -> None:
        self.taken.clear()
        self.rig.upkeep(self.rig.store.close)
        for path in which:
            self.rig.files.remove(path)
        self.rig.open(durable=self.rig.model.end)
        self.rig.check()

    def teardown(self) -> None:
        self.give_back()
        self.rig.flush()
        self.rig.check()


TestLife = pytest.mark.sampled(Life.TestCase)
TestLife.settings = settings(
    max_examples=sample_size(share=150, whole=6000),
    stateful_step_count=sample_size(share=40, whole=60),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
