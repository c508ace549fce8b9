"""The queue index: for every queue, where its messages stand in the journal.

Entries of the last units wait in memory; a checkpoint writes those of all queues as one sorted run, instead of touching
every queue's file; runs are merged from time to time, and a queue that has gathered enough entries gets them in files
of its own: `queue/<topic>@<topic id>/<queue>/<first queue offset>.queue`, bare 22-byte entries. In a run a framed table
(key u64, first queue offset u64, count u64, position u64 per queue, sorted by key) stands first; the entries follow,
queue after queue.

An entry (22 bytes, big-endian) says where a message of a queue stands in the journal:

    0  u64 journal offset · 8  u32 record length · 12  u16 tag hash · 14  u64 checksum

The checksum covers the other fields and what the entry's place claims (queue key, queue offset), so that an entry
copied to a wrong place is as wrong as one with a flipped bit. An entry of length 0 stands for a message whose unit was
lost; its journal offset tells where the unit was.

What always holds: for each queue, files, then runs oldest to newest, then the frozen and the active tail hold its
entries in order, without a gap, from the first kept offset to the next one; `filed` says where files end.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dmq.storage.file_pool import FilePool, remove_tree
from dmq.storage.files import File, Files
from dmq.storage.index.block_file import (
    FRAME_BYTES,
    PIECE_ENTRIES,
    DerivedDamaged,
    frame,
    merge_from,
    read_exactly,
    read_framed,
)

__all__ = [
    "ENTRY_BYTES",
    "ENTRY_DTYPE",
    "FOLDER",
    "RUNS_FOLDER",
    "Columns",
    "Entries",
    "QueueIndex",
    "Run",
    "Tail",
    "checksum",
    "choose_entries",
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


RUNS_FOLDER: Final = "runs"
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
            if begin > start and int(ends[end - 1]) - before > self.piece_entries:  # with this one, too many
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


FOLDER: Final = "queue"
# A queue gets entries into its own file only so many at a time: each file written costs a flush.
DRAIN_MIN: Final = 1024
# And no more queues than this in one checkpoint: those that have at least such a share of all entries.
DRAINED_MAX: Final = 64
# So many pay for their flush however many queues have them; without it, runs of many even queues would grow for ever.
DRAIN_ALWAYS: Final = 16_384
FILE_ENTRIES_MAX: Final = 1 << 20
# So many entries are read at a time, first and later: a reader that asks for a million may be content with a few.
_PIECE: Final = 4096
_PIECE_MAX: Final = 16_384
_NEAR: Final = 512  # entries around a guess
_GUESSES: Final = 4  # by the place in the journal, before the rest is halved
_FILE: Final = re.compile(r"(\d{20})\.queue")


class Columns(NamedTuple):
    """Index entries of consecutive messages of one queue."""

    first: int
    offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint32]
    tags: npt.NDArray[np.uint16]


class QueueIndex:
    """The entries of all queues. `folder_of` gives the folder name of a topic id, None when the topic is gone."""

    def __init__(
        self,
        files: Files,
        pool: FilePool,
        folder_of: Callable[[int], str | None],
        *,
        piece_entries: int = PIECE_ENTRIES,
    ) -> None:
        self._piece_entries = piece_entries
        self._files = files
        self._pool = pool
        self._folder_of = folder_of
        self._active: dict[int, Tail] = {}
        self._frozen: dict[int, Tail] | None = None
        self.runs: list[Run] = []
        self.filed: dict[int, int] = {}
        self._file_firsts: dict[int, list[int]] = {}
        self.buffered = 0

    # --- taking in --------------------------------------------------------------------------------------------------

    def add(self, key: int, first: int, offsets: Any, lengths: Any, tags: Any) -> None:
        """Entries of a batch, following what the queue has; columns are lists or arrays."""
        tail = self._active.get(key)
        if tail is None:
            tail = self._active[key] = Tail(first)
        if isinstance(offsets, np.ndarray):
            tail.blocks.append((offsets, lengths, tags))
        else:
            tail.gather()
            tail.offsets.extend(offsets)
            tail.lengths.extend(lengths)
            tail.tags.extend(tags)
        self.buffered += len(offsets)

    def add_one(self, key: int, first: int, offset: int, length: int, tag: int) -> None:
        """`add` for a batch of one."""
        tail = self._active.get(key)
        if tail is None:
            tail = self._active[key] = Tail(first)
        if tail.blocks:
            tail.gather()
        tail.offsets.append(offset)
        tail.lengths.append(length)
        tail.tags.append(tag)
        self.buffered += 1

    def drop_topic(self, topic_id: int) -> None:
        """Forget the queues of a topic; its files go with the next `remove_folders`."""
        for holder in (self._active, self._frozen or {}, self.filed, self._file_firsts):
            # Listed first: a checkpoint that is being written may look up files meanwhile.
            for key in [key for key in list(holder) if key >> 8 == topic_id]:
                del holder[key]

    # --- reading ----------------------------------------------------------------------------------------------------

    def columns(self, key: int, start: int, stop: int) -> Iterator[Columns]:
        """The entries [start, stop) in pieces, as they lie in files, runs and memory; the range must exist.

        Raises:
            DerivedDamaged: a file does not have what it should.
        """
        at, count = start, _PIECE
        while at < stop:
            piece = self.piece(key, at, min(stop, at + count))
            at += len(piece.offsets)
            yield piece
            count = min(2 * count, _PIECE_MAX)

    def first_behind(self, key: int, journal_offset: int, among: range, within: range) -> int:
        """The first offset whose message stands at a journal offset or behind it; the end of `among` if none does.

        Parameters:
            among: offsets of the queue, all of which there are.
            within: the range of the journal in which their messages stand. Most queues fill evenly, so that it takes
                two or three reads.

        Raises:
            DerivedDamaged: a file does not have what it should.
        """
        low, high = among.start, among.stop
        left, right = within.start, within.stop
        for attempt in itertools.count():
            if low >= high:
                return low
            part = (journal_offset - left) / max(1, right - left) if attempt < _GUESSES else 0.5
            guess = low + int(min(max(part, 0.0), 1.0) * (high - low))
            first = max(low, min(guess - _NEAR // 2, high - _NEAR))
            piece = self.piece(key, first, min(high, first + _NEAR))
            behind = int(np.searchsorted(piece.offsets, np.uint64(journal_offset)))
            if 0 < behind < len(piece.offsets) or (not behind and first == low):
                return first + behind
            if behind:
                low, left = first + behind, int(piece.offsets[-1])
            else:
                high, right = first, int(piece.offsets[0])
        raise AssertionError("unreachable")

    def newest(self, key: int, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Journal offsets and lengths of the entries [start, stop); None if they are not the ones taken in last."""
        tail = self._active.get(key)
        if tail is None or start < tail.first:
            return None
        tail.gather()
        i, j = start - tail.first, stop - tail.first
        return [*zip(tail.offsets[i:j], tail.lengths[i:j], strict=True)]

    def piece(self, key: int, at: int, stop: int) -> Columns:
        """The entries [at, stop), at least one, as far as they lie together; the range must exist.

        Raises:
            DerivedDamaged: a file does not have what it should.
        """
        active = self._active.get(key)
        if active is not None and at >= active.first:
            return _of_tail(active, at, stop)
        frozen = self._frozen.get(key) if self._frozen else None
        if frozen is not None and at >= frozen.first:
            return _of_tail(frozen, at, stop)
        if at < self.filed.get(key, 0):
            return self._of_files(key, at, min(stop, self.filed[key]))
        for run in self.runs:
            row = run.row(key)
            if row is not None and row[0] <= at < row[0] + row[1]:
                count = min(stop, row[0] + row[1]) - at
                return _checked(key, at, run.read(row[2] + (at - row[0]) * ENTRY_BYTES, count), run.path)
        raise DerivedDamaged(f"no index entry for offset {at} of queue {key & 255} of topic {key >> 8}")

    def _of_files(self, key: int, at: int, stop: int) -> Columns:
        firsts = self._firsts(key)
        holding = [first for first in firsts if first <= at]
        if not holding:
            raise DerivedDamaged(f"no queue file has offset {at} of queue {key & 255} of topic {key >> 8}")
        first = holding[-1]
        following = next((later for later in firsts if later > at), stop)
        path = f"{self._folder(key)}/{first:020d}.queue"
        count = min(stop, following) - at
        raw = read_exactly(self._pool, path, (at - first) * ENTRY_BYTES, count * ENTRY_BYTES)
        return _checked(key, at, np.frombuffer(raw, ENTRY_DTYPE), path)

    def _folder(self, key: int) -> str:
        return f"{FOLDER}/{self._folder_of(key >> 8)}/{key & 255}"

    def _firsts(self, key: int) -> list[int]:
        firsts = self._file_firsts.get(key)
        if firsts is None:
            names = self._files.listdir(self._folder(key))
            firsts = [int(match[1]) for name in names if (match := _FILE.fullmatch(name))]
            # A file that begins beyond what the checkpoint vouches for is a crashed attempt's.
            firsts = self._file_firsts[key] = [first for first in firsts if first < self.filed.get(key, 0)]
        return firsts

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Set aside what a checkpoint is about to write; it stays readable."""
        assert self._frozen is None
        for tail in self._active.values():
            tail.gather()  # here: a thread writes what is frozen, while it is still read
        self._frozen, self._active = self._active, {}
        self.buffered = 0

    def unfreeze(self) -> None:
        """The checkpoint failed: what was set aside waits for the next one."""
        if self._frozen is None:
            return
        for key, tail in self._active.items():
            before = self._frozen.get(key)
            if before is None:
                self._frozen[key] = tail
            else:
                tail.gather()
                before.offsets.extend(tail.offsets)
                before.lengths.extend(tail.lengths)
                before.tags.extend(tail.tags)
        self._active, self._frozen = self._frozen, None
        self.buffered = sum(map(len, self._active.values()))

    def write_frozen(self, sequence: int) -> str | None:
        """Write what was set aside as a run; returns its path, None if there was nothing."""
        if not self._frozen:
            return None
        path = f"{RUNS_FOLDER}/{sequence:020d}.run"
        write_run(self._files, path, dict(self._frozen))  # a topic may be dropped meanwhile
        return path

    def merge(self, sequence: int, paths: list[str], first_kept: Callable[[int], int | None]) -> Merged:
        """Merge the newest of the runs where it is time to; nothing of the index in use changes until `adopt`.

        Parameters:
            sequence: the checkpoint's number, for the new file's name.
            paths: all runs, oldest first, the one just written included.
            first_kept: for a queue key, the oldest offset still wanted; None where the queue is gone.
        """
        known = {run.path: run for run in self.runs}
        runs = [known.get(path) or Run(self._pool, path) for path in paths]
        first = merge_from([run.entries for run in runs])
        if first is None:
            return Merged(runs, {}, {})
        filed: dict[int, int] = {}
        firsts: dict[int, list[int]] = {}

        enough = min(max(DRAIN_MIN, sum(run.entries for run in runs) // DRAINED_MAX), DRAIN_ALWAYS)

        def drain(key: int, start: int, count: int, parts: Iterable[Entries]) -> bool:
            # Only a merge of everything sees a queue's oldest entries, which must go into its file first.
            if first != 0 or count < enough:
                return False
            filed[key], firsts[key] = self._append_file(key, start, parts)
            return True

        path = f"{RUNS_FOLDER}/{sequence:020d}.merged"
        merge_runs(
            self._files, path, runs[first:], first_kept=first_kept, drain=drain, piece_entries=self._piece_entries
        )
        return Merged([*runs[:first], Run(self._pool, path)], filed, firsts)

    def _append_file(self, key: int, start: int, parts: Iterable[Entries]) -> tuple[int, list[int]]:
        """Append entries to a queue's files, flushed; returns (new end of files, first offsets of its files)."""
        folder = self._folder(key)
        self._files.mkdir(folder)
        firsts = list(self._firsts(key))
        at = self.filed.get(key, 0)
        if not firsts or start != at or at - firsts[-1] >= FILE_ENTRIES_MAX:
            firsts.append(start)
            at = start
        path = f"{folder}/{firsts[-1]:020d}.queue"
        file = self._files.open(path, create=True, write=True)
        try:
            position = end = (at - firsts[-1]) * ENTRY_BYTES
            # What a crashed attempt may have left beyond must not be taken for ours.
            file.truncate(position)
            for part in parts:
                file.write(end, (part.tobytes(),))
                end += len(part) * ENTRY_BYTES
            file.sync()
        finally:
            file.close()
        self._pool.drop(path)
        if not position:  # it is new, or a failed attempt at it is not known to be durable
            for name in (folder, folder.rpartition("/")[0], FOLDER):
                self._files.sync_dir(name)
        return firsts[-1] + end // ENTRY_BYTES, firsts

    def restore(self, paths: list[str], filed: dict[int, int]) -> None:
        """Become what a checkpoint says; called on a new index only."""
        self.runs = [Run(self._pool, path) for path in paths]
        self.filed = filed

    def adopt(self, merged: Merged) -> None:
        """Use the files of a checkpoint that is now in force."""
        self.runs = merged.runs
        self.filed.update(merged.filed)
        self._file_firsts.update(merged.firsts)
        self._frozen = None

    def remove_old(self, first_kept: Callable[[int], int | None], folders: set[str]) -> None:
        """Delete queue files nobody needs: below the first kept offset, or of topics that are gone.

        Parameters:
            first_kept: as for `merge`.
            folders: the folder names of all topics there are.
        """
        for key in list(self.filed):
            wanted = first_kept(key)
            firsts = self._firsts(key)
            while wanted is not None and len(firsts) > 1 and firsts[1] <= wanted:
                path = f"{self._folder(key)}/{firsts.pop(0):020d}.queue"
                self._pool.drop(path)
                self._files.unlink(path)
        for name in self._files.listdir(FOLDER):
            if name not in folders:
                remove_tree(self._files, self._pool, f"{FOLDER}/{name}")


class Merged(NamedTuple):
    """What a checkpoint made of the runs."""

    runs: list[Run]
    filed: dict[int, int]
    firsts: dict[int, list[int]]


def _of_tail(tail: Tail, at: int, stop: int) -> Columns:
    i, j = at - tail.first, min(stop - tail.first, len(tail))
    if i >= j:
        raise DerivedDamaged(f"offset {at} is beyond what is indexed")
    # Slices copy, so that the growing columns stay free to move.
    return Columns(
        at,
        np.frombuffer(tail.offsets[i:j], np.uint64),
        np.frombuffer(tail.lengths[i:j], np.uint32),
        np.frombuffer(tail.tags[i:j], np.uint16),
    )


def _checked(key: int, first: int, entries: Entries, path: str) -> Columns:
    offsets = entries["offset"].astype(np.uint64)
    lengths = entries["length"].astype(np.uint32)
    tags = entries["tag"].astype(np.uint16)
    numbers = np.arange(first, first + len(entries), dtype=np.uint64)
    if not np.array_equal(checksum(key, numbers, offsets, lengths, tags=tags), entries["check"]):
        raise DerivedDamaged(f"{path} has wrong entries for queue {key & 255} of topic {key >> 8}")
    return Columns(first, offsets, lengths, tags)


def _passing(hashes: npt.NDArray[np.uint16], tags: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which of the hashes a filter lets through."""
    if len(tags) == 1:
        one: npt.NDArray[np.bool_] = hashes == tags[0]
        return one
    passes = np.zeros(1 << 16, np.bool_)  # a look-up each, however many tags there are
    passes[list(tags)] = True
    return passes.take(hashes)


def choose_entries(
    columns: Columns, tags: Sequence[int] | None, room: int, space: int, *, first: bool
) -> tuple[Columns, npt.NDArray[np.uint64], int, bool]:
    """What of the entries is wanted and fits.

    Returns (entries, queue offsets, where to read on, whether the room is used up).
    """
    count = len(columns.offsets)
    wanted: npt.NDArray[np.int64] | None = None
    if tags is not None:
        wanted = np.flatnonzero(_passing(columns.tags, tags) | (columns.lengths == 0))[:room]
    fit = taken = min(count, room) if wanted is None else len(wanted)
    lengths = columns.lengths[:taken] if wanted is None else columns.lengths[wanted]
    if int(lengths.sum(dtype=np.int64)) > space:
        fit = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), space, side="right"))
    if first and taken and not fit:
        fit = 1
    full = fit < taken or fit == room
    if not full:
        after = columns.first + count
    elif not fit:
        after = columns.first
    else:
        after = columns.first + (fit if wanted is None else int(wanted[fit - 1]) + 1)
    if wanted is None:
        if fit < count:
            columns = Columns(columns.first, columns.offsets[:fit], columns.lengths[:fit], columns.tags[:fit])
        return columns, np.arange(columns.first, columns.first + fit, dtype=np.uint64), after, full
    chosen = wanted[:fit]
    entries = Columns(columns.first, columns.offsets[chosen], columns.lengths[chosen], columns.tags[chosen])
    return entries, chosen.astype(np.uint64) + np.uint64(columns.first), after, full
