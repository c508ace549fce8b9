"""Unit drafts: which batches and events go into which unit, and where each batch will stand in its queue.

What always holds: nothing is assigned or remembered before its unit is written, so a failed write leaves no trace; a
batch that was written before gets its first place and is not written again; the items of one call keep their order,
and with `atomic` they share one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.errors import DMQError, InvalidMessage, LimitReached, OutOfOrder, SequenceConflict, UnknownTopic
from dmq.model import EVENT_TOPIC
from dmq.records.builder import system_records
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import DUE, EXPIRING, HEADER_BYTES, MOVED, NAMED, NO_ADDRESS, ROW_BYTES, Part, Row
from dmq.storage.state.events import Event, Settled, encode_event
from dmq.storage.state.producers import Place
from dmq.storage.state.state import HALF_ID, State, queue_key

__all__ = ["Batch", "Draft", "Drafter", "Placement", "event_part", "was_written"]


class Batch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Records for one queue, encoded, with the broker's fields blank.

    `previous_sequence`: the producer's last message in the queue must have this number; None leaves that open.
    `moved` records carry their message id in their attributes; others get theirs from producer id and sequence.
    `dues`, one per record, makes sense for the schedule topic only. `expiring`: some record may carry an expiry.
    `block_bytes` at the end of the data are the blocks that bodies of its records stand in.
    """

    topic: str
    queue: int
    data: Buffer
    lengths: Sequence[int] | npt.NDArray[np.uint32]
    hash_index: Sequence[int] | npt.NDArray[np.uint32] = ()
    hashes: Sequence[int] | npt.NDArray[np.uint64] = ()
    dues: Sequence[int] | npt.NDArray[np.uint64] = ()
    producer_id: int = 0
    producer_epoch: int = 0
    first_sequence: int = 0
    previous_sequence: int | None = None
    named: bool = False
    moved: bool = False
    expiring: bool = False
    address: bytes = NO_ADDRESS
    port: int = 0
    received_at_ms: int = 0
    block_bytes: int = 0
    room: memoryview | None = None
    """A view that ends with the records, has hashes and dues before them as a request has them, and room before these,
    and may be overwritten: a batch with such a view gets a unit to itself, made in place where the room suffices."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Where an item went. It is visible once the store's visible offset has reached `unit_end`."""

    topic: str
    queue: int
    first_offset: int
    count: int
    unit_start: int
    unit_end: int
    duplicate: bool = False


class Draft:
    """A unit to be: its parts, which items of the call each of them has, and the events among them."""

    __slots__ = ("events", "items", "parts", "size")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.items: list[Sequence[int]] = []
        self.events: list[Event] = []
        self.size = HEADER_BYTES

    def add(self, part: Part, size: int, items: Sequence[int]) -> None:
        self.parts.append(part)
        self.items.append(items)
        self.size += size


_EVENTS_MAX: Final = 256  # of one batch
# By producer and queue: the items of a call that are written.
_Fresh: TypeAlias = dict[tuple[int, int], list[int]]
_NONE_FRESH: Final[_Fresh] = {}


def event_part(events: Iterable[Event], now_ms: int) -> Part:
    """Events as a part of a unit: one batch, a record each."""
    records = system_records(EVENT_TOPIC, map(encode_event, events), now_ms)
    row = Row._make((0, 0, 0, len(records), 0, 0, 0, 0, 0, NO_ADDRESS, 0, 0))
    return Part(row, records[0] if len(records) == 1 else b"".join(records), tuple(map(len, records)), now_ms)


class Drafter:
    """Decides what goes into which unit.

    `assigned` is the next offset of queues for which units were written that are not applied yet.
    """

    def __init__(self, unit_bytes_max: int, transactions_max: int) -> None:
        self._unit_bytes_max = unit_bytes_max
        self._transactions_max = transactions_max
        self.assigned: dict[int, int] = {}

    def draft(
        self,
        items: Sequence[Batch | Event],
        state: State,
        now_ms: int,
        *,
        atomic: bool,
        refused: dict[int, DMQError] | None = None,
    ) -> tuple[list[Draft], dict[int, Place | int]]:
        """Decide which units to write, and where each batch will stand in its queue.

        Parameters:
            atomic: all items go into one unit.
            refused: gets the errors of items at fault, which are left out; without it the first of them is raised.

        Returns the drafts, and for items that need no writing their first place, or the item of this call they repeat.

        Raises:
            UnknownTopic, InvalidMessage, SequenceConflict, OutOfOrder, StaleEpoch, LimitReached: nothing was changed.
        """
        assigned = self.assigned
        drafts = [Draft()]
        draft = drafts[0]
        duplicates: dict[int, Place | int] = {}
        following: dict[int, int] = {}
        fresh: _Fresh = {}
        is_full = False  # what comes next begins a unit
        taken = 0  # what is before this item has its part
        for index, item in enumerate(items):
            if index < taken:
                continue
            taken = index + 1
            if isinstance(item, Batch):
                try:
                    topic_id, key = _queue_of(item, state)
                    place = _earlier_place(items, item, key, fresh, state=state) if item.producer_id else None
                    if place is not None:
                        duplicates[index] = place
                        continue
                    if topic_id == HALF_ID:
                        self._check_transactions(item, state, following)
                except DMQError as error:
                    if refused is None:
                        raise
                    refused[index] = error
                    continue
                if item.producer_id:
                    fresh.setdefault((item.producer_id, key), []).append(index)
                first = following.get(key)
                if first is None:
                    first = assigned[key] if key in assigned else state.next.get(key, 0)
                following[key] = first + len(item.lengths)
                part = _part(item, topic_id, first, now_ms, anything_expires=bool(state.expiring))
            else:
                events = _events_from(items, index)
                taken = index + len(events)
                part = event_part(events, now_ms)
            row, data, _, _, _, hashes, dues, room = part
            # What it adds to the length of its unit.
            size = ROW_BYTES + 4 * row[3] + 12 * len(hashes) + 8 * len(dues) + len(data)
            has_room = room is not None
            if draft.parts and not atomic and (draft.size + size > self._unit_bytes_max or has_room or is_full):
                draft = Draft()
                drafts.append(draft)
            is_full = has_room
            draft.add(part, size, range(index, taken))
            if row[4] == 0:
                draft.events += events
        return (drafts if draft.parts else []), duplicates

    def part(self, batch: Batch, state: State, now_ms: int) -> Part | None:
        """The part of a unit that a new batch of plain messages is; None if it was written before.

        Raises:
            UnknownTopic, InvalidMessage, SequenceConflict, OutOfOrder, StaleEpoch: as `draft`.
        """
        topic_id, key = _queue_of(batch, state)
        if batch.producer_id and _earlier_place((), batch, key, _NONE_FRESH, state=state) is not None:
            return None
        first = self.assigned[key] if key in self.assigned else state.next.get(key, 0)
        return _part(batch, topic_id, first, now_ms, anything_expires=bool(state.expiring))

    def _check_transactions(self, batch: Batch, state: State, following: dict[int, int]) -> None:
        """Raises LimitReached if a batch of half messages is too much, with those that are written or about to be."""
        if batch.moved:
            return
        ends = {**self.assigned, **following}
        coming = sum(end - state.next.get(key, 0) for key, end in ends.items() if key >> 8 == HALF_ID)
        count, limit = len(state.transactions) + coming, self._transactions_max
        if count + len(batch.lengths) > limit:
            raise LimitReached(
                f"{count} transactions are open, and store.transactions_max is {limit}: end some, or raise it",
                limit=limit,
            )


def _events_from(items: Sequence[Batch | Event], first: int) -> list[Event]:
    """The events that follow each other from an item on, as many as one batch takes."""
    events: list[Event] = []
    for item in items[first : first + _EVENTS_MAX]:
        if isinstance(item, Batch):
            break
        events.append(item)
        if not isinstance(item, Settled) or item.bitmap or item.error:
            break  # it may be large
    return events


def was_written(batch: Batch, state: State) -> bool:
    """Whether a batch is the resend of one that stands in the journal."""
    try:
        _, key = _queue_of(batch, state)
        return batch.producer_id != 0 and _earlier_place((), batch, key, {}, state=state) is not None
    except DMQError:
        return False


def _earlier_place(
    items: Sequence[Batch | Event], batch: Batch, key: int, fresh: _Fresh, *, state: State
) -> Place | int | None:
    """Where a batch stands if it was written before; or the index of the item of this call that it is a resend of."""
    producer = batch.producer_id
    place = state.producers.look(producer, batch.producer_epoch, key, batch.first_sequence, count=len(batch.lengths))
    if place is not None:
        return place
    earlier = fresh.get((producer, key))
    repeated = None if earlier is None else _repeats(items, batch, earlier)
    if repeated is None and batch.previous_sequence is not None:
        _check_order(batch, state.producers.last_sequence(producer, batch.producer_epoch, key), items, earlier)
    return repeated


def _check_order(batch: Batch, last: int | None, items: Sequence[Batch | Event], earlier: Sequence[int] | None) -> None:
    """Raises OutOfOrder if a new batch does not follow the last one of its producer in its queue."""
    if earlier:
        before = items[earlier[-1]]
        assert isinstance(before, Batch)
        last = before.first_sequence + len(before.lengths) - 1
    if batch.previous_sequence != last:
        raise OutOfOrder(
            f"producer {batch.producer_id:016x} names {batch.previous_sequence} as the message before its batch, and "
            f"the last one stored is {last}: send that one first",
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
            last_sequence=last,
        )


def _repeats(items: Sequence[Batch | Event], batch: Batch, earlier: list[int]) -> int | None:
    """The index of the item of this call that a batch is a resend of; `earlier` have rising sequences."""
    last = items[earlier[-1]]
    assert isinstance(last, Batch)
    if batch.first_sequence >= last.first_sequence + len(last.lengths):
        return None
    for index in earlier:
        other = items[index]
        assert isinstance(other, Batch)
        if batch.first_sequence >= other.first_sequence + len(other.lengths):
            continue
        if batch.first_sequence == other.first_sequence and len(batch.lengths) == len(other.lengths):
            return index
        raise SequenceConflict(
            f"producer {batch.producer_id:016x} sent overlapping sequences in two batches at once; "
            "a batch must be sent again with the same bounds",
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
        )
    return None


def _queue_of(batch: Batch, state: State) -> tuple[int, int]:
    topic = state.topics.get(batch.topic)
    if topic is None:
        raise UnknownTopic(f"there is no topic {batch.topic!r}: create it first", topic=batch.topic)
    if not 0 <= batch.queue < topic.config.queues:
        raise UnknownTopic(
            f"topic {batch.topic!r} has queues 0-{topic.config.queues - 1}, not {batch.queue}",
            topic=batch.topic,
            queue=batch.queue,
        )
    if not len(batch.lengths):
        raise InvalidMessage("a batch without messages cannot be stored")
    if len(batch.dues) not in (0, len(batch.lengths)):
        raise InvalidMessage(f"{len(batch.dues)} due times were given for {len(batch.lengths)} messages")
    return topic.id, queue_key(topic.id, batch.queue)


def _part(batch: Batch, topic_id: int, first_offset: int, now_ms: int, *, anything_expires: bool) -> Part:
    flags = (DUE if len(batch.dues) else 0) | (NAMED if batch.named else 0) | (MOVED if batch.moved else 0)
    # The code that moves records does not look at what they carry: once anything expires, what is moved may.
    if batch.expiring or (anything_expires and batch.moved):
        flags |= EXPIRING
    # Made as the tuples they are: a call of the class costs twice as much, and this is done for every batch.
    row = _new(
        Row,
        (
            batch.producer_id,
            batch.producer_epoch,
            batch.first_sequence,
            len(batch.lengths),
            topic_id,
            batch.queue,
            flags,
            0,
            first_offset,
            batch.address,
            batch.port,
            batch.block_bytes,
        ),
    )
    received = batch.received_at_ms or now_ms
    columns = batch.hash_index, batch.hashes, batch.dues
    return _new(Part, (row, batch.data, batch.lengths, received, *columns, batch.room))


_new: Final = tuple.__new__
