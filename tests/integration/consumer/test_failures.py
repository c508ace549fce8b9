"""What becomes of messages that are not simply acked, and of handlers that fail, take long or stop."""

from __future__ import annotations

import threading
import time

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import TestBroker
from tests.integration.consumer.handler_thread import Handling, lag, send
from tests.patience import eventually

# --- failing ----------------------------------------------------------------------------------------------------------


def test_a_nacked_message_comes_again_after_its_delay_as_the_next_attempt() -> None:
    with TestBroker() as broker:
        client = broker.connect()
        send(client, "a")
        consumer = client.consumer("orders", "billing")
        (message,) = consumer.pull()
        assert message.attempt == 1
        message.nack(delay=7200, reason="not now")
        assert len(consumer.pull(wait=0.0)) == 0
        broker.clock.advance(7150)
        assert len(consumer.pull(wait=0.0)) == 0
        broker.clock.advance(60)
        (again,) = consumer.pull()
        assert (again.body, again.attempt, again.id) == (b"a", 2, message.id)


def test_a_rejected_message_is_kept_and_not_delivered_again(client: Client) -> None:
    send(client, "bad", "good")
    consumer = client.consumer("orders", "billing")
    bad, good = consumer.pull()
    bad.reject("cannot be read")
    good.ack()
    good.nack()  # the first word counts
    eventually(lambda: lag(client) == 0)
    eventually(lambda: [message.body for message in client.admin.peek("%DLQ%billing")] == [b"bad"])


def test_an_extended_message_stays_ours_and_a_late_one_is_lost() -> None:
    with TestBroker() as broker:
        client = broker.connect()
        send(client, "a")
        consumer = client.consumer("orders", "billing", lease=30.0)
        (message,) = consumer.pull()
        message.extend(100.0)
        broker.clock.advance(90)
        assert len(consumer.pull(wait=0.1)) == 0
        broker.clock.advance(20)
        (again,) = consumer.pull()
        assert again.attempt == 2
        with pytest.raises(dmq.LeaseLost):
            message.extend(10.0)


def test_what_a_handler_raises_decides_what_becomes_of_its_message(client: Client) -> None:
    send(client, "good", "retry", "reject", "bug")
    calls: list[tuple[bytes, int]] = []

    def handle(message: ReceivedMessage) -> None:
        calls.append((message.body, message.attempt))
        if message.attempt == 1:
            match message.body:
                case b"retry":
                    raise dmq.Retry(after=0.0)
                case b"reject":
                    raise dmq.Reject("never")
                case b"bug":
                    raise ValueError("a bug")

    with Handling(client.consumer("orders", "billing"), handle, workers=2):
        eventually(lambda: len(calls) == 7)
        eventually(lambda: lag(client) == 0)
    assert sorted(calls) == [
        (b"bug", 1),
        (b"bug", 1),  # once more here
        (b"bug", 2),
        (b"good", 1),
        (b"reject", 1),
        (b"retry", 1),
        (b"retry", 2),
    ]


def test_not_even_a_system_exit_kills_a_worker(client: Client) -> None:
    send(client, "a", "b")
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            raise SystemExit

    with Handling(client.consumer("orders", "billing"), handle, workers=1, policy="block"):
        eventually(lambda: sorted(seen) == [b"a", b"a", b"b"])


def test_an_ordered_group_keeps_its_order_also_when_a_handler_fails(client: Client) -> None:
    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(20)])
    done: list[int] = []
    running: list[bytes] = []
    failures = 0

    def handle(message: ReceivedMessage) -> None:
        nonlocal failures
        assert not running
        running.append(message.body)
        try:
            if message.body == b"5" and failures < 4:
                failures += 1
                raise ValueError("not yet")
            done.append(int(message.body))
        finally:
            running.clear()

    with Handling(client.consumer("orders", "billing", ordered=True), handle, workers=4):
        eventually(lambda: len(done) == 20)
    assert done == list(range(20))
    assert failures == 4


def test_a_slow_handler_keeps_its_message(client: Client) -> None:
    send(client, "slow")
    calls: list[int] = []
    others = client.consumer("orders", "billing")

    def handle(message: ReceivedMessage) -> None:
        calls.append(message.attempt)
        deadline = time.monotonic() + 3 * 0.4
        while time.monotonic() < deadline:
            assert len(others.pull(wait=0.05)) == 0
        calls.append(0)

    with Handling(client.consumer("orders", "billing", lease=0.4), handle, workers=1):
        eventually(lambda: len(calls) == 2)
    assert calls == [1, 0]
    assert lag(client) == 0


@pytest.mark.parametrize("policy", ["caller-runs", "block", "reject", dmq.RateLimit(1000)])
def test_every_policy_handles_everything(client: Client, policy: str | dmq.RateLimit) -> None:
    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(7)])
    seen: list[bytes] = []
    lock = threading.Lock()

    def handle(message: ReceivedMessage) -> None:
        with lock:
            seen.append(message.body)

    with Handling(client.consumer("orders", "billing"), handle, workers=3, policy=policy):
        eventually(lambda: len(set(seen)) == 7)
    assert len(seen) == 7
    assert lag(client) == 0


def test_a_handler_may_close_its_consumer(client: Client) -> None:
    send(client, "a", "b", "c")
    consumer = client.consumer("orders", "billing")
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        consumer.close()

    consumer.run(handle, workers=1, policy="block")
    assert len(seen) == 1
    assert lag(client) == 2
