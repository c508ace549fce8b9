"""Units of the journal into columns of numpy, a whole answer of the broker at a time.

Python looks at each unit's header once; lengths, batch tables and fields of records are then gathered for all units
together. So a unit of one record costs a few microseconds, and a record of a large unit a few nanoseconds for each
column that is wanted. The attributes of the records are read side by side (`walk`): the first entry of every record,
then the second, and so on.

What always holds: every unit is checked against its checksum before anything in it is believed. Message and system
records are told apart by the batch table alone. What a record's own bytes say is followed only within the record; where
its attributes are not well-formed, those before the first bad one count and the rest do not: a client can store such a
message, and a reader of a whole journal must get past it. Rows stand in the journal's order. Records of one queue that
the broker gathered for a peek decode to the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from dmq.errors import Damaged, RecordCorrupt
from dmq.event_log import EventLog
from dmq.pipeline.decode.journal_reader import Fetched, Peeked
from dmq.records import layout
from dmq.records.attributes import (
    ATTEMPT,
    ATTEMPTS_BEFORE,
    COMPRESSION,
    DUE_AT,
    ENTRY,
    GROUP,
    KEY,
    MESSAGE_ID,
    ORIGINAL_SEND_TIME,
    ORIGINAL_TOPIC,
    PROPERTY,
    REASON,
    REASON_CODE,
    TAG,
    TARGET_TOPIC,
)
from dmq.records.layout import gather
from dmq.records.view import RecordView
from dmq.storage.journal.unit import CUT, HEADER_BYTES, MOVED, ROW_BYTES, SNAPSHOT, is_intact, read_header

__all__ = [
    "NOTHING",
    "Batches",
    "Found",
    "JournalRange",
    "RecordSpans",
    "SystemRecord",
    "UnitRows",
    "Wanted",
    "decode_fetched",
    "decode_peeked",
    "decode_units",
    "walk",
]

Positions: TypeAlias = npt.NDArray[np.int64]

# From this many records down, one after the other is cheaper; and a record may have thousands of entries.
FEW: Final = 24
_HEAD_BYTES: Final = ENTRY.size


class Found(NamedTuple):
    """Entries of one kind: whose they are, and where their values begin and end; in the order of the bytes."""

    record: Positions
    at: Positions
    end: Positions


_NONE: Final[Positions] = np.empty(0, np.int64)
NOTHING: Final = Found(_NONE, _NONE, _NONE)


class _Gathered:
    """The entries of one kind as they are met."""

    def __init__(self) -> None:
        self._pieces: list[Found] = []
        self._few: list[tuple[int, int, int]] = []

    def add(self, record: Positions, at: Positions, end: Positions) -> None:
        self._pieces.append(Found(record, at, end))

    def add_one(self, record: int, at: int, end: int) -> None:
        self._few.append((record, at, end))

    def found(self, *, is_single: bool) -> Found:
        """All of them, in the order of the bytes; only the first of each record if there may be but one."""
        pieces = self._pieces
        if self._few:
            pieces = [*pieces, Found(*np.array(self._few, np.int64).T)]
        if not pieces:
            return NOTHING
        if len(pieces) == 1 and not self._few:
            return pieces[0]
        record, at, end = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
        order = np.argsort(at, kind="stable")
        if is_single:
            whose = record[order]
            order = order[np.concatenate(([True], whose[1:] != whose[:-1]))]
        return Found(record[order], at[order], end[order])


def walk(buffer: memoryview, starts: Positions, ends: Positions, kinds: Collection[int]) -> dict[int, Found]:
    """The entries of the given kinds; of each but `PROPERTY` a record has one at most.

    Parameters:
        buffer: where the records stand.
        starts: where the attributes of each begin, behind their length.
        ends: where they end.
        kinds: which are wanted, `PROPERTY` for the user's properties.
    """
    octets = np.frombuffer(buffer, np.uint8)
    gathered = {kind: _Gathered() for kind in kinds}
    bits = {kind: np.uint32(1 << number) for number, kind in enumerate(gathered)}
    everything = np.uint32((1 << len(bits)) - 1)
    have = np.zeros(len(starts), np.uint32)
    record = np.flatnonzero(ends - starts >= _HEAD_BYTES)
    at, end = (starts, ends) if len(record) == len(starts) else (starts[record], ends[record])
    while len(record) > FEW:
        kind = octets[at]
        value_at = at + _HEAD_BYTES
        value_end = value_at + gather(buffer, at, 1, ">u2")
        is_good = value_end <= end
        lowest, highest = int(kind.min()), int(kind.max())
        for wanted, place in gathered.items():
            if not lowest <= wanted <= highest:
                continue
            hit = is_good if lowest == highest else is_good & (kind == wanted)
            if hit.all():
                place.add(record, value_at, value_end)
                if len(gathered) == 1 and wanted != PROPERTY:
                    return {wanted: place.found(is_single=True)}  # nobody wants more
            elif hit.any():
                place.add(record[hit], value_at[hit], value_end[hit])
            if wanted != PROPERTY:
                have[record[hit]] |= bits[wanted]
        # A record that has all that is wanted is done; none has all properties before the end.
        is_open = is_good & (value_end <= end - _HEAD_BYTES) & (have[record] != everything)
        if is_open.all():
            at = value_end
        else:
            record, at, end = record[is_open], value_end[is_open], end[is_open]
    for number, first, stop in zip(record.tolist(), at.tolist(), end.tolist(), strict=True):
        _walk_one(buffer, number, first, stop, gathered=gathered)
    return {kind: place.found(is_single=kind != PROPERTY) for kind, place in gathered.items()}


def _walk_one(buffer: memoryview, number: int, at: int, end: int, gathered: dict[int, _Gathered]) -> None:
    while end - at >= _HEAD_BYTES:
        kind, size = ENTRY.unpack_from(buffer, at)
        at += _HEAD_BYTES
        if size > end - at:
            return
        place = gathered.get(kind)
        if place is not None:
            place.add_one(number, at, at + size)
        at += size


log = EventLog(__name__)

Bits: TypeAlias = npt.NDArray[np.bool_]
Wanted: TypeAlias = Collection[int] | Callable[[npt.NDArray[np.uint32]], Bits]

ROW_DTYPE: Final = np.dtype(
    [
        ("producer_id", ">u8"),
        ("producer_epoch", ">u4"),
        ("first_sequence", ">u8"),
        ("records", ">u4"),
        ("topic_id", ">u4"),
        ("queue", "u1"),
        ("flags", "u1"),
        ("zero", ">u2"),
        ("first_queue_offset", ">u8"),
        ("address", "V18"),  # and the port
        ("block_bytes", ">u4"),
        ("rest", "V2"),
    ]
)
assert ROW_DTYPE.itemsize == ROW_BYTES

# Which attributes a column needs.
KINDS: Final[dict[str, tuple[int, ...]]] = {
    "key": (KEY,),
    "tag": (TAG,),
    "headers": (PROPERTY,),
    "body": (COMPRESSION,),
    "body_crc": (COMPRESSION,),
    "message_id": (MESSAGE_ID,),
    "sent_at": (ORIGINAL_SEND_TIME,),
    "origin_topic": (ORIGINAL_TOPIC, TARGET_TOPIC),
    "group": (GROUP,),
    "attempt": (ATTEMPT, ATTEMPTS_BEFORE, REASON_CODE),
    "due_at": (DUE_AT,),
    "reason": (REASON_CODE,),
    "error": (REASON,),
}
# Attributes that only moved records have: where there is none, nobody looks for them.
_OF_MOVED: Final = frozenset((MESSAGE_ID, ORIGINAL_SEND_TIME, ORIGINAL_TOPIC))

_TIME_MAX_MS: Final = np.uint64(253_402_300_799_999)  # the end of the year 9999: a client writes what it likes


class SystemRecord(NamedTuple):
    """A record of the journal that is not a message: an event, for `dmq.storage.state.events.decode_event`."""

    journal_offset: int
    stored_at_ms: int
    body: memoryview
    is_snapshot: bool = False


class Batches(NamedTuple):
    """What the batch tables and the headers of their units say, one element a row of a table."""

    topic_id: npt.NDArray[np.uint32]
    queue: npt.NDArray[np.uint8]
    first_queue_offset: Positions
    producer_id: npt.NDArray[np.uint64]
    first_sequence: npt.NDArray[np.uint64]
    address: npt.NDArray[np.void]  # 16 bytes, IPv6 or IPv4-mapped, and the port
    stored_at_ms: Positions
    shift: Positions  # from a place in the buffer to one in the journal
    is_moved: Bits  # its records carry ids and origins of their own


class RecordSpans(NamedTuple):
    """Where records stand, one element a record."""

    starts: Positions
    ends: Positions
    batch: Positions  # which element of the batches each belongs to
    within: Positions  # as its which record

    def select(self, index: Any) -> RecordSpans:
        return RecordSpans(*(column[index] for column in self))


class JournalRange(NamedTuple):
    """The range of a journal that was decoded."""

    journal_id: int = 0
    start: int = 0
    end: int = 0


class UnitRows:
    """The message records of some units, in the journal's order.

    Every column is read when it is asked for; attributes only for the columns that `decode_units` was told of.

    Attributes:
        buffer: the bytes in which the records stand.
        starts, ends, batch, within: as of `RecordSpans`; `batch` counts in `batches`.
        start, end: the journal's range that was decoded.
        journal_id: of which journal.
        events: the system records among them.
    """

    def __init__(
        self,
        buffer: memoryview,
        spans: RecordSpans,
        batches: Batches,
        columns: frozenset[str],
        read: JournalRange = JournalRange(),  # noqa: B008  frozen
        events: Iterable[SystemRecord] = (),
    ) -> None:
        self.buffer = buffer
        self._spans = spans
        self.starts, self.ends, self.batch, self.within = spans
        self.batches = batches
        self.columns = columns
        self._read = read
        self.journal_id, self.start, self.end = read
        self.events = list(events)
        self._parts: tuple[Positions, ...] | None = None
        self._entries: dict[int, Found] | None = None
        self._compressed: Bits | None = None
        self._in_block: Bits | None = None
        self.expanded: list[bytes | None] | None = None
        """The compressed bodies, once somebody expanded them; see `dmq.pipeline.decode.rows`."""

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, index: Any) -> Self:
        """Some of the rows in their order, by a mask, a slice or rising numbers; without the events."""
        return type(self)(self.buffer, self._spans.select(index), self.batches, self.columns, self._read)

    def for_columns(self, *names: str) -> Self:
        """The same rows, to ask for other columns."""
        return type(self)(self.buffer, self._spans, self.batches, frozenset(names), self._read)

    # --- the batch tables -------------------------------------------------------------------------------------------

    def topic_id(self) -> npt.NDArray[np.uint32]:
        return self.batches.topic_id[self.batch]

    def queue(self) -> npt.NDArray[np.uint8]:
        return self.batches.queue[self.batch]

    def queue_offset(self) -> Positions:
        offset: Positions = self.batches.first_queue_offset[self.batch] + self.within
        return offset

    def journal_offset(self) -> Positions:
        offset: Positions = self.starts + self.batches.shift[self.batch]
        return offset

    def stored_at_ms(self) -> Positions:
        return self.batches.stored_at_ms[self.batch]

    def is_moved(self) -> Bits:
        return self.batches.is_moved[self.batch]

    def producer_id(self) -> npt.NDArray[np.uint64]:
        return self.batches.producer_id[self.batch]

    def sequence(self) -> npt.NDArray[np.uint64]:
        sequence: npt.NDArray[np.uint64] = self.batches.first_sequence[self.batch] + self.within.astype(np.uint64)
        return sequence

    # --- the fixed part ---------------------------------------------------------------------------------------------

    def _field(self, at: int, dtype: str) -> npt.NDArray[Any]:
        return gather(self.buffer, self.starts, at, dtype)

    def flags(self) -> npt.NDArray[np.uint8]:
        return self._field(layout.FLAGS_AT, "u1")

    def is_compressed(self) -> Bits:
        """Which bodies are stored compressed, each by itself."""
        if self._compressed is None:
            self._compressed = (self.flags() & layout.COMPRESSED) != 0
        return self._compressed

    def in_block(self) -> Bits:
        """Which bodies stand in blocks, compressed together with others."""
        if self._in_block is None:
            self._in_block = (self.flags() & layout.BLOCK) != 0
        return self._in_block

    def priority(self) -> npt.NDArray[np.uint8]:
        return self._field(layout.PRIORITY_AT, "u1")

    def body_crc(self) -> Positions:
        """CRC-32C of each body as it is stored."""
        return self._field(layout.CRC_AT + 4, ">u4").astype(np.int64)

    def send_time_ms(self) -> Positions:
        """When the record itself was sent: for a moved one, when it was moved."""
        sent_at_ms: Positions = np.minimum(self._field(layout.SEND_TIME_AT, ">u8"), _TIME_MAX_MS).astype(np.int64)
        return sent_at_ms

    def received_at_ms(self) -> Positions:
        received_at_ms = self.send_time_ms() + self._field(layout.RECEIVE_TIME_AT, ">u4")
        clamped: Positions = np.minimum(received_at_ms, np.int64(_TIME_MAX_MS))
        return clamped

    # --- the variable part ------------------------------------------------------------------------------------------

    def _part(self, number: int) -> Positions:
        """Where each topic, app, business id and the attributes begin, all at their lengths.

        Of a record whose sizes do not add up, everything behind its fixed part is its body.
        """
        if self._parts is None:
            octets = np.frombuffer(self.buffer, np.uint8)
            try:
                topic_at = self.starts + layout.BODY_AT
                topic_at += gather(self.buffer, self.starts, layout.BODY_SIZE_AT, ">u4")
                app_at = topic_at + octets[topic_at] + 1
                business_at = app_at + octets[app_at] + 1
                attributes_at = business_at + octets[business_at] + 1
                is_bad = attributes_at + 2 + gather(self.buffer, attributes_at, 0, ">u2") != self.ends
            except IndexError:
                is_bad = np.ones(1, np.bool_)
            self._parts = self._parts_of_bad() if is_bad.any() else (topic_at, app_at, business_at, attributes_at)
        return self._parts[number]

    def _parts_of_bad(self) -> tuple[Positions, ...]:
        """The same one by one, where a record's sizes do not add up."""
        found = []
        for row, (start, end) in enumerate(zip(self.starts.tolist(), self.ends.tolist(), strict=True)):
            try:
                found.append(RecordView(self.buffer, start, end).parts()[:4])
            except RecordCorrupt as error:
                found.append((end - 5, end - 4, end - 3, end - 2))  # a byte of each name's length, two of attributes
                offset = int(self.journal_offset()[row])
                log.warning("a record cannot be read", once_for=__name__, offset=offset, reason=error.message)
        return tuple(np.array(found, np.int64).T)

    def stored_bodies(self) -> tuple[Positions, Positions]:
        """Where each body begins and ends, as it is stored: it may be compressed."""
        at = self.starts + layout.BODY_AT
        if self._parts is not None:
            return at, self._parts[0]
        ends = at + gather(self.buffer, self.starts, layout.BODY_SIZE_AT, ">u4")
        return at, self._part(0) if (ends > self.ends - 5).any() else ends

    def topic_names(self) -> tuple[Positions, Positions]:
        """The topic that each record names; that of one which waits is not the one it stands in."""
        return self._part(0) + 1, self._part(1)

    def apps(self) -> tuple[Positions, Positions]:
        return self._part(1) + 1, self._part(2)

    def business_ids(self) -> tuple[Positions, Positions]:
        return self._part(2) + 1, self._part(3)

    def entries(self, kind: int) -> Found:
        """Attributes of a kind that one of the columns needs."""
        if self._entries is None:
            kinds = {kind for column in self.columns for kind in KINDS.get(column, ())}
            if not self.is_moved().any():
                kinds -= _OF_MOVED
            if COMPRESSION in kinds and not self.is_compressed().any():
                kinds.remove(COMPRESSION)
            self._entries = walk(self.buffer, self._part(3) + 2, self.ends, kinds) if kinds else {}
        return self._entries.get(kind, NOTHING)


class _Units(NamedTuple):
    """What the headers of a body's units say, one element a unit."""

    at: Positions  # in the body
    start: Positions  # in the journal
    stored_at_ms: Positions
    records: Positions
    batches: Positions
    others: Positions  # bytes of the tables behind the batches
    end: Positions  # in the body
    flags: Positions


def decode_units(body: Any, *, wanted: Wanted | None = None, columns: Collection[str]) -> UnitRows:
    """The messages and events of whole units.

    Parameters:
        body: the units, one after another, and nothing else.
        wanted: ids of the topics whose messages are wanted, or a function from ids to a mask; None is all.
        columns: which columns will be asked for, by the names of `dmq.pipeline.tables`.

    Raises:
        Damaged: a unit fails its checksum; `detail` has where it `start`s and `end`s in the journal, and its
            `first_byte` and `last_byte` (not included) in the body.
        RecordCorrupt: a unit contradicts itself.
    """
    buffer = memoryview(body)
    units, journal_id = _read_headers(buffer)
    table, unit_of_row = _tables(buffer, units)
    counts = table["records"].astype(np.int64)
    lengths_at = _runs(units.at + HEADER_BYTES, units.records, 4)
    before = np.zeros(len(lengths_at) + 1, np.int64)  # bytes of records before each record
    np.cumsum(gather(buffer, lengths_at, 0, ">u4"), dtype=np.int64, out=before[1:])
    _check(units, before, table, unit_of_row)
    batches = _batches(units, table, unit_of_row)
    # From sums over all records to places in the body: what the tables of the units take comes on top.
    shift = (_data_at(units) - before[np.cumsum(units.records) - units.records])[unit_of_row]
    shift += _blocks_before(units, table)
    _mend_cut(buffer, units.flags[unit_of_row], batches, counts, firsts=before[np.cumsum(counts) - counts] + shift)
    chosen = batches.topic_id != 0
    rows = _Rows(before, shift, counts, np.cumsum(counts) - counts)
    events = _events(buffer, rows.of(np.flatnonzero(~chosen)), batches, units.flags[unit_of_row])
    if callable(wanted):
        chosen &= wanted(batches.topic_id)
    elif wanted is not None:
        chosen &= np.isin(batches.topic_id, np.fromiter(wanted, np.uint32, len(wanted)))
    read = JournalRange()
    if len(units.start):
        read = JournalRange(journal_id, int(units.start[0]), int(units.start[-1] + units.end[-1] - units.at[-1]))
    return UnitRows(buffer, rows.of(np.flatnonzero(chosen)), batches, frozenset(columns), read=read, events=events)


def _mend_cut(buffer: memoryview, flags: Positions, batches: Batches, counts: Positions, *, firsts: Positions) -> None:
    """Of batches of cut units, their places in the journal are known by their first records."""
    cut = np.flatnonzero(((flags & CUT) != 0) & (counts > 0))
    if len(cut):
        at = firsts[cut]
        batches.shift[cut] = gather(buffer, at, layout.JOURNAL_OFFSET_AT, ">u8").astype(np.int64) - at


def decode_fetched(
    fetched: Fetched,
    on_damage: Callable[[Damaged], None],
    *,
    again: Callable[[Fetched], Fetched] | None = None,
    wanted: Wanted | None = None,
    columns: Collection[str],
) -> Iterator[UnitRows]:
    """The messages and events of an answer of the broker, without the units that are damaged.

    Parameters:
        on_damage: told of each damaged unit; raises if it may not be left out.
        again: fetches the range once more, from where it may not be damaged.
        wanted, columns: as of `decode_units`.
    """
    body = fetched.body
    while len(body):
        try:
            yield decode_units(body, wanted=wanted, columns=columns)
            return
        except Damaged as error:
            if again is not None:
                fetched, again = again(fetched), None
                body = fetched.body
                continue
            first, last = int(error.detail["first_byte"]), int(error.detail["last_byte"])
            if not fetched.start <= error.detail["start"] < error.detail["end"] <= fetched.end:
                raise  # not even its place can be relied on
            on_damage(error)
            if first:
                yield decode_units(body[:first], wanted=wanted, columns=columns)
            body = body[last:]


def _blocks_before(units: _Units, table: npt.NDArray[np.void]) -> Positions:
    """For each row, how many bytes the blocks of the rows before it take in its unit."""
    sizes = table["block_bytes"].astype(np.int64)
    before = np.cumsum(sizes) - sizes
    if not sizes.any():
        return before
    firsts = np.cumsum(units.batches) - units.batches
    has_rows = units.batches > 0
    shift: Positions = before - np.repeat(before[firsts[has_rows]], units.batches[has_rows])
    return shift


class _Rows(NamedTuple):
    """Where the records of each row of the batch tables stand."""

    before: Positions  # bytes of records before each record
    shift: Positions  # what to add to that, by row, for a place in the body
    counts: Positions
    first: Positions  # the number of each row's first record

    def of(self, rows: Positions) -> RecordSpans:
        """Of all records of some rows."""
        counts = self.counts[rows]
        shift = np.repeat(self.shift[rows], counts)
        batch = np.repeat(rows, counts)
        within = _runs(np.zeros(len(rows), np.int64), counts, 1)
        if len(rows) == len(self.counts):
            return RecordSpans(self.before[:-1] + shift, self.before[1:] + shift, batch, within)
        number = np.repeat(self.first[rows], counts) + within
        return RecordSpans(self.before[number] + shift, self.before[number + 1] + shift, batch, within)


def _read_headers(buffer: memoryview) -> tuple[_Units, int]:
    found: list[tuple[int, ...]] = []
    at, size = 0, len(buffer)
    journal_id = 0
    while at < size:
        header = read_header(buffer, at)
        if header is None or not is_intact(header, buffer, at):
            start = found[-1][1] + at - found[-1][0] if found else 0 if header is None else header.start
            last = size if header is None else min(size, at + header.length)
            end = start + last - at
            raise Damaged(
                f"journal bytes {start}-{end} fail their checksum", start=start, end=end, first_byte=at, last_byte=last
            )
        journal_id = header.journal_id
        others = 12 * header.hashes + 8 * header.dues
        end = at + header.length
        found.append((at, header.start, header.stored_at_ms, header.records, header.batches, others, end, header.flags))
        at = end
    if not found:
        return _Units(*(_NONE,) * 8), 0
    return _Units(*np.array(found, np.int64).T), journal_id


def _runs(firsts: Positions, counts: Positions, step: int) -> Positions:
    """For each first, `counts` positions from it on, `step` apart."""
    runs: Positions = np.repeat(firsts - (np.cumsum(counts) - counts) * step, counts)
    runs += np.arange(0, len(runs) * step, step, dtype=np.int64)
    return runs


def _tables_at(units: _Units) -> Positions:
    at: Positions = units.at + HEADER_BYTES + 4 * units.records
    return at


def _data_at(units: _Units) -> Positions:
    at: Positions = _tables_at(units) + ROW_BYTES * units.batches + units.others
    return at


def _tables(buffer: memoryview, units: _Units) -> tuple[npt.NDArray[np.void], Positions]:
    """The rows of all batch tables, and which unit each is of."""
    at = _runs(_tables_at(units), units.batches, ROW_BYTES)
    table = gather(buffer, at, 0, f"V{ROW_BYTES}").view(ROW_DTYPE)
    return table, np.repeat(np.arange(len(units.at)), units.batches)


def _batches(units: _Units, table: npt.NDArray[np.void], unit_of_row: Positions) -> Batches:
    return Batches(
        table["topic_id"].astype(np.uint32),
        table["queue"].copy(),
        table["first_queue_offset"].astype(np.int64),
        table["producer_id"].astype(np.uint64),
        first_sequence=table["first_sequence"].astype(np.uint64),
        address=table["address"].copy(),
        stored_at_ms=units.stored_at_ms[unit_of_row],
        shift=(units.start - units.at)[unit_of_row],
        is_moved=(table["flags"] & MOVED) != 0,
    )


def _check(units: _Units, before: Positions, table: npt.NDArray[np.void], unit_of_row: Positions) -> None:
    """Whether the tables of each unit add up to the unit."""
    last = np.cumsum(units.records)
    sizes = before[last] - before[last - units.records]
    per_unit = np.bincount(unit_of_row, table["records"], len(units.at)).astype(np.int64)
    sizes += np.bincount(unit_of_row, table["block_bytes"], len(units.at)).astype(np.int64)
    is_bad = (_data_at(units) + sizes != units.end) | (per_unit != units.records)
    if is_bad.any():
        start = int(units.start[int(is_bad.argmax())])
        raise RecordCorrupt(f"the unit at journal offset {start} contradicts itself", offset=start)


def _events(
    buffer: memoryview,
    spans: RecordSpans,
    batches: Batches,
    unit_flags: Positions,
) -> list[SystemRecord]:
    starts, ends, batch, _ = spans
    found: list[SystemRecord] = []
    columns = (starts, ends, starts + batches.shift[batch], batches.stored_at_ms[batch], unit_flags[batch] & SNAPSHOT)
    for start, end, offset, stored_at_ms, is_snapshot in zip(*(column.tolist() for column in columns), strict=True):
        body_at = start + layout.BODY_AT
        body_end = body_at + layout.U32.unpack_from(buffer, start + layout.BODY_SIZE_AT)[0]
        if body_end > end:
            raise RecordCorrupt(f"the body of the record at journal offset {offset} is too long", offset=offset)
        found.append(SystemRecord(offset, stored_at_ms, buffer[body_at:body_end], bool(is_snapshot)))
    return found


class PeekedRows(UnitRows):
    """Rows whose places stand in the records."""

    def journal_offset(self) -> Positions:
        offset: Positions = gather(self.buffer, self.starts, layout.JOURNAL_OFFSET_AT, ">u8").astype(np.int64)
        return offset


def decode_peeked(peeked: Peeked, topic_id: int, queue: int, columns: frozenset[str]) -> UnitRows:
    """The rows of an answer; each record is a batch of its own."""
    lengths = np.array(peeked.lengths, np.int64)
    ends = np.cumsum(lengths)
    count = len(lengths)
    ids = [*zip(*peeked.ids, strict=True)] or [(), (), ()]
    origins = [*zip(*peeked.origins, strict=True)] or [(), (), ()]
    id_counts, stored_counts = np.array(ids[0], np.int64), np.array(origins[0], np.int64)
    producer_id = np.repeat(np.array(ids[1], np.uint64), id_counts)
    # The number of each record within its run, on top of the run's first sequence.
    within_run = np.arange(count) - np.repeat(np.cumsum(id_counts) - id_counts, id_counts)
    every = np.arange(count)
    batches = Batches(
        np.full(count, topic_id, np.uint32),
        np.full(count, queue, np.uint8),
        peeked.first_offset + every,
        producer_id,
        first_sequence=np.repeat(np.array(ids[2], np.uint64), id_counts) + within_run.astype(np.uint64),
        address=np.repeat(np.frombuffer(b"".join(origins[2]), "V18"), stored_counts),
        stored_at_ms=np.repeat(np.array(origins[1], np.int64), stored_counts),
        shift=np.zeros(count, np.int64),
        is_moved=producer_id == 0,
    )
    spans = RecordSpans(ends - lengths, ends, every, np.zeros(count, np.int64))
    return PeekedRows(peeked.body, spans, batches, columns)
