"""The reader: messages of a queue by offset, records by key or id, raw units, offsets by time.

What always holds: nothing beyond the visible offset is read; every byte handed out comes from a unit that was just
written or whose checksum was verified; what fails its checksum is reported as `Damaged` and never handed out. Records
that an earlier version wrote, unchecked, are checked when their unit is read from disk: those that cannot be read,
though they stand there as they came, are named with the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dmq.errors import Damaged, OffsetGone, RecordCorrupt, StorageError
from dmq.event_log import EventLog
from dmq.model import MessageId
from dmq.records.block import (
    BLOCK_HEAD_BYTES,
    BlockUse,
    BodyBlocks,
    StoredBlocks,
    block_size,
    block_use,
    gather_blocks,
    one_block,
)
from dmq.records.check import find_corrupt
from dmq.records.hashes import id_hash, key_hash
from dmq.records.stand_in import placeholder, stand_in
from dmq.records.view import RecordView
from dmq.storage.files import Buffer, is_refusal
from dmq.storage.index.queue_index import Columns, choose_entries
from dmq.storage.journal.journal import Journal, WindowCache
from dmq.storage.journal.unit import (
    BLOCKS_VERSION,
    CHECKED,
    HEADER_BYTES,
    MOVED,
    Header,
    Row,
    Unit,
    is_intact,
    parse_unit,
    read_header,
    whole_units,
)
from dmq.storage.read.read_failures import PATIENCE_SECONDS, ReadFailures
from dmq.storage.read.record_origin import Identities, IdRun
from dmq.storage.state.derived import Derived, message_id_of
from dmq.storage.state.state import Topic, queue_key

__all__ = ["SCAN_MAX", "Found", "Newest", "QueueEntries", "Reader", "Slice", "TagFilter", "row_of"]

log = EventLog(__name__)

_WINDOW: Final = 1 << 20
RAW_UNITS_MAX: Final = 4096  # in one answer: looking at each keeps everybody else waiting
_FIRST_WINDOW: Final = 64 << 10
_EXPANDED_MAX: Final = 16  # blocks
_FEW: Final = 48  # up to so many, arrays cost more than they save
# How many index entries one filtered read looks at before it answers, so that it cannot hold others up.
SCAN_MAX: Final = 1 << 17
_LOST_MAX: Final = 1 << 20


_NOTHING: Final[Mapping[int, str]] = MappingProxyType({})


class Slice(NamedTuple):
    """Messages of one queue: their queue offsets, lengths, and records, verbatim, in pieces of adjacent records."""

    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint32]
    pieces: list[memoryview]
    next_offset: int  # where to read on; beyond the last message where a filter passed over some
    corrupt: Mapping[int, str] = _NOTHING  # those that cannot be read, by queue offset, and why
    blocks: StoredBlocks | None = None  # in which bodies of some of them stand, unless each has its own in it
    size: int = 0  # with blocks: how many bytes the records take with their bodies in them

    def records(self) -> Iterator[RecordView]:
        """The records, one by one."""
        return map(RecordView, _each(self.lengths, self.pieces))

    def shown(self) -> Slice:
        """The same with placeholders for what cannot be read, for people who look at messages."""
        if not self.corrupt:
            return self
        lengths = self.lengths.copy()
        pieces: list[memoryview] = []
        index = 0
        for piece in self.pieces:
            at = 0
            while at < len(piece):
                end = at + int(self.lengths[index])
                record = piece[at:end]
                why = self.corrupt.get(int(self.offsets[index]))
                if why is not None:
                    record = memoryview(placeholder(bytes(record), why))
                    lengths[index] = len(record)
                pieces.append(record)
                at = end
                index += 1
        return Slice(self.offsets, lengths, pieces, self.next_offset, corrupt=self.corrupt)

    def part(self, offsets: Sequence[int], wanted: set[int]) -> tuple[list[int], list[int], list[memoryview]]:
        """Only some of them: offsets, lengths and records, each record a piece of its own.

        Parameters:
            offsets: all of ours.
        """
        kept: list[int] = []
        lengths: list[int] = []
        pieces: list[memoryview] = []
        for offset, size, record in zip(offsets, self.lengths.tolist(), _each(self.lengths, self.pieces), strict=True):
            if offset in wanted:
                kept.append(offset)
                lengths.append(size)
                pieces.append(record)
        return kept, lengths, pieces

    def __len__(self) -> int:
        return len(self.offsets)


class Newest(NamedTuple):
    """Messages that were just stored, one after another: their lengths, their records in one piece, and their ids."""

    lengths: list[int] | npt.NDArray[np.uint32]
    piece: memoryview
    size: int
    ids: list[IdRun]


class QueueEntries(NamedTuple):
    """Where consecutive messages of a queue stand in the journal; `is_last` if the queue has no more of them."""

    first: int
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    is_last: bool


class TagFilter(NamedTuple):
    """Which messages of a queue are read. Different tags may share a hash, so the caller compares the tag itself."""

    hashes: Sequence[int]  # of the tags wanted (`dmq.records.tag_hash`)
    look_max: int = SCAN_MAX  # how many entries are looked at, at most; `Slice.next_offset` says how far it came


_EMPTY: Final = np.empty(0, np.uint64)
_NO_PLACES: Final = np.empty(0, np.int64)


class Found(NamedTuple):
    """A record found by key or id; a stand-in for one that cannot be read, which `corrupt` then says."""

    message_id: MessageId
    topic: str
    journal_offset: int
    stored_at_ms: int
    record: RecordView
    corrupt: str = ""


class Reader:
    """Reads from one journal. `derived` is replaced by the store after a rebuild."""

    def __init__(self, journal: Journal, derived: Derived, cache_bytes: int, *, failures: ReadFailures) -> None:
        self._failures = failures
        self._journal = journal
        self.derived = derived
        self.cache = WindowCache(cache_bytes)
        self._read_on = -1  # where the last window read from disk ended
        self._expanded: dict[int, bytes] = {}  # the last blocks that records were taken out of, by journal offset
        self.identities = Identities(self.bytes_at, lambda offset: self.derived.lookup.unit_holding(offset))

    # --- a queue ----------------------------------------------------------------------------------------------------

    def newest(self, key: int, offset: int, stop: int, max_bytes: int) -> Newest | None:
        """Messages [offset, stop) of a queue if they are the last ones of a unit that has this one batch alone.

        That is what a consumer waits for that keeps up; it costs no index and no cache.
        """
        derived = self.derived
        unit = derived.newest
        if unit is None or len(unit.rows) != 1:
            return None
        producer_id, _, sequence, records, topic_id, queue, flags, _, first, _, _, block_bytes = unit.rows[0]
        if topic_id << 8 | queue != key or not first <= offset < stop or first + records != stop or block_bytes:
            return None
        at = offset - first
        begin = unit.offsets[at]
        size = int(unit.end - begin)
        if (at + 1 < records and size > max_bytes) or derived.state.first.get(key, 0) > offset:
            return None
        piece = memoryview(unit.buffer)[begin - unit.start :]
        run = (stop - offset, 0, 0) if flags & MOVED or not producer_id else (stop - offset, producer_id, sequence + at)
        return Newest(unit.lengths[at:] if at else unit.lengths, piece, size, [run])

    def read(
        self,
        topic: Topic,
        queue: int,
        offset: int,
        max_messages: int,
        max_bytes: int,
        tags: TagFilter | None,
    ) -> Slice:
        """Messages from an offset on: at least one if there is any, however large, and never more than asked for.

        Their bodies may stand in blocks: see `plain`.

        Raises:
            OffsetGone: the offset is not among those that exist.
            Damaged: the message there cannot be read; `detail` says from which offset on reading works again.
        """
        key = queue_key(topic.id, queue)
        self.cache.gave_blocks = False
        state = self.derived.state
        first, following = state.first.get(key, 0), state.next.get(key, 0)
        if not first <= offset <= following:
            raise OffsetGone(
                f"queue {queue} of {topic.name} has offsets {first} to {following}, not {offset}: "
                "start from the first or the next one",
                topic=topic.name,
                queue=queue,
                first=first,
                next=following,
            )
        stop = min(following, offset + (max_messages if tags is None else tags.look_max))
        if tags is None and 0 < stop - offset < _FEW:
            try:
                few = self._read_few(key, offset, stop, max_bytes)
            except Damaged:
                few = None  # the long way says which messages
            if few is not None:
                return self._finished(few, max_bytes)
        kept: list[Columns] = []
        numbers: list[npt.NDArray[np.uint64]] = []
        at = offset
        room, space = max_messages, max_bytes
        hashes = None if tags is None else tags.hashes
        for columns in self.derived.queues.columns(key, offset, stop):
            chosen, where, at, full = choose_entries(columns, hashes, room, space, first=not kept)
            if len(where):
                kept.append(chosen)
                numbers.append(where)
                if not full:
                    room -= len(where)
                    space -= int(chosen.lengths.sum())
            if full:
                break
        if not kept:
            return Slice(_EMPTY, np.empty(0, np.uint32), [], at)
        offsets = numbers[0] if len(numbers) == 1 else np.concatenate(numbers)
        where = kept[0].offsets if len(kept) == 1 else np.concatenate([c.offsets for c in kept])
        lengths = kept[0].lengths if len(kept) == 1 else np.concatenate([c.lengths for c in kept])
        found = self._gather(topic, queue, offsets, where, lengths=lengths, next_offset=at)
        return self._finished(found, max_bytes)

    def _finished(self, found: Slice, max_bytes: int) -> Slice:
        """The same with the blocks that bodies stand in: no byte of the journal is needed for it from now on.

        Bodies count as many bytes as they expand to, so that a block brings no more messages than fit without it.
        """
        if not self.cache.gave_blocks:
            return found
        alone = one_block(found.lengths, found.pieces)
        if alone is not None and alone[1] <= max_bytes:  # as a rule: a batch, or a part of one
            blocks = self.blocks_at(alone[:1])
            blocks.alone = len(found.lengths), alone[1]
            return Slice(*found[:4], corrupt=found.corrupt, blocks=blocks, size=alone[1])
        used = block_use(found.lengths, found.pieces)
        if used is None:
            return found
        count, total = len(used.sizes), int(used.sizes.sum())
        if total > max_bytes:
            count = max(1, int(np.searchsorted(np.cumsum(used.sizes), max_bytes, side="right")))
        pieces, following = found.pieces, found.next_offset
        if count < len(used.sizes):
            used = BlockUse(used.offsets[:count], used.sizes[:count])
            total, following = int(used.sizes.sum()), int(found.offsets[count])
            pieces = [*_first(count, found.lengths, pieces)]
        blocks = self.blocks_at(used.blocks)
        blocks.used = used
        return Slice(
            found.offsets[:count], found.lengths[:count], pieces, following, corrupt=found.corrupt, blocks=blocks,
            size=total,
        )  # fmt: skip

    def blocks_at(self, places: Iterable[int]) -> StoredBlocks:
        """The blocks that begin at these journal offsets."""
        blocks = StoredBlocks()
        for at in places:
            blocks[at] = self.bytes_at(at, at + block_size(self.bytes_at(at, at + BLOCK_HEAD_BYTES)))
        return blocks

    def plain(self, found: Slice) -> Slice:
        """The same with all bodies in their records."""
        blocks = found.blocks
        if blocks is None:
            return found
        pieces: list[memoryview] = []
        corrupt = dict(found.corrupt)
        for offset, record in zip(found.offsets.tolist(), _each(found.lengths, found.pieces), strict=True):
            try:
                pieces.append(blocks.plain(record, self._expand))
            except RecordCorrupt as error:
                corrupt[offset] = error.message
                pieces.append(record)
        lengths = np.array([*map(len, pieces)], np.uint32)
        return Slice(found.offsets, lengths, pieces, found.next_offset, corrupt=corrupt or _NOTHING)

    def _expand(self, at: int, block: memoryview) -> bytes:
        """What a block expands to; the last few are kept, since records are taken out of one several at a time."""
        expanded = self._expanded.get(at)
        if expanded is None:
            expanded = BodyBlocks(block).expanded(0)
            if len(self._expanded) >= _EXPANDED_MAX:
                del self._expanded[next(iter(self._expanded))]
            self._expanded[at] = expanded
        return expanded

    def plain_record(self, record: memoryview) -> memoryview:
        """A stored record with its body in it, wherever that stands.

        Raises:
            RecordCorrupt: its block cannot be expanded, or does not have the body.
        """
        used = block_use((len(record),), (record,))
        return record if used is None else self.blocks_at(used.blocks).plain(record, self._expand)

    def hand_out(
        self, lengths: Sequence[int] | npt.NDArray[np.uint32], pieces: Sequence[memoryview], blocks: StoredBlocks
    ) -> tuple[Sequence[int] | npt.NDArray[np.uint32], list[Buffer]]:
        """Records of a slice with their blocks behind them; or with their bodies in them, if they take less then.

        Returns their lengths and bytes.
        """
        behind = blocks.behind(lengths, pieces)
        if behind is not None:
            return lengths, behind
        used = blocks.used
        if used is None or len(used.sizes) != len(lengths):  # some are left out
            used = block_use(lengths, pieces)
        if used is None:
            return lengths, [*pieces]
        together = gather_blocks(lengths, pieces, blocks, used)
        if sum(map(len, together)) <= int(used.sizes.sum()):
            return lengths, together
        try:
            records: list[Buffer] = [blocks.plain(record, self._expand) for record in _each(lengths, pieces)]
        except RecordCorrupt:
            return lengths, together  # its reader finds out which it is
        return [*map(len, records)], records

    def _read_few(self, key: int, offset: int, stop: int, max_bytes: int) -> Slice | None:
        """`read` for the last few messages, which costs less without arrays; None where that does not do."""
        entries = self.derived.queues.newest(key, offset, stop)
        if entries is None:
            return None
        pieces: list[memoryview] = []
        lengths: list[int] = []
        start = end = -1
        for at, length in entries:
            if not length:
                return None  # damaged: `_gather` says how
            max_bytes -= length
            if lengths and max_bytes < 0:
                break
            if at != end:
                if lengths:
                    pieces.append(self.bytes_at(start, end))
                    if self.cache.corrupt(start, end):
                        return None  # `_gather` says which
                start = at
            end = at + length
            lengths.append(length)
        pieces.append(self.bytes_at(start, end))
        if self.cache.corrupt(start, end):
            return None
        after = offset + len(lengths)
        return Slice(np.arange(offset, after, dtype=np.uint64), np.array(lengths, np.uint32), pieces, after)

    def _gather(
        self,
        topic: Topic,
        queue: int,
        offsets: npt.NDArray[np.uint64],
        where: npt.NDArray[np.uint64],
        *,
        lengths: npt.NDArray[np.uint32],
        next_offset: int,
    ) -> Slice:
        """Fetch the records, adjacent ones together; stop before the first that cannot be read."""
        first, last, size = int(where[0]), int(where[-1]), int(lengths[-1])
        last += size
        # One behind the other. A lost unit cannot be among them, but for its entries at the end, which have no length.
        if size and last - first == int(lengths.sum(dtype=np.int64)):
            with contextlib.suppress(Damaged):  # the long way says which messages
                piece = self.bytes_at(first, last)
                if not self.cache.corrupt(first, last):
                    return Slice(offsets, lengths, [piece], next_offset)
        ends = where + lengths
        lost = lengths == 0
        # A lost unit begins where the last record of the unit before it ends, so its entries look adjacent.
        breaks = np.flatnonzero((where[1:] != ends[:-1]) | (lost[1:] != lost[:-1])) + 1
        starts = [0, *breaks.tolist(), len(where)]
        pieces: list[memoryview] = []
        firsts, lasts = where[starts[:-1]].tolist(), ends[[j - 1 for j in starts[1:]]].tolist()
        corrupt: dict[int, str] = {}
        base, view = 0, memoryview(b"")  # what the piece before is of
        for i, first, last in zip(starts[:-1], firsts, lasts, strict=True):
            if base <= first and last <= base + len(view) and not lost[i]:
                pieces.append(view[first - base : last - base])
                if self.cache.has_corrupt:
                    corrupt |= self.cache.corrupt(first, last)
                continue
            try:
                if lost[i]:
                    raise self._quarantine(first)
                pieces.append(self.bytes_at(first, last))
                corrupt |= self.cache.corrupt(first, last)
                base, view = self.cache.around(first, last) or (0, memoryview(b""))
            except Damaged as error:
                if i:
                    known = _by_place(corrupt, where, offsets)
                    return Slice(offsets[:i], lengths[:i], pieces, int(offsets[i]), corrupt=known)
                raise self._damaged(topic, queue, int(offsets[0]), error) from error
        return Slice(offsets, lengths, pieces, next_offset, corrupt=_by_place(corrupt, where, offsets))

    def _damaged(self, topic: Topic, queue: int, offset: int, error: Damaged) -> Damaged:
        """Say how far the messages reach that cannot be read."""
        key = queue_key(topic.id, queue)
        start, end = error.detail.get("start", 0), error.detail.get("end", 0)
        following = self.derived.state.next.get(key, 0)
        readable = offset + 1
        for columns in self.derived.queues.columns(key, offset + 1, min(following, offset + SCAN_MAX)):
            lost = (columns.lengths == 0) | ((columns.offsets >= np.uint64(start)) & (columns.offsets < np.uint64(end)))
            good = np.flatnonzero(~lost)
            readable = columns.first + (int(good[0]) if len(good) else len(lost))
            if len(good):
                break
        return Damaged(
            f"messages {offset}-{readable - 1} of queue {queue} of {topic.name} are damaged ({error}): "
            f"restore the journal from a replica or a backup, or read on at {readable}",
            topic=topic.name,
            queue=queue,
            first=offset,
            next=readable,
            start=start,
            end=end,
            may_pass=error.detail.get("may_pass", False),
        )

    # --- the journal ------------------------------------------------------------------------------------------------

    def bytes_at(self, start: int, end: int) -> memoryview:
        """Verified bytes [start, end), which lie within one unit.

        Raises:
            Damaged: the unit fails its checksum; `detail` has its range.
        """
        found = self.cache.get(start, end)
        if found is not None:
            return found
        unit_start, after = self.derived.lookup.units_from(start, _FIRST_WINDOW)
        if unit_start == self._read_on:
            after = self.derived.lookup.units_from(start, _WINDOW)[1]
        self._load(unit_start, after)
        found = self.cache.get(start, end)
        if found is None:
            raise self._quarantine(unit_start)
        return found

    def _load(self, unit_start: int, after: int | None) -> None:
        """Read whole units from one on, verify them, and keep them.

        Parameters:
            after: where the unit after them starts, so that no byte is read in vain; None if that is not known.
        """
        segment = self._journal.segment_at(unit_start)
        if segment is None:
            raise self._quarantine(unit_start)
        left = segment.end - unit_start
        raw = self._read(unit_start, _FIRST_WINDOW if after is None else after - unit_start)
        header = read_header(raw)
        if header is not None and len(raw) < header.length <= left:
            raw = self._read(unit_start, header.length)
        good = 0
        corrupt: dict[int, str] = {}
        has_blocks = False
        while header is not None and good + header.length <= len(raw):
            ours = header.start == unit_start + good and header.journal_id == self._journal.id
            if not ours or not is_intact(header, raw, good):
                break
            if not header.flags & CHECKED:
                corrupt |= _corrupt_of(header, memoryview(raw)[good : good + header.length])
            has_blocks = has_blocks or header.version == BLOCKS_VERSION
            good += header.length
            header = read_header(raw, good)
        if not good:
            raise self._quarantine(unit_start)
        data = raw if good == len(raw) else raw[:good]
        is_passing = unit_start == self._read_on
        self.cache.put(unit_start, data, passing=is_passing, corrupt=corrupt, has_blocks=has_blocks)
        self._read_on = unit_start + good
        if self._failures.count:
            self._failures.passed(unit_start, self._read_on)

    def _read(self, unit_start: int, size: int) -> bytes:
        """Bytes from the start of a unit on: fewer, down to this unit, where the disk refuses what is behind it.

        Raises:
            Damaged: it refuses the unit.
        """
        try:
            return self._journal.read_available(unit_start, size)
        except StorageError as error:
            if not is_refusal(error):
                raise
            refusal = error
        end = self._next_unit(unit_start)
        if size > end - unit_start:
            try:
                return self._journal.read_available(unit_start, end - unit_start)
            except StorageError as error:
                if not is_refusal(error):
                    raise
                refusal = error
        raise self._refused(unit_start, end, refusal)

    def _refused(self, start: int, end: int, refusal: StorageError) -> Damaged:
        """What it means that the disk refuses a unit: it is damaged at once, or after some time; see `ReadFailures`."""
        is_known = any(first <= start < last for first, last in self.derived.damage)
        if is_known or self._failures.failed(start, end):
            return self._quarantine(start, f"cannot be read ({refusal.message})")
        log.error(
            "the disk refuses a part of the journal: it is asked again, and the part is damaged if it goes on refusing",
            once_for=start >> 20,
            start=start,
            end=end,
            error=refusal,
            patience_seconds=int(PATIENCE_SECONDS),
        )
        return Damaged(
            f"journal bytes {start}-{end} cannot be read for now ({refusal.message})",
            start=start,
            end=end,
            may_pass=True,
        )

    def _quarantine(self, unit_start: int, why: str = "fail their checksum") -> Damaged:
        for start, end in self.derived.damage:
            if start <= unit_start < end:
                break
        else:
            start, end = unit_start, self._lost_until(self._next_unit(unit_start))
            self.derived.add_damage(start, end)
        return Damaged(f"journal bytes {start}-{end} {why}", start=start, end=end)

    def _lost_until(self, end: int) -> int:
        """Where damage ends that goes on over units behind it, thousands of small ones in a lost piece of the disk."""
        segment = self._journal.segment_at(end)
        if segment is None:
            return end
        try:
            raw = self._journal.read_available(end, _LOST_MAX)
        except StorageError:
            return end
        first, stop = end, min(end + _LOST_MAX - HEADER_BYTES, segment.end, self.derived.applied)
        while end < stop and read_header(raw, end - first) is None:
            after = self.derived.lookup.units_from(end, 0)[1]
            if after is None:
                break
            end = after
        return end

    def _next_unit(self, unit_start: int) -> int:
        """Where the unit after a damaged one starts, by the index, since its own length cannot be trusted."""
        segment = self._journal.segment_at(unit_start)
        end = self._journal.end if segment is None else segment.end
        low, high = unit_start + 1, end
        while low < high:  # unit_holding rises with the offset, so halving finds where it changes
            middle = (low + high) // 2
            if self.derived.lookup.unit_holding(middle) > unit_start:
                high = middle
            else:
                low = middle + 1
        return low

    def unit_at(self, start: int) -> Unit:
        """A whole unit, parsed."""
        header = read_header(self.bytes_at(start, start + HEADER_BYTES))
        assert header is not None
        return parse_unit(header, self.bytes_at(start, start + header.length))

    def unit_holding(self, offset: int) -> Unit:
        """The unit that a journal offset lies in, whole and parsed."""
        return self.unit_at(self.derived.lookup.unit_holding(offset))

    def raw_units(self, offset: int, visible: int, max_bytes: int) -> tuple[bytes | memoryview, int]:
        """Whole visible units, verbatim, from the one that holds an offset on: at least one if there is any.

        Returns them and the offset to go on with. Not verified: the reader does that where it decodes.
        """
        offset = self._start_of(offset, visible)
        while offset < visible:
            segment = self._journal.segment_at(offset)
            if segment is None:
                following = [s.start for s in self._journal.segments if s.start > offset]
                if not following or following[0] >= visible:
                    break
                offset = following[0]
                continue
            left = min(segment.end, visible) - offset
            raw = self._read(offset, min(left, max(max_bytes, HEADER_BYTES)))
            header = read_header(raw)
            if header is not None and len(raw) < header.length <= left:
                raw = self._read(offset, header.length)
            end = 0 if header is None else whole_units(raw, offset, RAW_UNITS_MAX)
            if not end:
                raise self._quarantine(self.derived.lookup.unit_holding(offset))
            return (raw if end == len(raw) else memoryview(raw)[:end]), offset + end
        return b"", offset

    @property
    def _extent(self) -> range:
        return range(self._journal.start, self._journal.end)

    def _start_of(self, offset: int, visible: int) -> int:
        """Where the unit starts that an offset lies in; the offset itself if that is none or cannot be told.

        By the index: bytes of a message may look like a unit.
        """
        if offset >= visible:
            return offset
        start = self.derived.lookup.unit_holding(offset)
        if start >= offset or self._journal.segment_at(start) is None:
            return offset
        header = read_header(self._read(start, HEADER_BYTES))
        return start if header is not None and header.start == start and offset < start + header.length else offset

    # --- by key, id and time ----------------------------------------------------------------------------------------

    def places_of_key(self, key: str) -> list[int]:
        """Where messages may stand that have a key, in the order they were stored."""
        return self.derived.lookup.offsets_of_hash(key_hash(key), self._journal.start)

    def find_key(self, key: str, topic: str | None) -> Iterator[Found]:
        """Messages with a key, in the order they were stored."""
        for offset in self.places_of_key(key):
            found = self.record_at(offset)
            if found is not None and found.record.key == key and topic in (None, found.topic):
                yield found

    def places_of_id(self, message_id: MessageId) -> list[int]:
        """Where the record may stand that a message was first stored as, and those it was moved to since."""
        offsets = self.derived.lookup.offsets_of_hash(id_hash(message_id), self._journal.start)
        for first, offset in self.derived.lookup.batches_of_id(*message_id, self._journal.start):
            unit = self.unit_at(self.derived.lookup.unit_holding(offset))
            at = int(np.searchsorted(np.asarray(unit.offsets), offset)) + message_id.sequence - first
            offsets.append(int(unit.offsets[at]))
        return sorted(set(offsets))

    def find_id(self, message_id: MessageId) -> Iterator[Found]:
        """The record a message was first stored as, and those it was moved to since."""
        for offset in self.places_of_id(message_id):
            found = self.record_at(offset)
            if found is not None and found.message_id == message_id:
                yield found

    def record_at(self, offset: int) -> Found | None:
        """The message that stands at a journal offset; None if its topic is gone."""
        unit = self.unit_at(self.derived.lookup.unit_holding(offset))
        index = int(np.searchsorted(np.asarray(unit.offsets), offset))
        if index >= len(unit.offsets) or int(unit.offsets[index]) != offset:
            return None
        row, within = row_of(unit, index)
        topic = self.derived.state.topics_by_id.get(row.topic_id)
        if topic is None:
            return None
        why = self.cache.corrupt(offset, offset + 1).get(offset, "")
        if why:
            record = RecordView(stand_in(bytes(unit.record(index))))
            message_id = MessageId(row.producer_id, row.first_sequence + within)
            if row.flags & MOVED:
                message_id = record.message_id or MessageId(0, offset)
        else:
            record = RecordView(unit.buffer, offset - unit.start)
            message_id = message_id_of(unit, row, index, within)
            if record.in_block:
                try:
                    record = RecordView(self.plain_record(unit.record(index)))
                except RecordCorrupt as error:
                    why, record = error.message, RecordView(stand_in(bytes(unit.record(index))))
        return Found(message_id, topic.name, offset, unit.header.stored_at_ms, record=record, corrupt=why)

    def offset_since(self, topic_id: int, queue: int, time_ms: int) -> int:
        """The first offset of a queue stored at or after a time; the next one if there is none."""
        key = queue_key(topic_id, queue)
        low, high = self.derived.state.first.get(key, 0), self.derived.state.next.get(key, 0)
        unit = self.derived.lookup.first_unit_since(time_ms, self._journal.start)
        if unit is None:
            return high
        return self.derived.queues.first_behind(key, unit, range(low, high), self._extent)

    def entries_behind(self, key: int, journal_offset: int, low: int, count: int) -> QueueEntries:
        """Where the messages of a queue stand from a journal offset on, some of them, and maybe a few before it.

        Parameters:
            low: an offset of the queue that is likely to be just before them; 0 if none is known.
            count: how many entries to look at.
        """
        first, high = self.derived.state.first.get(key, 0), self.derived.state.next.get(key, 0)
        queues = self.derived.queues
        at = min(max(first, low), high)
        found = queues.piece(key, at, min(high, at + count)) if low and at < high else None
        if found is None or int(found.offsets[-1]) < journal_offset:
            at = queues.first_behind(key, journal_offset, range(at, high), self._extent)
            if at == high:
                return QueueEntries(at, _NO_PLACES, _NO_PLACES, is_last=True)
            found = queues.piece(key, at, min(high, at + count))
        offsets, lengths = found.offsets.astype(np.int64), found.lengths.astype(np.int64)
        return QueueEntries(at, offsets, lengths, is_last=at + len(offsets) >= high)

    def units_between(self, first: int, last: int, visible: int, max_bytes: int) -> tuple[bytes | memoryview, int]:
        """`raw_units` from the unit that holds the record at `first` to the one that holds the record at `last`.

        There may be fewer, as `raw_units` has it, and some behind them where the index does not say where they end.
        """
        lookup = self.derived.lookup
        start, after = lookup.units_from(last, 0)
        if first < start:
            start = lookup.unit_holding(first)
        size = min(max_bytes, (last + _FIRST_WINDOW if after is None else after) - start)
        if start + size == after and after <= visible:
            raw = self._read(start, size)
            if whole_units(raw, start, RAW_UNITS_MAX) == size:
                return raw, after
        return self.raw_units(start, visible, size)


def _each(lengths: Sequence[int] | npt.NDArray[np.uint32], pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """The records of some pieces, one by one."""
    sizes = iter(lengths.tolist() if isinstance(lengths, np.ndarray) else lengths)
    for piece in pieces:
        at = 0
        while at < len(piece):
            end = at + next(sizes)
            yield piece[at:end]
            at = end


def _first(count: int, lengths: npt.NDArray[np.uint32], pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """The pieces of the first so many records."""
    left = int(lengths[:count].sum(dtype=np.int64))
    for piece in pieces:
        if left <= 0:
            break
        yield piece[:left]
        left -= len(piece)


def _corrupt_of(header: Header, data: memoryview) -> dict[int, str]:
    """The records of a unit that cannot be read or fail their checksums, by journal offset, and why."""
    unit = parse_unit(header, data)
    offsets = np.asarray(unit.offsets, np.int64)
    found = find_corrupt(data, offsets - unit.start, np.asarray(unit.lengths, np.int64))
    return {int(offsets[index]): why for index, why in found.items()}


def _by_place(
    corrupt: Mapping[int, str], where: npt.NDArray[np.uint64], offsets: npt.NDArray[np.uint64]
) -> Mapping[int, str]:
    """By queue offset what is known by journal offset, of those that are wanted."""
    if not corrupt:
        return _NOTHING
    return {
        offset: corrupt[place]
        for place, offset in zip(where.tolist(), offsets.tolist(), strict=False)
        if place in corrupt
    }


def row_of(unit: Unit, index: int) -> tuple[Row, int]:
    """The batch a record of a unit belongs to, and its place in that."""
    first = 0
    for row in unit.rows:
        if index < first + row.records:
            return row, index - first
        first += row.records
    raise IndexError(index)
