"""Block files: sorted tables in files, read a block at a time, each block with its own checksum.

All derived files begin with a frame, which is found whole or not at all:

    0  4    magic · 4  u16 version · 6  u16 zero · 8  u32 CRC-32C of what follows · 12  u32 payload length · payload

In a block file the frame says how many entries each section has, and carries the owner's own bytes; then come the
sections, each padded to whole blocks of 4096 bytes: as many entries as fit, zeros, and in the last 8 bytes the CRC-32C
of the rest of the block and the block's number in the file. Reading a block finds any flipped bit in it.

Each checkpoint adds one small file, and reading must look into all of them; so from time to time the newest are merged
into one (`merge_from`), and only when they amount to something does that touch the large old ones.

What always holds: nothing here is the truth. A derived file that is missing or wrong raises `DerivedDamaged`, and the
store builds all of them anew from the journal.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import StorageError
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files, is_refusal

__all__ = [
    "FRAME_BYTES",
    "PIECE_ENTRIES",
    "BlockCache",
    "BlockFile",
    "DerivedDamaged",
    "Section",
    "SectionDraft",
    "frame",
    "merge_from",
    "read_exactly",
    "unframe",
    "write_blocks",
    "write_framed",
]


_FRAME: Final = struct.Struct(">4sHHII")
FRAME_BYTES: Final = _FRAME.size
VERSION: Final = 1


class DerivedDamaged(StorageError):
    """A derived file is missing or wrong; caught by the store, which then rebuilds."""

    code = "DERIVED_DAMAGED"


def frame(magic: bytes, payload: bytes) -> bytes:
    """The payload in its frame."""
    sized = struct.pack(">I", len(payload)) + payload
    return struct.pack(">4sHHI", magic, VERSION, 0, crc32c(sized)) + sized


def unframe(magic: bytes, data: bytes, path: str) -> bytes:
    """The payload of a frame at the head of `data`; more may follow it.

    Raises:
        DerivedDamaged: it is not what was written.
    """
    if len(data) < FRAME_BYTES:
        raise DerivedDamaged(f"{path} is too short")
    found, version, zero, crc, length = _FRAME.unpack_from(data)
    if found != magic or version != VERSION or zero or len(data) < FRAME_BYTES + length:
        raise DerivedDamaged(f"{path} has a wrong head")
    if crc32c(memoryview(data)[12 : FRAME_BYTES + length]) != crc:
        raise DerivedDamaged(f"{path} fails its checksum")
    return data[FRAME_BYTES : FRAME_BYTES + length]


def read_exactly(pool: FilePool, path: str, position: int, size: int) -> bytes:
    """Bytes that must be there.

    Raises:
        DerivedDamaged: they are not, or the disk refuses them twice.
    """
    try:
        try:
            data = pool.read(path, position, size)
        except StorageError as error:
            if not is_refusal(error):
                raise
            data = pool.read(path, position, size)  # it may have been a passing trouble, and a rebuild costs much
    except FileNotFoundError:
        raise DerivedDamaged(f"{path} is missing") from None
    except StorageError as error:
        if not is_refusal(error):
            raise
        raise DerivedDamaged(f"{path} cannot be read: {error.message}") from error
    if len(data) != size:
        raise DerivedDamaged(f"{path} is too short")
    return data


def read_framed(pool: FilePool, path: str, magic: bytes) -> bytes:
    """The payload of a framed file's head."""
    head = read_exactly(pool, path, 0, FRAME_BYTES)
    length = _FRAME.unpack(head)[4]
    if length > pool.get(path).size() - FRAME_BYTES:
        raise DerivedDamaged(f"{path} is too short")
    return unframe(magic, head + read_exactly(pool, path, FRAME_BYTES, length), path)


def write_framed(files: Files, path: str, magic: bytes, payload: bytes) -> None:
    """Write a whole file and flush it; making its name durable is the caller's."""
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (frame(magic, payload),))
        file.sync()
    finally:
        file.close()


BLOCK_BYTES: Final = 4096
PIECE_ENTRIES: Final = 1 << 16  # that are read, sorted and written at a time, so that a merge takes little memory
_TRAILER: Final = struct.Struct(">II")
_PAYLOAD: Final = BLOCK_BYTES - _TRAILER.size

Table = npt.NDArray[np.void]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    counts: list[int]
    note: bytes


_decoder = msgspec.msgpack.Decoder(_Head)


def _first_block(head_bytes: int) -> int:
    return -(-head_bytes // BLOCK_BYTES)


class SectionDraft(NamedTuple):
    """A section that is to be written.

    Attributes:
        length: how many entries it has, known beforehand so that they can be streamed.
        pieces: its entries.
    """

    dtype: np.dtype[Any]
    length: int
    pieces: Iterable[Table]


def write_blocks(files: Files, path: str, magic: bytes, note: bytes, *, sections: Sequence[SectionDraft]) -> None:
    """Write a table file and flush it.

    Parameters:
        note: the owner's own bytes for the head.
    """
    head = frame(magic, msgspec.msgpack.encode(_Head([section.length for section in sections], note)))
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (head,))
        block = _first_block(len(head))
        for dtype, count, pieces in sections:
            per_block = _PAYLOAD // dtype.itemsize
            waiting = np.empty(0, dtype)
            seen = 0
            for piece in pieces:
                seen += len(piece)
                waiting = np.concatenate([waiting, piece]) if len(waiting) else piece
                whole = len(waiting) // per_block * per_block
                if whole:
                    file.write(block * BLOCK_BYTES, (_pack(waiting[:whole], dtype, per_block, block),))
                    block += whole // per_block
                    waiting = waiting[whole:]
            if len(waiting):
                file.write(block * BLOCK_BYTES, (_pack(waiting, dtype, per_block, block),))
                block += 1
            assert seen == count, (seen, count)
        file.sync()
    finally:
        file.close()


def _pack(entries: Table, dtype: np.dtype[Any], per_block: int, first: int) -> memoryview:
    """Entries as whole blocks of the section's type, of which the first has the number `first`."""
    used = per_block * dtype.itemsize
    whole, rest = divmod(len(entries), per_block)
    blocks = whole + (rest > 0)
    packed = np.zeros((blocks, BLOCK_BYTES), np.uint8)
    # Joining arrays changes their byte order to the machine's, so the type is the section's to say.
    raw = np.ascontiguousarray(entries, dtype).view(np.uint8)
    packed[:whole, :used] = raw[: whole * used].reshape(whole, used)
    if rest:
        packed[whole, : rest * dtype.itemsize] = raw[whole * used :]
    view = packed.reshape(-1).data
    for number, at in enumerate(range(0, len(view), BLOCK_BYTES), first):
        _TRAILER.pack_into(view, at + _PAYLOAD, crc32c(view[at : at + _PAYLOAD]), number)
    return view


class BlockCache:
    """The blocks used last, of all table files together."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks: OrderedDict[tuple[str, int], Table] = OrderedDict()
        self._blocks_max = blocks_max

    def get(self, path: str, number: int) -> Table | None:
        block = self._blocks.get((path, number))
        if block is not None:
            self._blocks.move_to_end((path, number))
        return block

    def put(self, path: str, number: int, block: Table) -> None:
        self._blocks[path, number] = block
        if len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class Section:
    """One sorted table of a file."""

    __slots__ = ("_block", "_cache", "_dtype", "_path", "_per_block", "_pool", "count")

    def __init__(
        self, pool: FilePool, cache: BlockCache, path: str, block: int, dtype: np.dtype[Any], count: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._path = path
        self._block = block
        self._dtype = dtype
        self._per_block = _PAYLOAD // dtype.itemsize
        self.count = count

    @property
    def blocks(self) -> int:
        return -(-self.count // self._per_block)

    def block(self, index: int) -> Table:
        """The entries of one block.

        Raises:
            DerivedDamaged: it fails its checksum.
        """
        number = self._block + index
        table = self._cache.get(self._path, number)
        if table is None:
            table = self._load(number, 1)[: self.count - index * self._per_block]
            self._cache.put(self._path, number, table)
        return table

    def _load(self, number: int, blocks: int) -> Table:
        raw = read_exactly(self._pool, self._path, number * BLOCK_BYTES, blocks * BLOCK_BYTES)
        view = memoryview(raw)
        for i in range(blocks):
            at = i * BLOCK_BYTES
            crc, claimed = _TRAILER.unpack_from(raw, at + _PAYLOAD)
            if claimed != number + i or crc32c(view[at : at + _PAYLOAD]) != crc:
                raise DerivedDamaged(f"{self._path} has a damaged block {number + i}")
        used = self._per_block * self._dtype.itemsize
        rows = np.frombuffer(raw, np.uint8).reshape(blocks, BLOCK_BYTES)[:, :used]
        return np.ascontiguousarray(rows).reshape(-1).view(self._dtype)

    def slice(self, start: int, stop: int) -> Table:
        """Entries [start, stop), read past the cache in one go."""
        stop = min(stop, self.count)
        if start >= stop:
            return np.empty(0, self._dtype)
        first, last = start // self._per_block, (stop - 1) // self._per_block
        table = self._load(self._block + first, last - first + 1)
        return table[start - first * self._per_block : stop - first * self._per_block]

    def pieces(self, start: int = 0, size: int = PIECE_ENTRIES) -> Iterable[Table]:
        """All entries from `start` on, in slices."""
        for at in range(start, self.count, size):
            yield self.slice(at, at + size)

    def lower_bound(self, before: Callable[[Any], bool], guess: float = 0.5) -> int:
        """The index of the first entry that is not `before` what is looked for; `count` if all are.

        Parameters:
            guess: where in the section it is likely to stand, 0 to 1: a good one saves most of the reads.
        """
        low, high = 0, self.blocks
        step = 1
        middle = min(int(guess * high), high - 1)
        while low < high:  # the first block whose last entry is not before
            if before(self.block(middle)[-1]):
                low = middle + 1
                middle += step
            else:
                high = middle
                middle -= step
            # Close to the guess in small steps, farther away in larger ones, in the end by halves.
            step *= 2
            if not low <= middle < high:
                middle = (low + high) // 2
        if low == self.blocks:
            return self.count
        entries = self.block(low)
        at, end = 0, len(entries)
        while at < end:
            middle = (at + end) // 2
            if before(entries[middle]):
                at = middle + 1
            else:
                end = middle
        return low * self._per_block + at

    def entry(self, index: int) -> Any:
        return self.block(index // self._per_block)[index % self._per_block]

    def neighbours(self, index: int) -> Table:
        """The entries of the block an entry stands in."""
        return self.block(index // self._per_block)


class BlockFile:
    """A table file open for reading."""

    __slots__ = ("note", "path", "sections")

    def __init__(
        self, pool: FilePool, cache: BlockCache, path: str, magic: bytes, dtypes: Sequence[np.dtype[Any]]
    ) -> None:
        payload = read_framed(pool, path, magic)
        try:
            head = _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise DerivedDamaged(f"{path} has an unreadable head") from error
        if len(head.counts) != len(dtypes):
            raise DerivedDamaged(f"{path} has other sections than expected")
        self.path = path
        self.note = head.note
        self.sections: list[Section] = []
        block = _first_block(FRAME_BYTES + len(payload))
        for dtype, count in zip(dtypes, head.counts, strict=True):
            section = Section(pool, cache, path, block, dtype=dtype, count=count)
            self.sections.append(section)
            block += section.blocks


RUNS_MAX: Final = 8
_RATIO: Final = 4


def merge_from(sizes: Sequence[int], runs_max: int = RUNS_MAX) -> int | None:
    """Which files to merge: all from this index on, or None for none yet.

    Parameters:
        sizes: of the files, oldest first.
        runs_max: how many may stand before any are merged.

    A file takes part only if those newer than it have at least a quarter of its size, so each byte is rewritten about
    once for every fivefold growth.
    """
    if len(sizes) <= runs_max:
        return None
    newer = 0
    first = len(sizes)
    for at in range(len(sizes) - 1, -1, -1):
        if at < len(sizes) - 2 and newer * _RATIO < sizes[at]:
            break
        newer += sizes[at]
        first = at
    return first
