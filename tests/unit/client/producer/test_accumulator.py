"""Gathering: what shares a batch, when it leaves, and how much there may be."""

from __future__ import annotations

import random
import threading

import pytest

from dmq.client.connection.threads import Waiter
from dmq.client.producer.accumulator import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    SECOND_MESSAGES_MIN,
    Accumulator,
    Draft,
    LaneKey,
    SendBatch,
)
from dmq.model import Durability, Message

MESSAGE = Message(b"x")
ANY = LaneKey("orders", -1, Durability.STORED)


def accumulator(window_bytes: int = 1 << 30, window_messages: int = 1 << 20) -> Accumulator:
    return Accumulator(window_bytes, window_messages, seed=1)


def fill(acc: Accumulator, key: LaneKey, count: int, size: int = 10) -> None:
    lane = acc.lane(key)
    for _ in range(count):
        acc.append(Draft(lane, MESSAGE, size))


def test_a_message_leaves_alone_and_the_next_ones_together() -> None:
    acc = accumulator()
    lane = acc.lane(ANY)
    fill(acc, ANY, 1)
    first = acc.next_batch(lane, range(4))
    assert first is not None
    fill(acc, ANY, 20)
    assert acc.next_batch(lane, range(4)) is None
    assert acc.finished(first) == [lane]
    second = acc.next_batch(lane, range(4))
    assert second is not None
    assert (first.count, second.count) == (1, 20)
    assert second.first_sequence == first.first_sequence + 1


def test_a_large_batch_goes_beside_another_on_another_queue() -> None:
    acc = accumulator()
    lane = acc.lane(ANY)
    fill(acc, ANY, 1)
    first = acc.next_batch(lane, range(2))
    fill(acc, ANY, SECOND_MESSAGES_MIN)
    second = acc.next_batch(lane, range(2))
    fill(acc, ANY, SECOND_MESSAGES_MIN)
    assert first is not None
    assert second is not None
    assert first.queue != second.queue
    assert acc.next_batch(lane, range(2)) is None, "both queues are busy"


def test_a_fixed_queue_has_one_batch_under_way_whatever_waits() -> None:
    acc = accumulator()
    key = ANY._replace(queue=3)
    lane = acc.lane(key)
    fill(acc, key, 1)
    assert acc.next_batch(lane, range(4)) is not None
    fill(acc, key, 5000)
    assert acc.next_batch(lane, range(4)) is None


def test_lanes_of_one_queue_wait_for_each_other() -> None:
    acc = accumulator()
    fixed = ANY._replace(queue=0)
    fill(acc, ANY, 1)
    any_batch = acc.next_batch(acc.lane(ANY), range(1))
    fill(acc, fixed, 1)
    assert any_batch is not None
    assert acc.next_batch(acc.lane(fixed), range(1)) is None
    assert acc.lane(fixed) in acc.finished(any_batch)
    assert acc.next_batch(acc.lane(fixed), range(1)) is not None


@pytest.mark.parametrize("one", [ANY._replace(queue=1, is_delayed=True), ANY._replace(queue=1, is_half=True)])
def test_delayed_and_prepared_batches_of_one_queue_follow_each_other_whatever_their_topic(one: LaneKey) -> None:
    acc = accumulator()
    two = one._replace(topic="other")
    fill(acc, one, 1)
    fill(acc, two, 1)
    first = acc.next_batch(acc.lane(one), range(4))
    assert first is not None
    assert acc.next_batch(acc.lane(two), range(4)) is None
    other = two._replace(queue=2)
    fill(acc, other, 1)
    assert acc.next_batch(acc.lane(other), range(4)) is not None
    assert acc.lane(two) in acc.finished(first)


def test_batches_are_cut_by_bytes_and_by_count() -> None:
    acc = accumulator()
    fill(acc, ANY, 3, size=BATCH_BYTES_MAX // 2)
    assert acc.lane(ANY).ready[0].count == 2
    other = ANY._replace(topic="other")
    fill(acc, other, BATCH_MESSAGES_MAX + 1)
    assert acc.lane(other).ready[0].count == BATCH_MESSAGES_MAX


def test_the_window_is_bounded_in_bytes_and_messages_but_lets_one_giant_in() -> None:
    acc = accumulator(window_bytes=100, window_messages=3)
    assert acc.has_room(10_000, 1), "alone"
    fill(acc, ANY, 2, size=40)
    assert acc.has_room(20, 1)
    assert not acc.has_room(21, 1)
    fill(acc, ANY, 1, size=1)
    assert not acc.has_room(1, 1)


def test_room_comes_back_and_wakes_those_who_wait() -> None:
    acc = accumulator(window_bytes=100)
    lane = acc.lane(ANY)
    fill(acc, ANY, 1, size=100)
    batch = acc.next_batch(lane, range(1))
    assert batch is not None
    waiter = Waiter()
    acc.waiters.append(waiter)
    acc.finished(batch)
    assert acc.release(batch) == [waiter]
    assert acc.has_room(100, 1)
    assert list(acc.unsettled()) == []


def test_extras_stay_beside_their_messages() -> None:
    acc = accumulator()
    lane = acc.lane(ANY)
    acc.append(Draft(lane, MESSAGE, 1))
    acc.append(Draft(lane, MESSAGE, 1, extra=b"e"))
    batch = acc.append(Draft(lane, MESSAGE, 1))
    assert batch.extras == [b"", b"e", b""]


def test_a_batch_that_has_not_left_can_be_taken_back() -> None:
    acc = accumulator()
    lane = acc.lane(ANY)
    batch = acc.append(Draft(lane, MESSAGE, 1))
    assert acc.withdraw(batch)
    assert lane.is_idle
    gone = acc.append(Draft(lane, MESSAGE, 1))
    assert acc.next_batch(lane, range(1)) is gone
    assert not acc.withdraw(gone)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_rise_within_each_queue_and_have_no_gaps_within_a_batch(seed: int) -> None:
    chance = random.Random(seed)
    acc = Accumulator(1 << 30, 1 << 20, seed=seed)
    keys = [
        LaneKey(topic, queue, level, delayed, is_half=half)
        for topic in ("a", "b")
        for queue in (-1, 0, 2)
        for level in (Durability.STORED, Durability.FLUSHED)
        for delayed, half in ((False, False), (True, False), (False, True))
    ]
    last: dict[tuple[int, str, int], int] = {}
    under_way: list[SendBatch] = []
    sent = 0
    for _ in range(400):
        key = chance.choice(keys)
        lane = acc.lane(key)
        if chance.random() < 0.6:
            fill(acc, key, chance.randrange(1, 400))
        elif under_way:
            acc.finished(under_way.pop(chance.randrange(len(under_way))))
        while (batch := acc.next_batch(lane, range(3))) is not None:
            place = (batch.producer_id, "" if key.is_aside else key.topic, batch.queue)
            assert batch.first_sequence > last.get(place, -1)
            assert all(
                (other.producer_id, "" if other.lane.key.is_aside else other.topic, other.queue) != place
                for other in under_way
            )
            last[place] = batch.first_sequence + batch.count - 1
            under_way.append(batch)
            sent += batch.count
    assert sent


class Woken:
    """One that counts how often it is woken."""

    def __init__(self) -> None:
        self.times = 0

    def wake(self) -> None:
        self.times += 1


def waiting(count: int) -> tuple[SendBatch, list[Woken]]:
    batch = SendBatch(accumulator().lane(ANY))
    line = [Woken() for _ in range(count)]
    for one in line:
        batch.queue_up(one)
    return batch, line


def woken(line: list[Woken]) -> list[Woken]:
    return [one for one in line if one.times]


def test_threads_in_line_wake_each_other_one_by_one() -> None:
    batch, line = waiting(4)
    at_once = Woken()
    batch.add_waiter(at_once)
    batch.end(None, None)
    assert at_once.times == 1
    for count in range(1, 5):
        assert len(woken(line)) == count
        batch.step_out(woken(line)[0])
    assert [one.times for one in line] == [1] * 4
    late = Woken()
    batch.queue_up(late)
    assert late.times == 1, "what is done is not waited for"
    batch.step_out(late)


def test_a_thread_that_goes_before_the_end_or_of_itself_breaks_no_line() -> None:
    batch, line = waiting(5)
    batch.step_out(line[4])  # its time is over: the last would have been the first
    assert not woken(line)
    batch.end(None, None)
    (first,) = woken(line)
    batch.step_out(line[0])  # it has seen the end by itself
    assert line[0].times == line[4].times == 0
    assert len(woken(line)) == 2
    batch.step_out(first)
    assert {*woken(line)} == {line[1], line[2], line[3]}


def test_what_follows_a_line_is_called_once_when_the_last_one_is_woken() -> None:
    batch, line = waiting(3)
    called: list[int] = []
    batch.end(None, None)
    assert batch.has_line
    assert batch.follow(lambda: called.append(len(woken(line))))
    (first,) = woken(line)
    batch.step_out(first)
    assert not called
    batch.step_out(next(one for one in woken(line) if one is not first))
    assert called == [3], "the last one need not have gone yet"
    for one in line:
        batch.step_out(one)
    assert called == [3]
    assert not batch.follow(lambda: called.append(0)), "nobody stands there"
    assert called == [3]


def test_what_follows_a_line_is_called_when_the_last_one_goes_by_itself() -> None:
    batch, line = waiting(2)
    called: list[str] = []
    batch.end(None, None)
    assert batch.follow(lambda: called.append("all have gone"))
    (left,) = [one for one in line if not one.times]
    batch.step_out(left)
    assert called == ["all have gone"]


def test_no_thread_is_left_in_line_however_they_come_and_go() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        batch = SendBatch(accumulator().lane(ANY))
        ends = [threading.Event() for _ in range(12)]

        def wait(end: threading.Event, batch: SendBatch, seconds: float) -> None:
            waiter = Waiter()
            batch.queue_up(waiter)
            try:
                if seconds:
                    waiter.wait(seconds)  # it may be over before
                while not batch.is_done and not seconds:
                    assert waiter.wait(60.0)
            finally:
                batch.step_out(waiter)
                end.set()

        threads = [
            threading.Thread(target=wait, args=(end, batch, chance.choice((0.0, 0.0, 0.0001, 0.001))), daemon=True)
            for end in ends
        ]
        for thread in threads:
            thread.start()
        batch.end(None, None)
        assert all(end.wait(60.0) for end in ends), seed


def test_a_batch_that_waits_for_a_leader_does_not_hold_up_its_lane() -> None:
    acc = accumulator()
    lane = acc.lane(ANY)
    fill(acc, ANY, 1)
    first = acc.next_batch(lane, range(2))
    assert first is not None
    fill(acc, ANY, 1)
    assert acc.next_batch(lane, range(2)) is None
    acc.stall(first)
    acc.stall(first)  # once counts
    second = acc.next_batch(lane, range(2))
    assert second is not None
    assert second.queue != first.queue
    fill(acc, ANY, 1)
    assert acc.next_batch(lane, range(2)) is None, "the second holds it up"
    acc.finished(first)
    assert acc.next_batch(lane, range(2)) is None
    acc.finished(second)
    assert acc.next_batch(lane, range(2)) is not None


def test_a_batch_of_a_fixed_queue_holds_up_its_lane_whatever_it_waits_for() -> None:
    acc = accumulator()
    key = ANY._replace(queue=3)
    lane = acc.lane(key)
    fill(acc, key, 1)
    first = acc.next_batch(lane, range(4))
    assert first is not None
    acc.stall(first)
    fill(acc, key, 1)
    assert acc.next_batch(lane, range(4)) is None
