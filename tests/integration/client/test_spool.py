"""A producer with a spool and a real broker that comes and goes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import dmq
import dmq.aio
from dmq.client.spool.spool import Spool
from dmq.protocol import Command, Frame, Header
from tests.integration.cli.test_commands import dmq as command
from tests.integration.client.servers import Peer, RunningBroker, usual
from tests.patience import PATIENCE_S, eventually


def stored(client: dmq.Client, topic: str = "orders") -> list[list[bytes]]:
    """The bodies of each queue, in order."""
    queues = client.admin.offsets(topic)
    return [
        [message.body for message in client.admin.peek(topic, queue=queue.queue, at=0, limit=20_000)]
        for queue in queues
    ]


def all_stored(client: dmq.Client) -> list[bytes]:
    return [body for queue in stored(client) for body in queue]


def away(client: dmq.Client) -> bool:
    return client._router.home.current() is None


def test_with_a_broker_a_receipt_is_as_ever(client: dmq.Client, tmp_path: Path) -> None:
    with client.producer(spool=tmp_path / "spool") as producer:
        receipt = producer.send("orders", b"one", key="k-1")
        assert (receipt.durability, receipt.offset) == ("flushed", 0)
        assert client.admin.find("orders", key="k-1")[0].id == receipt.id
        receipts = producer.send_many("orders", [dmq.Message(b"%d" % number) for number in range(5000)])
        assert {receipt.durability for receipt in receipts} == {"flushed"}
        assert len({receipt.id for receipt in receipts}) == 5000
        assert producer.send_async("orders", b"last").result(PATIENCE_S).offset >= 0
    assert len(all_stored(client)) == 5002


def test_without_a_broker_messages_are_accepted_and_arrive_once_in_order(
    client: dmq.Client, broker: RunningBroker, tmp_path: Path
) -> None:
    with client.producer(spool=tmp_path / "spool") as producer:
        producer.send("orders", b"u-0 -1", business_id="u-0", ordered=True)
        broker.stop()
        eventually(lambda: away(client))
        receipts = []
        for number in range(200):
            name = f"u-{number % 3}"
            receipts.append(producer.send("orders", b"%s %d" % (name.encode(), number), business_id=name, ordered=True))
        futures = [producer.send_async("orders", b"async %d" % number) for number in range(500)]
        many = producer.send_many("orders", [dmq.Message(b"many %d" % number) for number in range(500)])
        assert {receipt.durability for receipt in receipts} == {"spooled"}
        assert {receipt.offset for receipt in receipts} == {-1}
        assert {future.result(PATIENCE_S).durability for future in futures} == {"spooled"}
        assert {receipt.durability for receipt in many} == {"spooled"}
        with pytest.raises(dmq.TimedOut, match="stay there"):
            producer.flush(0.1)
        broker.start()
        producer.flush(PATIENCE_S)
    queues = stored(client)
    assert Counter(body for queue in queues for body in queue).most_common(1)[0][1] == 1
    assert sum(map(len, queues)) == 1 + 200 + 500 + 500
    for queue in queues:
        for who in (b"u-0", b"u-1", b"u-2"):
            numbers = [int(body.split()[1]) for body in queue if body.startswith(who)]
            assert numbers == sorted(numbers)


def test_what_one_producer_left_the_next_one_sends(client: dmq.Client, broker: RunningBroker, tmp_path: Path) -> None:
    producer = client.producer(spool=tmp_path / "spool")
    producer.send("orders", b"0")
    broker.stop()
    eventually(lambda: away(client))
    ids = [producer.send("orders", b"%d" % number).id for number in range(1, 50)]
    producer.close()
    broker.start()
    eventually(lambda: not away(client))
    assert sorted(all_stored(client)) == [b"0"]
    with client.producer(spool=tmp_path / "spool") as another:
        new = another.send("orders", b"50").id
        another.flush(PATIENCE_S)
    assert sorted(all_stored(client), key=int) == [b"%d" % number for number in range(51)]
    assert new.producer_id == ids[0].producer_id
    assert new.sequence > max(each.sequence for each in ids)


def test_a_broker_that_does_not_answer_does_not_hold_up_a_send(tmp_path: Path) -> None:
    def answer(peer: Peer, frame: Frame) -> Header | None:
        return usual(frame) if frame.command != Command.PRODUCE else None

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        producer = client.producer(spool=tmp_path / "spool", timeout=1.0)
        receipt = producer.send("orders", b"hello")
        assert (receipt.durability, receipt.offset) == ("spooled", -1)
        assert [each.durability for each in producer.send_many("orders", [dmq.Message(b"x")] * 3)] == ["spooled"] * 3
        producer.close()
    spool = Spool.open(tmp_path / "spool")
    assert spool.next == 2
    assert spool.floor == 0
    spool.close()


def test_threads_share_a_spool(client: dmq.Client, tmp_path: Path) -> None:
    producer = client.producer(spool=tmp_path / "spool")
    bodies = [b"%d" % number for number in range(400)]

    def send(part: list[bytes]) -> None:
        for body in part:
            assert producer.send("orders", body).durability == "flushed"

    threads = [threading.Thread(target=send, args=(bodies[at::8],)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    producer.close()
    assert sorted(all_stored(client)) == sorted(bodies)


def test_connections_that_break_double_nothing(client: dmq.Client, broker: RunningBroker, tmp_path: Path) -> None:
    producer = client.producer(spool=tmp_path / "spool")
    producer.send("orders", b"first")
    futures = []
    for number in range(2000):
        futures.append(producer.send_async("orders", b"%d" % number, business_id=str(number % 5), ordered=True))
        if number % 400 == 399:
            eventually(lambda: not away(client))
            broker.stop()
            broker.start()
    accepted = {future.result(PATIENCE_S).id for future in futures}
    producer.flush(PATIENCE_S)
    producer.close()
    assert len(accepted) == 2000
    assert sorted(all_stored(client)) == sorted([b"first", *(b"%d" % number for number in range(2000))])
    for queue in stored(client):
        for name in range(5):
            numbers = [int(body) for body in queue if body != b"first" and int(body) % 5 == name]
            assert numbers == sorted(numbers)


def test_a_full_spool_blocks_or_raises(client: dmq.Client, broker: RunningBroker, tmp_path: Path) -> None:
    options = {"compression": "none", "spool_bytes_max": 256 << 10, "timeout": 2.0}
    told: list[str] = []

    def fill(send: Callable[[], object]) -> None:
        for _ in range(20):
            send()

    body = b"x" * 20_000
    raising = client.producer(spool=tmp_path / "one", on_full="raise", **options)  # type: ignore[arg-type]
    blocking = client.producer(spool=tmp_path / "two", **options)  # type: ignore[arg-type]
    telling = client.producer(
        spool=tmp_path / "three",
        on_full=lambda topic, message: told.append(topic),
        **options,  # type: ignore[arg-type]
    )
    for producer in (raising, blocking, telling):
        producer.send("orders", b"first")
    broker.stop()
    eventually(lambda: away(client))
    for producer in (raising, blocking, telling):
        with pytest.raises(dmq.Busy, match="spool_bytes_max"):
            fill(lambda producer=producer: producer.send("orders", body))  # type: ignore[misc]
    assert told == ["orders"]
    ended = threading.Event()

    def send_another() -> None:
        blocking.send_async("orders", body)
        ended.set()

    big = threading.Thread(target=send_another)
    big.start()
    assert not ended.wait(0.1)
    broker.start()
    assert ended.wait(PATIENCE_S), "the settled made no room"
    big.join()
    for producer in (raising, blocking, telling):
        producer.flush(PATIENCE_S)


def test_a_spool_belongs_to_one_producer(client: dmq.Client, tmp_path: Path) -> None:
    with (
        client.producer(spool=tmp_path / "spool"),
        pytest.raises(dmq.DirectoryInUse, match="a spool belongs to one producer"),
    ):
        client.producer(spool=str(tmp_path / "spool"))
    client.producer(spool=tmp_path / "spool").close()


def test_a_topic_that_is_not_there_is_told(client: dmq.Client, tmp_path: Path) -> None:
    with client.producer(spool=tmp_path / "spool") as producer:
        with pytest.raises(dmq.UnknownTopic):
            producer.send("nowhere", b"x")
        producer.send("orders", b"x")
        client.admin.delete_topic("orders")
        with pytest.raises(dmq.UnknownTopic):
            producer.send("orders", b"y")
        client.admin.create_topic("orders", queues=2)
        assert producer.send("orders", b"z").durability == "flushed"
        producer.flush(PATIENCE_S)
    assert all_stored(client) == [b"z"]


def test_a_topic_that_was_never_used_is_taken_without_a_broker(
    client: dmq.Client, broker: RunningBroker, tmp_path: Path
) -> None:
    client.admin.create_topic("new", queues=3)
    with client.producer(spool=tmp_path / "spool") as producer:
        broker.stop()
        eventually(lambda: away(client))
        assert producer.send("new", b"one").durability == "spooled"
        assert producer.send_async("new", b"two").result(PATIENCE_S).durability == "spooled"
        assert producer.send_many("new", [dmq.Message(b"three")])[0].durability == "spooled"
        with pytest.raises(dmq.NotConnected, match="how many queues"):
            producer.send("new", b"x", business_id="u-1", ordered=True)
        broker.start()
        producer.flush(PATIENCE_S)
        assert producer.send("new", b"four", business_id="u-1", ordered=True).durability == "flushed"
    bodies = [body for queue in stored(client, "new") for body in queue]
    assert sorted(bodies) == [b"four", b"one", b"three", b"two"]


def test_what_is_refused_after_all_is_set_aside_and_sent_again_by_hand(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmq.client.spool.drain.REFUSALS_MAX", 2)
    told: list[dmq.DMQError] = []
    spool = str(tmp_path / "spool")
    with dmq.connect(broker.url, on_exception=told.append) as client:
        client.admin.create_topic("orders")
        with client.producer(spool=spool) as producer:
            broker.stop()
            eventually(lambda: away(client))
            for topic in ("nowhere", "neither"):
                producer.send_many(topic, [dmq.Message(b"a", key="k-1"), dmq.Message(b"b")])
            producer.send("orders", b"c")
            broker.start()
            producer.flush(PATIENCE_S)
            eventually(lambda: sum(isinstance(error, dmq.UnknownTopic) for error in told) == 2)
            assert all_stored(client) == [b"c"]
        rows = command("spool", "list", spool, "--format", "json").json
        assert sorted((row["topic"], row["messages"], row["code"]) for row in rows) == [
            ("neither", 2, "UNKNOWN_TOPIC"),
            ("nowhere", 2, "UNKNOWN_TOPIC"),
        ]
        number = {row["topic"]: str(row["number"]) for row in rows}
        refused = command("spool", "resend", spool, number["nowhere"], "--url", broker.url)
        assert (refused.code, "nowhere" in refused.err) == (1, True)
        client.admin.create_topic("nowhere")
        assert command("spool", "resend", spool, number["nowhere"], "--url", broker.url).code == 0
        assert sorted(body for queue in stored(client, "nowhere") for body in queue) == [b"a", b"b"]
        assert client.admin.find("nowhere", key="k-1")[0].body == b"a"
        assert command("spool", "drop", spool, "--all").code == 2
        assert command("spool", "drop", spool, "--all", "--yes").code == 0
        assert command("spool", "list", spool, "--format", "json").json == []
        assert command("spool", "drop", spool, "99", "--yes").code == 2


def test_a_closed_client_closes_the_spool(broker: RunningBroker, client: dmq.Client, tmp_path: Path) -> None:
    other = dmq.connect(broker.url)
    producer = other.producer(spool=tmp_path / "spool")
    producer.send("orders", b"x")
    other.close()
    with pytest.raises(dmq.NotConnected, match="closed"):
        producer.send("orders", b"y")
    Spool.open(tmp_path / "spool").close()


def test_settled_segments_go(client: dmq.Client, tmp_path: Path) -> None:
    with client.producer(spool=tmp_path / "spool", spool_bytes_max=1 << 20, compression="none") as producer:
        for _ in range(200):
            producer.send("orders", b"x" * 20_000)
        producer.flush(PATIENCE_S)
        eventually(lambda: len([*(tmp_path / "spool" / "journal").iterdir()]) <= 2)


def test_the_asyncio_client_says_that_it_has_none(broker: RunningBroker, tmp_path: Path) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url) as client:
            with pytest.raises(dmq.Unsupported, match=r"asyncio\.to_thread"):
                client.producer(spool=str(tmp_path / "spool"))

    asyncio.run(main())


def test_a_spool_that_cannot_be_used_is_told(client: dmq.Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(dmq.StorageError, match="not a directory"):
        client.producer(spool=tmp_path / "file")
    with pytest.raises(dmq.InvalidSettings, match="spool_bytes_max"):
        client.producer(spool=tmp_path / "spool", spool_bytes_max=10)
    with pytest.raises(dmq.WrongFormat, match="not a DMQ data directory"):
        client.producer(spool=tmp_path)
