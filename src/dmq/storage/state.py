"""State: what the journal says, small enough to keep in memory and to write whole.

Topics with their incarnations, the next offset of every queue, positions, producers, open transactions. It is built by
applying units in order and in no other way; `snapshot` and `restore` turn it into bytes and back, for the snapshot unit
at the head of every segment and for the checkpoint.

What always holds: restoring a snapshot and applying the units after it gives the same state as applying all units.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from dmq.errors import RecordCorrupt
from dmq.model import MessageId, TopicConfig
from dmq.storage.events import (
    Archived,
    DelaysDone,
    EpochStarted,
    Event,
    PositionDropped,
    PositionSet,
    Settled,
    SnapshotTaken,
    TopicDropped,
    TopicPut,
    TransactionEnded,
)
from dmq.storage.positions import PositionTable, bitmap_ranges
from dmq.storage.producers import Dumped, Place, ProducerTable
from dmq.storage.units import NAMED, Row, Unit

__all__ = ["HALF_TOPIC", "SCHEDULE_TOPIC", "OpenTransaction", "State", "Topic", "queue_key"]

# Topics that are always there, under ids no created topic gets.
SCHEDULE_TOPIC: Final = "%SCHEDULE%"
SCHEDULE_ID: Final = 1
HALF_TOPIC: Final = "%HALF%"
HALF_ID: Final = 2
_FIRST_TOPIC_ID: Final = 16
_BUILT_IN_QUEUES: Final = 255


class Topic(msgspec.Struct, frozen=True, array_like=True):
    """A topic in one of its incarnations."""

    id: int
    name: str
    config: TopicConfig


class OpenTransaction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A half message that is neither committed nor rolled back."""

    journal_offset: int
    length: int
    stored_at_ms: int


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    topics: list[Topic]
    next_topic_id: int
    queues: bytes  # rows of _QUEUES
    positions: list[tuple[str, list[tuple[int, int, int, list[tuple[int, int]]]]]]
    producers: Dumped
    transactions: list[tuple[bytes, OpenTransaction]]
    archived: int = 0


_QUEUES: Final = np.dtype([("key", ">u8"), ("first", ">u8"), ("next", ">u8")])
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


def queue_key(topic_id: int, queue: int) -> int:
    """Topic id and queue as one number, the order of index runs."""
    return topic_id << 8 | queue


class State:
    """See the module."""

    def __init__(self, producers: ProducerTable) -> None:
        built_in = TopicConfig(queues=_BUILT_IN_QUEUES)
        self.topics_by_id: dict[int, Topic] = {
            SCHEDULE_ID: Topic(SCHEDULE_ID, SCHEDULE_TOPIC, built_in),
            HALF_ID: Topic(HALF_ID, HALF_TOPIC, built_in),
        }
        self.topics: dict[str, Topic] = {topic.name: topic for topic in self.topics_by_id.values()}
        self.next_topic_id = _FIRST_TOPIC_ID
        self.first: dict[int, int] = {}  # per queue key, the oldest offset the journal still has; missing = 0
        self.next: dict[int, int] = {}  # per queue key, the next offset to give; missing = 0
        self.positions = PositionTable()
        self.producers = producers
        self.transactions: dict[bytes, OpenTransaction] = {}
        self.archived = 0  # journal offset: everything below is in the archive

    # --- applying ---------------------------------------------------------------------------------------------------

    def apply_event(self, event: Event) -> None:
        """Take in one event. Events about topics that are gone change nothing."""
        match event:
            case Settled(group, topic_id, queue):
                if topic_id in self.topics_by_id:
                    ranges = bitmap_ranges(event.start, event.count, event.bitmap)
                    self.positions.settle(group, topic_id, queue, ranges)
            case PositionSet(group, topic_id, queue, offset):
                if topic_id in self.topics_by_id:
                    self.positions.set(group, topic_id, queue, offset)
            case PositionDropped(group, topic_id_or_all):
                self.positions.drop_group(group, topic_id_or_all)
            case TopicPut(topic_id, name, config):
                topic = Topic(topic_id, name, config)
                self.topics_by_id[topic_id] = topic
                self.topics[name] = topic
                self.next_topic_id = max(self.next_topic_id, topic_id + 1)
            case TopicDropped(topic_id):
                self._drop_topic(topic_id)
            case TransactionEnded(message_id):
                self.transactions.pop(message_id, None)
            case Archived(offset):
                self.archived = max(self.archived, offset)
            case DelaysDone() | EpochStarted() | SnapshotTaken():
                pass  # the wheel's, the journal's, and for an open without a checkpoint

    def _drop_topic(self, topic_id: int) -> None:
        topic = self.topics_by_id.pop(topic_id, None)
        if topic is None:
            return
        if self.topics.get(topic.name) is topic:
            del self.topics[topic.name]
        for counters in (self.first, self.next):
            for key in [key for key in counters if key >> 8 == topic_id]:
                del counters[key]
        self.positions.drop_topic(topic_id)
        self.producers.drop_topic(topic_id)

    def apply_batch(self, unit: Unit, row: Row) -> bool:
        """Take in one batch of messages; returns whether its topic is still there."""
        if row.topic_id not in self.topics_by_id:
            return False
        self.next[queue_key(row.topic_id, row.queue)] = row.first_queue_offset + row.records
        return True

    def remember_producer(self, unit: Unit, row: Row) -> None:
        """Keep what makes a resent batch recognisable."""
        if row.producer_id:
            place = Place(row.first_sequence, row.records, row.first_queue_offset, unit.start, unit.end)
            self.producers.remember(
                row.producer_id,
                row.producer_epoch,
                bool(row.flags & NAMED),
                queue_key(row.topic_id, row.queue),
                place,
                unit.header.stored_at_ms,
            )

    def open_transaction(self, message_id: MessageId, journal_offset: int, length: int, stored_at_ms: int) -> None:
        """A half message was stored, or stored again to outlive its segment."""
        raw = message_id.to_bytes()
        before = self.transactions.get(raw)
        began_at_ms = before.stored_at_ms if before else stored_at_ms
        self.transactions[raw] = OpenTransaction(journal_offset, length, began_at_ms)

    # --- as bytes ---------------------------------------------------------------------------------------------------

    def snapshot(self, before: int, *, with_positions: bool = True) -> bytes:
        """Everything the units below the journal offset `before` say."""
        queues = np.empty(len(self.next), _QUEUES)
        if self.next:
            queues["key"] = np.fromiter(self.next, np.uint64, len(self.next))
            queues["next"] = np.fromiter(self.next.values(), np.uint64, len(self.next))
            queues["first"] = np.fromiter((self.first.get(key, 0) for key in self.next), np.uint64, len(self.next))
        return _encoder.encode(
            _Snapshot(
                [topic for topic in self.topics_by_id.values() if topic.id >= _FIRST_TOPIC_ID],
                self.next_topic_id,
                queues.tobytes(),
                self.positions.dump() if with_positions else [],
                self.producers.dump(before),
                list(self.transactions.items()),
                self.archived,
            )
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

    def start_at_snapshot(self) -> None:
        """After restoring the snapshot at the journal's start: what lies before it is gone, so queues begin there."""
        self.first = {key: following for key, following in self.next.items() if following}
