"""Who stands, in which order, and what is written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.registry.contents import ShardContent, hex_id
from dmq.shard.election import Obstacle, Situation, Standing, delay_of, has_compared, obstacle, won_record

ME, A, B = 1, 2, 3


def record(*in_sync: int, **more: Any) -> ShardContent:
    return ShardContent(number=1, revision=5, epoch=7, in_sync=[hex_id(replica) for replica in in_sync], **more)


READY = Situation(
    replica=ME,
    record=record(ME, A, B),
    is_led=False,
    is_promised=False,
    is_following=False,
    is_doubtful=False,
    has_compared=False,
)


def test_a_member_of_the_set_stands_when_nobody_leads() -> None:
    assert obstacle(READY) is Obstacle.NONE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_led": True}, Obstacle.LED),
        ({"record": record(A, B)}, Obstacle.NOT_IN_SYNC),
        ({"is_promised": True}, Obstacle.PROMISED),
        ({"is_following": True}, Obstacle.FOLLOWING),
        ({"is_doubtful": True}, Obstacle.DOUBTFUL),
        ({"is_unsettled": True}, Obstacle.UNSETTLED),
        ({"revision_seen": 6}, Obstacle.OLD_REGISTRY),
    ],
)
def test_each_rule_keeps_it_from_standing(changes: dict[str, Any], why: Obstacle) -> None:
    assert obstacle(msgspec.structs.replace(READY, **changes)) is why


def test_a_doubtful_member_compares_first_unless_it_is_the_only_one() -> None:
    doubtful = msgspec.structs.replace(READY, is_doubtful=True)
    assert obstacle(msgspec.structs.replace(doubtful, has_compared=True)) is Obstacle.NONE
    assert obstacle(msgspec.structs.replace(doubtful, record=record(ME))) is Obstacle.NONE


@pytest.mark.parametrize(
    ("others", "is_enough"),
    [
        ([], False),
        ([Standing(A, 7, 100)], True),
        ([Standing(A, 7, 101)], False),
        ([Standing(A, 8, 50)], False),
        ([Standing(A, 7, 50, is_doubtful=True)], False),
        ([Standing(A, 7, 50, is_doubtful=True), Standing(B, 7, 60, is_doubtful=True)], True),
        ([Standing(A, 7, 50, is_doubtful=True), Standing(B, 7, 101, is_doubtful=True)], False),
        ([Standing(A, 7, 100, is_doubtful=True), Standing(B, 7, 100)], True),
        ([Standing(9, 7, 100)], False),  # a broker that has another disk now
    ],
)
def test_a_doubtful_member_is_content_with_those_that_show_that_it_lacks_nothing(
    others: list[Standing], is_enough: bool
) -> None:
    assert has_compared(Standing(ME, 7, 100), others, record(ME, A, B)) is is_enough


def test_the_furthest_stands_first_and_a_wrong_clock_last() -> None:
    behind, level, newer = Standing(ME, 7, 100), Standing(A, 7, 500), Standing(B, 8, 50)
    assert delay_of(newer, (behind, level)) == 0
    assert delay_of(level, (behind, newer)) == pytest.approx(0.2)
    assert delay_of(behind, (level, newer)) == pytest.approx(0.4)
    skewed = msgspec.structs.replace(newer, skew_seconds=-6.0)
    assert delay_of(skewed, (behind, level)) == pytest.approx(0.4)


standings = st.lists(
    st.builds(Standing, st.integers(1, 7), st.integers(0, 3), st.integers(0, 3), st.sampled_from((0.0, 9.0))),
    min_size=1,
    max_size=7,
    unique_by=lambda standing: standing.replica,
)


@given(standings)
def test_all_who_hear_the_same_agree_on_the_order(everybody: list[Standing]) -> None:
    delays = [delay_of(own, [other for other in everybody if other is not own]) for own in everybody]
    assert sorted(delays) == pytest.approx([0.2 * place for place in range(len(everybody))])


def test_the_epoch_is_above_the_record_and_the_journal() -> None:
    assert won_record(record(ME, A), ME, 3, (A,)).epoch == 8
    assert won_record(record(ME, A), ME, 11, (A,)).epoch == 12
    won = won_record(record(ME, A, B), ME, 3, (A, B))
    assert (won.leader, won.revision) == (hex_id(ME), 6)
    assert won.in_sync == [hex_id(ME), hex_id(A), hex_id(B)]


@given(st.sets(st.integers(2, 7)), st.sets(st.integers(1, 7)), st.integers(1, 4))
def test_who_is_not_there_leaves_but_never_below_the_least(others: set[int], there: set[int], least: int) -> None:
    old = record(ME, *sorted(others), min_in_sync=least)
    won = won_record(old, ME, 0, there)
    kept = {*won.in_sync}
    assert hex_id(ME) in kept
    assert kept <= {*old.in_sync}, "nobody joins by an election"
    assert kept >= {hex_id(replica) for replica in others & there}
    assert len(kept) >= min(least, len(old.in_sync))
    if len(kept) > least:
        assert kept == {hex_id(replica) for replica in (others & there) | {ME}}
