"""Units: what one write appends to the journal.

A unit is valid as a whole or not at all, so the records in it happen together. Everything is big-endian.

    header, 72 bytes
     0  4    magic, b"DMQU"
     4  u32  CRC-32C of everything that follows, to the end of the unit
     8  u16  format version
    10  u16  flags: 1 = snapshot
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
          the records

    batch row, 64 bytes: consecutive records with one producer and one destination
     0  u64  producer id (0 = the store itself)     24  u32  topic id (0 = events)
     8  u32  producer epoch                         28  u8   queue
    12  u64  first sequence                         29  u8   row flags: 1 = DUE, 2 = NAMED producer, 4 = MOVED
    20  u32  records in it                          30  u16  zero
                                                    32  u64  queue offset of the first
                                                    40  16   client address, IPv6 or IPv4-mapped
                                                    56  u16  client port      58  6  zero

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
from dmq.records.layout import ADDRESSES_DTYPE, TAG_AT, gather, stamp_columns, stamp_few
from dmq.storage.files import Buffer

__all__ = ["DUE", "HEADER_BYTES", "MOVED", "NAMED", "SNAPSHOT", "Header", "Part", "Row", "Unit", "build", "parse"]

MAGIC: Final = b"DMQU"
VERSION: Final = 1
SNAPSHOT: Final = 1

DUE: Final = 1
NAMED: Final = 2
MOVED: Final = 4

HEADER: Final = struct.Struct(">4sIHHIQIIIIIIQQQ")
HEADER_BYTES: Final = HEADER.size
ROW: Final = struct.Struct(">QIQIIBBHQ16sH6x")
ROW_BYTES: Final = ROW.size
_CRC_AT: Final = 4
_CRC_FROM: Final = 8
_U32: Final = struct.Struct(">I")
_U16: Final = struct.Struct(">H")

# Below this many records the plain loops beat the set-up of numpy calls (bench/store.py).
FEW: Final = 24
NO_ADDRESS: Final = bytes(16)
_V4_PREFIX: Final = bytes(10) + b"\xff\xff"
_BLANK: Final = bytes(6)

Column = npt.NDArray[np.uint64]


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


class Part(NamedTuple):
    """A batch on its way into a unit: its row, its records with the broker's fields blank, its columns."""

    row: Row
    data: Buffer
    lengths: Sequence[int] | npt.NDArray[np.uint32]
    received_at_ms: int
    hash_index: Sequence[int] | npt.NDArray[np.uint32] = ()
    hashes: Sequence[int] | Column = ()
    dues: Sequence[int] | Column = ()


class Unit:
    """A unit in memory. Columns are lists where there are few records and arrays where there are many."""

    __slots__ = ("buffer", "dues", "hash_index", "hashes", "header", "lengths", "offsets", "rows", "tags")

    def __init__(
        self,
        header: Header,
        buffer: Buffer,
        rows: list[Row],
        offsets: list[int] | npt.NDArray[np.int64],
        lengths: list[int] | npt.NDArray[np.uint32],
        hash_index: list[int] | npt.NDArray[np.uint32],
        hashes: list[int] | Column,
        dues: list[int] | Column,
        tags: list[int] | npt.NDArray[np.uint16],
    ) -> None:
        self.header = header
        self.buffer = buffer
        self.rows = rows
        self.offsets = offsets
        self.lengths = lengths
        self.hash_index = hash_index
        self.hashes = hashes
        self.dues = dues
        self.tags = tags

    @property
    def start(self) -> int:
        return self.header.start

    @property
    def end(self) -> int:
        return self.header.start + self.header.length

    def columns_by_row(self) -> tuple[Any, Any, Any]:
        """Offsets, lengths and tags, to be sliced row by row: as lists if that makes small slices."""
        if isinstance(self.offsets, list) or len(self.offsets) >= FEW * len(self.rows):
            return self.offsets, self.lengths, self.tags
        return self.offsets.tolist(), _ints(self.lengths), _ints(self.tags)

    def record(self, index: int) -> memoryview:
        """The bytes of one record."""
        at = int(self.offsets[index]) - self.header.start
        return memoryview(self.buffer)[at : at + int(self.lengths[index])]


def build(
    parts: Sequence[Part],
    *,
    start: int,
    epoch: int,
    journal_id: int,
    stored_at_ms: int,
    flushed_through: int,
    server: bytes,
    flags: int = 0,
) -> Unit:
    """Lay the parts out as one unit for journal offset `start`, stamp its records, and checksum it.

    Parameters:
        parts: what goes in; `row.first_queue_offset` already assigned.
        start: where the unit will stand.
        epoch: the leader's epoch.
        journal_id: the journal's.
        stored_at_ms: the store time.
        flushed_through: what is known durable by now.
        server: this broker's IPv4 address and port, six bytes.
        flags: SNAPSHOT or nothing.
    """
    records = hashes = dues = 0
    rows: list[Row] = []
    packed: list[bytes] = []
    datas: list[Buffer] = []
    length = HEADER_BYTES
    for part in parts:
        row = part.row
        rows.append(row)
        packed.append(ROW.pack(*row))
        datas.append(part.data)
        records += row.records
        hashes += len(part.hashes)
        dues += len(part.dues)
        length += len(part.data)
    tables = HEADER_BYTES + 4 * records + ROW_BYTES * len(rows) + 12 * hashes + 8 * dues
    length += tables - HEADER_BYTES
    head = HEADER.pack(
        MAGIC, 0, VERSION, flags, epoch, start, length, records, len(rows), hashes, dues, 0,
        stored_at_ms, flushed_through, journal_id,
    )  # fmt: skip
    tags: Any
    if records < FEW:
        columns, lengths, others = _columns_few(parts, start + tables)
        # Joined and not filled in: every byte is touched once.
        buffer = bytearray().join((head, lengths, *packed, others, *datas))
        tags = _stamp_few(buffer, parts, columns[0], start, server, stored_at_ms)
    else:
        columns, more = _columns_many(parts, start + tables, hashes, dues)
        buffer = bytearray().join((head, more[0], *packed, *more[1:], *datas))
        tags = _stamp_many(buffer, parts, columns[0], start, server, stored_at_ms)
    crc = crc32c(memoryview(buffer)[_CRC_FROM:])
    _U32.pack_into(buffer, _CRC_AT, crc)
    header = Header(
        MAGIC, crc, VERSION, flags, epoch, start, length, records, len(rows), hashes, dues, 0,
        stored_at_ms, flushed_through, journal_id,
    )  # fmt: skip
    return Unit(header, buffer, rows, *columns, tags)


# Offsets, lengths, which record a hash belongs to, hashes, due times.
_Columns = tuple[Any, Any, Any, Any, Any]


def _columns_few(parts: Sequence[Part], offset: int) -> tuple[_Columns, bytes, bytes]:
    """The columns as lists, and the bytes of the lengths and of the others; `offset` is the first record's."""
    lengths: list[int] = []
    hash_index: list[int] = []
    hashes: list[int] = []
    dues: list[int] = []
    for part in parts:
        base = len(lengths)
        lengths += _ints(part.lengths)
        if len(part.hashes):
            mine = _ints(part.hash_index)
            hash_index += [base + index for index in mine] if base else mine
            hashes += _ints(part.hashes)
        if len(part.dues):
            dues += _ints(part.dues)
    offsets = []
    for length in lengths:
        offsets.append(offset)
        offset += length
    others = b""
    if hashes or dues:
        count = len(hashes)
        others = struct.pack(f">{count}I{count}Q{len(dues)}Q", *hash_index, *hashes, *dues)
    return (offsets, lengths, hash_index, hashes, dues), struct.pack(f">{len(lengths)}I", *lengths), others


def _columns_many(parts: Sequence[Part], offset: int, hashes: int, dues: int) -> tuple[_Columns, list[Any]]:
    """The columns as arrays, and those of the tables as they stand in the unit, the lengths first."""
    lengths = _joined([part.lengths for part in parts], np.uint32)
    offsets = np.cumsum(lengths, dtype=np.int64)
    offsets -= lengths
    offsets += offset
    hash_index, values, due_values = _NO_INDEX, _NO_VALUES, _NO_VALUES
    packed = [lengths.astype(">u4")]
    if hashes:
        hash_index = _joined([part.hash_index for part in parts], np.uint32)
        if len(parts) > 1:
            counts = [part.row.records for part in parts]
            bases = np.cumsum(counts, dtype=np.uint32) - np.array(counts, np.uint32)
            hash_index = hash_index + np.repeat(bases, [len(part.hashes) for part in parts])
        values = _joined([part.hashes for part in parts], np.uint64)
        packed += (hash_index.astype(">u4"), values.astype(">u8"))
    if dues:
        due_values = _joined([part.dues for part in parts if len(part.dues)], np.uint64)
        packed.append(due_values.astype(">u8"))
    return (offsets, lengths, hash_index, values, due_values), packed


_NO_INDEX: Final = np.empty(0, np.uint32)
_NO_VALUES: Final = np.empty(0, np.uint64)


def _joined(columns: Sequence[Any], dtype: Any) -> npt.NDArray[Any]:
    if len(columns) == 1:
        return np.asarray(columns[0], dtype)
    return np.concatenate([np.asarray(column, dtype) for column in columns])


def _ints(column: Any) -> list[int]:
    return column.tolist() if isinstance(column, np.ndarray) else list(map(int, column))


def _client(row: Row) -> tuple[bytes, bool]:
    """The sender's address as records carry it, and whether it is one of IPv6, which does not fit."""
    if row.address == NO_ADDRESS:
        return _BLANK, False
    if row.address.startswith(_V4_PREFIX):
        return row.address[12:] + _U16.pack(row.port), False
    return _BLANK, True


def _stamp_few(
    buffer: bytearray, parts: Sequence[Part], offsets: list[int], start: int, server: bytes, stored_at_ms: int
) -> list[int]:
    """Stamp all records; returns their tag hashes."""
    at = 0
    positions = [offset - start for offset in offsets]
    for part in parts:
        row = part.row
        client, ipv6 = _client(row)
        end = at + row.records
        stamp_few(
            buffer, positions[at:end], offsets[at:end], row.queue, row.first_queue_offset,
            client, server, part.received_at_ms, stored_at_ms, ipv6=ipv6,
        )  # fmt: skip
        at = end
    unpack = _U16.unpack_from
    return [unpack(buffer, position + TAG_AT)[0] for position in positions]


def _stamp_many(
    buffer: bytearray,
    parts: Sequence[Part],
    offsets: npt.NDArray[np.int64],
    start: int,
    server: bytes,
    stored_at_ms: int,
) -> npt.NDArray[np.uint16]:
    """Stamp all records of all parts at once; returns their tag hashes."""
    positions = offsets - start
    received = parts[0].received_at_ms
    if len(parts) == 1:
        row = parts[0].row
        client, ipv6 = _client(row)
        numbers = np.arange(row.first_queue_offset, row.first_queue_offset + row.records)
        addresses = np.frombuffer(client + server, ADDRESSES_DTYPE)
        return stamp_columns(
            buffer, positions, offsets, row.queue, numbers, addresses, received, stored_at_ms, ipv6=ipv6
        )
    rows = [part.row for part in parts]
    clients = [_client(row) for row in rows]
    addresses = np.frombuffer(b"".join([client + server for client, _ in clients]), ADDRESSES_DTYPE)
    counts = np.array([row.records for row in rows])
    ends = np.cumsum(counts)
    # A record's queue offset less its index in the unit is the same for all records of a batch.
    bases = np.array([row.first_queue_offset for row in rows]) - (ends - counts)
    same = len({part.received_at_ms for part in parts}) == 1
    return stamp_columns(
        buffer,
        positions,
        offsets,
        np.repeat(np.array([row.queue for row in rows], np.uint8), counts),
        np.repeat(bases, counts) + np.arange(len(offsets)),
        np.repeat(addresses, counts),
        received if same else np.repeat(np.array([part.received_at_ms for part in parts], np.uint64), counts),
        stored_at_ms,
        ipv6=np.repeat([ipv6 for _, ipv6 in clients], counts) if any(ipv6 for _, ipv6 in clients) else False,
    )


def _tags(buffer: Buffer, offsets: Any, start: int) -> Any:
    if isinstance(offsets, np.ndarray):
        return gather(buffer, offsets - start, TAG_AT, ">u2").astype(np.uint16)
    unpack = _U16.unpack_from
    return [unpack(buffer, offset - start + TAG_AT)[0] for offset in offsets]


def read_header(buffer: Buffer, at: int = 0) -> Header | None:
    """The header at a place, if what stands there can be one; nothing in it can be relied on before `intact`."""
    if len(buffer) - at < HEADER_BYTES:
        return None
    header = Header._make(HEADER.unpack_from(buffer, at))
    if header.magic != MAGIC:
        return None
    smallest = HEADER_BYTES + 4 * header.records + ROW_BYTES * header.batches + 12 * header.hashes + 8 * header.dues
    ours = header.version == VERSION
    if header.length < (smallest if ours else HEADER_BYTES) or (ours and header.zero):
        return None
    return header


def intact(header: Header, buffer: Buffer, at: int = 0) -> bool:
    """Whether the bytes of the unit match its checksum.

    Raises:
        WrongFormat: they do, and it is a unit of another version. A flipped bit does not look like that.
    """
    end = at + header.length
    if end > len(buffer) or crc32c(memoryview(buffer)[at + _CRC_FROM : end]) != header.crc:
        return False
    if header.version != VERSION:
        raise WrongFormat(
            f"the journal has units of format version {header.version}, this DMQ reads version {VERSION}: "
            "use the DMQ that wrote it",
            version=header.version,
        )
    return True


def parse(header: Header, buffer: Buffer) -> Unit:
    """The unit whose bytes, already checked by `intact`, are exactly `buffer`.

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
        end = offset
        hash_index: Any = list(struct.unpack_from(f">{h}I", buffer, at))
        hashes: Any = list(struct.unpack_from(f">{h}Q", buffer, at + 4 * h))
        dues: Any = list(struct.unpack_from(f">{d}Q", buffer, at + 12 * h))
    else:
        lengths = np.frombuffer(buffer, ">u4", n, HEADER_BYTES).astype(np.uint32)
        ends = np.cumsum(lengths, dtype=np.int64) + (header.start + tables)
        offsets = ends - lengths
        end = int(ends[-1])
        hash_index = np.frombuffer(buffer, ">u4", h, at).astype(np.uint32)
        hashes = np.frombuffer(buffer, ">u8", h, at + 4 * h).astype(np.uint64)
        dues = np.frombuffer(buffer, ">u8", d, at + 12 * h).astype(np.uint64)
    if end != header.start + header.length or sum(row.records for row in rows) != n:
        raise RecordCorrupt(f"the unit at journal offset {header.start} contradicts itself", offset=header.start)
    return Unit(header, buffer, rows, offsets, lengths, hash_index, hashes, dues, _tags(buffer, offsets, header.start))
