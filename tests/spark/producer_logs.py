"""Producers that keep a log of their own, and what the archive must have of it.

What always holds: the log is written from what `send` was given and gave back, never from what a broker counts.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any, NamedTuple

import pyarrow as pa

from dmq.client.client import Client
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.engine import Engine
from dmq.pipeline.object_store import open_parquet
from dmq.pipeline.tables import CONSUME_EVENT, KEY_INDEX, MESSAGE


class Sent(NamedTuple):
    """A message as its producer knows it."""

    id: str
    topic: str
    key: str | None
    content: str  # hash of the body and the properties


def content_hash(body: bytes, properties: dict[str, str]) -> str:
    return hashlib.sha256(repr((body, sorted(properties.items()))).encode()).hexdigest()


def send_logged(client: Client, topic: str, count: int, seed: int) -> list[Sent]:
    """Send distinct messages, small and large, and log each."""
    rng = random.Random(seed)
    waiting = []
    with client.producer() as producer:
        for number in range(count):
            body = rng.randbytes(rng.choice((0, 20, 200, 3000))) + b"%d/%d" % (seed, number)
            key = f"key-{seed}-{number}" if number % 3 else None
            properties = {"seed": str(seed), "number": str(number)} if number % 5 == 0 else {}
            receipt = producer.send_async(topic, body, key=key, properties=properties)
            waiting.append((receipt, key, content_hash(body, properties)))
        producer.flush()
        return [Sent(str(receipt.result(60).id), topic, key, content) for receipt, key, content in waiting]


def rows_of(archive: Archive, table: str) -> pa.Table:
    """All rows of a table, as any reader of its files sees them."""
    found = archive.table(table)
    parts = [open_parquet(file).read() for file in found.files()]
    return pa.concat_tables(parts) if parts else found.schema.empty_table()


def archived(archive: Archive) -> Counter[Sent]:
    """What the archive has, in the words of the log, and how often."""
    found: Counter[Sent] = Counter()
    columns = ["message_id", "topic", "key", "body", "headers"]
    for row in rows_of(archive, MESSAGE).select(columns).to_pylist():
        properties = {entry["key"]: entry["value"].decode() for entry in row["headers"] or ()}
        found[Sent(row["message_id"], row["topic"], row["key"], content_hash(row["body"], properties))] += 1
    return found


def check_archive(archive: Archive, log: list[Sent]) -> None:
    """Everything that was sent is there once, and nothing else; so are the entries of the index."""
    found = archived(archive)
    assert [sent for sent, times in found.items() if times > 1] == []
    missing, strange = set(log) - set(found), set(found) - set(log)
    assert (missing, strange) == (set(), set())
    index = rows_of(archive, KEY_INDEX).select(["kind", "key", "message_id"]).to_pylist()
    entries = Counter((row["kind"], row["key"], row["message_id"]) for row in index)
    wanted = Counter(("message_id", sent.id, sent.id) for sent in log)
    wanted += Counter(("key", sent.key, sent.id) for sent in log if sent.key is not None)
    assert entries == wanted


def outcomes(archive: Archive) -> dict[tuple[Any, ...], int]:
    """How many rows there are of each group, outcome and attempt, and of how many messages."""
    files = archive.table(CONSUME_EVENT).files()
    if not files:
        return {}
    with Engine() as engine:
        engine.reach(*files)
        rows = engine.tuples(
            'SELECT "group", outcome, attempt, count(*), count(DISTINCT message_id) '
            "FROM read_parquet($files) GROUP BY 1, 2, 3",
            {"files": files},
        )
    assert all(times == distinct for *_, times, distinct in rows), rows
    return {(group, outcome, attempt): times for group, outcome, attempt, times, _ in rows}


def consume_all(client: Client, topic: str, group: str, count: int, *, fail_every: int = 0) -> int:
    """Ack so many messages; some of them fail the first time. Returns how many did."""
    settled = failed = 0
    consumer = client.consumer(topic, group)
    while settled < count:
        for message in consumer.pull(200, 10.0):
            if fail_every and message.attempt == 1 and int(message.offset) % fail_every == 0:
                message.nack(0.0, "not yet")
                failed += 1
            else:
                message.ack()
                settled += 1
    consumer.close()
    # What is settled goes to the journal with the next unit; this is one that is flushed, too.
    client.admin.create_topic(f"after-{topic}-{group}")
    return failed
