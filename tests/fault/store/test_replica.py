"""Members of a shard on disks that crash, at the level of their stores."""

from __future__ import annotations

import errno
import json

import msgspec
import pytest

from dmq.errors import Diverged, InvalidSettings, RecordCorrupt, StoreFailed
from dmq.storage.journal.journal import list_segments
from dmq.storage.replica import Replica, join
from dmq.storage.state.events import Settled
from dmq.storage.store import Leading, MessageStore
from dmq.storage.upkeep.identity import read_identity, write_record
from dmq.testing import FakeClock, MemoryFiles
from tests.fault.store.shard_rig import MEMBERS, SMALL, ShardRig
from tests.sampling import SEED, sample_size

pytestmark = pytest.mark.sampled

SEEDS = sample_size(share=8, whole=400)
STEPS = 400


@pytest.mark.parametrize("number", range(SEEDS))
def test_what_is_committed_stays_whatever_dies(number: int) -> None:
    """Leaders change, members crash, lose power and disks, between any two steps."""
    rig = ShardRig(SEED * 10_000 + number)
    rig.elect()
    rng = rig.rng
    for _ in range(STEPS):
        match rng.choices(
            ("append", "settle", "ship", "part", "commit", "checkpoint", "crash", "depose", "wipe", "time"),
            (30, 8, 30, 8, 25, 6, 3, 2, 1, 2),
        )[0]:
            case "append":
                rig.append(rng.randrange(1, 40))
            case "settle":
                rig.settle()
            case "ship":
                rig.replicate_all()
            case "part":
                rig.replicate(rng.randrange(MEMBERS), size=1, flush=rng.random() < 0.5)
            case "commit":
                rig.commit()
                rig.quiet()
            case "checkpoint":
                rig.checkpoint(rng.randrange(MEMBERS))
            case "crash":
                rig.crash(rng.randrange(MEMBERS), power=rng.random() < 0.7)
            case "depose":
                rig.depose()
            case "wipe":
                rig.wipe_one()
            case "time":
                rig.clock.advance(900)
        if rig.leader is None:
            rig.elect()
        rig.check()
    rig.settle_down()
    rig.check()
    rig.check_derived()
    rig.check_messages()
    rig.close()


@pytest.fixture
def rig() -> ShardRig:
    """A shard whose members are equal, with something committed."""
    rig = ShardRig(1)
    rig.elect()
    for _ in range(20):
        rig.append(10)
        rig.replicate_all()
        rig.commit()
    rig.replicate_all()
    return rig


def follower_of(rig: ShardRig) -> tuple[int, Replica]:
    number = next(n for n in range(MEMBERS) if n != rig.leader)
    replica = rig.replicas[number]
    assert replica is not None
    return number, replica


def test_nothing_shows_before_it_is_committed(rig: ShardRig) -> None:
    assert rig.store is not None
    shown = rig.store.queries.bounds("t", 0), rig.store.queries.bounds("t", 1)
    rig.append(5)
    rig.store.flush()
    rig.store.checkpoint()
    assert (rig.store.queries.bounds("t", 0), rig.store.queries.bounds("t", 1)) == shown
    rig.replicate_all()
    _, replica = follower_of(rig)
    assert replica.end > replica.applied == rig.committed
    rig.commit()
    assert (rig.store.queries.bounds("t", 0), rig.store.queries.bounds("t", 1)) != shown


def test_a_checkpoint_and_a_roll_need_no_quiet_time(rig: ShardRig) -> None:
    """While more is always under way, segments end, old ones go, and checkpoints follow what is committed."""
    assert rig.store is not None
    store = rig.store
    for _ in range(300):
        rig.append(20)  # and no more while the store wants quiet
        if not store.wants_quiet:
            rig.replicate_all()
            rig.append(5)
        else:
            rig.replicate_all()
        rig.commit()
        rig.quiet()
        rig.clock.advance(30)
        if store.checkpoint_due:
            store.checkpoint()
    sizes = [segment.size for segment in rig.leading_journal.segments]
    assert max(sizes) < 2 * SMALL.segment_bytes
    assert rig.leading_journal.start > 0
    _, replica = follower_of(rig)
    replica.checkpoint()  # before it, the segments are needed
    rig.replicate_all()
    assert [segment.start for segment in replica.journal.segments] == [s.start for s in rig.leading_journal.segments]


def test_a_torn_tail_is_cut_whatever_later_units_say(rig: ShardRig) -> None:
    """Their `flushed_through` is the leader's, and says nothing of this disk."""
    number, replica = follower_of(rig)
    replica.checkpoint()
    known = replica.applied
    for _ in range(5):
        rig.append(3)
        rig.commit()
        rig.replicate_all()
    rig.commit()
    rig.replicate_all()
    assert replica.applied > known
    path = replica.journal.segment_at(known)
    assert path is not None
    replica.close()
    files = rig.files[number]
    files.flip_bit(path.path, known - path.start + 100)
    again = Replica(files, SMALL, rig.clock)
    assert again.end == again.applied == known
    assert again.membership.doubtful
    assert any(name.startswith("salvage/") for name in files.paths())
    rig.replicas[number] = again
    rig.replicate_all()
    assert again.end == rig.end(rig.leader or 0)
    again.caught_up()
    again.close()
    reopened = Replica(files, SMALL, rig.clock)
    assert not reopened.membership.doubtful
    reopened.close()


@pytest.mark.parametrize("in_sync", ["alone", "with another", "unknown"])
def test_a_leader_that_was_alone_in_its_set_cuts_nothing_that_it_had_flushed(in_sync: str) -> None:
    """Behind a bit that turned stands what was acknowledged, and no other member has it."""
    rig = ShardRig(3)
    rig.elect()
    leader, store = rig.leader, rig.store
    assert leader is not None
    assert store is not None
    bad = 0
    for number in range(12):
        bad = store.queries.end if number == 3 else bad
        rig.append(10)
        rig.replicate_all()
        rig.commit()
    store.flush()
    end, segment = store.queries.end, store.queries.journal_id
    following = [store.queries.bounds("t", queue)[1] for queue in range(2)]
    own = read_identity(rig.files[leader])
    assert own is not None
    assert own.member is not None
    members = [f"{own.member.replica_id:016x}", *(["00000000000000ff"] if in_sync == "with another" else [])]
    if in_sync != "unknown":
        write_record(rig.files[leader], json.dumps({"in_sync": members}).encode())
    path = next(segment for segment in list_segments(rig.files[leader]) if segment.start <= bad < segment.end)
    rig.files[leader].flip_bit(path.path, bad - path.start + 90)
    rig.crash(leader, power=False)
    again = rig.replicas[leader]
    assert again is not None
    assert again.journal_id == segment
    if in_sync != "alone":
        assert again.end == bad, "others have what is behind it, or may have it"
        assert again.membership.doubtful
        return
    assert again.end == end
    assert not again.membership.doubtful
    ((start, _),) = again.damage.ranges
    assert start == bad
    assert again.damage.has_holes
    assert again.applied == end, "the snapshot that the next leader begins with has all of it"
    leads = MessageStore(Leading(again, rig.epoch + 1), SMALL, rig.clock, checkpoint_inline=False)
    leads.flush()
    leads.confirm_replicated(leads.queries.end)
    assert [leads.queries.bounds("t", queue)[1] for queue in range(2)] == following
    leads.abandon()


def test_a_member_whose_first_unit_is_damaged_begins_anew(rig: ShardRig) -> None:
    """Without a checkpoint nothing is known to be committed here, and nothing can be placed without the snapshot."""
    number, replica = follower_of(rig)
    path = replica.journal.segments[0].path
    replica.close()
    rig.files[number].flip_bit(path, 100)
    again = Replica(rig.files[number], SMALL, rig.clock)
    assert again.end == again.applied == 0
    assert again.membership.doubtful
    rig.replicas[number] = again
    rig.replicate_all()
    assert again.end == rig.end(rig.leader or 0)
    rig.check()


def test_an_epoch_begins_before_the_segment_does(rig: ShardRig) -> None:
    """The last segment is full when a leader takes over: what it writes first is still the start of its epoch."""
    while SMALL.segment_bytes - rig.leading_journal.tail.size > 200:
        room = SMALL.segment_bytes - rig.leading_journal.tail.size
        assert rig.store is not None
        rig.store.append([Settled("g" * min(200, max(1, room - 120)), 3, 0, 0, 1)])
        rig.replicate_all()
        rig.commit()
        rig.replicate_all()
    _, replica = follower_of(rig)
    end = replica.end
    assert replica.applied == end
    store = MessageStore(Leading(replica, rig.epoch + 1), SMALL, rig.clock, checkpoint_inline=False)
    assert [row.start for row in store.epochs][-1] == end
    store.abandon()


def test_a_journal_begun_anew_has_no_checkpoint_before_something_is_committed(rig: ShardRig) -> None:
    """The snapshot that it opens with is not applied until then, and must be when it is opened again."""
    assert rig.store is not None
    while rig.leading_journal.start == 0:
        rig.append(20)
        rig.replicate_all()
        rig.commit()
        rig.quiet()
        rig.clock.advance(60)
        rig.store.checkpoint()
    number, replica = follower_of(rig)
    replica.start_over(rig.leading_journal.start)
    assert not replica.is_checkpoint_due()
    replica.take(rig.store.journal_bytes(replica.end, 1 << 20))
    assert not replica.is_checkpoint_due()
    replica.checkpoint()
    replica.close()
    rig.replicas[number] = Replica(rig.files[number], SMALL, rig.clock)
    rig.settle_down()
    rig.check_derived()
    again = rig.replicas[number]
    assert again is not None
    assert again.derived.state.next == rig.store.queries.derived.state.next


def test_units_that_wait_to_be_committed_are_applied_as_they_were_taken(rig: ShardRig) -> None:
    """Not as the disk gives them back: a bit that turned there is found by a read or a repair."""
    assert rig.store is not None
    number, replica = follower_of(rig)
    rig.settle_down()
    before = replica.end
    rig.append(20)
    replica.take(rig.store.journal_bytes(replica.end, 1 << 20))
    tail = replica.journal.tail
    rig.files[number].flip_bit(tail.path, before - tail.start + 100)
    replica.commit(replica.end)
    assert replica.applied == replica.end > before


def test_of_units_that_wait_to_be_committed_no_more_are_kept_than_may(
    rig: ShardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.store is not None
    _, replica = follower_of(rig)
    rig.settle_down()
    monkeypatch.setattr("dmq.storage.replica._KEPT_BYTES_MAX", 5000)
    for _ in range(30):
        rig.append(1)
        replica.take(rig.store.journal_bytes(replica.end, 1 << 20))
        assert sum(len(raw) for _, raw in replica._kept) == replica._kept_bytes <= 5000
    assert replica.end - replica.applied > 5000
    rig.replicate_all()
    rig.commit()
    replica.commit(replica.end)
    assert replica.applied == replica.end, "the others are read back"
    rig.settle_down()
    rig.check_derived()
    replica.take(b"")
    replica.commit(replica.end)
    assert len(replica._kept) <= 1


def test_a_follower_takes_a_checkpoint_if_that_alone_keeps_what_the_leader_has_dropped(rig: ShardRig) -> None:
    """Damage in segments that nobody else has could not be mended, and would stay until enough is written."""
    _, replica = follower_of(rig)
    while len(replica.journal.segments) < 3:
        rig.append(20)
        rig.replicate_all()
        rig.commit()
    rig.settle_down()
    replica.checkpoint()
    first = replica.journal.segments[1].start
    while replica.journal.segments[-2].start <= first:
        rig.append(20)
        rig.replicate_all()
        rig.commit()
    rig.settle_down()
    kept = replica.journal.segments[-1].start
    was_due = replica.is_checkpoint_due()
    replica.drop_before(kept)
    assert (was_due, replica.is_checkpoint_due()) == (False, True)
    assert replica.start < kept
    replica.checkpoint()
    assert replica.drop_before(kept)
    assert replica.start == kept
    assert not replica.is_checkpoint_due()


def test_a_follower_that_is_far_behind_takes_fewer_checkpoints(rig: ShardRig) -> None:
    assert rig.store is not None
    _, replica = follower_of(rig)
    rig.settle_down()
    replica.checkpoint()
    replica.settings = msgspec.structs.replace(SMALL, checkpoint_bytes=16 << 10)
    began = replica.applied
    due: list[tuple[bool, bool]] = []
    while not due or not due[-1][1]:
        rig.append(20)
        rig.replicate_all()
        rig.commit()
        replica.commit(rig.committed)
        due.append((replica.is_checkpoint_due(), replica.is_checkpoint_due(is_far_behind=True)))
        assert replica.applied - began <= 8 * replica.settings.checkpoint_bytes + SMALL.unit_bytes_max
    assert (False, False) in due
    assert (True, False) in due
    replica.checkpoint()
    assert not replica.is_checkpoint_due(is_far_behind=True)


def test_each_start_is_another_life(rig: ShardRig) -> None:
    number, replica = follower_of(rig)
    before = replica.membership
    replica.saw_record(17, b"{}")
    replica.saw_record(3, b"[]")
    replica.close()
    again = Replica(rig.files[number], SMALL, rig.clock)
    assert again.membership.life == before.life + 1
    assert again.membership.revision == 17
    assert again.membership.replica_id == before.replica_id
    again.close()


def test_a_member_is_not_opened_as_a_lone_store(rig: ShardRig) -> None:
    number, replica = follower_of(rig)
    replica.close()
    with pytest.raises(InvalidSettings, match="member of shard 's' of cluster 'c'"):
        MessageStore(rig.files[number], SMALL, rig.clock)


def test_a_lone_directory_is_no_member_until_it_joins() -> None:
    files, clock = MemoryFiles(), FakeClock()
    with MessageStore(files, SMALL, clock) as store:
        store.create_topic("t")
        journal_id = store.queries.journal_id
    with pytest.raises(InvalidSettings, match="join it to one first"):
        Replica(files, SMALL, clock)
    with pytest.raises(InvalidSettings, match="choose an empty directory"):
        join(files, cluster="c", shard="s", journal_id=journal_id + 1)
    join(files, cluster="c", shard="s", journal_id=journal_id)
    replica = Replica(files, SMALL, clock)
    assert replica.end > 0
    replica.commit(replica.end)
    assert "t" in replica.derived.state.topics
    replica.close()


def test_what_is_committed_is_not_cut(rig: ShardRig) -> None:
    _, replica = follower_of(rig)
    end = replica.end
    with pytest.raises(Diverged, match="nothing is cut"):
        replica.cut(replica.journal.start)
    assert replica.end == end
    replica.cut(rig.rows(0)[-1].start, accept_loss=True)
    assert replica.end == replica.applied == rig.rows(0)[-1].start


def test_units_that_do_not_follow_are_refused(rig: ShardRig) -> None:
    assert rig.store is not None
    _, replica = follower_of(rig)
    start = replica.end
    rig.append(3)
    rig.append(3)
    raw = bytearray(rig.store.journal_bytes(start, 1 << 20))
    one = bytes(rig.store.journal_bytes(start, 1))
    with pytest.raises(RecordCorrupt, match="fails its checksum"):
        replica.take(bytes(raw[:10]) + b"\x01" + bytes(raw[11:]))
    assert replica.end == start
    raw[len(one) + 50] ^= 1
    with pytest.raises(RecordCorrupt, match=f"journal offset {start + len(one)} fails"):
        replica.take(raw)
    assert replica.end == start + len(one), "the sound unit before it was taken"
    with pytest.raises(RecordCorrupt, match="does not follow here"):
        replica.take(one)


def test_after_a_failed_flush_nothing_is_taken(rig: ShardRig) -> None:
    assert rig.store is not None
    number, replica = follower_of(rig)
    rig.append(3)
    replica.take(rig.store.journal_bytes(replica.end, 1 << 20))
    rig.files[number].fail("sync", 1, errno.EIO)
    with pytest.raises(StoreFailed):
        replica.flush()
    with pytest.raises(StoreFailed):
        replica.commit(replica.end)


def test_a_cut_that_fails_ends_the_replica_with_its_reason(rig: ShardRig) -> None:
    number, replica = follower_of(rig)
    rig.append(3)
    assert rig.store is not None
    cut = replica.end
    replica.take(rig.store.journal_bytes(cut, 1 << 20))
    rig.files[number].fail("sync", 1, errno.EIO)
    with pytest.raises(StoreFailed):
        replica.cut(cut)
    with pytest.raises(StoreFailed):
        replica.checkpoint()
    replica.close()
