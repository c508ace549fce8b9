"""The unit builder: from parts to the bytes that one write appends; `unit` draws them.

What always holds: one record, few and many are built by three pieces of code that give the same bytes; every byte of a
record is touched once on its way, and not even copied where its batch came with room before it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.compiled import find
from dmq.records.layout import ADDRESSES_DTYPE, Stamp, StampColumns, stamp_columns, stamp_few
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import (
    BLOCKS_VERSION,
    CRC_FROM,
    FEW,
    HEADER,
    HEADER_BYTES,
    NO_ADDRESS,
    ROW,
    ROW_BYTES,
    UNIT_MAGIC,
    UNIT_VERSION,
    Columns,
    Header,
    Part,
    Row,
    Unit,
    ints,
    shift_few,
    shift_many,
)

__all__ = ["UnitBuilder", "sender_of"]

_CRC_AT: Final = 4
_U32: Final = struct.Struct(">I")
_U16: Final = struct.Struct(">H")
_V4_PREFIX: Final = bytes(10) + b"\xff\xff"
_BLANK: Final = bytes(6)
_new: Final = tuple.__new__  # a call of a tuple's class costs twice as much


# Header, the one length, the one row.
_LONE: Final = struct.Struct(HEADER.format + "I" + ROW.format[1:])
_KEYED: Final = struct.Struct(">IQ")


class UnitBuilder:
    """Builds the units of one journal.

    Parameters:
        server: this broker's IPv4 address and port, six bytes.
        epoch: the leader's epoch.
    """

    def __init__(self, journal_id: int, server: bytes, epoch: int) -> None:
        self._journal_id = journal_id
        self.server = server
        self.epoch = epoch

    def build(
        self, parts: Sequence[Part], *, start: int, stored_at_ms: int, flushed_through: int, flags: int = 0
    ) -> Unit:
        """Lay the parts out as one unit, stamp its records, and checksum it.

        Parameters:
            parts: what goes in; `row.first_queue_offset` already assigned.
            start: the journal offset of the unit.
            stored_at_ms: the store time.
            flushed_through: the journal offset below which everything is known to be durable by now.
            flags: of the unit, CHECKED and SNAPSHOT.
        """
        # A moved record has two hashes, of its id and its key.
        if len(parts) == 1 and parts[0].row.records == 1 and not len(parts[0].dues) and len(parts[0].hashes) < 2:
            return self._build_lone(parts[0], start, stored_at_ms, flushed_through, flags=flags)
        if len(parts) == 1 and parts[0].room is not None and parts[0].row.records >= FEW:
            unit = self._build_in_place(parts[0], start, stored_at_ms, flushed_through, flags=flags)
            if unit is not None:
                return unit
        records = hashes = dues = 0
        rows: list[Row] = []
        packed: list[bytes] = []
        datas: list[Buffer] = []
        length = HEADER_BYTES
        for row, data, _, _, _, part_hashes, part_dues, _ in parts:
            rows.append(row)
            packed.append(ROW.pack(*row))
            datas.append(data)
            records += row[3]
            length += len(data)
            hashes += len(part_hashes)
            dues += len(part_dues)
        tables = HEADER_BYTES + 4 * records + ROW_BYTES * len(rows) + 12 * hashes + 8 * dues
        length += tables - HEADER_BYTES
        version = BLOCKS_VERSION if any(row[11] for row in rows) else UNIT_VERSION
        head = HEADER.pack(
            UNIT_MAGIC, 0, version, flags, self.epoch, start, length, records, len(rows), hashes, dues, 0,
            stored_at_ms, flushed_through, self._journal_id,
        )  # fmt: skip
        tags: Any
        buffer: bytearray | memoryview
        if records < FEW:
            columns, lengths, others = _columns_few(parts, start + tables, hashes, dues)
            if version == BLOCKS_VERSION and isinstance(columns[0], list):
                shift_few(rows, columns[0])
            # Joined and not filled in: every byte is touched once.
            buffer = bytearray().join((head, lengths, *packed, others, *datas))
            tags = _stamp(buffer, parts, columns[0], start, origin=(self.server, stored_at_ms))
        else:
            columns, more = _columns_many(parts, start + tables, hashes, dues)
            if version == BLOCKS_VERSION and len(parts) > 1:
                columns = (columns[0] + shift_many(rows), *columns[1:])
            buffer = bytearray().join((head, more[0], *packed, *more[1:], *datas))
            tags = _stamp(buffer, parts, columns[0], start, origin=(self.server, stored_at_ms))
        crc = crc32c(memoryview(buffer)[CRC_FROM:])
        _U32.pack_into(buffer, _CRC_AT, crc)
        header = _new(Header, (
            UNIT_MAGIC, crc, version, flags, self.epoch, start, length, records, len(rows), hashes, dues, 0,
            stored_at_ms, flushed_through, self._journal_id,
        ))  # fmt: skip
        return Unit(header, buffer, rows, columns, tags=tags)

    def _build_in_place(
        self, part: Part, start: int, stored_at_ms: int, flushed_through: int, *, flags: int
    ) -> Unit | None:
        """`build` for a batch where it was received: records, hashes and dues stay where they are, and no byte of them
        is copied on its way to the disk. None if the room does not suffice."""
        row, data, lengths, received_at_ms, hash_index, hashes, dues, room = part
        assert room is not None
        records = row[3]
        row_at = HEADER_BYTES + 4 * records
        tables = row_at + ROW_BYTES + 12 * len(hashes) + 8 * len(dues)
        length = tables + len(data)
        if length > len(room):
            return None
        unit = room[len(room) - length :]
        version = BLOCKS_VERSION if row[11] else UNIT_VERSION
        fields = (
            version, flags, self.epoch, start, length, records, 1, len(hashes), len(dues), 0,
            stored_at_ms, flushed_through, self._journal_id,
        )  # fmt: skip
        HEADER.pack_into(unit, 0, UNIT_MAGIC, 0, *fields)
        ROW.pack_into(unit, row_at, *row)
        # The lengths are not taken from where the request had them: after a write that failed, this is done once more.
        if _stamp_run is None:
            sizes = np.asarray(lengths, np.uint32)
            unit[HEADER_BYTES:row_at] = sizes.astype(">u4").tobytes()
            offsets = np.cumsum(sizes, dtype=np.int64) - sizes + (start + tables)
            tags = stamp_parts_many(unit, (part,), offsets, start, origin=(self.server, stored_at_ms))
        else:
            client, ipv6 = sender_of(row[9], row[10])
            stamp = _new(Stamp, (row[5], row[8], client, self.server, received_at_ms, stored_at_ms, ipv6))
            made = _stamp_run(unit, tables, lengths, start + tables, stamp=stamp, table_at=HEADER_BYTES)
            tags, offsets = np.frombuffer(made[0], np.uint16), np.frombuffer(made[1], np.int64)
        crc = crc32c(unit[CRC_FROM:])
        _U32.pack_into(unit, _CRC_AT, crc)
        columns = (
            offsets, np.asarray(lengths, np.uint32), np.asarray(hash_index, np.uint32), np.asarray(hashes, np.uint64),
            np.asarray(dues, np.uint64),
        )  # fmt: skip
        return Unit(_new(Header, (UNIT_MAGIC, crc, *fields)), unit, [row], columns, tags=tags)

    def _build_lone(self, part: Part, start: int, stored_at_ms: int, flushed_through: int, *, flags: int) -> Unit:
        """`build` for one record: a producer that sends one at a time waits for it."""
        row, data, _, received_at_ms, _, hashes, _, _ = part
        values = list(ints(hashes))
        size = len(data)
        at = _LONE.size + 12 * len(values)
        length = at + size
        head = _LONE.pack(
            UNIT_MAGIC, 0, UNIT_VERSION, flags, self.epoch, start, length, 1, 1, len(values), 0, 0,
            stored_at_ms, flushed_through, self._journal_id, size, *row,
        )  # fmt: skip
        if not values:
            buffer = bytearray().join((head, data))
        elif len(values) == 1:
            buffer = bytearray().join((head, _KEYED.pack(0, values[0]), data))
        else:  # a moved record has its id's beside its key's
            buffer = bytearray().join((head, bytes(4 * len(values)), struct.pack(f">{len(values)}Q", *values), data))
        client, ipv6 = sender_of(row[9], row[10])
        offsets = [start + at]
        stamp = _new(Stamp, (row[5], row[8], client, self.server, received_at_ms, stored_at_ms, ipv6))
        if _stamp_run is None:
            tags = stamp_few(buffer, (at,), offsets, stamp)
        else:
            tags = [int.from_bytes(_stamp_run(buffer, at, (size,), offsets[0], stamp=stamp)[0], sys.byteorder)]
        crc = crc32c(memoryview(buffer)[CRC_FROM:])
        _U32.pack_into(buffer, _CRC_AT, crc)
        header = _new(Header, (
            UNIT_MAGIC, crc, UNIT_VERSION, flags, self.epoch, start, length, 1, 1, len(values), 0, 0,
            stored_at_ms, flushed_through, self._journal_id,
        ))  # fmt: skip
        return Unit(header, buffer, [row], (offsets, [size], [0] * len(values), values, []), tags=tags)


def _columns_few(parts: Sequence[Part], offset: int, hashes: int, dues: int) -> tuple[Columns, bytes, bytes]:
    """The columns as lists, and the bytes of the lengths and of the others; `offset` is the first record's."""
    lengths: list[int] = []
    offsets: list[int] = []
    for part in parts:
        for length in ints(part.lengths):
            lengths.append(length)
            offsets.append(offset)
            offset += length
    packed = _U32S[len(lengths)].pack(*lengths)
    if not (hashes or dues):
        return (offsets, lengths, [], [], []), packed, b""
    hash_index: list[int] = []
    values: list[int] = []
    due_values: list[int] = []
    base = 0
    for part in parts:
        if len(part.hashes):
            hash_index += [base + index for index in ints(part.hash_index)]
            values += ints(part.hashes)
        if len(part.dues):
            due_values += ints(part.dues)
        base += part.row.records
    others = struct.pack(f">{hashes}I{hashes}Q{dues}Q", *hash_index, *values, *due_values)
    return (offsets, lengths, hash_index, values, due_values), packed, others


_U32S: Final = tuple(struct.Struct(f">{count}I") for count in range(FEW))


def _columns_many(parts: Sequence[Part], offset: int, hashes: int, dues: int) -> tuple[Columns, list[Any]]:
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
    if not any(isinstance(column, np.ndarray) for column in columns):  # many small batches: one array for all
        return np.array([*chain.from_iterable(columns)], dtype)
    return np.concatenate([np.asarray(column, dtype) for column in columns])


@lru_cache(4096)
def sender_of(address: bytes, port: int) -> tuple[bytes, bool]:
    """The sender's address as records carry it, and whether it is one of IPv6, which does not fit."""
    if address == NO_ADDRESS:
        return _BLANK, False
    if address.startswith(_V4_PREFIX):
        return address[12:] + _U16.pack(port), False
    return _BLANK, True


_stamp_run: Final = find("stamp_run")


def _stamp(
    buffer: bytearray | memoryview, parts: Sequence[Part], offsets: Any, start: int, origin: tuple[bytes, int]
) -> list[int] | npt.NDArray[np.uint16]:
    """Stamp all records; returns their tag hashes, as a list if `offsets` is one.

    Parameters:
        offsets: where each record will stand in the journal.
        start: where the unit will.
        origin: this broker's address and the store time.
    """
    is_few = isinstance(offsets, list)
    if _stamp_run is None:
        stamp = stamp_parts_few if is_few else stamp_parts_many
        return stamp(buffer, parts, offsets, start, origin=origin)
    tags = stamp_parts(_stamp_run, buffer, parts, offsets, start=start, origin=origin)
    return tags.tolist() if is_few else tags


def stamp_parts(
    loop: Callable[..., tuple[bytearray, bytearray]],
    buffer: bytearray | memoryview,
    parts: Sequence[Part],
    offsets: Any,
    start: int,
    origin: tuple[bytes, int],
) -> npt.NDArray[np.uint16]:
    """`_stamp` by the compiled loop."""
    server, stored_at_ms = origin
    tags = bytearray()
    at = 0
    for part in parts:
        row = part.row
        if not row[3]:
            continue
        client, ipv6 = sender_of(row[9], row[10])
        offset = int(offsets[at])
        stamp = _new(Stamp, (row[5], row[8], client, server, part.received_at_ms, stored_at_ms, ipv6))
        tags += loop(buffer, offset - start, part.lengths, offset, stamp=stamp)[0]
        at += row[3]
    return np.frombuffer(tags, np.uint16)


def stamp_parts_few(
    buffer: bytearray | memoryview, parts: Sequence[Part], offsets: Any, start: int, origin: tuple[bytes, int]
) -> list[int]:
    """`_stamp` record by record."""
    server, stored_at_ms = origin
    positions = [offset - start for offset in offsets]
    tags: list[int] = []
    at = 0
    for part in parts:
        row = part.row
        client, ipv6 = sender_of(row.address, row.port)
        end = at + row.records
        stamp = _new(Stamp, (row[5], row[8], client, server, part.received_at_ms, stored_at_ms, ipv6))
        tags += stamp_few(buffer, positions[at:end], offsets[at:end], stamp)
        at = end
    return tags


def stamp_parts_many(
    buffer: bytearray | memoryview,
    parts: Sequence[Part],
    offsets: Any,
    start: int,
    origin: tuple[bytes, int],
) -> npt.NDArray[np.uint16]:
    """`_stamp` for all records of all parts at once."""
    server, stored_at_ms = origin
    positions = offsets - start
    received = parts[0].received_at_ms
    if len(parts) == 1:
        row = parts[0].row
        client, ipv6 = sender_of(row.address, row.port)
        numbers = np.arange(row.first_queue_offset, row.first_queue_offset + row.records)
        addresses = np.frombuffer(client + server, ADDRESSES_DTYPE)
        lone = StampColumns(
            row.queue, numbers, addresses, received_at_ms=received, stored_at_ms=stored_at_ms, ipv6=ipv6
        )
        return stamp_columns(buffer, positions, offsets, lone)
    rows = [part.row for part in parts]
    clients = [sender_of(row.address, row.port) for row in rows]
    addresses = np.frombuffer(b"".join([client + server for client, _ in clients]), ADDRESSES_DTYPE)
    counts = np.array([row.records for row in rows])
    ends = np.cumsum(counts)
    # A record's queue offset less its index in the unit is the same for all records of a batch.
    bases = np.array([row.first_queue_offset for row in rows]) - (ends - counts)
    same = len({part.received_at_ms for part in parts}) == 1
    columns = StampColumns(
        np.repeat(np.array([row.queue for row in rows], np.uint8), counts),
        np.repeat(bases, counts) + np.arange(len(offsets)),
        np.repeat(addresses, counts),
        received_at_ms=received
        if same
        else np.repeat(np.array([part.received_at_ms for part in parts], np.uint64), counts),
        stored_at_ms=stored_at_ms,
        ipv6=np.repeat([ipv6 for _, ipv6 in clients], counts) if any(ipv6 for _, ipv6 in clients) else False,
    )
    return stamp_columns(buffer, positions, offsets, columns)
