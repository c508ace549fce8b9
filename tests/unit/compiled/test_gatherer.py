"""What the compiled way of `send_async` takes, it takes as the plain one does; the rest goes on as it was given."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.client.producer.accumulator import MESSAGE_BYTES, RESERVED_BYTES, SendBatch
from dmq.client.producer.future import SendFuture
from dmq.client.producer.message import TEXT_MAX, SendOptions
from dmq.client.producer.outcome import Outcome
from dmq.client.producer.producer import Producer
from dmq.errors import NotConnected
from dmq.model import DEFAULT_PRIORITY, Durability, Message, MessageId, Receipt
from dmq.protocol.produce import ProduceReply
from dmq.protocol.session import OVERLAP
from tests.sampling import sample_size
from tests.unit.client.drafts import draft_of
from tests.unit.client.producer.test_sender import Rig
from tests.unit.compiled.extension import grown_kb, speed

general: Any = inspect.unwrap(Producer.send_async)


def make_rig(*, is_compiled: bool, **options: Any) -> Rig:
    """A producer that has sent to its topics, and has one message under way."""
    rig = Rig(**options)
    rig.link.features = frozenset({OVERLAP})
    accumulator = rig.core.accumulator
    accumulator._random, accumulator._producer_id = random.Random(1), 7
    rig.routes.put("bills", rig.route)
    gatherer = speed.Gatherer(rig.core.lock.locked, TEXT_MAX, MESSAGE_BYTES) if is_compiled else None
    rig.core._gatherer = accumulator.gatherer = gatherer
    rig.send()
    rig.core.sender.pump(rig.core.draft(rig.route, Message(b""), SendOptions("bills")).lane)
    return rig


bodies = (
    st.binary(max_size=40)
    | st.just(b"x" * 9000)
    | st.just(b"y" * RESERVED_BYTES)
    | st.just("text")
    | st.just(bytearray(b"z"))
    | st.just(Message(b"m"))
)
keys = st.none() | st.just("k") | st.text(max_size=3) | st.just("k" * (TEXT_MAX + 1)) | st.just(7)
steps = st.one_of(
    st.tuples(st.just("flood"), st.sampled_from(("orders", "bills", "nobody's")), bodies, keys, st.integers(1, 200)),
    st.tuples(st.just("put")),
    st.tuples(st.just("seal")),
    st.tuples(st.just("pump")),
    st.tuples(st.just("store")),
    st.tuples(st.just("resize"), st.integers(2, 50)),
    st.tuples(st.just("close")),
)


def run(rig: Rig, given_steps: list[Any]) -> list[Any]:
    """What comes of each step, and what the producer counts then."""
    core, accumulator, stored = rig.core, rig.core.accumulator, 0
    seen: list[Any] = []
    told: list[str] = []
    numbers: dict[int, tuple[int, object]] = {}
    for name, *what in given_steps:
        got: Any = None
        if name == "flood":
            topic, body, key, times = what
            got = [core.gather(topic, "flushed", body, key) for _ in range(times)]
            core.gather(topic, "flushed", body, key, on_delivery=lambda *outcome: told.append(str(outcome)))
            got = [put and (numbers.setdefault(id(put[0]), (len(numbers), put[0]))[0], put[1]) for put in got]
        elif name == "put" and core.sender.closed_by is None:
            got = core.put(draft_of(core, rig.route, "orders", b"x", tag="t"), attended=True, deadline=None) is None
        elif name == "seal":
            with core.lock:
                accumulator.seal(core._plain["orders", "flushed"])
        elif name == "pump":
            core.sender.pump(core._plain["orders", "flushed"])
        elif name == "store":
            for request in rig.link.requests[stored : stored + 1]:
                stored += 1
                request.store(stored)
        elif name == "resize":
            rig.link.limits = msgspec.structs.replace(rig.link.limits, body_bytes_max=what[0])
            rig.reconnect(rig.link)
        elif name == "close":
            core.sender.close(NotConnected("closed"))
        seen.append((name, got, accumulator.bytes, accumulator.messages, len(rig.link.requests)))
    return [seen, told, [(r.numbers, r.body) for r in rig.link.requests]]


@pytest.mark.sampled
@settings(max_examples=sample_size(share=60, whole=2000), deadline=None)
@given(st.lists(steps, max_size=25), st.sampled_from((1 << 25, 100_000, 20_000)))
def test_a_producer_with_it_does_what_one_without_it_does(given_steps: list[Any], window: int) -> None:
    one, other = (make_rig(is_compiled=way, window_bytes=window) for way in (True, False))
    assert run(one, given_steps) == run(other, given_steps)


def make_gatherer(is_locked: Callable[[], bool] = lambda: False) -> tuple[Any, Any]:
    """One with room for ten bodies of ten bytes, and its batch."""
    rig = make_rig(is_compiled=True)
    batch = SendBatch(rig.core.draft(rig.route, Message(b""), SendOptions("orders")).lane)
    batch.room = 10 * (10 + MESSAGE_BYTES)
    gatherer = speed.Gatherer(is_locked, TEXT_MAX, MESSAGE_BYTES)
    gatherer.open("orders", "flushed", batch, 1000)
    return gatherer, batch


def test_it_takes_as_much_as_there_is_room_for_and_gives_back_the_rest() -> None:
    gatherer, batch = make_gatherer()
    assert batch.room == 0
    puts = [gatherer.take("orders", "flushed", b"x" * 10, f"k-{number}") for number in range(9)]
    assert puts == [(batch, number) for number in range(9)]
    assert gatherer.take("orders", "flushed", b"x" * 11, None) is None
    gatherer.close()
    assert (batch.count, batch.room, gatherer.batch) == (9, 10 + MESSAGE_BYTES, None)
    assert (batch.bodies, batch.keys) == ([b"x" * 10] * 9, [f"k-{number}" for number in range(9)])
    assert gatherer.take("orders", "flushed", b"x", None) is None
    gatherer.close()
    assert (batch.count, batch.room) == (9, 10 + MESSAGE_BYTES)


def test_equal_names_need_not_be_the_same_object() -> None:
    gatherer, batch = make_gatherer()
    assert gatherer.take("".join(("ord", "ers")), "".join(("flu", "shed")), b"x", None) == (batch, 0)
    for topic, durability in (("order", "flushed"), ("orders", "stored"), (7, "flushed"), ("orders", None)):
        assert gatherer.take(topic, durability, b"x", None) is None


def test_it_keeps_out_while_somebody_has_the_producers_lock() -> None:
    lock = threading.Lock()
    gatherer, batch = make_gatherer(lock.locked)
    with lock:
        assert gatherer.take("orders", "flushed", b"x", None) is None
    assert gatherer.take("orders", "flushed", b"x", None) == (batch, 0)


def test_the_compiled_send_async_has_the_signature_of_the_general_one() -> None:
    made = speed.quick_send_async(general, SendFuture, DEFAULT_PRIORITY)
    assert made.__kwdefaults__ == general.__kwdefaults__
    assert made.__defaults__ == general.__defaults__
    assert inspect.signature(Producer.send_async) == inspect.signature(general)
    assert Producer.send_async.__doc__ == general.__doc__


odd = {
    "tag": st.just("t"),
    "business_id": st.just("b"),
    "ordered": st.just(True),
    "priority": st.sampled_from((0, 9, DEFAULT_PRIORITY, True)),
    "delay": st.sampled_from((0, 0.0, 1.5, "x")),
    "deliver_at": st.just(1.0),
    "ttl": st.just(1.0),
    "properties": st.just({}),
    "consumed_by": st.sampled_from(("", "g")),
    "id": st.just("i"),
    "on_delivery": st.just(print),
    "key": keys,
    "durability": st.sampled_from(("flushed", "stored")),
}


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(st.sampled_from(("orders", "bills")), bodies, st.fixed_dictionaries({}, optional=odd))
def test_what_it_does_not_take_is_handed_on_as_it_was_given(topic: str, body: Any, options: dict[str, Any]) -> None:
    class Sending:
        _gatherer, batch = make_gatherer()

    def note(*given: Any, **named: Any) -> Any:
        return given, named

    sending, made = Sending(), speed.quick_send_async(note, SendFuture, DEFAULT_PRIORITY)
    got = made(sending, topic, body, **options)
    plain = general.__kwdefaults__ | options | {"key": None, "durability": "flushed"} == general.__kwdefaults__
    if isinstance(got, SendFuture):
        assert plain
        assert topic == "orders"
        assert options.get("durability", "flushed") == "flushed"
        assert (got._outcome, got._index) == (Sending.batch, 0)
        sending._gatherer.close()
        assert (Sending.batch.bodies, Sending.batch.keys) == ([body], [options.get("key")])
    else:
        assert got == ((sending, topic, body), general.__kwdefaults__ | options)


def test_wrong_arguments_are_refused_as_ever() -> None:
    made = speed.quick_send_async(general, SendFuture, DEFAULT_PRIORITY)
    for given_arguments, named in (((), {}), ((1, "t"), {}), ((1, "t", b"x", "k"), {}), ((1, "t", b"x"), {"kee": "k"})):
        with pytest.raises(TypeError):
            made(*given_arguments, **named)


@pytest.mark.sampled
@settings(max_examples=sample_size(share=100, whole=3000), deadline=None)
@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(-1, (1 << 64) - 1),
    st.integers(0, 254),
    st.integers(0, 4096),
)
def test_a_result_is_the_receipt_of_its_outcome(producer: int, first: int, offset: int, queue: int, index: int) -> None:
    outcome = Outcome("orders")
    outcome.producer_id, outcome.first_sequence = producer, first
    future = SendFuture(outcome, index)
    result = speed.quick_result(inspect.unwrap(SendFuture.result), Receipt, MessageId)
    outcome.end(ProduceReply(queue, offset, 0, Durability.STORED), None)
    expected = outcome.receipt(index)
    got = result(future)
    assert got == expected
    assert [type(part) for part in (got, got.id, *got.id)] == [
        type(part) for part in (expected, expected.id, *expected.id)
    ]
    assert result(SendFuture(outcome, index), timeout=0.0) == expected


def test_a_result_without_an_outcome_or_with_an_error_goes_the_general_way() -> None:
    outcome = Outcome("orders")
    result = speed.quick_result(lambda *given_arguments: given_arguments, Receipt, MessageId)
    future = SendFuture(outcome, 3)
    assert result(future) == (future, None)
    assert result(future, timeout=1.5) == (future, 1.5)
    outcome.end(None, NotConnected("gone"))
    assert result(future, 2) == (future, 2)


def test_nothing_is_kept_of_messages_and_receipts() -> None:
    result = speed.quick_result(None, Receipt, MessageId)
    outcome = Outcome("orders")
    outcome.producer_id, outcome.first_sequence = 1 << 63, 1 << 40
    outcome.end(ProduceReply(1, 1 << 40, 0, Durability.STORED), None)
    outcome.receipt(0)

    def work() -> None:
        gatherer, batch = make_gatherer()
        for number in range(9):
            assert gatherer.take("orders", "flushed", b"%d" % number, f"key-{number}") == (batch, number)
            assert result(SendFuture(outcome, number)).offset == (1 << 40) + number
        gatherer.close()

    assert grown_kb(work, 2000) < 500
