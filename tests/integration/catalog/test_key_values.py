"""The registry's key-value space: put, got, listed, expired; by both clients; over a restart."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

import dmq
import dmq.aio
from dmq.broker.catalog import key_values
from dmq.client.client import Client
from dmq.testing import FakeClock, TestBroker
from tests.integration.broker_thread import ServedBroker


def test_what_was_put_is_got_listed_and_deleted(client: Client) -> None:
    registry = client.registry
    assert registry.get("confirm", "a") is None
    registry.put("confirm", "billing/1", b"127.0.0.1:1")
    registry.put("confirm", "billing/2", "127.0.0.1:2")
    registry.put("confirm", "stock/1", b"")
    registry.put("other", "billing/1", b"no")
    registry.put("confirm", "billing/2", "127.0.0.1:3")
    assert registry.get("confirm", "billing/2") == b"127.0.0.1:3"
    assert registry.entries("confirm", "billing/") == {"billing/1": b"127.0.0.1:1", "billing/2": b"127.0.0.1:3"}
    assert list(registry.entries("confirm")) == ["billing/1", "billing/2", "stock/1"]
    assert registry.delete("confirm", "billing/1")
    assert not registry.delete("confirm", "billing/1")
    assert list(registry.entries("confirm")) == ["billing/2", "stock/1"]
    assert registry.entries("nothing") == {}


def test_a_long_list_comes_in_pages(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: client.registry.put("many", f"{n:04}", b"x"), range(250)))
    assert list(client.registry.entries("many")) == [f"{n:04}" for n in range(250)]


def test_a_key_goes_when_its_time_is_over_and_not_before() -> None:
    clock = FakeClock()
    with TestBroker(clock=clock) as broker:
        client = broker.connect()
        client.registry.put("confirm", "renewed", b"1", ttl=30)
        client.registry.put("confirm", "dead", b"1", ttl=30)
        client.registry.put("confirm", "lasting", b"1")
        clock.advance(20)
        client.registry.put("confirm", "renewed", b"2", ttl=30)
        assert len(client.registry.entries("confirm")) == 3
        clock.advance(10)
        assert client.registry.get("confirm", "dead") is None
        assert client.registry.entries("confirm") == {"renewed": b"2", "lasting": b"1"}
        assert not client.registry.delete("confirm", "dead")
        broker.restart()
        assert client.registry.entries("confirm") == {"renewed": b"2", "lasting": b"1"}
        clock.advance(20)
        assert client.registry.entries("confirm") == {"lasting": b"1"}


def test_what_has_expired_is_taken_out_of_the_journal_s_state() -> None:
    clock = FakeClock()
    with ServedBroker(clock=clock) as broker, dmq.connect(broker.url) as client:
        client.registry.put("confirm", "dead", b"1", ttl=1)
        assert broker.broker.store.queries.keys.count == 1
        clock.advance(100)
        for _ in range(600):
            if not broker.broker.store.queries.keys.count:
                break
            client.registry.get("confirm", "dead")
            asyncio.run(asyncio.sleep(0.05))
        assert broker.broker.store.queries.keys.count == 0


def test_a_killed_broker_has_all_that_was_put(broker: TestBroker, client: Client) -> None:
    client.registry.put("confirm", "a", b"1", ttl=1000)
    client.registry.put("confirm", "b", b"2")
    client.registry.delete("confirm", "b")
    broker.kill()
    broker.start()
    assert client.registry.entries("confirm") == {"a": b"1"}


def test_a_full_space_refuses_more_but_lets_what_is_there_change(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_values, "KEYS_MAX", 2)
    monkeypatch.setattr(key_values, "BYTES_MAX", 1000)
    client.registry.put("n", "a", b"1")
    client.registry.put("n", "b", b"1")
    with pytest.raises(dmq.LimitReached, match="full"):
        client.registry.put("n", "c", b"1")
    client.registry.put("n", "a", b"2" * 900)
    with pytest.raises(dmq.LimitReached, match="full"):
        client.registry.put("n", "b", b"2" * 900)
    client.registry.delete("n", "a")
    client.registry.put("n", "c", b"1")
    assert client.registry.entries("n") == {"b": b"1", "c": b"1"}


def test_what_has_expired_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_values, "KEYS_MAX", 1)
    monkeypatch.setattr(key_values, "_LOOK_MS", 10**9)
    clock = FakeClock()
    with TestBroker(clock=clock) as broker:
        client = broker.connect()
        client.registry.put("n", "a", b"1", ttl=1)
        clock.advance(2)
        client.registry.put("n", "b", b"1")
        assert client.registry.entries("n") == {"b": b"1"}


def test_names_and_values_that_cannot_be_kept_are_refused(client: Client) -> None:
    with pytest.raises(dmq.InvalidName, match="namespace is text"):
        client.registry.put("", "a", b"")
    with pytest.raises(dmq.InvalidName, match="key is text"):
        client.registry.get("n", "x" * 256)
    with pytest.raises(dmq.InvalidSettings, match="at most 4096 bytes"):
        client.registry.put("n", "a", b"x" * 4097)
    with pytest.raises(dmq.InvalidSettings, match="ttl is in seconds"):
        client.registry.put("n", "a", b"x", ttl=0)


def test_the_asyncio_client_has_it_too(broker: TestBroker) -> None:
    async def talk() -> None:
        async with dmq.aio.connect(broker.url) as client:
            await client.registry.put("n", "a", "1", ttl=60)
            assert await client.registry.get("n", "a") == b"1"
            assert await client.registry.entries("n") == {"a": b"1"}
            assert await client.registry.delete("n", "a")
            assert await client.registry.get("n", "a") is None

    asyncio.run(talk())
