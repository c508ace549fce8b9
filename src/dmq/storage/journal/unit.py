"""Units: what one write appends to the journal.

A unit is valid as a whole or not at all, so the records in it happen together. Everything is big-endian.

    header, 72 bytes
     0  4    magic, b"DMQU"
     4  u32  CRC-32C of everything that follows, to the end of the unit
     8  u16  format version: 2 if a batch has blocks, else 1
    10  u16  flags: 1 = snapshot, 2 = checked: its records were checked when they came,
             4 = cut: some of its batches were left out for a reader, see `dmq.broker.journal.unit_fetch`; in no journal
    12  u32  epoch of the leader that wrote it
    16  u64  journal offset of the unit
    24  u32  length of the unit, header included
    28  u32  records (n)
    32  u32  batches (b)
    36  u32  hashes (h)
    40  u32  due times (d)
    44  u32  zero
    48  u64  store time, ms since 1970; never runs backwards within a journal
    56  u64  flushed_through: journal offset known durable when this unit was written
    64  u64  journal id: the same in all units of a journal, so that a stranger's file is seen
    then  u32 x n   length of each record
          64  x b   batch table (below)
          u32 x h   which record of the unit a hash belongs to
          u64 x h   hashes: of keys, and of the ids of moved records
          u64 x d   due time of each record of the batches marked DUE, in order
          the records of each batch, and behind them its blocks (`dmq.records.block`)

    batch row, 64 bytes: consecutive records with one producer and one destination
     0  u64  producer id (0 = the store itself)     24  u32  topic id (0 = events)
     8  u32  producer epoch                         28  u8   queue
    12  u64  first sequence                         29  u8   row flags: 1 = DUE, 2 = NAMED producer, 4 = MOVED,
    20  u32  records in it                                   8 = EXPIRING: some may have an expiry of their own
                                                    30  u16  zero
                                                    32  u64  queue offset of the first
                                                    40  16   client address, IPv6 or IPv4-mapped
                                                    56  u16  client port
                                                    58  u32  bytes of blocks behind its records
                                                    62  u16  zero

Since lengths, destinations, hashes and due times are columns, a reader never has to walk records to index them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import RecordCorrupt, WrongFormat
from dmq.records.layout import TAG_AT, gather
from dmq.storage.files import Buffer

__all__ = [
    "CHECKED",
    "CUT",
    "DUE",
    "EXPIRING",
    "HEADER_BYTES",
    "MOVED",
    "NAMED",
    "SNAPSHOT",
    "Header",
    "Part",
    "Row",
    "Unit",
    "has_blocks",
    "is_intact",
    "parse_unit",
    "read_header",
    "split_units",
    "whole_units",
]

UNIT_MAGIC: Final = b"DMQU"
UNIT_VERSION: Final = 1
BLOCKS_VERSION: Final = 2  # of units that have blocks
_VERSIONS: Final = (UNIT_VERSION, BLOCKS_VERSION)
SNAPSHOT: Final = 1
CHECKED: Final = 2
CUT: Final = 4

DUE: Final = 1
NAMED: Final = 2
MOVED: Final = 4
EXPIRING: Final = 8

HEADER: Final = struct.Struct(">4sIHHIQIIIIIIQQQ")
HEADER_BYTES: Final = HEADER.size
ROW: Final = struct.Struct(">QIQIIBBHQ16sHI2x")
ROW_BYTES: Final = ROW.size
CRC_FROM: Final = 8
_PLACE: Final = struct.Struct(">4s12xQI")  # the magic, the journal offset and the length, at byte 0
_U16: Final = struct.Struct(">H")

# Below this many records the plain loops beat the set-up of numpy calls (bench/store.py).
FEW: Final = 24
NO_ADDRESS: Final = bytes(16)

Column = npt.NDArray[np.uint64]
# Of all records, as lists or as arrays: journal offsets, lengths, which record a hash belongs to, hashes, due times.
Columns = tuple[
    list[int] | npt.NDArray[np.int64],
    list[int] | npt.NDArray[np.uint32],
    list[int] | npt.NDArray[np.uint32],
    list[int] | Column,
    list[int] | Column,
]


class Header(NamedTuple):
    """The header's fields, in their order."""

    magic: bytes
    crc: int
    version: int
    flags: int
    epoch: int
    start: int
    length: int
    records: int
    batches: int
    hashes: int
    dues: int
    zero: int
    stored_at_ms: int
    flushed_through: int
    journal_id: int


class Row(NamedTuple):
    """One row of the batch table, in the order of its bytes."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    records: int
    topic_id: int
    queue: int
    flags: int
    zero: int
    first_queue_offset: int
    address: bytes
    port: int
    block_bytes: int = 0


class Part(NamedTuple):
    """A batch on its way into a unit: its row, its records with the broker's fields blank and their blocks, its
    columns."""

    row: Row
    data: Buffer
    lengths: Sequence[int] | npt.NDArray[np.uint32]
    received_at_ms: int
    hash_index: Sequence[int] | npt.NDArray[np.uint32] = ()
    hashes: Sequence[int] | Column = ()
    dues: Sequence[int] | Column = ()
    room: memoryview | None = (
        None  # ends with the records, may be overwritten; see `dmq.storage.journal.unit_draft.Batch`
    )


class Unit:
    """A unit in memory. Columns are lists where there are few records and arrays where there are many.

    Attributes:
        events: those that its system records hold, in their order, if it was just made of them; None if they stand in
            its bytes alone.
    """

    __slots__ = (
        "buffer",
        "dues",
        "end",
        "events",
        "hash_index",
        "hashes",
        "header",
        "lengths",
        "offsets",
        "rows",
        "start",
        "tags",
    )

    def __init__(
        self,
        header: Header,
        buffer: Buffer,
        rows: list[Row],
        columns: Columns,
        tags: list[int] | npt.NDArray[np.uint16],
    ) -> None:
        self.header = header
        self.start = header.start
        self.end = header.start + header.length
        self.buffer = buffer
        self.rows = rows
        self.offsets, self.lengths, self.hash_index, self.hashes, self.dues = columns
        self.tags = tags
        self.events: list[Any] | None = None

    def columns_by_row(self) -> tuple[Any, Any, Any]:
        """Offsets, lengths and tags, to be sliced row by row: as lists if that makes small slices."""
        if isinstance(self.offsets, list) or len(self.offsets) >= FEW * len(self.rows):
            return self.offsets, self.lengths, self.tags
        return self.offsets.tolist(), ints(self.lengths), ints(self.tags)

    def record(self, index: int) -> memoryview:
        """The bytes of one record."""
        at = int(self.offsets[index]) - self.header.start
        return memoryview(self.buffer)[at : at + int(self.lengths[index])]


def ints(column: Any) -> Sequence[int]:
    """Plain numbers, to be packed and summed."""
    if type(column) is tuple:  # of a protocol or a table, where they are
        return column
    return column.tolist() if isinstance(column, np.ndarray) else list(map(int, column))


def shift_few(rows: Sequence[Row], offsets: list[int]) -> int:
    """Make room in the offsets of records that follow each other for the blocks of the batches before them.

    Returns how many bytes all blocks take.
    """
    index = shift = 0
    for row in rows:
        last = min(index + row.records, len(offsets))
        if shift:
            offsets[index:last] = [offset + shift for offset in offsets[index:last]]
        index = last
        shift += row.block_bytes
    return shift


def shift_many(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """For each record, how many bytes the blocks of the batches before its own take."""
    sizes = np.array([row.block_bytes for row in rows], np.int64)
    return np.repeat(np.cumsum(sizes) - sizes, [row.records for row in rows])


def _tags(buffer: Buffer, offsets: Any, start: int) -> Any:
    if isinstance(offsets, np.ndarray):
        return gather(buffer, offsets - start, TAG_AT, ">u2").astype(np.uint16)
    unpack = _U16.unpack_from
    return [unpack(buffer, offset - start + TAG_AT)[0] for offset in offsets]


def read_header(buffer: Buffer, at: int = 0) -> Header | None:
    """The header at a place, if what stands there can be one; nothing in it can be relied on before `is_intact`."""
    if len(buffer) - at < HEADER_BYTES:
        return None
    header = Header._make(HEADER.unpack_from(buffer, at))
    if header.magic != UNIT_MAGIC:
        return None
    smallest = HEADER_BYTES + 4 * header.records + ROW_BYTES * header.batches + 12 * header.hashes + 8 * header.dues
    ours = header.version in _VERSIONS
    if header.length < (smallest if ours else HEADER_BYTES) or (ours and header.zero):
        return None
    return header


def whole_units(buffer: Buffer, start: int, units_max: int) -> int:
    """How many bytes of a buffer are whole units that claim to follow each other from a journal offset on.

    Looks at nothing but their starts and lengths, and at no more than so many of them.
    """
    at, size = 0, len(buffer)
    unpack = _PLACE.unpack_from
    for _ in range(units_max):
        if size - at < HEADER_BYTES:
            break
        magic, unit_start, length = unpack(buffer, at)
        if magic != UNIT_MAGIC or unit_start != start + at or not HEADER_BYTES <= length <= size - at:
            break
        at += length
    return at


def split_units(units: memoryview, max_bytes: int) -> list[tuple[memoryview, int]]:
    """Whole units, one behind the other, in pieces of at most so many bytes, or one unit; and where in each the last
    one begins."""
    pieces: list[tuple[memoryview, int]] = []
    first = last = at = 0
    unpack = _PLACE.unpack_from
    while at < len(units):
        length = unpack(units, at)[2]
        if at + length - first > max_bytes and at > first:
            pieces.append((units[first:at], last - first))
            first = at
        last = at
        at += max(HEADER_BYTES, length)
    if at > first:
        pieces.append((units[first:at], last - first))
    return pieces


def has_blocks(units: Buffer) -> bool:
    """Whether any of some whole units, one behind the other, is of the version that has blocks."""
    at, size = 0, len(units)
    while at + HEADER_BYTES <= size:
        if _U16.unpack_from(units, at + CRC_FROM)[0] >= BLOCKS_VERSION:
            return True
        at += max(HEADER_BYTES, _PLACE.unpack_from(units, at)[2])
    return False


def is_intact(header: Header, buffer: Buffer, at: int = 0) -> bool:
    """Whether the bytes of the unit match its checksum.

    Raises:
        WrongFormat: they do, and it is a unit of another version. A flipped bit does not look like that.
    """
    end = at + header.length
    if end > len(buffer) or crc32c(memoryview(buffer)[at + CRC_FROM : end]) != header.crc:
        return False
    if header.version not in _VERSIONS:
        raise WrongFormat(
            f"the journal has units of format version {header.version}, this DMQ reads versions up to "
            f"{BLOCKS_VERSION}: use the DMQ that wrote it",
            version=header.version,
        )
    return True


def parse_unit(header: Header, buffer: Buffer) -> Unit:
    """The unit whose bytes, already checked by `is_intact`, are exactly `buffer`.

    Raises:
        RecordCorrupt: its tables contradict each other, which no disk does by itself.
    """
    n, b, h, d = header.records, header.batches, header.hashes, header.dues
    at = HEADER_BYTES + 4 * n
    rows = [Row._make(fields) for fields in ROW.iter_unpack(memoryview(buffer)[at : at + ROW_BYTES * b])]
    at += ROW_BYTES * b
    tables = at + 12 * h + 8 * d
    lengths: Any
    offsets: Any
    if n < FEW:
        lengths = list(struct.unpack_from(f">{n}I", buffer, HEADER_BYTES))
        offsets = []
        offset = header.start + tables
        for length in lengths:
            offsets.append(offset)
            offset += length
        if header.version == BLOCKS_VERSION:
            offset += shift_few(rows, offsets)
        end = offset
        hash_index: Any = list(struct.unpack_from(f">{h}I", buffer, at))
        hashes: Any = list(struct.unpack_from(f">{h}Q", buffer, at + 4 * h))
        dues: Any = list(struct.unpack_from(f">{d}Q", buffer, at + 12 * h))
    else:
        lengths = np.frombuffer(buffer, ">u4", n, HEADER_BYTES).astype(np.uint32)
        ends = np.cumsum(lengths, dtype=np.int64) + (header.start + tables)
        offsets = ends - lengths
        end = int(ends[-1])
        if header.version == BLOCKS_VERSION:
            shifts = shift_many(rows)
            if len(shifts) == n:
                offsets += shifts
            end += sum(row.block_bytes for row in rows)
        hash_index = np.frombuffer(buffer, ">u4", h, at).astype(np.uint32)
        hashes = np.frombuffer(buffer, ">u8", h, at + 4 * h).astype(np.uint64)
        dues = np.frombuffer(buffer, ">u8", d, at + 12 * h).astype(np.uint64)
    if end != header.start + header.length or sum(row.records for row in rows) != n:
        raise RecordCorrupt(f"the unit at journal offset {header.start} contradicts itself", offset=header.start)
    return Unit(
        header, buffer, rows, (offsets, lengths, hash_index, hashes, dues), tags=_tags(buffer, offsets, header.start)
    )
