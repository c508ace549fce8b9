"""A forked child has none of its parent's clients: it is told to connect, and the parent notices nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq


def in_child(work: Callable[[], None]) -> str:
    """What went wrong with some work in a forked child; nothing if all was well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        told = stream.read().decode()
    os.waitpid(child, 0)
    return told


def test_a_child_is_told_to_connect_again_whatever_it_asks(client: dmq.Client) -> None:
    producer = client.producer()
    producer.send_many("orders", [dmq.Message(b"%d" % n) for n in range(10)])
    pushed, pulled = client.consumer("orders", "pushed"), client.consumer("orders", "pulled")
    next(pushed)
    pulled.pull(1)
    calls: list[Callable[[], object]] = [
        lambda: producer.send("orders", b"x"),
        lambda: producer.send_async("orders", b"x"),
        lambda: producer.send_many("orders", [dmq.Message(b"x")]),
        lambda: next(pushed),
        lambda: pulled.pull(1),
        lambda: client.admin.topics(),
        lambda: client.producer(),
    ]

    def ask() -> None:
        for call in calls:
            with pytest.raises(dmq.NotConnected, match="connect again in this one"):
                call()
        client.close()

    assert in_child(ask) == ""
    # The connection, its numbers and what is prefetched are the parent's as before.
    assert producer.send("orders", b"more").offset >= 0
    pulled.pull(1).ack()
    next(pushed).ack()
    messages = client.admin.topic("orders").messages
    assert messages == 11


def test_a_child_leaves_the_spool_to_its_parent(client: dmq.Client, tmp_path: Path) -> None:
    with client.producer(spool=tmp_path / "spool") as producer:
        producer.send("orders", b"one")
        assert in_child(producer.close) == ""
        with pytest.raises(dmq.DirectoryInUse):
            client.producer(spool=tmp_path / "spool")
        assert producer.send("orders", b"two").durability == "flushed"


def test_a_child_that_connects_by_itself_works(client: dmq.Client, broker: object) -> None:
    url = broker.url  # type: ignore[attr-defined]

    def work() -> None:
        with dmq.connect(url) as own:
            own.producer().send("orders", b"from the child")

    assert in_child(work) == ""
    assert client.admin.topic("orders").messages == 1
