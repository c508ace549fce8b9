"""A checksum over rows that does not depend on how they are divided. Pure.

What always holds: the same rows in the same order give the same digest, in however many pieces they come; a row more,
less, other or elsewhere gives another one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

__all__ = ["Digest"]


class Digest:
    """Over all rows so far: a CRC for each part of each column, since such a one just goes on with more bytes."""

    def __init__(self) -> None:
        self._crcs: dict[str, int] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Go on with more rows, of the same columns."""
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            for part, raw in _parts(column):
                key = f"{name} {part}"
                self._crcs[key] = crc32c(raw, self._crcs.get(key, 0))

    @property
    def value(self) -> int:
        """64 bits for all of it."""
        text = b"".join(key.encode() + struct.pack(">I", crc) for key, crc in sorted(self._crcs.items()))
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _parts(column: pa.Array) -> Iterator[tuple[str, Any]]:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
        sizes = np.diff(bounds)
        if column.null_count:
            sizes[column.is_null().to_numpy(zero_copy_only=False)] = -1
        yield "sizes", sizes.data
        if data is not None:
            yield "data", memoryview(data)[bounds[0] : bounds[-1]]
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        yield "data", np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).data
    else:  # headers, which are few where they are
        yield "text", "".join(map(repr, column.to_pylist())).encode(errors="surrogatepass")
