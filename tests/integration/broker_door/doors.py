"""A broker that is used without a frame: by its publisher, its clients and its transactions, as a gateway would."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from dmq.broker.broker import Broker
from dmq.broker.delivery.client import Client
from dmq.broker.delivery.waiters import Handed
from dmq.broker.maintenance import ClientRow
from dmq.broker.publish.publisher import PublishRequest
from dmq.errors import DMQError
from dmq.model import Durability, Message, TopicConfig
from dmq.net.connection import WriteCoalescer
from dmq.protocol.batch import Batch as PackedBatch
from dmq.protocol.consume import Outcome, Pull, Settle, Settlement, Subscribe, SubscribeReply
from dmq.protocol.produce import Produce, ProduceFlag, TransactionCheck, TransactionEnd, TransactionOutcome
from dmq.records import RecordView, encode_batch
from dmq.settings import BrokerSettings
from dmq.storage.journal.unit_draft import Placement
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.patience import PATIENCE_S

PRODUCER = 7


class Nobody:
    """No connections at all."""

    address = ""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.outbox = WriteCoalescer()

    def __len__(self) -> int:
        return 0

    def rows(self) -> list[ClientRow]:
        return []

    def figures(self) -> dict[str, float]:
        return {}

    def tell_reboot(self, grace_ms: int, reason: str) -> None: ...

    def send_away(self) -> None: ...

    def tell_back(self) -> None: ...


class Basket:
    """A sink that keeps what is pushed."""

    is_ready = True
    address = "here"

    def __init__(self) -> None:
        self.handed: list[Handed] = []
        self.members: list[list[str]] = []
        self.ended: DMQError | None = None

    def push(self, handed: Handed) -> None:
        self.handed.append(handed)

    def tell_members(self, queues: int, names: Sequence[str]) -> None:
        self.members.append([*names])

    def end(self, error: DMQError) -> None:
        self.ended = error

    @property
    def bodies(self) -> list[bytes]:
        return [body for handed in self.handed for body in bodies_of(handed)]


class Witness:
    """A producer that can be asked about its transactions."""

    is_ready = True

    def __init__(self) -> None:
        self.asked: list[TransactionCheck] = []

    def check(self, question: TransactionCheck, record: bytes) -> None:
        self.asked.append(question)


def bodies_of(handed: Handed) -> list[bytes]:
    """The bodies of a hand-out."""
    data, at, found = b"".join(handed.pieces), 0, []
    for length in map(int, handed.lengths):
        found.append(bytes(RecordView(data, at, at + length).body))
        at += length
    return found


class Door:
    """A broker on a disk in memory, with a clock that stands still."""

    def __init__(self, broker: Broker, clock: FakeClock) -> None:
        self.broker = broker
        self.clock = clock
        self._sequence = 0

    def client(self, name: str) -> Client:
        return Client(self.broker.channels, name, "gateway", "here")

    async def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it never happened"
            await asyncio.sleep(0.005)

    def bodies(self, topic: str) -> list[bytes]:
        """The bodies of the first queue of a topic; none if it does not exist yet."""
        queries = self.broker.queries
        if queries.find_topic(topic) is None:
            return []
        return [bytes(record.body) for record in queries.read(topic, 0, 0).records()]

    async def publish(self, *bodies: bytes, topic: str = "orders", due_ms: int = 0, **how: Any) -> Placement:
        """Publish a batch; delayed if it is due later."""
        encoded = encode_batch(topic, "shop", [Message(body) for body in bodies], sent_at_ms=1)
        dues = [due_ms] * len(bodies) if due_ms else ()
        packed = PackedBatch(encoded.data, encoded.lengths, encoded.hash_index, encoded.hashes, dues)
        flags = int(how.pop("flags", 0)) | (ProduceFlag.DUES if due_ms else 0)
        asked = Produce(
            topic, 0, len(bodies), len(encoded.hashes), PRODUCER, 1, how.pop("sequence", self._sequence),
            how.pop("durability", Durability.FLUSHED), int(flags), **how,
        )  # fmt: skip
        self._sequence = max(self._sequence, asked.first_sequence + len(bodies))
        done: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()

        def told(request: PublishRequest, placement: Placement | None, error: DMQError | None) -> None:
            done.set_result(placement) if placement is not None else done.set_exception(error or AssertionError())

        request = PublishRequest(asked, packed)
        await self.broker.changes.after(lambda: self.broker.publisher.publish(request, told))
        return await done

    async def subscribe(self, client: Client, sink: Basket, group: str = "billing", **how: Any) -> SubscribeReply:
        replies: list[SubscribeReply] = []
        asked = Subscribe(how.pop("number", 1), "orders", group, **how)
        await self.broker.changes.after(lambda: client.subscribe(asked, sink, replies.append))
        (reply,) = replies
        return reply

    async def pull(self, client: Client, group: str = "billing", **how: Any) -> Handed | None:
        answered: asyncio.Future[Handed | None] = asyncio.get_running_loop().create_future()
        asked = Pull("orders", group, **how)
        await self.broker.changes.after(lambda: client.pull(asked, answered.set_result))
        return await answered

    def settle(self, client: Client, handed: Handed, outcome: Outcome, group: str = "billing", **how: Any) -> None:
        lease = handed.lease
        said = Settlement(handed.queue, lease.epoch, lease.number, outcome, topic=handed.topic, **how)
        assert client.settle(Settle("orders", group, [said])) == []

    async def end(self, first: int, count: int, outcome: TransactionOutcome) -> dict[bytes, DMQError]:
        """End half messages; returns those that did not end so."""
        ended: asyncio.Future[dict[bytes, DMQError]] = asyncio.get_running_loop().create_future()
        asked = TransactionEnd(PRODUCER, 1, first, count, outcome)
        self.broker.transactions.end(asked, lambda ending, error: ended.set_result(ending.refused))
        return await ended


@contextlib.asynccontextmanager
async def opened(files: MemoryFiles | None = None, **settings: Any) -> AsyncIterator[Door]:
    """A broker with the topic `orders`, of one queue."""
    clock = FakeClock()
    store = MessageStore(files or MemoryFiles(), clock=clock, checkpoint_inline=False, new_epoch=True)
    if store.queries.find_topic("orders") is None:
        store.create_topic("orders", TopicConfig(queues=1))
    broker = Broker(store, BrokerSettings(offline_delay_ms=0, **settings), clock, Nobody())
    try:
        yield Door(broker, clock)
    finally:
        await broker.stop(0.0)


def with_a_door(test: Callable[[Door], Awaitable[None]], **settings: Any) -> None:
    """Run a test on a broker of its own."""

    async def run() -> None:
        async with opened(**settings) as door:
            await test(door)

    asyncio.run(run())
