"""Body blocks: the bodies of a batch, compressed together behind its records.

Small bodies that are alike compress well together and badly one by one. A record whose body stands in a block has the
flag `BLOCK`, and a pointer of 12 bytes where its body would be. Everything is big-endian.

    pointer                                             block
     0  u32  distance: bytes from the record's           0  u8   codec, as of a compressed body
             first byte to the block's                   1  3    zero
     4  u32  place of the body in the expanded block     4  u32  bytes of data that follow
     8  u32  size of the body                            8  u32  bytes they expand to, at most 262,144
                                                        12  u32  CRC-32C of bytes 0 to 11 and the data
                                                        16       the data

The blocks of a batch stand one behind the other behind its last record. Distances are relative, so records and blocks
move together: from a frame into a unit, and from a unit into a frame, where `gather_blocks` mends the distances if some
records stay behind. `plain` takes a record out of its block; its checksums stay, since none covers pointer and flag,
and that of the body is of the body itself.

What always holds: a block expands to the size that it declares, at most 256 KiB, or to nothing; a body lies within its
expanded block; the bodies of a batch that a broker took fill its blocks in order, without gap or overlap, so that
taking all of them out gives no more bytes than the blocks declare.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import RecordCorrupt
from dmq.records import layout
from dmq.records.compression import BLOCK_BYTES_MAX, decompress
from dmq.records.layout import Buffer, Positions

__all__ = [
    "BLOCK_BYTES_MAX",
    "BLOCK_HEAD_BYTES",
    "POINTER_BYTES",
    "POINTER_DTYPE",
    "BlockUse",
    "BodyBlocks",
    "Pointers",
    "StoredBlocks",
    "block_flags",
    "block_size",
    "block_use",
    "check_blocks",
    "gather_blocks",
    "make_block",
    "plain",
    "plain_records",
    "read_pointers",
]

_HEAD: Final = struct.Struct(">B3xIII")
BLOCK_HEAD_BYTES: Final = _HEAD.size
_CRC_AT: Final = 12
_POINTER: Final = struct.Struct(">III")
POINTER_BYTES: Final = _POINTER.size
POINTER_DTYPE: Final = np.dtype([("distance", ">u4"), ("place", ">u4"), ("size", ">u4")])
_POINTER_VOID: Final = np.dtype(f"V{POINTER_BYTES}")
_U32: Final = struct.Struct(">I")
_TAIL_AT: Final = layout.BODY_AT + POINTER_BYTES  # where the names of a record in a block begin
_BLOCK: Final = layout.BLOCK
_FEW: Final = 48  # records, up to which plain loops are cheaper than arrays


def make_block(codec: int, raw_size: int, data: bytes) -> bytes:
    """A block of compressed data that expands to so many bytes."""
    head = _HEAD.pack(codec, len(data), raw_size, 0)[:_CRC_AT]
    return b"".join((head, _U32.pack(crc32c(data, crc32c(head))), data))


class _Block(NamedTuple):
    """What the head of a block says, as far as it can be true."""

    codec: int
    raw_size: int
    crc: int
    end: int


def _read_head(buffer: Buffer, at: int) -> _Block:
    """Raises RecordCorrupt if no block can begin there."""
    if not 0 <= at <= len(buffer) - BLOCK_HEAD_BYTES:
        raise RecordCorrupt(f"there is no body block at byte {at}: {len(buffer)} bytes are there")
    codec, size, raw_size, crc = _HEAD.unpack_from(buffer, at)
    end = at + BLOCK_HEAD_BYTES + size
    if end > len(buffer):
        raise RecordCorrupt(f"the body block at byte {at} reaches past the end")
    if not 0 < raw_size <= BLOCK_BYTES_MAX:
        raise RecordCorrupt(f"a body block claims to expand to {raw_size} bytes; 1 to {BLOCK_BYTES_MAX} are allowed")
    return _Block(codec, raw_size, crc, end)


def block_size(head: Buffer) -> int:
    """How many bytes a block takes that begins so."""
    return BLOCK_HEAD_BYTES + int(_HEAD.unpack_from(head)[1])


def lone_block_size(buffer: Buffer, at: int) -> int:
    """To how many bytes the block at a place expands, if it is right and reaches to the end; 0 if not."""
    try:
        block = _read_head(buffer, at)
        _check_crc(buffer, at, block)
    except RecordCorrupt:
        return 0
    return block.raw_size if block.end == len(buffer) else 0


def _check_crc(buffer: Buffer, at: int, block: _Block) -> memoryview:
    """The data of a block; raises RecordCorrupt if it does not match its checksum."""
    view = memoryview(buffer)
    data = view[at + BLOCK_HEAD_BYTES : block.end]
    if crc32c(data, crc32c(view[at : at + _CRC_AT])) != block.crc:
        raise RecordCorrupt("a body block does not match its CRC")
    return data


class Pointers(NamedTuple):
    """The pointers of some records, one element each."""

    block_at: Positions  # in the buffer the records stand in
    place: Positions
    size: Positions


def read_pointers(buffer: Buffer, starts: Positions) -> Pointers:
    """The pointers of records whose bodies stand in blocks.

    Raises:
        IndexError: one reaches past the end of the buffer.
    """
    rows = layout.gather(buffer, starts, layout.BODY_AT, _POINTER_VOID).view(POINTER_DTYPE)
    return Pointers(starts + rows["distance"], rows["place"].astype(np.int64), rows["size"].astype(np.int64))


def block_flags(buffer: Buffer, starts: Positions) -> npt.NDArray[np.bool_]:
    """Which records have their bodies in blocks."""
    flags = np.frombuffer(buffer, np.uint8)[starts + layout.FLAGS_AT]
    found: npt.NDArray[np.bool_] = flags & np.uint8(_BLOCK) != 0
    return found


class BodyBlocks:
    """The blocks in a buffer, each expanded when a body of it is asked for, and once.

    Parameters:
        buffer: where records and blocks stand.
    """

    __slots__ = ("_buffer", "_expanded")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._expanded: dict[int, bytes] = {}

    def expanded(self, at: int) -> bytes:
        """The bytes of the block that begins there.

        Raises:
            RecordCorrupt: there is none, or it cannot be expanded.
        """
        found = self._expanded.get(at)
        if found is None:
            block = _read_head(self._buffer, at)
            data = _check_crc(self._buffer, at, block)
            found = self._expanded[at] = decompress(block.codec, block.raw_size, data, BLOCK_BYTES_MAX)
        return found

    def body(self, start: int) -> bytes:
        """The body of the record that begins there.

        Raises:
            RecordCorrupt: its block cannot be expanded, or does not have it.
        """
        try:
            distance, place, size = _POINTER.unpack_from(self._buffer, start + layout.BODY_AT)
        except struct.error as error:
            raise RecordCorrupt(f"the pointer of the record at byte {start} reaches past the end") from error
        return _cut(self.expanded(start + distance), place, size)

    def bodies(self, starts: Positions) -> list[bytes]:
        """The bodies of records.

        Raises:
            RecordCorrupt: as `body`, for any of them.
        """
        try:
            block_at, places, sizes = read_pointers(self._buffer, starts)
        except IndexError as error:
            raise RecordCorrupt("the pointer of a record reaches past the end") from error
        found: list[bytes] = []
        cuts = [0, *(np.flatnonzero(np.diff(block_at)) + 1).tolist(), len(starts)]
        ends = places + sizes
        for first, last in pairwise(cuts):
            if first == last:
                continue
            raw = self.expanded(int(block_at[first]))
            if int(ends[first:last].max()) > len(raw):
                raise RecordCorrupt("a body reaches past the end of its block")
            found += [
                raw[at:end] for at, end in zip(places[first:last].tolist(), ends[first:last].tolist(), strict=True)
            ]
        return found


def _cut(raw: bytes, place: int, size: int) -> bytes:
    if place + size > len(raw):
        raise RecordCorrupt(f"a body of {size} bytes at byte {place} reaches past the end of its block")
    return raw[place : place + size]


def plain(record: Buffer, block: bytes) -> bytes:
    """A record with its body in it, instead of a pointer. Nothing else changes, nor do its checksums.

    Parameters:
        record: its bytes, and no others.
        block: what its block expands to.

    Raises:
        RecordCorrupt: the block does not have the body.
    """
    _, place, size = _POINTER.unpack_from(record, layout.BODY_AT)
    body = _cut(block, place, size)
    flags = record[layout.FLAGS_AT] & ~_BLOCK
    return b"".join(
        (
            _U32.pack(len(record) - POINTER_BYTES + size),
            record[layout.MAGIC_AT : layout.FLAGS_AT],
            bytes((flags,)),
            record[layout.FLAGS_AT + 1 : layout.BODY_SIZE_AT],
            _U32.pack(size),
            body,
            record[_TAIL_AT:],
        )
    )


def plain_records(buffer: Buffer, lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> list[bytes]:
    """Records that stand one behind the other, before their blocks, each with its body in it.

    Raises:
        RecordCorrupt: a block cannot be expanded, or does not have a body.
    """
    blocks = BodyBlocks(buffer)
    view = memoryview(buffer)
    found: list[bytes] = []
    at = 0
    for length in map(int, lengths):
        record = bytes(view[at : at + length])
        if record[layout.FLAGS_AT] & _BLOCK:
            record = plain(record, blocks.expanded(at + _U32.unpack_from(record, layout.BODY_AT)[0]))
        found.append(record)
        at += length
    return found


# --- records in a journal ---------------------------------------------------------------------------------------------


class BlockUse(NamedTuple):
    """Where stored records have their bodies, one element each."""

    offsets: Positions  # of the block in the journal; 0 for a body that stands in its record
    sizes: Positions  # how many bytes the record takes with its body in it

    @property
    def blocks(self) -> list[int]:
        """The journal offsets of the blocks, each once, in the order in which the records need them."""
        # Neighbours mostly share one: only where it changes is there something to look at.
        changes = np.flatnonzero(self.offsets[1:] != self.offsets[:-1])
        found = dict.fromkeys((int(self.offsets[0]), *self.offsets[changes + 1].tolist()))
        found.pop(0, None)
        return [*found]


def block_use(lengths: Sequence[int] | npt.NDArray[np.integer[Any]], pieces: Sequence[memoryview]) -> BlockUse | None:
    """Where stored records have their bodies; None if each has it in itself.

    Parameters:
        lengths: of the records.
        pieces: their bytes, in pieces of adjacent records, as the journal has them.
    """
    if len(lengths) < _FEW * len(pieces) and not _has_blocks(lengths, pieces):
        return None
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    offsets: Positions | None = None
    base = first = 0
    for piece in pieces:
        last = int(np.searchsorted(ends, base + len(piece), side="right"))
        mine = starts[first:last] - base
        in_block = block_flags(piece, mine)
        if in_block.any():
            if offsets is None:
                offsets = np.zeros(len(sizes), np.int64)
            index: Any = slice(first, last)
            if not in_block.all():
                mine = mine[in_block]
                index = np.flatnonzero(in_block) + first
            rows = layout.gather(piece, mine, layout.BODY_AT, _POINTER_VOID).view(POINTER_DTYPE)
            sizes[index] += rows["size"].astype(np.int64) - POINTER_BYTES
            mine += rows["distance"]
            mine += layout.U64.unpack_from(piece, layout.JOURNAL_OFFSET_AT)[0]  # what is adjacent is so in the journal
            offsets[index] = mine
        base += len(piece)
        first = last
    return None if offsets is None else BlockUse(offsets, sizes)


def one_block(
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]], pieces: Sequence[memoryview]
) -> tuple[int, int] | None:
    """Of stored records whose first and last have their bodies in one block, where that stands in the journal, and how
    many bytes they take with their bodies in them; None for others.

    The bodies of a block follow each other as their records do, so those between need no look. Where some of these have
    their bodies in themselves, they take a pointer more each.
    """
    if len(pieces) != 1:
        return None
    piece = pieces[0]
    last = len(piece) - int(lengths[-1])
    if not piece[layout.FLAGS_AT] & piece[last + layout.FLAGS_AT] & _BLOCK:
        return None
    distance, first_place, _ = _POINTER.unpack_from(piece, layout.BODY_AT)
    last_distance, place, size = _POINTER.unpack_from(piece, last + layout.BODY_AT)
    if distance != last + last_distance or place < first_place:
        return None
    return _block_offset(piece), len(piece) - POINTER_BYTES * len(lengths) + place + size - first_place


def _has_blocks(lengths: Sequence[int] | npt.NDArray[np.integer[Any]], pieces: Sequence[memoryview]) -> bool:
    """Whether any of a few records, or of a few in each piece, has its body in a block, without arrays."""
    sizes = iter(lengths.tolist() if isinstance(lengths, np.ndarray) else lengths)
    for piece in pieces:
        at, end = layout.FLAGS_AT, len(piece)
        while at < end:
            if piece[at] & _BLOCK:
                return True
            at += next(sizes)
    return False


def _block_offset(record: Buffer, at: int = 0) -> int:
    """Where in the journal the block of a stored record stands."""
    stood_at: int = layout.U64.unpack_from(record, at + layout.JOURNAL_OFFSET_AT)[0]
    distance: int = _U32.unpack_from(record, at + layout.BODY_AT)[0]
    return stood_at + distance


class StoredBlocks(dict[int, memoryview]):
    """Blocks by where they stand in the journal, and what records that are stored there become with them.

    Attributes:
        used: by which records, if they all were read together.
        alone: if one block has the bodies of all records that were read, how many these are, and how many bytes they
            take with their bodies in them.
    """

    used: BlockUse | None = None
    alone: tuple[int, int] | None = None

    def behind(
        self, lengths: Sequence[int] | npt.NDArray[np.integer[Any]], pieces: Sequence[memoryview]
    ) -> list[Buffer] | None:
        """Records that were read, and their one block, if it follows them in the journal too, and pays; or None."""
        if self.alone is None or self.alone[0] != len(lengths) or len(pieces) != 1:
            return None
        (at, block), piece = next(iter(self.items())), pieces[0]
        stood_at: int = layout.U64.unpack_from(piece, layout.JOURNAL_OFFSET_AT)[0]
        if stood_at + len(piece) != at or len(piece) + len(block) > self.alone[1]:
            return None
        return [piece, block]

    def plain(self, record: memoryview, expand: Callable[[int, memoryview], bytes]) -> memoryview:
        """A record with its body in it, wherever that stands.

        Parameters:
            expand: makes the bytes of a block out of its place and itself; it may remember some.

        Raises:
            RecordCorrupt: its block cannot be expanded, or does not have the body.
        """
        if not record[layout.FLAGS_AT] & _BLOCK:
            return record
        at = _block_offset(record)
        return memoryview(plain(record, expand(at, self[at])))


def gather_blocks(
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]],
    pieces: Sequence[memoryview],
    blocks: Mapping[int, memoryview],
    used: BlockUse,
) -> list[Buffer]:
    """Stored records, and behind them the blocks that they need, each once: as frames carry them.

    Parameters:
        lengths: of the records.
        pieces: their bytes, in pieces of adjacent records, as the journal has them.
        blocks: those that they need, by where they stand in the journal.
        used: by which records.
    """
    places = used.blocks
    if len(pieces) == 1:
        following = layout.U64.unpack_from(pieces[0], layout.JOURNAL_OFFSET_AT)[0] + len(pieces[0])
        for place in places:
            if place != following:
                break
            following += len(blocks[place])
        else:  # they stand behind the records in the journal as well
            return [*pieces, *(blocks[place] for place in places)]
    sizes = np.asarray(lengths, np.int64)
    starts = np.cumsum(sizes) - sizes
    data = bytearray().join(pieces)
    in_block = used.offsets != 0
    mine, stood_at = starts[in_block], used.offsets[in_block]
    found: list[Buffer] = [data]
    placed: dict[int, int] = {}
    at = len(data)
    for offset in places:
        found.append(blocks[offset])
        placed[offset] = at
        at += len(blocks[offset])
    offsets = np.fromiter(placed, np.int64, len(placed))
    order = np.argsort(offsets)
    now_at = np.fromiter(placed.values(), np.int64, len(placed))[order]
    distances = now_at[np.searchsorted(offsets[order], stood_at)] - mine
    layout.scatter(data, mine, layout.BODY_AT, distances.astype(">u4"))
    return found


# --- the check of a batch ---------------------------------------------------------------------------------------------


def check_blocks(
    buffer: Buffer,
    starts: Positions,
    blocks_at: int,
    body_bytes_max: int,
    *,
    check_crc: bool = False,
) -> None:
    """Check the blocks of a batch, and that its records point into them as they should.

    Parameters:
        buffer: the records, then the blocks, and nothing else.
        starts: where each record begins; what else it says was checked.
        blocks_at: where the first block begins.
        check_crc: also check the checksum of each body.

    Raises:
        RecordCorrupt: a block or a pointer is not right.
    """
    begins: list[int] = []
    raw_sizes: list[int] = []
    at = blocks_at
    while at < len(buffer):
        block = _read_head(buffer, at)
        _check_crc(buffer, at, block)
        begins.append(at)
        raw_sizes.append(block.raw_size)
        at = block.end
    mine = starts[block_flags(buffer, starts)]
    if not len(mine) or not begins:
        raise RecordCorrupt(
            f"{len(mine)} records of the batch have their bodies in blocks, and it has {len(begins)} blocks: "
            "nothing of the batch was stored; send it again"
        )
    pointers = read_pointers(buffer, mine)
    # The bodies fill the blocks one after another: so no body is taken twice, and none reaches past its block.
    before = np.cumsum(pointers.size)
    filled = int(before[-1])
    before -= pointers.size
    is_wrong: npt.NDArray[np.bool_]
    if len(begins) == 1:  # as a rule
        is_wrong = (pointers.block_at != begins[0]) | (pointers.place != before)
    else:
        places, raw = np.array(begins), np.array(raw_sizes)
        number = np.minimum(np.searchsorted(places, pointers.block_at), len(places) - 1)
        is_wrong = (
            (places[number] != pointers.block_at)
            | (pointers.place + (np.cumsum(raw) - raw)[number] != before)
            | (pointers.place + pointers.size > raw[number])
        )
    if is_wrong.any() or filled != sum(raw_sizes) or int(pointers.size.max()) > body_bytes_max:
        raise RecordCorrupt(
            "the bodies of the batch do not fill its blocks as their records say: nothing of it was stored; send it "
            "again"
        )
    if check_crc:
        bodies = BodyBlocks(buffer).bodies(mine)
        if [*map(crc32c, bodies)] != layout.gather(buffer, mine, layout.CRC_AT + 4, ">u4").tolist():
            raise RecordCorrupt("a body of the batch does not match its CRC: nothing of it was stored; send it again")
