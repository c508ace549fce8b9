"""Idempotent producers. (D-15)"""

from __future__ import annotations

import pytest

from dmq.errors import SequenceConflict, StaleEpoch
from dmq.storage.state.producers import REMEMBERED, Place, ProducerTable

KEY = 16 << 8
HOUR_MS = 3_600_000


def place(first: int, count: int = 10, unit: int = 1000) -> Place:
    return Place(first, count, first + 7, unit, unit + 50)


@pytest.fixture
def table() -> ProducerTable:
    return ProducerTable(3, HOUR_MS)


def test_a_batch_sent_again_gets_its_first_place(table: ProducerTable) -> None:
    assert table.look(1, 0, KEY, 0, 10) is None
    table.remember(1, 0, False, KEY, place(0), 0)
    assert table.look(1, 0, KEY, 0, 10) == place(0)
    assert table.look(1, 0, KEY, 10, 10) is None
    assert table.look(1, 0, KEY + 1, 0, 10) is None
    assert table.look(2, 0, KEY, 0, 10) is None


def test_the_last_number_in_a_queue_is_known_as_long_as_its_epoch_counts(table: ProducerTable) -> None:
    assert table.last_sequence(1, 0, KEY) is None
    table.remember(1, 0, False, KEY, place(0), 0)
    table.remember(1, 0, False, KEY, place(30), 0)
    assert table.last_sequence(1, 0, KEY) == 39
    assert table.last_sequence(1, 0, KEY + 1) is None
    assert table.last_sequence(1, 1, KEY) is None
    table.remember(2, 0, True, KEY, place(0), 0)
    assert table.last_sequence(2, 1, KEY) == 9


@pytest.mark.parametrize(("first", "count"), [(0, 9), (5, 10), (9, 1), (1, 3)])
def test_other_bounds_over_known_numbers_are_a_conflict(table: ProducerTable, first: int, count: int) -> None:
    table.remember(1, 0, False, KEY, place(0), 0)
    with pytest.raises(SequenceConflict):
        table.look(1, 0, KEY, first, count)


def test_the_last_five_batches_of_a_queue_are_known(table: ProducerTable) -> None:
    for number in range(REMEMBERED + 1):
        table.remember(1, 0, False, KEY, place(number * 10), 0)
        table.applied = place(number * 10).unit_end
    table.remember(1, 0, False, KEY, place((REMEMBERED + 1) * 10), 0)
    for number in range(1, REMEMBERED + 2):
        assert table.look(1, 0, KEY, number * 10, 10) == place(number * 10)
    with pytest.raises(SequenceConflict):
        table.look(1, 0, KEY, 0, 10)


def test_batches_that_are_not_applied_push_none_out(table: ProducerTable) -> None:
    """They may be cut, and what was applied before them is the last there is then."""
    written = [place(number * 10, unit=number * 100) for number in range(3 * REMEMBERED)]
    for each in written:
        table.remember(1, 0, False, KEY, each, 0)
        table.applied = written[0].unit_end
    assert table.look(1, 0, KEY, 0, 10) == written[0]
    assert [queues for *_, queues in table.dump(table.applied)] == [[(KEY, (written[0],))]]
    table.applied = written[-1].unit_end
    table.remember(1, 0, False, KEY, place(3 * REMEMBERED * 10, unit=3 * REMEMBERED * 100), 0)
    (((_, kept),),) = [queues for *_, queues in table.dump(1 << 30)]
    assert len(kept) == REMEMBERED + 1


def test_a_higher_epoch_replaces_and_a_lower_one_is_refused(table: ProducerTable) -> None:
    table.remember(1, 3, False, KEY, place(0), 0)
    assert table.look(1, 4, KEY, 0, 10) is None
    table.remember(1, 4, False, KEY, place(0, 5), 0)
    with pytest.raises(StaleEpoch):
        table.look(1, 3, KEY, 0, 10)
    assert table.look(1, 4, KEY, 0, 5) == place(0, 5)
    table.remember(1, 3, False, KEY, place(50), 0)
    assert table.look(1, 4, KEY, 50, 10) is None


def test_the_numbers_of_a_named_producer_go_on_over_epochs(table: ProducerTable) -> None:
    table.remember(1, 3, True, KEY, place(0), 0)
    table.remember(1, 3, True, KEY + 1, place(10), 0)
    assert table.look(1, 4, KEY, 0, 10) == place(0), "what an instance before has written is known"
    with pytest.raises(SequenceConflict):
        table.look(1, 4, KEY, 5, 10)
    table.remember(1, 4, True, KEY, place(20), 0)
    assert table.last_places(1) == {KEY: place(20), KEY + 1: place(10)}
    with pytest.raises(StaleEpoch):
        table.look(1, 3, KEY, 30, 10)
    twin = ProducerTable(3, HOUR_MS)
    twin.load(table.dump(1 << 60))
    assert twin.epoch_of(1) == 4
    assert twin.last_places(1) == table.last_places(1)
    assert table.last_places(2) == {}


def test_anonymous_producers_expire_and_named_ones_do_not(table: ProducerTable) -> None:
    table.remember(1, 0, False, KEY, place(0), 0)
    table.remember(2, 0, True, KEY, place(0), 0)
    table.remember(3, 0, False, KEY, place(0), 2 * HOUR_MS)
    table.expire(2 * HOUR_MS)
    assert [table.look(pid, 0, KEY, 0, 10) for pid in (1, 2, 3)] == [None, place(0), place(0)]


def test_too_many_forget_the_longest_unused_anonymous_one(table: ProducerTable) -> None:
    table.remember(1, 0, True, KEY, place(0), 0)
    table.remember(2, 0, False, KEY, place(0), 0)
    table.remember(3, 0, False, KEY, place(0), 0)
    table.remember(2, 0, False, KEY, place(10), 0)
    table.remember(4, 0, False, KEY, place(0), 0)
    assert [table.look(pid, 0, KEY, 0, 10) is not None for pid in (1, 2, 3, 4)] == [True, True, False, True]


def test_a_table_comes_back_from_its_dump_but_for_what_is_not_covered(table: ProducerTable) -> None:
    table.remember(1, 0, True, KEY, place(0, unit=100), 5)
    table.remember(1, 0, True, KEY, place(10, unit=200), 6)
    table.remember(2, 1, False, KEY + 1, place(0, unit=200), 7)
    twin = ProducerTable(3, HOUR_MS)
    twin.load(table.dump(200))
    assert twin.look(1, 0, KEY, 0, 10) == place(0, unit=100)
    assert twin.look(1, 0, KEY, 10, 10) is None
    assert len(twin) == 1
    twin.load(table.dump(201))
    assert twin.dump(1 << 60) == table.dump(1 << 60)


def test_a_producer_of_deleted_topics_only_is_forgotten(table: ProducerTable) -> None:
    """As a snapshot forgets it: a store that was built anew must count the same."""
    table.remember(1, 0, True, KEY, place(0), 0)
    table.remember(2, 0, False, KEY, place(0), 0)
    table.remember(2, 0, False, 17 << 8, place(10), 0)
    table.drop_topic(16)
    assert len(table) == 1
    assert table.look(2, 0, KEY, 0, 10) is None
    assert table.look(2, 0, 17 << 8, 10, 10) == place(10)
