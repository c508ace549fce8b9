"""Bodies as their senders gave them: copied where they are stored so, expanded where not, one by one or by the block.

What always holds: a body is expanded once, whatever columns are made of it. One that cannot be expanded is null: the
client that sent it spoilt it, and nobody can read it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import lz4.block
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from dmq.errors import RecordCorrupt
from dmq.event_log import EventLog
from dmq.pipeline.decode.arrow import Bits, numbers, packed
from dmq.pipeline.decode.units import UnitRows
from dmq.records import layout
from dmq.records.attributes import COMPRESSION
from dmq.records.block import BLOCK_BYTES_MAX, BodyBlocks, read_pointers
from dmq.records.compression import CODEC_LZ4, decompress
from dmq.records.layout import gather

__all__ = ["bodies", "body_crcs", "raw_sizes"]

log = EventLog(__name__)

Positions: TypeAlias = npt.NDArray[np.int64]

_ARROW_MAX: Final = (1 << 31) - 1  # bytes of one array
_ENTRY_BYTES: Final = 5  # codec u8 · size u32
_LZ4_BYTES_MAX: Final = 64 << 10  # that a record may claim without being looked at: the library allocates as much


def _codecs(rows: UnitRows) -> tuple[Positions, Positions, Positions]:
    """Of those rows that say how they are compressed: their numbers, codecs and full sizes."""
    record, at, end = rows.entries(COMPRESSION)
    is_good = end - at == _ENTRY_BYTES
    is_good &= rows.is_compressed()[record]
    record, at = record[is_good], at[is_good]
    codec = gather(rows.buffer, at, 0, "u1").astype(np.int64)
    return record, codec, gather(rows.buffer, at, 1, ">u4").astype(np.int64)


def raw_sizes(rows: UnitRows) -> Positions:
    """How long each body is once it is expanded, by what its record says."""
    at, end = rows.stored_bodies()
    sizes = end - at
    record, _, size = _codecs(rows)
    sizes[record] = np.minimum(size, layout.RAW_BYTES_MAX)
    in_block = rows.in_block()
    if in_block.any():
        sizes[in_block] = np.minimum(read_pointers(rows.buffer, rows.starts[in_block]).size, BLOCK_BYTES_MAX)
    return sizes


def _expanded(rows: UnitRows) -> list[bytes | None]:
    """The bodies of the compressed rows, in their order."""
    if rows.expanded is None:
        starts, ends = rows.stored_bodies()
        record, codecs, sizes = _codecs(rows)
        compressed = np.flatnonzero(rows.is_compressed())
        columns = [column.tolist() for column in (codecs, sizes, starts[record], ends[record])]
        found = _all_of_lz4(rows.buffer, *columns) or _one_by_one(rows.buffer, *columns)
        if len(record) != len(compressed):  # some do not say how
            known = dict(zip(record.tolist(), found, strict=True))
            found = [known.get(row) for row in compressed.tolist()]
        rows.expanded = found
    return rows.expanded


def _all_of_lz4(
    buffer: memoryview, codecs: list[int], sizes: list[int], starts: list[int], ends: list[int]
) -> list[bytes | None]:
    """The common case, bodies of a few hundred bytes, at half the price; nothing if anything is wrong with one."""
    if set(codecs) != {CODEC_LZ4} or max(sizes) > _LZ4_BYTES_MAX:
        return []
    expand = lz4.block.decompress
    places = zip(starts, ends, sizes, strict=True)
    try:
        found = [expand(buffer[start:end], uncompressed_size=size) for start, end, size in places]
    except (lz4.block.LZ4BlockError, ValueError):
        return []
    return found if [*map(len, found)] == sizes else []


def _one_by_one(
    buffer: memoryview, codecs: list[int], sizes: list[int], starts: list[int], ends: list[int]
) -> list[bytes | None]:
    found: list[bytes | None] = []
    for codec, size, start, end in zip(codecs, sizes, starts, ends, strict=True):
        try:
            found.append(decompress(codec, size, bytes(buffer[start:end]), layout.RAW_BYTES_MAX))
        except RecordCorrupt as error:
            log.warning("a body cannot be expanded", reason=error.message)
            found.append(None)
    return found


def bodies(rows: UnitRows) -> pa.Array:
    """The bodies, uncompressed."""
    is_compressed, in_block = rows.is_compressed(), rows.in_block()
    is_plain = ~(is_compressed | in_block)
    starts, ends = rows.stored_bodies()
    if is_plain.all():
        return packed(rows.buffer, starts, ends)
    if in_block.all():
        return _out_of_blocks(rows, in_block)
    arrays = [packed(rows.buffer, starts[is_plain], ends[is_plain]), _out_of_blocks(rows, in_block)]
    masks = [is_plain, in_block & ~is_compressed]
    if is_compressed.any():
        expanded = pa.array(_expanded(rows), pa.binary())
        if is_compressed.all():
            return expanded
        arrays.append(expanded)
        masks.append(is_compressed)
    index = np.empty(len(rows), np.int64)
    at = 0
    for mask in masks:
        count = int(mask.sum())
        index[mask] = np.arange(at, at + count)
        at += count
    return pa.concat_arrays(arrays).take(pa.array(index))


def _out_of_blocks(rows: UnitRows, in_block: Bits) -> pa.Array:
    """The bodies that stand in blocks, null where one cannot be expanded.

    The blocks are expanded one behind the other, and that is the buffer of the array: bodies that are all wanted are
    not copied once more.
    """
    starts = rows.starts[in_block & ~rows.is_compressed()]
    if not len(starts):
        return pa.array([], pa.binary())
    pointers = read_pointers(rows.buffer, starts)
    blocks = BodyBlocks(rows.buffer)
    places, number = np.unique(pointers.block_at, return_inverse=True)
    expanded: list[bytes] = []
    for place in places.tolist():
        try:
            expanded.append(blocks.expanded(place))
        except RecordCorrupt as error:
            log.warning("a body block cannot be expanded", once_for=__name__, reason=error.message)
            expanded.append(b"")
    sizes = np.array([*map(len, expanded)], np.int64)
    base = (np.cumsum(sizes) - sizes)[number]
    valid = pointers.place + pointers.size <= sizes[number]
    at = np.where(valid, base + pointers.place, base)
    end = np.where(valid, at + pointers.size, base)
    values = b"".join(expanded)
    if valid.all() and len(values) <= _ARROW_MAX:
        if not int(at[0]) and int(end[-1]) == len(values) and not (at[1:] != end[:-1]).any():
            offsets = np.concatenate((at[:1], end)).astype(np.int32)
            return pa.Array.from_buffers(pa.binary(), len(at), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
        return packed(memoryview(values), at, end)
    bodies = [values[a:b] if ok else None for a, b, ok in zip(at.tolist(), end.tolist(), valid.tolist(), strict=True)]
    return pa.array(bodies, pa.binary())


def body_crcs(rows: UnitRows) -> pa.Array:
    """CRC-32C of each body, uncompressed. That of a body in a block stands in its record."""
    crcs = rows.body_crc()
    is_compressed = rows.is_compressed()
    if not is_compressed.any():
        return numbers(crcs, pa.int64())
    expanded = _expanded(rows)
    valid = np.ones(len(rows), np.bool_)
    valid[is_compressed] = [body is not None for body in expanded]
    crcs[is_compressed] = [0 if body is None else crc32c(body) for body in expanded]
    return numbers(crcs, pa.int64(), valid)
