"""Sending to a real broker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest

import dmq
from dmq.model import DurabilityName
from dmq.protocol import Command, Frame, Header
from tests.integration.client.servers import Peer, RunningBroker, usual
from tests.patience import PATIENCE_S


class Order(msgspec.Struct):
    number: int


def everything(client: dmq.Client, topic: str = "orders") -> list[bytes]:
    return [message.body for message in client.admin.peek(topic, limit=60_000)]


def test_a_message_is_where_its_receipt_says(client: dmq.Client) -> None:
    with client.producer() as producer:
        receipt = producer.send("orders", b"hello", key="o-1", tag="created", business_id="u-7", priority=7)
    assert (receipt.topic, receipt.durability) == ("orders", "flushed")
    (found,) = client.admin.find("orders", key="o-1")
    assert (found.queue, found.offset, found.body) == (receipt.queue, receipt.offset, b"hello")
    assert (found.tag, found.business_id, found.priority, found.app) == ("created", "u-7", 7, "shop")
    (same,) = client.admin.find(id=receipt.id)
    assert same.offset == receipt.offset


@pytest.mark.parametrize("durability", ["stored", "flushed"])
def test_many_messages_get_a_receipt_each(client: dmq.Client, durability: DurabilityName) -> None:
    messages = [dmq.Message(b"%d" % number, key=f"k{number}") for number in range(5000)]
    receipts = client.producer().send_many("orders", messages, durability=durability)
    assert len(receipts) == 5000
    assert len({receipt.id for receipt in receipts}) == 5000
    assert len({(receipt.queue, receipt.offset) for receipt in receipts}) == 5000
    for number in (0, 2047, 2048, 4999):
        (found,) = client.admin.find("orders", key=f"k{number}")
        assert (found.queue, found.offset) == (receipts[number].queue, receipts[number].offset)
    assert receipts[-1] == receipts[4999]
    assert receipts[1:3] == [receipts[1], receipts[2]]


def test_ordered_messages_of_one_business_id_stay_together_and_in_order(client: dmq.Client) -> None:
    messages = [dmq.Message(b"%d" % number, business_id=f"u-{number % 7}", ordered=True) for number in range(700)]
    receipts = client.producer().send_many("orders", messages)
    for user in range(7):
        mine = [receipts[number] for number in range(user, 700, 7)]
        assert len({receipt.queue for receipt in mine}) == 1
        assert [receipt.offset for receipt in mine] == sorted(receipt.offset for receipt in mine)


def test_async_sends_call_back_off_the_callers_thread(client: dmq.Client) -> None:
    producer = client.producer()
    told: list[tuple[object, object, str]] = []
    futures = [
        producer.send_async(
            "orders",
            b"%d" % number,
            durability="stored",
            on_delivery=lambda receipt, error: told.append((receipt, error, threading.current_thread().name)),
        )
        for number in range(300)
    ]
    producer.flush(10)
    assert all(future.done() for future in futures)
    assert sorted(everything(client)) == sorted(b"%d" % number for number in range(300))
    producer.close()
    deadline = time.monotonic() + 120
    while len(told) < 300 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {name for _, _, name in told} == {"dmq-shop-callbacks"}
    assert all(error is None for _, error, _ in told)


def test_threads_share_a_producer(client: dmq.Client) -> None:
    producer = client.producer()
    receipts: list[dmq.Receipt] = []

    def work(name: int) -> None:
        for number in range(50):
            if number % 3:
                receipts.append(producer.send("orders", b"%d-%d" % (name, number), durability="stored"))
            else:
                receipts.append(producer.send_async("orders", b"%d-%d" % (name, number)).result(PATIENCE_S))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({receipt.id for receipt in receipts}) == 400
    assert len(set(everything(client))) == 400


def test_typed_bodies_are_json(client: dmq.Client) -> None:
    client.producer().send("orders", Order(5))
    assert everything(client) == [b'{"number":5}']


def test_durability_none_arrives_as_well(client: dmq.Client) -> None:
    producer = client.producer()
    for number in range(100):
        producer.send("orders", b"%d" % number, durability="none")
    producer.send("orders", b"last", durability="stored")
    assert len(everything(client)) == 101


def test_an_unknown_topic_is_told_at_once(client: dmq.Client) -> None:
    producer = client.producer()
    with pytest.raises(dmq.UnknownTopic, match="nowhere"):
        producer.send("nowhere", b"x")
    with pytest.raises(dmq.UnknownTopic):
        producer.send_async("nowhere", b"x")
    with pytest.raises(dmq.InvalidName):
        producer.send("no where", b"x")


def test_a_deleted_topic_is_noticed(client: dmq.Client) -> None:
    producer = client.producer()
    producer.send("orders", b"x")
    client.admin.delete_topic("orders")
    with pytest.raises(dmq.UnknownTopic):
        producer.send("orders", b"x")
    client.admin.create_topic("orders", queues=2)
    assert producer.send("orders", b"x").queue < 2


def test_bad_messages_raise_at_their_send(client: dmq.Client) -> None:
    producer = client.producer()
    with pytest.raises(dmq.MessageTooLarge):
        producer.send_async("orders", os.urandom(5 << 20))
    with pytest.raises(dmq.InvalidMessage, match="object"):
        producer.send("orders", object())  # type: ignore[arg-type]
    with pytest.raises(dmq.InvalidMessage, match="business_id"):
        producer.send("orders", b"", ordered=True)
    with pytest.raises(dmq.InvalidMessage, match="message 3000") as caught:
        producer.send_many("orders", [dmq.Message(b"", priority=4 + (n == 3000) * 9) for n in range(4000)])
    assert caught.value.detail["index"] == 3000
    assert producer.send("orders", bytes(5 << 20)).offset >= 0, "it compresses"


def test_a_message_of_the_largest_size_goes_through(client: dmq.Client) -> None:
    body = os.urandom(4 << 20)
    receipt = client.producer(compression="none", window_bytes=1 << 20).send("orders", body)
    (found,) = client.admin.peek("orders", queue=receipt.queue)
    assert found.body == body


def test_a_small_window_slows_but_loses_nothing(client: dmq.Client) -> None:
    producer = client.producer(window_bytes=4000)
    futures = [producer.send_async("orders", bytes(200), durability="stored") for _ in range(500)]
    producer.send_many("orders", [dmq.Message(bytes(200))] * 300, durability="stored")
    producer.flush(20)
    assert all(future.exception(0) is None for future in futures)
    assert len(everything(client)) == 800


def test_a_closed_producer_takes_no_more(client: dmq.Client) -> None:
    producer = client.producer()
    future = producer.send_async("orders", b"x")
    producer.close()
    assert future.exception(0) is None
    with pytest.raises(dmq.NotConnected, match="closed"):
        producer.send("orders", b"x")


def test_a_restart_of_the_broker_loses_nothing_and_doubles_nothing(client: dmq.Client, broker: RunningBroker) -> None:
    producer = client.producer()
    futures = []
    for number in range(600):
        futures.append(producer.send_async("orders", b"%d" % number))
        if number in (200, 400):
            broker.stop()
            broker.start()
    producer.flush(30)
    assert [future.exception(0) for future in futures] == [None] * 600
    assert sorted(everything(client)) == sorted(b"%d" % number for number in range(600))


def test_what_later_versions_bring_is_refused_in_a_sentence(client: dmq.Client) -> None:
    with pytest.raises(dmq.NotInCluster):
        client.producer().send("orders", b"x", durability="replicated")


def test_administration(client: dmq.Client) -> None:
    admin = client.admin
    assert admin.create_topic("audit", queues=1, ttl=60.0).ttl == 60.0
    with pytest.raises(dmq.TopicExists):
        admin.create_topic("audit", queues=2)
    assert [topic.name for topic in admin.topics()] == ["audit", "orders"]
    assert admin.update_topic("audit", queues=3).queues == 3
    assert admin.topic("audit").groups == ()
    with pytest.raises(dmq.InvalidSettings, match="colour"):
        admin.update_topic("audit", colour="red")
    client.producer().send_many("audit", [dmq.Message(b"%d" % number) for number in range(10)])
    assert sum(queue.next_offset for queue in admin.offsets("audit")) == 10
    admin.create_group("billing", "audit")
    assert admin.lag("audit", "billing").total == 10
    moves = admin.reset("audit", "billing", "latest", dry_run=True)
    assert sum(move.after - move.before for move in moves) == 10
    assert admin.lag("audit", "billing").total == 10
    admin.reset("audit", "billing", "latest")
    assert admin.lag("audit", "billing").total == 0
    assert [group.name for group in admin.groups("audit")] == ["billing"]
    assert admin.cluster()[0].state == "running"
    assert admin.stats()
    with pytest.raises(dmq.InvalidRequest):
        admin.find("audit")
    with pytest.raises(dmq.InvalidRequest, match="not a message id"):
        admin.find(id="garbage")


UNCLOSED = """
import sys, dmq
producer = dmq.connect(sys.argv[1]).producer(timeout=float(sys.argv[3]))
for number in range(int(sys.argv[2])):
    producer.send_async("unclosed", b"%d" % number)
sys.exit(3)
"""


def test_what_was_sent_in_the_background_is_stored_though_the_program_ends_without_closing(
    client: dmq.Client, broker: RunningBroker
) -> None:
    client.admin.create_topic("unclosed", queues=1)
    words = [sys.executable, "-c", UNCLOSED, broker.url, "20000", str(PATIENCE_S)]
    done = subprocess.run(words, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
    assert [queue.next_offset for queue in client.admin.offsets("unclosed")] == [20_000]


def test_what_could_not_be_stored_before_the_program_ended_is_told() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | None:
        return None if frame.command == Command.PRODUCE else usual(frame)

    with Peer(answer) as peer:
        done = subprocess.run([sys.executable, "-c", UNCLOSED, peer.url, "7", "0.2"], capture_output=True, check=False)
    assert done.returncode == 3
    assert b"messages may not be stored: the program ended before they were" in done.stderr
    assert b"messages=7" in done.stderr
