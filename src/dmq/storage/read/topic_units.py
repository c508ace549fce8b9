"""Units without what does not concern some topics, for a reader of one topic of many. Pure.

A unit of which more than half the bytes concern them stays as it is. Of another a cut remains: a unit with the same
header but for its checksum, sizes and the flag `CUT`, and behind it lengths, batch table and records of the batches
that are wanted; hashes and due times are left out. Where the records stood in the journal, they say themselves.

What always holds: nothing is left out before the unit that it stands in was checked, so that a turned bit in a batch
table hides no message. A unit that fails its checksum stays as it is: its reader notices.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final

import numpy as np
from crc32c import crc32c

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

__all__ = ["units_of"]

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
