"""A store on a disk in memory, driven together with its model."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from copy import copy

import msgspec

from dmq.model import Durability, Message, MessageId, TopicConfig
from dmq.records import (
    Attributes,
    Compressor,
    EncodeOptions,
    RecordView,
    encode_attributes,
    encode_batch,
    id_hash,
    key_hash,
    moved_record,
)
from dmq.settings import StoreSettings
from dmq.storage.delay.wheel import Delay
from dmq.storage.journal.unit_draft import Batch, Placement, sender_of
from dmq.storage.journal.unit_writer import Lone, Sender, Unusual
from dmq.storage.state.events import (
    DelaysDone,
    Event,
    PositionSet,
    Settled,
    TopicDropped,
    TopicPut,
    TransactionEnded,
    pack_offsets,
)
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, Keep, MemoryFiles
from tests.fault.store.comparison import check, check_find, check_producers, check_times
from tests.fault.store.model import HALF, SCHEDULE, Expected, Model, Placed, Sent, Stored

SMALL = StoreSettings(
    segment_bytes=64 << 10,
    unit_bytes_max=32 << 10,
    body_bytes_max=16 << 10,
    retention_hours=1.0,
    keep_unconsumed=False,
    producer_expiry_hours=10_000.0,
)


class Rig:
    """A store and its model: every call keeps the model in step, also when it ends in an error."""

    def __init__(self, seed: int, settings: StoreSettings = SMALL, files: MemoryFiles | None = None) -> None:
        self.rng = random.Random(seed)
        self.settings = settings
        self.clock = FakeClock()
        self.files = files or MemoryFiles(rng=random.Random(seed))
        self.model = Model()
        self.sequences: dict[int, int] = {}
        self.start = 0  # where the journal began when that was last known to be durable
        self.store = MessageStore(self.files, settings, self.clock)
        self._caught_up()

    def _caught_up(self) -> None:
        self.model.take_in(self.files, self.store.queries.end)
        self.model.see(self.store.queries.visible)

    def _call(self, asked: list[Expected], call: Callable[[], list[Placement] | None]) -> list[Placement]:
        self.model.ask(asked)
        try:
            placements = call()
        except Exception:
            self._caught_up()
            raise
        self._caught_up()
        self.model.answered()
        return placements or []

    # --- asking for things ------------------------------------------------------------------------------------------

    def append(
        self, items: list[Expected], durability: Durability = Durability.FLUSHED, *, atomic: bool = False
    ) -> list[Placement]:
        """Items that were not written before."""
        raw: list[Batch | Event] = [item.batch if isinstance(item, Sent) else item for item in items]
        return self._call(items, lambda: self.store.append(raw, durability, atomic=atomic))

    def append_lone(self, items: list[Sent], durability: Durability = Durability.FLUSHED) -> bool:
        """Batches of one message each on the storage half of the straight path; whether they took it."""
        lones = [lone_of(item.batch) for item in items]
        is_usual = True

        def call() -> list[Placement]:
            nonlocal is_usual
            try:
                self.store._writer.append_lone(lones, durability)
            except Unusual:
                is_usual = False
                self.store.append([item.batch for item in items], durability)
            return []

        self._call([*items], call)
        return is_usual

    def upkeep(self, call: Callable[[], object]) -> None:
        """A call that may write what nobody asked for: checkpoint, retention, closing."""

        def ignored() -> None:
            call()

        self._call([], ignored)

    def create(self, name: str, config: TopicConfig) -> None:
        ids = [e.topic_id for unit in self.model.units for e in unit.effects if isinstance(e, TopicPut)]
        put = TopicPut(max([15, *ids]) + 1, name, config)

        def create() -> None:
            self.store.create_topic(name, config, system=True)

        self._call([put], create)

    def delete(self, name: str) -> None:
        self._call([TopicDropped(self.id_of(name))], lambda: self.store.delete_topic(name))

    def id_of(self, name: str) -> int:
        return next(topic_id for topic_id, (known, _) in self.model.written.topics.items() if known == name)

    @property
    def names(self) -> list[str]:
        """Topics that were created and can be seen."""
        return sorted(name for name, _ in self.model.seen.topics.values())

    def messages(self, count: int, body_bytes: int = 40) -> list[Message]:
        rng = self.rng
        return [
            Message(
                rng.randbytes(rng.randrange(body_bytes) + 1),
                key=rng.choice((None, f"k{rng.randrange(500)}", f"ключ {rng.randrange(100)}")),
                tag=rng.choice((None, "paid", "open", "späť")),
                properties=rng.choice((None, {"a": str(rng.randrange(9))})),
            )
            for _ in range(count)
        ]

    def alike(self, count: int) -> list[Message]:
        """Messages whose bodies are worth compressing together."""
        return [
            msgspec.structs.replace(message, body=b'{"order": %d, "status": "paid"}' % number * (3 + number % 9))
            for number, message in enumerate(self.messages(count))
        ]

    def batch(
        self,
        topic: str,
        queue: int,
        messages: list[Message],
        *,
        producer: int = 1,
        epoch: int = 0,
        named: bool = False,
        dues: list[int] | None = None,
        target: str | None = None,
    ) -> Sent:
        """A batch with the producer's next sequences."""
        now_ms = self.clock.now_ms()
        extra: bytes | list[bytes] = b""
        if target is not None:
            each = dues if dues is not None else [None] * len(messages)
            extra = [encode_attributes(Attributes(due_at_ms=due, target_topic=target, target_queue=0)) for due in each]
        # Those of `alike` are compressed together; the others are too few or too noisy for that.
        encoded = encode_batch(
            topic,
            "app",
            messages,
            sent_at_ms=now_ms,
            extra=extra,
            options=EncodeOptions(compressor=Compressor(), blocks=target is None),
        )
        first = self.sequences.get(producer, 0)
        self.sequences[producer] = first + len(messages)
        batch = Batch(
            topic=topic,
            queue=queue,
            data=encoded.data,
            lengths=encoded.lengths,
            hash_index=encoded.hash_index,
            hashes=encoded.hashes,
            dues=dues or (),
            producer_id=producer,
            producer_epoch=epoch,
            first_sequence=first,
            named=named,
            block_bytes=encoded.block_bytes,
        )
        return Sent(batch, messages, [MessageId(producer, first + i) for i in range(len(messages))])

    def delayed(self, fragment: int, messages: list[Message], dues: list[int], target: str) -> Sent:
        return self.batch(SCHEDULE, fragment, messages, producer=90, dues=dues, target=target)

    def half(self, queue: int, messages: list[Message], target: str) -> Sent:
        return self.batch(HALF, queue, messages, producer=91, target=target)

    def moved(self, stored: Stored, topic: str, queue: int = 0) -> Sent:
        """The copy that delivers a delayed message, or commits a half one."""
        record = RecordView(stored.raw)
        data = moved_record(record, topic, sent_at_ms=self.clock.now_ms(), message_id=stored.id)
        hashes = [id_hash(stored.id)] + ([] if stored.key is None else [key_hash(stored.key)])
        batch = Batch(
            topic=topic,
            queue=queue,
            data=data,
            lengths=[len(data)],
            hash_index=[0] * len(hashes),
            hashes=hashes,
            moved=True,
        )
        message = Message(record.body, record.key, record.tag, properties=record.properties)
        return Sent(batch, [message], [stored.id])

    def deliver(self, delay: Delay, durability: Durability = Durability.FLUSHED) -> None:
        """Move a delayed record that was taken to its topic, or cancel it if that is gone."""
        due_ms, stored = self.model.seen.delays[delay.offset]
        assert due_ms == delay.due_ms
        target = RecordView(stored.raw).attributes.target_topic
        done = DelaysDone(pack_offsets([delay.offset]))
        items: list[Expected] = [done]
        if target in self.names:
            items = [self.moved(stored, target), done]
        self.append(items, durability, atomic=True)

    def end_transaction(self, message_id: MessageId, *, commit: bool) -> None:
        items: list[Expected] = [TransactionEnded(message_id.to_bytes(), "committed" if commit else "rolled back")]
        offset = self.model.seen.transactions[message_id][0]
        stored = next(message for message in self.model.seen.messages if message.offset == offset)
        target = RecordView(stored.raw).attributes.target_topic
        if commit and target in self.names:
            items.insert(0, self.moved(stored, target))
        self.append(items, atomic=True)

    def settle(self, group: str, topic: str, queue: int, start: int, count: int, bitmap: bytes = b"") -> Settled:
        return Settled(group, self.id_of(topic), queue, start, count, bitmap=bitmap)

    def put_at(self, group: str, topic: str, queue: int, offset: int) -> PositionSet:
        return PositionSet(group, self.id_of(topic), queue, offset)

    def remembered(self) -> list[Placed]:
        """Every batch that would be recognised if it were sent again."""
        producers = self.model.written.producers.values()
        return [place for producer in producers for places in producer.places.values() for place in places]

    def flush(self) -> None:
        self.upkeep(self.store.flush)

    def checkpoint(self) -> None:
        self.upkeep(self.store.checkpoint)

    def retain(self, carried_max: int = sys.maxsize) -> None:
        self.upkeep(lambda: self.store.retain(carried_max))
        self.start = self.store.queries.start

    # --- ends and beginnings ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """A clean end, and a new beginning that has nothing to recover."""
        self.upkeep(self.store.close)
        end, epoch = self.store.queries.end, self.store.queries.epoch
        self.open(durable=end)
        assert (self.store.queries.end, self.store.queries.epoch) == (end, epoch)
        assert not self.store.recovered.units

    def kill(self) -> None:
        """The process dies; everything written is there."""
        self.files = self.files.kill()
        self.open(durable=self.model.end)

    def crash(self, rng: random.Random, keep: Keep | None = None) -> None:
        """The power goes; what was flushed is there."""
        flushed = self.store.queries.flushed
        self.files = self.files.crash(rng, keep)
        self.open(durable=flushed)

    def fork(self, files: MemoryFiles, seed: int | str) -> Rig:
        """Another rig for another state of the disk, to be opened."""
        twin = copy(self)
        twin.files, twin.model, twin.rng = files, self.model.copy(), random.Random(seed)
        return twin

    def open(self, *, durable: int) -> None:
        """Open what is there, and settle with the model what that is."""
        self.store = MessageStore(self.files, self.settings, self.clock)
        start = self.model.survive(self.files, self.store.queries.end, durable=durable)
        assert start == self.store.queries.start
        assert start >= self.start, "segments that went for good are back"
        assert self.store.queries.visible == self.store.queries.end

    # --- checking ---------------------------------------------------------------------------------------------------

    def check(self, *, sample: int = 5) -> None:
        """Everything the model can tell, and a sample of what would take long."""
        view = self.model.seen
        check(self.store, view, view.delays.keys() - self.model.written.delays.keys())
        check_find(self.store, view, self.sample(view.messages, sample))
        for message in self.sample(view.messages, 1 if sample > 1 or self.rng.random() < 0.3 else 0):
            check_times(self.store, view, message.stored_at_ms + self.rng.choice((0, 1)))
        if self.store.queries.visible == self.store.queries.end:
            check_producers(self.store, view)

    def sample(self, messages: Iterable[Stored], count: int) -> list[Stored]:
        pool = list(messages)
        return self.rng.sample(pool, min(count, len(pool)))


def lone_of(batch: Batch) -> Lone:
    """The message of a batch of one, as the straight path has it."""
    return (
        batch.topic, batch.queue, bytes(batch.data), int(batch.hashes[0]) if len(batch.hashes) else 0,
        batch.producer_id, batch.producer_epoch, batch.first_sequence, batch.received_at_ms,
        Sender(batch.address, batch.port, *sender_of(batch.address, batch.port)),
    )  # fmt: skip
