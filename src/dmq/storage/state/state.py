"""State: what the journal says, small enough to keep in memory and to write whole.

`State` has the topics with their incarnations, the next offset of every queue, positions, producers and open
transactions. It is built by applying units in order and in no other way; `snapshot` and `restore` turn it into bytes
and back, for the snapshot unit at the head of every segment and for the checkpoint. Parts of it have classes of their
own: `JoinedTransactions`, `KeyTable` and `RetryCounts`.

What always holds: restoring a snapshot and applying the units after it gives the same state as applying all units; no
part of the state depends on a clock.

The table of epochs: which leader began to write where.

Pure code. Two journals of one shard are equal up to the end they share of the newest epoch they share, so the last rows
of the table are all that two members have to compare. An epoch has one leader and one start; a lone broker is its own
leader, with replica id 0.

What always holds: epochs and starts rise from row to row; no more than `ROWS_MAX` rows are kept, the newest ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from dmq.errors import RecordCorrupt
from dmq.model import HALF_TOPIC, SCHEDULE_TOPIC, MessageId, TopicConfig, retry_topic_name, retry_topic_parts
from dmq.offset_runs import bitmap_runs
from dmq.storage.journal.unit import EXPIRING, NAMED, Row, Unit
from dmq.storage.state.events import (
    Archived,
    DelaysDone,
    EpochStarted,
    Event,
    KeyPut,
    LimitPut,
    Outcome,
    PositionDropped,
    PositionSet,
    Settled,
    SnapshotTaken,
    SubscriptionPut,
    TopicDropped,
    TopicPut,
    TransactionEnded,
    TransactionGroup,
    TransactionsEnded,
    TransactionsJoined,
)
from dmq.storage.state.positions import LagTable, PositionTable, passed
from dmq.storage.state.producers import Dumped, Place, ProducerTable

__all__ = [
    "ROWS_MAX",
    "EpochRow",
    "EpochTable",
    "JoinedTransactions",
    "KeyTable",
    "OpenTransaction",
    "RetryCounts",
    "Snapshot",
    "State",
    "Topic",
    "queue_key",
]

ROWS_MAX: Final = 64


class EpochRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An epoch, the replica id of its leader, and the journal offset of the unit that began it."""

    epoch: int
    leader: int
    start: int


class EpochTable:
    """The newest epochs of a journal, oldest first."""

    def __init__(self, rows: Iterable[EpochRow] = ()) -> None:
        self._rows = [*rows][-ROWS_MAX:]

    def __iter__(self) -> Iterator[EpochRow]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> EpochRow | None:
        """The newest one."""
        return self._rows[-1] if self._rows else None

    def began(self, row: EpochRow) -> None:
        """A leader began to write. One that is known already, or older than the newest, changes nothing."""
        last = self.last
        if last is None or (row.epoch > last.epoch and row.start > last.start):
            self._rows = [*self._rows[1 - ROWS_MAX :], row]

    def cut(self, end: int) -> None:
        """The journal ends here now."""
        self._rows = [row for row in self._rows if row.start < end]

    def dump(self) -> list[EpochRow]:
        """All rows; the list does not change afterwards."""
        return self._rows


_ID_BYTES = 16


class JoinedTransactions:
    """Which half messages end together: all of a transaction, under the id of its first one. Ids have 16 bytes.

    A transaction with one message is not mentioned here; of one with more, the further messages name the first. What is
    kept of a message goes when it ends, and what is kept of one that never was stored goes when its first one ends.
    """

    def __init__(self) -> None:
        self._firsts: dict[bytes, bytes] = {}
        self._members: dict[bytes, dict[bytes, None]] = {}

    def join(self, pairs: bytes) -> None:
        """Messages belong to transactions: ids in pairs, a message's own and that of the first."""
        for at in range(0, len(pairs), 2 * _ID_BYTES):
            member, first = pairs[at : at + _ID_BYTES], pairs[at + _ID_BYTES : at + 2 * _ID_BYTES]
            self._put(member, first)

    def _put(self, member: bytes, first: bytes) -> None:
        if member != first and member not in self._firsts:
            self._firsts[member] = first
            self._members.setdefault(first, {})[member] = None

    @property
    def has_any(self) -> bool:
        """Whether any transaction has more than one message."""
        return bool(self._firsts)

    def first_of(self, message_id: bytes) -> bytes:
        """The first message of a transaction, by any of them."""
        return self._firsts.get(message_id, message_id)

    def members_of(self, first: bytes) -> Collection[bytes]:
        """The further messages of a transaction, by the first."""
        return self._members.get(first, ())

    def ended(self, message_ids: Iterable[bytes], still_open: Collection[bytes]) -> None:
        """Messages have ended.

        Parameters:
            still_open: those that have not.
        """
        if not self._firsts:
            return
        for message_id in message_ids:
            self._forget(message_id)
            members = self._members.pop(message_id, None)
            if members is None:
                continue
            kept = {member: None for member in members if member in still_open}
            if kept:
                self._members[message_id] = kept
            for member in members:
                if member not in kept:
                    del self._firsts[member]

    def _forget(self, member: bytes) -> None:
        first = self._firsts.pop(member, None)
        if first is not None:
            members = self._members[first]
            del members[member]
            if not members:
                del self._members[first]

    def dump(self) -> list[tuple[bytes, bytes]]:
        """Everything, as plain data."""
        return list(self._firsts.items())

    def load(self, dumped: Iterable[tuple[bytes, bytes]]) -> None:
        """Become what `dump` gave."""
        for member, first in dumped:
            self._put(member, first)


class KeyTable:
    """The key-value space in the journal, in which the parts of an installation tell each other what they need.

    A namespace holds keys, a key holds some bytes, for ever or until a time that its writer keeps moving on: so what is
    said of a process goes when the process does. No clock changes the table: a reader passes over what has expired, and
    the broker writes an event when it takes it out. Keys and bytes are counted, so that the broker can refuse more.
    """

    def __init__(self) -> None:
        self._namespaces: dict[str, dict[str, KeyPut]] = {}
        self.count = 0
        self.bytes = 0

    def apply(self, event: KeyPut) -> None:
        """Take in one event: the key is put, or, without a value, gone."""
        keys = self._namespaces.get(event.namespace, {})
        before = keys.pop(event.key, None)
        if before is not None:
            self.count -= 1
            self.bytes -= size_of(before)
        if event.value is not None:
            self._namespaces.setdefault(event.namespace, keys)[event.key] = event
            self.count += 1
            self.bytes += size_of(event)
        elif not keys:
            self._namespaces.pop(event.namespace, None)

    def get(self, namespace: str, key: str) -> KeyPut | None:
        """What a key holds, expired or not."""
        return self._namespaces.get(namespace, {}).get(key)

    def among(self, namespace: str) -> list[KeyPut]:
        """The keys of a namespace by name, expired or not."""
        keys = self._namespaces.get(namespace, {})
        return [keys[name] for name in sorted(keys)]

    def __iter__(self) -> Iterator[KeyPut]:
        for keys in self._namespaces.values():
            yield from keys.values()

    def dump(self) -> list[KeyPut]:
        """All of it, as `load` takes it."""
        return list(self)

    def load(self, dumped: list[KeyPut]) -> None:
        """Become what `dump` gave; called on a new table only."""
        for event in dumped:
            self.apply(event)


def size_of(event: KeyPut) -> int:
    """How many bytes an entry counts for."""
    return len(event.namespace.encode()) + len(event.key.encode()) + len(event.value or b"")


class RetryCounts:
    """By the key of a retry topic's queue (`queue_key`), how many messages wait in the schedule to come into it.

    A failed message is settled as RETRIED where it was, and waits in the schedule until it is due in the retry topic of
    its group; each group has one for every topic in which a message of it ever failed (ADR 9). The counts follow from
    the events and batches of the journal alone.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def left(self, key: int, count: int) -> None:
        """Messages were settled as RETRIED, to come into this queue of a retry topic."""
        self.counts[key] = self.counts.get(key, 0) + count

    def arrived(self, key: int, count: int) -> None:
        """Messages came into a queue; of interest if it is one of a retry topic."""
        if key in self.counts:
            # A dead letter that is resent arrives without having waited in the schedule.
            self.counts[key] = max(0, self.counts[key] - count)

    def waiting(self, key: int) -> int:
        """How many messages wait in the schedule."""
        return max(0, self.counts.get(key, 0))

    def drop(self, topic_id: int) -> None:
        """The topic was deleted."""
        for key in [key for key in self.counts if key >> 8 == topic_id]:
            del self.counts[key]

    def dump(self) -> list[tuple[int, int]]:
        return sorted(self.counts.items())

    def load(self, counts: list[tuple[int, int]]) -> None:
        self.counts = dict(counts)


# Of the topics that always exist: ids that no created topic gets.
SCHEDULE_ID: Final = 1
HALF_ID: Final = 2
_FIRST_TOPIC_ID: Final = 16
_BUILT_IN_QUEUES: Final = 255
_TRANSACTION_GROUPS_MAX: Final = 100_000


class Topic(msgspec.Struct, frozen=True, array_like=True):
    """A topic in one of its incarnations.

    What the journal had for a topic of this name before `created_at`, a journal offset, was for an earlier one. From
    `incarnation` on it is as of `TopicPut`.
    """

    id: int
    name: str
    config: TopicConfig
    created_at: int = 0
    incarnation: int = 0
    slots_version: int = 0
    is_removed: bool = False


class OpenTransaction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A half message that is neither committed nor rolled back."""

    journal_offset: int
    length: int
    stored_at_ms: int
    group: str = ""  # whose producers can be asked about it


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """A state as plain data."""

    topics: list[Topic]
    next_topic_id: int
    queues: bytes  # rows of _QUEUES
    positions: list[tuple[str, list[tuple[int, int, int, list[tuple[int, int]]]]]]
    producers: Dumped
    transactions: list[tuple[bytes, OpenTransaction]]
    archived: int = 0
    expiring: list[int] = []
    retrying: list[tuple[int, int]] = []
    transaction_groups: list[tuple[int, str]] = []
    subscriptions: list[SubscriptionPut] = []
    limits: list[LimitPut] = []
    seeks: int = 0
    sought: list[tuple[str, int, int, int]] = []
    keys: list[KeyPut] = []
    joined: list[tuple[bytes, bytes]] = []
    epochs: list[EpochRow] = []

    def encode(self) -> bytes:
        return _encoder.encode(self)


_QUEUES: Final = np.dtype([("key", ">u8"), ("first", ">u8"), ("next", ">u8")])
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def queue_key(topic_id: int, queue: int) -> int:
    """Topic id and queue as one number, the order of index runs."""
    return topic_id << 8 | queue


class State:
    """What the units up to a journal offset say; see the head of the module for what is in it."""

    def __init__(self, producers: ProducerTable) -> None:
        built_in = TopicConfig(queues=_BUILT_IN_QUEUES)
        self.topics_by_id: dict[int, Topic] = {
            SCHEDULE_ID: Topic(SCHEDULE_ID, SCHEDULE_TOPIC, built_in),
            HALF_ID: Topic(HALF_ID, HALF_TOPIC, built_in),
        }
        self.topics: dict[str, Topic] = {topic.name: topic for topic in self.topics_by_id.values()}
        self.next_topic_id = _FIRST_TOPIC_ID
        self.topic_changes = 0  # of topics created, changed and deleted since the start
        self.first: dict[int, int] = {}  # per queue key, the oldest offset the journal still has; missing = 0
        self.next: dict[int, int] = {}  # per queue key, the next offset to give; missing = 0
        self.positions = PositionTable()
        self.producers = producers
        self.transactions: dict[bytes, OpenTransaction] = {}
        self.transaction_groups: dict[int, str] = {}  # by producer, the ones named longest ago first
        self.archived = 0  # journal offset: everything below is in the archive
        self.expiring: set[int] = set()  # ids of topics that had messages with an expiry of their own
        self.retrying = RetryCounts()
        self.subscriptions: dict[tuple[str, int], SubscriptionPut] = {}  # by group and topic id
        self.limits: dict[tuple[int, str], LimitPut] = {}  # by topic id, 0 for an app, and app
        self.seeks = 0  # how often a position was set that was there before
        self.sought: dict[tuple[str, int, int], int] = {}  # by group, topic id and queue, which of them was the last
        self.keys = KeyTable()
        self.joined = JoinedTransactions()
        self.epochs = EpochTable()
        self.lags: LagTable | None = None  # once the store is open; see `keep_lags`

    def keep_lags(self) -> LagTable:
        """Count the lags, and keep the sums from now on."""
        self.lags = LagTable(self)
        return self.lags

    def _passed(self, group: str, topic_id: int, queue: int) -> int:
        first = self.first.get(topic_id << 8 | queue, 0) if self.first else 0
        return passed(self.positions.get(group, topic_id, queue), first)

    def _settle(self, group: str, topic_id: int, queue: int, ranges: Iterable[tuple[int, int]]) -> None:
        lags = self.lags
        if lags is None:
            self.positions.settle(group, topic_id, queue, ranges)
            return
        first = self.first.get(topic_id << 8 | queue, 0)
        position = self.positions.get(group, topic_id, queue)
        if position is not None and position.floor >= first:
            before = position.settled
            self.positions.settle(group, topic_id, queue, ranges)
            lags.moved(group, topic_id, position.settled - before)
        else:  # it settles, among others, what retention has dropped
            before = passed(position, first)
            self.positions.settle(group, topic_id, queue, ranges)
            lags.moved(group, topic_id, self._passed(group, topic_id, queue) - before)

    def queue_count(self, topic_id: int) -> int:
        """How many queues a topic has; 0 if there is none."""
        topic = self.topics_by_id.get(topic_id)
        return 0 if topic is None else topic.config.queues

    # --- applying ---------------------------------------------------------------------------------------------------

    def apply_event(self, event: Event, at: int = 0) -> None:
        """Take in one event. Events about topics that are gone change nothing.

        Parameters:
            at: the journal offset of its unit.
        """
        match event:
            case Settled(group, topic_id, queue, start, count, _, bitmap):
                if topic_id in self.topics_by_id:
                    ranges = ((start, start + count),) if count and not bitmap else bitmap_runs(start, count, bitmap)
                    self._settle(group, topic_id, queue, ranges)
                    if event.outcome in (Outcome.RETRIED, Outcome.CARRIED):
                        self._on_the_way(event)
            case PositionSet(group, topic_id, queue, offset):
                if topic_id in self.topics_by_id:
                    if self.positions.get(group, topic_id, queue) is not None:
                        self.seeks += 1
                        self.sought[group, topic_id, queue] = self.seeks
                    passed_before = self._passed(group, topic_id, queue)
                    self.positions.set(group, topic_id, queue, offset)
                    if self.lags is not None:
                        self.lags.moved(group, topic_id, self._passed(group, topic_id, queue) - passed_before)
            case PositionDropped(group, topic_id_or_all):
                if self.lags is not None:
                    for topic_id in {at[0] for at in self.positions.groups().get(group, ())}:
                        if topic_id_or_all in (None, topic_id):
                            self.lags.dropped(topic_id, group)
                self.positions.drop_group(group, topic_id_or_all)
                for key in [key for key in self.subscriptions if key[0] == group and topic_id_or_all in (None, key[1])]:
                    del self.subscriptions[key]
                for place in [p for p in self.sought if p[0] == group and topic_id_or_all in (None, p[1])]:
                    del self.sought[place]
            case TopicPut(topic_id, name, config):
                before = self.topics_by_id.get(topic_id)
                topic = Topic(
                    topic_id,
                    name,
                    config,
                    at if before is None else before.created_at,
                    incarnation=event.incarnation,
                    slots_version=event.slots_version,
                    is_removed=event.is_removed,
                )
                self.topic_changes += 1
                self.topics_by_id[topic_id] = topic
                self.topics[name] = topic
                self.next_topic_id = max(self.next_topic_id, topic_id + 1)
            case TopicDropped(topic_id):
                self._drop_topic(topic_id)
            case TransactionEnded(message_id):
                self._end_transactions(message_id)
            case TransactionGroup(producer_id, group):
                self._name_group(producer_id, group)
            case TransactionsEnded(message_ids):
                self._end_transactions(message_ids)
            case TransactionsJoined(pairs):
                self.joined.join(pairs)
            case Archived(offset):
                self.archived = max(self.archived, offset)
            case SubscriptionPut(group, topic_id):
                if topic_id in self.topics_by_id:
                    self.subscriptions[group, topic_id] = event
            case LimitPut(topic_id, app):
                self._limit(event, topic_id, app)
            case KeyPut():
                self.keys.apply(event)
            case EpochStarted(epoch, leader):
                self.epochs.began(EpochRow(epoch, leader, at))
            case DelaysDone() | SnapshotTaken():
                pass  # the wheel's, and for an open without a checkpoint

    def _on_the_way(self, event: Settled) -> None:
        name = self.topics_by_id[event.topic_id].name
        if retry_topic_parts(name) is None:
            if event.outcome == Outcome.CARRIED:
                return
            name = retry_topic_name(event.group, event.topic_id)
        target = self.topics.get(name)
        if target is not None:
            bits = int.from_bytes(event.bitmap, "little") if event.bitmap else (1 << event.count) - 1
            self.retrying.left(queue_key(target.id, event.queue), bits.bit_count())

    def _limit(self, event: LimitPut, topic_id: int, app: str) -> None:
        self.limits.pop((topic_id, app), None)
        is_limit = event.messages is not None or event.bytes is not None
        if is_limit and (not topic_id or topic_id in self.topics_by_id):
            self.limits[topic_id, app] = event

    def _drop_topic(self, topic_id: int) -> None:
        topic = self.topics_by_id.pop(topic_id, None)
        if topic is None:
            return
        self.topic_changes += 1
        if self.lags is not None:
            self.lags.dropped(topic_id)
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]
        for counters in (self.first, self.next):
            for key in [key for key in counters if key >> 8 == topic_id]:
                del counters[key]
        self.positions.drop_topic(topic_id)
        self.producers.drop_topic(topic_id)
        self.expiring.discard(topic_id)
        self.retrying.drop(topic_id)
        self.limits.pop((topic_id, ""), None)
        for mine in [mine for mine in self.subscriptions if mine[1] == topic_id]:
            del self.subscriptions[mine]
        for place in [place for place in self.sought if place[1] == topic_id]:
            del self.sought[place]

    def apply_batch(self, row: Row) -> int | None:
        """Take in one batch of messages; returns where its queue ended before, None if its topic is gone."""
        _, _, _, records, topic_id, queue, flags, _, first, _, _, _ = row  # for every batch: each name is read once
        if topic_id not in self.topics_by_id:
            return None
        key = topic_id << 8 | queue
        before, following = self.next.get(key, 0), first + records
        self.next[key] = following
        if self.lags is not None:
            self.lags.stored(key, following - before)
        if flags & EXPIRING:
            self.expiring.add(topic_id)
        if key in self.retrying.counts:
            self.retrying.arrived(key, records)
        return before

    def remember_producers(self, unit: Unit) -> None:
        """Keep what makes resent batches of a unit recognisable."""
        start, end, stored_at_ms = unit.start, unit.end, unit.header.stored_at_ms
        remember = self.producers.remember
        for producer_id, epoch, first_sequence, records, topic_id, queue, flags, _, first_offset, _, _, _ in unit.rows:
            if producer_id and topic_id:
                place = Place(first_sequence, records, first_offset, start, unit_end=end)
                remember(
                    producer_id, epoch, flags & NAMED != 0, topic_id << 8 | queue, place=place, used_at_ms=stored_at_ms
                )

    def open_transaction(self, message_id: MessageId, journal_offset: int, length: int, stored_at_ms: int) -> None:
        """A half message was stored, or stored again to outlive its segment."""
        raw = message_id.to_bytes()
        before = self.transactions.get(raw)
        if before is None:
            group = self.transaction_groups.get(message_id.producer_id, "")
        else:
            stored_at_ms, group = before.stored_at_ms, before.group
        self.transactions[raw] = OpenTransaction(journal_offset, length, stored_at_ms, group)

    def _end_transactions(self, packed: bytes) -> None:
        ids = [packed[at : at + 16] for at in range(0, len(packed), 16)]
        for message_id in ids:
            self.transactions.pop(message_id, None)
        self.joined.ended(ids, self.transactions)

    def _name_group(self, producer_id: int, group: str) -> None:
        self.transaction_groups.pop(producer_id, None)
        self.transaction_groups[producer_id] = group
        if len(self.transaction_groups) > _TRANSACTION_GROUPS_MAX:
            del self.transaction_groups[next(iter(self.transaction_groups))]

    def forget_producers(self, now_ms: int) -> None:
        """Forget anonymous producers that were silent for long, and the groups of those that are not remembered.

        A producer that comes back names its group again; what it has open has its group itself.
        """
        before = len(self.producers)
        self.producers.expire(now_ms)
        if len(self.producers) < before or len(self.transaction_groups) > before:
            known = self.producers.epoch_of
            self.transaction_groups = {
                producer_id: group
                for producer_id, group in self.transaction_groups.items()
                if known(producer_id) is not None
            }

    # --- as bytes ---------------------------------------------------------------------------------------------------

    def snapshot(self, before: int) -> bytes:
        """Everything the units below the journal offset `before` say."""
        return self.set_aside(before).encode()

    def set_aside(self, before: int, *, with_positions: bool = True) -> Snapshot:
        """What `snapshot` encodes; nothing of it changes when the state does, so another thread may do that."""
        queues = np.empty(len(self.next), _QUEUES)
        if self.next:
            queues["key"] = np.fromiter(self.next, np.uint64, len(self.next))
            queues["next"] = np.fromiter(self.next.values(), np.uint64, len(self.next))
            queues["first"] = np.fromiter((self.first.get(key, 0) for key in self.next), np.uint64, len(self.next))
        return Snapshot(
            [topic for topic in self.topics_by_id.values() if topic.id >= _FIRST_TOPIC_ID],
            self.next_topic_id,
            queues.tobytes(),
            self.positions.dump() if with_positions else [],
            producers=self.producers.dump(before),
            transactions=list(self.transactions.items()),
            archived=self.archived,
            expiring=sorted(self.expiring),
            retrying=self.retrying.dump(),
            transaction_groups=list(self.transaction_groups.items()),
            subscriptions=list(self.subscriptions.values()),
            limits=list(self.limits.values()),
            seeks=self.seeks,
            sought=[(*place, last) for place, last in self.sought.items()],
            keys=self.keys.dump(),
            joined=self.joined.dump(),
            epochs=self.epochs.dump(),
        )

    def restore(self, raw: bytes) -> None:
        """Become what `snapshot` gave; called on a new state only.

        Raises:
            RecordCorrupt: the bytes are not a snapshot.
        """
        try:
            snapshot = _decoder.decode(raw)
            queues = np.frombuffer(snapshot.queues, _QUEUES)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise RecordCorrupt(f"a snapshot of the store's state cannot be read: {error}") from error
        for topic in snapshot.topics:
            self.topics_by_id[topic.id] = topic
            self.topics[topic.name] = topic
        self.next_topic_id = snapshot.next_topic_id
        keys = queues["key"].tolist()
        self.next = dict(zip(keys, queues["next"].tolist(), strict=True))
        self.first = {key: first for key, first in zip(keys, queues["first"].tolist(), strict=True) if first}
        self.positions.load(snapshot.positions)
        self.producers.load(snapshot.producers)
        self.transactions = dict(snapshot.transactions)
        self.archived = snapshot.archived
        self.expiring = set(snapshot.expiring)
        self.retrying.load(snapshot.retrying)
        self.subscriptions = {(said.group, said.topic_id): said for said in snapshot.subscriptions}
        self.transaction_groups = dict(snapshot.transaction_groups)
        self.limits = {(said.topic_id, said.app): said for said in snapshot.limits}
        self.seeks = snapshot.seeks
        self.sought = {(group, topic_id, queue): last for group, topic_id, queue, last in snapshot.sought}
        self.keys.load(snapshot.keys)
        self.joined.load(snapshot.joined)
        self.epochs = EpochTable(snapshot.epochs)

    def start_at_snapshot(self) -> None:
        """After restoring the snapshot at the journal's start: what lies before it is gone, so queues begin there."""
        self.first = {key: following for key, following in self.next.items() if following}
