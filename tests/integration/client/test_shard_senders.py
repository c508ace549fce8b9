"""Every way to send, while the leader of a shard of real processes is killed or stopped again and again.

What was acknowledged is there once, and in order where that was asked for; what a group was to get, it got.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
import dmq.aio
from dmq.testing.processes import DevClusterProcess
from tests.integration.cli.test_commands import children_of
from tests.patience import eventually
from tests.sampling import SEED

KILLS = 10
SECONDS = 120.0
GROUP = "readers"


class Senders:
    """Threads that send numbers, each in another way to a topic of its name."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self.stop = threading.Event()
        self.acked: dict[str, list[int]] = defaultdict(list)
        self.problems: list[str] = []
        self.ways: list[Callable[[], None]] = [
            self.lone, self.ordered, self.many, self.large, self.spooled, self.transaction, self.consumed, self.awaited,
        ]  # fmt: skip
        self._threads = [threading.Thread(target=self._guarded, args=(way,)) for way in self.ways]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
            assert not thread.is_alive()

    def _guarded(self, way: Callable[[], None]) -> None:
        try:
            way()
        except Exception as error:
            self.problems.append(f"{way.__name__}: {error!r}")

    def _each(self, way: str, send: Callable[[dmq.Producer, int], object], **options: object) -> None:
        with (
            dmq.connect(self._url, timeout=SECONDS) as client,
            client.producer(timeout=SECONDS, **options) as producer,  # type: ignore[arg-type]
        ):
            number = 0
            while not self.stop.is_set():
                send(producer, number)
                self.acked[way].append(number)
                number += 1
            producer.flush(SECONDS)  # a spool may still have some

    def lone(self) -> None:
        self._each("lone", lambda producer, n: producer.send("lone", b"%d" % n, durability="replicated"))

    def large(self) -> None:
        def send(producer: dmq.Producer, n: int) -> None:
            body = b"%d" % n + b" " * ((4 << 20) - 100 if n % 4 == 0 else 0)
            producer.send("large", body, durability="replicated")
            time.sleep(0.2)

        self._each("large", send, compression="none")

    def spooled(self) -> None:
        def send(producer: dmq.Producer, n: int) -> None:
            producer.send("spooled", b"%d" % n, ordered=True, business_id="one")
            time.sleep(0.01)

        self._each("spooled", send, spool=self._folder / "spool")

    def transaction(self) -> None:
        def send(producer: dmq.Producer, n: int) -> None:
            with producer.transaction("transaction", b"%d" % n):
                pass

        self._each("transaction", send, group="shop", check=lambda message: "commit")

    def consumed(self) -> None:
        self._each(
            "consumed",
            lambda producer, n: producer.send("consumed", b"%d" % n, durability="consumed", consumed_by=GROUP),
        )

    def ordered(self) -> None:
        def send(producer: dmq.Producer, n: int) -> None:
            futures = [
                producer.send_async("ordered", b"%d" % (100 * n + at), ordered=True, business_id=f"b{at % 5}")
                for at in range(100)
            ]
            for future in futures:
                future.result(SECONDS)

        self._each("ordered", send)
        self.acked["ordered"] = [100 * n + at for n in self.acked["ordered"] for at in range(100)]

    def many(self) -> None:
        size = 5000

        def send(producer: dmq.Producer, n: int) -> None:
            numbers = range(size * n, size * (n + 1))
            producer.send_many("many", [dmq.Message(b"%d" % number) for number in numbers], durability="replicated")
            time.sleep(0.5)

        self._each("many", send)
        self.acked["many"] = [size * n + at for n in self.acked["many"] for at in range(size)]

    def awaited(self) -> None:
        async def run() -> None:
            async with dmq.aio.connect(self._url, timeout=SECONDS) as client:
                producer = client.producer(timeout=SECONDS)
                number = 0
                while not self.stop.is_set():
                    await producer.send("awaited", b"%d" % number, durability="replicated")
                    self.acked["awaited"].append(number)
                    number += 1

        asyncio.run(run())


class Readers:
    """A consumer for each topic, which handles until it is closed."""

    def __init__(self, client: dmq.Client, topics: list[str]) -> None:
        self.seen: dict[str, set[int]] = {topic: set() for topic in topics}
        self._consumers = {topic: client.consumer(topic, GROUP, ordered=topic == "ordered") for topic in topics}
        self._threads = [threading.Thread(target=self._run, args=(topic,)) for topic in topics]
        for thread in self._threads:
            thread.start()

    def _run(self, topic: str) -> None:
        self._consumers[topic].run(lambda message: self.seen[topic].add(int(message.body)), workers=2)

    def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()
        for thread in self._threads:
            thread.join(SECONDS)


def pid_of(shard: DevClusterProcess, member: str) -> int:
    """The process that is this member now."""
    for pid in children_of(shard.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--name" in words and words[words.index("--name") + 1] == member:
            return int(pid)
    raise AssertionError(f"{member} does not run")


def check_stored(client: dmq.Client, topic: str, acked: list[int]) -> None:
    """What was acknowledged is there; nothing is there twice; what one producer sent in order is so in its queue."""
    found: list[tuple[int, int, int]] = []
    with client.consumer(topic, "check") as consumer:
        while batch := consumer.pull(max_messages=1000, wait=5):
            found += [(message.queue, message.offset, int(message.body)) for message in batch]
            consumer.ack(batch)
    numbers = [number for _, _, number in found]
    assert len(numbers) == len({*numbers}), topic
    assert not {*acked} - {*numbers}, topic
    if topic in ("ordered", "spooled"):
        last: dict[int, int] = {}
        for _, _, number in sorted(found):
            stream = number % 5 if topic == "ordered" else 0
            assert last.get(stream, -1) < number, topic
            last[stream] = number


@pytest.mark.soak
@pytest.mark.uncounted
def test_every_way_to_send_survives_its_leaders(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    with DevClusterProcess(tmp_path / "shard") as shard, dmq.connect(shard.url, timeout=SECONDS) as client:
        senders = Senders(shard.url, tmp_path)
        topics = [way.__name__ for way in senders.ways]
        for topic in topics:
            client.admin.create_topic(topic, queues=3)
            client.admin.create_group(GROUP, topic)
        readers = Readers(client, topics)
        try:
            senders.start()
            for _ in range(KILLS):
                time.sleep(rng.uniform(1.0, 5.0))
                eventually(lambda: len(client.admin.shard().in_sync) == 3)
                leader = client.admin.shard().leader
                assert leader is not None
                os.kill(pid_of(shard, leader), rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            time.sleep(3.0)
            senders.join()
            assert not senders.problems, f"DMQ_SEED={SEED}: {senders.problems}"
            for topic in topics:
                acked = {*senders.acked[topic]}
                eventually(lambda topic=topic, acked=acked: acked <= readers.seen[topic], topic)  # type: ignore[misc]
        finally:
            senders.stop.set()
            readers.close()
        for topic in topics:
            check_stored(client, topic, senders.acked[topic])
