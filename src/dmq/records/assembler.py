"""Many records at once, column by column: what `encoder` puts together with numpy.

What always holds: the bytes are those that encoding one record after another gives.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.records import layout
from dmq.records.block import POINTER_BYTES, POINTER_DTYPE, make_block
from dmq.records.builder import HEAD
from dmq.records.compression import Together
from dmq.records.hashes import key_hashes

__all__ = [
    "BLANK_POINTER",
    "EncodedBatch",
    "Template",
    "assemble",
    "assemble_even",
    "attach_blocks",
    "key_sizes_of",
    "raw_keys_of",
]

_HEAD_DTYPE: Final = np.dtype([("length", ">u4"), ("template", "V51"), ("crc", ">u8"), ("body_size", ">u4")])
_HEAD_BYTES: Final = np.dtype(f"V{HEAD.size}")
_HEAD_BLANK: Final = bytes(HEAD.size)
_HALF: Final = np.uint64(32)
_HIGH: Final = np.uint64(0xFFFF_FFFF << 32)
BLANK_POINTER: Final = bytes(POINTER_BYTES)  # the body of a record, until it is known where its block stands
_POINTER_VOID: Final = np.dtype(f"V{POINTER_BYTES}")
_NO_HASHES: Final = np.empty(0, np.uint64)
_NO_INDEX: Final = np.empty(0, np.uint32)


class EncodedBatch(msgspec.Struct, frozen=True, gc=False):
    """Records one after another, and what a broker needs to know of them without reading them.

    `hash_index[i]` is the index within the batch of the record whose key has the hash `hashes[i]`; records without a
    key do not occur.
    """

    data: bytearray
    lengths: npt.NDArray[np.uint32]
    hash_index: npt.NDArray[np.uint32]
    hashes: npt.NDArray[np.uint64]
    count: int
    block_bytes: int = 0  # of the blocks behind the records
    columns: bytes | None = None  # lengths, hash_index and hashes as they stand in a request, where they were made so


class Template(NamedTuple):
    """What records of one shape and time share."""

    head: bytes  # bytes 4..54 of the record
    tail: bytes  # everything between the body and the key
    crc_mask: int  # xor the key's CRC-32C = the high half of the record's CRC


def assemble_even(
    bodies: Sequence[bytes],
    body_sizes: list[int],
    keys: bytes | None,
    template: Template,
    crcs_of_bodies: list[int] | None = None,
) -> EncodedBatch:
    """`assemble` for records of one template, whose keys, back to back, are of one size; None if they have none.

    All around the bodies is then as wide in every record: numpy writes it, and two pieces a record are joined.
    """
    count = len(bodies)
    if crcs_of_bodies is not None and bodies.count(BLANK_POINTER) == count:
        return _assemble_blank(crcs_of_bodies, keys, template)
    head, tail, mask = template
    key_size = len(keys) // count if keys is not None else 0
    rest = len(tail) + key_size
    columns = np.empty(count, _HEAD_DTYPE)
    columns["body_size"] = sizes = np.array(body_sizes, np.int64)
    columns["template"] = np.frombuffer(head, "V51")
    columns["length"] = lengths = sizes + (HEAD.size + rest)
    starts = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])
    crcs = np.array(crcs_of_bodies or [*map(crc32c, bodies)], np.uint64)

    gap = tail + bytes(key_size)
    parts: list[bytes] = [gap + _HEAD_BLANK] * (2 * count + 1)
    parts[0], parts[-1] = _HEAD_BLANK, gap
    parts[1::2] = bodies
    data = bytearray().join(parts)
    hashes, hash_index = _NO_HASHES, _NO_INDEX
    if keys is None:
        crcs |= np.uint64(mask << 32)
    else:
        hashes = key_hashes(keys, count)
        crcs |= hashes & _HIGH ^ np.uint64(mask << 32)
        np.maximum(hashes, np.uint64(1), out=hashes)
        hash_index = np.arange(count, dtype=np.uint32)
        if key_size:
            layout.scatter(data, starts + sizes, HEAD.size + len(tail), np.frombuffer(keys, f"V{key_size}"))
    columns["crc"] = crcs
    layout.scatter(data, starts, 0, columns.view(_HEAD_BYTES))
    return EncodedBatch(data, lengths.astype(np.uint32), hash_index, hashes, count=count)


def _assemble_blank(crcs_of_bodies: list[int], keys: bytes | None, template: Template) -> EncodedBatch:
    """`assemble_even` for records that all have a blank pointer for their body: they are rows of one width."""
    count = len(crcs_of_bodies)
    head, tail, mask = template
    key_size = len(keys) // count if keys is not None else 0
    length = HEAD.size + len(BLANK_POINTER) + len(tail) + key_size
    row = HEAD.pack(length, head, 0, len(BLANK_POINTER)) + BLANK_POINTER + tail + bytes(key_size)
    data = bytearray(row * count)
    starts = np.arange(0, len(data), length)
    crcs = np.array(crcs_of_bodies, np.uint64)
    hashes, hash_index = _NO_HASHES, _NO_INDEX
    if keys is None:
        crcs |= np.uint64(mask << 32)
    else:
        hashes = key_hashes(keys, count)
        crcs |= hashes & _HIGH ^ np.uint64(mask << 32)
        np.maximum(hashes, np.uint64(1), out=hashes)
        hash_index = np.arange(count, dtype=np.uint32)
        if key_size:
            layout.scatter(data, starts, length - key_size, np.frombuffer(keys, f"V{key_size}"))
    layout.scatter(data, starts, layout.CRC_AT, crcs.astype(">u8"))
    return EncodedBatch(data, np.full(count, length, np.uint32), hash_index, hashes, count=count)


def assemble(
    bodies: Sequence[bytes],
    body_sizes: list[int],
    raw_keys: list[bytes],
    has_key: npt.NDArray[np.bool_] | None,
    templates: list[Template],
    crcs_of_bodies: list[int] | None = None,
) -> EncodedBatch:
    """The records, column by column.

    Parameters:
        templates: one for each, or one for all, whose keys then are of one size.
        crcs_of_bodies: where these are not those of the bodies that are given.
    """
    count = len(bodies)
    heads, tails, masks = zip(*templates, strict=True)
    columns = np.empty(count, _HEAD_DTYPE)
    columns["body_size"] = lengths = np.array(body_sizes, np.int64)
    columns["template"] = np.frombuffer(b"".join(heads), "V51")
    if len(templates) == 1:
        lengths += HEAD.size + len(tails[0]) + len(raw_keys[0])
        tails *= count
    else:
        lengths += np.array([*map(len, tails)], np.int64) + np.array([*map(len, raw_keys)], np.int64)
        lengths += HEAD.size
    columns["length"] = lengths
    starts = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1], out=starts[1:])

    hashes, hash_index = _NO_HASHES, _NO_INDEX
    high = np.array(masks, np.uint64)
    if has_key is None or has_key.any():
        key_crcs = np.array([*map(crc32c, raw_keys)], np.uint64)
        high = high ^ key_crcs
        hashes = key_crcs << _HALF | np.array([*map(zlib.crc32, raw_keys)], np.uint64)
        np.maximum(hashes, np.uint64(1), out=hashes)
        hash_index = np.arange(count, dtype=np.uint32)
        if has_key is not None:
            hashes, hash_index = hashes[has_key], hash_index[has_key]
    columns["crc"] = high << _HALF | np.array(crcs_of_bodies or [*map(crc32c, bodies)], np.uint64)

    parts = [_HEAD_BLANK] * (4 * count)
    parts[1::4] = bodies
    parts[2::4] = tails
    parts[3::4] = raw_keys
    data = bytearray().join(parts)
    layout.scatter(data, starts, 0, columns.view(_HEAD_BYTES))
    return EncodedBatch(data, lengths.astype(np.uint32), hash_index, hashes, count=count)


def attach_blocks(batch: EncodedBatch, together: Sequence[Together], body_sizes: Sequence[int]) -> EncodedBatch:
    """Put blocks behind records, and fill in the blank pointers of those whose bodies stand in them.

    Parameters:
        batch: its bytes are changed.
        body_sizes: of all bodies, as they were sent.
    """
    data = batch.data
    lengths = batch.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    sizes = np.array(body_sizes, np.int64)
    blocks: list[bytes] = []
    at = len(data)
    for indexes, codec, raw_size, packed in together:
        mine, size = starts, sizes
        if len(indexes) != batch.count:
            chosen = np.array(indexes)
            mine, size = starts[chosen], sizes[chosen]
        rows = np.empty(len(mine), POINTER_DTYPE)
        rows["distance"] = at - mine
        rows["place"] = np.cumsum(size) - size
        rows["size"] = size
        layout.scatter(data, mine, layout.BODY_AT, rows.view(_POINTER_VOID))
        np.frombuffer(data, np.uint8)[mine + layout.FLAGS_AT] |= layout.BLOCK
        blocks.append(make_block(codec, raw_size, packed))
        at += len(blocks[-1])
    behind = b"".join(blocks)
    data += behind
    return EncodedBatch(data, batch.lengths, batch.hash_index, batch.hashes, count=batch.count, block_bytes=len(behind))


def key_sizes_of(raw_keys: list[bytes], has_key: npt.NDArray[np.bool_] | None) -> list[int]:
    """The sizes of the keys, -1 for one that is not there."""
    if has_key is None:
        return [*map(len, raw_keys)]
    return [len(key) if has else -1 for key, has in zip(raw_keys, has_key.tolist(), strict=True)]


def raw_keys_of(keys: Sequence[str | None]) -> tuple[list[bytes], npt.NDArray[np.bool_] | None]:
    """The keys as bytes, and which of them are there; None where all are."""
    if None not in (keys[0], keys[-1]):  # a guess that costs nothing
        try:
            return [*map(str.encode, keys)], None  # type: ignore[arg-type]
        except TypeError:
            pass
    raw_keys = [b"" if key is None else key.encode() for key in keys]
    return raw_keys, np.array([key is not None for key in keys], np.bool_)
