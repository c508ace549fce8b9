"""Calls during a restart of the broker: they are asked again where that does no harm, and wait until it is back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import dmq
import dmq.aio
from dmq.client.connection.failover import BREAKS_MAX
from dmq.protocol import Command, Frame, Header
from dmq.protocol.admin import TopicListReply
from tests.integration.client.servers import Peer, RunningBroker, usual


def answer_only_from(count: int, command: Command, answer: Header) -> Peer:
    """A peer that breaks all connections instead of answering a command, until it is asked that often."""

    def take(peer: Peer, frame: Frame) -> Header | Exception | None:
        if frame.command != command:
            return usual(frame)
        if asked(peer, command) < count:
            peer.cut()
            return None
        return answer

    return Peer(take)


def asked(peer: Peer, command: Command) -> int:
    return sum(frame.command == command for frame in peer.frames)


@contextmanager
def back_after(seconds: float, peer: Peer) -> Iterator[None]:
    """The broker is away, and comes back on its port."""
    peer.close()
    again: list[Peer] = []
    timer = threading.Timer(seconds, lambda: again.append(Peer(port=peer.port)))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        again[0].close()


def test_a_connection_that_broke_while_idle_is_no_ones_problem() -> None:
    with Peer() as peer, dmq.connect(peer.url) as client:
        for _ in range(20):
            peer.cut()
            assert client.admin.topic("t").name == "t"


def test_a_question_is_asked_again_when_the_connection_breaks_before_its_answer() -> None:
    with answer_only_from(3, Command.TOPIC_LIST, TopicListReply([])) as peer, dmq.connect(peer.url) as client:
        assert client.admin.topics() == []
        assert asked(peer, Command.TOPIC_LIST) == 3


def test_what_is_not_safe_to_repeat_is_asked_once_and_says_what_is_known() -> None:
    with answer_only_from(9, Command.TOPIC_DELETE, Header()) as peer, dmq.connect(peer.url) as client:
        with pytest.raises(dmq.NotConnected, match="whether it was done is not known: look, then try again"):
            client.admin.delete_topic("t")
        assert asked(peer, Command.TOPIC_DELETE) == 1


def test_a_call_that_breaks_every_connection_is_given_up() -> None:
    with answer_only_from(999, Command.TOPIC_LIST, Header()) as peer, dmq.connect(peer.url) as client:
        client._router.home._pause = lambda seconds: None  # type: ignore[method-assign]
        with pytest.raises(dmq.NotConnected, match=f"broke {BREAKS_MAX} times"):
            client.admin.topics()
        assert asked(peer, Command.TOPIC_LIST) == BREAKS_MAX


def test_a_call_waits_until_the_broker_is_back() -> None:
    peer = Peer()
    with dmq.connect(peer.url) as client, back_after(0.5, peer):
        assert client.admin.topic("t").name == "t"


def test_with_a_timeout_a_call_raises_while_the_broker_is_away() -> None:
    peer = Peer()
    with dmq.connect(peer.url, timeout=0.3) as client:
        peer.close()
        with pytest.raises(dmq.NotConnected, match="no broker could be reached"):
            client.admin.topic("t")


@pytest.mark.parametrize("refusal", [dmq.Busy("full", retry_after_ms=20), dmq.BrokerStopping("it stops")])
def test_a_refusal_for_the_moment_is_waited_out(refusal: dmq.DMQError) -> None:
    def answer(peer: Peer, frame: Frame) -> Header | Exception | None:
        return refusal if asked(peer, Command.TOPIC_DESCRIBE) < 3 else usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        assert client.admin.topic("t").name == "t"
        assert asked(peer, Command.TOPIC_DESCRIBE) == 3


def test_the_first_send_to_a_topic_waits_until_the_broker_is_back() -> None:
    peer = Peer()
    with dmq.connect(peer.url) as client, back_after(0.5, peer), client.producer(timeout=None) as producer:
        assert producer.send("t", b"x").topic == "t"


def test_a_send_to_a_broker_that_stops_waits_until_it_is_back() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | Exception | None:
        return dmq.BrokerStopping("it stops") if 0 < len(peer.produced()) < 6 else usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        assert client.producer(timeout=120, retries=3).send("t", b"x").topic == "t"
        assert len(peer.produced()) == 6


def test_asyncio_asks_again_too() -> None:
    async def main() -> None:
        async with dmq.aio.connect(peer.url) as client:
            assert await client.admin.topics() == []
            with pytest.raises(dmq.NotConnected, match="whether it was done is not known"):
                await client.admin.delete_topic("t")
        with pytest.raises(dmq.NotConnected, match="closed"):
            await client.admin.topics()

    with answer_only_from(3, Command.TOPIC_LIST, TopicListReply([])) as peer:
        taken = peer._answer
        assert taken is not None
        peer._answer = lambda peer, frame: peer.cut() if frame.command == Command.TOPIC_DELETE else taken(peer, frame)
        asyncio.run(main())
        assert asked(peer, Command.TOPIC_LIST) == 3


def test_closing_the_client_ends_a_call_that_waits() -> None:
    peer = Peer()
    client = dmq.connect(peer.url)
    peer.close()
    threading.Timer(0.3, client.close).start()
    with pytest.raises(dmq.NotConnected, match="closed"):
        client.admin.topics()


def test_a_seek_during_a_restart_moves_the_group_once_and_loses_nothing(broker: RunningBroker) -> None:
    with dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        client.producer().send_many("orders", [dmq.Message(b"%d" % number) for number in range(50)])
        with client.consumer("orders", group="billing", prefetch=20) as consumer:
            for _ in range(30):
                next(consumer).ack()
            broker.stop()
            timer = threading.Timer(0.3, broker.start)
            timer.start()
            consumer.seek("earliest")
            timer.join()
            bodies: list[int] = []
            deadline = time.monotonic() + 120
            while len(set(bodies)) < 50:
                assert time.monotonic() < deadline, sorted(set(range(50)) - set(bodies))
                message = next(consumer)
                bodies.append(int(message.body))
                assert message.attempt == 1
                message.ack()
