"""Records that an earlier version stored as they came, and that nobody can read: dead letters, and in nobody's way."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator

import pytest

import dmq
from dmq.client.client import Client
from dmq.records import layout
from dmq.settings import StoreSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.offline.verification import verify
from dmq.testing import FakeClock
from tests.integration.broken_records import key, record, spoil
from tests.integration.broker_thread import ServedBroker
from tests.patience import PATIENCE_S

GOOD = ["good-0", "good-2", "good-4"]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def turned(at: int) -> Callable[[bytes], bytes]:
    """One bit of a record turned."""
    return lambda raw: raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]


def in_key(value: bytes) -> Callable[[bytes], bytes]:
    """The first bytes of the key are these."""
    return lambda raw: raw.replace(b"bad-", value)


SPOILT = {
    "the size of an attribute": lambda raw: raw.replace(b"\x01\x00\x05bad-", b"\x01\x01\x05bad-"),
    "a key that is not text": in_key(b"\xff\xfe--"),
    "a bit of the body": turned(layout.BODY_AT),
    "a bit of the key": in_key(b"cad-"),
    "an app that is not text": lambda raw: raw.replace(b"\x04shop", b"\x04sho\xff"),
}


def fill(client: Client, topic: str) -> None:
    names = [f"good-{index}" if index % 2 == 0 else f"bad-{index}" for index in range(5)]
    client.producer().send_many(topic, [dmq.Message(b"body", key=name) for name in names])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_consumer_that_finds_a_record_damaged_is_believed_if_it_is_so_here_too(
    broker: ServedBroker, ordered: bool
) -> None:
    """One that was written under a wrong checksum after all, and one that is right and was damaged on the way."""
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("orders", queues=1)
        bad = record("orders", key(b"bad"), flip=layout.BODY_AT)
        right = record("orders", key(b"right"))
        store = broker.broker.store

        async def append() -> None:
            lengths = [len(bad), len(right)]
            store.append([Batch(topic="orders", queue=0, data=bad + right, lengths=lengths, producer_id=7)])
            store.flush()

        asyncio.run_coroutine_threadsafe(append(), broker.loop).result(PATIENCE_S)
        with client.consumer("orders", group="g", ordered=ordered, batch=1) as consumer:
            found = []
            while ("right", 2) not in found:
                for message in consumer.pull(max_messages=1, wait=PATIENCE_S):
                    found.append((message.key, message.attempt))
                    if message.attempt == 1:
                        message.nack(reason="RECORD_CORRUPT: the body does not match its CRC", delay=0.0)
                    else:
                        message.ack()
            assert found == [("bad", 1), ("right", 1), ("right", 2)]
            wait_until(lambda: not client.admin.lag("orders", "g").total)
        wait_until(lambda: len([*client.admin.dead_letters(reason="CORRUPT")]) == 1)
        assert [letter.key for letter in client.admin.dead_letters()] == ["bad"]


def spoil_bad(broker: ServedBroker, change: Callable[[bytes], bytes]) -> None:
    broker.stop()
    assert spoil(broker.files, lambda raw: change(raw) if b"bad-" in raw else None)
    broker.start()


@pytest.fixture
def broker() -> Iterator[ServedBroker]:
    with ServedBroker(auto_create=True) as running:
        yield running


def consumed(client: Client, topic: str, group: str, *, ordered: bool = False) -> list[str | None]:
    found: list[str | None] = []
    with client.consumer(topic, group=group, ordered=ordered) as consumer:
        while len(found) < len(GOOD):
            batch = consumer.pull(max_messages=2, wait=PATIENCE_S)
            assert batch
            found += [message.key for message in batch]
            batch.ack()
        wait_until(lambda: not client.admin.lag(topic, group).total)
    return found


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_nobody_can_read_is_a_dead_letter_and_the_rest_of_its_batch_is_delivered(
    broker: ServedBroker, spoilt: str
) -> None:
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("plain", queues=1)
        client.admin.create_topic("brief", queues=1, ttl=3600.0)
        for topic in ("plain", "brief"):
            fill(client, topic)
        spoil_bad(broker, SPOILT[spoilt])
        for topic, group, ordered in (("plain", "a", False), ("brief", "b", False), ("plain", "c", True)):
            assert consumed(client, topic, group, ordered=ordered) == GOOD
        wait_until(lambda: len([*client.admin.dead_letters(reason="CORRUPT")]) == 6)
        letters = [*client.admin.dead_letters(reason="CORRUPT")]
        assert {(letter.topic, letter.group, letter.attempts) for letter in letters} == {
            ("plain", "a", 0), ("brief", "b", 0), ("plain", "c", 0)
        }  # fmt: skip
        assert all(letter.last_error.startswith("its record was stored damaged: ") for letter in letters)
        outcome = client.admin.resend_dead_letters([letters[0].id])[0]
        assert "stored damaged" in str(outcome.error)
        look_at(client, letters[0].id)
        # Nothing of it comes back with the next start.
        broker.restart()
        assert [group.lag for group in client.admin.groups()] == [0, 0, 0]
        assert not client.consumer("plain", group="a").pull(wait=0.2)
    broker.stop()
    kinds = {finding.kind for finding in verify(broker.files).findings}
    assert kinds == {"stored"}


def look_at(client: Client, message_id: dmq.MessageId) -> None:
    """People see placeholders, and everything around them."""
    seen = client.admin.peek("plain", limit=10)
    assert [message.offset for message in seen] == [0, 1, 2, 3, 4]
    assert [bool(message.damage) for message in seen] == [False, True, False, True, False]
    assert client.admin.find(id=message_id)[0].damage
    assert "stored damaged" in client.admin.trace(message_id).notes[0]
    assert "CORRUPT" in str(client.admin.why(message_id))


@pytest.mark.parametrize("spoilt", ["the size of an attribute", "a bit of the body"])
def test_what_nobody_can_read_is_carried_forward_by_retention_as_all_else(spoilt: str) -> None:
    clock = FakeClock(int(time.time() * 1000))
    store = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, retention_hours=1.0)
    with ServedBroker(clock=clock, store=store) as broker, dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("late", queues=1)
        producer = client.producer(group="shop", check=lambda message: "unknown")
        for name in ("good-0", "bad-1", "good-2"):
            producer.send("late", b"body", key=name, delay=3 * 3600.0)
        bad, good = producer.transaction("late", b"body", key="bad-5"), producer.transaction("late", b"b", key="good-4")
        with bad, good:
            spoil_bad(broker, SPOILT[spoilt])
            client.admin.create_topic("other", queues=1)
            for _ in range(60):
                producer.send("other", os.urandom(3000))

            async def retain() -> int:
                return broker.broker.store.retain()

            clock.advance(2 * 3600.0)
            assert asyncio.run_coroutine_threadsafe(retain(), broker.loop).result(PATIENCE_S)
            broker.restart()
            stats = broker.broker.store.stats()
            assert (stats["delays"], stats["transactions"]) == (3, 2)


def test_delayed_and_prepared_messages_that_nobody_can_read_are_dead_letters_when_their_time_comes(
    broker: ServedBroker,
) -> None:
    with dmq.connect(broker.url, app="shop") as client:
        client.admin.create_topic("late", queues=1)
        producer = client.producer(group="shop", check=lambda message: "commit")
        for index in range(5):
            producer.send("late", b"body", key=f"{'bad' if index % 2 else 'good'}-{index}", delay=2.0)
        with producer.transaction("late", b"body", key="bad-5"):
            spoil_bad(broker, SPOILT["the size of an attribute"])
        assert sorted(map(str, consumed(client, "late", "g"))) == GOOD
        wait_until(lambda: len([*client.admin.dead_letters(reason="CORRUPT")]) == 3)
        assert not client.admin.transactions()
