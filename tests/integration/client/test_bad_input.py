"""What a program gets wrong: each raises the right class at once, with one sentence that says what to do."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
import dmq.aio
from dmq.broker.server import BrokerServer
from dmq.protocol import Command, decode_response
from dmq.protocol.session import Hello
from dmq.settings import BrokerSettings, Settings
from dmq.testing.processes import free_port
from tests.integration.client.servers import RunningBroker
from tests.integration.frame_client import RawClient
from tests.patience import eventually

LARGE = os.urandom(5 << 20)

Case = tuple[Callable[[dmq.Client], object], type[dmq.DMQError], str]

CASES: dict[str, Case] = {
    "send to an unknown topic": (lambda c: c.producer().send("nosuch", b"x"), dmq.UnknownTopic, "create it first"),
    "send many to an unknown topic": (
        lambda c: c.producer().send_many("nosuch", [dmq.Message(b"x")]), dmq.UnknownTopic, "create it first",
    ),
    "iterate over an unknown topic": (
        lambda c: next(c.consumer("nosuch", group="g")), dmq.UnknownTopic, "create it first",
    ),
    "pull from an unknown topic": (
        lambda c: c.consumer("nosuch", group="g").pull(1), dmq.UnknownTopic, "create it first",
    ),
    "lag in an unknown topic": (lambda c: c.admin.lag("nosuch", "g"), dmq.UnknownTopic, "create it first"),
    "delete an unknown topic": (lambda c: c.admin.delete_topic("nosuch"), dmq.UnknownTopic, "nosuch"),
    "lag of an unknown group": (lambda c: c.admin.lag("orders", "nosuch"), dmq.UnknownGroup, "check the name"),
    "an unknown group": (lambda c: c.admin.group("nosuch"), dmq.UnknownGroup, "check the name"),
    "reset an unknown group": (
        lambda c: c.admin.reset("orders", "nosuch", to="latest"), dmq.UnknownGroup, "check the name",
    ),
    "a group that cannot be": (lambda c: c.consumer("orders", group="a b"), dmq.InvalidName, "use letters, digits"),
    "no group": (lambda c: c.consumer("orders", group=""), dmq.InvalidName, "use letters, digits"),
    "a large body": (lambda c: c.producer().send("orders", LARGE), dmq.MessageTooLarge, "send less at a time"),
    "a large body among many": (
        lambda c: c.producer().send_many("orders", [dmq.Message(b""), dmq.Message(LARGE)]),
        dmq.MessageTooLarge, "send less at a time",
    ),
    "a large key": (lambda c: c.producer().send("orders", b"", key="k" * 100_000), dmq.InvalidMessage, "in the body"),
    "an object that cannot be a body": (
        lambda c: c.producer().send("orders", {1, 2}), dmq.InvalidMessage, "encode it first",  # type: ignore[arg-type]
    ),
    "a flush that waits for text": (
        lambda c: c.producer().flush("soon"), dmq.InvalidSettings, "time in seconds",  # type: ignore[arg-type]
    ),
    "a durability nobody has": (
        lambda c: c.producer().send("orders", b"", durability="eternal"),  # type: ignore[arg-type]
        dmq.InvalidMessage, "use none, stored",
    ),
    "consumed by nobody": (
        lambda c: c.producer().send("orders", b"", durability="consumed"), dmq.InvalidMessage, "needs consumed_by",
    ),
    "a topic's unknown setting": (
        lambda c: c.admin.create_topic("new", quues=3), dmq.InvalidSettings, "no setting 'quues': there are queues",
    ),
    "a topic without queues": (lambda c: c.admin.create_topic("new", queues=0), dmq.InvalidSettings, "1 to 255"),
    "a topic with fewer queues": (
        lambda c: c.admin.update_topic("orders", queues=1), dmq.InvalidSettings, "it can get more",
    ),
    "a topic that is there": (lambda c: c.admin.create_topic("orders"), dmq.TopicExists, "choose another name"),
    "a place that is none": (
        lambda c: c.admin.reset("orders", "g", to="yesterday"), dmq.InvalidSettings, "use 'earliest', 'latest'",
    ),
    "no text where None means any": (
        lambda c: c.admin.delete_dead_letters(group="g", topic=0),  # type: ignore[arg-type]
        dmq.InvalidSettings, "topic is text, or None for any, not 0",
    ),
    "a reason that is a number": (
        lambda c: c.admin.dead_letters(reason=5), dmq.InvalidSettings, "reason is text",  # type: ignore[arg-type]
    ),
    "a group of any name but None": (
        lambda c: c.admin.delete_group("g", []), dmq.InvalidSettings, "topic is text",  # type: ignore[arg-type]
    ),
    "a limit that is none": (
        lambda c: c.admin.delays(limit=None), dmq.InvalidSettings, "limit is a whole number",  # type: ignore[arg-type]
    ),
    "a limit of dead letters that is none": (
        lambda c: c.admin.dead_letters(limit="5"),  # type: ignore[arg-type]
        dmq.InvalidSettings, "limit is a whole number",
    ),
    "a limit of a search that is none": (
        lambda c: c.admin.find("orders", key="k", limit="5"),  # type: ignore[arg-type]
        dmq.InvalidSettings, "limit is a whole number from 0 to 10000",
    ),
    "a limit of a search that is too large": (
        lambda c: c.admin.find("orders", key="k", limit=10_001), dmq.InvalidSettings, "0 to 10000, not 10001",
    ),
    "a key that is a number": (
        lambda c: c.admin.find("orders", key=5), dmq.InvalidSettings, "key is a text, not 5",  # type: ignore[arg-type]
    ),
    "a limit of a look below none": (
        lambda c: c.admin.peek("orders", limit=-1), dmq.InvalidSettings, "limit is a whole number",
    ),
    "a queue that no topic has": (
        lambda c: c.admin.peek("orders", queue=255), dmq.InvalidSettings, "queue is a whole number from 0 to 254",
    ),
    "offsets of no queue": (
        lambda c: c.admin.offsets("orders", queue="0"),  # type: ignore[arg-type]
        dmq.InvalidSettings, "queue is a whole number",
    ),
    "a reset of no queue": (
        lambda c: c.admin.reset("orders", "g", to="latest", queue=-1), dmq.InvalidSettings, "queue is a whole number",
    ),
    "an offset that is none": (
        lambda c: c.admin.read("orders", 0, -1), dmq.InvalidSettings, "offset is a whole number from 0",
    ),
    "a group without a name": (lambda c: c.admin.group(""), dmq.InvalidName, "use letters, digits"),
    "lag of a number": (
        lambda c: c.admin.lag("orders", 5), dmq.InvalidName, "group name is text, not int",  # type: ignore[arg-type]
    ),
    "lag in a number": (
        lambda c: c.admin.lag(None, "g"), dmq.InvalidName, "topic name is text",  # type: ignore[arg-type]
    ),
    "delete a group of a long name": (lambda c: c.admin.delete_group("g" * 300), dmq.InvalidName, "shorten it"),
    # bytes(5) would be five zeros.
    "a value that is a number": (
        lambda c: c.registry.put("n", "k", 5), dmq.InvalidSettings, "a value is bytes or text",  # type: ignore[arg-type]
    ),
    "a value that is a list": (
        lambda c: c.registry.put("n", "k", [1]), dmq.InvalidSettings, "encode it first",  # type: ignore[arg-type]
    ),
    "a value that is not UTF-8": (
        lambda c: c.registry.put("n", "k", "a\ud800"), dmq.InvalidSettings, "must be UTF-8",
    ),
    "a window that is none": (lambda c: c.producer(on_full="explode"), dmq.InvalidSettings, "'block', 'raise'"),  # type: ignore[arg-type]
}  # fmt: skip


def says(error: dmq.DMQError, kind: type[dmq.DMQError], words: str) -> None:
    assert type(error) is kind
    assert words in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("case", CASES)
def test_a_call_that_cannot_succeed_says_what_to_do(client: dmq.Client, case: str) -> None:
    call, kind, words = CASES[case]
    with pytest.raises(dmq.DMQError) as caught:
        call(client)
    says(caught.value, kind, words)
    assert [topic.name for topic in client.admin.topics()] == ["orders"], "looking makes nothing"
    assert client.admin.groups() == []


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("localhost:9611", dmq.InvalidSettings, "write dmq://host:port"),
        ("http://localhost:9611", dmq.InvalidSettings, "write dmq://host:port"),
        ("dmq://", dmq.InvalidSettings, "write dmq://host:port"),
        ("dmq://localhost:99999", dmq.InvalidSettings, "1 to 65535"),
        ("", dmq.InvalidSettings, "write dmq://host:port"),
        ("dmq://127.0.0.1:PORT", dmq.NotConnected, "start a broker there, or check the URL"),
        ("dmq://127.0.0.1:PORT,localhost:PORT", dmq.NotConnected, "start one, or check the URL"),
        ("dmq://no.such.host.invalid:9611", dmq.NotConnected, "check the URL"),
    ],
)
def test_a_wrong_address_says_what_to_do(url: str, kind: type[dmq.DMQError], words: str) -> None:
    url = url.replace("PORT", str(free_port()))
    with pytest.raises(dmq.DMQError) as caught:
        dmq.connect(url)
    says(caught.value, kind, words)

    async def connect() -> None:
        async with dmq.aio.connect(url):
            pass

    with pytest.raises(dmq.DMQError) as caught:
        asyncio.run(connect())
    says(caught.value, kind, words)


def test_a_client_of_another_version_is_told_to_upgrade(broker: RunningBroker) -> None:
    with RawClient(broker.port, None) as stranger:
        answer = stranger.ask(Command.HELLO, Hello("shop", version_min=90, version_max=91))
        with pytest.raises(dmq.VersionMismatch) as caught:
            decode_response(answer)
        says(caught.value, dmq.VersionMismatch, "upgrade")
        assert stranger.read() is None


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    async def start(port: int) -> None:
        settings = BrokerSettings(port=port, metrics_port=0, telnet_port=None, data=str(tmp_path / "data"))
        server = BrokerServer(Settings(broker=settings))
        try:
            await server.start()
        finally:
            await server.stop(0.0)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(dmq.PortTaken) as caught:
            asyncio.run(start(port))
    says(
        caught.value,
        dmq.PortTaken,
        f"port {port} on 127.0.0.1 is taken: stop the program that has it, or choose another port",
    )


def test_none_stands_for_any_wherever_a_name_may_be_left_out(client: dmq.Client) -> None:
    admin = client.admin
    with client.producer() as producer:
        receipt = producer.send("orders", b"x")
    # Before it is a dead letter as well.
    assert [found.body for found in admin.find(None, id=receipt.id)] == [b"x"]
    with client.consumer("orders", group="g", tags=None) as consumer:
        (message,) = consumer.pull(1, wait=5)
        message.reject(reason=None)  # type: ignore[arg-type]
    assert [group.name for group in admin.groups(None)] == ["g"]
    assert not admin.delays(None)
    assert not admin.transactions(None)
    assert not admin.limits(None, None)
    assert [found.body for found in admin.peek("orders", tags=None)] == [b"x"]
    assert admin.why(receipt.id, group=None).groups
    assert admin.trace(receipt.id, group=None).steps
    limit = admin.set_limit(topic=None, app="shop", messages=5)
    assert limit is not None
    assert (limit.topic, limit.app) == ("", "shop")
    eventually(lambda: admin.dead_letters(topic=None, group="g", reason=None))
    assert [letter.last_error for letter in admin.dead_letters()] == ["REJECTED"], "no reason was given"


@pytest.mark.parametrize("reason", [{"code": 7}, ["a"], ValueError("a"), 7])
def test_a_reason_that_is_no_text_is_told_as_one(client: dmq.Client, reason: object) -> None:
    with client.producer() as producer:
        producer.send("orders", b"x")
    with client.consumer("orders", group="g") as consumer:
        consumer.pull(1, wait=5)[0].reject(reason=reason)  # type: ignore[arg-type]
        eventually(client.admin.dead_letters)
        assert [letter.last_error for letter in client.admin.dead_letters()] == [str(reason)]


def test_a_reason_that_cannot_be_shown_costs_no_other_word(client: dmq.Client) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("nothing to say")

    with client.producer() as producer:
        producer.send_many(
            "orders", [dmq.Message(b"%d" % number, business_id="b", ordered=True) for number in range(4)]
        )
    with client.consumer("orders", group="g") as consumer:
        first, second, third, fourth = consumer.pull(4, wait=5)
        first.ack()
        second.reject(reason=Silent())  # type: ignore[arg-type]
        third.nack(delay=0, reason=Silent())  # type: ignore[arg-type]
        fourth.ack()
        (again,) = consumer.pull(1, wait=5)
        assert again.body == b"2"
        again.ack()
        eventually(lambda: client.admin.lag("orders", "g").total == 0)
    eventually(client.admin.dead_letters)
    assert [letter.last_error for letter in client.admin.dead_letters()] == ["a Silent that cannot be shown"]
