"""How members divide the queues among themselves (R-08)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.client.consumer.strategy import STRATEGIES, Queue, average, circle, consistent_hash, diff

queue_sets = st.sets(st.tuples(st.sampled_from(["b1", "b2"]), st.integers(0, 254)), max_size=40)
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
def test_every_queue_goes_to_exactly_one_member(name: str, queues: set[Queue], members: set[str]) -> None:
    shares = STRATEGIES[name](queues, members)
    assert set(shares) == members
    assert sorted(q for share in shares.values() for q in share) == (sorted(queues) if members else [])
    assert shares == STRATEGIES[name](sorted(queues, reverse=True), sorted(members, reverse=True))


@given(queues=queue_sets, members=st.sets(st.text(min_size=1, max_size=5), min_size=2, max_size=8))
def test_a_member_that_goes_moves_only_its_own_queues(queues: set[Queue], members: set[str]) -> None:
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
