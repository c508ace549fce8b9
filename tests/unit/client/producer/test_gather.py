"""A flood of `send_async`: messages take room that was reserved for their batch, and the window still adds up."""

from __future__ import annotations

import random
import threading

import pytest

from dmq.client.connection.threads import Waiter
from dmq.client.producer.accumulator import (
    BATCH_BYTES_MAX,
    CROWD_MIN,
    MESSAGE_BYTES,
    RESERVED_BYTES,
    SECOND_BYTES_MIN,
    SendBatch,
)
from dmq.client.producer.signal_mender import SignalMender
from dmq.errors import DMQError, NotConnected, TimedOut
from dmq.model import Message, Receipt
from dmq.protocol.batch import unpack_batch
from dmq.protocol.session import OVERLAP
from tests.interruption import Interruption, interrupted
from tests.unit.client.drafts import draft_of
from tests.unit.client.producer.test_sender import Rig


def flood(rig: Rig, count: int, body: bytes = b"x" * 72) -> int:
    """How many messages were taken; each counts as 200 bytes."""
    return sum(rig.core.gather("orders", "flushed", body, None) is not None for _ in range(count))


def make_rig(**options: int) -> Rig:
    """A producer that has sent to its topic, and has one message under way."""
    rig = Rig(**options)
    rig.link.features = frozenset({OVERLAP})
    rig.send()
    return rig


def settle(rig: Rig) -> None:
    """Store everything that is sent, and what that sends."""
    for request in rig.link.requests:
        request.store()
    accumulator = rig.core.accumulator
    assert (accumulator.bytes, accumulator.messages) == (0, 0)
    assert not [*accumulator.unsettled()]


def test_messages_gather_in_order_and_nothing_is_counted_twice() -> None:
    rig = make_rig()
    places = [rig.core.gather("orders", "flushed", b"%d" % number, f"k-{number}") for number in range(1000)]
    batch = rig.core.accumulator.lane(rig.core._plain["orders", "flushed"].key).gathering
    assert batch is not None
    assert places == [(batch, number) for number in range(1000)]
    assert len(rig.link.requests) == 1
    with rig.core.lock:
        rig.core.accumulator.seal(batch.lane)
    assert (batch.bodies, batch.keys) == ([b"%d" % n for n in range(1000)], [f"k-{n}" for n in range(1000)])
    settle(rig)
    assert [request.header.count for request in rig.link.requests] == [1, 1000]
    assert batch.bytes == sum(len(b"%d" % number) + MESSAGE_BYTES for number in range(1000))


def test_a_batch_leaves_beside_another_as_soon_as_it_is_worth_it() -> None:
    rig = make_rig()
    flood(rig, SECOND_BYTES_MIN // 200 + RESERVED_BYTES // 200 + 2)
    assert len(rig.link.requests) == 2
    settle(rig)


def make_crowd(count: int = CROWD_MIN) -> Rig:
    """A producer with one batch of many under way."""
    rig = make_rig()
    flood(rig, count)
    rig.link.requests[0].store()
    assert [request.header.count for request in rig.link.requests] == [1, count]
    return rig


def test_a_plain_send_joins_others_only_where_many_are_under_way() -> None:
    rig = make_rig()
    join = rig.core.join
    flood(rig, CROWD_MIN - 1)
    assert join("orders", Message(b"x"), "flushed", 9.0) is None, "nothing shows yet that they are many"
    rig.link.requests[0].store()
    flood(rig, CROWD_MIN)
    assert join("orders", Message(b"x"), "flushed", 9.0) is None, "those that left last were few"
    rig.link.requests[1].store()
    assert [request.header.count for request in rig.link.requests] == [1, CROWD_MIN - 1, CROWD_MIN]
    joined = join("orders", Message(b"x", "k"), "flushed", 9.0)
    assert joined is not None
    assert joined[0].is_attended
    for special in (
        Message(b"x", tag="t"),
        Message(b"x", business_id="b"),
        Message(b"x", priority=9),
        Message(b"x", properties={"a": "b"}),
        Message("text"),
    ):
        assert join("orders", special, "flushed", 9.0) is None
    assert join("orders", Message(b"x"), "stored", 9.0) is None, "of another durability"
    assert joined[0].count == 1
    rig.link.is_usable = False
    assert join("orders", Message(b"x"), "flushed", 9.0) is None, "it may have to be taken back"
    rig.link.is_usable = True
    settle(rig)
    assert join("orders", Message(b"x"), "flushed", 9.0) is None, "nothing is under way"


def test_a_batch_of_many_senders_has_the_latest_of_their_deadlines() -> None:
    rig = make_crowd()
    joined = [rig.core.join("orders", Message(b"x"), "flushed", deadline) for deadline in (7.0, 9.0, 8.0)]
    (batch,) = {place[0] for place in joined if place is not None}
    assert (batch.count, batch.deadline) == (3, 9.0)
    flood(rig, 1)
    assert batch.deadline is None, "an asynchronous message has none"
    assert rig.core.join("orders", Message(b"x"), "flushed", 9.0) == (batch, 4)
    assert batch.deadline is None
    settle(rig)


def test_what_is_held_is_sent_by_who_holds_it() -> None:
    rig = make_crowd()
    rig.link.requests[1].store()
    place = rig.core.join("orders", Message(b"x"), "flushed", 9.0, is_held=True)
    assert place is not None
    assert len(rig.link.requests) == 2, "nothing is under way, and yet it waits"
    rig.core.sender.pump(place[0].lane)
    assert len(rig.link.requests) == 3
    settle(rig)


def wait_in_line(batch: SendBatch, count: int) -> list[Waiter]:
    line = [Waiter() for _ in range(count)]
    for waiter in line:
        batch.queue_up(waiter)
    return line


def test_what_gathers_behind_a_batch_of_many_threads_waits_until_the_last_of_them_is_woken() -> None:
    rig = make_crowd(8)
    (batch,) = rig.core.accumulator.unsettled()
    line = wait_in_line(batch, 8)
    rig.link.requests[1].store()
    assert batch.lane.is_held
    counts: list[int] = []
    for waiter in reversed(line):  # each wakes the next, and sends again
        batch.step_out(waiter)
        assert rig.core.join("orders", Message(b"x"), "flushed", 9.0) is not None
        counts.append(len(rig.link.requests))
    assert [lane.is_held for lane in (batch.lane,)] == [False]
    assert counts == [2] * 6 + [3, 3], "the last two come too late"
    settle(rig)
    assert [request.header.count for request in rig.link.requests] == [1, 8, 6, 2]


def test_nothing_is_held_for_few_threads_nor_for_long_nor_if_it_is_large() -> None:
    rig = make_crowd()
    (batch,) = rig.core.accumulator.unsettled()
    (_, *line) = wait_in_line(batch, 2)
    rig.link.requests[1].store()
    assert rig.core.join("orders", Message(b"x"), "flushed", 9.0) is not None
    assert len(rig.link.requests) == 2
    batch.lane.let_go(rig.core.sender.pump)  # as a thread does whose time to look has come
    assert len(rig.link.requests) == 3
    batch.step_out(line[0])
    batch.lane.is_held = True
    flood(rig, CROWD_MIN)
    rig.link.requests[2].store()
    assert len(rig.link.requests) == 3
    flood(rig, SECOND_BYTES_MIN // 200 + RESERVED_BYTES // 200 + 2)
    assert len(rig.link.requests) == 4, "a large batch waits for nobody"
    batch.lane.let_go(rig.core.sender.pump)
    settle(rig)
    few = make_rig()
    flood(few, CROWD_MIN - 1)
    few.link.requests[0].store()
    (batch,) = few.core.accumulator.unsettled()
    wait_in_line(batch, CROWD_MIN - 1)
    few.link.requests[1].store()
    assert not batch.lane.is_held


def test_a_send_that_finds_the_window_full_or_the_producer_closed_does_not_join() -> None:
    rig = make_crowd()
    rig.core.accumulator.window_bytes = rig.core.accumulator.bytes
    assert rig.core.join("orders", Message(b"x"), "flushed", 9.0) is None
    rig.core.accumulator.window_bytes = 1 << 20
    rig.core.sender.closed_by = NotConnected("closed")
    assert rig.core.join("orders", Message(b"x"), "flushed", 9.0) is None


def test_the_window_is_kept_to_the_message() -> None:
    rig = make_rig(window_messages=1000)
    assert flood(rig, 5000) == 999
    settle(rig)
    rig = make_rig(window_bytes=100_000)
    assert flood(rig, 5000) == (100_000 - 1 - MESSAGE_BYTES) // 200
    settle(rig)


def test_other_messages_join_a_batch_with_reserved_room() -> None:
    rig = make_rig()
    flood(rig, 3)
    assert rig.core.put(draft_of(rig.core, rig.route, "orders", b"tagged", tag="t"), attended=True, deadline=None)
    assert flood(rig, 3) == 3
    batch = rig.core._plain["orders", "flushed"].gathering
    assert batch is not None
    assert [message.tag for message in batch.messages] == [None, None, None, "t", None, None, None]
    settle(rig)


def test_a_full_batch_is_no_larger_for_its_reserved_room() -> None:
    rig = make_rig()
    flood(rig, 60_000)
    settle(rig)
    assert all(len(request.body) <= 2 * BATCH_BYTES_MAX for request in rig.link.requests)
    assert sum(request.header.count for request in rig.link.requests) == 60_001


def test_what_is_not_plain_is_left_to_others() -> None:
    rig = make_rig()
    refused: list[tuple[object, object]] = [
        ("text", None),
        (b"x", 7),
        (b"x", "k" * 2000),
        (b"x", "ä"),
        (Message(b"x"), None),
    ]
    for body, key in refused:
        assert rig.core.gather("orders", "flushed", body, key) is None  # type: ignore[arg-type]
    assert rig.core.gather("elsewhere", "flushed", b"x", None) is None
    settle(rig)


def test_a_producer_that_is_closed_gathers_nothing() -> None:
    rig = make_rig()
    flood(rig, 10)
    rig.core.sender.close(TimedOut("closed"))
    assert flood(rig, 1) == 0
    assert (rig.core.accumulator.bytes, rig.core.accumulator.messages) == (0, 0)


def test_each_is_told_what_became_of_it() -> None:
    rig = make_rig()
    told: list[tuple[Receipt | None, DMQError | None]] = []
    for _ in range(3):
        rig.core.gather("orders", "flushed", b"x", None, on_delivery=lambda *outcome: told.append(outcome))
    rig.link.requests[0].store()
    assert not told
    rig.link.requests[1].store(7)
    assert [receipt.offset for receipt, error in told if receipt is not None] == [7, 8, 9]
    rig.core.gather("orders", "flushed", b"x", None, on_delivery=lambda *outcome: told.append(outcome))
    rig.core.sender.close(NotConnected("closed"))
    assert isinstance(told[3][1], NotConnected)


def test_an_exception_while_a_batch_with_reserved_room_leaves_loses_nothing() -> None:
    where: str | None = ""
    number = 0
    while where is not None:
        rig = make_rig()
        assert flood(rig, 3) == 3
        where = interrupted(number, rig.link.requests[0].store)
        check_mended(rig, where)
        number += 1
    assert number > 10


def test_an_exception_before_reserved_room_is_returned_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:  # a signal's handler may run where a function begins
        raise Interruption

    rig = make_rig()
    assert flood(rig, 3) == 3
    with monkeypatch.context() as patched:
        patched.setattr(rig.core.accumulator, "_return_room", stop)
        with pytest.raises(Interruption):
            rig.link.requests[0].store()
    check_mended(rig, "_return_room")


def check_mended(rig: Rig, where: str | None) -> None:
    """After an exception, all four messages go out."""
    SignalMender(rig.core.sender).mend()
    settle(rig)
    sent = {request.numbers: request.body for request in rig.link.requests}
    records = [unpack_batch(body, count).lengths for (_, _, count, _), body in sent.items()]
    assert sum(map(len, records)) == 4, where


def test_threads_that_send_at_once_get_places_of_their_own() -> None:
    rig = make_rig()
    rng = random.Random(7)
    bodies = [rng.randbytes(rng.randrange(300)) for _ in range(3000)]
    got: list[list[tuple[object, int, bytes]]] = [[], [], []]

    def send(at: int) -> None:
        for body in bodies[at * 1000 : at * 1000 + 1000]:
            put = rig.core.gather("orders", "flushed", body, None)
            assert put is not None
            got[at].append((*put, body))

    threads = [threading.Thread(target=send, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = [(id(batch), index) for part in got for batch, index, _ in part]
    assert len({*places}) == 3000
    settle(rig)
    assert sum(request.header.count for request in rig.link.requests) == 3001
