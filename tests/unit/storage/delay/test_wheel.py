"""The delay wheel against a plain sorted list. (D-14, R-05)"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.storage.delay.wheel import Delay, FrozenWheel, Wheel, WheelFile
from dmq.storage.file_pool import FilePool
from dmq.storage.index.block_file import BlockCache
from dmq.testing import MemoryFiles
from tests.sampling import sample_size

FOREVER = 1 << 50
SPAN = 1_000_000


class Bench:
    """A wheel and the list of what it should hold."""

    def __init__(self, fragments: int = 3) -> None:
        self.files = MemoryFiles()
        self.files.mkdir("delay")
        self.fragments = fragments
        self.pending: dict[int, tuple[int, int, int]] = {}  # offset -> due, length, fragment
        self.out: dict[int, Delay] = {}
        self.offset = 0
        self.sequence = 0
        self.saved: tuple[list[WheelFile], list[int]] = ([], [])
        self.frozen: FrozenWheel | None = None
        self.reopen()

    def reopen(self) -> None:
        self.wheel = Wheel(self.files, FilePool(self.files, 16), BlockCache(16), self.fragments)
        self.wheel.restore(*self.saved)
        self.out.clear()

    def add(self, fragment: int, dues: list[int], *, as_arrays: bool = False) -> None:
        offsets = [self.offset + 100 * i for i in range(1, len(dues) + 1)]
        self.offset = offsets[-1]
        lengths = [due % 97 + 1 for due in dues]
        if as_arrays:
            self.wheel.add(
                fragment, np.array(dues, np.uint64), np.array(offsets, np.uint64), np.array(lengths, np.uint32)
            )
        else:
            self.wheel.add(fragment, dues, offsets, lengths)
        for due, offset, length in zip(dues, offsets, lengths, strict=True):
            self.pending[offset] = (due, length, fragment % self.fragments)

    def waiting(self, fragment: int, now_ms: int) -> Iterator[Delay]:
        for offset, (due, length, mine) in self.pending.items():
            if mine == fragment and due <= now_ms and offset not in self.out:
                yield Delay(due, offset, length)

    def take(self, now_ms: int, limit: int, fragments: list[int]) -> None:
        expected: list[Delay] = []
        for fragment in fragments:
            expected += sorted(self.waiting(fragment, now_ms))[: limit - len(expected)]
        assert self.wheel.take(now_ms, limit, fragments) == expected
        self.out |= {delay.offset: delay for delay in expected}

    def done(self, offsets: list[int]) -> None:
        self.wheel.done(offsets)
        for offset in offsets:
            del self.pending[offset]
            self.out.pop(offset, None)

    def release(self, offsets: list[int]) -> None:
        self.wheel.release(offsets)
        for offset in offsets:
            del self.out[offset]

    def checkpoint(self) -> None:
        if self.frozen is None:
            self.freeze()
        self.adopt()

    def freeze(self) -> None:
        """Begin a checkpoint; what happens from here on is not in its files."""
        assert self.frozen is None
        self.sequence += 1
        self.frozen = self.wheel.freeze(self.sequence, self.offset + 1)
        self.set_aside = dict(self.pending)

    def adopt(self) -> None:
        """Write the checkpoint, however much happened since it was begun, and go on with its files."""
        assert self.frozen is not None
        self.frozen.write(self.wheel.files)
        self.saved = self.frozen.as_files(), sorted(self.frozen.done)
        self.wheel.adopt(self.frozen)
        self.frozen = None
        self.check_saved()

    def abandon(self) -> None:
        """The checkpoint could not be written."""
        assert self.frozen is not None
        self.wheel.unfreeze()
        self.frozen = None

    def check_saved(self) -> None:
        """The files have what was pending when the checkpoint was begun, no more and no less."""
        saved = Wheel(self.files, FilePool(self.files, 16), BlockCache(16), self.fragments)
        saved.restore(*self.saved)
        assert saved.pending == len(self.set_aside)
        found = {delay.offset: (delay.due_ms, delay.length) for delay in saved.pending_between(0, FOREVER, 1 << 20)}
        assert found == {offset: (due, length) for offset, (due, length, _) in self.set_aside.items()}

    def check(self) -> None:
        assert self.wheel.pending == len(self.pending)
        low, high = self.offset // 4, self.offset // 2
        expected = [Delay(due, at, length) for at, (due, length, _) in sorted(self.pending.items()) if low <= at < high]
        assert self.wheel.pending_between(low, high, 1 << 20) == expected
        assert self.wheel.pending_between(low, high, 3) == expected[:3]
        assert all(self.wheel.is_pending(due, at) == (at not in self.out) for due, at, _ in expected[:1])
        assert self.wheel.oldest_handed_out() == min(self.out, default=None)

    def drain(self) -> None:
        """Everything that is pending comes out, once, in order."""
        self.release(list(self.out))
        for fragment in range(self.fragments):
            self.take(FOREVER, 1 << 40, [fragment])
        assert self.wheel.take(FOREVER, 1) == []
        self.done(list(self.out))
        assert self.wheel.pending == 0
        assert self.wheel.take(FOREVER, 1) == []


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.sampled_from((1, 3, 50, 5000, 20_000)), st.booleans()),
        st.tuples(st.just("take"), st.integers(0, SPAN), st.sampled_from((1, 7, 5000)), st.booleans()),
        st.tuples(st.just("done"), st.integers(1, 3000)),
        st.tuples(st.just("cancel"), st.sampled_from((1, 10, 3000))),
        st.tuples(st.just("release"), st.integers(1, 3000)),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("freeze")),
        st.tuples(st.just("abandon")),
        st.tuples(st.just("reopen")),
    ),
    max_size=25,
)


@pytest.mark.sampled
@pytest.mark.uncounted
@settings(max_examples=sample_size(share=30, whole=1500))
@given(st.integers(0, 1 << 32), steps)
def test_nothing_comes_twice_or_early_or_never(seed: int, plan: list[tuple[object, ...]]) -> None:
    """D-14: whatever is added, taken, done, cancelled, given back, checkpointed and reopened in between."""
    rng = random.Random(seed)
    bench = Bench()
    for step in plan:
        match step:
            case "add", int(fragment), int(count), bool(as_arrays):
                bench.add(fragment, [rng.randrange(SPAN) for _ in range(count)], as_arrays=as_arrays)
            case "take", int(now_ms), int(limit), bool(every):
                bench.take(now_ms, limit, [0, 1, 2] if every else [1])
            case "done", int(count):
                bench.done(rng.sample(sorted(bench.out), min(count, len(bench.out))))
            case "cancel", int(count):
                free = sorted(bench.pending.keys() - bench.out.keys())
                bench.done(rng.sample(free, min(count, len(free))))
            case "release", int(count):
                bench.release(rng.sample(sorted(bench.out), min(count, len(bench.out))))
            case ("checkpoint",):
                bench.checkpoint()
            case ("freeze",):
                if bench.frozen is None:
                    bench.freeze()
            case ("abandon",):
                if bench.frozen is not None:
                    bench.abandon()
            case ("reopen",):
                if bench.frozen is not None:
                    bench.adopt()
                bench.checkpoint()
                bench.reopen()
        bench.check()
    bench.drain()


def test_many_checkpoints_are_merged_and_lose_nothing() -> None:
    rng = random.Random(1)
    bench = Bench(4)
    for number in range(40):
        bench.add(number, [rng.randrange(SPAN) for _ in range(rng.choice((2, 400)))])
        bench.take(number * 10_000, 30, [0, 1, 2, 3])
        bench.done(sorted(bench.out)[::2])
        bench.checkpoint()
        if number % 7 == 0:
            bench.reopen()
        bench.check()
    assert len(bench.saved[0]) < 12
    bench.drain()


@pytest.mark.parametrize("fragments", [1, 2, 8])
def test_another_number_of_fragments_spreads_everything_anew(fragments: int) -> None:
    bench = Bench(3)
    for fragment in range(3):
        bench.add(fragment, list(range(10, 5000, 7)))
    bench.done([100, 300])
    bench.checkpoint()
    bench.done([500])
    bench.checkpoint()
    bench.fragments = fragments
    bench.reopen()
    found = bench.wheel.take(FOREVER, 1 << 40)
    assert {delay.offset for delay in found} == bench.pending.keys()
    assert len(found) == len(bench.pending) == bench.wheel.pending


def test_a_checkpoint_that_fails_changes_nothing() -> None:
    bench = Bench()
    bench.add(0, [5, 6, 7])
    bench.take(5, 1, [0])
    bench.checkpoint()
    bench.add(0, [1, 2])
    for kind in ("create", "write", "sync"):
        bench.files.fail(kind)
        with pytest.raises(Exception, match="could not"):
            bench.checkpoint()
        bench.files.heal()
        bench.abandon()
        bench.check()
    bench.drain()


def test_what_happens_while_a_checkpoint_is_written_is_not_lost_with_it() -> None:
    """Each entry meets every kind of change between the two ends of a checkpoint, merged runs included."""
    rng = random.Random(2)
    bench = Bench(2)
    for number in range(12):
        bench.add(0, [rng.randrange(SPAN) for _ in range(600)], as_arrays=number % 2 == 0)
        bench.add(1, [rng.randrange(SPAN) for _ in range(6000)], as_arrays=True)
        bench.take(SPAN // 10, 500, [0, 1])
        bench.freeze()
        out = sorted(bench.out)
        bench.done(out[::3])  # handed out before, done since
        bench.release(out[1::3])  # handed out before, given back since
        bench.take(SPAN // 8, 700, [0, 1])  # loaded since
        bench.done(rng.sample(sorted(bench.out), 50))
        bench.done(rng.sample(sorted(bench.pending.keys() - bench.out.keys()), 50))  # cancelled since
        bench.add(0, [1, 2, SPAN - 1])  # due at once, and late
        bench.check()
        if number % 4 == 3:
            bench.abandon()
        else:
            bench.adopt()
        bench.check()
    bench.drain()


def test_what_is_about_to_end_is_not_handed_out() -> None:
    """A cancellation that is written, but not visible yet, is not overtaken by a delivery."""
    bench = Bench()
    bench.add(0, [5, 6, 7])
    ending = sorted(bench.pending)[1]
    bench.wheel.ending([ending])
    assert [delay.due_ms for delay in bench.wheel.take(10, 10)] == [5, 7]
    bench.wheel.done([ending])
    bench.wheel.release([delay for delay in bench.pending if delay != ending])
    assert [delay.due_ms for delay in bench.wheel.take(10, 10)] == [5, 7]
