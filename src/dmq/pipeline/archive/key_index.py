"""The index by key, business id and message id: its rows for some messages, and the hash it is sorted by.

What always holds: a text has the same hash in every process and version, since it is part of the archive's format. The
hash protects against nobody: a reader that finds a hash compares the text. A bucket is the top bits of the hash, so
that sorting by bucket and hash is sorting by the hash as an unsigned number.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dmq.pipeline.tables import KEY_INDEX, SCHEMAS

__all__ = [
    "BUCKETS",
    "BUSINESS_ID",
    "KEY",
    "KINDS",
    "MESSAGE_ID",
    "bucket_of",
    "index_rows",
    "text_hash",
    "text_hashes",
]

KEY: Final = "key"
BUSINESS_ID: Final = "business_id"
MESSAGE_ID: Final = "message_id"
KINDS: Final = (KEY, BUSINESS_ID, MESSAGE_ID)  # each the name of a column of `message`

_BUCKET_BITS: Final = 6
BUCKETS: Final = 1 << _BUCKET_BITS

_U64: Final = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = 0xBF58_476D_1CE4_E5B9
_SECOND: Final = 0x94D0_49BB_1331_11EB
_PLACE: Final = ("message_id", "topic", "queue", "queue_offset", "broker", "journal_offset", "dt")


def index_rows(messages: pa.Table) -> pa.Table:
    """The index's rows for rows of `message`, in no order: one for every id, key and business id."""
    parts = []
    for kind in KINDS:
        texts = messages[kind].combine_chunks()
        has_text = texts.is_valid()
        mine = messages.select(_PLACE).filter(has_text)
        texts = texts.drop_null()
        hashes = text_hashes(texts)
        columns: dict[str, Any] = {name: mine[name] for name in _PLACE}
        columns |= {
            "bucket": pa.array((hashes >> np.uint64(64 - _BUCKET_BITS)).astype(np.int32)),
            "hash": pa.array(hashes.view(np.int64)),
            "kind": pa.repeat(pa.scalar(kind), len(texts)),
            "key": texts,
        }
        schema = SCHEMAS[KEY_INDEX]
        parts.append(pa.table([columns[field.name] for field in schema], schema=schema))
    return pa.concat_tables(parts)


def bucket_of(hashed: int) -> int:
    """The bucket of a hash."""
    return (hashed & _U64) >> (64 - _BUCKET_BITS)


def text_hash(text: str) -> int:
    """The hash of a text as the column `hash` has it: splitmix64 over its length and its words of eight bytes."""
    raw = text.encode()
    value = _mix(len(raw))
    for at in range(0, len(raw), 8):
        value = _mix(value ^ int.from_bytes(raw[at : at + 8], "little"))
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _U64
    value = ((value ^ value >> 30) * _FIRST) & _U64
    value = ((value ^ value >> 27) * _SECOND) & _U64
    return value ^ value >> 31


def text_hashes(texts: pa.StringArray) -> npt.NDArray[np.uint64]:
    """`text_hash` of many, as unsigned numbers; none of them may be missing."""
    if len(texts) == 0:
        return np.empty(0, np.uint64)
    _, ends, data = texts.buffers()
    bounds = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    starts, sizes = bounds[:-1], np.diff(bounds)
    # Eight bytes more than there are, so that the last word of the last text can be read whole.
    first = int(bounds[0])
    raw = b"".join((memoryview(data or b"")[first : int(bounds[-1])], bytes(8)))
    words = np.ndarray((len(raw) - 7,), "<u8", raw, 0, (1,))
    values = _mix_many(sizes.astype(np.uint64))
    left, at = sizes, starts - first
    index: npt.NDArray[np.int64] | None = None  # whose words are not at their end; None for all
    while True:
        if int(left.min(initial=1)) <= 0:
            going = np.flatnonzero(left > 0)
            if not len(going):
                return values
            index = going if index is None else index[going]
            left, at = left[going], at[going]
        word = words[at]
        spare = np.clip(8 - left, 0, 7).astype(np.uint64) * np.uint64(8)
        word = (word << spare) >> spare
        if index is None:
            values = _mix_many(values ^ word)
        else:
            values[index] = _mix_many(values[index] ^ word)
        left, at = left - 8, at + 8


def _mix_many(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = values + np.uint64(_GOLDEN)  # wraps, as unsigned sums of arrays do
    value = (value ^ value >> np.uint64(30)) * np.uint64(_FIRST)
    value = (value ^ value >> np.uint64(27)) * np.uint64(_SECOND)
    return value ^ value >> np.uint64(31)
