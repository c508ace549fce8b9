"""Which range of a journal comes next, and how it is divided."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dmq.errors import OffsetGone
from dmq.pipeline.archive.job import RANGE_BYTES, after, batch_size, next_batch, split


def test_an_archive_without_anything_begins_where_the_journal_does() -> None:
    batch = next_batch({"a": None, "b": None}, 500, 900, 1000)
    assert batch is not None
    assert (batch.start, batch.end, batch.after) == (500, 900, {"a": None, "b": None})


def test_a_batch_is_no_larger_than_asked_for() -> None:
    batch = next_batch({"a": 100, "b": 100}, 0, 900, 300)
    assert batch is not None
    assert (batch.start, batch.end) == (100, 400)


def test_nothing_is_left_where_all_tables_have_everything() -> None:
    assert next_batch({"a": 900, "b": 900}, 0, 900, 300) is None
    assert next_batch({"a": None}, 0, 0, 300) is None


def test_a_table_that_lags_gets_the_very_range_that_the_other_has_had() -> None:
    batch = next_batch({"a": 800, "b": 100, "c": 100}, 0, 5000, 300)
    assert batch is not None
    assert (batch.start, batch.end, batch.after) == (100, 800, {"b": 100, "c": 100})


def test_a_table_that_has_nothing_yet_lags_from_the_beginning_of_the_journal() -> None:
    batch = next_batch({"a": 800, "b": None}, 50, 5000, 300)
    assert batch is not None
    assert (batch.start, batch.end, batch.after) == (50, 800, {"b": None})


def test_tables_that_lag_differently_catch_up_one_after_the_other() -> None:
    batch = next_batch({"a": 800, "b": 400, "c": 100}, 0, 5000, 300)
    assert batch is not None
    assert (batch.start, batch.end, batch.after) == (100, 400, {"c": 100})


def test_what_retention_took_before_it_was_archived_is_an_error_until_it_is_accepted() -> None:
    with pytest.raises(OffsetGone, match="--accept-loss"):
        next_batch({"a": 100, "b": 100}, 300, 900, 1000)
    batch = next_batch({"a": 100, "b": 100}, 300, 900, 1000, accept_loss=True)
    assert batch is not None
    assert (batch.start, batch.end, batch.after) == (300, 900, {"a": 100, "b": 100})


def test_a_journal_that_is_shorter_than_what_was_archived_of_it_is_an_error() -> None:
    with pytest.raises(OffsetGone, match="older than the archive"):
        next_batch({"a": 100, "b": 1000}, 0, 900, 1000)


@pytest.mark.parametrize("size", [1, 4 << 20, 64 << 20, 100 << 20, 1 << 30])
def test_parts_cover_a_range_without_gaps_and_none_is_too_large(size: int) -> None:
    parts = split(10, 10 + size)
    assert parts[0][0] == 10
    assert parts[-1][1] == 10 + size
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    assert all(0 < end - start <= RANGE_BYTES for start, end in parts)
    assert len(parts) == -(-size // RANGE_BYTES)


def test_a_batch_has_a_task_for_every_worker() -> None:
    for workers in (1, 4, 100):
        assert len(split(0, batch_size(workers))) == max(4, workers)


def test_what_follows_a_batch_is_the_same_before_and_after_its_commit() -> None:
    versions: dict[str, int | None] = {"a": 800, "b": 100, "c": None}
    while True:
        batch = next_batch(versions, 50, 5000, 700)
        if batch is None:
            break
        ahead = after(versions, batch)
        for name in batch.after:
            versions[name] = batch.end
        assert ahead == versions
    assert set(versions.values()) == {5000}
