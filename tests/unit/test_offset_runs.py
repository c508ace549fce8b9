"""Offsets, masks and bitmaps become the same ranges."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dmq.offset_runs import bitmap_runs, mask_runs, offset_runs

offsets = st.integers(0, 1 << 40)
sets = st.sets(st.integers(0, 60)) | st.sets(st.integers(0, 12_000)) | st.builds(
    lambda spans: {o for a, n in spans for o in range(a, a + n)},
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 5000)), max_size=5),
)  # fmt: skip


@given(sets, offsets)
def test_ranges_hold_the_same_offsets_and_do_not_touch(some: set[int], start: int) -> None:
    expected = sorted(start + o for o in some)
    mask = sum(1 << o for o in some)
    found = list(mask_runs(start, mask))
    assert [offset for first, stop in found for offset in range(first, stop)] == expected
    assert all(stop < following for (_, stop), (following, _) in itertools.pairwise(found))
    assert list(offset_runs(expected)) == found
    if some:
        count = max(some) + 1
        assert list(bitmap_runs(start, count, mask.to_bytes(-(-count // 8), "little"))) == found


def test_neighbours_are_one_range() -> None:
    assert [*offset_runs([])] == []
    assert [*offset_runs([0])] == [(0, 1)]
    assert [*offset_runs([0, 1, 2, 4, 7, 8])] == [(0, 3), (4, 5), (7, 9)]


@given(
    offsets,
    st.integers(0, 70) | st.integers(500, 2000),
    st.binary(max_size=12) | st.binary(min_size=60, max_size=70) | st.binary(min_size=200, max_size=260),
)
def test_a_bitmap_marks_its_bits_within_the_range(start: int, count: int, bitmap: bytes) -> None:
    found = [offset for first, end in bitmap_runs(start, count, bitmap) for offset in range(first, end)]
    bits = [bool(bitmap[i // 8] >> i % 8 & 1) if i // 8 < len(bitmap) else False for i in range(count)]
    assert found == [start + i for i in range(count) if not bitmap or bits[i]]


def test_the_ranges_of_a_bitmap_do_not_touch() -> None:
    assert list(bitmap_runs(100, 16, bytes([0b1011_0111, 0b0000_0001]))) == [(100, 103), (104, 106), (107, 109)]
