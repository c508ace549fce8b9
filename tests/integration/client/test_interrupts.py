"""A program that survives an exception out of a signal's handler goes on as if its call had never been made."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from threading import Thread
from typing import Any

import pytest

import dmq
from dmq.testing import TestBroker
from tests.interruption import Interruption, interrupted
from tests.sampling import SEED

STRIDE = 7  # of all points, beginning at one by the seed
TIMEOUT = 20.0
INTERRUPTS = 60


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


class Shop:
    """A client with a producer and a consumer, and what was sent and got."""

    def __init__(self, broker: TestBroker, topic: str) -> None:
        self.topic = topic
        self.client = broker.connect()
        self.producer = self.client.producer(timeout=TIMEOUT)
        self.consumer = self.client.consumer(topic, group="shop", start_from="earliest")
        self.sent: set[bytes] = set()
        self.got: set[bytes] = set()
        self._number = 0
        self.be_well()

    def body(self) -> bytes:
        self._number += 1
        return b"%d" % self._number

    def options(self) -> dict[str, Any]:
        return {"key": "k", "durability": "stored"}

    def send(self) -> None:
        self.producer.send(self.topic, self.body(), **self.options())

    def send_tagged(self) -> None:
        self.producer.send(self.topic, self.body(), tag="t", **self.options())

    def send_ordered(self) -> None:
        self.producer.send(self.topic, self.body(), business_id="b", ordered=True, **self.options())

    def send_delayed(self) -> None:
        self.producer.send(self.topic, self.body(), delay=3600.0, **self.options())

    def send_many(self) -> None:
        self.producer.send_many(self.topic, [dmq.Message(self.body(), "k") for _ in range(3)], durability="stored")

    def send_async(self) -> None:
        futures = [self.producer.send_async(self.topic, self.body(), **self.options()) for _ in range(4)]
        for future in futures:
            future.result(TIMEOUT)

    def pull(self) -> None:
        batch = self.consumer.pull(100, wait=0.0)
        self.got.update(message.body for message in batch)
        self.consumer.ack(batch)

    def administer(self) -> None:
        list(self.client.admin.topics())

    def be_well(self) -> None:
        """Everything works, and nothing is left of what was interrupted."""
        bodies = [self.body() for _ in range(5)]
        for body in bodies[:2]:
            self.producer.send(self.topic, body, **self.options())
        self.producer.send_async(self.topic, bodies[2], **self.options()).result(TIMEOUT)
        self.producer.send_many(self.topic, [dmq.Message(bodies[3])], durability="stored")
        self.producer.send(self.topic, bodies[4], business_id="b", ordered=True, **self.options())
        self.producer.flush(TIMEOUT)
        accumulator = self.producer._core.accumulator
        deadline = time.monotonic() + TIMEOUT
        while accumulator.messages and time.monotonic() < deadline:
            time.sleep(0.001)
        assert (accumulator.messages, accumulator.bytes) == (0, 0)
        self.sent.update(bodies)
        batch = self.consumer.pull(100, wait=TIMEOUT)
        assert batch
        self.got.update(message.body for message in batch)
        self.consumer.ack(batch)


@pytest.mark.uncounted
@pytest.mark.parametrize(
    "name",
    ["send", "send_tagged", "send_ordered", "send_delayed", "send_many", "send_async", "pull", "administer"],
)
def test_all_goes_on_wherever_a_call_was_interrupted(broker: TestBroker, name: str) -> None:
    shop = Shop(broker, f"orders-{name}")
    call: Callable[[], None] = getattr(shop, name)
    number, where = SEED % STRIDE, ""
    while True:
        try:
            found = interrupted(number, call)
            if found is None:
                break
            where = found
            shop.be_well()
        except Exception as error:
            error.add_note(f"DMQ_SEED={SEED}, after an interruption at {where}")
            raise
        number += STRIDE
    assert where
    broker.clock.advance(120)  # what was taken when an interruption came is handed out again
    deadline = time.monotonic() + TIMEOUT
    while not shop.sent <= shop.got and time.monotonic() < deadline:
        shop.pull()
    assert shop.sent <= shop.got
    shop.client.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interruption_while_the_workers_of_a_run_start_ends_it_and_the_next_one_goes_on(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    shop = Shop(broker, f"orders-run-{when}")
    consumer = shop.client.consumer(shop.topic, group="runners")
    start, started = Thread.start, count(1)

    def interrupted_start(thread: Thread) -> None:
        is_hit = thread.name.startswith("dmq-worker-") and next(started) == 2
        if is_hit and when == "before":
            raise Interruption
        start(thread)
        if is_hit:
            raise Interruption

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", interrupted_start)
        with pytest.raises(Interruption):
            consumer.run(lambda _: None, workers=3)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    handled: list[bytes] = []

    def handle(message: dmq.ReceivedMessage) -> None:
        handled.append(message.body)
        consumer.close()

    shop.be_well()
    consumer.run(handle, workers=1)
    assert handled
    shop.client.close()


# The interpreter tells of an exception that hits a callback of the garbage collector, and goes on by itself.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.uncounted
def test_all_goes_on_after_signals_at_any_moment(broker: TestBroker) -> None:
    def stop(*_: object) -> None:
        raise Interruption

    shop, chance = Shop(broker, "orders-signals"), random.Random(SEED)
    calls = (shop.send, shop.send_ordered, shop.send_many, shop.send_async, shop.pull)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(INTERRUPTS):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 5e-3))
                for _ in range(100):
                    chance.choice(calls)()
            except Interruption:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            shop.be_well()
    finally:
        signal.signal(signal.SIGALRM, before)
    shop.client.close()
