"""Arrow arrays out of bytes that stand scattered in a buffer, and other columns, without a loop over values.

What always holds: arrays own their bytes, so the buffer may go. Positions rise from value to value. Types are the plain
ones that Spark takes: 32-bit offsets, microseconds in UTC.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dmq.pipeline.decode.units import Found
from dmq.records.layout import gather

__all__ = ["TIME", "chosen_texts", "id_texts", "numbers", "packed", "spread", "texts", "times"]

Positions: TypeAlias = npt.NDArray[np.int64]
Bits: TypeAlias = npt.NDArray[np.bool_]

TIME: Final = pa.timestamp("us", tz="UTC")

_ID_CHARACTERS: Final = 26
_ALPHABET: Final = np.frombuffer(b"0123456789abcdefghijklmnopqrstuv", np.uint8).astype(np.uint16)
# Two characters of an id for each ten bits.
_PAIRS: Final = (np.repeat(_ALPHABET, 32) | np.tile(_ALPHABET, 32) << 8).astype("<u2")
_TEN: Final = np.uint64(1023)


def packed(buffer: memoryview, at: Positions, end: Positions, valid: Bits | None = None) -> pa.Array:
    """The bytes at some places of a buffer, as a binary array.

    Parameters:
        at, end: where each value begins and ends, rising; an empty one stands anywhere between its neighbours.
        valid: which are not null.
    """
    count = len(at)
    if not count:
        return pa.array([], pa.binary())
    if valid is not None and not valid.any():
        return pa.nulls(count, pa.binary())
    sizes = end - at
    size = int(sizes[0])
    if valid is None and size and (sizes == size).all():
        data = gather(buffer, at, 0, f"V{size}")
        offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    # Values and what lies between them are one array already; every second element of it is what we want.
    bounds = np.empty(2 * count, dtype=np.int32)
    bounds[0::2] = at
    bounds[1::2] = end
    pieces = [None, pa.py_buffer(bounds), pa.py_buffer(buffer)]
    everything = pa.Array.from_buffers(pa.binary(), 2 * count - 1, pieces)
    taken = everything.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int64)))
    return taken if valid is None else with_nulls(taken, valid)


def with_nulls(array: pa.Array, valid: Bits) -> pa.Array:
    """The same array, null where it is not valid."""
    if valid.all():
        return array
    bitmap = np.packbits(valid, bitorder="little")
    return pa.Array.from_buffers(array.type, len(array), [pa.py_buffer(bitmap), *array.buffers()[1:]])


def spread(found: Found, starts: Positions) -> tuple[Positions, Positions, Bits | None]:
    """Places and validity for all records, of entries that only some have.

    Parameters:
        starts: where each record begins, for those that have none to stand somewhere.
    """
    count = len(starts)
    if len(found.record) == count:
        return found.at, found.end, None
    at = starts.copy()
    end = starts.copy()
    valid = np.zeros(count, np.bool_)
    at[found.record] = found.at
    end[found.record] = found.end
    valid[found.record] = True
    return at, end, valid


def texts(array: pa.Array) -> pa.Array:
    """A binary array as strings; what is not UTF-8 in it is replaced."""
    buffers = array.buffers()
    found = pa.Array.from_buffers(pa.string(), len(array), buffers)
    if buffers[2] is None or not (data := np.frombuffer(buffers[2], np.uint8)).size or int(data.max()) < 0x80:
        return found
    try:
        found.validate(full=True)
    except pa.ArrowInvalid:
        values = [None if value is None else value.decode("utf-8", "replace") for value in array.to_pylist()]
        return pa.array(values, pa.string())
    return found


def chosen_texts(choices: list[str | None], index: npt.NDArray[np.integer[Any]]) -> pa.Array:
    """A string for each number, out of a few."""
    return pa.array(choices, pa.string()).take(pa.array(index))


def id_texts(producer_id: npt.NDArray[np.uint64], sequence: npt.NDArray[np.uint64]) -> pa.Array:
    """Message ids as `str(message.id)` spells them: base 32, ten bits at a time."""
    count = len(sequence)
    pairs = np.empty((count, _ID_CHARACTERS // 2), "<u2")
    for number in range(6):
        pairs[:, number] = _PAIRS[producer_id >> np.uint64(54 - 10 * number) & _TEN]
    pairs[:, 6] = _PAIRS[(producer_id & np.uint64(15)) << np.uint64(6) | sequence >> np.uint64(58)]
    for number in range(5):
        pairs[:, 7 + number] = _PAIRS[sequence >> np.uint64(48 - 10 * number) & _TEN]
    pairs[:, 12] = _PAIRS[(sequence & np.uint64(255)) << np.uint64(2)]
    offsets = np.arange(0, (count + 1) * _ID_CHARACTERS, _ID_CHARACTERS, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(pairs)])


def times(at_ms: Positions, valid: Bits | None = None) -> pa.Array:
    """Milliseconds since 1970 as timestamps."""
    at_us = at_ms * 1000
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(TIME, len(at_us), [bitmap, pa.py_buffer(at_us)])


def numbers(values: npt.NDArray[Any], kind: pa.DataType, valid: Bits | None = None) -> pa.Array:
    """Numbers of a type."""
    wanted = values.astype(kind.to_pandas_dtype(), copy=False)
    return pa.array(wanted, kind, mask=None if valid is None else ~valid)
