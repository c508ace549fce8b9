"""What users build on topics works over three shards as with one broker: outbox and inbox, retries, delays, spools."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

import dmq
import dmq.aio
from dmq.client.consumer.message import ReceivedMessage
from dmq.client.spool.parcel import Head, Kept
from dmq.client.spool.spool import RefusedFolder
from dmq.model import Durability, place_of
from dmq.outbox import BusinessState, Inbox, MessageService
from dmq.protocol.batch import pack_batch
from dmq.records import encode_batch
from dmq.storage.files import OsFiles
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.test_consumers import pulled
from tests.integration.outbox.effects import disposed, effect, effects, open_database
from tests.integration.outbox.shop import states
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]

COUNT = 24


@pytest.fixture(scope="module")
def client(cluster: ClusterProcesses) -> Iterator[dmq.Client]:
    with dmq.connect(cluster.url, app="shop", client_id="shop-1", timeout=PATIENCE_S) as connected:
        eventually(lambda: connected._router.is_whole)
        yield connected


def test_every_order_of_an_outbox_has_one_effect_and_one_result(client: dmq.Client, tmp_path: Path) -> None:
    client.admin.create_topic("book-orders", queues=1)
    with (
        disposed(open_database(f"sqlite:///{tmp_path / 'shop.db'}", pool_size=20)) as shop,
        disposed(open_database(f"sqlite:///{tmp_path / 'stock.db'}", pool_size=20)) as stock,
        MessageService(shop, client, groups={"book-orders": ["stock"]}, poll=0.05) as service,
    ):
        shards: set[int] = set()
        inbox = Inbox(stock, client)

        @inbox.consumes_messages
        def handle(session: Session, message: ReceivedMessage) -> BusinessState:
            shards.add(message.shard)
            session.execute(effect(message.body.decode()))
            return BusinessState.SUCCESS

        consumer = client.consumer("book-orders", "stock")
        worker = threading.Thread(target=lambda: consumer.run(handle, workers=4))
        worker.start()
        try:
            for number in range(COUNT):
                with Session(shop) as session, session.begin():
                    service.send(session, "book-orders", f"order {number}", business_id=f"u-{number}")
            eventually(lambda: states(shop) == {"DONE": COUNT})  # with the result of each
        finally:
            consumer.close()
            worker.join()
        assert sorted(effects(stock)) == sorted(f"order {number}" for number in range(COUNT))
        assert shards == {1, 2, 3}
    client.admin.delete_topic("book-orders")


def test_what_fails_is_tried_again_and_what_is_delayed_comes_in_its_time(client: dmq.Client) -> None:
    client.admin.create_topic("again", queues=1)
    producer = client.producer(timeout=PATIENCE_S)
    attempts: Counter[bytes] = Counter()
    shards: set[int] = set()
    sent_at = time.time()
    delayed = {producer.send("again", b"late %d" % number, delay=0.5).shard for number in range(COUNT // 2)}
    for number in range(COUNT):
        producer.send("again", b"%d" % number)
    with client.consumer("again", "trying") as consumer:
        for message in consumer:
            attempts[message.body] += 1
            shards.add(message.shard)
            if message.body.startswith(b"late"):
                assert time.time() > sent_at + 0.4
                message.ack()
            elif message.attempt == 1:
                message.nack(delay=0.05, reason="a bad moment")
            else:
                assert message.attempt == 2
                message.ack()
            if sum(attempts.values()) == 2 * COUNT + COUNT // 2:
                break
    assert {*attempts.values()} == {1, 2}
    assert shards >= delayed
    assert len(shards) == 3
    client.admin.delete_topic("again")


@pytest.mark.parametrize("removed", [(), ("s1", "s2"), ("s2", "s3")])
def test_dead_letters_are_resent_by_a_shard_that_has_their_topic(removed: tuple[str, ...], client: dmq.Client) -> None:
    topic = "dead-" + "".join(removed)
    client.admin.create_topic(topic, queues=1)
    for shard in removed:
        client.admin.place_topic(topic, remove=shard)
    with client.producer(timeout=PATIENCE_S) as producer:
        shards = {producer.send(topic, b"%d" % number).shard for number in range(12)}
    assert len(shards) == 3 - len(removed)
    with client.consumer(topic, "dying") as consumer:
        for message in pulled_only(consumer, 12):
            message.reject("no use")
    eventually(lambda: len(client.admin.dead_letters(topic=topic)) == 12)
    assert all(outcome.ok for outcome in client.admin.resend_dead_letters(topic=topic))
    assert not client.admin.dead_letters(topic=topic, state="waiting")
    with client.consumer(topic, "dying") as consumer:
        found = pulled(consumer, 12)
    assert {bytes(message.body) for message in found} == {b"%d" % number for number in range(12)}
    client.admin.delete_topic(topic)


def pulled_only(consumer: dmq.Consumer, count: int) -> list[ReceivedMessage]:
    """As `pulled`, and nothing is acked."""
    found: list[ReceivedMessage] = []
    while len(found) < count:
        batch = consumer.pull(100, wait=PATIENCE_S)
        assert batch
        found += batch
    return found


def test_the_most_urgent_of_each_shard_comes_first(client: dmq.Client) -> None:
    client.admin.create_topic("hurry", priority=True)
    eventually(lambda: not client._router.health.avoided((1, 2, 3), time.monotonic()))  # as one that refused is a while
    with client.producer(timeout=PATIENCE_S) as producer:
        receipts = [producer.send("hurry", b"x", priority=number % 10) for number in range(90)]
    assert len({receipt.shard for receipt in receipts}) == 3
    with client.consumer("hurry", "hurried") as consumer:
        found = pulled(consumer, 90)
    for shard in (1, 2, 3):
        first = [message.priority for message in found if message.shard == shard][:3]
        assert first == sorted(first, reverse=True)
        assert first[0] >= 7
    client.admin.delete_topic("hurry")


def test_an_asyncio_consumer_hears_all_shards_in_order(cluster: ClusterProcesses, client: dmq.Client) -> None:
    client.admin.create_topic("steps-async", queues=1)
    with client.producer(timeout=PATIENCE_S) as producer:
        for step in range(4):
            for name in range(9):
                producer.send("steps-async", b"%d" % step, business_id=f"u{name}", ordered=True)
    seen: dict[str, list[int]] = {}

    async def consume() -> None:
        async with (
            dmq.aio.connect(cluster.url, timeout=PATIENCE_S) as other,
            other.consumer("steps-async", "walkers", ordered=True) as consumer,
        ):
            async for message in consumer:
                assert message.business_id is not None
                seen.setdefault(message.business_id, []).append(int(message.body))
                message.ack()
                if sum(map(len, seen.values())) == 36:
                    return

    asyncio.run(asyncio.wait_for(consume(), PATIENCE_S))
    assert {*map(tuple, seen.values())} == {(0, 1, 2, 3)}
    client.admin.delete_topic("steps-async")


def refused(spool: Path, topic: str, *shards: int) -> RefusedFolder:
    """A spool with refused batches of two messages for queue 1 of these shards; one of shard 0 is not bound to any."""
    (spool / "journal").mkdir()
    folder = RefusedFolder(OsFiles(spool, create=False), 1 << 20)
    for number, shard in enumerate(shards):
        records = encode_batch(topic, "shop", [dmq.Message(b"%d" % shard)] * 2, sent_at_ms=1)
        body = tuple(pack_batch(records))
        head = Head(topic, place_of(1, shard), 2, 0, Durability.FLUSHED, is_pinned=bool(shard))
        folder.add(Kept(number, head, body, sum(map(len, body))), dmq.NotAllowed("not now"), 1)
    return folder


def test_a_refused_batch_whose_slot_is_gone_stays_in_the_spool_and_holds_up_no_other(
    cluster: ClusterProcesses, client: dmq.Client, tmp_path: Path
) -> None:
    client.admin.create_topic("moved", queues=2)
    folder = refused(tmp_path, "moved", 2, 9, 3, 0)  # there never was a shard 9
    gone = client.admin.shard_names[2]
    client.admin.place_topic("moved", remove=gone, force=True)
    done = run("spool", "resend", str(tmp_path), "--all", "--url", cluster.url, "--format", "json")
    assert done.code == 1
    assert f"batch 0 stays: its order binds it to queue 1 of shard {gone}" in done.err
    assert f"dmq topic place moved --add {gone}" in done.err
    assert "batch 1 stays" in done.err
    assert [row["number"] for row in json.loads(done.out)] == [2, 3]
    assert folder.numbers() == [0, 1]
    client.admin.place_topic("moved", add=gone)
    assert run("spool", "resend", str(tmp_path), "0", "--url", cluster.url).code == 0
    assert folder.numbers() == [1]
    with client.consumer("moved", "late") as consumer:
        found = [(message.shard, message.body) for message in pulled(consumer, 6)]
    assert sorted(body for _, body in found) == [b"0", b"0", b"2", b"2", b"3", b"3"]
    assert {shard for shard, body in found if body == b"2"} == {2}
    client.admin.delete_topic("moved")


def test_refused_batches_of_a_spool_go_to_the_shards_they_were_meant_for(
    cluster: ClusterProcesses, client: dmq.Client, tmp_path: Path
) -> None:
    client.admin.create_topic("refused", queues=2)
    folder = refused(tmp_path, "refused", 1, 2, 3, 0)
    done = run("spool", "resend", str(tmp_path), "--all", "--url", cluster.url, "--format", "json")
    assert done.code == 0, done.err
    names = client.admin.shard_names
    rows = json.loads(done.out)
    assert [(row["shard"], row["queue"]) for row in rows[:3]] == [(names[shard], 1) for shard in (1, 2, 3)]
    assert folder.numbers() == []
    with client.consumer("refused", "late") as consumer:
        found = [(message.shard, message.body) for message in pulled(consumer, 8)]
    for shard in (1, 2, 3):
        assert found.count((shard, b"%d" % shard)) == 2
    client.admin.delete_topic("refused")
