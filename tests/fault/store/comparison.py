"""Asking a store every question there is, and comparing the answers with the model's."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise

from dmq.model import MessageId
from dmq.storage.store import MessageStore
from tests.fault.store.model import HALF, HALF_ID, SCHEDULE, SCHEDULE_ID, Key, Placed, Spot, Stored, View

FOREVER_MS = 1 << 50


def check(store: MessageStore, view: View, ending: Set[int] = frozenset()) -> None:
    """Everything but producers, which can only be asked by sending.

    Parameters:
        view: what can be seen.
        ending: delayed records whose end is written, but cannot be seen yet.
    """
    assert store.queries.damage == []
    check_topics(store, view)
    check_queues(store, view)
    check_positions(store, view)
    check_delays(store, view, ending)
    check_transactions(store, view)
    check_carried(store, view)


def check_topics(store: MessageStore, view: View) -> None:
    found = {topic.id: (topic.name, topic.config) for topic in store.queries.topics() if topic.id > HALF_ID}
    assert found == view.topics


def check_queues(store: MessageStore, view: View) -> None:
    for name, key in queues_of(view):
        queue = view.queues.get(key, [])
        first = view.first(key, store.queries.start)
        assert store.queries.bounds(name, key[1]) == (first, len(queue)), (name, key)
        at = first
        while at < len(queue):
            found = store.queries.read(name, key[1], at, 1000, 1 << 20)
            assert len(found), f"nothing read at {at} of {name}"
            assert found.offsets.tolist() == list(range(at, at + len(found)))
            assert b"".join(found.pieces) == b"".join(message.raw for message in queue[at : at + len(found)])
            assert found.next_offset == at + len(found)
            at = found.next_offset


def queues_of(view: View) -> list[tuple[str, Key]]:
    """Every queue there may be something in."""
    named = [(name, (topic_id, q)) for topic_id, (name, config) in view.topics.items() for q in range(config.queues)]
    own = {SCHEDULE_ID: SCHEDULE, HALF_ID: HALF}
    return named + [(own[key[0]], key) for key in view.queues if key[0] in own]


def check_positions(store: MessageStore, view: View) -> None:
    assert store.queries.groups() == sorted(view.positions)
    for group, spots in view.positions.items():
        for (topic_id, queue), spot in spots.items():
            position = store.queries.position(group, view.topics[topic_id][0], queue)
            assert position is not None
            assert (position.floor, position.ranges) == (spot.floor, ranges(spot)), (group, topic_id, queue)


def ranges(spot: Spot) -> list[tuple[int, int]]:
    offsets = sorted(spot.above)
    edges = [i for i, (a, b) in enumerate(pairwise(offsets), 1) if b != a + 1]
    parts = [offsets[i:j] for i, j in pairwise([0, *edges, len(offsets)])] if offsets else []
    return [(part[0], part[-1] + 1) for part in parts]


def check_delays(store: MessageStore, view: View, ending: Set[int]) -> None:
    """None may be handed out when this is called: it takes all and gives them back."""
    assert store.queries.delays_pending == len(view.delays)
    taken = store.take_due(FOREVER_MS, len(view.delays) + 1)
    expected = sorted(
        (due, offset, len(message.raw)) for offset, (due, message) in view.delays.items() if offset not in ending
    )
    assert sorted(taken) == expected
    assert all(delay.offset >= store.queries.start for delay in taken)
    store.release_due(delay.offset for delay in taken)


def check_transactions(store: MessageStore, view: View) -> None:
    found = {mid: (half.journal_offset, half.stored_at_ms) for mid, half in store.queries.transactions().items()}
    assert found == view.transactions
    assert all(offset >= store.queries.start for offset, _ in found.values())


def check_carried(store: MessageStore, view: View) -> None:
    """What a group has not settled of a topic that is carried for it is still there, under its own id."""
    for topic_id, (_, config) in view.topics.items():
        if config.carry_for is None:
            continue
        for queue in range(config.queues):
            key = (topic_id, queue)
            messages = view.queues.get(key, [])
            first = view.first(key, store.queries.start)
            spot = view.positions.get(config.carry_for, {}).get(key, Spot())
            waiting = {m.id for offset, m in enumerate(messages) if not spot.holds(offset)}
            kept = [m.id for offset, m in enumerate(messages) if offset >= first and not spot.holds(offset)]
            assert waiting == set(kept)
            assert len(kept) == len(set(kept)), "carried twice"


def check_find(store: MessageStore, view: View, messages: list[Stored]) -> None:
    """By id and by key, for these messages."""
    kept = [message for message in view.messages if message.offset >= store.queries.start]
    for message in messages:
        if message.key is not None:
            expected = [m.offset for m in kept if m.key == message.key]
            assert [found.journal_offset for found in store.queries.find(key=message.key)] == expected
        if message.id.producer_id:
            expected = [m.offset for m in kept if m.id == message.id]
            found = store.queries.find(message_id=message.id)
            assert [f.journal_offset for f in found] == expected, message.id
            assert all(f.message_id == message.id for f in found)
    assert store.queries.find(message_id=MessageId(1 << 40, 7)) == []
    assert store.queries.find(key="never used") == []


def check_times(store: MessageStore, view: View, time_ms: int) -> None:
    for name, key in queues_of(view):
        messages = view.queues.get(key, [])
        first = view.first(key, store.queries.start)
        later = [offset for offset, m in enumerate(messages) if offset >= first and m.stored_at_ms >= time_ms]
        assert store.queries.offset_since(name, key[1], time_ms) == (later[0] if later else len(messages))


def check_producers(store: MessageStore, view: View) -> None:
    """Every batch that is remembered, sent again, gets its first place and is not written again."""
    end = store.queries.end
    for producer in view.producers.values():
        for places in producer.places.values():
            for place in places:
                check_resend(store, place)
    assert store.queries.end == end


def check_resend(store: MessageStore, placed: Placed) -> None:
    assert placed.batch is not None
    again = store.append([placed.batch])[0]
    assert again.duplicate
    assert (again.first_offset, again.count) == (placed.first, len(placed.messages))
    assert (again.unit_start, again.unit_end) == placed.unit
