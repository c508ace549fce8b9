"""Positions against a plain set of settled offsets. (J-10)"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dmq.offset_runs import bitmap_runs
from dmq.storage.state.positions import Position, PositionTable

offsets = st.integers(0, 60)
spans = st.tuples(offsets, st.integers(0, 15)).map(lambda span: (span[0], span[0] + span[1]))


@given(offsets, st.lists(spans, max_size=30))
def test_a_position_settles_what_a_set_would_hold(floor: int, settled: list[tuple[int, int]]) -> None:
    position = Position(floor)
    model = set(range(floor))
    for start, end in settled:
        new = set(range(start, end)) - model
        assert position.settle(start, end) == bool(new)
        model |= new
        assert all(position.is_settled(offset) == (offset in model) for offset in range(90))
        assert position.floor == next(offset for offset in range(200) if offset not in model)
        assert all(start < end for start, end in position.ranges)
        assert all(before[1] < after[0] for before, after in pairwise([(0, position.floor), *position.ranges]))


@given(offsets, st.lists(st.sets(st.integers(0, 90), min_size=1), max_size=6))
def test_many_ranges_at_once_settle_what_they_settle_one_by_one(floor: int, steps: list[set[int]]) -> None:
    position, plain = Position(floor), Position(floor)
    for wanted in steps:
        mask = sum(1 << offset for offset in wanted)
        ranges = list(bitmap_runs(0, 91, mask.to_bytes(12, "little")))
        position.settle_all(ranges)
        for start, end in ranges:
            plain.settle(start, end)
        assert position == plain


@given(offsets, st.lists(spans, max_size=30))
def test_a_position_is_restored_from_its_floor_and_ranges(floor: int, settled: list[tuple[int, int]]) -> None:
    position = Position(floor)
    for start, end in settled:
        position.settle(start, end)
    assert Position(position.floor, position.ranges) == position


def test_a_group_that_settles_before_it_was_seen_begins_at_zero() -> None:
    """What a journal says must not depend on how much of it is left."""
    table = PositionTable()
    table.settle("g", 16, 0, iter([(5, 7)]))
    assert table.get("g", 16, 0) == Position(0, [(5, 7)])


def test_a_table_comes_back_from_its_dump() -> None:
    table = PositionTable()
    table.set("b", 17, 1, 9)
    table.settle("a", 16, 0, iter([(0, 4), (6, 8)]))
    table.settle("b", 16, 0, iter([(2, 3)]))
    twin = PositionTable()
    twin.load(table.dump())
    assert twin.dump() == table.dump()
    assert sorted(twin.floors(16, 0)) == [0, 4]


def test_dropping_a_topic_takes_groups_that_were_nowhere_else() -> None:
    table = PositionTable()
    table.set("only", 16, 0, 1)
    table.set("both", 16, 0, 1)
    table.set("both", 17, 0, 2)
    table.drop_topic(16)
    assert table.dump() == [("both", [(17, 0, 2, [])])]
    table.drop_group("both", None)
    assert table.groups() == {}
