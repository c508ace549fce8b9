"""Masks say the same as sets of offsets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.delivery.lease import PIECE_MAX, lowest, mask_of_offsets, mask_of_ranges, pieces
from dmq.offset_runs import bitmap_runs, mask_runs

sets = st.sets(st.integers(0, 60)) | st.sets(st.integers(0, 12_000)) | st.builds(
    lambda spans: {o for a, n in spans for o in range(a, a + n)},
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 5000)), max_size=5),
)  # fmt: skip
# Beyond the longest bitmap, and around its end.
long_sets = st.sets(st.sampled_from([0, 7, 100, PIECE_MAX - 1, PIECE_MAX, PIECE_MAX + 1, 2 * PIECE_MAX, 3 * PIECE_MAX]))


def offsets(ranges: list[tuple[int, int]]) -> list[int]:
    return [offset for start, stop in ranges for offset in range(start, stop)]


@given(sets | long_sets, st.integers(0, 1 << 40))
def test_pieces_read_back_as_the_same_offsets(some: set[int], start: int) -> None:
    found = list(pieces(start, sum(1 << o for o in some)))
    assert offsets([r for piece in found for r in bitmap_runs(*piece)]) == sorted(start + o for o in some)
    assert all(len(bitmap) <= PIECE_MAX // 8 for _, _, bitmap in found)


@given(sets, st.integers(0, 100))
def test_lowest_takes_the_lowest(some: set[int], count: int) -> None:
    mask = sum(1 << o for o in some)
    assert offsets(list(mask_runs(0, lowest(mask, count)))) == sorted(some)[:count]


@given(sets, st.integers(0, 50), st.integers(50, 10_000))
def test_masks_hold_what_lies_in_the_range(some: set[int], start: int, stop: int) -> None:
    expected = sum(1 << (o - start) for o in some if start <= o < stop)
    assert mask_of_offsets(some, start, stop) == expected
    assert mask_of_ranges([(o, o + 1) for o in some], start, stop) == expected
