"""A store that messages fail in, with the broker's own code for moves, and a count of where each message is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.delivery.channel import Channel, Failure
from dmq.broker.delivery.channels import Channels
from dmq.broker.delivery.group import Member, Subscription
from dmq.broker.delivery.lease import Lease
from dmq.broker.delivery.waiters import Demand
from dmq.broker.journal.arrivals import Arrivals
from dmq.broker.journal.disk import DiskReads
from dmq.broker.journal.journal import Journal
from dmq.broker.journal.writer import JournalWriter
from dmq.broker.retry.mover import Mover
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import DMQError
from dmq.model import SCHEDULE_TOPIC, Durability, Message, MessageId, TopicConfig
from dmq.records import RecordView, encode_batch
from dmq.records.copy import release_record
from dmq.settings import BrokerSettings, StoreSettings
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import DelaysDone, Event, PositionSet, pack_offsets
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles

GROUP = "g"
SETTINGS = StoreSettings(segment_bytes=64 << 10, unit_bytes_max=32 << 10, body_bytes_max=16 << 10)
MESSAGES = 40
ATTEMPTS_MAX = 3


class Writer:
    """Writes at once what the broker's writer would write at the end of a turn."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def submit(
        self,
        items: Sequence[Batch | Event],
        durability: Durability,
        done: Callable[[Any, DMQError | None], None],
        *,
        size: int = 0,
        atomic: bool = False,
    ) -> None:
        placements = self._store.append(items, durability, atomic=atomic)
        if durability is Durability.FLUSHED:
            self._store.flush()
        done(placements, None)

    def write_lazily(self, events: Sequence[Event]) -> None:
        if events:
            self.submit(events, Durability.STORED, lambda *_: None)

    async def write(self, items: Sequence[Batch | Event]) -> None:
        self._store.append(items)
        self._store.flush()


class Verdict(NamedTuple):
    """What was said of one message."""

    body: int
    attempt: int
    word: str
    at_ms: int


class Failing:
    """As much of a broker as moves need, on one topic and one group."""

    def __init__(self, files: MemoryFiles, clock: FakeClock) -> None:
        self.files, self.clock = files, clock
        self.store = MessageStore(files, SETTINGS, clock)
        writer = cast(JournalWriter, Writer(self.store))
        journal = Journal(self.store, self.store.queries, writer, DiskReads(self.store.queries), Arrivals(1))
        settings, self._runtime = BrokerSettings(), Runtime.on(clock)
        catalog = Catalog(journal, self._runtime, settings)
        self.acked: set[int] = set()
        self.mover = Mover(journal, self._runtime, catalog, settings.retry_table)
        self.channels = Channels(journal, self._runtime, catalog, settings, self.mover)

    @property
    def now_ms(self) -> int:
        return self._runtime.clock.now_ms

    @property
    def channel(self) -> Channel:
        return self.channels.channel(self.store.queries.topic("orders"), GROUP)

    async def settled(self) -> None:
        """Let everything that was begun come to its end."""
        self.mover.flush()
        await self._runtime.tasks.finish(60.0)

    def begin(self) -> None:
        """A topic with messages that are durable."""
        topic = self.store.create_topic("orders", TopicConfig(queues=1))
        encoded = encode_batch("orders", "shop", [Message(b"%d" % n) for n in range(MESSAGES)], sent_at_ms=1)
        batch = Batch(topic="orders", queue=0, data=encoded.data, lengths=encoded.lengths, producer_id=7)
        self.store.append([batch, PositionSet(GROUP, topic.id, 0, 0)])
        self.store.flush()

    def join(self) -> Member:
        channel = self.channel
        channel.max_attempts = ATTEMPTS_MAX
        return channel.group.join("m", Subscription(), 100, 1 << 20).member

    async def work(self, rng: random.Random, rounds: int) -> None:
        """Hand out, and fail, and ack, and let time pass."""
        member = self.join()
        for _ in range(rounds):
            await self.step(member, rng)

    async def step(self, member: Member, rng: random.Random) -> list[Verdict]:
        """Some time, one hand-out, and what is said of its messages."""
        channel = self.channel
        self.clock.advance(rng.choice((0.0, 1.0, 4.0)))
        self._fire()
        for queue in channel.cursors:
            channel.selection.mark(queue)
        handed = channel.hand_out(Demand(member, rng.randrange(1, 6), 1 << 20, 60_000), self.now_ms)
        verdicts: list[Verdict] = []
        if handed is None:
            return verdicts
        lease = handed.lease
        queue_of = channel.queue_of(handed.topic, handed.queue)
        assert queue_of is not None
        for offset, piece in zip(_offsets(lease.start, lease.mask), _records(handed), strict=True):
            record = RecordView(piece)
            body = int(record.body)
            before = (record.attributes.attempt or 0) if handed.topic else 0
            word = rng.choice(("ack", "reject", "now", "later", "later"))
            verdicts.append(Verdict(body, before + lease.attempt, word, self.now_ms))
            self._say(channel, queue_of, lease, [(offset, offset + 1)], body, word)
        await self.settled()
        return verdicts

    def _say(
        self, channel: Channel, queue: int, lease: Lease, span: list[tuple[int, int]], body: int, word: str
    ) -> None:
        match word:
            case "ack":
                # Before it is said: what was acked may come again, but nothing may come that was not.
                self.acked.add(body)
                acked = channel.cursor(queue).ack(lease.epoch, lease.number, span, self.now_ms)
                channel.settled(queue, acked)
            case "reject":
                self.mover.reject(channel, queue, Failure(lease.epoch, lease.number, span, "no"))
            case "now":
                self.mover.nack(channel, queue, Failure(lease.epoch, lease.number, span, "boom", delay_ms=0))
            case _:
                self.mover.nack(channel, queue, Failure(lease.epoch, lease.number, span, "boom"))

    def _fire(self) -> None:
        due = self.store.take_due(self.now_ms, 100)
        for delay in due:
            found = self.store.queries.record_at(delay.offset)
            assert found is not None
            released = release_record(bytes(self.store.queries.raw_record(found)), self.now_ms)
            assert released is not None
            name = released.topic.decode()
            batch = Batch(
                topic=name, queue=released.queue, data=released.record, lengths=[len(released.record)], moved=True
            )
            self.store.append([batch, DelaysDone(pack_offsets([delay.offset]))], Durability.STORED, atomic=True)
            self.channels.retries_visible(name, released.queue)


def _records(handed: Any) -> list[memoryview]:
    lengths = iter(handed.lengths)
    found = []
    for piece in handed.pieces:
        at = 0
        while at < len(piece):
            length = next(lengths)
            found.append(piece[at : at + length])
            at += length
    return found


def _offsets(start: int, mask: int) -> list[int]:
    return [start + at for at in range(mask.bit_length()) if mask >> at & 1]


def places(store: MessageStore) -> Counter[MessageId]:
    """In how many places each message is: to be consumed, waiting, or among the dead letters."""
    found: Counter[MessageId] = Counter()
    for topic in store.queries.topics():
        if topic.name == SCHEDULE_TOPIC or topic.name.startswith("%HALF"):
            continue
        for queue in range(topic.config.queues):
            first, following = store.queries.bounds(topic.name, queue)
            position = store.queries.position(GROUP, topic.name, queue)
            for offset in range(first, following):
                if topic.name.startswith("%DLQ%") or position is None or not position.is_settled(offset):
                    where = store.queries.journal_offset(topic.name, queue, offset)
                    record = None if where is None else store.queries.record_at(where)
                    assert record is not None
                    found[record.message_id] += 1
    for delay in store.take_due(1 << 60, 10_000):
        record = store.queries.record_at(delay.offset)
        assert record is not None
        found[record.message_id] += 1
    return found
