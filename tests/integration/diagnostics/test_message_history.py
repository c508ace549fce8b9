"""The life of messages, and why they are not consumed, asked of a broker whose clock is moved. (R-03, D-16)"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import dmq
import dmq.aio
from dmq.client.admin.reports import TraceReport
from dmq.client.client import Client
from dmq.testing import TestBroker
from tests.patience import PATIENCE_S, eventually


@pytest.fixture
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create=False) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Client:
    client = broker.connect(app="shop", client_id="c-1")
    client.admin.create_topic("orders", queues=1)
    return client


def states(client: Client, id: dmq.MessageId) -> dict[str, str]:
    return {reason.group: reason.state for reason in client.admin.why(id).groups}


def words(found: TraceReport) -> list[str]:
    return [step.what for step in found.steps]


def test_a_consumed_message_tells_its_whole_life(client: Client) -> None:
    receipt = client.producer().send("orders", b"x")
    consumer = client.consumer("orders", group="billing")
    consumer.ack(consumer.pull(1, wait=PATIENCE_S))
    eventually(lambda: states(client, receipt.id) == {"billing": "consumed"})
    found = client.admin.trace(receipt.id)
    assert words(found) == ["sent", "stored", "group placed", "delivered", "acked"]
    acked = found.steps[-1]
    assert (acked.topic, acked.queue, acked.offset) == ("orders", 0, 0)
    assert (acked.group, acked.member, acked.attempt) == ("billing", "c-1.1", 1)
    assert found.is_complete
    assert any("leases ran out" in note for note in found.notes)
    why = client.admin.why(receipt.id)
    assert why.state == "stored"
    assert "acked by member 'c-1.1'" in str(why)


def test_a_message_that_waits_says_what_for(client: Client) -> None:
    producer = client.producer()
    first, second = producer.send("orders", b"1"), producer.send("orders", b"2", tag="new")
    why = client.admin.why(second.id)
    assert "No group consumes topic 'orders'" in why.text
    client.admin.create_group("idle", "orders")
    assert states(client, second.id) == {"idle": "no members"}
    assert "1 message stands before it" in client.admin.why(second.id).text
    consumer = client.consumer("orders", group="billing")
    batch = consumer.pull(1, wait=PATIENCE_S)
    assert states(client, first.id) == {"billing": "leased", "idle": "no members"}
    assert states(client, second.id)["billing"] == "waiting"
    assert "leased to member 'c-1.1'" in client.admin.why(first.id, group="billing").text
    assert words(client.admin.trace(first.id, group="billing"))[-1] == "delivered"
    consumer.ack(batch)
    client.admin.update_topic("orders", can_consume=False)
    assert states(client, second.id)["billing"] == "off"
    assert "Group 'nobody' does not consume" in client.admin.why(second.id, group="nobody").text


def test_a_message_that_the_filter_or_the_position_leaves_out_says_so(client: Client) -> None:
    receipt = client.producer().send("orders", b"x", tag="new")
    client.consumer("orders", group="paid", tags="paid").pull(1, wait=0.0)
    assert states(client, receipt.id) == {"paid": "filtered"}
    assert "consumes 'paid', and the message has the tag 'new'" in client.admin.why(receipt.id).text
    client.consumer("orders", group="late", start_from="latest").pull(1, wait=0.0)
    assert states(client, receipt.id)["late"] == "passed"


def test_a_message_that_fails_is_followed_through_retry_and_dead_letter(broker: TestBroker, client: Client) -> None:
    receipt = client.producer().send("orders", b"x")
    consumer = client.consumer("orders", group="billing", max_attempts=2)
    (message,) = consumer.pull(1, wait=PATIENCE_S)
    message.nack(delay=60.0, reason="boom")
    eventually(lambda: states(client, receipt.id) == {"billing": "retrying"})
    assert "attempt 1 (boom), and gets it again in" in client.admin.why(receipt.id).text
    broker.clock.advance(61.0)
    (message,) = consumer.pull(1, wait=PATIENCE_S)
    assert states(client, receipt.id) == {"billing": "leased"}
    message.nack(reason="boom again")
    eventually(lambda: states(client, receipt.id) == {"billing": "dead"})
    assert "RETRIES_EXHAUSTED after 2 attempts (boom again)" in client.admin.why(receipt.id).text
    found = client.admin.trace(receipt.id)
    assert [word for word in words(found) if word != "group placed"] == [
        "sent", "stored", "delivered", "failed", "retry", "offered again", "delivered", "gave up", "dead letter",
    ]  # fmt: skip
    assert [step.attempt for step in found.steps if step.what == "delivered"] == [1, 2]
    eventually(client.admin.dead_letters)  # it takes a moment to get into the database
    client.admin.resend_dead_letters(group="billing")
    eventually(lambda: "resent" in words(client.admin.trace(receipt.id)))
    (message,) = consumer.pull(1, wait=PATIENCE_S)
    assert message.attempt == 3
    assert client.admin.trace(receipt.id).steps[-1].attempt == 3
    assert "attempt 3" in client.admin.why(receipt.id).text


def test_delays_say_when_they_are_due_or_that_they_were_taken_back(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    first, second = producer.send("orders", b"1", delay=3600.0), producer.send("orders", b"2", delay=3600.0)
    why = client.admin.why(first.id)
    assert why.state == "delayed"
    assert "comes into topic 'orders' in" in why.text
    client.admin.cancel_delay(first.id)
    assert client.admin.why(first.id).state == "cancelled"
    assert words(client.admin.trace(first.id)) == ["sent", "delayed", "cancelled"]
    broker.clock.advance(3601.0)
    eventually(lambda: client.admin.why(second.id).state == "stored")
    assert words(client.admin.trace(second.id)) == ["sent", "delayed", "stored"]


def test_transactions_say_that_they_are_open_or_how_they_ended(client: Client) -> None:
    producer = client.producer(group="payers", check=lambda message: "unknown")
    tx = producer.transaction("orders", b"1")
    assert tx.id is not None
    why = client.admin.why(tx.id)
    assert why.state == "prepared"
    assert "producer group 'payers'" in why.text
    tx.rollback()
    assert client.admin.why(tx.id).state == "rolled back"
    with producer.transaction("orders", b"2") as tx:
        pass
    assert tx.id is not None
    assert client.admin.why(tx.id).state == "stored"
    assert words(client.admin.trace(tx.id)) == ["sent", "prepared", "stored", "committed"]


def test_a_message_that_never_was_stored_is_found_among_the_dead_letters(client: Client) -> None:
    client.admin.set_limit(topic="orders", messages=1, policy="dead-letter")
    producer = client.producer()
    producer.send_many("orders", [dmq.Message(b"x")] * 1000)
    with pytest.raises(dmq.DeadLettered):
        producer.send("orders", b"over")
    (letter,) = client.admin.dead_letters()
    why = client.admin.why(letter.id)
    assert (why.state, "RATE_LIMITED" in why.text) == ("dead", True)
    assert words(client.admin.trace(letter.id)) == ["dead letter"]


def test_an_expired_message_says_so(broker: TestBroker, client: Client) -> None:
    receipt = client.producer().send("orders", b"x", ttl=10.0)
    client.admin.create_group("billing", "orders")
    consumer = client.consumer("orders", group="billing")
    broker.clock.advance(11.0)
    assert states(client, receipt.id) == {"billing": "expired"}
    assert len(consumer.pull(1, wait=0.2)) == 0
    eventually(lambda: states(client, receipt.id) == {"billing": "dead"})
    assert "EXPIRED" in client.admin.why(receipt.id).text
    assert words(client.admin.trace(receipt.id))[-2:] == ["expired", "dead letter"]
    assert "delivered" not in words(client.admin.trace(receipt.id)), "it was not handed out"


def test_each_member_of_a_broadcast_group_is_told_apart(broker: TestBroker, client: Client) -> None:
    receipt = client.producer().send("orders", b"x")
    consumer = client.consumer("orders", group="caches", broadcast=True)
    consumer.ack(consumer.pull(1, wait=PATIENCE_S))
    eventually(lambda: [reason.state for reason in client.admin.why(receipt.id, "caches").groups] == ["consumed"])
    (reason,) = client.admin.why(receipt.id).groups
    assert reason.group.startswith("caches (broadcast to c-1")
    assert client.admin.trace(receipt.id, "caches").steps[-1].what == "acked"


def test_an_ordered_group_holds_what_failed_and_what_stands_behind_it(broker: TestBroker, client: Client) -> None:
    producer = client.producer()
    first, second = (producer.send("orders", body, business_id="b", ordered=True) for body in (b"1", b"2"))
    consumer = client.consumer("orders", group="billing", ordered=True)
    (message,) = consumer.pull(1, wait=PATIENCE_S)
    message.nack(delay=60.0, reason="boom")
    eventually(lambda: states(client, first.id) == {"billing": "again"})
    assert "as attempt 2" in client.admin.why(first.id).text
    assert states(client, second.id) == {"billing": "waiting"}
    assert "the group consumes in order" in client.admin.why(second.id).text


def test_a_search_that_takes_too_long_ends_and_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = client.producer().send("orders", b"x")
    consumer = client.consumer("orders", group="billing")
    consumer.ack(consumer.pull(1, wait=PATIENCE_S))
    eventually(lambda: states(client, receipt.id) == {"billing": "consumed"})
    monkeypatch.setattr("dmq.broker.diagnostics.message_history._CHUNK", 1)
    monkeypatch.setattr("dmq.broker.diagnostics.message_history._SEARCH_BYTES", 0)
    why = client.admin.why(receipt.id)
    assert (why.is_complete, why.groups[0].state) == (False, "settled")
    assert "was not searched far enough" in why.text
    found = client.admin.trace(receipt.id)
    assert not found.is_complete
    assert any("no further" in note for note in found.notes)


def test_an_unknown_message_is_an_error_that_says_what_to_check(broker: TestBroker, client: Client) -> None:
    with pytest.raises(dmq.UnknownMessage, match="check the id"):
        client.admin.why(dmq.MessageId(1, 2))
    with pytest.raises(dmq.UnknownMessage):
        client.admin.trace(dmq.MessageId(1, 2))
    with pytest.raises(dmq.InvalidRequest, match="26 characters"):
        client.admin.why("nonsense")

    async def main() -> None:
        async with dmq.aio.connect(broker.url) as other:
            receipt = await other.producer().send("orders", b"x")
            assert (await other.admin.why(receipt.id)).state == "stored"
            assert words(await other.admin.trace(str(receipt.id))) == ["sent", "stored"]

    asyncio.run(main())
