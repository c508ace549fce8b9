"""How members divide the queues among themselves (R-08)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.client.consumer.strategy import SETTLED_SECONDS, STRATEGIES, Roll, average, circle, consistent_hash, diff
from dmq.model import place_of

queue_sets = st.sets(st.builds(place_of, st.integers(0, 254), st.integers(0, 3)), max_size=40)
member_sets = st.sets(st.text(min_size=1, max_size=5), max_size=8)


def sizes(shares: dict[str, list[int]]) -> list[int]:
    return [len(share) for share in shares.values()]


def test_ten_queues_over_four_members_are_3_3_2_2() -> None:
    """R-08: the seed's case."""
    shares = average(range(10), ["d", "b", "a", "c"])
    assert shares == {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7], "d": [8, 9]}


def test_two_queues_over_three_members_are_1_1_0() -> None:
    """R-08: the seed's case."""
    assert average([1, 0], ["x", "y", "z"]) == {"x": [0], "y": [1], "z": []}


@pytest.mark.parametrize("queue_count", range(12))
@pytest.mark.parametrize("member_count", range(1, 6))
def test_average_is_the_formula_of_the_seed(queue_count: int, member_count: int) -> None:
    """R-08: share and start as the seed's code computes them."""
    names = [f"m{index}" for index in range(member_count)]
    shares = average(range(queue_count), names)
    mod = queue_count % member_count
    for index, name in enumerate(names):
        more = mod > 0 and index < mod
        size = 1 if queue_count <= member_count else queue_count // member_count + (1 if more else 0)
        start = index * size if more else index * size + mod
        count = max(min(size, queue_count - start), 0)
        assert shares[name] == [(start + step) % queue_count for step in range(count)]


def test_circle_deals_them_out_one_by_one() -> None:
    assert circle(range(5), ["b", "a"]) == {"a": [0, 2, 4], "b": [1, 3]}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@given(queues=queue_sets, members=member_sets)
def test_every_queue_goes_to_exactly_one_member(name: str, queues: set[int], members: set[str]) -> None:
    shares = STRATEGIES[name](queues, members)
    assert set(shares) == members
    assert sorted(q for share in shares.values() for q in share) == (sorted(queues) if members else [])
    assert shares == STRATEGIES[name](sorted(queues, reverse=True), sorted(members, reverse=True))


@given(queues=queue_sets, members=st.sets(st.text(min_size=1, max_size=5), min_size=2, max_size=8))
def test_a_member_that_goes_moves_only_its_own_queues(queues: set[int], members: set[str]) -> None:
    """Consistent hash: minimal movement."""
    before = consistent_hash(queues, members)
    gone = min(members)
    after = consistent_hash(queues, members - {gone})
    assert all(set(before[name]) <= set(after[name]) for name in after)


def test_consistent_hash_gives_everybody_a_share() -> None:
    shares = sizes(consistent_hash(range(255), ["a", "b", "c", "d"]))
    assert min(shares) > 30


def test_the_difference_says_what_to_drop_and_what_to_add() -> None:
    """R-08: compared with the current queues."""
    assert diff([3, 1, 2], [2, 3, 5, 4]) == ([1], [4, 5])
    assert diff([1], [1]) == ([], [])


# --- whose list of the members counts ---------------------------------------------------------------------------------


def test_the_list_of_the_first_broker_counts_and_before_it_comes_that_of_another() -> None:
    roll = Roll()
    assert roll.members([0, 1], 0) is None
    roll.told(1, ["a", "b"], 0)
    assert roll.members([0, 1], 0) == ["a", "b"]
    roll.told(0, ["a", "b", "c"], 0)
    assert roll.members([0, 1], 0) == ["a", "b", "c"]


def test_after_a_failover_the_list_of_others_counts_until_all_members_are_back() -> None:
    roll = Roll()
    for broker in (0, 1):
        roll.told(broker, ["a", "b", "c"], 0)
    assert roll.members([0, 1], 0) == ["a", "b", "c"]
    roll.lost(0)
    assert roll.members([0, 1], 10) == ["a", "b", "c"]
    roll.told(0, ["a"], 12)
    assert roll.members([0, 1], 12) == ["a", "b", "c"]
    roll.told(0, ["a", "b", "c"], 13)
    assert roll.members([0, 1], 13) == ["a", "b", "c"]
    roll.told(0, ["a", "b"], 14)
    assert roll.members([0, 1], 14) == ["a", "b"], "it is the first one again, and believed"


def test_a_member_that_is_not_back_in_time_is_gone() -> None:
    roll = Roll()
    roll.told(1, ["a", "b"], 0)
    assert roll.members([0, 1], 0) == ["a", "b"]
    roll.told(0, ["a"], 10)
    assert roll.members([0, 1], 10 + SETTLED_SECONDS - 1) == ["a", "b"]
    assert roll.members([0, 1], 10 + SETTLED_SECONDS) == ["a"]


def test_a_lone_broker_is_believed_at_once() -> None:
    roll = Roll()
    roll.told(0, ["a", "b"], 0)
    assert roll.members([0], 0) == ["a", "b"]
    roll.lost(0)
    assert roll.members([0], 1) is None
    roll.told(0, ["a"], 2)
    assert roll.members([0], 2) == ["a"]
