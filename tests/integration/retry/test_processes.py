"""Retry with real processes: brokers and consumers that are killed while messages fail, and deployments that roll."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dmq
from dmq.client.client import Client, connect
from dmq.testing.processes import free_port
from tests.integration.retry import processes

PATIENCE = 60.0


def eventually(holds: Callable[[], object], what: str = "it never happened") -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if holds():
                return
        except dmq.DMQError:
            pass  # the broker is away
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Process:
    """A process of `tests.integration.retry.processes`, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, processes.__file__, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.said: list[list[str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # else it was killed in the middle of a word
                self.said.append(line.split())

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.wait(30)
        self._reader.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Broker:
    """A broker on a directory and a port that stay the same."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"dmq://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = Process("broker", str(self._directory), str(self.port))
        eventually(lambda: self._process.said, "the broker did not start")

    def end(self, number: int = signal.SIGKILL) -> None:
        self._process.end(number)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    running = Broker(tmp_path)
    yield running
    running.end(signal.SIGTERM)


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with connect(broker.url, app="test", timeout=PATIENCE) as connected:
        connected.admin.create_topic("orders", queues=2)
        yield connected


def counts(client: Client) -> tuple[int, int]:
    found = client.admin.lag("orders", "billing")
    return found.total, found.retrying


def retry_copies(client: Client) -> Counter[dmq.MessageId | None]:
    """How many copies of each message came into retry topics."""
    found: Counter[dmq.MessageId | None] = Counter()
    for topic in client.admin.topics("%RETRY%", system=True):
        for queue in range(topic.queues):
            at = 0
            while True:
                page, following = client.admin.read(topic.name, queue, at, limit=500)
                found.update(message.id for message in page)
                if following == at:
                    break
                at = following
    return found


def test_kills_of_broker_and_consumers_lose_no_retry_and_double_none(broker: Broker, client: Client) -> None:
    """J-05, R-13."""
    total = 300
    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(total)])
    said: list[list[str]] = []
    for round_ in range(3):
        consumers = [Process("fail", broker.url) for _ in range(2)]
        eventually(lambda consumers=consumers: sum(len(c.said) for c in consumers) > 20 or counts(client) == (0, 0))  # type: ignore[misc]
        if round_ % 2:
            consumers[0].end()
        else:
            broker.end()
            broker.start()
        for consumer in consumers:
            consumer.end()
            said += consumer.said
    last = Process("fail", broker.url)
    eventually(lambda: counts(client) == (0, 0), "something is left")
    eventually(lambda: client.admin.topics("%DLQ%billing", system=True)[0].messages >= total // 10)
    last.end(signal.SIGTERM)
    said += last.said
    done = {int(words[1]) for words in said if words[0] == "done"}
    rejected = {n for n in range(total) if n % 10 == 0}
    assert done == {*range(total)} - rejected
    letters = Counter(int(message.body) for message in client.admin.peek("%DLQ%billing", limit=1000))
    assert letters == Counter(rejected)
    # Each failed twice at most, less what a killed consumer had counted as tried, and went on once each time.
    assert max(retry_copies(client).values()) <= 2


def test_a_message_that_kills_every_consumer_becomes_a_dead_letter(broker: Broker, client: Client) -> None:
    client.producer().send("orders", b"poison")
    for attempt in ("1", "2", "3"):
        consumer = Process("poison", broker.url)
        eventually(lambda consumer=consumer: consumer.said)  # type: ignore[misc]
        assert consumer.said == [["got", "poison", attempt]]
        consumer.end()
        eventually(lambda: client.admin.lag("orders", "billing").queues and not leased(client))
    consumer = Process("poison", broker.url)
    eventually(lambda: counts(client) == (0, 0))
    eventually(lambda: [m.body for m in client.admin.peek("%DLQ%billing")] == [b"poison"])
    consumer.end()
    assert consumer.said == []


def leased(client: Client) -> int:
    return sum(row.leased for row in client.admin.lag("orders", "billing").queues)


def test_a_rolling_deploy_that_changes_the_tags_loses_nothing(broker: Broker, client: Client) -> None:
    """R-07: members of the old version are told, get nothing more, and what they had is not lost."""
    producer = client.producer()

    def send(first: int, count: int) -> None:
        for n in range(first, first + count):
            producer.send("orders", f"{n}", tag="created" if n % 2 else "paid")

    send(0, 40)
    old = [Process("version", broker.url, "created || paid", "0") for _ in range(2)]
    eventually(lambda: sum(len(process.said) for process in old) >= 40)
    conflicting = Process("version", broker.url, "paid || refunded", "0")
    eventually(lambda: conflicting.said)
    assert conflicting.said[0][:2] == ["ended", "SubscriptionConflict"]
    words = " ".join(conflicting.said[0])
    assert "paid || refunded" in words
    assert "created || paid" in words
    assert "version above 0" in words
    conflicting.end()
    new = [Process("version", broker.url, "created || paid || refunded", "1")]
    eventually(lambda: all(process.said and process.said[-1][0] == "ended" for process in old))
    assert {process.said[-1][1] for process in old} == {"SubscriptionSuperseded"}
    send(40, 40)
    producer.send("orders", "80", tag="refunded")
    eventually(lambda: counts(client) == (0, 0))
    new.append(Process("version", broker.url, "created || paid", "0"))
    eventually(lambda: new[1].said)
    assert new[1].said[0][:2] == ["ended", "SubscriptionSuperseded"]
    for process in (*old, *new):
        process.end(signal.SIGTERM)
    done = Counter(int(words[1]) for process in (*old, *new) for words in process.said if words[0] == "done")
    assert {*done} == {*range(81)}
    assert done[80] == 1
