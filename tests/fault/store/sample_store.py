"""A small store with everything in it, and everything a store can be asked.

Some segments are gone by retention, some queues have files of their own, and there are runs, lookup files, wheel files,
positions, an open transaction, delays carried forward and a deleted topic.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from dmq.errors import Damaged
from dmq.model import HALF_TOPIC, SCHEDULE_TOPIC, Durability, Message, MessageId, TopicConfig
from dmq.records.encoder import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.file_pool import FilePool
from dmq.storage.journal.unit import Unit
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.offline.inspection import inspect_units, open_journal
from dmq.storage.state.events import PositionSet, Settled
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

__all__ = ["IDS", "KEYS", "SETTINGS", "Answers", "Lost", "Prepared", "answers", "batch_of", "prepare", "read_queue"]

SETTINGS = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=16 << 10,
    body_bytes_max=4 << 10,
    checkpoint_bytes=18 << 10,
    read_cache_bytes=0,
    fragment=3,
    retention_hours=50.0,
    keep_unconsumed=False,
)
KEYS = (*(f"k-{number}" for number in range(0, 2400, 83)), "delay-3", "nobody")
IDS = tuple(MessageId(7, number) for number in range(0, 2400, 71))
HOUR = 3600.0
Queue = tuple[str, int]


class Lost(NamedTuple):
    """Messages a read said it cannot give, and the journal range it named."""

    first: int
    next: int
    start: int
    end: int


class Answers(NamedTuple):
    """What a store says to every question."""

    topics: list[Any]
    bounds: dict[Queue, tuple[int, int]]
    records: dict[Queue, dict[int, bytes]]
    lost: dict[Queue, list[Lost]]
    positions: dict[tuple[str, str, int], Any]
    since: dict[Queue, list[int]]
    found: list[list[tuple[str, int]] | None]
    transactions: dict[MessageId, Any]
    delays: int
    due: list[tuple[int, int, int]]

    def same_but_for_messages(self) -> Answers:
        return self._replace(records={}, lost={}, found=[], due=sorted(self.due))


class Prepared(NamedTuple):
    """The files of a store, and what it answers.

    Everything below `checkpointed` was durable by the checkpoint's word, below `durable` also by that of later units.
    """

    files: MemoryFiles
    wall_ms: int
    answers: Answers
    journal_offsets: dict[tuple[str, int, int], int]
    unit_starts: list[int]
    checkpointed: int
    durable: int


def batch_of(
    topic: str, queue: int, bodies: list[bytes], *, producer: int = 7, sequence: int, keys: list[str] | None = None,
    dues: list[int] | None = None, at_ms: int = 1_700_000_000_000,
) -> Batch:  # fmt: skip
    """Encode a batch as a client would."""
    messages = [Message(body, key=keys[i] if keys else None) for i, body in enumerate(bodies)]
    made = encode_batch(topic, "shop", messages, sent_at_ms=at_ms)
    return Batch(
        topic=topic, queue=queue, data=bytes(made.data), lengths=made.lengths, hash_index=made.hash_index,
        hashes=made.hashes, dues=dues or [], producer_id=producer, first_sequence=sequence,
    )  # fmt: skip


def prepare(*, clean: bool) -> Prepared:
    """Make the store; `clean` closes it, else its process dies, with flushed and stored units after a checkpoint."""
    files, clock = MemoryFiles(), FakeClock()
    store = MessageStore(files, SETTINGS, clock)
    rng = random.Random(5)
    store.create_topic("orders", TopicConfig(queues=3))
    store.create_topic("gone", TopicConfig(queues=1))
    number = 0

    def send(topic: str, queue: int, count: int, *, key: str = "k", delay_s: float | None = None) -> None:
        nonlocal number
        bodies = [b"%d " % (number + i) + rng.randbytes(rng.randrange(40)) for i in range(count)]
        keys = None if count == 4 else [f"{key}-{number + i}" for i in range(count)]
        dues = None if delay_s is None else [clock.now_ms() + int(delay_s * 1000) + i for i in range(count)]
        batch = batch_of(topic, queue, bodies, sequence=number, keys=keys, dues=dues, at_ms=clock.now_ms())
        store.append([batch], Durability.STORED if rng.random() < 0.5 else Durability.FLUSHED)
        number += count
        if number % 2:
            store.flush()

    send(SCHEDULE_TOPIC, 0, 5, key="delay", delay_s=500 * HOUR)
    send(HALF_TOPIC, 1, 1)
    for step in range(150):
        send("orders", step % 9 // 7, 15)
        if step == 12:
            send("gone", 0, 30)
        if step % 8 == 0:
            send(SCHEDULE_TOPIC, step % 5, 4, key="delay", delay_s=400 * HOUR)
            topic_id = store.queries.topic("orders").id
            store.append([Settled("billing", topic_id, 0, step * 3, 2, member="m", settled_at_ms=clock.now_ms())])
            store.append([PositionSet("audit", topic_id, 1, step)])
        if step == 40:
            store.delete_topic("gone")
        if step == 45:
            clock.advance(60 * HOUR)
        clock.advance(1.0)
    send("orders", 2, 3)
    store.flush()
    clock.advance(30 * HOUR)
    assert store.retain() > 0
    store.checkpoint()
    checkpointed = store.queries.end
    if clean:
        store.close()
        checkpointed = store.queries.end
    else:
        for step in range(6):
            send("orders", step % 2, 4)
            store.append([Settled("billing", store.queries.topic("orders").id, 1, step, 1)], Durability.STORED)
            if step < 4:
                store.flush()
        files = files.kill()
    wall_ms = clock.now_ms()
    starts, durable = _units(files)
    reopened = MessageStore(files.copy(), SETTINGS, FakeClock(wall_ms))
    said = answers(reopened, wall_ms)
    assert not reopened.queries.damage
    places = {
        (topic, queue, offset): int.from_bytes(record[10:18], "big")
        for (topic, queue), records in said.records.items()
        for offset, record in records.items()
    }
    return Prepared(files, wall_ms, said, places, starts, checkpointed, max(checkpointed, durable))


def _units(files: MemoryFiles) -> tuple[list[int], int]:
    """Where units begin, the last one's end, and how far they say the journal is durable."""
    pool = FilePool(files, 16)
    journal = open_journal(files, pool)
    assert len(journal.segments) >= 4
    units = [unit for unit in inspect_units(journal) if isinstance(unit, Unit)]
    pool.close()
    return [*(unit.start for unit in units), journal.end], max(unit.header.flushed_through for unit in units)


def read_queue(store: MessageStore, topic: str, queue: int) -> tuple[dict[int, bytes], list[Lost]]:
    """All messages of a queue by offset, verified, and what could not be read."""
    at, end = store.queries.bounds(topic, queue)
    records: dict[int, bytes] = {}
    lost: list[Lost] = []
    while at < end:
        try:
            got = store.queries.read(topic, queue, at, max_messages=400)
        except Damaged as error:
            detail = error.detail
            assert detail["first"] == at < detail["next"], detail
            lost.append(Lost(at, detail["next"], detail["start"], detail["end"]))
            at = detail["next"]
            continue
        for offset, record in zip(got.offsets.tolist(), got.records(), strict=True):
            record.verify()
            assert (record.queue, record.queue_offset) == (queue, offset)
            records[offset] = bytes(record.buffer[record.start : record.start + record.length])
        assert got.next_offset > at
        at = got.next_offset
    return records, lost


def answers(store: MessageStore, wall_ms: int) -> Answers:
    """Ask everything."""
    queues = [(topic.name, queue) for topic in store.queries.topics() for queue in range(min(topic.config.queues, 5))]
    read = {queue: read_queue(store, *queue) for queue in queues}
    times = [wall_ms - int(hours * HOUR * 1000) for hours in (0, 10, 31, 95, 10_000)]
    names = [topic.name for topic in store.queries.topics()]
    return Answers(
        topics=store.queries.topics(),
        bounds={queue: store.queries.bounds(*queue) for queue in queues},
        records={queue: records for queue, (records, _) in read.items()},
        lost={queue: lost for queue, (_, lost) in read.items() if lost},
        positions={
            (group, name, queue): store.queries.position(group, name, queue)
            for group in store.queries.groups()
            for name, queue in queues
            if name in names
        },
        since={queue: [store.queries.offset_since(*queue, ms) for ms in times] for queue in queues},
        found=[_found(store, key=key) for key in KEYS] + [_found(store, message_id=sent) for sent in IDS],
        transactions=store.queries.transactions(),
        delays=store.queries.delays_pending,
        due=_due(store),
    )


def _found(store: MessageStore, **wanted: Any) -> list[tuple[str, int]] | None:
    try:
        return [(str(found.message_id), found.journal_offset) for found in store.queries.find(**wanted)]
    except Damaged:
        return None


def _due(store: MessageStore) -> list[tuple[int, int, int]]:
    """All delays, as if all were due; they are given back."""
    due = store.take_due(1 << 60, 10_000)
    store.release_due([delay.offset for delay in due])
    return [(delay.due_ms, delay.offset, delay.length) for delay in due]
