"""Batches overlap on their way to one queue while the broker is killed, cut off, and has no room for more.

Each message must be stored once, and in the order in which it was sent.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
import dmq.aio
from dmq.testing.proxy import ChaosProxy
from tests.fault.broker.nursery import ForkedBroker
from tests.sampling import SEED, sample_size

pytestmark = pytest.mark.uncounted  # so many samples of what other tests cover too

KILLS = sample_size(share=4, whole=60)
TOPIC = "narrow"
PATIENCE = 120.0
# Little may wait to be written: of four batches behind each other, some are told BUSY.
SETTINGS = ("broker.waiting_bytes_max=1MiB",)


def body(stream: str, number: int) -> bytes:
    return f"{stream} {number} ".encode().ljust(300, b"x")


class Streams:
    """Producers that each send numbered messages until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._connected = threading.Semaphore(0)
        self.sent: dict[str, int] = {}
        self.problems: list[BaseException] = []
        ways: list[Callable[[str], None]] = [self._many, self._async, self._tasks]
        self._threads = [threading.Thread(target=self._guard, args=(way, way.__name__)) for way in ways]

    def start(self) -> None:
        """Begin; all are connected when this returns: a client that never was does not try again."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._connected.acquire(timeout=PATIENCE), self.problems

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a producer does not come to an end"
        assert not self.problems, self.problems

    def _guard(self, way: Callable[[str], None], stream: str) -> None:
        try:
            way(stream)
        except BaseException as error:
            self.problems.append(error)

    def _many(self, stream: str) -> None:
        number = 0
        with dmq.connect(self._url, app="shop") as client, client.producer(timeout=PATIENCE) as producer:
            self._connected.release()
            while not self._stop.is_set():
                messages = [dmq.Message(body(stream, number + at)) for at in range(9000)]
                assert len(producer.send_many(TOPIC, messages, durability="stored")) == len(messages)
                number += len(messages)
        self.sent[stream] = number

    def _async(self, stream: str) -> None:
        number = 0
        with dmq.connect(self._url, app="shop") as client, client.producer(timeout=PATIENCE) as producer:
            self._connected.release()
            future = None
            while not self._stop.is_set():
                future = producer.send_async(TOPIC, body(stream, number), business_id="b-1", ordered=True)
                number += 1
                if number % 3000 == 0:
                    future.result(PATIENCE)
            assert future is not None
            future.result(PATIENCE)
            producer.flush(PATIENCE)
        self.sent[stream] = number

    def _tasks(self, stream: str) -> None:
        async def send() -> int:
            number = 0
            async with (
                await dmq.aio.connect(self._url, app="shop") as client,
                client.producer(timeout=PATIENCE) as producer,
            ):
                self._connected.release()
                while not self._stop.is_set():
                    messages = [dmq.Message(body(stream, number + at)) for at in range(9000)]
                    await producer.send_many(TOPIC, messages)
                    number += len(messages)
            return number

        self.sent[stream] = asyncio.run(send())


def stored(url: str) -> dict[str, list[int]]:
    """The numbers of each stream, in the order of the queue."""
    found = defaultdict(list)
    with dmq.connect(url, app="checker") as client, client.consumer(TOPIC, "checker") as consumer:
        while batch := consumer.pull(2000, wait=0.2):
            for message in batch:
                stream, number, _ = message.body.split(b" ", 2)
                found[stream.decode()].append(int(number))
            batch.ack()
    return found


@pytest.mark.sampled
def test_overlapping_batches_are_stored_once_and_in_order_whatever_breaks(tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} overlap")
    broker = ForkedBroker(tmp_path / "data", SETTINGS)
    with broker, ChaosProxy(("127.0.0.1", broker.port)) as proxy:
        with dmq.connect(broker.url, app="checker") as checker:
            checker.admin.create_topic(TOPIC, queues=1)
            checker.admin.create_group("checker", TOPIC)
        streams = Streams(proxy.url)
        streams.start()
        try:
            for _ in range(KILLS):
                for _ in range(rng.randrange(1, 4)):
                    time.sleep(rng.uniform(0.02, 0.15))
                    proxy.cut()
                time.sleep(rng.uniform(0.05, 0.2))
                broker.kill()
                broker.start()
        finally:
            streams.stop()
        found = stored(broker.url)
    for stream, count in streams.sent.items():
        assert count > 0, f"{stream} sent nothing"
        assert found[stream] == [*range(count)], f"{stream}: lost, twice or out of order; DMQ_SEED={SEED}"
