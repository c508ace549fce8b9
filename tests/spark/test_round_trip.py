"""The whole way: published, archived, queried, replayed into another topic, consumed; and archived once more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import dmq
from dmq.client.client import Client
from dmq.pipeline.archive.job import ArchiveJob
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.lookup import Lookup
from dmq.pipeline.replay.plan import Selection
from dmq.pipeline.replay.replay import ReplayRequest, execute
from dmq.records.layout import REPLAYED
from dmq.testing.processes import BrokerProcess

COUNT = 300
Said = tuple[Any, ...]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as started:
        yield started


def publish(client: Client) -> dict[str, Said]:
    """Messages of many kinds; what each of them said, by its id."""
    log: dict[str, Said] = {}
    with client.producer(app="shop") as producer:
        for number in range(COUNT):
            body = b"%d " % number * (1 + number % 3 * 2000)  # some are compressed on their way
            said: dict[str, Any] = {
                "key": f"order-{number}" if number % 5 else None,
                "tag": ("paid", "ü", None)[number % 3],
                "business_id": f"u-{number % 7}" if number % 2 else None,
                "ordered": number % 4 == 1,
                "priority": number % 10,
                "properties": {"number": str(number), "größe": "12 €"} if number % 3 else {},
            }
            receipt = producer.send("orders", body, **said)
            log[str(receipt.id)] = (body, *(said[name] for name in said if name != "ordered"))
    return log


def received(client: Client, topic: str, count: int) -> list[dmq.ReceivedMessage]:
    found: list[dmq.ReceivedMessage] = []
    with client.consumer(topic, f"{topic}-readers") as consumer:
        while len(found) < count:
            batch = consumer.pull(500, wait=60.0)
            assert batch, f"only {len(found)} of {count} came"
            found += batch
            batch.ack()
        while client.admin.lag(topic, f"{topic}-readers").total:
            time.sleep(0.05)
    return found


def said_of(message: dmq.ReceivedMessage) -> Said:
    return (
        message.raw, message.key, message.tag, message.business_id, message.priority, dict(message.properties),
    )  # fmt: skip


def test_what_was_published_comes_back_byte_by_byte_under_its_id(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    archive = Archive.create(str(tmp_path / "archive"))
    with dmq.connect(broker.url, app="test", timeout=60.0) as client:
        client.admin.create_topic("orders", queues=3)
        client.admin.create_topic("again", queues=2)
        log = publish(client)
        first = {str(message.id): said_of(message) for message in received(client, "orders", COUNT)}
        assert first == log
        ArchiveJob(spark, archive, broker.url).run()
        with Lookup(archive.uri) as lookup:
            for message_id, (body, key, tag, business_id, priority, properties) in [*log.items()][::10]:
                (row,) = lookup.by_id(message_id)
                assert (row["body"], row["key"], row["tag"], row["business_id"]) == (body, key, tag, business_id)
                assert (row["priority"], row["properties"], row["app"]) == (priority, properties, "shop")
                if key is not None:
                    assert [one["message_id"] for one in lookup.by_key(key)] == [message_id]
        outcome = execute(archive, broker.url, ReplayRequest(Selection(topic="orders"), "again", "round-trip"))
        assert (outcome.sent, outcome.found) == (COUNT, 0)
        back = received(client, "again", COUNT)
        assert {str(message.id): said_of(message) for message in back} == log
        assert {(message.replay, message.app, message.attempt) for message in back} == {("round-trip", "shop", 1)}
        ArchiveJob(spark, archive, broker.url).run()
    with Lookup(archive.uri) as lookup:
        for message_id in [*log][::25]:
            before, after = lookup.by_id(message_id)
            assert (before["topic"], after["topic"]) == ("orders", "again")
            assert (before["flags"] & REPLAYED, after["flags"] & REPLAYED) == (0, REPLAYED)
            for name in ("body", "body_crc", "key", "tag", "business_id", "priority", "properties", "app", "sent_at"):
                assert before[name] == after[name], name
        # What came after was flushed, and so were the acks before it.
        life = lookup.life(next(iter(log)))
        outcomes = [event["outcome"] for event in life.events if event["group"] == "orders-readers"]
        assert outcomes == ["delivered", "acked"]
