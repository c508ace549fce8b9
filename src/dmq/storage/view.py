"""What can be asked of a store: a view of it that changes nothing.

What always holds: nothing beyond the visible offset is shown; if a derived file turns out to be wrong, everything
derived is built anew from the journal and the question is asked again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from dmq.errors import StoreClosed, UnknownTopic
from dmq.model import MessageId
from dmq.storage.derived import Derived
from dmq.storage.frames import DerivedDamaged
from dmq.storage.identities import IdRun
from dmq.storage.journal import Journal
from dmq.storage.positions import Position
from dmq.storage.reading import Found, Reader, Slice
from dmq.storage.state import OpenTransaction, Topic, queue_key
from dmq.storage.wheel import Delay
from dmq.storage.writer import Writer

__all__ = ["StoreView"]

T = TypeVar("T")


class StoreView(ABC):
    """The questions; `MessageStore` adds the rest."""

    _journal: Journal
    _derived: Derived
    _writer: Writer
    _reader: Reader
    _closed: bool
    _checkpointed: int

    @abstractmethod
    def _rebuild(self, error: DerivedDamaged) -> None: ...

    def _check_open(self, *, reading: bool = False) -> None:
        if self._closed:
            raise StoreClosed("the store is closed: open it again")
        if not reading:
            self._journal.check()

    def _healed(self, ask: Callable[[], T]) -> T:
        """The answer to a question; if a derived file turns out wrong, after building all of them anew."""
        self._check_open(reading=True)
        try:
            return ask()
        except DerivedDamaged as error:
            self._rebuild(error)
            return ask()

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
    def has_failed(self) -> bool:
        """Whether a flush failed, so that nothing is written any more."""
        return self._journal.failure is not None

    @property
    def is_ahead_of_checkpoint(self) -> bool:
        """Whether anything was written since the last checkpoint."""
        return self._checkpointed != self.end

    @property
    def damage(self) -> list[tuple[int, int]]:
        """Journal ranges that cannot be read."""
        return list(self._derived.damage)

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring."""
        state = self._derived.state
        return {
            "journal_start": self.start,
            "journal_end": self.end,
            "visible": self.visible,
            "flushed": self.flushed,
            "epoch": self.epoch,
            "segments": len(self._journal.segments),
            "topics": len(state.topics_by_id) - 2,
            "queues": len(state.next),
            "producers": len(state.producers),
            "transactions": len(state.transactions),
            "delays": self._derived.wheel.pending,
            "damage": len(self._derived.damage),
            "refusing": self._writer.refusing,
            "failed": self._journal.failure is not None,
        }

    # --- topics -------------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Raises UnknownTopic if there is none of that name."""
        topic = self._derived.state.topics.get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {name!r}: create it first", topic=name)
        return topic

    def topics(self) -> list[Topic]:
        """All topics, the built-in ones included."""
        return sorted(self._derived.state.topics.values(), key=lambda topic: topic.name)

    # --- reading ----------------------------------------------------------------------------------------------------

    def bounds(self, topic: str, queue: int) -> tuple[int, int]:
        """(first offset kept, next offset) of a queue."""
        key = self._queue(topic, queue)[1]
        state = self._derived.state
        return state.first.get(key, 0), state.next.get(key, 0)

    def read(
        self,
        topic: str,
        queue: int,
        offset: int,
        max_messages: int = 1000,
        max_bytes: int = 1 << 20,
        tags: Sequence[int] | None = None,
    ) -> Slice:
        """Visible messages of a queue from an offset on; see `Reader.read`.

        Parameters:
            tags: hashes of the tags wanted (`dmq.records.tag_hash`); None takes all. Different tags may share a
                hash, so the caller compares the tag itself.
        """
        found, _ = self._queue(topic, queue)
        return self._healed(lambda: self._reader.read(found, queue, offset, max_messages, max_bytes, tags))

    def id_runs(self, topic: Topic, queue: int, offsets: Sequence[int], pieces: Sequence[memoryview]) -> list[IdRun]:
        """The ids of records that `read` gave, as runs; see `dmq.storage.identities`."""
        return self._healed(lambda: self._reader.identities.runs(topic.id, queue, offsets, pieces))

    def read_units(self, offset: int, max_bytes: int = 8 << 20) -> tuple[bytes, int]:
        """Whole visible units, verbatim, from a unit's start on, and the offset to go on with."""
        return self._reader.raw_units(offset, self.visible, max_bytes)

    def offset_since(self, topic: str, queue: int, time_ms: int) -> int:
        """The first offset of a queue stored at or after a time; the next one if there is none."""
        found, _ = self._queue(topic, queue)
        return self._healed(lambda: self._reader.offset_since(found.id, queue, time_ms))

    def find(
        self, *, key: str | None = None, message_id: MessageId | None = None, topic: str | None = None
    ) -> list[Found]:
        """Messages by key, or one message, as first stored and as moved since, by id; oldest first."""
        if message_id is not None:
            wanted = message_id
            return [f for f in self._healed(lambda: list(self._reader.find_id(wanted))) if topic in (None, f.topic)]
        assert key is not None, "a key or an id is needed"
        return self._healed(lambda: list(self._reader.find_key(key, topic)))

    def journal_offset(self, topic: str, queue: int, offset: int) -> int | None:
        """Where a message stands in the journal; None if it was lost."""
        key = self._queue(topic, queue)[1]
        columns = self._healed(lambda: next(iter(self._derived.queues.columns(key, offset, offset + 1))))
        return int(columns.offsets[0]) if columns.lengths[0] else None

    def raw_record(self, found: Found) -> memoryview:
        """The bytes of a record that was found."""
        return self._reader.bytes_at(found.journal_offset, found.journal_offset + found.record.length)

    def record_at(self, journal_offset: int) -> Found | None:
        """The message that stands at a journal offset; None if its topic is gone."""
        return self._healed(lambda: self._reader.record_at(journal_offset))

    def _queue(self, topic: str, queue: int) -> tuple[Topic, int]:
        found = self.topic(topic)
        if not 0 <= queue < found.config.queues:
            raise UnknownTopic(
                f"topic {topic!r} has queues 0-{found.config.queues - 1}, not {queue}", topic=topic, queue=queue
            )
        return found, queue_key(found.id, queue)

    # --- positions, delays, transactions ----------------------------------------------------------------------------

    def position(self, group: str, topic: str, queue: int) -> Position | None:
        """How far a group has come in a queue; None if it never was there."""
        return self._derived.state.positions.get(group, self._queue(topic, queue)[0].id, queue)

    def positions_of(self, group: str) -> dict[tuple[int, int], Position]:
        """All positions of a group, by (topic id, queue)."""
        return dict(self._derived.state.positions.groups().get(group, {}))

    def groups(self) -> list[str]:
        return sorted(self._derived.state.positions.groups())

    def take_due(self, now_ms: int, limit: int, fragments: Iterable[int] | None = None) -> list[Delay]:
        """Delayed records that are due; the caller's until a DelaysDone event names them or they are released."""
        return self._healed(lambda: self._derived.wheel.take(now_ms, limit, fragments))

    def next_due_ms(self, fragments: Iterable[int] | None = None) -> int | None:
        return self._healed(lambda: self._derived.wheel.next_due_ms(fragments))

    @property
    def delays_pending(self) -> int:
        return self._derived.wheel.pending

    def transactions(self) -> dict[MessageId, OpenTransaction]:
        """Half messages that are neither committed nor rolled back."""
        return {MessageId.from_bytes(raw): half for raw, half in self._derived.state.transactions.items()}

    def release_due(self, offsets: Iterable[int]) -> None:
        """Delayed records that could not be delivered; they stay pending."""
        self._derived.wheel.release(offsets)
