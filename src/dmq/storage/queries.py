"""What can be asked of a store: a view of it that changes nothing.

What always holds: nothing beyond the visible offset is shown; if a derived file turns out to be wrong, everything
derived is built anew from the journal and the question is asked again. A question changes nothing that a second asking
could notice, so that one which needs the disk can be asked again once another thread has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from dmq.errors import Damaged, SequenceConflict, StaleEpoch, StoreClosed, UnknownTopic
from dmq.model import QUEUES_MAX, MessageId, retry_topic_name
from dmq.records.block import StoredBlocks
from dmq.storage.delay.wheel import Delay
from dmq.storage.file_pool import FilePool, NeedsDisk, Prepared
from dmq.storage.files import Buffer
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.journal.journal import Journal
from dmq.storage.journal.unit_writer import Writer
from dmq.storage.read.reader import Found, QueueEntries, Reader, Slice, TagFilter
from dmq.storage.read.record_group import Gathered, gather
from dmq.storage.read.record_origin import IdRun, OriginRun, origin_runs
from dmq.storage.state.derived import Derived
from dmq.storage.state.events import LimitPut, SubscriptionPut
from dmq.storage.state.positions import LagTable, Position
from dmq.storage.state.producers import Place
from dmq.storage.state.state import KeyTable, OpenTransaction, Topic, queue_key

__all__ = ["Queries"]

_CHECKED_BYTES: Final = 1 << 20  # in one turn of the loop

T = TypeVar("T")


class Queries:
    """Questions to a store. One owner asks, as with the store itself.

    Parameters:
        derived: what follows from the journal; the store replaces it after a rebuild.
        rebuild: called when a derived file turns out to be wrong; afterwards `derived` is a new one.

    Attributes:
        may_be_mended: whether another member may have the bytes of a damaged range of the journal.
    """

    def __init__(
        self,
        pool: FilePool,
        journal: Journal,
        derived: Derived,
        writer: Writer,
        reader: Reader,
        rebuild: Callable[[DerivedDamaged], None],
    ) -> None:
        self._pool = pool
        self._journal = journal
        self.derived = derived
        self._writer = writer
        self._reader = reader
        self.newest: Final = reader.newest
        """Messages that were just stored, if it is those; see `Reader.newest`."""
        self._rebuild = rebuild
        self.may_be_mended: Callable[[int, int], bool] = lambda start, end: False
        self._closed = False

    def close(self) -> None:
        """The store is closed: every further question that may need the disk raises StoreClosed."""
        self._closed = True

    def check_open(self) -> None:
        """Raises StoreClosed after `close`."""
        if self._closed:
            raise StoreClosed("the store is closed: open it again")

    def healed(self, ask: Callable[[], T]) -> T:
        """The answer to a question; if a derived file turns out wrong, after building all of them anew."""
        self.check_open()
        try:
            return ask()
        except DerivedDamaged as error:
            damage = error
        with self._pool.deferring(None) as had_prepared:
            if had_prepared:
                # Prepared bytes may be older than the file; what the disk says now counts.
                try:
                    return ask()
                except DerivedDamaged as error:
                    damage = error
            self._rebuild(damage)
            return ask()

    @contextlib.contextmanager
    def deferring(self, prepared: Prepared) -> Iterator[None]:
        """Ask within this without waiting for a disk: what is not prepared raises `NeedsDisk`; see `fetch`."""
        with self._pool.deferring(prepared):
            yield

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Within this, other threads may `fetch`."""
        self._pool.hold()
        try:
            yield
        finally:
            self._pool.release()

    def fetch(self, need: NeedsDisk) -> bytes:
        """Read what a question needs; from any thread, while the owner is `lending`."""
        return self._pool.get(need.path).read(need.position, need.size)

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The first journal offset kept."""
        return self._journal.start

    @property
    def end(self) -> int:
        """The journal offset the next unit gets."""
        return self._journal.end

    @property
    def visible(self) -> int:
        """Everything below this journal offset may be seen."""
        return self._writer.visibility.visible

    @property
    def flushed(self) -> int:
        """Everything below this journal offset would survive a power loss."""
        return self._writer.visibility.flushed

    @property
    def epoch(self) -> int:
        """Rises with every start of a broker, and with every one that follows a crash; every unit carries it."""
        return self._writer.epoch

    @property
    def journal_id(self) -> int:
        return self._journal.id

    @property
    def damage(self) -> list[tuple[int, int]]:
        """Journal ranges that cannot be read."""
        return list(self.derived.damage)

    # --- topics -------------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Raises UnknownTopic if there is none of that name."""
        topic = self.derived.state.topics.get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {name!r}: create it first", topic=name)
        return topic

    def topics(self) -> list[Topic]:
        """All topics, the built-in ones included."""
        return sorted(self.derived.state.topics.values(), key=lambda topic: topic.name)

    @property
    def topics_version(self) -> tuple[int, int, int]:
        """Another one whenever a topic was created or deleted, or has other settings."""
        state = self.derived.state
        return id(state), state.next_topic_id, state.topic_changes

    def find_topic(self, name: str) -> Topic | None:
        """The topic of a name, if there is one."""
        return self.derived.state.topics.get(name)

    def sought(self, group: str, topic_id: int, queue: int) -> int:
        """A number that changes whenever a group's position in a queue is set by hand; 0 if it never was."""
        return self.derived.state.sought.get((group, topic_id, queue), 0)

    def subscription(self, group: str, topic_id: int) -> SubscriptionPut | None:
        """What a group agreed on in a topic, if that had a version."""
        return self.derived.state.subscriptions.get((group, topic_id))

    def topic_by_id(self, topic_id: int) -> Topic | None:
        """The topic of an id, if it is still there."""
        return self.derived.state.topics_by_id.get(topic_id)

    def limits(self) -> list[LimitPut]:
        """How much a second topics and apps may be sent, or send."""
        return list(self.derived.state.limits.values())

    @property
    def keys(self) -> KeyTable:
        """The key-value space; to be read only."""
        return self.derived.state.keys

    @property
    def archived_to(self) -> int:
        """The journal offset below which the archive has everything; 0 if there never was one."""
        return self.derived.state.archived

    @property
    def expiring(self) -> Set[int]:
        """Ids of the topics that had messages with an expiry of their own."""
        return self.derived.state.expiring

    def retrying(self, group: str, topic_id: int, queue: int) -> int:
        """How many messages of a queue failed in a group and are not settled since: they wait, or are on offer."""
        target = self.find_topic(retry_topic_name(group, topic_id))
        if target is None or queue >= target.config.queues:
            return 0
        state = self.derived.state
        key = queue_key(target.id, queue)
        first, following = state.first.get(key, 0), state.next.get(key, 0)
        position = state.positions.get(group, target.id, queue)
        if position is not None:
            first = max(first, position.floor)
            following -= sum(end - start for start, end in position.ranges)
        return state.retrying.waiting(key) + max(0, following - first)

    def retrying_all(self, group: str, topic: Topic) -> int:
        """The same over all queues of a topic."""
        if retry_topic_name(group, topic.id) not in self.derived.state.topics:
            return 0
        return sum(self.retrying(group, topic.id, queue) for queue in range(topic.config.queues))

    @property
    def topic_count(self) -> int:
        """How many topics there are, those that are always there not counted."""
        return len(self.derived.state.topics) - 2

    @property
    def group_count(self) -> int:
        """How many groups have positions."""
        return len(self.derived.state.positions.groups())

    # --- reading ----------------------------------------------------------------------------------------------------

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        """(first offset kept, next offset) of a queue."""
        key = self.queue(topic, queue)[1]
        state = self.derived.state
        return state.first.get(key, 0), state.next.get(key, 0)

    def next_offset(self, key: int) -> int:
        """The next offset of a queue, by its key; 0 if there is no such queue."""
        return self.derived.state.next.get(key, 0)

    def next_offsets(self) -> dict[int, int]:
        """The next offsets of all queues that have had messages, by their keys; as they are now."""
        return {**self.derived.state.next}

    def read(
        self,
        topic: str,
        queue: int,
        offset: int,
        max_messages: int = 1000,
        max_bytes: int = 1 << 20,
        tags: TagFilter | None = None,
    ) -> Slice:
        """Visible messages of a queue from an offset on, each with its body in its record; see `Reader.read`."""
        found, _ = self.queue(topic, queue)
        return self._reader.plain(self.read_of(found, queue, offset, max_messages, max_bytes=max_bytes, tags=tags))

    def read_of(
        self, topic: Topic, queue: int, offset: int, max_messages: int, *, max_bytes: int, tags: TagFilter | None = None
    ) -> Slice:
        """`read` of a queue that there is, as its records are stored: `plain` or `hand_out` follows."""
        self.check_open()
        read = self._reader.read
        try:
            return read(topic, queue, offset, max_messages, max_bytes=max_bytes, tags=tags)
        except DerivedDamaged:
            return self.healed(lambda: read(topic, queue, offset, max_messages, max_bytes=max_bytes, tags=tags))

    def plain(self, found: Slice) -> Slice:
        """Messages with their bodies in their records; see `Reader.plain`."""
        return self._reader.plain(found)

    def hand_out(
        self, lengths: Sequence[int] | npt.NDArray[np.uint32], pieces: Sequence[memoryview], blocks: StoredBlocks
    ) -> tuple[Sequence[int] | npt.NDArray[np.uint32], list[Buffer]]:
        """Records of a slice for one who reads blocks; see `Reader.hand_out`."""
        return self._reader.hand_out(lengths, pieces, blocks)

    def id_runs(self, topic: Topic, queue: int, offsets: Sequence[int], pieces: Sequence[memoryview]) -> list[IdRun]:
        """The ids of records that `read` gave, as runs; see `dmq.storage.read.record_origin`."""
        return self.healed(lambda: self._reader.identities.runs(topic.id, queue, offsets, pieces))

    def origins(
        self, topic: Topic, queue: int, offsets: npt.NDArray[np.uint64], pieces: Sequence[memoryview]
    ) -> list[OriginRun]:
        """When records that `read` gave were stored and where they came from, as runs; see
        `dmq.storage.read.record_origin`."""
        reader, lookup = self._reader, self.derived.lookup
        return self.healed(
            lambda: origin_runs(reader.bytes_at, lookup.unit_holding, topic.id, queue, offsets=offsets, pieces=pieces)
        )

    def read_units(self, offset: int, max_bytes: int = 8 << 20) -> tuple[bytes | memoryview, int]:
        """Whole visible units, verbatim, from the one that holds an offset on, and the offset to go on with."""
        return self.healed(lambda: self._reader.raw_units(offset, self.visible, max_bytes))

    def check_units(self, start: int, end: int) -> int:
        """Look for damage in a range of the journal, some of it at a time; returns where to go on.

        Raises:
            Damaged: some was found, and another member may have the bytes.
        """
        at, stop = max(start, self.start), min(end, self.visible, start + _CHECKED_BYTES)
        while at < stop:
            try:
                at = self.healed(partial(self._reader.unit_holding, at)).end
            except Damaged as error:
                if self.may_be_mended(error.detail["start"], error.detail["end"]):
                    raise
                at = max(at + 1, int(error.detail["end"]))
        return at if at < min(end, self.visible) else end

    def queue_keys(self, topic_ids: Iterable[int], count_max: int) -> list[int] | None:
        """The keys of the queues of some topics that have had messages; None if there are more, or a topic is gone."""
        state = self.derived.state
        keys: list[int] = []
        for topic_id in topic_ids:
            if topic_id not in state.topics_by_id or len(keys) > count_max:
                return None
            keys += [key for queue in range(QUEUES_MAX) if (key := queue_key(topic_id, queue)) in state.next]
        return keys if len(keys) <= count_max else None

    def entries_behind(self, key: int, journal_offset: int, low: int, count: int) -> QueueEntries:
        """Where messages of a queue stand from a journal offset on; see `Reader.entries_behind`."""
        return self.healed(lambda: self._reader.entries_behind(key, journal_offset, low, count))

    def units_between(self, first: int, last: int, max_bytes: int) -> tuple[bytes | memoryview, int]:
        """Units from the one that holds a record to the one that holds another; see `Reader.units_between`."""
        return self.healed(lambda: self._reader.units_between(first, last, self.visible, max_bytes))

    def offset_since(self, topic: str, queue: int, time_ms: int) -> int:
        """The first offset of a queue stored at or after a time; the next one if there is none."""
        found, _ = self.queue(topic, queue)
        return self.healed(lambda: self._reader.offset_since(found.id, queue, time_ms))

    def find(
        self, *, key: str | None = None, message_id: MessageId | None = None, topic: str | None = None
    ) -> list[Found]:
        """Messages by key, or one message, as first stored and as moved since, by id; oldest first."""
        if message_id is not None:
            wanted = message_id
            return [f for f in self.healed(lambda: list(self._reader.find_id(wanted))) if topic in (None, f.topic)]
        assert key is not None, "a key or an id is needed"
        return self.healed(lambda: list(self._reader.find_key(key, topic)))

    def places(self, *, key: str | None = None, message_id: MessageId | None = None) -> list[int]:
        """Journal offsets of records that may have this key or id, rising; who asks compares the record itself."""
        if message_id is not None:
            wanted = message_id
            return self.healed(lambda: self._reader.places_of_id(wanted))
        assert key is not None, "a key or an id is needed"
        return self.healed(lambda: self._reader.places_of_key(key))

    def unit_start(self, journal_offset: int) -> int:
        """Where the unit begins that a journal offset lies in."""
        return self.healed(lambda: self.derived.lookup.unit_holding(journal_offset))

    def journal_offset(self, topic: str, queue: int, offset: int) -> int | None:
        """Where a message stands in the journal; None if it was lost."""
        key = self.queue(topic, queue)[1]
        columns = self.healed(lambda: next(iter(self.derived.queues.columns(key, offset, offset + 1))))
        return int(columns.offsets[0]) if columns.lengths[0] else None

    def located(self, topic: Topic, queue: int, offset: int) -> tuple[int, int, int, int]:
        """Where a message begins in the journal, and its size; and the same of the one before it.

        Without a message it is the visible offset, without one before it 0, and the size 0. Messages that were lost
        have a place, too, but no size.
        """
        key, state = queue_key(topic.id, queue), self.derived.state
        low, high = max(state.first.get(key, 0), offset - 1), min(state.next.get(key, 0), offset + 1)
        found: dict[int, tuple[int, int]] = {}
        if low < high:
            for part in self.healed(lambda: [*self.derived.queues.columns(key, low, high)]):
                entries = zip(part.offsets.tolist(), part.lengths.tolist(), strict=True)
                found |= zip(range(part.first, high), entries, strict=False)
        return *found.get(offset, (self.visible, 0)), *found.get(offset - 1, (0, 0))

    def raw_record(self, found: Found) -> memoryview:
        """The bytes of a record that was found."""
        record, start = found.record, found.record.start
        return memoryview(record.buffer)[start : start + record.length]

    def record_at(self, journal_offset: int) -> Found | None:
        """The message that stands at a journal offset; None if its topic is gone."""
        return self.healed(lambda: self._reader.record_at(journal_offset))

    def queue(self, topic: str, queue: int) -> tuple[Topic, int]:
        """A topic and the key of one of its queues.

        Raises:
            UnknownTopic: there is no such topic or queue.
        """
        found = self.topic(topic)
        if not 0 <= queue < found.config.queues:
            raise UnknownTopic(
                f"topic {topic!r} has queues 0-{found.config.queues - 1}, not {queue}", topic=topic, queue=queue
            )
        return found, queue_key(found.id, queue)

    # --- positions, delays, transactions ----------------------------------------------------------------------------

    def position(self, group: str, topic: str, queue: int) -> Position | None:
        """How far a group has come in a queue; None if it never was there."""
        return self.derived.state.positions.get(group, self.queue(topic, queue)[0].id, queue)

    def positions_of(self, group: str) -> dict[tuple[int, int], Position]:
        """All positions of a group, by (topic id, queue)."""
        return dict(self.derived.state.positions.groups().get(group, {}))

    def groups(self) -> list[str]:
        return sorted(self.derived.state.positions.groups())

    def groups_at(self, topic_id: int) -> list[str]:
        """The groups that have a position in a topic."""
        groups = self.derived.state.positions.groups()
        return [name for name, places in groups.items() if any(place[0] == topic_id for place in places)]

    @property
    def lags(self) -> LagTable:
        """How far every group is behind in every topic."""
        state = self.derived.state
        return state.keep_lags() if state.lags is None else state.lags

    def gather(self, offsets: Sequence[int]) -> tuple[list[Gathered], list[int]]:
        """The records at these journal offsets, batch by batch, and the offsets that cannot be read."""
        return self.healed(lambda: gather(self._reader, offsets))

    def delays_after(self, due_ms: int, offset: int, limit: int) -> list[Delay]:
        """Pending delayed records behind one, in the order they are due, at most so many."""
        return self.healed(lambda: self.derived.wheel.after(due_ms, offset, limit))

    @property
    def delays_pending(self) -> int:
        return self.derived.wheel.pending

    def transactions(self) -> dict[MessageId, OpenTransaction]:
        """Half messages that are neither committed nor rolled back."""
        return {MessageId.from_bytes(raw): half for raw, half in self.derived.state.transactions.items()}

    def transaction_group(self, producer_id: int) -> str | None:
        """The producer group that a producer of half messages belongs to."""
        return self.derived.state.transaction_groups.get(producer_id)

    @property
    def transaction_count(self) -> int:
        """How many half messages are open."""
        return len(self.derived.state.transactions)

    def is_open(self, message_id: bytes) -> bool:
        """Whether a half message, by its 16-byte id, is neither committed nor rolled back."""
        return message_id in self.derived.state.transactions

    def half(self, message_id: bytes) -> OpenTransaction | None:
        """A half message that is neither committed nor rolled back."""
        return self.derived.state.transactions.get(message_id)

    def half_bytes(self, message_ids: Iterable[bytes]) -> int:
        """How many bytes the records of half messages have, of those that are open."""
        found = map(self.derived.state.transactions.get, message_ids)
        return sum([half.length for half in found if half is not None])

    @property
    def has_joint_transactions(self) -> bool:
        """Whether any half messages end together."""
        return self.derived.state.joined.has_any

    def transaction_first(self, message_id: bytes) -> bytes:
        """The first half message of the transaction that one belongs to; often itself."""
        return self.derived.state.joined.first_of(message_id)

    def transaction_members(self, first: bytes) -> list[bytes]:
        """The further half messages of a transaction that are open, by its first one."""
        state = self.derived.state
        return [member for member in state.joined.members_of(first) if member in state.transactions]

    def is_resent(
        self, topic: Topic, queue: int, producer_id: int, epoch: int, first_sequence: int, count: int
    ) -> bool:
        """Whether a batch is one that was stored before, and will be answered with the first one's place."""
        if not producer_id:
            return False
        key = queue_key(topic.id, queue)
        try:
            return self.derived.state.producers.look(producer_id, epoch, key, first_sequence, count=count) is not None
        except (SequenceConflict, StaleEpoch):
            return False  # the write will raise it

    def producer_epoch(self, producer_id: int) -> int | None:
        """The newest epoch a producer has written with; None if it is not remembered."""
        return self.derived.state.producers.epoch_of(producer_id)

    def producer_places(self, producer_id: int, topic: Topic) -> dict[int, Place]:
        """Where a producer's last batch went in each queue of a topic."""
        last = self.derived.state.producers.last_places(producer_id)
        return {key & 0xFF: place for key, place in last.items() if key >> 8 == topic.id}
