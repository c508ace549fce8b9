"""How the work of a replay is divided among tasks."""

from __future__ import annotations

import random

import pytest

from dmq.pipeline.replay.spark_replay import shares


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 100])
def test_tasks_have_about_as_much_to_send_each_and_the_rate_together(tasks: int) -> None:
    chance = random.Random(tasks)
    missing = {queue: chance.randrange(1, 1000) for queue in range(20)}
    found = shares(missing, tasks, 500.0)
    assert sorted(queue for queues, _ in found for queue in queues) == sorted(missing)
    assert len(found) == min(tasks, len(missing))
    sizes = [sum(missing[queue] for queue in queues) for queues, _ in found]
    assert max(sizes) - min(sizes) <= max(missing.values())
    rates = [rate for _, rate in found if rate is not None]
    assert sum(rates) == pytest.approx(500.0)
    assert [size / rate for size, rate in zip(sizes, rates, strict=True)] == pytest.approx(
        [sum(sizes) / 500] * len(sizes)
    )


def test_without_a_rate_no_task_has_one_and_without_work_there_is_no_task() -> None:
    assert shares({3: 5}, 4, None) == [((3,), None)]
    assert shares({}, 4, 10.0) == []
