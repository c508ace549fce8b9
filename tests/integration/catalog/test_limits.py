"""Limits and policies of topics, through a broker whose clock is moved: what a user relies on. (D-16, J-11)"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import dmq
import dmq.aio
from dmq.client.admin.reports import LimitReport
from dmq.client.client import Client
from dmq.testing import FakeClock, TestBroker
from tests.integration.broker_thread import ServedBroker
from tests.patience import PATIENCE_S, eventually


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(clock=FakeClock(), auto_create=False) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect(app="shop")
    client.admin.create_topic("orders", queues=1)
    return client


def bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.body for message in client.admin.peek(topic, limit=1000)]


def test_what_is_over_the_limit_is_refused_and_says_when_to_try_again(broker: TestBroker, client: Client) -> None:
    client.admin.set_limit(topic="orders", messages=3)
    producer = client.producer(timeout=1.0)
    for number in range(3):
        producer.send("orders", b"%d" % number)
    with pytest.raises(dmq.RateLimited, match="takes 3 messages a second") as caught:
        producer.send("orders", b"3")
    assert caught.value.retry_after == pytest.approx(1 / 3, abs=0.002)
    assert bodies(client) == [b"0", b"1", b"2"]
    assert client.admin.stats("broker_limited")["broker_limited"] >= 1
    broker.clock.advance(1.0)
    producer.send("orders", b"4")
    assert bodies(client) == [b"0", b"1", b"2", b"4"]


def test_every_way_to_send_is_refused_at_once(broker: TestBroker, client: Client) -> None:
    client.admin.set_limit(topic="orders", messages=1)
    producer = client.producer(timeout=None)
    producer.send("orders", b"first")
    assert isinstance(producer.send_async("orders", b"second").exception(PATIENCE_S), dmq.RateLimited)
    with pytest.raises(dmq.RateLimited):
        producer.send_many("orders", [dmq.Message(b"third")])
    broker.clock.advance(1.0)
    producer.send("orders", b"fourth")
    assert bodies(client) == [b"first", b"fourth"]
    assert client.admin.stats("broker_limited")["broker_limited"] == 2


def test_bytes_are_limited_as_well(broker: TestBroker, client: Client) -> None:
    client.admin.set_limit(topic="orders", bytes=5000)
    producer = client.producer(timeout=0.3, compression="none")
    producer.send("orders", b"x" * 4500)
    with pytest.raises(dmq.RateLimited):
        producer.send("orders", b"x" * 4500)
    broker.clock.advance(1.0)
    producer.send("orders", b"x" * 4500)


def test_an_app_is_limited_whatever_topic_it_sends_to_and_others_are_not(broker: TestBroker, client: Client) -> None:
    client.admin.create_topic("bills", queues=1)
    client.admin.set_limit(app="shop", messages=1)
    client.producer().send("bills", b"1")
    with pytest.raises(dmq.RateLimited, match="app 'shop'"):
        client.producer(timeout=0.3).send("orders", b"2")
    client.producer(app="bank").send("orders", b"3")
    assert bodies(client) == [b"3"]


def test_with_the_policy_dead_letter_the_producer_is_told_and_nothing_is_lost(
    broker: TestBroker, client: Client
) -> None:
    client.admin.set_limit(topic="orders", messages=1, policy="dead-letter")
    producer = client.producer()
    producer.send("orders", b"stored")
    with pytest.raises(dmq.DeadLettered, match="do not send them again"):
        producer.send("orders", b"dead", key="k-1")
    (letter,) = client.admin.dead_letters()
    assert (letter.topic, letter.reason, letter.body, letter.key) == ("orders", "RATE_LIMITED", b"dead", "k-1")
    assert bodies(client) == [b"stored"]
    client.admin.resend_dead_letters([letter])
    eventually(lambda: bodies(client) == [b"stored", b"dead"])


def test_delayed_and_prepared_messages_are_refused_whatever_the_policy(broker: TestBroker, client: Client) -> None:
    client.admin.set_limit(topic="orders", messages=1, policy="dead-letter")
    producer = client.producer(timeout=0.3, group="payers", check=lambda message: "commit")
    producer.send("orders", b"now")
    with pytest.raises(dmq.RateLimited):
        producer.send("orders", b"later", delay=60.0)
    with pytest.raises(dmq.RateLimited), producer.transaction("orders", b"half"):
        pass
    assert client.admin.dead_letters() == []


def test_limits_are_listed_changed_live_and_taken_away(broker: TestBroker, client: Client) -> None:
    admin = client.admin
    assert admin.limits() == []
    limit = LimitReport("orders", "", 10, 1 << 20, "refuse")
    assert admin.set_limit(topic="orders", messages=10, bytes=1 << 20) == limit
    other = admin.set_limit(app="bank", messages=5, policy="dead-letter")
    assert other == LimitReport("", "bank", 5, None, "dead-letter")
    assert admin.limits() == [other, limit]
    assert admin.limits(topic="orders") == [limit]
    assert admin.limits(app="bank") == [other]
    assert admin.set_limit(topic="orders") is None
    assert admin.set_limit(app="bank") is None
    assert admin.limits() == []
    producer = client.producer()
    for _ in range(50):
        producer.send("orders", b"x")


def test_a_limit_goes_with_its_topic(broker: TestBroker, client: Client) -> None:
    client.admin.set_limit(topic="orders", messages=1)
    client.admin.delete_topic("orders")
    client.admin.create_topic("orders", queues=1)
    assert client.admin.limits() == []
    producer = client.producer()
    for _ in range(5):
        producer.send("orders", b"x")


def test_a_bad_limit_is_refused_with_a_reason(client: Client) -> None:
    admin = client.admin
    with pytest.raises(dmq.InvalidSettings, match="one of them"):
        admin.set_limit(messages=1)
    with pytest.raises(dmq.InvalidSettings, match="one of them"):
        admin.set_limit(topic="orders", app="shop", messages=1)
    with pytest.raises(dmq.InvalidSettings, match="1 or more"):
        admin.set_limit(topic="orders", messages=0)
    with pytest.raises(dmq.InvalidSettings, match="dead-letter"):
        admin.set_limit(topic="orders", messages=1, policy="ignore")
    with pytest.raises(dmq.UnknownTopic):
        admin.set_limit(topic="nothing", messages=1)
    with pytest.raises(dmq.InvalidName):
        admin.set_limit(app="%bad name", messages=1)


def test_limits_and_policies_outlive_the_broker() -> None:
    with ServedBroker(auto_create=True) as served:
        with dmq.connect(served.url) as client:
            client.admin.create_topic("orders", queues=1)
            client.admin.set_limit(topic="orders", messages=1)
            client.admin.update_topic("orders", can_consume=False)
        served.restart()
        with dmq.connect(served.url) as client:
            assert client.admin.limits() == [LimitReport("orders", "", 1, None, "refuse")]
            assert not client.admin.topic("orders").can_consume
            producer = client.producer(timeout=0.2)
            producer.send_many("orders", [dmq.Message(b"x")] * 100)  # passes whole, and is paid for afterwards
            with pytest.raises(dmq.RateLimited):
                producer.send("orders", b"x")


def test_asyncio_has_the_same(broker: TestBroker, client: Client) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url, app="shop") as other:
            limit = await other.admin.set_limit(topic="orders", messages=1)
            assert await other.admin.limits() == [limit]
            producer = other.producer(timeout=0.3)
            await producer.send("orders", b"1")
            with pytest.raises(dmq.RateLimited) as caught:
                await producer.send("orders", b"2")
            assert caught.value.retry_after == pytest.approx(1.0, abs=0.01)

    asyncio.run(main())


# --- produce and consume, on and off ----------------------------------------------------------------------------------


def test_a_topic_whose_producing_is_off_refuses_every_kind_of_message(client: Client) -> None:
    assert client.admin.update_topic("orders", can_produce=False).can_produce is False
    producer = client.producer(group="payers", check=lambda message: "commit")
    with pytest.raises(dmq.NotAllowed, match="producing is switched off"):
        producer.send("orders", b"x")
    with pytest.raises(dmq.NotAllowed):
        producer.send("orders", b"x", delay=60.0)
    with pytest.raises(dmq.NotAllowed), producer.transaction("orders", b"x"):
        pass
    client.admin.update_topic("orders", can_produce=True)
    producer.send("orders", b"y")
    assert bodies(client) == [b"y"]


def test_consumers_of_a_topic_whose_consuming_is_off_wait_and_go_on_by_themselves(client: Client) -> None:
    client.producer().send("orders", b"x")
    client.admin.update_topic("orders", can_consume=False)
    assert len(client.consumer("orders", group="pulling").pull(10, wait=0.0)) == 0
    pushed = client.consumer("orders", group="pushed")
    messages = iter(pushed)
    client.admin.update_topic("orders", can_consume=True)
    message = next(messages)
    assert message.body == b"x"
    message.ack()
    assert len(client.consumer("orders", group="pulling").pull(10, wait=PATIENCE_S)) == 1
