"""Pending delays can be listed in order and taken one by one, wherever the wheel keeps them. (D-14)"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.storage.delay.wheel import Delay
from tests.sampling import sample_size
from tests.unit.storage.delay.test_wheel import FOREVER, Bench


def pages(bench: Bench, limit: int) -> list[Delay]:
    found: list[Delay] = []
    at = (0, 0)
    while page := bench.wheel.after(*at, limit):
        found += page
        at = (page[-1].due_ms, page[-1].offset)
    return found


def listed(bench: Bench) -> list[Delay]:
    return sorted(Delay(due, offset, length) for offset, (due, length, _) in bench.pending.items())


@pytest.mark.sampled
@settings(max_examples=sample_size(share=40, whole=400), deadline=None)
@given(st.integers(0, 1 << 32))
def test_pages_hold_everything_pending_in_order_whatever_happened_before(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(rng.randint(1, 4))
    for _ in range(rng.randint(1, 12)):
        act = rng.random()
        if act < 0.5:
            dues = [rng.randint(1, 500) for _ in range(rng.choice((1, 5, 60)))]
            bench.add(rng.randrange(8), dues, as_arrays=len(dues) > 20)
        elif act < 0.65:
            bench.checkpoint()
        elif act < 0.8:
            bench.take(rng.randint(0, 500), rng.randint(1, 40), [*range(bench.fragments)])
        elif bench.pending:
            offset = rng.choice([*bench.pending])
            due = bench.pending[offset][0]
            assert bench.wheel.claim(due, offset) == (offset not in bench.out)
            assert not bench.wheel.claim(due, offset)  # somebody has it now
            if offset not in bench.out and rng.random() < 0.5:
                bench.wheel.release([offset])
            else:
                bench.out.pop(offset, None)
                bench.wheel.done([offset])
                del bench.pending[offset]
        assert bench.wheel.pending == len(bench.pending)
        assert pages(bench, rng.choice((1, 7, 1000))) == listed(bench)


def test_what_was_claimed_is_not_handed_out_and_what_was_given_back_is() -> None:
    bench = Bench(1)
    bench.add(0, [10, 20, 30])
    offsets = sorted(bench.pending)
    assert bench.wheel.claim(20, offsets[1])
    assert [delay.due_ms for delay in bench.wheel.take(FOREVER, 10)] == [10, 30]
    bench.wheel.release([offsets[1]])
    assert [delay.due_ms for delay in bench.wheel.take(FOREVER, 10)] == [20]


def test_nothing_is_claimed_that_is_not_there() -> None:
    bench = Bench(2)
    bench.add(0, [10])
    (offset,) = bench.pending
    assert not bench.wheel.claim(11, offset)
    assert not bench.wheel.claim(10, offset + 1)
    bench.wheel.take(FOREVER, 1)
    assert not bench.wheel.claim(10, offset)
