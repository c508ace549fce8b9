"""Who is who in a group: names that are used twice, bounds, and the places of broadcast members."""

from __future__ import annotations

import asyncio
import logging

import pytest

import dmq
import dmq.aio
from dmq.model import broadcast_name
from dmq.settings import StoreSettings
from dmq.testing import TestBroker
from tests.integration.broker_thread import ServedBroker
from tests.patience import eventually

WEEK = 168 * 3600


# --- one name, one client ---------------------------------------------------------------------------------------------


def test_a_client_that_comes_under_the_same_name_takes_over_and_the_first_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TestBroker() as broker, caplog.at_level(logging.WARNING, "dmq.client"):
        producer = broker.connect().producer()
        first = broker.connect(client_id="shop-1").consumer("orders", "billing", prefetch=10)
        producer.send("orders", b"a")
        assert next(first).body == b"a"
        second = broker.connect(client_id="shop-1").consumer("orders", "billing", prefetch=10)
        assert next(second).body == b"a", "what the first had is handed out again"
        with pytest.raises(dmq.SubscriptionSuperseded, match=r"another client.*'shop-1.1'.*client_id of its own"):
            next(first)
        assert any(record.message.startswith("subscription ended") for record in caplog.records)
        producer.send("orders", b"b")
        assert next(second).body == b"b"


def test_clients_that_take_over_from_each_other_all_the_time_are_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TestBroker() as broker, caplog.at_level(logging.WARNING, "dmq.broker"):
        broker.connect().producer().send("orders", b"a")
        clients = [broker.connect(client_id="shop-1") for _ in range(10)]
        assert [next(client.consumer("orders", "billing")).body for client in clients] == [b"a"] * 10
        lines = [record.message for record in caplog.records]
        assert lines == ["consumer taken over group=billing member=shop-1.1"]


def test_an_asyncio_consumer_is_told_too() -> None:
    async def check(url: str) -> None:
        async with (
            await dmq.aio.connect(url, client_id="shop-1") as one,
            await dmq.aio.connect(url, client_id="shop-1") as other,
        ):
            first, second = one.consumer("orders", "billing"), other.consumer("orders", "billing")
            waiting = asyncio.ensure_future(anext(first))
            await asyncio.sleep(0)
            await one.admin.topic("orders")
            taking = asyncio.ensure_future(anext(second))
            with pytest.raises(dmq.SubscriptionSuperseded, match="client_id"):
                await asyncio.wait_for(waiting, 30)
            taking.cancel()

    with TestBroker() as broker:
        broker.connect().admin.create_topic("orders")
        asyncio.run(check(broker.url))


def test_clients_that_do_not_say_have_names_of_their_own() -> None:
    with TestBroker() as broker:
        clients = [broker.connect(app="shop") for _ in range(3)]
        assert len({client.client_id for client in clients}) == 3
        producer = clients[0].producer()
        consumers = [client.consumer("orders", "billing", prefetch=1) for client in clients]
        producer.send_many("orders", [dmq.Message(b"%d" % i) for i in range(3)])
        assert {next(consumer).body for consumer in consumers} == {b"0", b"1", b"2"}


@pytest.mark.parametrize("what", ["topic", "group"])
def test_consumers_of_what_was_deleted_are_told(what: str) -> None:
    with TestBroker() as broker:
        client = broker.connect()
        client.producer().send("orders", b"a")
        consumer = client.consumer("orders", "billing")
        next(consumer).ack()
        if what == "topic":
            client.admin.delete_topic("orders")
        else:
            client.admin.delete_group("billing")
        with pytest.raises(dmq.UnknownTopic if what == "topic" else dmq.UnknownGroup, match="was deleted"):
            next(consumer)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_there_are_no_more_groups_than_allowed() -> None:
    with ServedBroker(auto_create=True, groups_max=2) as broker, dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        for name in ("one", "two"):
            client.admin.create_group(name, "orders")
        for refused in (
            lambda: client.admin.create_group("three", "orders"),
            lambda: client.consumer("orders", "three").pull(1),
            lambda: next(client.consumer("orders", "three")),
        ):
            with pytest.raises(dmq.LimitReached, match=r"broker.groups_max"):
                refused()
        assert len(client.consumer("orders", "two").pull(1)) == 1
        client.admin.delete_group("one")
        client.admin.create_group("three", "orders")


def test_there_are_no_more_topics_than_allowed() -> None:
    with ServedBroker(auto_create=True, topics_max=2) as broker, dmq.connect(broker.url) as client:
        client.producer().send("one", b"x")
        client.admin.create_topic("two")
        for refused in (
            lambda: client.admin.create_topic("three"),
            lambda: client.producer().send("three", b"x"),
        ):
            with pytest.raises(dmq.LimitReached, match=r"broker.topics_max"):
                refused()
        with pytest.raises(dmq.TopicExists):
            client.admin.create_topic("two")
        client.admin.delete_topic("one")
        client.producer().send("three", b"x")


# --- broadcast --------------------------------------------------------------------------------------------------------


def test_the_place_of_a_broadcast_member_is_kept_while_it_is_used_and_for_a_while_longer() -> None:
    with TestBroker() as broker:
        producer = broker.connect().producer()
        producer.send("orders", b"a")
        stays = broker.connect(client_id="stays").consumer("orders", "news", broadcast=True)
        next(stays).ack()
        with dmq.connect(broker.url, client_id="goes") as client:
            next(client.consumer("orders", "news", broadcast=True)).ack()
        kept = {broadcast_name("news", name) for name in ("stays", "goes")}
        server = broker._server
        assert server is not None
        store = server.broker.store
        eventually(lambda: set(store.queries.groups()) == kept)
        eventually(lambda: all(not c.group.members for (_, g), c in server.broker.channels.open.items() if "goes" in g))
        broker.clock.advance(60)
        eventually(lambda: broadcast_name("news", "goes") in server.broker.channels._broadcasts._away_since_ms)
        broker.clock.advance(WEEK - 61)
        with dmq.connect(broker.url, client_id="goes") as client:
            producer.send("orders", b"b")
            message = next(client.consumer("orders", "news", broadcast=True))
            assert message.body == b"b", "it goes on where it was"
            message.ack()
        eventually(lambda: all(not c.group.members for (_, g), c in server.broker.channels.open.items() if "goes" in g))
        broker.clock.advance(120)
        eventually(lambda: broadcast_name("news", "goes") in server.broker.channels._broadcasts._away_since_ms)
        broker.clock.advance(WEEK + 1)
        eventually(lambda: store.queries.groups() == [broadcast_name("news", "stays")])
        message = next(stays)
        assert message.body == b"b"


def test_a_broadcast_member_moves_itself_and_nobody_else() -> None:
    with TestBroker() as broker:
        operator = broker.connect()
        producer = operator.producer()
        for body in (b"a", b"b"):
            producer.send("orders", body)
        consumers = [
            broker.connect(client_id=name).consumer("orders", "news", broadcast=True) for name in ("one", "two")
        ]
        for consumer in consumers:
            for _ in range(2):
                next(consumer).ack()
        consumers[0].seek("earliest")
        assert {next(consumers[0]).body for _ in range(2)} == {b"a", b"b"}
        producer.send("orders", b"c")
        assert next(consumers[1]).body == b"c"
        with pytest.raises(dmq.InvalidRequest, match=r"broadcast group.*consumer.seek"):
            operator.admin.reset("orders", "news", "earliest")


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [0, 32 << 20])
def test_messages_that_are_looked_at_have_their_ids(cache_bytes: int) -> None:
    store = StoreSettings(read_cache_bytes=cache_bytes)
    with ServedBroker(auto_create=True, store=store) as broker, dmq.connect(broker.url) as client:
        producers = [client.producer() for _ in range(3)]
        receipts = [producers[i % 3].send("orders", b"%d" % i, key=f"k{i}", tag=f"t{i % 2}") for i in range(20)]
        by_body = {b"%d" % i: receipt.id for i, receipt in enumerate(receipts)}
        broker.restart()
        looked = client.admin.peek("orders", limit=100)
        assert {message.body: message.id for message in looked} == by_body
        tagged = client.admin.peek("orders", limit=100, tags="t1")
        assert {message.body: message.id for message in tagged} == {b"%d" % i: receipts[i].id for i in range(1, 20, 2)}
        read, _ = client.admin.read("orders", receipts[7].queue, receipts[7].offset, limit=1)
        assert [message.id for message in read] == [receipts[7].id]
        (found,) = client.admin.find("orders", key="k7")
        assert found.id == receipts[7].id


def test_many_at_once_make_no_more_than_allowed() -> None:
    async def create() -> tuple[list[object], list[object]]:
        async with dmq.aio.connect(broker.url) as client:
            names = [f"{number:02}" for number in range(40)]
            topics = await asyncio.gather(
                *(client.admin.create_topic(f"t-{name}") for name in names), return_exceptions=True
            )
            groups = await asyncio.gather(
                *(client.admin.create_group(f"g-{name}", "orders") for name in names), return_exceptions=True
            )
            return [*topics], [*groups]

    with ServedBroker(topics_max=11, groups_max=7) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders")
        topics, groups = asyncio.run(create())
        assert [type(error) for error in topics if isinstance(error, BaseException)] == [dmq.LimitReached] * 30
        assert [type(error) for error in groups if isinstance(error, BaseException)] == [dmq.LimitReached] * 33
        assert len(client.admin.topics()) == 11
        assert len(client.admin.groups()) == 7
