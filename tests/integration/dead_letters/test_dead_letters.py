"""Dead letters through a broker in memory: drained, listed, resent, deleted (D-16)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

import dmq
from dmq.client.admin.admin import Admin
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import TestBroker
from dmq.token_bucket import TokenBucket
from tests.integration.consumer.handler_thread import Handling
from tests.integration.dead_letters.letters import consumed, drained, reject, rejected
from tests.patience import eventually


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect(app="shop", client_id="me")
    client.admin.create_topic("orders", queues=2)
    return client


def test_a_rejected_message_is_kept_with_all_there_is_to_know(client: Client) -> None:
    """D-16."""
    producer = client.producer()
    receipt = producer.send("orders", b"\x00body", key="k", tag="t", business_id="b", priority=7, properties={"a": "b"})
    reject_one(client)
    (letter,) = drained(client, 1)
    assert (letter.id, letter.topic, letter.group) == (receipt.id, "orders", "billing")
    assert (letter.queue, letter.offset) == (receipt.queue, receipt.offset)
    assert (letter.reason, letter.attempts, letter.state) == ("REJECTED", 1, "waiting")
    assert letter.first_error == letter.last_error == "no good"
    assert (letter.body, letter.key, letter.tag, letter.business_id) == (b"\x00body", "k", "t", "b")
    assert (letter.priority, letter.properties, letter.app) == (7, {"a": "b"}, "shop")
    assert letter.sent_at_ms <= letter.dead_at_ms
    assert (letter.changed_by, letter.changed_at_ms, letter.broker) == ("", 0, "dmq")


def reject_one(client: Client, group: str = "billing") -> None:
    with client.consumer("orders", group) as consumer:
        (message,) = consumer.pull(max_messages=1, wait=20.0)
        message.reject("no good")


def test_dead_letters_are_found_by_topic_group_reason_and_time(client: Client) -> None:
    """D-16."""
    began = datetime.now(UTC) - timedelta(hours=1)
    rejected(client, 2)
    rejected(client, 1, topic="others", group="audit", prefix="o")
    drained(client, 3)
    bodies = {letter.number: letter.body for letter in client.admin.dead_letters(group="billing")}
    assert sorted(bodies.values()) == [b"m0", b"m1"]
    assert [letter.topic for letter in client.admin.dead_letters("others")] == ["others"]
    assert client.admin.dead_letters(reason="EXPIRED") == []
    assert len(client.admin.dead_letters(reason="rejected", since=began)) == 3
    assert client.admin.dead_letters(until=began) == []
    assert len(client.admin.dead_letters(limit=2)) == 2
    assert [letter.body for letter in client.admin.dead_letters(limit=1, bodies=False)] == [b""]
    with pytest.raises(dmq.InvalidRequest, match="'BAD' is not a reason of a dead letter: there are RETRIES_EXHAUSTED"):
        client.admin.dead_letters(reason="bad")
    with pytest.raises(dmq.InvalidRequest, match="'gone' is not a state"):
        client.admin.dead_letters(state="gone")


def test_a_long_list_comes_whole(client: Client) -> None:
    rejected(client, 1200)
    letters = drained(client, 1200)
    assert len({letter.id for letter in letters}) == 1200
    assert [letter.number for letter in letters] == sorted(letter.number for letter in letters)


def test_a_resent_letter_goes_to_its_group_alone_under_its_id(client: Client) -> None:
    """D-16."""
    (receipt,) = rejected(client, 1)
    assert consumed(client, 1, group="audit") == [("m0", 1)]
    (letter,) = drained(client, 1)
    (outcome,) = client.admin.resend_dead_letters([letter])
    assert outcome.ok
    with client.consumer("orders", "billing") as consumer:
        (message,) = consumer.pull(max_messages=5, wait=20.0)
        assert (message.id, message.body, message.key) == (receipt.id, b"m0", "m-k0")
        assert (message.topic, message.attempt) == ("orders", 2)
        message.ack()
    with client.consumer("orders", "audit") as consumer:
        assert len(consumer.pull(max_messages=5, wait=0.3)) == 0
    (after,) = client.admin.dead_letters(state="resent")
    assert (after.number, after.changed_by, after.changed_at_ms >= letter.dead_at_ms) == (
        letter.number,
        "shop/me",
        True,
    )
    assert client.admin.dead_letters() == []


def test_a_letter_that_dies_again_is_another_letter(client: Client) -> None:
    """D-16."""
    rejected(client, 1)
    (letter,) = drained(client, 1)
    client.admin.resend_dead_letters([letter.number])
    reject(client, 1)
    (again,) = drained(client, 1)
    assert (again.id, again.attempts, again.number > letter.number) == (letter.id, 2, True)
    client.admin.resend_dead_letters([again.id])
    assert consumed(client, 1) == [("m0", 3)]


def test_a_resent_letter_has_all_its_attempts_again(broker: TestBroker, client: Client) -> None:
    """D-16."""
    client.producer().send("orders", b"x")

    def fail() -> None:
        with client.consumer("orders", "billing", max_attempts=2) as consumer:
            for _ in range(2):
                (message,) = consumer.pull(max_messages=1, wait=20.0)
                message.nack(delay=0.0, reason=f"attempt {message.attempt}")

    fail()
    (letter,) = drained(client, 1)
    assert (letter.reason, letter.attempts) == ("RETRIES_EXHAUSTED", 2)
    assert (letter.first_error, letter.last_error) == ("attempt 1", "attempt 2")
    client.admin.resend_dead_letters(letter.id)
    fail()
    (again,) = drained(client, 1)
    assert (again.attempts, again.first_error, again.last_error) == (4, "attempt 1", "attempt 4")


def test_an_expired_letter_that_is_resent_does_not_expire_again(broker: TestBroker, client: Client) -> None:
    """D-16."""
    client.admin.create_topic("short", queues=1, ttl=60.0)
    client.producer().send("short", b"late")
    broker.clock.advance(120.0)
    with client.consumer("short", "billing") as consumer:
        assert len(consumer.pull(max_messages=1, wait=0.3)) == 0
    (letter,) = drained(client, 1)
    assert (letter.reason, letter.attempts) == ("EXPIRED", 0)
    client.admin.resend_dead_letters([letter])
    assert consumed(client, 1, topic="short") == [("late", 1)]


def test_what_cannot_be_resent_or_deleted_says_why(client: Client) -> None:
    rejected(client, 2)
    first, second = drained(client, 2)
    client.admin.delete_dead_letters([second])
    client.admin.delete_topic("orders")
    gone, deleted, unknown = client.admin.resend_dead_letters([first.number, second.number, 4711])
    assert isinstance(gone.error, dmq.UnknownTopic)
    assert isinstance(deleted.error, dmq.UnknownMessage)
    assert "it was deleted by shop/me" in str(deleted.error)
    assert "there is no dead letter 4711" in str(unknown.error)
    client.admin.create_topic("orders", queues=1)
    (outcome,) = client.admin.resend_dead_letters([first])
    assert outcome.ok, "a failed try leaves it waiting"
    (late,) = client.admin.delete_dead_letters([first])
    assert "it was resent by shop/me" in str(late.error)


def test_many_are_resent_and_deleted_by_what_they_are(client: Client) -> None:
    """D-16."""
    rejected(client, 30)
    rejected(client, 3, group="audit", prefix="a", topic="others")
    drained(client, 33)
    outcomes = client.admin.resend_dead_letters(group="billing")
    assert [outcome.ok for outcome in outcomes] == [True] * 30
    assert sorted(body for body, _ in consumed(client, 30)) == sorted(f"m{n}" for n in range(30))
    assert client.admin.resend_dead_letters(group="billing") == []
    assert len(client.admin.delete_dead_letters(topic="others", reason="REJECTED")) == 3
    deleted = client.admin.dead_letters(state="deleted")
    assert [letter.body for letter in deleted] == [b""] * 3
    with pytest.raises(dmq.InvalidRequest, match="say which dead letters"):
        client.admin.resend_dead_letters()
    with pytest.raises(dmq.InvalidRequest, match="is not a message id"):
        client.admin.resend_dead_letters(["nonsense"])
    with pytest.raises(dmq.UnknownMessage, match="has no dead letter that waits"):
        client.admin.resend_dead_letters([deleted[0].id])


def test_the_broker_keeps_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, float]] = []
    real = TokenBucket.wait

    def wait(bucket: TokenBucket, count: int, now: float) -> float:
        waits.append((count, real(bucket, count, now)))
        return 0.0

    monkeypatch.setattr(TokenBucket, "wait", wait)
    with TestBroker(dead_letters_per_second=10) as broker:
        client = broker.connect()
        client.admin.create_topic("orders", queues=1)
        rejected(client, 150)
        letters = drained(client, 150)
        assert all(outcome.ok for outcome in client.admin.resend_dead_letters(letters))
    assert [count for count, _ in waits] == [100, 50]
    assert waits[0][1] > 8.9
    assert waits[1][1] > 9.0


def test_two_that_resend_at_once_deliver_once(broker: TestBroker, client: Client) -> None:
    rejected(client, 40)
    numbers = [letter.number for letter in drained(client, 40)]

    async def both() -> list[bool]:
        async with await dmq.aio.connect(broker.url, app="a") as one, await dmq.aio.connect(broker.url, app="b") as two:
            results = await asyncio.gather(*(each.admin.resend_dead_letters(numbers) for each in (one, two, one, two)))
        return [outcome.ok for outcomes in results for outcome in outcomes]

    assert sum(asyncio.run(both())) == 40
    assert len(consumed(client, 40)) == 40


def test_dead_letters_outlive_a_restart_and_a_kill(broker: TestBroker, client: Client) -> None:
    rejected(client, 3)
    drained(client, 3)
    for is_killed in (False, True):
        if is_killed:
            broker.kill()
            broker.start()
        else:
            broker.restart()
        admin = broker.connect().admin
        assert len(admin.dead_letters()) == 3
        eventually(partial(nothing_waits, admin))


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_in_hand_when_the_broker_died_can_still_be_rejected(
    broker: TestBroker, client: Client, ordered: bool
) -> None:
    """It comes again while its handler runs. The word about the first counts for the second, whose lease is alive."""
    client.producer().send("orders", b"bad")
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: ReceivedMessage) -> None:
        begun.set()
        go_on.wait(20.0)
        raise dmq.Reject("no good")

    with Handling(client.consumer("orders", "billing", ordered=ordered), handle):
        assert begun.wait(20.0)
        broker.kill()
        broker.start()
        eventually(lambda: any(member.leased for member in client.admin.group("billing").details))
        go_on.set()
        (letter,) = drained(client, 1)
    assert (letter.body, letter.reason) == (b"bad", "REJECTED")


def nothing_waits(admin: Admin) -> bool:
    return admin.stats("broker_")["broker_dead_letters_waiting"] == 0


def test_asyncio_has_the_same(broker: TestBroker, client: Client) -> None:
    rejected(client, 3)
    drained(client, 3)

    async def use() -> None:
        async with await dmq.aio.connect(broker.url, app="aio") as client:
            first, *others = await client.admin.dead_letters(group="billing")
            assert [outcome.ok for outcome in await client.admin.resend_dead_letters([first])] == [True]
            outcomes = await client.admin.delete_dead_letters(topic="orders", rate=100.0)
            assert [outcome.number for outcome in outcomes] == [letter.number for letter in others]
            assert await client.admin.dead_letters() == []

    asyncio.run(use())
