"""That a position was set by hand is remembered, for consumers that would take a replay for duplicates (J-12)."""

from __future__ import annotations

from dmq.model import TopicConfig
from dmq.storage.state.events import PositionDropped, PositionSet, TopicDropped, TopicPut
from dmq.storage.state.producers import ProducerTable
from dmq.storage.state.state import State


def state() -> State:
    made = State(ProducerTable(3, 1000))
    for topic_id in (16, 17):
        made.apply_event(TopicPut(topic_id, f"t{topic_id}", TopicConfig(queues=2)))
    return made


def seek(made: State, topic_id: int = 16, queue: int = 0, group: str = "billing") -> int:
    made.apply_event(PositionSet(group, topic_id, queue, 0))
    return made.sought.get((group, topic_id, queue), 0)


def test_the_first_position_is_no_seek_and_every_other_has_a_number_of_its_own() -> None:
    made = state()
    assert seek(made) == seek(made, queue=1) == seek(made, group="audit") == 0
    numbers = [seek(made), seek(made, queue=1), seek(made), seek(made, group="audit")]
    assert len({*numbers}) == 4
    assert numbers == sorted(numbers)


def test_it_outlives_a_snapshot() -> None:
    made = state()
    last = [seek(made) for _ in range(3)][-1]
    again = State(ProducerTable(3, 1000))
    again.restore(made.snapshot(0))
    assert again.sought == {("billing", 16, 0): last}
    assert seek(again) > last


def test_it_goes_with_its_group_and_its_topic_and_numbers_are_not_used_again() -> None:
    made = state()
    for _ in range(2):
        seek(made)
        seek(made, 17)
        seek(made, group="audit")
    made.apply_event(PositionDropped("billing", 17))
    assert set(made.sought) == {("billing", 16, 0), ("audit", 16, 0)}
    made.apply_event(PositionDropped("audit"))
    assert set(made.sought) == {("billing", 16, 0)}
    last = made.sought["billing", 16, 0]
    made.apply_event(TopicDropped(16))
    assert not made.sought
    seek(made, 17)
    assert seek(made, 17) > last
