"""The unit writer: makes units of batches and events, and appends them to the journal.

What always holds: a batch has a place only once its unit is written; a unit is applied to what is derived when it
becomes visible, in order; a segment opens with a snapshot of everything before it; while the disk refuses messages,
events are written (see `dmq.storage.disk_space`).

Visibility: up to where the journal may be seen.

Pure code. A unit becomes visible once everything before it is and the durability it asked for is reached. Reads,
leases, the wheel, Spark and checkpoints stop at `visible`, so nobody ever sees what a crash may take back.

What always holds: visible <= end; units become visible in order; `flushed` and `replicated` never go back.

The lone unit: messages that came one by one, each of another producer, as one unit.

The storage half of a broker's straight path. It gives the bytes and the unit that `unit_draft` gives for
a batch of one for each message, without the objects between. It chooses and never decides: whatever is more than a
new message for a queue that exists is `Unusual`, and the general way says what becomes of it.

What always holds: nothing is changed here; a unit that is laid out may be thrown away.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from crc32c import crc32c

from dmq.clock import Clock
from dmq.compiled import find
from dmq.errors import DiskFull, DMQError, StorageError
from dmq.model import Durability
from dmq.records.layout import FLAGS_AT, IPV6, JOURNAL_OFFSET_AT, RELATIVE_MAX, SENT, STAMPED, TAG_AT
from dmq.settings import StoreSettings
from dmq.storage.disk_space import DiskSpace
from dmq.storage.journal.journal import FlushTicket, Journal, WindowCache
from dmq.storage.journal.unit import (
    BLOCKS_VERSION,
    CHECKED,
    CRC_FROM,
    HEADER,
    ROW,
    SNAPSHOT,
    UNIT_MAGIC,
    UNIT_VERSION,
    Header,
    Part,
    Row,
    Unit,
)
from dmq.storage.journal.unit_draft import Batch, Draft, Drafter, Placement, UnitBuilder, event_part, was_written
from dmq.storage.state.derived import Derived, event_of
from dmq.storage.state.events import DelaysDone, Event, SnapshotTaken, unpack_offsets
from dmq.storage.state.producers import Place
from dmq.storage.state.state import State

__all__ = ["Beginning", "Lone", "Sender", "UnitHead", "Unusual", "Visibility", "Writer"]

_SNAPSHOT_PART: Final = 1 << 20
_DISK_CHECK_BYTES: Final = 16 << 20
_new: Final = tuple.__new__  # a call of a tuple's class costs twice as much


class Beginning(NamedTuple):
    """Where a writer begins.

    Attributes:
        server: this broker's IPv4 address and port, six bytes, stamped into records.
        stored_at_ms: the store time of the last unit; it never runs backwards.
        next_offset: where the journal goes on.
        needs_segment: the next unit must not follow in the last segment.
        space: how full the disk is.
        replicates: as a shard's leader, which shows and applies nothing before all in-sync members have it.
        tail: units at the journal's end that are not applied, flushed, and wait for that.
    """

    server: bytes
    epoch: int
    stored_at_ms: int
    next_offset: int
    needs_segment: bool
    space: DiskSpace
    replicates: bool = False
    tail: Iterable[Unit] = ()


class Writer:
    """Appends to one journal. `derived` is replaced by the store after a rebuild."""

    def __init__(
        self,
        journal: Journal,
        derived: Derived,
        cache: WindowCache,
        settings: StoreSettings,
        clock: Clock,
        *,
        begin: Beginning,
    ) -> None:
        self._journal = journal
        self.derived = derived
        self._cache = cache
        self._settings = settings
        self._clock = clock
        self.stored_at_ms = begin.stored_at_ms
        self.replicates = begin.replicates
        self.visibility = Visibility(derived.applied if begin.replicates else begin.next_offset)
        self._builder = UnitBuilder(journal.id, begin.server, begin.epoch)
        self._drafter = Drafter(settings.unit_bytes_max, settings.transactions_max)
        # Whether the last segment holds more than its snapshot. A leader begins its epoch with the unit that says so:
        # by that, members find where their journals part, so no snapshot of the epoch may stand before it.
        self._tail_in_use = not begin.replicates
        self._space = begin.space
        self._unchecked = 0  # bytes written since the disk was looked at
        for unit in begin.tail:
            self._load(unit)
        if begin.needs_segment:
            self._begin_segment(begin.next_offset)
        else:
            journal.open_tail()

    @property
    def epoch(self) -> int:
        return self._builder.epoch

    # --- appending --------------------------------------------------------------------------------------------------

    def append(
        self, items: Sequence[Batch | Event], durability: Durability, *, atomic: bool, upkeep: bool = False
    ) -> list[Placement]:
        """See `MessageStore.append`. `upkeep` is written on a disk nearly full, too: it frees space."""
        placed = self._append(items, durability, atomic=atomic, upkeep=upkeep)
        return [placed[index] for index in range(len(items))]

    def append_each(self, items: Sequence[Batch | Event], durability: Durability) -> list[Placement | DMQError]:
        """See `MessageStore.append_each`."""
        refused: dict[int, DMQError] = {}
        placed: dict[int, Any] = self._append(items, durability, refused=refused)
        if refused:
            placed |= refused
        return [placed[index] for index in range(len(items))]

    def _append(
        self,
        items: Sequence[Batch | Event],
        durability: Durability,
        *,
        atomic: bool = False,
        upkeep: bool = False,
        refused: dict[int, DMQError] | None = None,
    ) -> dict[int, Placement]:
        """Where each item went, by its index."""
        if self._space.is_refusing or self._unchecked >= _DISK_CHECK_BYTES:
            self._unchecked = 0
            self._space.look()
            if self._space.is_refusing and not upkeep:
                return self._append_accepted(items, durability, atomic=atomic, refused=refused)
        return self._append_all(items, durability, atomic=atomic, refused=refused)

    def _append_accepted(
        self,
        items: Sequence[Batch | Event],
        durability: Durability,
        *,
        atomic: bool,
        refused: dict[int, DMQError] | None,
    ) -> dict[int, Placement]:
        """Append what is written although the disk is too full for messages; the rest is refused."""
        is_full, state = self._space.is_full, self.derived.state
        turned_away = [
            index
            for index, item in enumerate(items)
            if isinstance(item, Batch) and (is_full or _is_sent(item)) and not was_written(item, state)
        ]
        if not turned_away:
            return self._append_all(items, durability, atomic=atomic, refused=refused)
        error = self._space.refusal()
        if refused is None:
            raise error
        refused |= dict.fromkeys(turned_away, error)
        accepted = [index for index in range(len(items)) if index not in refused]
        if not accepted:
            return {}
        faults: dict[int, DMQError] = {}
        try:
            placed = self._append_all([items[index] for index in accepted], durability, atomic=atomic, refused=faults)
        except StorageError as problem:
            if "placed" in problem.detail:
                problem.detail["placed"] = {accepted[at]: place for at, place in problem.detail["placed"].items()}
            raise
        refused |= {accepted[at]: fault for at, fault in faults.items()}
        return {accepted[at]: placement for at, placement in placed.items()}

    def _append_all(
        self,
        items: Sequence[Batch | Event],
        durability: Durability,
        *,
        atomic: bool,
        refused: dict[int, DMQError] | None,
    ) -> dict[int, Placement]:
        now_ms = self._clock.now_ms()
        drafts, repeated = self._drafter.draft(items, self.derived.state, now_ms, atomic=atomic, refused=refused)
        placed: dict[int, Placement] = {}
        try:
            for draft in drafts:
                self._place(items, draft, self._write(draft, durability, now_ms), placed)
        except StorageError as error:
            # The ballast's room is for events alone: a message would fill it and be refused all the same.
            if isinstance(error, DiskFull) and self._space.ran_out() and not placed and not _has_batch(items):
                return self._append_all(items, durability, atomic=atomic, refused=refused)
            if error is not self._journal.failure:  # that one is raised again by later calls
                error.detail["placed"] = placed | _placed_again(items, repeated, placed)
            raise
        if repeated:
            placed |= _placed_again(items, repeated, placed)
        return placed

    def _place(self, items: Sequence[Batch | Event], draft: Draft, unit: Unit, placed: dict[int, Placement]) -> None:
        start, end = unit.start, unit.end
        for mine, row in zip(draft.items, unit.rows, strict=True):
            item = items[mine[0]]
            topic = item.topic if isinstance(item, Batch) else ""
            if isinstance(item, DelaysDone) and self.visibility.visible < end:
                self.derived.wheel.ending(unpack_offsets(item.offsets).tolist())
            placement = Placement(topic, row[5], row[8], row[3], unit_start=start, unit_end=end)
            for index in mine:
                placed[index] = placement

    def _write(self, draft: Draft, durability: Durability, now_ms: int) -> Unit:
        if self._tail_in_use and self._journal.tail.size + draft.size > self._settings.segment_bytes:
            self._roll()
        self.stored_at_ms = max(self.stored_at_ms, now_ms)
        unit = self._build(draft.parts, self._journal.end)
        unit.events = draft.events
        self._append_unit(unit, durability)
        return unit

    def append_lone(
        self, lones: list[Lone], durability: Durability, written: Callable[[Unit], None] | None = None
    ) -> Unit:
        """Write messages that came one by one as one unit: what `append_each` does where nothing is unusual.

        Parameters:
            written: called with the unit before it is applied.

        Raises:
            Unusual, StaleEpoch, SequenceConflict: nothing was changed; `append_each` decides.
            DiskFull, StorageError: as `append_each`, in which nothing was placed.
        """
        journal, visibility, builder = self._journal, self.visibility, self._builder
        if self._space.is_refusing or self._unchecked >= _DISK_CHECK_BYTES:
            raise Unusual("disk")
        now_ms = self._clock.now_ms()
        stored_at_ms = now_ms if now_ms > self.stored_at_ms else self.stored_at_ms
        head = (
            CHECKED, builder.epoch, journal.end, stored_at_ms, visibility.flushed, journal.id, builder.server
        )  # fmt: skip
        state, assigned = self.derived.state, self._drafter.assigned
        rows = [_place_one(lones[0], state, assigned)] if len(lones) == 1 else _place(lones, state, assigned)
        unit = _lay_out(lones, rows, _new(UnitHead, head))
        size = unit.header.length
        if self._tail_in_use and journal.segments[-1].size + size > self._settings.segment_bytes:
            raise Unusual("segment")
        if size > self._settings.unit_bytes_max:
            raise Unusual("size")
        self.stored_at_ms = stored_at_ms
        self._append_straight(unit, durability, written)
        return unit

    def append_batch(self, batch: Batch, durability: Durability, written: Callable[[Unit], None] | None = None) -> Unit:
        """Write a batch of plain messages as one unit: what `append_each` does where nothing is unusual.

        Raises:
            Unusual, UnknownTopic, OutOfOrder, StaleEpoch, SequenceConflict: nothing was changed; `append_each` decides.
            DiskFull, StorageError: as `append_each`, in which nothing was placed.
        """
        if self._space.is_refusing or self._unchecked >= _DISK_CHECK_BYTES:
            raise Unusual("disk")
        now_ms = self._clock.now_ms()
        part = self._drafter.part(batch, self.derived.state, now_ms)
        if part is None:
            raise Unusual("resend")
        # As it is at most: a batch without keys takes less.
        size = HEADER.size + ROW.size + 16 * len(batch.lengths) + len(batch.data)
        if self._tail_in_use and self._journal.segments[-1].size + size > self._settings.segment_bytes:
            raise Unusual("segment")
        if size > self._settings.unit_bytes_max:
            raise Unusual("size")
        self.stored_at_ms = max(self.stored_at_ms, now_ms)
        unit = self._build((part,), self._journal.end)
        self._append_straight(unit, durability, written)
        return unit

    def _append_straight(self, unit: Unit, durability: Durability, written: Callable[[Unit], None] | None) -> None:
        try:
            self._append_unit(unit, durability, written)
        except StorageError as error:
            if isinstance(error, DiskFull):
                self._space.ran_out()
            if error is not self._journal.failure:
                error.detail["placed"] = {}
            raise

    def _append_unit(self, unit: Unit, durability: Durability, written: Callable[[Unit], None] | None = None) -> None:
        """Write a unit, and apply it once it is visible."""
        if self.replicates:
            durability = Durability.REPLICATED
        buffer, derived = unit.buffer, self.derived
        self._journal.append(buffer)
        self._tail_in_use = True
        self._unchecked += len(buffer)
        try:
            if written is not None:
                written(unit)
        finally:  # nobody asks in between: all of it is one turn of the loop
            derived.state.remember_producers(unit)
            self._cache.put_tail(unit.start, buffer, has_blocks=unit.header.version == BLOCKS_VERSION)
            self._show(unit, durability)

    def _show(self, unit: Unit, durability: Durability) -> None:
        """Apply a unit that was written, once it is visible."""
        if self.visibility.show(unit, durability):
            self.derived.apply(unit)
            return
        self.visibility.wrote(unit, durability)
        self._advance()
        if self.visibility.visible < unit.end:
            self._assign(unit)

    def _assign(self, unit: Unit) -> None:
        """Queue offsets are given, though the unit that has them is not applied yet."""
        for row in unit.rows:
            if row.topic_id:
                self._drafter.assigned[row.topic_id << 8 | row.queue] = row.first_queue_offset + row.records

    def _load(self, unit: Unit) -> None:
        """A unit of the tail that a leader begins with: what it gave away is given, and it waits to be committed."""
        state, wheel = self.derived.state, self.derived.wheel
        state.remember_producers(unit)
        self.visibility.flushed = unit.end
        self.visibility.wrote(unit, Durability.REPLICATED)
        self._assign(unit)
        at = 0
        for row in unit.rows:
            for index in range(at, at + row.records if row.topic_id == 0 else at):
                event = event_of(unit, index)
                if isinstance(event, DelaysDone):
                    wheel.ending(unpack_offsets(event.offsets).tolist())
            at += row.records

    def _build(self, parts: Sequence[Part], start: int, flags: int = 0) -> Unit:
        return self._builder.build(
            parts,
            start=start,
            stored_at_ms=self.stored_at_ms,
            flushed_through=self.visibility.flushed,
            flags=flags | CHECKED,
        )

    def _advance(self) -> None:
        for unit in self.visibility.advance():
            self.derived.apply(unit)
        if self.visibility.visible == self._journal.end:
            self._drafter.assigned.clear()

    # --- flushing ---------------------------------------------------------------------------------------------------

    def finish_flush(self, ticket: FlushTicket, error: StorageError | None = None) -> None:
        if error is not None:
            raise self._journal.flush_failed(error) from error
        self.visibility.flushed = max(self.visibility.flushed, ticket.end)
        self._advance()

    def flush(self) -> None:
        ticket = FlushTicket(self._journal)
        try:
            ticket.run()
        except StorageError as error:
            self.finish_flush(ticket, error)
        self.finish_flush(ticket)

    def confirm_replicated(self, offset: int) -> None:
        self.visibility.replicated = max(self.visibility.replicated, offset)
        self._advance()

    # --- segments ---------------------------------------------------------------------------------------------------

    def end_segment(self) -> None:
        """Begin a new segment if the last one has anything, so that it can go."""
        if self._tail_in_use:
            self._roll()

    @property
    def is_segment_over(self) -> bool:
        """Whether the last segment is full and could not be ended, because units wait for replicas."""
        return self._tail_in_use and self._journal.tail.size >= self._settings.segment_bytes

    def _roll(self) -> None:
        """Begin a new segment, unless units still wait for replicas: then the old one grows on.

        How far it does is the owner's affair, who holds further writes (see `MessageStore.wants_quiet`).
        """
        self.flush()
        if self.visibility.visible == self._journal.end:
            self._begin_segment(self._journal.end)

    def _begin_segment(self, start: int) -> None:
        """Open a segment with a snapshot of the state, so that older ones can go."""
        state = self.derived.state.snapshot(start)
        pieces = [state[at : at + _SNAPSHOT_PART] for at in range(0, len(state), _SNAPSHOT_PART)]
        now_ms = self._clock.now_ms()
        self.stored_at_ms = max(self.stored_at_ms, now_ms)
        parts = [event_part([SnapshotTaken(i, len(pieces), piece)], now_ms) for i, piece in enumerate(pieces)]
        unit = self._build(parts, start, SNAPSHOT)
        self._journal.roll(start, unit.buffer, self.stored_at_ms)
        self._tail_in_use = False
        self.visibility.flushed = unit.end
        if self.replicates:
            # It says nothing new, but it may be cut: until it is committed, it is not part of the shard's history.
            self.visibility.wrote(unit, Durability.REPLICATED)
        else:
            self.visibility.visible = unit.end
            self.derived.apply(unit)


def _is_sent(batch: Batch) -> bool:
    """Whether it came from a producer; else it is a message that was stored before, on its way on."""
    return not batch.moved or batch.producer_id != 0


def _has_batch(items: Sequence[Batch | Event]) -> bool:
    return any(isinstance(item, Batch) for item in items)


def _placed_again(
    items: Sequence[Batch | Event], repeated: dict[int, Place | int], placed: dict[int, Placement]
) -> dict[int, Placement]:
    """The answers for batches that were written before, or earlier in the same call."""
    again: dict[int, Placement] = {}
    for index, known in repeated.items():
        item = items[index]
        assert isinstance(item, Batch)
        place = placed.get(known) if isinstance(known, int) else known
        if place is not None:
            first = place.first_queue_offset if isinstance(place, Place) else place.first_offset
            again[index] = Placement(
                item.topic,
                item.queue,
                first,
                place.count,
                unit_start=place.unit_start,
                unit_end=place.unit_end,
                duplicate=True,
            )
    return again


class Visibility:
    """Units that were written and wait to be seen."""

    def __init__(self, start: int) -> None:
        self.visible = start
        self.flushed = start
        self.replicated = start
        self._pending: deque[tuple[Unit, Durability]] = deque()

    @property
    def pending(self) -> list[Unit]:
        return [unit for unit, _ in self._pending]

    def wrote(self, unit: Unit, durability: Durability) -> None:
        """A unit is in the page cache."""
        self._pending.append((unit, durability))

    def show(self, unit: Unit, durability: Durability) -> bool:
        """Whether a unit that is in the page cache is visible at once, since neither it nor any before it waits.

        If so, it is; if not, `wrote` is to be told.
        """
        if durability is not Durability.STORED or self._pending:
            return False
        self.visible = unit.end
        return True

    def advance(self) -> list[Unit]:
        """The units that have become visible, in order."""
        seen: list[Unit] = []
        while self._pending:
            unit, durability = self._pending[0]
            if durability >= Durability.FLUSHED and self.flushed < unit.end:
                break
            if durability >= Durability.REPLICATED and self.replicated < unit.end:
                break
            self._pending.popleft()
            self.visible = unit.end
            seen.append(unit)
        return seen


class Unusual(Exception):
    """The general way is to be taken.

    Parameters:
        reason: in a word, for the metric.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Sender(NamedTuple):
    """Where a producer is.

    Attributes:
        address, port: as units keep it.
        client: as records carry it, six bytes.
        is_ipv6: `client` cannot say it.
    """

    address: bytes
    port: int
    client: bytes
    is_ipv6: bool


class UnitHead(NamedTuple):
    """What the header of a unit says besides its content."""

    flags: int
    epoch: int
    start: int
    stored_at_ms: int
    flushed_through: int
    journal_id: int
    server: bytes


# A message: topic, queue, record, hash of its key or 0, producer id, epoch, sequence, when it was received, sender.
Lone: TypeAlias = tuple[str, int, bytes, int, int, int, int, int, Sender]

_HEAD: Final = struct.Struct(HEADER.format + "I" + ROW.format[1:])  # header, the one length, the one row
_KEY: Final = struct.Struct(">IQ")
_CRC: Final = struct.Struct(">I")
_CRC_AT: Final = 4
_pack_head: Final = _HEAD.pack
_pack_header: Final = HEADER.pack
_pack_row: Final = ROW.pack
_pack_key: Final = _KEY.pack
_pack_crc: Final = _CRC.pack_into
_unpack_sent: Final = SENT.unpack_from
_pack_stamp: Final = STAMPED.pack_into


def lay_out_compiled(loop: Callable[..., Any], lones: list[Lone], rows: list[Row], head: UnitHead) -> Unit:
    """The unit by the compiled loop."""
    buffer, fields, columns, tags = loop(lones, rows, head, UNIT_VERSION)
    return Unit(_new(Header, fields), buffer, rows, columns, tags=tags)


def lay_out_plain(lones: list[Lone], rows: list[Row], head: UnitHead) -> Unit:
    """The same in plain Python."""
    count = len(lones)
    sizes = [len(lone[2]) for lone in lones]
    hashes = [lone[3] for lone in lones if lone[3]]
    keyed = len(hashes)
    indexes = [index for index, lone in enumerate(lones) if lone[3]] if keyed else []
    flags, epoch, start, stored_at_ms, flushed_through, journal_id, server = head
    at = HEADER.size + count * (4 + ROW.size) + 12 * keyed
    length = at + sum(sizes)
    fields = (
        UNIT_MAGIC, 0, UNIT_VERSION, flags, epoch, start, length, count, count, keyed, 0, 0,
        stored_at_ms, flushed_through, journal_id,
    )  # fmt: skip
    if count == 1:
        data = lones[0][2]
        first = _pack_head(*fields, sizes[0], *rows[0])
        buffer = bytearray().join((first, _pack_key(0, hashes[0]), data) if keyed else (first, data))
    else:
        tables = [_pack_header(*fields), struct.pack(f">{count}I", *sizes)]
        tables += [_pack_row(*row) for row in rows]
        if keyed:
            tables.append(struct.pack(f">{keyed}I{keyed}Q", *indexes, *hashes))
        tables += [lone[2] for lone in lones]
        buffer = bytearray().join(tables)
    offsets, tags = [], []
    for lone, row, size in zip(lones, rows, sizes, strict=True):
        received_at_ms, sender = lone[7], lone[8]
        tag, sent_at_ms = _unpack_sent(buffer, at + TAG_AT)
        received, stored = received_at_ms - sent_at_ms, stored_at_ms - sent_at_ms
        if not (0 <= received <= RELATIVE_MAX and 0 <= stored <= RELATIVE_MAX):
            received, stored = min(max(received, 0), RELATIVE_MAX), min(max(stored, 0), RELATIVE_MAX)
        _pack_stamp(
            buffer, at + JOURNAL_OFFSET_AT, start + at, row[5], row[8], sender[2], server, sent_at_ms, received, stored
        )
        if sender[3]:
            buffer[at + FLAGS_AT] |= IPV6
        offsets.append(start + at)
        tags.append(tag)
        at += size
    crc = crc32c(memoryview(buffer)[CRC_FROM:])
    _pack_crc(buffer, _CRC_AT, crc)
    header = _new(Header, (UNIT_MAGIC, crc, *fields[2:]))
    return Unit(header, buffer, rows, (offsets, sizes, indexes, hashes, []), tags=tags)


_lone_bytes: Final = find("lone_bytes")
_lay_out: Final = lay_out_plain if _lone_bytes is None else partial(lay_out_compiled, _lone_bytes)


def _place_one(lone: Lone, state: State, assigned: dict[int, int]) -> Row:
    """The row of a message, with its place in its queue.

    Parameters:
        assigned: the next offsets of queues whose last units are not applied yet.

    Raises:
        Unusual: it is not new, or has no queue.
        StaleEpoch, SequenceConflict: it cannot be taken. The general way says so to its producer alone.
    """
    name, queue, _, _, producer_id, epoch, sequence, _, sender = lone
    topic: Any = state.topics.get(name)
    if topic is None or queue >= topic.config.queues:
        raise Unusual("topic")
    topic_id = topic.id
    key = topic_id << 8 | queue
    if producer_id and state.producers.look(producer_id, epoch, key, sequence, count=1) is not None:
        raise Unusual("resend")
    first = assigned[key] if key in assigned else state.next.get(key, 0)
    return _new(Row, (producer_id, epoch, sequence, 1, topic_id, queue, 0, 0, first, sender[0], sender[1], 0))


def _place(lones: Sequence[Lone], state: State, assigned: dict[int, int]) -> list[Row]:
    """The rows of several messages: no two of them are a producer's for one queue."""
    following = assigned.copy()
    fresh: set[tuple[int, int]] = set()
    rows: list[Row] = []
    for lone in lones:
        row = _place_one(lone, state, following)
        producer_id, key = row[0], row[4] << 8 | row[5]
        if producer_id:
            if (producer_id, key) in fresh:
                raise Unusual("resend")
            fresh.add((producer_id, key))
        following[key] = row[8] + 1
        rows.append(row)
    return rows
