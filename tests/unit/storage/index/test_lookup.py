"""Lookup by key, id, time and offset against plain dicts, across files and merges. (R-03)"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import Message
from dmq.records import encode_batch, key_hash
from dmq.storage.file_pool import FilePool
from dmq.storage.files import OsFiles
from dmq.storage.index.block_file import BlockCache, DerivedDamaged
from dmq.storage.index.lookup import Lookup
from dmq.storage.journal.unit import NO_ADDRESS, Part, Row, Unit
from dmq.storage.journal.unit_draft import UnitBuilder
from dmq.testing import MemoryFiles
from tests.memory_peak import memory_peak
from tests.sampling import sample_size

SENT_AT_MS = 1_700_000_000_000


class Bench:
    """A lookup, and every unit it was given."""

    def __init__(self, seed: int, span_max: int) -> None:
        self.rng = random.Random(seed)
        self.files = MemoryFiles()
        self.files.mkdir("index")
        self.span_max = span_max
        self.lookup = self.new()
        self.units: list[Unit] = []
        self.keys: dict[str, list[int]] = {}
        self.ids: dict[int, list[tuple[int, int]]] = {}
        self.end = self.covered = self.start = 0
        self.now_ms = SENT_AT_MS
        self.sequence = 0

    def new(self) -> Lookup:
        # Small pieces, so that a section has many of them.
        piece = self.rng.choice((1, 20, 100, 1 << 16))
        return Lookup(self.files, FilePool(self.files, 16), BlockCache(64), self.span_max, piece=piece)

    def add(self, count: int, *, again: bool = False) -> None:
        if again:
            self.sequence -= count
        self.now_ms += self.rng.choice((0, 0, 5, 100))
        encoded = encode_batch("t", "a", [Message(b"x")] * count, sent_at_ms=self.now_ms)
        # As many hashes a record as there are kinds: none without a key, two of one that was moved.
        keys = [self.rng.sample(range(30), self.rng.randrange(3)) for _ in range(count)]
        owners = [at for at, chosen in enumerate(keys) for _ in chosen]
        hashes = [key_hash(f"k{key}") for chosen in keys for key in chosen]
        row = Row(5, 0, self.sequence, count, 16, 0, 0, 0, self.sequence, NO_ADDRESS, 0)
        one = Part(row, bytes(encoded.data), encoded.lengths, self.now_ms, owners, hashes)
        builder = UnitBuilder(1, bytes(6), epoch=1)
        unit = builder.build([one], start=self.end, stored_at_ms=self.now_ms, flushed_through=0)
        self.lookup.add(unit, unit.columns_by_row()[0])
        for i, chosen in enumerate(keys):
            for key in chosen:
                self.keys.setdefault(f"k{key}", []).append(int(unit.offsets[i]))
            self.ids.setdefault(self.sequence + i, []).append((self.sequence, int(unit.offsets[0])))
        self.sequence += count
        self.units.append(unit)
        self.end = unit.end

    def checkpoint(self, *, fails: bool = False) -> None:
        self.lookup.freeze()
        files = self.lookup.write_frozen(self.covered, self.end, self.start)
        if fails:
            self.lookup.unfreeze()
            return
        self.lookup.adopt(files)
        self.covered = self.end

    def reopen(self) -> None:
        self.checkpoint()
        paths = [file.path for file in self.lookup.files]
        self.lookup = self.new()
        self.lookup.restore(paths)

    def forget(self) -> None:
        """Retention: the oldest units go."""
        if len(self.units) > 2:
            del self.units[: self.rng.randrange(len(self.units) // 2)]
            self.start = self.units[0].start

    def check(self) -> None:
        for key in self.rng.sample(sorted(self.keys), min(4, len(self.keys))):
            kept = [offset for offset in self.keys[key] if offset >= self.start]
            assert self.lookup.offsets_of_hash(key_hash(key), self.start) == kept
        for sequence in self.rng.sample(range(self.sequence + 1), min(4, self.sequence)):
            kept_at = [(first, at) for first, at in self.ids.get(sequence, []) if at >= self.start]
            assert sorted(self.lookup.batches_of_id(5, sequence, self.start)) == kept_at
        assert self.lookup.batches_of_id(6, 0, self.start) == []
        for unit in self.rng.sample(self.units, min(4, len(self.units))):
            for offset in (unit.start, int(unit.offsets[0]), unit.end - 1):
                assert self.lookup.unit_holding(offset) == unit.start
            since = [u.start for u in self.units if u.header.stored_at_ms >= unit.header.stored_at_ms]
            assert self.lookup.first_unit_since(unit.header.stored_at_ms, self.start) == since[0]
        assert self.lookup.first_unit_since(self.now_ms + 1, self.start) is None


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=3000))
@given(
    st.integers(0, 1 << 32),
    st.sampled_from((2000, 100_000, 1 << 30)),
    st.lists(
        st.sampled_from(("few", "few", "many", "checkpoint", "checkpoint", "fail", "reopen", "forget")), max_size=60
    ),
)
def test_everything_is_found_as_plain_dicts_find_it(seed: int, span_max: int, steps: list[str]) -> None:
    bench = Bench(seed, span_max)
    for step in steps:
        match step:
            case "few":
                bench.add(bench.rng.randrange(1, 4))
            case "many":
                bench.add(bench.rng.randrange(17, 400))
            case "checkpoint":
                bench.checkpoint()
            case "fail":
                bench.checkpoint(fails=True)
            case "reopen":
                bench.reopen()
            case "forget":
                bench.forget()
        bench.check()


def test_many_checkpoints_leave_few_files_that_cover_everything() -> None:
    bench = Bench(1, 1 << 30)
    for _ in range(60):
        bench.add(5)
        bench.checkpoint()
    assert len(bench.lookup.files) <= 12
    assert bench.lookup.files[0].start == 0
    assert [file.end for file in bench.lookup.files[:-1]] == [file.start for file in bench.lookup.files[1:]]
    bench.check()


def test_a_batch_stored_twice_is_found_twice_in_memory_in_files_and_merged() -> None:
    """D-15: its producer was forgotten in between; the answer does not depend on where the entries are."""
    bench = Bench(1, 1 << 30)
    for number in range(30):
        bench.add(3)
        if number % 3 == 0:
            bench.add(3, again=True)
        for sequence in range(bench.sequence):
            assert sorted(bench.lookup.batches_of_id(5, sequence, 0)) == bench.ids[sequence]
        if number % 2:
            bench.checkpoint()


def test_an_offset_no_file_covers_is_said_to_be() -> None:
    bench = Bench(1, 1 << 30)
    with pytest.raises(DerivedDamaged):
        bench.lookup.unit_holding(5)


def test_a_merge_takes_the_memory_of_a_piece_however_many_hashes_there_are(tmp_path: Path) -> None:
    files, rng = OsFiles(tmp_path), np.random.default_rng(1)
    files.mkdir("index")
    pool = FilePool(files, 16)
    lookup = Lookup(files, pool, BlockCache(64), 1 << 40, piece=1000)
    values = rng.integers(0, 1 << 62, 450_000, dtype=np.uint64)
    peaks = []
    for number, some in enumerate(np.split(values, 9)):
        pending = lookup._active
        pending.starts.append(number)
        pending.times.append(number)
        pending.blocks.append((some, np.full(len(some), number)))
        pending.batches.extend(range(4 * len(some)))
        lookup.freeze()
        with memory_peak() as peak:
            written = lookup.write_frozen(number, number + 1, 0)
        peaks += peak
        lookup.adopt(written)
    (merged,) = lookup.files
    assert merged.hashes.count == merged.batches.count == len(values)
    assert lookup.offsets_of_hash(int(values[0]), 0) == [0]
    pool.close()
    # The last one writes what the others wrote, and merges all nine.
    assert peaks[8] < 2 * peaks[7]
