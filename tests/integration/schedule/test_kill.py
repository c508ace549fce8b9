"""Delays and transactions with a broker process that is killed again and again: none lost, none twice, none early."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import dmq
from dmq.client.admin.reports import StoredMessage
from dmq.client.client import Client
from dmq.testing.processes import BrokerProcess, free_port

PATIENCE = 60.0


def read_all(client: Client, topic: str = "orders") -> list[StoredMessage]:
    found: list[StoredMessage] = []
    for row in client.admin.offsets(topic):
        at = row.first_offset
        while at < row.next_offset:
            page, at = client.admin.read(topic, row.queue, at, limit=1000)
            found += page
    return found


def started(folder: Path) -> BrokerProcess:
    return BrokerProcess(folder, ["--port", str(free_port())])


@pytest.mark.parametrize("seed", [1, 2])
def test_delays_come_once_and_not_early_while_their_broker_is_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with started(tmp_path / "data") as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=3)
        producer = client.producer(timeout=PATIENCE)
        dues: dict[str, int] = {}
        begin = time.time()
        for _ in range(40):
            due = begin + rng.uniform(1.0, 6.0)
            messages = [dmq.Message(b"x", key=f"k-{n}") for n in range(rng.choice((1, 30, 100)))]
            for receipt in producer.send_many("orders", messages, deliver_at=due):
                dues[str(receipt.id)] = int(due * 1000)
        for _ in range(4):
            time.sleep(rng.uniform(0.2, 1.0))
            broker.kill()
            broker.start()
        deadline = time.monotonic() + PATIENCE
        while client.admin.stats("store_delays")["store_delays"]:
            assert time.monotonic() < deadline, "some never came"
            time.sleep(0.05)
        came = read_all(client)
    assert sorted(str(message.id) for message in came) == sorted(dues)
    early = [m for m in came if m.stored_at_ms < dues[str(m.id)]]
    assert not early


def test_transactions_end_once_while_their_broker_is_killed(tmp_path: Path) -> None:
    rng = random.Random(3)
    with started(tmp_path / "data") as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=3)
        producer = client.producer(group="shop", timeout=PATIENCE)
        committed: set[str] = set()
        for turn in range(5):
            ends = []
            for number in range(200):
                tx = producer.transaction_async("orders", b"%d-%d" % (turn, number))
                is_committed = rng.random() < 0.8
                ends.append((tx, is_committed, tx.commit_async() if is_committed else tx.rollback_async()))
                if number == 100:
                    broker.kill()
                    broker.start()
            for tx, is_committed, end in ends:
                end.result(PATIENCE)
                if is_committed:
                    committed.add(str(tx.id))
        assert client.admin.transactions() == []
        came = [str(message.id) for message in read_all(client)]
    assert sorted(came) == sorted(committed)
