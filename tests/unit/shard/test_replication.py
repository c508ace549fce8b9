"""A leader and its followers, with their frames handed over by the test."""

from __future__ import annotations

import random

import msgspec
import pytest

from dmq.errors import Diverged, NotInCluster, ProtocolError, StaleEpoch
from dmq.model import Durability, Message, TopicConfig
from dmq.protocol.cluster.replication import JOURNAL_BYTES_MAX, Confirm
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.shard.feed import WINDOW_BYTES
from dmq.shard.follower import Follower
from dmq.shard.in_sync import InSyncSet
from dmq.shard.leader import Leader
from dmq.shard.serving_right import Promise, Right
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.replica import Replica, join
from dmq.storage.store import Leading, MessageStore
from dmq.testing import FakeClock, MemoryFiles

SETTINGS = StoreSettings(segment_bytes=256 << 10, unit_bytes_max=256 << 10, body_bytes_max=128 << 10, ballast_bytes=0)
GONE = float("-inf")


class Member:
    """A directory, and what it is now."""

    def __init__(self, journal_id: int | None = None) -> None:
        self.files = MemoryFiles(rng=random.Random(1))
        self.journal_id = join(self.files, cluster="c", shard="s", journal_id=journal_id).journal_id
        self.replica = Replica(self.files, SETTINGS, FakeClock())
        self.promise = Promise(0.0)

    @property
    def id(self) -> int:
        return self.replica.membership.replica_id

    def lead(self, epoch: int, *others: Member, unsafe: int = 0) -> Leader:
        if self.replica.journal.segments:
            self.replica.flush()
        store = MessageStore(Leading(self.replica, epoch), SETTINGS, FakeClock(), checkpoint_inline=False)
        members = [other.id for other in others]
        in_sync = InSyncSet(
            self.id, members, epoch_end=store.queries.end, began_at=0.0, min_in_sync=min(2, len(others) + 1)
        )
        return Leader(store, self.replica.membership, in_sync, unsafe=unsafe)

    def depose(self, leader: Leader) -> None:
        leader._store.abandon()
        self.replica = Replica(self.files, SETTINGS, FakeClock())

    def follow(self, leader: Leader) -> Follower:
        follower = Follower(self.replica, self.promise, leader.epoch)
        follower.begin(leader.follow(follower.request()))
        return follower


def exchange(leader: Leader, member: Member, follower: Follower, now: float = 1.0) -> int:
    """Carry frames until there are none; returns how many there were."""
    frames = 0
    leader._store.flush()
    while True:
        sent = [*leader.frames(member.id, now)]
        for frame, body in sent:
            follower.take(frame, body)
            follower.apply()
        if follower.must_flush:
            member.replica.flush()
        if not sent and not follower.must_confirm:
            return frames
        frames += len(sent)
        leader.confirmed(member.id, follower.confirm(now), now)


def write(leader: Leader, count: int = 1, size: int = 100, *, first: int = 0) -> None:
    store = leader._store
    if store.queries.find_topic("t") is None:
        store.append([store.creation("t", TopicConfig(queues=1))])
        store.flush()
        leader.commit()
        if store.queries.find_topic("t") is None:
            return
    for number in range(first, first + count):
        encoded = encode_batch("t", "app", [Message(bytes(size))], sent_at_ms=1)
        batch = Batch(
            topic="t", queue=0, data=encoded.data, lengths=encoded.lengths, producer_id=5, first_sequence=number
        )
        store.append([batch], Durability.FLUSHED)
        store.flush()
        leader.wrote(1.0)
        leader.commit()


def journal_of(files: MemoryFiles) -> dict[str, bytes]:
    return {path: files.read_file(path) for path in files.paths() if path.startswith("journal/")}


@pytest.fixture
def pair() -> tuple[Member, Member]:
    first = Member()
    return first, Member(first.journal_id)


def test_a_new_member_gets_everything_and_the_journals_are_equal(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1)
    write(leader, 500, 2000)
    assert len(leader._store._journal.segments) > 3
    follower = two.follow(leader)
    exchange(leader, two, follower)
    assert journal_of(one.files) == journal_of(two.files)
    assert two.replica.derived.state.next == leader._store.queries.derived.state.next
    assert follower.is_level


def test_nothing_is_committed_before_the_follower_has_it(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1, two)
    follower = two.follow(leader)
    exchange(leader, two, follower)
    write(leader)  # the topic
    exchange(leader, two, follower)
    write(leader, 3)
    assert leader._store.queries.bounds("t", 0) == (0, 0)
    exchange(leader, two, follower)
    assert leader._store.queries.bounds("t", 0) == (0, 3)
    assert two.replica.derived.state.next == {}, "it does not know yet that they are committed"
    for frame, body in [leader._feeds[two.id].sign(leader.standpoint, 1.0)]:
        follower.take(frame, body)
        follower.apply()
    assert [*two.replica.derived.state.next.values()] == [3]


def test_what_a_deposed_leader_wrote_alone_is_cut(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1, two)
    follower = two.follow(leader)
    exchange(leader, two, follower)
    write(leader)
    exchange(leader, two, follower)
    write(leader, 3)
    exchange(leader, two, follower)
    committed = leader.in_sync.committed
    write(leader, 5, first=3)
    assert leader.in_sync.committed == committed
    one.depose(leader)
    second = two.lead(2, one)
    again = one.follow(second)
    assert one.replica.end == committed
    assert any(path.startswith("salvage/") for path in one.files.paths())
    exchange(second, one, again)
    assert second.in_sync.committed == second._store.queries.end
    assert journal_of(one.files) == journal_of(two.files)


def test_a_leader_sees_how_far_the_clock_of_a_follower_is_off(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1, two)
    follower = two.follow(leader)
    assert leader.skew_of(two.id, 5.0, 1_000_000) == 0
    leader.confirmed(two.id, follower.confirm(5.0), 5.0)
    assert leader.skew_of(two.id, 5.0, 1_000_000) == 0, "an older one does not tell"
    leader.confirmed(two.id, follower.confirm(5.0, 1_000_700), 5.0)
    assert leader.skew_of(two.id, 5.0, 1_000_000) == pytest.approx(0.7)
    assert leader.skew_of(two.id, 7.0, 1_002_000) == pytest.approx(0.7), "both have gone on"
    assert leader.skew_of(two.id, 7.0, 1_005_000) == pytest.approx(-2.3), "our own was put forward"


def test_a_member_that_shares_no_epoch_and_has_nothing_committed_starts_over(pair: tuple[Member, Member]) -> None:
    """Its journal was cut before the first epoch began, as a turned bit there makes it."""
    one, two = pair
    leader = one.lead(1)
    write(leader, 3)
    follower = two.follow(leader)
    for frame, body in leader.frames(two.replica.membership.replica_id, 1.0):
        follower.take(msgspec.structs.replace(frame, committed=0), body)
    two.replica.flush()
    (row,) = two.replica.epochs
    assert row.start > two.replica.applied == 0
    two.replica.cut(row.start)
    again = two.follow(leader)
    exchange(leader, two, again)
    assert journal_of(one.files) == journal_of(two.files)


def test_a_member_that_began_anew_and_has_nothing_yet_follows_the_next_leader(pair: tuple[Member, Member]) -> None:
    """It began where another leader's journal did, and that one died before it had sent anything."""
    one, two = pair
    leader = one.lead(1)
    write(leader, 3)
    two.replica.start_over(174_685)
    assert two.replica.start == two.replica.end == 174_685
    exchange(leader, two, two.follow(leader))
    assert journal_of(one.files) == journal_of(two.files)


def test_a_member_never_cuts_what_is_committed_unless_the_shard_was_promoted_with_loss(
    pair: tuple[Member, Member],
) -> None:
    one, two = pair
    leader = one.lead(1)
    write(leader, 2)
    follower = two.follow(leader)
    exchange(leader, two, follower)
    write(leader, 3, first=2)  # committed by the leader alone
    one.depose(leader)
    one.replica.commit(one.replica.end)
    second = two.lead(2)
    with pytest.raises(Diverged, match="nothing is cut"):
        one.follow(second)
    kept = one.replica.end
    two.depose(second)
    third = two.lead(3, unsafe=3)
    end = one.replica.end
    assert end == kept
    again = one.follow(third)
    assert one.replica.end < kept
    exchange(third, one, again)
    assert journal_of(one.files) == journal_of(two.files)


def test_a_unit_larger_than_a_frame_comes_in_pieces(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1)
    write(leader, 1, 3 * JOURNAL_BYTES_MAX)
    follower = two.follow(leader)
    assert exchange(leader, two, follower) >= 4
    assert journal_of(one.files) == journal_of(two.files)


def test_no_more_is_sent_than_the_window(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1)
    write(leader, 30, JOURNAL_BYTES_MAX // 2)
    two.follow(leader)
    sent = [body for _, body in leader.frames(two.id, 1.0)]
    assert WINDOW_BYTES <= sum(map(len, sent)) < WINDOW_BYTES + 2 * JOURNAL_BYTES_MAX
    assert [*leader.frames(two.id, 1.0)] == []


def test_an_idle_leader_gives_a_sign_twice_a_second(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1, two)
    follower = two.follow(leader)
    exchange(leader, two, follower, 1.0)
    assert [*leader.frames(two.id, 1.4)] == []
    ((frame, body),) = leader.frames(two.id, 1.5)
    assert (len(body), frame.sent) == (0, 1.5)


def test_frames_that_do_not_go_on_here_are_refused(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1)
    write(leader, 3)
    follower = two.follow(leader)
    ((frame, body),) = leader.frames(two.id, 1.0)
    first_body = bytes(body)
    follower.take(frame, body)
    with pytest.raises(ProtocolError, match="begins at 0 instead of"):
        follower.take(frame, body)
    write(leader, 1, first=3)
    ((frame, body),) = leader.frames(two.id, 1.0)
    with pytest.raises(ProtocolError, match="is another one here"):
        follower.take(msgspec.structs.replace(frame, before=(1, 12345)), body)
    with pytest.raises(StaleEpoch):
        follower.take(msgspec.structs.replace(frame, epoch=2), body)
    with pytest.raises(ProtocolError, match="not a unit that begins at"):
        follower.take(frame, first_body)
    follower.take(frame, body)


def test_strangers_and_stale_members_are_refused(pair: tuple[Member, Member]) -> None:
    one, _ = pair
    leader = one.lead(4)
    with pytest.raises(NotInCluster, match="check the addresses"):
        Member().follow(leader)
    two = Member(one.journal_id)
    with pytest.raises(StaleEpoch):
        leader.follow(Follower(two.replica, two.promise, 3).request())
    with pytest.raises(StaleEpoch):
        leader.confirmed(two.id, Confirm(3, 10, 10, 0.0), 1.0)


def test_a_leader_without_its_registry_serves_while_its_follower_promises(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1, two)
    follower = two.follow(leader)
    assert leader.right(1.0, GONE) is Right.NONE
    exchange(leader, two, follower, 1.0)
    assert leader.right(2.0, GONE) is Right.PROMISES
    assert not two.promise.is_over(4.9)
    assert leader.right(5.0, GONE) is Right.NONE
    assert leader.right(5.0, 6.0) is Right.SESSION


def test_a_leader_that_hears_no_member_though_one_is_there_gives_way(pair: tuple[Member, Member]) -> None:
    one, two = pair
    leader = one.lead(1, two)
    exchange(leader, two, two.follow(leader), 1.0)
    assert not leader.is_deaf(20.0, (two.id,))
    assert leader.is_deaf(21.0, (two.id,))
    assert not leader.is_deaf(21.0, ()), "a dead registry or a dead member is not a reason"
