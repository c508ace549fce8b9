"""A message that leaves alone: without a batch, unless somebody needs one."""

from __future__ import annotations

import pytest

from dmq.client.producer.accumulator import SECOND_MESSAGES_MIN, Accumulator, Draft, LaneKey, SendBatch
from dmq.model import Durability, Message

ANY = LaneKey("orders", -1, Durability.STORED)


def test_it_has_a_queue_and_a_number_and_takes_room() -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane = acc.lane(ANY)
    first = acc.take_lone(lane, 100, 4)
    assert first is not None
    assert (first.sequence, first.size, acc.bytes, acc.messages, lane.under_way) == (0, 100, 100, 1, 1)
    assert acc.end_lone(lane, first)
    assert (acc.bytes, acc.messages, lane.under_way, lane.stream.under_way, [*acc.unsettled()]) == (0, 0, 0, {}, [])
    second = acc.take_lone(lane, 100, 4)
    assert second is not None
    assert second.sequence == 1
    assert second.queue == (first.queue + 1) % 4


@pytest.mark.parametrize("what", ["under way", "gathering", "ready", "full", "busy"])
def test_it_does_not_overtake_nor_overfill(what: str) -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane = acc.lane(ANY)
    if what == "under way":
        assert acc.take_lone(lane, 100, 4) is not None
    elif what == "gathering":
        acc.append(Draft(lane, Message(b"x"), 100))
    elif what == "ready":
        blocker = SendBatch(lane)
        blocker.count = 1
        acc.add(blocker)
    elif what == "full":
        acc.append(Draft(acc.lane(ANY._replace(topic="other")), Message(b"x"), 950))
    else:
        acc.append(Draft(acc.lane(ANY._replace(queue=0)), Message(b"x"), 1))
        assert acc.next_batch(acc.lane(ANY._replace(queue=0)), range(1)) is not None
    before = (acc.bytes, acc.messages, lane.under_way, lane.stream.next_sequence)
    assert acc.take_lone(lane, 100, 1 if what == "busy" else 4) is None
    assert (acc.bytes, acc.messages, lane.under_way, lane.stream.next_sequence) == before


def test_nothing_follows_it_to_its_queue() -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane, fixed = acc.lane(ANY), acc.lane(ANY._replace(queue=0))
    lone = acc.take_lone(lane, 100, 1)
    assert lone is not None
    acc.append(Draft(fixed, Message(b"x"), 1))
    acc.append(Draft(lane, Message(b"y"), 1))
    for behind in (fixed, lane):
        assert acc.next_batch(behind, range(1), overlaps=True) is None
    assert not acc.end_lone(lane, lone), "they wait for it"
    batch = acc.take_stand_in(lane)
    assert {*acc.finished(batch)} == {fixed, lane}
    assert acc.next_batch(fixed, range(1)) is not None


def test_a_large_batch_that_left_beside_it_is_still_under_way_afterwards() -> None:
    acc = Accumulator(1 << 20, 10_000, seed=1)
    lane = acc.lane(ANY)
    lone = acc.take_lone(lane, 100, 4)
    large = SendBatch(lane)
    large.count = SECOND_MESSAGES_MIN
    acc.add(large)
    assert acc.next_batch(lane, range(4)) is large
    assert lone is not None
    assert acc.end_lone(lane, lone)
    assert lane.under_way == 1
    acc.finished(large)
    assert lane.under_way == 0


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_its_batch_has_its_place_and_its_numbers(is_asked_for: bool) -> None:
    acc = Accumulator(1000, 10, seed=1)
    lane, other = acc.lane(ANY), acc.lane(ANY._replace(topic="other"))
    lone = acc.take_lone(lane, 100, 4)
    assert lone is not None
    acc.append(Draft(other, Message(b"x"), 1))
    assert acc.next_batch(other, range(4)) is not None, "the next number of the stream is taken by another topic"
    asked = [*acc.unsettled()] if is_asked_for else []
    assert len(asked) == (2 if is_asked_for else 0)
    if is_asked_for:
        assert not acc.end_lone(lane, lone), "somebody waits for its end"
    batch = acc.take_stand_in(lane)
    assert not is_asked_for or batch in asked
    assert (batch.queue, batch.first_sequence, batch.bytes, batch.count) == (*lone, 1)
    assert batch.producer_id == lane.stream.producer_id
    assert (acc.bytes, acc.messages, lane.under_way, lane.lone) == (101, 2, 1, None)
    assert acc.take_lone(lane, 100, 4) is None
    acc.finished(batch)
    acc.release(batch)
    assert (acc.bytes, acc.messages, lane.under_way) == (1, 1, 0)
    assert acc.take_lone(lane, 100, 4) is not None


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
