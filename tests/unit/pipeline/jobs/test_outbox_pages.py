"""How a period is divided among the tasks that read it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dmq.outbox.repair.table_reader import Period
from dmq.pipeline.jobs.reconcile import parts_of


@pytest.mark.parametrize(("length", "count"), [(1, 1), (1, 8), (7, 3), (1000, 64), (172_800_000, 8), (0, 4)])
def test_parts_have_each_moment_of_a_period_once(length: int, count: int) -> None:
    parts = parts_of(Period(100, 100 + length), count)
    assert 1 <= len(parts) <= max(1, min(count, length))
    assert (parts[0].from_ms, parts[-1].to_ms) == (100, 100 + length)
    assert all(one.to_ms == other.from_ms for one, other in pairwise(parts))
