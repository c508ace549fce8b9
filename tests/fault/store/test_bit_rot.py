"""Bits flip and files lose their ends: it is found, or it does not matter because the file is built anew.

What must hold after any one flip or cut, in any file, with the store closed, killed or open: a message that is read has
exactly the bytes that were appended; a message that is missing is reported, with a journal range that `damage` has too,
or stood in the tail no flush is known of, which is kept in `salvage/`; whatever is derived gives the same answers.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from dmq.storage.journal.journal import list_segments
from dmq.storage.journal.unit_draft import Placement
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.fault.store.sample_store import SETTINGS, Answers, Prepared, answers, batch_of, prepare
from tests.sampling import SEED, sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

FLIPS = sample_size(share=80, whole=2000)
CUTS = sample_size(share=30, whole=500)
OPEN_FLIPS = sample_size(share=25, whole=500)

JOURNAL_KINDS = ("journal first", "journal middle", "journal last")
DERIVED_KINDS = ("queue", "runs", "index", "delay", "offset", "checkpoint", "STORE")
KINDS = JOURNAL_KINDS + DERIVED_KINDS


class Harm(NamedTuple):
    """The file, the byte that was flipped or from which on it was cut, and what the file held then."""

    path: str
    at: int
    after: bytes


prepared = cache(prepare)


def paths_of(files: MemoryFiles, kind: str) -> list[str]:
    segments = [segment.path for segment in list_segments(files)]
    if kind in JOURNAL_KINDS:
        return {"first": segments[:1], "middle": segments[1:-1], "last": segments[-1:]}[kind.split()[1]]
    return [path for path, size in files.paths().items() if size and path.partition("/")[0] == kind]


def flip(ready: Prepared, files: MemoryFiles, kind: str, rng: random.Random) -> Harm:
    path = rng.choice(paths_of(files, kind))
    at = rng.randrange(files.paths()[path])
    if kind in JOURNAL_KINDS and rng.random() < 0.5:
        # Heads and tables are a small part of the bytes and the larger part of what can go wrong.
        start = int(path[-28:-8])
        heads = [unit for unit in ready.unit_starts[:-1] if start <= unit < start + files.paths()[path]]
        at = rng.choice(heads) - start + rng.randrange(72 + 64)
    files.flip_bit(path, at, rng.randrange(8))
    return Harm(path, at, files.read_file(path))


def cut(ready: Prepared, files: MemoryFiles, kind: str, rng: random.Random) -> Harm:
    path = rng.choice(paths_of(files, kind))
    size = rng.choice((0, rng.randrange(files.paths()[path]), files.paths()[path] - 1))
    if kind in JOURNAL_KINDS and rng.random() < 0.3:
        start = int(path[-28:-8])
        size = rng.choice([unit - start for unit in ready.unit_starts if 0 <= unit - start < files.paths()[path]])
    files.cut(path, size)
    return Harm(path, size, files.read_file(path))


def check(ready: Prepared, files: MemoryFiles, store: MessageStore, harm: Harm, *, is_cut: bool) -> Answers:
    """Ask everything, and compare with what was said before."""
    path, at, after = harm
    said = answers(store, ready.wall_ms)
    before = ready.answers
    for where, read in said.records.items():
        for offset, record in read.items():
            assert record == before.records[where][offset], (where, offset)
    if not path.startswith("journal/"):
        assert said == before
        assert store.queries.damage == []
        return said
    harmed = int(path[-28:-8]) + at
    harmed_unit = ready.unit_starts[bisect_right(ready.unit_starts, harmed) - 1]
    segment_end = min([s.start for s in list_segments(ready.files) if s.start > harmed] + [ready.unit_starts[-1]])
    unit_end = ready.unit_starts[min(ready.unit_starts.index(harmed_unit) + 1, len(ready.unit_starts) - 1)]
    harmed_end = segment_end if is_cut else unit_end
    # Of a cut in the last segment nothing later can tell, so only the checkpoint knows what had been there.
    torn_from = ready.checkpointed if is_cut else ready.durable
    torn = harmed_unit >= torn_from
    for (topic, queue), records in before.records.items():
        missing = records.keys() - said.records.get((topic, queue), {}).keys()
        lost = {
            offset: (gap.start, gap.end)
            for gap in said.lost.get((topic, queue), ())
            for offset in range(gap.first, gap.next)
        }
        assert lost.keys() <= missing
        for offset in missing:
            place = ready.journal_offsets[topic, queue, offset]
            if torn or (is_cut and place >= torn_from):
                assert place >= harmed_unit, "only the tail is cut"
                assert offset not in lost
            else:
                assert harmed_unit <= place < harmed_end, "only what was harmed is missing"
                if offset not in lost:
                    # The last of a queue, after the checkpoint: how far the queue reached is lost with them.
                    assert place >= ready.checkpointed
                    assert offset >= said.bounds[topic, queue][1]
                start, end = lost.get(offset, (place, place + 1))
                assert any(s <= start and end <= e for s, e in store.queries.damage), (start, end, store.queries.damage)
    if torn and not is_cut:
        kept = b"".join(files.read_file(name) for name in files.paths() if name.startswith("salvage/"))
        assert kept == after[harmed_unit - int(path[-28:-8]) :].rstrip(b"\0"), "what was cut is kept, as it was"
    elif not torn:
        assert not any(name.startswith("salvage/") for name in files.paths())
    if (segment_end if is_cut else harmed_end) <= ready.checkpointed:
        assert said.same_but_for_messages() == before.same_but_for_messages()
    return said


def go_on(
    ready: Prepared, files: MemoryFiles, store: MessageStore, said: Answers, *, may_find_more: bool = False
) -> None:
    """The store takes more, and says the same after another start; unless that finds what memory had hidden."""
    first = store.queries.bounds("orders", 2)[1]
    (place,) = store.append([batch_of("orders", 2, [b"more"], producer=8, sequence=1)])
    assert isinstance(place, Placement)
    assert place.first_offset == first
    store.flush()
    damage = store.queries.damage
    store.close()
    again = MessageStore(files, SETTINGS, FakeClock(ready.wall_ms))
    assert [record.body for record in again.queries.read("orders", 2, first).records()] == [b"more"]
    later = answers(again, ready.wall_ms)
    del later.records["orders", 2][first]
    if may_find_more and again.queries.damage != damage:
        assert set(again.queries.damage) > set(damage)
        assert all(later.records[queue].items() <= records.items() for queue, records in said.records.items())
    else:
        assert again.queries.damage == damage
        assert later.lost == said.lost
        assert later.records == said.records
    again.close()


def check_each(count: int, harm: Callable[..., Harm], *, is_cut: bool, clean: bool, seed: int) -> None:
    ready = prepared(clean=clean)
    for number in range(count):
        rng = random.Random(f"{SEED} {seed} {number}")
        kind = KINDS[number % len(KINDS)]
        files = ready.files.copy()
        done = harm(ready, files, kind, rng)
        try:
            store = MessageStore(files, SETTINGS, FakeClock(ready.wall_ms))
            said = check(ready, files, store, done, is_cut=is_cut)
            if number % 4 == 0:
                go_on(ready, files, store, said)
        except BaseException as error:
            error.add_note(f"DMQ_SEED={SEED}, sample {number}: {kind}, {done[:2]}, {'closed' if clean else 'killed'}")
            raise


@pytest.mark.sampled
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_flipped_bit_is_found_or_harmless(clean: bool) -> None:
    check_each(FLIPS // 2, flip, is_cut=False, clean=clean, seed=1)


@pytest.mark.sampled
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_file_that_lost_its_end_is_found_or_harmless(clean: bool) -> None:
    check_each(CUTS // 2, cut, is_cut=True, clean=clean, seed=2)


@pytest.mark.sampled
def test_a_bit_that_flips_while_the_store_is_open_is_found_or_harmless() -> None:
    ready = prepared(clean=True)
    for number in range(OPEN_FLIPS):
        rng = random.Random(f"{SEED} 3 {number}")
        kind = KINDS[number % len(KINDS)]
        is_cut = rng.random() < 0.2
        files = ready.files.copy()
        store = MessageStore(files, SETTINGS, FakeClock(ready.wall_ms))
        if rng.random() < 0.5:
            assert answers(store, ready.wall_ms) == ready.answers
        done = (cut if is_cut else flip)(ready, files, kind, rng)
        try:
            said = check(ready, files, store, done, is_cut=is_cut)
            if number % 4 == 0:
                go_on(ready, files, store, said, may_find_more=True)
        except BaseException as error:
            error.add_note(f"DMQ_SEED={SEED}, sample {number}: {kind}, {done[:2]}")
            raise
