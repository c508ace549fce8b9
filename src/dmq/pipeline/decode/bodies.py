"""Bodies as their senders gave them: copied where they are stored so, expanded one by one where not.

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
from dmq.pipeline.decode.arrow import numbers, packed
from dmq.pipeline.decode.units import UnitRows
from dmq.records import layout
from dmq.records.attributes import COMPRESSION
from dmq.records.compression import CODEC_LZ4, decompress
from dmq.records.layout import gather

__all__ = ["bodies", "body_crcs", "raw_sizes"]

log = EventLog(__name__)

Positions: TypeAlias = npt.NDArray[np.int64]

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
    is_compressed = rows.is_compressed()
    starts, ends = rows.stored_bodies()
    if not is_compressed.any():
        return packed(rows.buffer, starts, ends)
    expanded = pa.array(_expanded(rows), pa.binary())
    if is_compressed.all():
        return expanded
    plain = packed(rows.buffer, starts[~is_compressed], ends[~is_compressed])
    index = np.empty(len(rows), np.int64)
    index[~is_compressed] = np.arange(len(plain))
    index[is_compressed] = np.arange(len(plain), len(rows))
    return pa.concat_arrays([plain, expanded]).take(pa.array(index))


def body_crcs(rows: UnitRows) -> pa.Array:
    """CRC-32C of each body, uncompressed."""
    crcs = rows.body_crc()
    is_compressed = rows.is_compressed()
    if not is_compressed.any():
        return numbers(crcs, pa.int64())
    expanded = _expanded(rows)
    valid = np.ones(len(rows), np.bool_)
    valid[is_compressed] = [body is not None for body in expanded]
    crcs[is_compressed] = [0 if body is None else crc32c(body) for body in expanded]
    return numbers(crcs, pa.int64(), valid)
