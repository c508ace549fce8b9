"""Runs: index entries of many queues in one file, sorted by queue.

A checkpoint writes one run instead of touching every queue's file. A framed table (key u64, first queue offset u64,
count u64, position u64 per queue, sorted by key) stands first; the 22-byte entries follow, queue after queue.

Queue index entries (22 bytes, big-endian): where each message of a queue stands in the journal.

    0  u64 journal offset · 8  u32 record length · 12  u16 tag hash · 14  u64 checksum

The checksum covers the other fields and what the entry's place claims (queue key, queue offset), so that an entry
copied to a wrong place is as wrong as one with a flipped bit. An entry of length 0 stands for a message whose unit was
lost; its journal offset tells where the unit was.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmq.storage.file_pool import FilePool
from dmq.storage.files import File, Files
from dmq.storage.index.block_file import FRAME_BYTES, PIECE_ENTRIES, DerivedDamaged, frame, read_exactly, read_framed

__all__ = [
    "ENTRY_BYTES",
    "ENTRY_DTYPE",
    "FOLDER",
    "Run",
    "Tail",
    "checksum",
    "merge_runs",
    "pack_entries",
    "valid",
    "write_run",
]

ENTRY_DTYPE: Final = np.dtype([("offset", ">u8"), ("length", ">u4"), ("tag", ">u2"), ("check", ">u8")])
ENTRY_BYTES: Final = ENTRY_DTYPE.itemsize
assert ENTRY_BYTES == 22

_A: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_B: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_C: Final = np.uint64(0x94D0_49BB_1331_11EB)

Entries = npt.NDArray[np.void]


def checksum(
    key: int | npt.NDArray[np.uint64],
    queue_offsets: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint32],
    tags: npt.NDArray[np.uint16],
) -> npt.NDArray[np.uint64]:
    """splitmix64's finisher over a linear mix of the fields; a whole batch at a time."""
    x = np.asarray(offsets, np.uint64) * _A
    shape = lengths.astype(np.uint64)
    shape <<= np.uint64(16)
    shape |= tags
    shape *= _B
    x ^= shape
    place = np.asarray(queue_offsets, np.uint64) * _C
    place += np.asarray(key, np.uint64) * _A
    x += place
    x ^= x >> np.uint64(30)
    x *= _B
    x ^= x >> np.uint64(27)
    x *= _C
    x ^= x >> np.uint64(31)
    return x


def pack_entries(
    key: int | npt.NDArray[np.uint64],
    queue_offsets: npt.NDArray[np.uint64],
    offsets: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    tags: npt.NDArray[Any],
) -> Entries:
    """The entries as they stand in files."""
    entries = np.empty(len(offsets), ENTRY_DTYPE)
    entries["offset"] = offsets
    entries["length"] = lengths
    entries["tag"] = tags
    entries["check"] = checksum(key, queue_offsets, offsets, lengths, tags=tags)
    return entries


def valid(key: int, first_queue_offset: int, entries: Entries) -> npt.NDArray[np.bool_]:
    """Which entries are what was written for the queue from that offset on."""
    queue_offsets = np.arange(first_queue_offset, first_queue_offset + len(entries), dtype=np.uint64)
    checks = checksum(
        key,
        queue_offsets,
        entries["offset"].astype(np.uint64),
        entries["length"].astype(np.uint32),
        tags=entries["tag"].astype(np.uint16),
    )
    matches: npt.NDArray[np.bool_] = checks == entries["check"]
    return matches


FOLDER: Final = "runs"
_MAGIC: Final = b"DMQR"
_TABLE: Final = np.dtype([("key", ">u8"), ("first", ">u8"), ("count", ">u8"), ("position", ">u8")])
_WRITE_BYTES: Final = 4 << 20
_GONE: Final = (1 << 63) - 1


class Tail:
    """Entries of one queue not yet in a file, as growing columns.

    Attributes:
        blocks: offsets, lengths and tags of batches that came last, behind the columns, until somebody looks: columns
            that grow are copied again and again.
    """

    __slots__ = ("blocks", "first", "lengths", "offsets", "tags")

    def __init__(self, first: int) -> None:
        self.first = first
        self.offsets = array("Q")
        self.lengths = array("I")
        self.tags = array("H")
        self.blocks: list[tuple[npt.NDArray[Any], npt.NDArray[np.uint32], npt.NDArray[np.uint16]]] = []

    def gather(self) -> Tail:
        """Put the blocks behind the columns."""
        if self.blocks:
            blocks, self.blocks = self.blocks, []
            offsets, lengths, tags = zip(*blocks, strict=True)
            self.offsets.frombytes(b"".join(offsets))
            self.lengths.frombytes(b"".join(lengths))
            self.tags.frombytes(b"".join(tags))
        return self

    def __len__(self) -> int:
        return len(self.gather().offsets)


class Run:
    """One run file, its table in memory."""

    __slots__ = ("_pool", "counts", "entries", "firsts", "keys", "path", "positions")

    def __init__(self, pool: FilePool, path: str) -> None:
        self._pool = pool
        self.path = path
        table = np.frombuffer(read_framed(pool, path, _MAGIC), _TABLE)
        self._take(table)

    def _take(self, table: npt.NDArray[np.void]) -> None:
        self.keys = table["key"].astype(np.uint64)
        self.firsts = table["first"].astype(np.uint64)
        self.counts = table["count"].astype(np.uint64)
        self.positions = table["position"].astype(np.uint64)
        self.entries = int(self.counts.sum())

    def row(self, key: int) -> tuple[int, int, int] | None:
        """(first queue offset, count, position) of a queue."""
        at = int(np.searchsorted(self.keys, np.uint64(key)))
        if at == len(self.keys) or int(self.keys[at]) != key:
            return None
        return int(self.firsts[at]), int(self.counts[at]), int(self.positions[at])

    def read(self, position: int, count: int) -> Entries:
        return np.frombuffer(self.read_bytes(position, count), ENTRY_DTYPE)

    def read_bytes(self, position: int, count: int) -> bytes:
        return read_exactly(self._pool, self.path, position, count * ENTRY_BYTES)


class _Writer:
    """Collects what is written into a run so that it goes out in large pieces."""

    def __init__(self, file: File, position: int) -> None:
        self._file = file
        self._pending: list[bytes] = []
        self._size = 0
        self.position = position

    def add(self, data: bytes) -> None:
        self._pending.append(data)
        self._size += len(data)
        if self._size >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._file.write(self.position, (b"".join(self._pending),))
            self.position += self._size
            self._pending, self._size = [], 0


def _table(rows: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.void]:
    """The table for (key, first, count) rows, positions filled in."""
    table = np.empty(len(rows), _TABLE)
    if rows:
        columns = np.array(rows, np.uint64)
        table["key"], table["first"], table["count"] = columns[:, 0], columns[:, 1], columns[:, 2]
        ends = np.cumsum(columns[:, 2]) * np.uint64(ENTRY_BYTES)
        table["position"] = ends - columns[:, 2] * np.uint64(ENTRY_BYTES) + np.uint64(FRAME_BYTES + table.nbytes)
    return table


def write_run(files: Files, path: str, tails: Mapping[int, Tail]) -> None:
    """Write the tails of all queues as one flushed run."""
    keys = sorted(key for key, tail in tails.items() if len(tail))
    table = _table([(key, tails[key].first, len(tails[key])) for key in keys])
    head = frame(_MAGIC, table.tobytes())
    counts = table["count"].astype(np.int64)
    offsets = np.frombuffer(b"".join(tails[key].offsets for key in keys), np.uint64)
    lengths = np.frombuffer(b"".join(tails[key].lengths for key in keys), np.uint32)
    tags = np.frombuffer(b"".join(tails[key].tags for key in keys), np.uint16)
    of = np.repeat(table["key"].astype(np.uint64), counts)
    # The first offset of a queue, less the place of its first entry here.
    firsts = table["first"].astype(np.int64) - (np.cumsum(counts) - counts)
    queue_offsets = (np.repeat(firsts, counts) + np.arange(len(offsets), dtype=np.int64)).view(np.uint64)
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (head,))
        for at in range(0, len(offsets), PIECE_ENTRIES):
            some = slice(at, at + PIECE_ENTRIES)
            entries = pack_entries(of[some], queue_offsets[some], offsets[some], lengths[some], tags=tags[some])
            file.write(len(head) + at * ENTRY_BYTES, (entries.tobytes(),))
        file.sync()
    finally:
        file.close()


def merge_runs(
    files: Files,
    path: str,
    runs: Sequence[Run],
    *,
    first_kept: Callable[[int], int | None],
    drain: Callable[[int, int, int, Iterable[Entries]], bool],
    piece_entries: int = PIECE_ENTRIES,
) -> None:
    """Write one flushed run with the entries of several, which follow each other in time.

    Parameters:
        path: of the new run.
        runs: oldest first.
        first_kept: for a queue key, the oldest queue offset still wanted; None where the queue is gone.
        piece_entries: how many are in memory at a time, more or less.
        drain: offered (key, first queue offset, count, entries in pieces); True means it took them and they need not
            stay in runs.
    """
    rows: list[tuple[int, int, int]] = []
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        stretches = _Stretches(runs, first_kept, piece_entries)
        # The table comes first in the file but is known last, so room is left for the largest it can become.
        start = FRAME_BYTES + _TABLE.itemsize * stretches.queues
        spill = _Writer(file, start)
        for piece in stretches.pieces():
            for key, first, count, parts in piece.queues():
                if not drain(key, first, count, parts):
                    rows.append((key, first, count))
                    for part in parts:
                        spill.add(part.tobytes())
        spill.flush()
        table = _table(rows)
        table["position"] += np.uint64(start - FRAME_BYTES - table.nbytes)
        file.write(0, (frame(_MAGIC, table.tobytes()),))
        file.sync()
    finally:
        file.close()


class _Stretches:
    """What several runs have of each queue, as columns: by queue, and within a queue oldest first."""

    def __init__(self, runs: Sequence[Run], first_kept: Callable[[int], int | None], piece_entries: int) -> None:
        self.piece_entries = piece_entries
        keys = np.concatenate([run.keys for run in runs])
        firsts = np.concatenate([run.firsts for run in runs]).astype(np.int64)
        counts = np.concatenate([run.counts for run in runs]).astype(np.int64)
        positions = np.concatenate([run.positions for run in runs]).astype(np.int64)
        numbers = np.repeat(np.arange(len(runs)), [len(run.keys) for run in runs])
        queues, where = np.unique(keys, return_inverse=True)
        oldest = [first_kept(key) for key in queues.tolist()]
        wanted = np.array([_GONE if first is None else first for first in oldest], np.int64)[where]
        skip = np.maximum(wanted - firsts, 0)
        kept = np.flatnonzero(skip < counts)
        order = kept[np.lexsort((numbers[kept], keys[kept]))]
        self._runs = runs
        self.queues = len(queues)
        self.keys = keys[order]
        self.firsts = (firsts + skip)[order]
        self.counts = (counts - skip)[order]
        self.positions = (positions + skip * ENTRY_BYTES)[order]
        self.numbers = numbers[order]
        same = self.keys[1:] == self.keys[:-1]
        apart = np.flatnonzero(same & (self.firsts[1:] != (self.firsts + self.counts)[:-1]))
        if len(apart):
            path = runs[int(self.numbers[apart[0] + 1])].path
            raise DerivedDamaged(f"{path} does not follow the run before it")
        self.begins = np.flatnonzero(np.concatenate([[True], ~same])) if len(order) else order

    def pieces(self) -> Iterator[_Piece]:
        """Some whole queues at a time, so that only so much is in memory; a large one alone, which gives its entries
        in pieces."""
        ends = np.cumsum(self.counts)
        bounds = np.append(self.begins, len(self.keys)).tolist()
        start = 0
        for begin, end in itertools.pairwise(bounds):
            before = int(ends[start - 1]) if start else 0
            if (
                begin > start and int(ends[end - 1]) - before > self.piece_entries
            ):  # with this one they would be too many
                yield _Piece(self, start, begin)
                start = begin
        if start < len(self.keys):
            yield _Piece(self, start, len(self.keys))

    def read(self, run: int, position: int, count: int) -> bytes:
        return self._runs[run].read_bytes(position, count)


class _Piece:
    """The stretches of some queues."""

    def __init__(self, of: _Stretches, start: int, stop: int) -> None:
        self._of = of
        self._keys, self._firsts = of.keys[start:stop], of.firsts[start:stop]
        self._counts, self._positions = of.counts[start:stop], of.positions[start:stop]
        self._numbers = of.numbers[start:stop]

    def queues(self) -> Iterator[tuple[int, int, int, Iterator[Entries]]]:
        """Key, first queue offset, count, and entries in pieces, of each queue."""
        begins = np.flatnonzero(np.concatenate([[True], self._keys[1:] != self._keys[:-1]]))
        counts = np.add.reduceat(self._counts, begins).tolist()
        keys, firsts = self._keys[begins].tolist(), self._firsts[begins].tolist()
        if len(keys) == 1 and counts[0] > self._of.piece_entries:
            yield keys[0], firsts[0], counts[0], self._pieces()
            return
        entries, at = self._entries(), 0
        for key, first, count in zip(keys, firsts, counts, strict=True):
            mine = entries[at : at + count]
            at += count
            yield key, first, count, iter((mine,))

    def _pieces(self) -> Iterator[Entries]:
        """The entries of the one queue that this is, in order."""
        size = self._of.piece_entries
        stretches = zip(self._numbers.tolist(), self._positions.tolist(), self._counts.tolist(), strict=True)
        for number, position, count in stretches:
            for at in range(0, count, size):
                raw = self._of.read(number, position + at * ENTRY_BYTES, min(size, count - at))
                yield np.frombuffer(raw, ENTRY_DTYPE)

    def _entries(self) -> Entries:
        """All entries of all these queues, in order."""
        # Read as they lie in the files, neighbours together; then put in order, all at once.
        lying = np.lexsort((self._positions, self._numbers))
        numbers, positions, counts = self._numbers[lying], self._positions[lying], self._counts[lying]
        follows = (numbers[1:] == numbers[:-1]) & (positions[1:] == (positions + counts * ENTRY_BYTES)[:-1])
        begins = np.flatnonzero(np.concatenate([[True], ~follows]))
        sizes = np.add.reduceat(counts, begins).tolist()
        raw = b"".join(
            [
                self._of.read(number, position, size)
                for number, position, size in zip(
                    numbers[begins].tolist(), positions[begins].tolist(), sizes, strict=True
                )
            ]
        )
        starts = np.empty(len(lying), np.int64)
        starts[lying] = np.cumsum(counts) - counts  # of each stretch, in what was read
        moved = starts - (np.cumsum(self._counts) - self._counts)
        index = np.repeat(moved, self._counts) + np.arange(int(self._counts.sum()))
        # As plain bytes: as fields, numpy would turn them into the machine's order.
        return np.frombuffer(raw, f"V{ENTRY_BYTES}")[index].view(ENTRY_DTYPE)
