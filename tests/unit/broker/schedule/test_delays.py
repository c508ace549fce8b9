"""How delayed messages are spread over queues, fragments and workers. (D-14, D-18, R-10)"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.broker.schedule.delays import first_part, fragments_of, schedule_queue
from dmq.errors import InvalidMessage
from dmq.model import delay_level
from dmq.storage.delay.wheel import Delay


def test_eight_fragments_among_two_workers_are_four_each() -> None:
    assert [*fragments_of(0, 2, 8)] == [0, 1, 2, 3]
    assert [*fragments_of(1, 2, 8)] == [4, 5, 6, 7]


@given(st.integers(1, 255), st.data())
def test_every_fragment_has_one_worker(fragments: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, fragments))
    owned = [fragment for worker in range(workers) for fragment in fragments_of(worker, workers, fragments)]
    assert owned == [*range(fragments)]
    assert all(fragments_of(worker, workers, fragments) for worker in range(workers))


@given(st.integers(0, (1 << 64) - 1))
def test_queues_of_one_producer_do_not_share_a_place_in_the_schedule(producer_id: int) -> None:
    places = [schedule_queue(producer_id, queue) for queue in range(255)]
    assert sorted(places) == [*range(255)]


def test_a_unit_takes_as_many_as_fit_and_one_always_fits() -> None:
    delays = [Delay(0, number, 100) for number in range(10)]
    assert first_part(delays, 250) == 2
    assert first_part(delays, 10) == 1
    assert first_part(delays, 10_000) == 10
    assert first_part([], 1) == 0


def test_levels_have_numbers_and_names() -> None:
    assert [delay_level(number) for number in (1, 3, 5, 14, 17, 18)] == [1.0, 10.0, 60.0, 600.0, 3600.0, 7200.0]
    assert delay_level("10s") == delay_level(3)
    assert delay_level("2h") == delay_level(18)


@pytest.mark.parametrize("level", [0, 19, -1, "11s", ""])
def test_a_level_that_does_not_exist_is_refused(level: int | str) -> None:
    with pytest.raises(InvalidMessage, match="not a delay level"):
        delay_level(level)
