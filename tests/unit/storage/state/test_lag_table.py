"""Running lags are those of a recount, whatever happens to topics, groups and segments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import Message, TopicConfig
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import Outcome, PositionDropped, Settled
from dmq.storage.state.positions import LagTable, Pair
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

TOPICS: Final = ("orders", "bills")
GROUPS: Final = ("billing", "audit", "search")
SMALL: Final = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=16 << 10,
    body_bytes_max=8 << 10,
    retention_bytes=64 << 10,
    retention_hours=None,
    keep_unconsumed=False,
)


class Rig:
    """A store with small segments, and what can happen to it."""

    def __init__(self) -> None:
        self.files, self.clock = MemoryFiles(), FakeClock()
        self.open()

    def open(self) -> None:
        self.store = MessageStore(self.files, SMALL, self.clock)

    @property
    def lags(self) -> LagTable:
        return self.store.queries.lags

    def send(self, topic: str, queue: int, count: int, size: int) -> None:
        if self.queues(topic) <= queue:
            return
        encoded = encode_batch(topic, "shop", [Message(bytes(range(256)) * (size // 256 + 1))] * count, sent_at_ms=1)
        batch = Batch(
            topic=topic,
            queue=queue,
            data=encoded.data,
            lengths=encoded.lengths,
            hash_index=encoded.hash_index,
            hashes=encoded.hashes,
        )
        self.store.append([batch])
        self.store.flush()

    def queues(self, topic: str) -> int:
        found = self.store.queries.find_topic(topic)
        return 0 if found is None else found.config.queues

    def settle(self, topic: str, group: str, queue: int, start: int, bits: int) -> None:
        found = self.store.queries.find_topic(topic)
        if found is None or queue >= found.config.queues:
            return
        following = self.store.queries.bounds(topic, queue)[1]
        count = min(bits.bit_length(), following - start)
        bits &= (1 << max(0, count)) - 1
        if bits:
            event = Settled(
                group,
                found.id,
                queue,
                start,
                count=count,
                bitmap=bits.to_bytes(-(-count // 8), "little"),
                outcome=Outcome.ACKED,
            )
            self.store.append([event])
            self.store.flush()

    def seek(self, topic: str, group: str, queue: int, offset: int) -> None:
        if queue < self.queues(topic):
            self.store.set_position(group, topic, queue, min(offset, self.store.queries.bounds(topic, queue)[1]))
            self.store.flush()

    def forget(self, group: str, topic: str | None) -> None:
        found = None if topic is None else self.store.queries.find_topic(topic)
        if topic is None or found is not None:
            self.store.append([PositionDropped(group, None if found is None else found.id)])
            self.store.flush()

    def create(self, topic: str, queues: int) -> None:
        before = self.queues(topic)
        if not before:
            self.store.create_topic(topic, TopicConfig(queues=queues))
        elif queues > before:
            self.store.append([self.store.change(topic, TopicConfig(queues=queues))])
            self.store.flush()

    def delete(self, topic: str) -> None:
        if self.queues(topic):
            self.store.delete_topic(topic)

    def retain(self) -> None:
        self.store.retain()

    def restart(self, *, is_clean: bool) -> None:
        if is_clean:
            self.store.close()
        else:
            self.files = self.files.crash(random.Random(1))
        self.open()

    def recount(self) -> dict[Pair, int]:
        """Lags as an operator would count them: the offsets that are there and not settled."""
        queries = self.store.queries
        found = {}
        for group in queries.groups():
            for topic_id in {topic_id for topic_id, _ in queries.positions_of(group)}:
                topic = queries.topic_by_id(topic_id)
                assert topic is not None
                lag = 0
                for queue in range(topic.config.queues):
                    first, following = queries.bounds(topic.name, queue)
                    position = queries.position(group, topic.name, queue)
                    lag += sum(position is None or not position.is_settled(at) for at in range(first, following))
                found[Pair(topic_id, group)] = lag
        return found


topics, groups, queues = st.sampled_from(TOPICS), st.sampled_from(GROUPS), st.integers(0, 2)
steps: st.SearchStrategy[tuple[Callable[..., None], tuple[object, ...]]] = st.one_of(
    st.tuples(st.just(Rig.send), st.tuples(topics, queues, st.integers(1, 4), st.sampled_from([1, 5000]))),
    st.tuples(st.just(Rig.settle), st.tuples(topics, groups, queues, st.integers(0, 20), st.integers(1, 1 << 24))),
    st.tuples(st.just(Rig.seek), st.tuples(topics, groups, queues, st.integers(0, 30))),
    st.tuples(st.just(Rig.create), st.tuples(topics, st.integers(1, 3))),
    st.tuples(st.just(Rig.forget), st.tuples(groups, st.none() | topics)),
    st.tuples(st.just(Rig.delete), st.tuples(topics)),
    st.tuples(st.just(Rig.retain), st.just(())),
    st.tuples(st.just(lambda rig: rig.restart(is_clean=True)), st.just(())),
    st.tuples(st.just(lambda rig: rig.restart(is_clean=False)), st.just(())),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, min_size=5, max_size=60))
def test_running_lags_are_those_of_a_recount(happened: list[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
    rig = Rig()
    rig.create("orders", 2)
    for step, arguments in happened:
        step(rig, *arguments)
        while rig.lags.is_behind:
            rig.lags.catch_up(1)
        counted = rig.recount()
        assert {pair: rig.lags.of(pair) for pair in rig.lags} == counted
        assert rig.lags.total() == sum(counted.values())
        shown = [rig.lags.of(pair) for pair in rig.lags.largest(2)]
        assert shown == sorted(counted.values(), reverse=True)[:2]


def test_what_retention_drops_is_no_longer_waited_for() -> None:
    rig = Rig()
    rig.create("orders", 1)
    rig.seek("orders", "billing", 0, 0)
    pair = next(iter(rig.lags))
    for _ in range(60):
        rig.send("orders", 0, 1, 5000)
    rig.retain()
    first, following = rig.store.queries.bounds("orders", 0)
    assert first > 0
    assert rig.lags.is_behind
    assert rig.lags.of(pair) == following
    rig.lags.catch_up(10)
    assert rig.lags.of(pair) == following - first
    rig.settle("orders", "billing", 0, 0, (1 << first + 2) - 1)  # of it, what is gone was counted before
    assert rig.lags.of(pair) == following - first - 2


def test_slots_of_groups_that_are_gone_are_used_again() -> None:
    rig = Rig()
    rig.create("orders", 1)
    rig.send("orders", 0, 4, 1)
    for number in range(50):
        rig.seek("orders", f"group-{number}", 0, 0)
        assert rig.lags.total() == 4
        rig.forget(f"group-{number}", None)
        assert rig.lags.total() == 0
    assert len(rig.lags) == 0
    assert len(rig.lags._pairs) == 1
