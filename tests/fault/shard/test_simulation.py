"""A shard under a storm, by seeds: nothing committed is lost, nobody serves beside another, and it settles."""

from __future__ import annotations

import pytest

from tests.fault.shard.simulate import simulate
from tests.sampling import SEED, sample_size

pytestmark = pytest.mark.sampled

SEEDS = sample_size(share=50, whole=1000)


@pytest.mark.parametrize("number", range(SEEDS))
def test_a_shard_keeps_its_word_whatever_goes_wrong(number: int) -> None:
    cluster = simulate(SEED * 10_000 + number)
    if not cluster.waits_for_person:  # which a storm may bring about before much was sent
        assert cluster.checker.commits > 5
        assert cluster.checker.serves > 50


def test_a_seed_runs_the_same_way_twice() -> None:
    runs = [simulate(SEED * 10_000) for _ in range(2)]
    assert len({(run.schedule.turns, run.schedule.now, bytes(run.checker.journal)) for run in runs}) == 1
