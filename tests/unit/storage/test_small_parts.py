"""Visibility, merging, windows, and which segments may go: pure decisions. (J-03, R-04)"""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.model import Durability
from dmq.settings import StoreSettings
from dmq.storage.files import DiskUsage
from dmq.storage.index.block_file import RUNS_MAX, merge_from
from dmq.storage.journal.journal import WindowCache
from dmq.storage.journal.unit import NO_ADDRESS, Part, Row, Unit
from dmq.storage.journal.unit_draft import UnitBuilder
from dmq.storage.journal.unit_writer import Visibility
from dmq.storage.upkeep.retention import SegmentAge, segments_past, segments_to_force

HOUR_MS = 3_600_000


def unit(start: int) -> Unit:
    row = Row(0, 0, 0, 1, 0, 0, 0, 0, 0, NO_ADDRESS, 0)
    part = Part(row, bytes(80), [80], 0)
    return UnitBuilder(1, bytes(6), epoch=1).build([part], start=start, stored_at_ms=1, flushed_through=0)


# --- visibility -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from((Durability.STORED, Durability.FLUSHED, Durability.REPLICATED)), max_size=20), st.data()
)
def test_units_become_visible_in_order_and_none_before_its_durability(
    asked: list[Durability], data: st.DataObject
) -> None:
    visibility = Visibility(0)
    written: list[Unit] = []
    for durability in asked:
        written.append(unit(written[-1].end if written else 0))
        visibility.wrote(written[-1], durability)
        end = written[-1].end
        visibility.flushed = data.draw(st.integers(visibility.flushed, end))
        visibility.replicated = data.draw(st.integers(visibility.replicated, end))
        seen = visibility.advance()
        expected = 0
        for one, wanted in zip(written, asked, strict=False):
            reached = (visibility.flushed, visibility.replicated)[: wanted - Durability.STORED]
            if any(offset < one.end for offset in reached):
                break
            expected = one.end
        assert visibility.visible == expected
        assert all(one.end <= expected for one in seen)
        assert [one.start for one in visibility.pending] == [one.start for one in written if one.end > expected]


# --- merging ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), max_size=200))
def test_files_stay_few_and_bytes_are_rewritten_seldom(arriving: list[int]) -> None:
    sizes: list[int] = []
    rewritten = 0
    for size in arriving:
        sizes.append(size)
        first = merge_from(sizes)
        if first is not None:
            assert len(sizes) - first >= 2
            rewritten += sum(sizes[first:])
            sizes[first:] = [sum(sizes[first:])]
        assert len(sizes) <= RUNS_MAX + 8
    assert sum(sizes) == sum(arriving)
    assert rewritten <= 12 * sum(arriving)


def test_nothing_is_merged_while_files_are_few() -> None:
    assert merge_from([5] * RUNS_MAX) is None
    assert merge_from([5] * (RUNS_MAX + 1)) == 0
    assert merge_from([10_000] + [5] * RUNS_MAX) == 1


# --- windows ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 1 << 32),
    st.integers(0, 3000),
    st.lists(st.sampled_from(("tail", "load", "get", "clear")), max_size=80),
)
def test_a_window_never_gives_other_bytes_than_the_journal_has(seed: int, limit: int, steps: list[str]) -> None:
    rng = random.Random(seed)
    journal = bytearray()
    starts: list[int] = []
    cache = WindowCache(limit)
    for step in steps:
        if step == "tail" or not starts:
            piece = rng.randbytes(rng.randrange(10, 400))
            cache.put_tail(len(journal), piece)
            starts.append(len(journal))
            journal += piece
        elif step == "load":
            first = rng.randrange(len(starts))
            last = rng.randrange(first, len(starts))
            end = starts[last + 1] if last + 1 < len(starts) else len(journal)
            cache.put(starts[first], bytes(journal[starts[first] : end]), passing=rng.random() < 0.3)
        elif step == "get":
            at = rng.randrange(len(starts))
            end = starts[at + 1] if at + 1 < len(starts) else len(journal)
            low = rng.randrange(starts[at], end)
            high = rng.randint(low, end)
            found = cache.get(low, high)
            assert found is None or bytes(found) == journal[low:high]
        else:
            cache.clear()
            assert cache.get(0, 1) is None


def test_what_was_just_written_is_at_hand() -> None:
    cache = WindowCache(1000)
    cache.put_tail(0, b"a" * 300)
    cache.put_tail(300, b"b" * 300)
    found = cache.get(300, 310)
    assert found is not None
    assert bytes(found) == b"b" * 10
    assert cache.get(295, 305) is None, "a range over two units is not one unit's"


def test_a_cache_of_small_units_takes_no_more_memory_than_it_may() -> None:
    units = [bytearray(200) for _ in range(60_000)]
    cache = WindowCache(8 << 20)
    for number, unit in enumerate(units):
        cache.put_tail(number * 200, unit)
    held = [number for number in range(len(units)) if cache.get(number * 200, number * 200 + 1) is not None]
    assert held[-1] == len(units) - 1
    assert sum(sys.getsizeof(units[number]) + 60 for number in held) <= 8 << 20  # two places in lists, and a number


# --- which segments go ------------------------------------------------------------------------------------------------


def segments(count: int, size: int = 100) -> list[SegmentAge]:
    """One an hour, the newest an hour old."""
    return [SegmentAge(i * size, (i + 1) * size, (i + 1) * HOUR_MS) for i in range(count)]


def past(settings: StoreSettings, count: int = 10) -> int:
    return segments_past(segments(count), 50, (count + 1) * HOUR_MS, settings)


def test_nothing_is_past_a_retention_that_has_no_bound() -> None:
    assert past(StoreSettings(retention_hours=None)) == 0


def test_segments_older_than_the_retention_are_past_it() -> None:
    assert past(StoreSettings(retention_hours=4.0)) == 6
    assert past(StoreSettings(retention_hours=0.5)) == 10


def test_the_oldest_beyond_a_size_are_past_the_retention() -> None:
    assert past(StoreSettings(retention_hours=None, retention_bytes=350)) == 7
    assert past(StoreSettings(retention_hours=None, retention_bytes=1050)) == 0
    assert past(StoreSettings(retention_hours=None, retention_bytes=1)) == 10


@pytest.mark.parametrize(("free", "count"), [(300, 0), (150, 0), (149, 1), (50, 1), (49, 2), (0, 2)])
def test_a_disk_forces_segments_out_only_if_somebody_set_a_mark_for_that(free: int, count: int) -> None:
    disk = DiskUsage(1000 - free, free)
    assert segments_to_force(segments(10), StoreSettings(), disk) == 0
    assert segments_to_force(segments(10), StoreSettings(disk_force=0.85), disk) == count
