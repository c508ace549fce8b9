"""The straight path of a lone send: a PRODUCE like any other, and only the plain answer ends it there."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import dmq
from dmq.client.producer.straight_path import reply_of
from dmq.errors import NotConnected, UnknownTopic
from dmq.model import Durability, DurabilityName
from dmq.protocol.commands import Command, error_frame, produce_answer, response_head
from dmq.protocol.frame import seal_whole
from dmq.protocol.produce import ProduceReply
from dmq.testing import TestBroker
from tests.patience import eventually


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        with running.connect() as client:
            client.admin.create_topic("orders", queues=4)
        yield running


def test_only_the_plain_answer_to_the_request_is_taken() -> None:
    answer = seal_whole(produce_answer(7, 1, 2, 3, durability=1, is_duplicate=False))
    assert reply_of(answer, 7) == (1, 2, 1)
    longer = seal_whole(response_head(Command.PRODUCE, ProduceReply(1, 2, 3, Durability.STORED), 7))
    assert reply_of(longer, 7) == reply_of(answer, 7), "MessagePack has several ways to say a number"
    assert reply_of(answer, 8) is None
    refused = seal_whole(error_frame(UnknownTopic("no"), Command.PRODUCE, 7))
    for data in (b"", answer[:10], answer[:-1], answer + answer, refused, answer[1:]):
        assert reply_of(data, 7) is None
    for bit in range(8 * len(answer)):
        turned = bytearray(answer)
        turned[bit >> 3] ^= 1 << (bit & 7)
        assert reply_of(bytes(turned), 7) is None, bit


@pytest.mark.parametrize("durability", ["stored", "flushed"])
def test_both_ways_send_the_same_and_get_the_same(broker: TestBroker, durability: DurabilityName) -> None:
    with broker.connect() as client:
        for topic in (f"on-{durability}", f"off-{durability}"):
            client.admin.create_topic(topic, queues=1)
        on, off = client.producer(), client.producer(straight=False)
        found = []
        for producer, topic in ((on, f"on-{durability}"), (off, f"off-{durability}")):
            receipts = [
                producer.send(topic, body, key=key, tag=tag, properties=properties, durability=durability)
                for body in (b"", b"body", b"x" * 5000)
                for key, tag, properties in ((None, None, None), ("k", "t", {"a": "1"}), ("ü", None, None))
            ]
            stored = client.admin.peek(topic, queue=0)
            assert [record.offset for record in stored] == [receipt.offset for receipt in receipts]
            assert [record.id for record in stored] == [receipt.id for receipt in receipts]
            found.append(
                [
                    (receipt.queue, receipt.offset, receipt.durability, record.body, record.key, record.tag)
                    for receipt, record in zip(receipts, stored, strict=True)
                ]
            )
        assert found[0] == found[1]
        assert (on.straight.taken, on.straight.late) == (5, 0), (
            "a key that is not ASCII, and the first, take the general way"
        )
        assert off.straight.taken == 0


def _tell(told: list[dmq.Receipt | None], receipt: dmq.Receipt | None, _: object) -> None:
    told.append(receipt)


def _was_told(told: list[dmq.Receipt | None], receipt: dmq.Receipt) -> bool:
    return told[-1:] == [receipt]


def test_a_lone_send_async_leaves_by_it_and_is_a_batch_like_any_other(broker: TestBroker) -> None:
    with broker.connect() as client:
        for topic in ("async-on", "async-off"):
            client.admin.create_topic(topic, queues=1)
        found = []
        for topic, is_on in (("async-on", True), ("async-off", False)):
            producer = client.producer(straight=is_on)
            producer.send(topic, b"first", durability="stored")
            told: list[dmq.Receipt | None] = []
            for body, key in ((b"", None), (b"body", "k"), (b"x" * 9000, "k"), (b"body", "\u00fc")):
                call = partial(_tell, told)
                receipt = producer.send_async(topic, body, key=key, durability="stored", on_delivery=call).result(30)
                eventually(partial(_was_told, told, receipt))
                found.append((is_on, receipt.queue, receipt.offset, receipt.durability))
            records = client.admin.peek(topic, queue=0)
            assert [record.offset for record in records] == [0, 1, 2, 3, 4]
            assert [record.id for record in records[1:]] == [receipt.id for receipt in told if receipt is not None]
            assert producer.straight.taken == (2 if is_on else 0), "neither a large body nor such a key goes by it"
        assert [one[1:] for one in found[:4]] == [one[1:] for one in found[4:]]


def test_an_answer_that_comes_at_once_is_told_off_the_callers_thread(broker: TestBroker) -> None:
    with broker.connect() as client:
        producer, names = client.producer(), list[str]()
        producer.send("orders", b"first", durability="stored")
        connection = producer._router.link_for("orders")
        assert connection is not None
        write = connection._write

        def write_and_wait(buffers: Any, **how: Any) -> None:
            write(buffers, **how)
            eventually(lambda: connection.outstanding == 0)

        connection._write = write_and_wait  # type: ignore[method-assign]
        producer.send_async(
            "orders", b"x", durability="stored", on_delivery=lambda *_: names.append(threading.current_thread().name)
        )
        eventually(lambda: bool(names))
        assert producer.straight.taken == 1
        assert names[0].endswith("-callbacks")


def test_a_lone_send_async_that_is_refused_or_loses_its_connection_is_sent_again(broker: TestBroker) -> None:
    with broker.connect() as client:
        client.admin.create_topic("async-closed", queues=1)
        producer = client.producer(retries=0)
        producer.send("async-closed", b"x", durability="stored")
        client.admin.update_topic("async-closed", can_produce=False)
        with pytest.raises(dmq.NotAllowed):
            producer.send_async("async-closed", b"x", durability="stored").result(timeout=30)
        client.admin.update_topic("async-closed", can_produce=True)
        connection = producer._router.link_for("async-closed")
        assert connection is not None
        connection._write = lambda buffers, **_: connection.close(NotConnected("cut"))  # type: ignore[method-assign]
        taken = producer.straight.taken
        future = producer.send_async("async-closed", b"y", durability="stored")
        assert producer.straight.taken == taken + 1
        assert future.result(timeout=30).offset == 1
        assert [record.body for record in client.admin.peek("async-closed", queue=0)] == [b"x", b"y"]


def test_a_refusal_takes_the_general_way_and_is_told(broker: TestBroker) -> None:
    with broker.connect() as client:
        client.admin.create_topic("closed", queues=1)
        producer = client.producer(retries=0)
        producer.send("closed", b"x")
        client.admin.update_topic("closed", can_produce=False)
        with pytest.raises(dmq.NotAllowed):
            producer.send("closed", b"x")
        assert producer.straight.late == 1
        with pytest.raises(dmq.NotAllowed) as refused:
            producer.send_many("closed", [dmq.Message(b"x"), dmq.Message(b"x")])
        assert refused.value.detail["stored"] == 0
        assert producer.straight.late == 2
        client.admin.update_topic("closed", can_produce=True)
        assert producer.send("closed", b"y").offset == 1


def test_threads_that_meet_get_each_its_own_receipt(broker: TestBroker) -> None:
    with broker.connect() as client:
        producer = client.producer()
        receipts: list[tuple[int, int, dmq.Receipt]] = []
        producer.send("orders", b"first", durability="stored")

        def send(number: int) -> None:
            for at in range(50):
                receipt = producer.send("orders", b"%d %d" % (number, at), durability="stored")
                receipts.append((number, at, receipt))

        def send_many(number: int) -> None:
            for at in range(0, 50, 5):
                messages = [dmq.Message(b"%d %d" % (number, at + more)) for more in range(5)]
                found = producer.send_many("orders", messages, durability="stored")
                receipts.extend((number, at + more, receipt) for more, receipt in enumerate(found))

        threads = [threading.Thread(target=send_many if number % 2 else send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({receipt.id for _, _, receipt in receipts}) == 400
        for number, at, receipt in receipts:
            ((record,), _) = client.admin.read("orders", receipt.queue, receipt.offset, limit=1)
            assert (record.id, record.body) == (receipt.id, b"%d %d" % (number, at))


@pytest.mark.parametrize("count", [1, 2])
def test_a_send_that_a_signal_ends_while_it_waits_is_sent_again(broker: TestBroker, count: int) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    topic = f"stopped-{count}"
    with broker.connect() as client:
        client.admin.create_topic(topic, queues=1)
        producer = client.producer()
        producer.send(topic, b"first", durability="stored")
        link = producer._router.link_for(topic)
        assert link is not None
        send: Callable[[], object] = partial(producer.send, topic, b"second", durability="stored")
        if count > 1:
            send = partial(producer.send_many, topic, [dmq.Message(b"second")] * count, durability="stored")
        deaf, peer = socket.socketpair()
        wire: Any = link._wire
        before, own = signal.signal(signal.SIGALRM, stop), wire.sock
        try:
            # What is sent arrives nowhere, and no answer comes.
            wire.sock, wire.descriptor, wire._send = deaf, deaf.fileno(), deaf.send
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Stop):
                send()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            own.close()  # the connection is broken off, and closes the other
            peer.close()
        assert producer.send(topic, b"third", durability="stored").offset == count + 1, "and what was stopped is stored"


def test_a_send_that_a_signal_ends_leaves_the_producer_in_order(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmq.client.connection.connection._ask_now", None)  # which asks and waits in one call

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    with broker.connect() as client:
        producer = client.producer()
        producer.send("orders", b"first", durability="stored")
        before = signal.signal(signal.SIGUSR1, stop)
        try:

            def interrupt() -> None:
                producer.send("orders", b"over a connection that works", durability="stored")
                link = producer._router.link_for("orders")
                assert link is not None
                wire: Any = link._wire
                wire.answer = lambda: os.kill(os.getpid(), signal.SIGUSR1)

            interrupt()
            with pytest.raises(Stop):
                producer.send("orders", b"second", durability="stored")
            interrupt()  # over another connection: nobody knows what was read of the one before
            with pytest.raises(Stop):
                producer.send_many("orders", [dmq.Message(b"and"), dmq.Message(b"more")], durability="stored")
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert producer.send("orders", b"third", durability="stored").offset >= 0
        producer.flush(timeout=10)
        assert (producer._core.accumulator.messages, producer._core.accumulator.bytes) == (0, 0)
