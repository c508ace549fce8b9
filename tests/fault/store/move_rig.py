"""A store that messages fail in, with the broker's own code for moves, and a count of where each message is."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from dmq.broker.catalog.changes import Changes
from dmq.broker.delivery.channel import Consumption
from dmq.broker.delivery.group import Group, Member, Subscription
from dmq.broker.delivery.lease import Lease
from dmq.broker.retry.mover import Moves
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
        self.settings = BrokerSettings()
        self.writer = Writer(self.store)
        self.changes = Changes(100, 1 << 20)
        self.consumptions: dict[tuple[str, str], Consumption] = {}
        self.acked: set[int] = set()
        self.moves = Moves(self)  # type: ignore[arg-type]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def pump_soon(self, consumption: Consumption) -> None:
        pass

    def run(self, work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def settled(self) -> None:
        """Let everything that was begun come to its end."""
        self.moves.flush()
        while self._tasks:
            await self._tasks.pop()

    async def write(self, events: Sequence[Event]) -> None:
        self.store.append(events)
        self.store.flush()

    def begin(self) -> None:
        """A topic with messages that are durable."""
        topic = self.store.create_topic("orders", TopicConfig(queues=1))
        encoded = encode_batch("orders", "shop", [Message(b"%d" % n) for n in range(MESSAGES)], sent_at_ms=1)
        batch = Batch(topic="orders", queue=0, data=encoded.data, lengths=encoded.lengths, producer_id=7)
        self.store.append([batch, PositionSet(GROUP, topic.id, 0, 0)])
        self.store.flush()

    def join(self) -> Member:
        topic = self.store.queries.topic("orders")
        consumption = Consumption(
            topic,
            Group(GROUP, "orders"),
            self.store.queries,
            itertools.count(1),
            lambda events: self.writer.submit(events, Durability.STORED, lambda *_: None) if events else None,
            100,
            self.moves.bury_doomed,
            lambda _: None,
        )
        consumption.max_attempts = ATTEMPTS_MAX
        self.consumptions["orders", GROUP] = consumption
        return consumption.group.join("m", Subscription(), 100, 1 << 20).member

    async def work(self, rng: random.Random, rounds: int) -> None:
        """Hand out, and fail, and ack, and let time pass."""
        member = self.join()
        for _ in range(rounds):
            await self.step(member, rng)

    async def step(self, member: Member, rng: random.Random) -> list[Verdict]:
        """Some time, one hand-out, and what is said of its messages."""
        consumption = self.consumptions["orders", GROUP]
        self.clock.advance(rng.choice((0.0, 1.0, 4.0)))
        self._fire()
        for queue in consumption.cursors:
            consumption.selection.mark(queue)
        handed = consumption.hand_out(member, rng.randrange(1, 6), 1 << 20, 60_000, self.now_ms)
        verdicts: list[Verdict] = []
        if handed is None:
            return verdicts
        lease = handed.lease
        queue_of = consumption.queue_of(handed.topic, handed.queue)
        assert queue_of is not None
        for offset, piece in zip(_offsets(lease.start, lease.mask), _records(handed), strict=True):
            record = RecordView(piece)
            body = int(record.body)
            before = (record.attributes.attempt or 0) if handed.topic else 0
            word = rng.choice(("ack", "reject", "now", "later", "later"))
            verdicts.append(Verdict(body, before + lease.attempt, word, self.now_ms))
            self._say(consumption, queue_of, lease, [(offset, offset + 1)], body, word)
        await self.settled()
        return verdicts

    def _say(
        self, consumption: Consumption, queue: int, lease: Lease, span: list[tuple[int, int]], body: int, word: str
    ) -> None:
        match word:
            case "ack":
                # Before it is said: what was acked may come again, but nothing may come that was not.
                self.acked.add(body)
                acked = consumption.cursor(queue).ack(lease.epoch, lease.number, span, self.now_ms)
                consumption.settled(queue, acked)
            case "reject":
                self.moves.reject(consumption, queue, lease.epoch, lease.number, span, "no")
            case "now":
                self.moves.nack(consumption, queue, lease.epoch, lease.number, span, 0, "boom")
            case _:
                self.moves.nack(consumption, queue, lease.epoch, lease.number, span, -1, "boom")

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
            self.moves.arrived(name, released.queue)


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
