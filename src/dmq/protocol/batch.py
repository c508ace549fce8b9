"""The body of a frame that carries records: columns first, then the records, back to back.

    u32 x count   lengths     how long each record is
    u32 x keys    hash_index  which records have a key, by index, rising
    u64 x keys    hashes      the hash of each of those keys, never 0
    u64 x dues    dues        when each record is due, ms since 1970; dues is count or 0
    bytes         records     as `dmq.records` encodes them, their lengths' sum
    bytes         blocks      that bodies of records stand in (`dmq.records.block`), between peers that have the feature

`count`, `keys` and whether there are dues stand in the frame's header. Records that a broker hands out have only their
lengths before them: keys and dues of stored records are nobody's business but the store's.

What always holds: nothing is copied but the columns, which are small, and small bodies; what `unpack` returns adds up
exactly, so that slices of records by their lengths stay inside. What the records themselves say is checked by
`dmq.records.check_batch`. Few records give tuples, many give arrays in native byte order: the store does the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.compiled import choose
from dmq.errors import InvalidRequest
from dmq.protocol.frame import Buffer
from dmq.records import EncodedBatch, LoneRecord
from dmq.records.block import plain_records

__all__ = [
    "Batch",
    "pack_batch",
    "pack_lone",
    "pack_records",
    "place_records",
    "plain_batch",
    "unpack_batch",
    "unpack_records",
]

# Below this many records plain unpacking beats the set-up of numpy calls (bench/protocol.py).
FEW: Final = 16
DUE_MAX_MS: Final = (1 << 63) - 1

Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.uint32]
LongNumbers: TypeAlias = Sequence[int] | npt.NDArray[np.uint64]

_U32S: Final = tuple(struct.Struct(f">{count}I") for count in range(FEW))
LONE_KEY: Final = struct.Struct(">IIQ")
_U64S: Final = tuple(struct.Struct(f">{count}Q") for count in range(FEW))


class Batch(msgspec.Struct, frozen=True, gc=False):
    """A batch as it was received: the columns of an `EncodedBatch`, and the due times beside them."""

    data: Buffer
    lengths: Numbers
    hash_index: Numbers
    hashes: LongNumbers
    dues: LongNumbers
    block_bytes: int = 0  # of the data, behind the records


def pack_batch(batch: EncodedBatch, dues: LongNumbers = ()) -> list[Buffer]:
    """The body of a PRODUCE, in two pieces: the columns, and the records as they are.

    Parameters:
        batch: `Produce.count` is its count, `Produce.keys` the number of its hashes.
        dues: none, or one for each record, with `ProduceFlag.DUES`.
    """
    assert len(dues) in (0, batch.count)
    if batch.columns is not None and not len(dues):
        return [batch.columns, batch.data]
    columns = _column(batch.lengths, ">u4", _U32S)
    if len(batch.hashes):
        columns += _column(batch.hash_index, ">u4", _U32S) + _column(batch.hashes, ">u8", _U64S)
    if len(dues):
        columns += _column(dues, ">u8", _U64S)
    return [columns, batch.data]


def pack_lone(record: LoneRecord) -> bytes:
    """The body of a PRODUCE of one record that is not delayed, in one piece."""
    if record.key_hash:
        columns = LONE_KEY.pack(record.length, 0, record.key_hash)
    else:
        columns = _U32S[1].pack(record.length)
    return b"".join((columns, *record.parts))


def pack_records(lengths: Numbers) -> bytes:
    """What stands before records that are handed out; the records follow, in as many pieces as they are."""
    if type(lengths) is list and len(lengths) < FEW:
        return _U32S[len(lengths)].pack(*lengths)
    return _column(lengths, ">u4", _U32S)


def plain_batch(body: Sequence[Buffer], count: int, keys: int) -> list[Buffer]:
    """The body of a PRODUCE for a broker that knows no blocks: of the same records, with their bodies in them.

    Parameters:
        body: of a PRODUCE with blocks, and without dues.
        count, keys: from its header.

    Raises:
        RecordCorrupt: a block cannot be expanded.
    """
    batch = unpack_batch(b"".join(body), count, keys, blocks=True)
    records = plain_records(batch.data, batch.lengths)
    columns = _column([*map(len, records)], ">u4", _U32S)
    if keys:
        columns += _column(batch.hash_index, ">u4", _U32S) + _column(batch.hashes, ">u8", _U64S)
    return [columns, b"".join(records)]


def unpack_batch(body: Buffer, count: int, keys: int = 0, dues: bool = False, *, blocks: bool = False) -> Batch:
    """Divide the body of a PRODUCE.

    Parameters:
        body: from the frame.
        count: from the header, as are `keys` and `dues`.
        blocks: what is left behind the records are blocks.

    Raises:
        InvalidRequest: the columns do not fit the body or each other.
    """
    due_count = count if dues else 0
    data_at = 4 * count + 12 * keys + 8 * due_count
    if data_at > len(body) or keys > count or count < 1:
        raise InvalidRequest(
            f"a batch of {count} messages with {keys} keys takes {data_at} bytes before its records, and the body has "
            f"{len(body)}: count, keys and flags must fit the body"
        )
    divide = _divide_few if count < FEW else _divide_many
    return divide(body, count, keys, due_count, data_at=data_at, blocks=blocks)


def unpack_records(body: Buffer, count: int, *, blocks: bool = False) -> tuple[Numbers, Buffer]:
    """Divide the body of an answer to PULL, PEEK or FIND, or of a push.

    Parameters:
        body: from the frame.
        count: how many records there are: the sum of the counts in the header.
        blocks: there may be blocks behind them.

    Returns:
        The lengths, and all records, with the blocks behind them.

    Raises:
        InvalidRequest: the lengths do not fit the body.
    """
    if count == 0 and not body:
        return (), body
    batch = unpack_batch(body, count, blocks=blocks)
    return batch.lengths, batch.data


def place_records(body: Buffer, count: int) -> tuple[list[int] | npt.NDArray[np.int64], Buffer]:
    """Divide the body of an answer to PULL, or of a push, as `unpack_records` does with blocks, in fewer steps.

    Returns:
        Where each record begins and where the last one ends, as an array if they are many; and all records, with the
        blocks behind them.

    Raises:
        InvalidRequest: the lengths do not fit the body.
    """
    data_at = 4 * count
    if data_at > len(body) or (body and not count):
        raise InvalidRequest(f"{count} records do not fit a body of {len(body)} bytes")
    if count < FEW:
        data = body[data_at:] if isinstance(body, bytes) else memoryview(body)[data_at:]
        bounds: list[int] | npt.NDArray[np.int64] = [0, *accumulate(_U32S[count].unpack_from(body))]
    else:
        data = memoryview(body)[data_at:]
        bounds = np.zeros(count + 1, np.int64)
        np.cumsum(np.frombuffer(body, ">u4", count), out=bounds[1:])
    if bounds[-1] > len(data):
        raise _bad_lengths(int(bounds[-1]), len(data))
    return bounds, data


def _column(numbers: Sequence[int] | npt.NDArray[Any], kind: str, few: tuple[struct.Struct, ...]) -> bytes:
    if len(numbers) < FEW:
        return few[len(numbers)].pack(*(numbers.tolist() if isinstance(numbers, np.ndarray) else numbers))
    return np.asarray(numbers).astype(kind).tobytes()


def _divide_few(body: Buffer, count: int, keys: int, due_count: int, *, data_at: int, blocks: bool) -> Batch:
    # Small bodies come as bytes: another copy of so little costs less than a view does in all that follows.
    data = body[data_at:] if isinstance(body, bytes) else memoryview(body)[data_at:]
    lengths = _U32S[count].unpack_from(body)
    rest = len(data) - sum(lengths)
    if rest and (rest < 0 or not blocks):
        raise _bad_lengths(sum(lengths), len(data))
    hash_index: Sequence[int] = ()
    hashes: Sequence[int] = ()
    dues: Sequence[int] = ()
    if keys:
        hash_index = _U32S[keys].unpack_from(body, 4 * count)
        hashes = _U64S[keys].unpack_from(body, 4 * count + 4 * keys)
        if hash_index[-1] >= count or 0 in hashes or (keys > 1 and any(a >= b for a, b in pairwise(hash_index))):
            raise _bad_keys()
    if due_count:
        dues = _U64S[due_count].unpack_from(body, data_at - 8 * due_count)
        if max(dues) > DUE_MAX_MS:
            raise _bad_dues()
    return Batch(data, lengths, hash_index, hashes, dues=dues, block_bytes=rest)


def _divide_many(body: Buffer, count: int, keys: int, due_count: int, *, data_at: int, blocks: bool) -> Batch:
    data = memoryview(body)[data_at:]
    found = divide_columns(body, count, keys)
    if found is None:
        raise _bad_keys()
    rest = len(data) - found[3]
    if rest and (rest < 0 or not blocks):
        raise _bad_lengths(found[3], len(data))
    lengths, hash_index = np.frombuffer(found[0], np.uint32), np.frombuffer(found[1], np.uint32)
    hashes = np.frombuffer(found[2], np.uint64)
    dues = np.frombuffer(body, ">u8", due_count, data_at - 8 * due_count).astype(np.uint64)
    if due_count and int(dues.max()) > DUE_MAX_MS:
        raise _bad_dues()
    return Batch(data, lengths, hash_index, hashes, dues=dues, block_bytes=rest)


def divide_columns_plain(body: Buffer, count: int, keys: int) -> tuple[Any, Any, Any, int] | None:
    """Lengths, which have a key, and hashes, in native byte order, and what the lengths add up to; None if the keys do
    not name each record at most once, rising, with a hash over 0."""
    lengths = np.frombuffer(body, ">u4", count).astype(np.uint32)
    hash_index = np.frombuffer(body, ">u4", keys, 4 * count).astype(np.uint32)
    hashes = np.frombuffer(body, ">u8", keys, 4 * count + 4 * keys).astype(np.uint64)
    if keys and (int(hash_index[-1]) >= count or not hashes.all() or (hash_index[1:] <= hash_index[:-1]).any()):
        return None
    return lengths, hash_index, hashes, int(lengths.sum(dtype=np.uint64))


divide_columns: Final = choose(divide_columns_plain, "divide_columns")


def _bad_lengths(total: int, data_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"the lengths of a batch add up to {total} bytes, and its records have {data_bytes}")


def _bad_keys() -> InvalidRequest:
    return InvalidRequest("the keys of a batch must name each record at most once, rising, with a hash over 0")


def _bad_dues() -> InvalidRequest:
    return InvalidRequest(f"a message of the batch is due later than {DUE_MAX_MS} ms since 1970, which is not a time")
