"""Transactions with a broker in a process of its own, and producers that are killed or come too late. (R-09)"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dmq
from dmq.client.admin.reports import StoredMessage
from dmq.client.client import Client
from dmq.testing.processes import BrokerProcess, free_port, read_line
from tests.integration.consumer.handler_thread import PATIENCE
from tests.patience import eventually

# Prepares three messages of one transaction, and waits for its end.
PREPARING = """
import sys, time, dmq
client = dmq.connect(sys.argv[1], app="shop")
producer = client.producer(group="shop", timeout=60.0)
tx = producer.transaction("orders", b"one", key="o-1")
tx.send("stock", b"two")
tx.send("orders", b"three")
print(tx.id, flush=True)
time.sleep(600)
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    checks = ["first_check_seconds=1.0", "check_seconds=0.2", "checks_max=3"]
    settings = [word for check in checks for word in ("--set", f"broker.transaction_{check}")]
    with BrokerProcess(tmp_path / "data", ["--port", str(free_port()), *settings]) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with dmq.connect(broker.url, app="test") as connected:
        connected.admin.create_topic("orders", queues=1)
        connected.admin.create_topic("stock", queues=1)
        yield connected


def bodies(client: Client, topic: str) -> list[bytes]:
    return [message.body for message in client.admin.peek(topic, limit=100)]


@contextmanager
def dying_producer(url: str) -> Iterator[str]:
    """A process that has prepared a transaction, whose id this is; it is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", PREPARING, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = read_line(process.stdout, time.monotonic() + PATIENCE)
        assert line, "the producer did not get so far"
        yield line.strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_of_a_killed_producer_another_of_its_group_decides_for_all_messages_at_once(
    broker: BrokerProcess, client: Client, decision: str
) -> None:
    asked: list[tuple[str, str | None]] = []

    def check(message: StoredMessage) -> str:
        asked.append((str(message.id), message.key))
        return decision

    with dying_producer(broker.url) as tx:
        pass
    assert bodies(client, "orders") == bodies(client, "stock") == []
    broker.kill()  # with all it had in memory
    broker.start()
    assert {str(report.id) for report in client.admin.transactions()} >= {tx}
    client.producer(group="shop", check=check)
    eventually(lambda: not client.admin.transactions())
    left = ([b"one", b"three"], [b"two"]) if decision == "commit" else ([], [])
    assert (bodies(client, "orders"), bodies(client, "stock")) == left
    assert asked == [(tx, "o-1")], "one answer is enough"


def test_what_nobody_answers_for_is_rolled_back_and_kept_as_dead_letters(broker: BrokerProcess, client: Client) -> None:
    with dying_producer(broker.url) as tx:
        pass
    eventually(lambda: len(client.admin.dead_letters(group="shop")) == 3)
    letters = client.admin.dead_letters(group="shop")
    assert {letter.body for letter in letters} == {b"one", b"two", b"three"}
    assert {letter.topic for letter in letters} == {"orders", "stock"}
    assert client.admin.transactions() == []
    assert bodies(client, "orders") == bodies(client, "stock") == []
    assert client.admin.why(tx).state == "given up"


def test_a_producer_whose_transaction_was_rolled_back_meanwhile_is_told_and_nothing_of_it_is_seen(
    client: Client,
) -> None:
    producer = client.producer(group="shop", check=lambda message: "rollback")
    tx = producer.transaction("orders", b"one")
    tx.send("stock", b"two")
    eventually(lambda: not client.admin.transactions())
    tx.send("stock", b"too late")
    with pytest.raises(dmq.TransactionOver, match="rolled back"):
        tx.commit()
    eventually(lambda: not client.admin.transactions())
    assert bodies(client, "orders") == bodies(client, "stock") == []


def test_leaving_the_block_commits_and_an_error_rolls_back(client: Client) -> None:
    producer = client.producer(group="shop", check=lambda message: None)
    with producer.transaction("orders", b"paid", key="o-1") as tx:
        assert bodies(client, "orders") == []
        assert client.admin.why(str(tx.id)).state == "prepared"
    with pytest.raises(ZeroDivisionError), producer.transaction("orders", b"never"):
        raise ZeroDivisionError
    (message,) = client.consumer("orders", group="shipping").pull(10, wait=PATIENCE)
    assert (message.id, message.body, message.key) == (tx.id, b"paid", "o-1")
