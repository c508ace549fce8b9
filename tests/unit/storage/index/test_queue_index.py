"""The queue index against plain lists: tails, runs, merges, queue files, retention, deleted topics. (J-04, R-04)"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import StorageError
from dmq.storage.file_pool import FilePool
from dmq.storage.files import OsFiles
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.index.queue_index import (
    DRAIN_MIN,
    ENTRY_BYTES,
    Entries,
    QueueIndex,
    Run,
    Tail,
    merge_runs,
    pack_entries,
    valid,
    write_run,
)
from dmq.testing import MemoryFiles
from tests.memory_peak import memory_peak
from tests.sampling import sample_size

KEYS = (16 << 8, 16 << 8 | 1, 17 << 8)
Entry = tuple[int, int, int]


class Bench:
    """An index, and what every queue should have."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files = MemoryFiles()
        for folder in ("queue", "runs"):
            self.files.mkdir(folder)
        self.topics = {16, 17}
        self.queues: dict[int, list[Entry]] = {key: [] for key in KEYS}
        self.first: dict[int, int] = dict.fromkeys(KEYS, 0)
        self.offset = self.sequence = 0
        self.saved: tuple[list[str], dict[int, int]] = ([], {})
        self.index = self.new()

    def new(self) -> QueueIndex:
        # Small pieces, so that a queue has many of them.
        return QueueIndex(
            self.files, FilePool(self.files, 16), self.folder_of, piece_entries=self.rng.choice((7, 50, 1 << 16))
        )

    def folder_of(self, topic_id: int) -> str | None:
        return f"t@{topic_id}" if topic_id in self.topics else None

    def first_kept(self, key: int) -> int | None:
        return self.first[key] if key >> 8 in self.topics else None

    def add(self, key: int, count: int) -> None:
        if key >> 8 not in self.topics:
            return
        queue = self.queues[key]
        new = [(self.offset + 50 * i, 40 + i % 9, self.rng.randrange(1 << 16)) for i in range(count)]
        self.offset += 50 * count
        offsets, lengths, tags = (list(column) for column in zip(*new, strict=True))
        if count > 16:
            columns = (np.array(offsets, np.uint64), np.array(lengths, np.uint32), np.array(tags, np.uint16))
            self.index.add(key, len(queue), *columns)
        elif count == 1:
            self.index.add_one(key, len(queue), offsets[0], lengths[0], tag=tags[0])
        else:
            self.index.add(key, len(queue), offsets, lengths, tags)
        queue += new

    def checkpoint(self, *, fails_at: int | None = None) -> None:
        self.sequence += 1
        index = self.index
        index.freeze()
        try:
            if fails_at is not None:
                self.files.fail("write", fails_at)
            run = index.write_frozen(self.sequence)
            merged = index.merge(
                self.sequence, [*(r.path for r in index.runs), *([run] if run else [])], self.first_kept
            )
        except StorageError:
            index.unfreeze()
            return
        finally:
            self.files.heal()
        index.adopt(merged)
        self.saved = ([r.path for r in index.runs], dict(index.filed))
        needed = set(self.saved[0])
        for name in self.files.listdir("runs"):
            if f"runs/{name}" not in needed:
                self.files.unlink(f"runs/{name}")
        index.remove_old(self.first_kept, {f"t@{topic_id}" for topic_id in self.topics})

    def reopen(self) -> None:
        self.checkpoint()
        self.index = self.new()
        self.index.restore(*self.saved)

    def retain(self, key: int) -> None:
        self.first[key] = self.rng.randint(self.first[key], len(self.queues[key]))

    def drop(self) -> None:
        self.topics.discard(17)
        self.index.drop_topic(17)

    def check(self) -> None:
        for key in KEYS:
            if key >> 8 not in self.topics:
                continue
            first, end = self.first[key], len(self.queues[key])
            start = self.rng.randint(first, end)
            stop = self.rng.randint(start, end)
            for low, high in ((first, end), (start, stop)):
                found: list[Entry] = []
                for columns in self.index.columns(key, low, high):
                    assert columns.first == low + len(found)
                    rows = zip(columns.offsets.tolist(), columns.lengths.tolist(), columns.tags.tolist(), strict=True)
                    found += rows
                assert found == self.queues[key][low:high]
            wanted = self.rng.randint(0, self.offset + 100)
            behind = next((n for n in range(first, end) if self.queues[key][n][0] >= wanted), end)
            assert self.index.first_behind(key, wanted, range(first, end), range(self.offset)) == behind


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(KEYS), st.sampled_from((1, 5, 17, 300, DRAIN_MIN + 1))),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("fail"), st.integers(1, 5)),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("retain"), st.sampled_from(KEYS)),
        st.tuples(st.just("drop")),
    ),
    max_size=60,
)


@pytest.mark.sampled
@settings(max_examples=sample_size(share=300, whole=5000))
@given(st.integers(0, 1 << 32), steps)
def test_every_queue_has_its_entries_in_order_whatever_happens_to_the_files(
    seed: int, plan: list[tuple[object, ...]]
) -> None:
    bench = Bench(seed)
    for step in plan:
        match step:
            case "add", int(key), int(count):
                bench.add(key, count)
            case ("checkpoint",):
                bench.checkpoint()
            case "fail", int(which):
                bench.checkpoint(fails_at=which)
            case ("reopen",):
                bench.reopen()
            case "retain", int(key):
                bench.retain(key)
            case ("drop",):
                bench.drop()
        bench.check()


def test_queues_that_have_gathered_enough_get_files_of_their_own_and_lose_old_ones() -> None:
    bench = Bench(1)
    for _ in range(40):
        for key in KEYS:
            bench.add(key, 200)
        bench.checkpoint()
        bench.check()
    filed = [path for path in bench.files.paths() if path.endswith(".queue")]
    assert len(filed) == len(KEYS)
    assert len(bench.index.runs) < 20
    bench.first[KEYS[0]] = bench.index.filed[KEYS[0]] + 5
    for _ in range(20):
        bench.add(KEYS[0], 400)
        bench.checkpoint()
        bench.check()
    firsts = [path for path in bench.files.paths() if path.startswith("queue/t@16/0/")]
    assert firsts == [f"queue/t@16/0/{bench.first[KEYS[0]]:020d}.queue"]
    bench.drop()
    bench.checkpoint()
    assert not any(path.startswith("queue/t@17") for path in bench.files.paths())


def test_a_missing_or_wrong_entry_is_said_to_be() -> None:
    bench = Bench(1)
    bench.add(KEYS[0], 10)
    bench.checkpoint()
    path = bench.index.runs[0].path
    bench.files.flip_bit(path, bench.files.paths()[path] - 30)
    with pytest.raises(DerivedDamaged):
        bench.check()
    with pytest.raises(DerivedDamaged):
        list(bench.index.columns(KEYS[1], 0, 1))


@given(st.integers(16, 1 << 40), st.integers(0, 1 << 40), st.lists(st.integers(0, 1 << 60), min_size=1, max_size=20))
def test_an_entry_is_valid_in_its_own_place_only(key: int, first: int, offsets: list[int]) -> None:
    numbers = np.arange(first, first + len(offsets), dtype=np.uint64)
    lengths, tags = np.full(len(offsets), 77, np.uint32), np.arange(len(offsets), dtype=np.uint16)
    entries = pack_entries(key, numbers, np.array(offsets, np.uint64), lengths, tags)
    assert len(entries.tobytes()) == ENTRY_BYTES * len(offsets)
    assert valid(key, first, entries).all()
    assert not valid(key + 1, first, entries).any()
    assert not valid(key, first + 1, entries).any()
    for field in ("offset", "length", "tag", "check"):
        other = entries.copy()
        other[field][0] ^= 1
        assert valid(key, first, other).tolist() == [False] + [True] * (len(offsets) - 1)


def test_an_entry_is_as_drawn() -> None:
    key, queue_offset, offset, length, tag = 16 << 8, 5, 0x0102030405060708, 0x0A0B0C0D, 0x0E0F
    entries = pack_entries(
        key, np.array([queue_offset], np.uint64), np.array([offset], np.uint64), np.array([length], np.uint32),
        np.array([tag], np.uint16),
    )  # fmt: skip
    mask = (1 << 64) - 1
    a, b, c = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    x = (offset * a & mask) ^ ((length << 16 | tag) * b & mask)
    x = x + queue_offset * c + key * a & mask
    x = (x ^ x >> 30) * b & mask
    x = (x ^ x >> 27) * c & mask
    check = (x ^ x >> 31).to_bytes(8, "big")
    assert entries.tobytes() == bytes.fromhex("01020304050607080a0b0c0d0e0f") + check


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_merge_takes_the_memory_of_a_piece_however_long_the_queues_are(tmp_path: Path, is_drained: bool) -> None:
    files, count = OsFiles(tmp_path), 40_000
    files.mkdir("runs")
    paths = [f"runs/{number:020d}.run" for number in range(20)]
    for number, path in enumerate(paths):
        tail = Tail(number * count)
        tail.offsets.extend(range(number * count, (number + 1) * count))
        tail.lengths.extend([100] * count)
        tail.tags.extend([0] * count)
        write_run(files, path, {KEYS[0]: tail})
    pool, taken = FilePool(files, 32), 0

    def drain(key: int, first: int, size: int, parts: Iterable[Entries]) -> bool:
        nonlocal taken
        taken = sum(map(len, parts)) if is_drained else 0
        return is_drained

    runs = [Run(pool, path) for path in paths]
    with memory_peak() as peak:
        merge_runs(files, "runs/new", runs, first_kept=lambda key: 0, drain=drain, piece_entries=1000)
    pool.close()
    size = 20 * count * ENTRY_BYTES
    assert taken == (20 * count if is_drained else 0)
    assert is_drained or files.size("runs/new") >= size
    assert peak[0] < size // 2
