"""A shard of real brokers whose registry is ZooKeeper: its leader is killed, and ZooKeeper is."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import dmq
from tests.integration.shard.processes import SESSION_SECONDS, ShardProcesses
from tests.sampling import IS_SOAK
from tests.zookeepers import ZooKeeperProcess

TOPIC = "orders"
PATIENCE = 60.0
# Past every session and every promise.
DOWN_SECONDS = 60.0 if IS_SOAK else 2.5 * SESSION_SECONDS


class Sender(threading.Thread):
    """Sends numbers one after the other until told to stop.

    Attributes:
        answered: those that were.
        errors: of sends, and when they began.
        slowest: the longest that a send took, in seconds.
    """

    def __init__(self, url: str) -> None:
        super().__init__(name="sender")
        self._url = url
        self._is_over = threading.Event()
        self.answered: list[int] = []
        self.errors: list[str] = []
        self.slowest = 0.0

    def run(self) -> None:
        with dmq.connect(self._url, app="sender", timeout=PATIENCE) as client, client.producer() as producer:
            number = 0
            while not self._is_over.is_set():
                began = time.monotonic()
                try:
                    producer.send(TOPIC, b"%d" % number, timeout=PATIENCE)
                    self.answered.append(number)
                except dmq.DMQError as error:
                    self.errors.append(f"{number}: {error!r}")
                self.slowest = max(self.slowest, time.monotonic() - began)
                number += 1
                time.sleep(0.01)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_nothing_is_lost_when_leaders_die_and_a_zookeeper_that_is_down_stops_nobody(tmp_path: Path) -> None:
    with (
        ZooKeeperProcess() as zookeeper,
        ShardProcesses(tmp_path, registry=f"zk://{zookeeper.address}/prod/dmq?session={SESSION_SECONDS:g}s") as shard,
    ):
        with dmq.connect(shard.url, app="test", timeout=PATIENCE) as client:
            client.admin.create_topic(TOPIC, queues=1)
            client.admin.create_group("all", TOPIC)
        sender = Sender(shard.url)
        sender.start()
        try:
            until(lambda: sender.answered, "nobody serves")
            # ZooKeeper is gone for several sessions: nobody notices.
            before = shard.until_whole()
            sender.slowest = 0.0
            zookeeper.kill()
            served = len(sender.answered)
            time.sleep(DOWN_SECONDS)
            assert len(sender.answered) > served + DOWN_SECONDS, "messages were taken all the while"
            assert sender.slowest < SESSION_SECONDS, "no send waited for a failover"
            zookeeper.start()
            # And stands still, which nobody is told.
            zookeeper.signal(signal.SIGSTOP)
            time.sleep(1.2 * SESSION_SECONDS)
            zookeeper.signal(signal.SIGCONT)
            after = shard.until_whole()
            assert (after.leader, after.epoch) == (before.leader, before.epoch), "no failover"

            kill_leader(shard, sender)
        finally:
            sender.stop()
        assert sender.errors == []
        found: list[int] = []
        with (
            dmq.connect(shard.url, app="reader", timeout=PATIENCE) as client,
            client.consumer(TOPIC, "all") as consumer,
        ):
            while len(found) < len(sender.answered):
                batch = consumer.pull(wait=PATIENCE)
                assert len(batch), "a message is lost"
                for message in batch:
                    found.append(int(message.body))
                    message.ack()
        assert found == sender.answered, "each once, in order"
        shard.check_equal()


def kill_leader(shard: ShardProcesses, sender: Sender) -> None:
    """And it comes back, once another one serves."""
    leader = shard.leader()
    shard.members[leader].kill()
    shard.until(lambda report: report.leader not in (None, f"b{leader}"), "nobody else leads")
    served = len(sender.answered)
    until(lambda: len(sender.answered) > served + 10, "nobody serves")
    shard.members[leader].start()
    shard.until_whole()
