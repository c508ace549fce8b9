"""Putting bytes back where the journal changes meanwhile. (R-12; what bits do at rest is in tests/fault/store)"""

from __future__ import annotations

import contextlib

import pytest

from dmq.settings import StoreSettings
from dmq.storage.journal.unit import read_header
from dmq.storage.store import MessageStore
from dmq.storage.upkeep.damage import Mending
from tests.unit.storage.upkeep.test_retention import HOUR, Kept


@pytest.mark.parametrize("retained", ["before begin", "before write", "before finish"])
@pytest.mark.parametrize("is_missing", [False, True], ids=["a bad unit", "a missing segment"])
def test_a_range_that_retention_took_meanwhile_stays_gone(retained: str, is_missing: bool) -> None:
    kept = Kept()
    kept.fill(4)
    store, files, journal = kept.store, kept.files, kept.store.retention._journal
    segment = journal.segments[1]
    start, raw = segment.start, files.read_file(segment.path)
    header = read_header(raw)
    assert header is not None
    end = start + (len(raw) if is_missing else header.length)
    if is_missing:
        journal.forget(segment)
        files.remove(segment.path)
    store.damage.add(start, end)
    kept.consume("billing", 0, kept.bounds[1])
    kept.clock.advance(2 * HOUR)

    def retain(moment: str) -> None:
        if moment == retained:
            assert store.retain() > 0

    retain("before begin")
    mending: Mending = store.damage.begin(start, end, raw[: end - start])
    retain("before write")
    with contextlib.suppress(FileNotFoundError):
        mending.write()
        retain("before finish")
        store.damage.finish(mending)
    assert store.queries.start >= end
    assert not store.damage.ranges
    assert segment.path not in files.paths()
    assert "salvage/segment.tmp" not in files.paths()
    bounds = kept.bounds
    store.close()
    again = MessageStore(files, StoreSettings(), kept.clock)
    assert again.queries.bounds("orders", 0) == bounds
    assert not again.damage.ranges
    again.close()
