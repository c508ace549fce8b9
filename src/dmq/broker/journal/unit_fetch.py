"""Units for a reader of the journal, in one answer: all of them, or what concerns some topics.

What always holds: an answer has one unit at least if there is any, and no more than a frame has room for. Of topics
that few units concern, `LOOKED_MAX` bytes of the journal are looked at before there is an answer, even without a unit;
its `end` says how far they reach.

For a reader of one topic of many (`TopicFetch`) only those units are read that the queue index names for the topic.

A plan says in which spans of the journal the topic's messages stand, from one offset to another. Spans that nearly
touch are one, since to read a few unwanted units costs less than another read. If the spans make up most of the journal
there, or the index cannot say, the journal is gone through as for everybody else (`fetch_units`).

What always holds: a unit is passed over only if the index, whose entries are checked, has no message of the topics in
it; known damage is never passed over. An answer ends where a unit ends. Plans take `PLANS_MAX` times `ENTRIES_MAX`
spans at most, and a request whose plan is gone makes a new one.

Of what was read `units_of` leaves out what does not concern the topics. A unit of which more than half the bytes
concern them stays as it is. Of another a cut remains: a unit with the same header but for its checksum, sizes and the
flag `CUT`, and behind it lengths, batch table and records of the batches that are wanted; hashes and due times are left
out. Where the records stood in the journal, they say themselves.

What always holds: nothing is left out before the unit that it stands in was checked, so that a turned bit in a batch
table hides no message. A unit that fails its checksum stays as it is: its reader notices.
"""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.broker.journal.disk import DiskReads
from dmq.errors import Damaged
from dmq.protocol.read import Fetch
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import (
    BLOCKS_VERSION,
    CRC_FROM,
    CUT,
    HEADER,
    HEADER_BYTES,
    ROW_BYTES,
    Header,
    is_intact,
    read_header,
)
from dmq.storage.queries import Queries
from dmq.storage.read.reader import QueueEntries

__all__ = ["LOOKED_MAX", "TopicFetch", "TopicPlan", "UnitFetch", "fetch_units", "plan_of", "units_of"]

LOOKED_MAX: Final = 32 << 20
_WINDOW_MIN: Final = 64 << 10

ReadUnits = Callable[[int, int], Awaitable[tuple[Buffer, int]]]
"""Whole units from the one on that holds an offset, about so many bytes of them; and where they end."""


class UnitFetch(NamedTuple):
    """What concerns a reader of the units from journal offset `start` to `end`."""

    start: int
    end: int
    pieces: list[Buffer]


async def fetch_units(asked: Fetch, size: int, visible: int, read: ReadUnits) -> UnitFetch:
    """The units of one answer.

    Parameters:
        size: of an answer, more or less; a frame has room for twice as much.
        visible: how far the journal may be read.
    """
    stop = min(asked.end or visible, visible)
    units, end = await read(asked.journal_offset, max(1, min(size, stop - asked.journal_offset)))
    start = end - len(units)
    if not asked.topic_ids or not len(units):
        return UnitFetch(start, end, [units])
    topic_ids = frozenset(asked.topic_ids)
    pieces: list[Buffer] = []
    taken = 0
    while True:
        kept = units_of(units, topic_ids)
        if pieces and taken + len(kept) > 2 * size - _HEADER_BYTES:
            return UnitFetch(start, end - len(units), pieces)  # the next answer has room for it
        pieces.append(kept)
        taken += len(kept)
        if taken >= size or end >= stop or end - start >= LOOKED_MAX:
            return UnitFetch(start, end, pieces)
        # As much of the journal as the rest of the answer is to be found in, if the next units are like these.
        window = min(2 * size, max(_WINDOW_MIN, (size - taken) * len(units) // max(1, len(kept))))
        await asyncio.sleep(0)  # others want to be served, too
        units, end = await read(end, min(window, stop - end))
        if not len(units):
            return UnitFetch(start, end, pieces)


QUEUES_MAX: Final = 64  # of more, to ask the index costs more than to read the journal
ENTRIES_MIN: Final = 4096  # of the index for a plan, of all queues together: for the first one
ENTRIES_MAX: Final = 32_768  # and for later ones
PLANS_MAX: Final = 32
GAP_BYTES: Final = 16 << 10
DENSE_SHARE: Final = 0.8
DENSE_REACH: Final = 8  # so many times as far as a dense plan has looked, the journal is taken to be like that
_HEADER_BYTES: Final = 4096
_READS_MAX: Final = 256  # at once

Positions: TypeAlias = npt.NDArray[np.int64]
_NONE: Final[Positions] = np.empty(0, np.int64)


class TopicPlan(NamedTuple):
    """Where messages of some topics stand in the journal up to `end`: spans from one record to another.

    A dense one has no use for its spans: it says that the journal is to be gone through up to its end.
    `following` has the offset for each queue, by key, to go on with behind that; `entries` how many to ask for then.
    """

    end: int
    firsts: Positions
    lasts: Positions  # where the last record of each span begins
    ends: Positions  # and where it ends
    following: Mapping[int, int]
    entries: int
    is_dense: bool

    def spans(self, start: int, stop: int, size: int) -> list[tuple[int, int]]:
        """The first and the last record of spans from `start` on, which begin before `stop`: some `size` bytes."""
        at = int(np.searchsorted(self.ends, start, side="right"))
        until = min(int(np.searchsorted(self.firsts, stop)), at + _READS_MAX)
        if at >= until:
            return []
        firsts = np.maximum(self.firsts[at:until], start)
        taken = np.cumsum(self.ends[at:until] - firsts)
        count = int(np.searchsorted(taken, size)) + 1
        return [*zip(firsts[:count].tolist(), self.lasts[at : at + count].tolist(), strict=False)]


def plan_of(entries: Mapping[int, QueueEntries], start: int, stop: int, *, asked: int) -> TopicPlan:
    """The spans of messages from `start` on, as far as the entries of all queues reach, and not behind `stop`. Pure."""
    end = min([stop, *(int(some.offsets[-1]) + 1 for some in entries.values() if not some.is_last)])
    following = {key: some.first + int(np.searchsorted(some.offsets, end)) for key, some in entries.items()}
    offsets = np.concatenate([some.offsets for some in entries.values()] or [_NONE])
    lengths = np.concatenate([some.lengths for some in entries.values()] or [_NONE])
    wanted = np.flatnonzero((offsets >= start) & (offsets < end))
    wanted = wanted[np.argsort(offsets[wanted], kind="stable")]
    offsets, ends = offsets[wanted], (offsets + lengths)[wanted]
    cuts = np.flatnonzero(offsets[1:] - ends[:-1] > GAP_BYTES) + 1
    firsts, lasts = offsets[np.append(0, cuts)[: len(offsets)]], np.append(cuts, len(offsets))[: len(offsets)] - 1
    is_dense = int((ends[lasts] - firsts).sum()) > DENSE_SHARE * (end - start)
    return TopicPlan(
        start + DENSE_REACH * (end - start) if is_dense else end,
        firsts,
        offsets[lasts],
        ends[lasts],
        following=following,
        entries=min(ENTRIES_MAX, 4 * asked),
        is_dense=is_dense,
    )


class TopicFetch:
    """Fetches of topics from the store of one broker. It remembers the plans of those that are likely to go on."""

    def __init__(self, queries: Queries, reads: DiskReads) -> None:
        self._queries = queries
        self._reads = reads
        self._plans: OrderedDict[tuple[frozenset[int], int], TopicPlan] = OrderedDict()

    async def fetch(self, asked: Fetch, size: int) -> UnitFetch:
        """The units of one answer, of all topics or of some; see `fetch_units`.

        Raises:
            Damaged: the first unit that is wanted cannot be read.
        """
        if not asked.topic_ids:
            return await fetch_units(asked, size, self._queries.visible, self._read)
        topic_ids, at = frozenset(asked.topic_ids), asked.journal_offset
        stop = min(asked.end or self._queries.visible, self._queries.visible)
        plan = self._plans.pop((topic_ids, at), None)
        answer = _Answer(at, topic_ids)
        while answer.taken < size and answer.looked < LOOKED_MAX and answer.end < stop:
            if plan is None or answer.end >= plan.end:
                plan = await self._plan(topic_ids, answer.end, stop, plan)
            if plan is None or plan.is_dense:
                if answer.end > at:
                    break  # the next request begins there
                found = await fetch_units(asked, size, self._queries.visible, self._read)
                return self._remember(plan, topic_ids, found)
            spans = plan.spans(answer.end, stop, size - answer.taken)
            if not spans:
                answer.end = min(plan.end, stop)
                continue
            questions = [partial(self._units, first, last, size - answer.taken) for first, last in spans]
            read = zip(spans, await self._reads.ask_many(questions), strict=True)
            if not all(answer.add(units, last, 2 * size - _HEADER_BYTES) for (_, last), units in read):
                break
            await asyncio.sleep(0)  # others want to be served, too
        return self._remember(plan, topic_ids, UnitFetch(answer.start, answer.end, answer.pieces))

    def _remember(self, plan: TopicPlan | None, topic_ids: frozenset[int], found: UnitFetch) -> UnitFetch:
        if plan is not None:
            self._plans[topic_ids, found.end] = plan
            if len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        return found

    async def _plan(
        self, topic_ids: frozenset[int], start: int, stop: int, before: TopicPlan | None
    ) -> TopicPlan | None:
        """What the index says from an offset on, which the plan `before` ends at; None if it cannot say."""
        stop = min([stop, *(damaged for damaged, end in self._queries.damage if end > start)])
        keys = self._queries.queue_keys(topic_ids, QUEUES_MAX)
        if start >= stop or keys is None:
            return None
        asked = ENTRIES_MIN if before is None else before.entries
        following = {} if before is None or before.is_dense else before.following
        count = max(1, asked // max(1, len(keys)))
        questions = [partial(self._queries.entries_behind, key, start, following.get(key, 0), count) for key in keys]
        entries = dict(zip(keys, await self._reads.ask_many(questions), strict=True))
        return plan_of(entries, start, stop, asked=asked)

    async def _read(self, offset: int, room: int) -> tuple[Buffer, int]:
        return await self._reads.ask(lambda: self._queries.read_units(offset, room))

    def _units(self, first: int, last: int, room: int) -> tuple[Buffer, int] | Damaged:
        try:
            return self._queries.units_between(first, last, room)
        except Damaged as error:
            return error


class _Answer:
    """What an answer has so far: units up to journal offset `end`."""

    def __init__(self, start: int, topic_ids: frozenset[int]) -> None:
        self.start = self.end = start
        self.pieces: list[Buffer] = []
        self.taken = self.looked = 0
        self._topic_ids = topic_ids

    def add(self, read: tuple[Buffer, int] | Damaged, last: int, room: int) -> bool:
        """Add the units of a span, if there is room for them; returns whether they have its last record.

        Raises:
            Damaged: they cannot be read, and nothing stands before them.
        """
        if isinstance(read, Damaged):
            if not self.pieces:
                raise read
            return False
        units, end = read
        start = end - len(units)
        if self.pieces and start < self.end:  # those before reached into this span
            units, start = memoryview(units)[min(len(units), self.end - start) :], self.end
        kept = units_of(units, self._topic_ids)
        if self.pieces and self.taken + len(kept) > room:
            return False
        self.start = min(self.start, start)
        self.end = max(self.end, end)
        self.pieces.append(kept)
        self.taken += len(kept)
        self.looked += len(units)
        return end > last


_TOPIC_AT: Final = 24  # in a batch row
_ROW: Final = struct.Struct(">20xII30xI2x")  # of a batch row: records, topic id, bytes of blocks
_U32: Final = struct.Struct(">I")
assert _ROW.size == ROW_BYTES


def units_of(units: Buffer, topic_ids: Collection[int]) -> Buffer:
    """What concerns these topics of whole units that stand one behind the other.

    Returns the units themselves if nothing is left out.
    """
    view = memoryview(units)
    kept: list[Buffer] = []
    at = first = 0  # what is kept as it is begins at `first`
    while at < len(view):
        header = read_header(view, at)
        if header is None:
            break  # no unit: its reader says so
        end = at + header.length
        part = _concerning(header, view, at, topic_ids)
        if part is not None:
            kept += (view[first:at], *part)
            first = end
        at = end
    return units if not first else b"".join((*kept, view[first:]))


def _concerning(header: Header, view: memoryview, at: int, topic_ids: Collection[int]) -> list[Buffer] | None:
    """What to put in the place of a unit: None if it stays as it is."""
    table_at = at + HEADER_BYTES + 4 * header.records
    if header.version > BLOCKS_VERSION:
        return None  # its reader says that it is newer
    if header.batches == 1:
        if _U32.unpack_from(view, table_at + _TOPIC_AT)[0] in topic_ids or not is_intact(header, view, at):
            return None
        return []
    rows = [*_ROW.iter_unpack(view[table_at : table_at + ROW_BYTES * header.batches])]
    wanted = [number for number, row in enumerate(rows) if row[1] in topic_ids]
    if len(wanted) == len(rows) or not is_intact(header, view, at):
        return None
    return _cut(header, view, at, rows=rows, wanted=wanted) if wanted else []


def _cut(
    header: Header, view: memoryview, at: int, *, rows: list[tuple[int, int, int]], wanted: list[int]
) -> list[Buffer] | None:
    """A unit with some of its batches; None if it is not worth it."""
    lengths_at = at + HEADER_BYTES
    table_at = lengths_at + 4 * header.records
    data_at = table_at + ROW_BYTES * header.batches + 12 * header.hashes + 8 * header.dues
    before = np.zeros(header.records + 1, np.int64)  # bytes of records before each record
    np.cumsum(np.frombuffer(view, ">u4", header.records, lengths_at), out=before[1:])
    lengths: list[Buffer] = []
    table: list[Buffer] = []
    data: list[Buffer] = []
    chosen = frozenset(wanted)
    record = blocks = 0
    for number, (count, _, block_bytes) in enumerate(rows):
        last = record + count
        if last > header.records:
            return None  # it contradicts itself
        if number in chosen:
            lengths.append(view[lengths_at + 4 * record : lengths_at + 4 * last])
            table.append(view[table_at + ROW_BYTES * number : table_at + ROW_BYTES * (number + 1)])
            start = data_at + blocks + int(before[record])
            data.append(view[start : start + int(before[last] - before[record]) + block_bytes])
        record, blocks = last, blocks + block_bytes
    parts = [*lengths, *table, *data]
    size = HEADER_BYTES + sum(map(len, parts))
    if 2 * size > header.length:
        return None
    head = header._replace(
        crc=0,
        flags=header.flags | CUT,
        length=size,
        records=sum(map(len, lengths)) // 4,
        batches=len(table),
        hashes=0,
        dues=0,
    )
    raw = bytearray(HEADER.pack(*head))
    crc = crc32c(memoryview(raw)[CRC_FROM:])
    for part in parts:
        crc = crc32c(part, crc)
    _U32.pack_into(raw, 4, crc)
    return [raw, *parts]
