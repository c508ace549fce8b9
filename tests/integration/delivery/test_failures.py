"""Retries, dead letters, delays, expiry and limits, with a broker in a process of its own that is killed in between."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing.processes import BrokerProcess, free_port
from tests.integration.consumer.handler_thread import PATIENCE
from tests.patience import eventually


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", ["--port", str(free_port())]) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with dmq.connect(broker.url, app="test") as connected:
        connected.admin.create_topic("orders", queues=1)
        yield connected


def dmq_command(broker: BrokerProcess, *words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "dmq.cli", *words, "--url", broker.url], capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_failing_message_comes_after_1_and_3_seconds_and_is_a_dead_letter_then(
    broker: BrokerProcess, client: Client
) -> None:
    """Never early, and over a kill of the broker while it waits; resent under its id, with all it had."""
    receipt = client.producer().send("orders", b"bad", key="o-1", tag="t", properties={"a": "b"})
    behind = client.producer().send("orders", b"good")
    began: list[tuple[float, int]] = []
    done = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        if message.id == behind.id:
            done.set()
            return
        began.append((time.monotonic(), message.attempt))
        raise ValueError(f"boom {message.attempt}")

    consumer = client.consumer("orders", "billing", max_attempts=3)
    running = threading.Thread(
        target=consumer.run, args=(handle,), kwargs={"workers": 2, "local_retries": 0}, daemon=True
    )
    running.start()
    # Killed before it was told of the second failure, the broker would rightly hand out the second attempt again.
    eventually(lambda: [step.what for step in client.admin.trace(receipt.id).steps].count("failed") == 2)
    broker.kill()
    broker.start()
    eventually(lambda: client.admin.dead_letters(group="billing"))
    consumer.close()
    running.join(PATIENCE)
    assert done.is_set(), "what lies behind it does not wait"
    assert [attempt for _, attempt in began] == [1, 2, 3]
    assert began[1][0] - began[0][0] > 0.95
    assert began[2][0] - began[1][0] > 2.9
    (letter,) = client.admin.dead_letters(group="billing", reason="RETRIES_EXHAUSTED")
    assert (letter.id, letter.attempts, letter.first_error) == (receipt.id, 3, "ValueError: boom 1")
    assert letter.last_error == "ValueError: boom 3"

    assert "1 resent" in dmq_command(broker, "dlq", "resend", str(letter.number))
    (again,) = client.consumer("orders", "billing").pull(1, wait=PATIENCE)
    assert (again.id, again.body, again.key, again.tag) == (receipt.id, b"bad", "o-1", "t")
    assert (dict(again.properties), again.attempt) == ({"a": "b"}, 4)
    again.ack()
    eventually(lambda: client.admin.why(receipt.id).groups[0].state == "consumed")
    (letter,) = client.admin.dead_letters(state="resent")
    assert letter.id == receipt.id


def test_delays_are_listed_and_taken_back_and_come_over_a_kill(broker: BrokerProcess, client: Client) -> None:
    producer = client.producer()
    never = producer.send("orders", b"never", delay=3600.0)
    due = time.time() + 3.0
    later = producer.send("orders", b"later", deliver_at=due)
    assert [report.id for report in client.admin.delays("orders")] == [later.id, never.id]
    assert str(never.id) in dmq_command(broker, "delay", "cancel", str(never.id))
    with pytest.raises(dmq.UnknownMessage):
        client.admin.cancel_delay(never.id)
    broker.kill()
    broker.start()
    (message,) = client.consumer("orders", "billing").pull(10, wait=PATIENCE)
    assert (message.id, message.attempt) == (later.id, 1)
    assert message.stored_at.timestamp() >= due - 0.001
    assert client.admin.delays() == []
    assert client.admin.why(never.id).state == "cancelled"


def test_what_expired_is_a_dead_letter_and_was_not_handed_out(client: Client) -> None:
    client.admin.create_topic("prices", queues=1, ttl=0.2)
    mine = client.producer().send("orders", b"mine", ttl=0.2)
    topics = client.producer().send("prices", b"topics")
    kept = client.producer().send("orders", b"kept")
    time.sleep(0.5)
    (message,) = client.consumer("orders", "billing").pull(10, wait=PATIENCE)
    assert message.id == kept.id
    client.consumer("prices", "billing").pull(10, wait=0.5)
    eventually(lambda: len(client.admin.dead_letters(reason="EXPIRED")) == 2)
    assert {letter.id for letter in client.admin.dead_letters(reason="EXPIRED")} == {mine.id, topics.id}
    assert "delivered" not in [step.what for step in client.admin.trace(mine.id).steps]


def test_limits_are_changed_live_and_outlive_a_kill(broker: BrokerProcess, client: Client) -> None:
    producer = client.producer()
    dmq_command(broker, "limit", "set", "--topic", "orders", "--messages", "1")
    producer.send_many("orders", [dmq.Message(b"x")] * 60)  # passes whole, and is paid for afterwards
    for _ in range(3):
        with pytest.raises(dmq.RateLimited) as caught:
            producer.send("orders", b"over")
        assert 0 < (caught.value.retry_after or 0) < 61
    dmq_command(broker, "limit", "set", "--topic", "orders", "--messages", "1", "--policy", "dead-letter")
    broker.kill()
    broker.start()
    assert [limit.policy for limit in client.admin.limits()] == ["dead-letter"]
    again = client.producer(timeout=PATIENCE)
    again.send_many("orders", [dmq.Message(b"x")] * 60)
    with pytest.raises(dmq.DeadLettered):
        again.send("orders", b"kept", key="o-1")
    (letter,) = client.admin.dead_letters(topic="orders", reason="RATE_LIMITED")
    assert (letter.body, letter.key) == (b"kept", "o-1")
    dmq_command(broker, "limit", "set", "--topic", "orders", "--none")
    again.send("orders", b"free")
