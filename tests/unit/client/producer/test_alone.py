"""A message that leaves alone: a batch like any other, or none."""

from __future__ import annotations

import pytest

from dmq.client.producer.accumulator import Accumulator, Draft, LaneKey, SendBatch
from dmq.model import Durability, Message

ANY = LaneKey("orders", -1, Durability.STORED)


def test_it_has_a_queue_and_a_number_and_takes_room() -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane = acc.lane(ANY)
    first = acc.take_alone(lane, 100, range(4))
    assert first is not None
    assert (first.count, first.bytes, first.first_sequence, acc.bytes, acc.messages) == (1, 100, 0, 100, 1)
    assert lane.under_way == 1
    assert [*acc.unsettled()] == [first]
    acc.finished(first)
    acc.release(first)
    assert (acc.bytes, acc.messages, lane.under_way, [*acc.unsettled()]) == (0, 0, 0, [])
    second = acc.take_alone(lane, 100, range(4))
    assert second is not None
    assert second.first_sequence == 1
    assert second.queue == (first.queue + 1) % 4


@pytest.mark.parametrize("what", ["under way", "gathering", "ready", "full", "busy"])
def test_it_does_not_overtake_nor_overfill(what: str) -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane = acc.lane(ANY)
    blocker: SendBatch | None = None
    if what == "under way":
        blocker = acc.take_alone(lane, 100, range(4))
    elif what == "gathering":
        blocker = acc.append(Draft(lane, Message(b"x"), 100))
    elif what == "ready":
        blocker = SendBatch(lane)
        blocker.count = 1
        acc.add(blocker)
    elif what == "full":
        acc.append(Draft(acc.lane(ANY._replace(topic="other")), Message(b"x"), 950))
    else:
        acc.append(Draft(acc.lane(ANY._replace(queue=0)), Message(b"x"), 1))
        blocker = acc.next_batch(acc.lane(ANY._replace(queue=0)), range(1))
    before = (acc.bytes, acc.messages, lane.under_way, len([*acc.unsettled()]), lane.stream.next_sequence)
    assert acc.take_alone(lane, 100, range(1 if what == "busy" else 4)) is None
    assert (acc.bytes, acc.messages, lane.under_way, len([*acc.unsettled()]), lane.stream.next_sequence) == before


def test_plain_messages_and_others_share_a_batch_in_order() -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane = acc.lane(ANY)
    batch = acc.append_plain(lane, b"a", "k", 1)
    assert batch is not None
    assert (batch.is_plain, batch.bodies, batch.keys) == (True, [b"a"], ["k"])
    acc.append(Draft(lane, Message(b"b", tag="t"), 1, extra=b"e"))
    acc.append_plain(lane, b"c", None, 1)
    assert not batch.is_plain
    assert batch.messages == [Message(b"a", "k"), Message(b"b", tag="t"), Message(b"c")]
    assert (batch.count, batch.extras) == (3, [b"", b"e", b""])
