"""Which segments go: what an existing group has not consumed stays, unless a setting asks for it. (R-04)"""

from __future__ import annotations

import logging

import msgspec
import pytest

from dmq.model import TopicConfig
from dmq.settings import StoreSettings
from dmq.storage.replica import Replica, join
from dmq.storage.state.events import PositionDropped, PositionSet, Settled
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.integration.broker.directories import batch

HOUR = 3600.0
SETTINGS = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, retention_hours=1.0)


class Kept:
    """A store with some segments of one topic."""

    def __init__(self, **changes: object) -> None:
        self.files = MemoryFiles()
        self.clock = FakeClock()
        self.store = MessageStore(self.files, msgspec.structs.replace(SETTINGS, **changes), self.clock)
        self.topic = self.store.create_topic("orders", TopicConfig(queues=1)).id
        self.group("billing", 0)

    def group(self, name: str, offset: int) -> None:
        self.store.append([PositionSet(name, self.topic, 0, offset)])

    def fill(self, segments: int = 3) -> None:
        before = self.store.stats()["segments"]
        while self.store.stats()["segments"] < before + segments:
            self.store.append([batch(bytes(4000))])
        self.store.flush()

    def consume(self, group: str, start: int, end: int) -> None:
        self.store.append([Settled(group, self.topic, 0, start, count=end - start)])
        self.store.flush()

    @property
    def bounds(self) -> tuple[int, int]:
        return self.store.queries.bounds("orders", 0)

    def fill_disk(self, share: float) -> None:
        self.files.capacity_bytes = int(sum(self.files.paths().values()) / share)
        self.store.space.look()


@pytest.mark.parametrize("share", [0.5, 0.8, 0.88, 0.95, 0.999])
def test_no_mark_drops_what_a_group_has_not_consumed(share: float) -> None:
    kept = Kept()
    kept.fill()
    kept.fill_disk(share)
    kept.clock.advance(100 * HOUR)
    assert kept.store.retain() == 0
    assert kept.bounds[0] == 0


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_no_mark_drops_what_is_younger_than_the_retention(share: float) -> None:
    kept = Kept()
    kept.fill()
    kept.consume("billing", 0, kept.bounds[1])
    kept.fill_disk(share)
    kept.clock.advance(0.9 * HOUR)
    assert kept.store.retain() == 0


def test_what_every_group_has_consumed_goes_when_it_is_past_the_retention() -> None:
    kept = Kept()
    kept.fill(4)
    kept.consume("billing", 0, kept.bounds[1])
    kept.clock.advance(2 * HOUR)
    assert kept.store.retain() == 4
    assert kept.store.retention.dropped > 0
    assert kept.store.retention.lost == 0


def test_segments_go_as_far_as_the_slowest_group_has_come() -> None:
    kept = Kept()
    kept.fill(6)
    half = kept.bounds[1] // 2
    kept.consume("billing", 0, half)
    kept.clock.advance(2 * HOUR)
    assert 0 < kept.store.retain() < 6
    first = kept.bounds[0]
    assert first <= half
    assert half - first < 20, "all before the segment it is in is gone"


def test_a_group_that_holds_segments_is_named_and_lets_go_when_it_is_deleted(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.fill()
    kept.clock.advance(2 * HOUR)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert kept.store.retain() == 0
    retention = kept.store.retention
    assert [hold.group for hold in retention.holds] == ["billing"]
    assert retention.held_bytes > 3 * 60_000
    told = [message for message in caplog.messages if "retention waits" in message]
    assert len(told) == 1
    assert "billing in orders" in told[0]
    kept.store.append([PositionDropped("billing")])
    kept.store.flush()
    assert kept.store.retain() == 3
    assert (retention.holds, retention.held_bytes) == ([], 0)


def test_a_group_for_whom_a_topic_is_carried_forward_holds_nothing() -> None:
    kept = Kept()
    kept.store.append([PositionDropped("billing")])
    letters = kept.store.create_topic("%DLQ%g", TopicConfig(queues=1, carry_for="g"), system=True)
    kept.store.append([batch(b"dead", topic="%DLQ%g"), PositionSet("g", letters.id, 0, 0)])
    kept.fill()
    kept.clock.advance(2 * HOUR)
    assert kept.store.retain() == 3
    assert kept.store.queries.bounds("%DLQ%g", 0) == (1, 2)


def test_segments_stay_while_another_member_may_have_what_is_damaged_and_still_wanted() -> None:
    kept = Kept()
    kept.store.create_topic("retries", TopicConfig(queues=1, carry_for="billing"))
    kept.store.append([batch(b"a retry that is wanted", topic="retries")])
    kept.fill()
    kept.consume("billing", 0, kept.bounds[1])
    kept.clock.advance(100 * HOUR)
    path = min(path for path in kept.files.paths() if path.endswith(".journal"))
    kept.files.flip_bit(path, kept.files.read_file(path).index(b"a retry that is wanted"))
    kept.store._reader.cache.clear()
    kept.store.damage.expect_mending()
    assert kept.store.retain() == 0
    ((start, end),) = kept.store.damage.ranges
    kept.store.damage.give_up(start, end)
    assert kept.store.retain() > 0, "nobody has it any more"


@pytest.mark.parametrize(
    ("changes", "because"),
    [({"keep_unconsumed": False}, "keep_unconsumed = false"), ({"disk_force": 0.85}, "disk_force = 0.85")],
)
def test_what_goes_unconsumed_by_a_setting_is_told_and_counted(
    changes: dict[str, object], because: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(**changes)
    kept.fill()
    kept.group("late", 5)
    kept.fill_disk(0.99)
    if "disk_force" not in changes:
        kept.clock.advance(2 * HOUR)
    with caplog.at_level(logging.WARNING):
        assert kept.store.retain() > 0
    first, retention = kept.bounds[0], kept.store.retention
    assert retention.dropped == first
    assert retention.lost == first + first - 5
    assert sorted((hold.group, count) for hold, count in retention.losses.items()) == [
        ("billing", first),
        ("late", first - 5),
    ]
    (told,) = [message for message in caplog.messages if "had not consumed" in message]
    assert f"{first} of orders for billing" in told
    assert because in told
    position = kept.store.queries.position("billing", "orders", 0)
    assert position is not None
    assert retention.dropped_from("billing", kept.topic, 0, position, first=first) == first


def test_what_a_group_lost_is_known_after_a_restart_until_it_comes_there() -> None:
    kept = Kept(keep_unconsumed=False)
    kept.fill()
    kept.clock.advance(2 * HOUR)
    kept.store.retain()
    first = kept.bounds[0]
    kept.store.close()
    again = MessageStore(kept.files, SETTINGS, kept.clock)
    position = again.queries.position("billing", "orders", 0)
    assert position is not None
    assert again.retention.dropped_from("billing", kept.topic, 0, position, first=first) == first
    again.close()


def test_a_crowded_disk_ends_the_last_segment_once_all_of_it_is_past_the_retention() -> None:
    kept = Kept()
    kept.store.append([batch(bytes(4000)) for _ in range(5)])
    kept.consume("billing", 0, 5)
    kept.clock.advance(2 * HOUR)
    assert kept.store.retain() == 0, "the disk is not crowded"
    kept.fill_disk(0.8)
    assert kept.store.retain() == 1
    assert kept.bounds == (5, 5)


def test_a_shards_leader_drops_nothing_before_what_it_carried_out_of_it_is_committed() -> None:
    """The next leader may not have that: then it is needed where it was."""
    files, clock = MemoryFiles(), FakeClock()
    join(files, cluster="c", shard="s")
    store = MessageStore(Leading(Replica(files, SETTINGS, clock), 1), SETTINGS, clock, checkpoint_inline=False)

    def commit() -> None:
        store.flush()
        store.confirm_replicated(store.queries.end)

    store.append([store.creation("orders", TopicConfig(queues=1))])
    store.append([store.creation("%DLQ%g", TopicConfig(queues=1, carry_for="g"), system=True)])
    commit()
    store.append([PositionSet("g", store.queries.topic("%DLQ%g").id, 0, 0)])
    store.append([batch(b"letter", topic="%DLQ%g")])
    while store.stats()["segments"] < 3:
        store.append([batch(bytes(4000))])
        commit()
    clock.advance(2 * HOUR)
    assert store.retain() == 0
    assert store.wants_quiet, "what was carried is not committed"
    assert store.queries.start == 0
    assert store.retain() == 0
    commit()
    assert store.retain() > 0
    assert store.queries.start > 0
    (letter,) = store.queries.read("%DLQ%g", 0, store.queries.bounds("%DLQ%g", 0)[0]).records()
    assert bytes(letter.body) == b"letter"
    store.abandon()
