"""The slots of a topic change under load: keys keep their order, nothing is lost, and a removed slot empties."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import dmq
from dmq.protocol.cluster.route import SlotRoute
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]

TOPIC = "moving"
KEYS = 24


class Walk:
    """Senders of ordered messages, each with a client and its own idea of the routes; one of messages in no order; and
    an ordered group that notes what it gets."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.sent = [0] * KEYS
        self.any_sent = 0
        self.errors: list[BaseException] = []
        self.seen: dict[str, list[int]] = {str(key): [] for key in range(KEYS)}
        self.any_seen: set[int] = set()
        self.shards: set[int] = set()
        kinds = [self._send_in_order] * 2 + [self._send_any]
        self._threads = [threading.Thread(target=self._run, args=(kind, at)) for at, kind in enumerate(kinds)]

    def _run(self, kind: object, at: int) -> None:
        try:
            with dmq.connect(self._url, timeout=PATIENCE_S) as client, client.producer(timeout=PATIENCE_S) as producer:
                assert callable(kind)
                while not self._is_over.is_set():
                    kind(producer, at)
        except BaseException as error:
            self.errors.append(error)

    def begin_anew(self) -> None:
        """Note the shards of what is sent from now on; some that was sent before is not answered yet."""
        self.shards = set()

    def _send_in_order(self, producer: dmq.Producer, at: int) -> None:
        shards, futures = self.shards, []
        for key in range(at, KEYS, 2):
            body = b"%d %d" % (key, self.sent[key])
            futures.append(producer.send_async(TOPIC, body, business_id=f"k-{key}", ordered=True))
            self.sent[key] += 1
        for future in futures:
            shards.add(future.result(PATIENCE_S).shard)

    def _send_any(self, producer: dmq.Producer, at: int) -> None:
        producer.send(TOPIC, b"any %d" % self.any_sent)
        self.any_sent += 1

    def handle(self, message: dmq.ReceivedMessage) -> None:
        key, number = message.body.decode().split()
        if key == "any":
            self.any_seen.add(int(number))
        else:
            self.seen[key].append(int(number))

    @contextmanager
    def walking(self, consumer: dmq.Consumer) -> Iterator[None]:
        running = threading.Thread(target=consumer.run, args=(self.handle, 3))
        for thread in (running, *self._threads):
            thread.start()
        try:
            yield
            self._is_over.set()
            for thread in self._threads:
                thread.join()
            eventually(self._is_all_seen, "not all that was sent was consumed")
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()
            consumer.close()
            running.join()

    def _is_all_seen(self) -> bool:
        return len(self.any_seen) == self.any_sent and all(
            len({*self.seen[str(key)]}) == count for key, count in enumerate(self.sent)
        )

    def check(self) -> None:
        assert self.errors == []
        for numbers in self.seen.values():
            firsts = [*dict.fromkeys(numbers)]
            assert firsts == [*range(len(firsts))]


def test_a_slot_goes_and_comes_under_load(cluster: ClusterProcesses) -> None:
    with dmq.connect(cluster.url, timeout=PATIENCE_S) as client:
        client.admin.create_topic(TOPIC, queues=2)
        walk = Walk(cluster.url)
        with walk.walking(client.consumer(TOPIC, "walkers", ordered=True)):
            eventually(lambda: len(walk.shards) == 3 or walk.errors)
            done = run("topic", "place", TOPIC, "--remove", "s3", "--drain", "--url", cluster.url)
            assert done.code == 0, done.err
            removed = cluster.numbers["s3"]
            eventually(lambda: removed not in {slot.shard for slot in slots(cluster)}, "the slot does not empty")
            walk.begin_anew()
            eventually(lambda: len(walk.shards) == 2 or walk.errors)
            assert removed not in walk.shards
            done = run("topic", "place", TOPIC, "--add", "s3", "--queues", "1", "--drain", "--url", cluster.url)
            assert done.code == 0, done.err
            eventually(lambda: removed in walk.shards or walk.errors, "no key goes to the new slot")
        walk.check()
        client.admin.delete_topic(TOPIC)


def slots(cluster: ClusterProcesses) -> list[SlotRoute]:
    route = cluster.topic(TOPIC)
    assert route is not None
    return [*route.slots]
