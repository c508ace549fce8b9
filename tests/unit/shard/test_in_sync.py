"""The in-sync set: each rule by itself, then against a registry that loses, delays and forgets to answer writes."""

from __future__ import annotations

import random

import pytest

from dmq.shard.in_sync import InSyncSet

LEADER, A, B, C = 1, 2, 3, 4
START = 100  # where the epoch's first unit ends


def in_sync(*members: int, min_in_sync: int = 2) -> InSyncSet:
    return InSyncSet(LEADER, members, epoch_end=START, began_at=0.0, min_in_sync=min_in_sync, lag_seconds=10.0)


def test_committed_is_what_every_member_has_flushed() -> None:
    mine = in_sync(A, B)
    mine.commit(500)
    mine.confirmed(A, 300, 1.0)
    assert mine.commit() == 0
    mine.confirmed(B, 200, 1.0)
    assert mine.commit() == 200
    mine.confirmed(B, 150, 1.5)
    assert mine.commit() == 200, "a confirmation that comes late takes nothing back"


def test_nothing_is_committed_by_too_few() -> None:
    mine = in_sync()
    mine.commit(500)
    assert not mine.is_enough
    assert mine.commit() == 0
    alone = in_sync(min_in_sync=1)
    alone.commit(500)
    assert alone.commit() == 500


def test_who_joins_counts_before_the_write_and_who_leaves_until_its_answer() -> None:
    mine = in_sync(A)
    mine.commit(500)
    mine.confirmed(A, 500, 1.0)
    assert mine.commit() == 500
    mine.commit(900)
    mine.confirmed(A, 900, 1.0)
    mine.begin_write(frozenset((LEADER, A, B)))
    assert mine.commit() == 500, "the write may be carried out already"
    mine.confirmed(B, 700, 2.0)
    assert mine.commit() == 700
    mine.written(frozenset((LEADER, A, B)))
    mine.confirmed(B, 900, 2.5)
    assert mine.commit() == 900
    mine.commit(1000)
    mine.confirmed(A, 1000, 2.5)
    mine.begin_write(frozenset((LEADER, A)))
    assert mine.commit() == 900, "the write may never be carried out"
    mine.written(frozenset((LEADER, A)))
    assert mine.commit() == 1000


def test_a_write_without_an_answer_counts_until_a_later_one_has_one() -> None:
    mine = in_sync(A)
    mine.commit(500)
    mine.confirmed(A, 500, 1.0)
    mine.begin_write(frozenset((LEADER, A, B)))
    assert mine.proposal((A, B), 2.0) == frozenset((LEADER, A)), "another write is needed, which settles this one"
    assert mine.union == frozenset((LEADER, A, B))
    mine.begin_write(frozenset((LEADER, A)))
    assert mine.union == frozenset((LEADER, A, B))
    mine.refused((LEADER, A, B))
    assert mine.recorded == mine.union == frozenset((LEADER, A, B))
    mine.begin_write(frozenset((LEADER, A)))
    mine.written(frozenset((LEADER, A)))
    assert mine.union == frozenset((LEADER, A))


@pytest.mark.parametrize("flushed", [START - 1, 0])
def test_nobody_joins_by_what_the_leader_knows_of_committed(flushed: int) -> None:
    """A winner's `committed` may lie behind what the last leader answered: the start of its epoch does not."""
    mine = in_sync(A)
    mine.wrote(START, 0.0)
    mine.commit(START)
    mine.confirmed(A, START, 0.5)
    mine.confirmed(B, flushed, 0.5)
    assert mine.proposal((A, B), 1.0) is None
    mine.confirmed(B, START, 1.0)
    assert mine.proposal((A, B), 1.0) == frozenset((LEADER, A, B))


def test_nobody_joins_who_lacks_what_is_committed() -> None:
    mine = in_sync(A)
    mine.wrote(900, 0.0)
    mine.commit(900)
    mine.confirmed(A, 900, 0.5)
    assert mine.commit() == 900
    mine.confirmed(B, 899, 1.0)
    assert mine.proposal((A, B), 1.0) is None
    mine.confirmed(B, 900, 1.0)
    assert mine.proposal((A, B), 1.0) == frozenset((LEADER, A, B))


def test_who_lags_leaves_but_never_below_the_least() -> None:
    mine = in_sync(A, B)
    for second in range(1, 40):
        mine.wrote(second * 100, float(second))
        mine.commit(second * 100)
        mine.confirmed(A, second * 100, float(second))
        if second < 5:
            mine.confirmed(B, second * 100, float(second))
        wanted = mine.proposal((A, B), float(second))
        if second < 14:
            assert wanted is None
        else:
            assert wanted == frozenset((LEADER, A))
            break
    mine.begin_write(frozenset((LEADER, A)))
    mine.written(frozenset((LEADER, A)))
    assert mine.proposal((A, B), 100.0) is None, "A is silent too, but alone the leader would not be enough"
    assert mine.lags(A, 100.0)


def test_a_member_that_follows_a_steady_load_at_some_distance_does_not_lag() -> None:
    mine = in_sync(A, B)
    for tick in range(1, 4000):
        now = tick / 100
        mine.wrote(tick * 1000, now)
        mine.commit(tick * 1000)
        mine.confirmed(A, tick * 1000, now)
        mine.confirmed(B, max(0, tick - 500) * 1000, now)  # five seconds behind, always
        assert mine.proposal((A, B), now) is None


def test_a_silent_member_lags_though_nothing_is_written() -> None:
    mine = in_sync(A, B)
    for second in range(1, 30):
        mine.confirmed(A, 0, float(second))
    assert mine.proposal((A, B), 30.0) == frozenset((LEADER, A))


def test_a_member_that_comes_back_without_what_it_confirmed_leaves_at_once() -> None:
    mine = in_sync(A, B)
    mine.commit(500)
    for member in (A, B):
        mine.confirmed(member, 500, 1.0)
    assert mine.commit() == 500
    mine.followed(A, 500)
    assert mine.proposal([LEADER, A, B], 1.5) is None, "a connection broke, no more"
    mine.followed(A, 400)
    assert mine.proposal([LEADER, A, B], 1.5) == frozenset({LEADER, B})
    mine.confirmed(A, 450, 2.0)
    assert mine.proposal([LEADER, A, B], 2.0) == frozenset({LEADER, B})
    mine.confirmed(A, 500, 2.5)
    assert mine.proposal([LEADER, A, B], 2.5) is None
    mine.followed(A, 400)
    mine.followed(B, 400)
    assert mine.proposal([LEADER, A, B], 3.0) is None, "nobody leaves below the least"


def test_a_member_that_no_longer_belongs_leaves() -> None:
    mine = in_sync(A, B)
    for replica in (A, B):
        mine.confirmed(replica, 500, 1.0)
    assert mine.proposal((A,), 1.0) == frozenset((LEADER, A))
    assert in_sync(A).proposal((), 1.0) is None, "not below the least"


@pytest.mark.parametrize("seed", range(60))
def test_no_set_in_force_lacks_a_member_that_has_everything_committed(seed: int) -> None:
    """The record is written through a registry that loses writes, carries them out late, and forgets to answer."""
    rng = random.Random(seed)
    mine = in_sync(A, B)
    record, version = frozenset((LEADER, A, B)), 0
    late: list[tuple[frozenset[int], int]] = []  # writes on their way, with the version they check
    flushed = dict.fromkeys((LEADER, A, B, C), 0)
    read_version = 0
    committed = 0
    for tick in range(400):
        now = tick / 2
        end = 100 * tick
        mine.wrote(end, now)
        flushed[LEADER] = end
        mine.commit(end)
        for replica in (A, B, C):
            if rng.random() < 0.7:
                flushed[replica] = rng.randint(flushed[replica], end)
                mine.confirmed(replica, flushed[replica], now)
        if late and rng.random() < 0.3:
            members, expected = late.pop(0)
            if expected == version:
                record, version = members, version + 1
        wanted = mine.proposal((A, B, C), now)
        if wanted is not None and rng.random() < 0.8:
            mine.begin_write(wanted)
            match rng.choice(("answered", "lost", "late")):
                case "answered":
                    late.clear()  # what was sent before is carried out or never will be
                    if read_version == version:
                        record, version = wanted, version + 1
                        read_version = version
                        mine.written(wanted)
                    else:
                        read_version = version
                        mine.refused(record)
                case "late":
                    late.append((wanted, read_version))
        before, committed = committed, mine.commit()
        assert committed >= before
        assert record <= mine.union
        assert len(record) >= 2
        for replica in record:
            assert flushed[replica] >= committed, f"{replica} could be elected and lacks what is committed"


def test_how_long_something_has_waited_for_its_commit() -> None:
    in_sync = InSyncSet(1, [1, 2], epoch_end=10, began_at=100.0, min_in_sync=2)
    assert in_sync.seconds_uncommitted(101.0) == 0.0
    in_sync.wrote(50, 102.0)
    in_sync.wrote(90, 104.0)
    in_sync.commit(90)
    assert in_sync.seconds_uncommitted(107.0) == 5.0
    in_sync.confirmed(2, 60, 107.0)
    in_sync.commit()
    assert in_sync.seconds_uncommitted(107.0) == 3.0
    in_sync.confirmed(2, 90, 107.0)
    in_sync.commit()
    assert in_sync.seconds_uncommitted(107.0) == 0.0
