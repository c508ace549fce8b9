"""Runs: index entries of many queues in one file, sorted by queue.

A checkpoint writes one run instead of touching every queue's file. A framed table (key u64, first queue offset u64,
count u64, position u64 per queue, sorted by key) stands first; the 22-byte entries follow, queue after queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dmq.storage.entries import ENTRY_BYTES, ENTRY_DTYPE, Entries, pack_entries
from dmq.storage.files import File, Files
from dmq.storage.frames import FRAME_BYTES, DerivedDamaged, frame, read_exactly, read_framed
from dmq.storage.pool import FilePool

__all__ = ["FOLDER", "Run", "Tail", "merge_runs", "write_run"]

FOLDER: Final = "runs"
_MAGIC: Final = b"DMQR"
_TABLE: Final = np.dtype([("key", ">u8"), ("first", ">u8"), ("count", ">u8"), ("position", ">u8")])
_WRITE_BYTES: Final = 4 << 20


class Tail:
    """Entries of one queue not yet in a file, as growing columns."""

    __slots__ = ("first", "lengths", "offsets", "tags")

    def __init__(self, first: int) -> None:
        self.first = first
        self.offsets = array("Q")
        self.lengths = array("I")
        self.tags = array("H")

    def __len__(self) -> int:
        return len(self.offsets)


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
        raw = read_exactly(self._pool, self.path, position, count * ENTRY_BYTES)
        return np.frombuffer(raw, ENTRY_DTYPE)


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
    within = np.arange(len(offsets), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    queue_offsets = np.repeat(table["first"].astype(np.uint64), counts) + within.astype(np.uint64)
    entries = pack_entries(np.repeat(table["key"].astype(np.uint64), counts), queue_offsets, offsets, lengths, tags)
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        file.write(0, (head, entries.tobytes()))
        file.sync()
    finally:
        file.close()


def merge_runs(
    files: Files,
    path: str,
    runs: Sequence[Run],
    *,
    first_kept: Callable[[int], int | None],
    drain: Callable[[int, int, list[Entries]], bool],
) -> None:
    """Write one flushed run with the entries of several, which follow each other in time.

    Parameters:
        path: of the new run.
        runs: oldest first.
        first_kept: for a queue key, the oldest queue offset still wanted; None where the queue is gone.
        drain: offered (key, first queue offset, entries); True means it took them and they need not stay in runs.
    """
    rows: list[tuple[int, int, int]] = []
    file = files.open(path, create=True, write=True)
    try:
        file.truncate(0)
        keys = np.unique(np.concatenate([run.keys for run in runs])).tolist()
        # The table comes first in the file but is known last, so room is left for the largest it can become.
        start = FRAME_BYTES + _TABLE.itemsize * len(keys)
        spill = _Writer(file, start)
        for key in keys:
            wanted = first_kept(key)
            if wanted is None:
                continue
            first, parts = _collect(runs, key, wanted)
            if not parts or drain(key, first, parts):
                continue
            rows.append((key, first, sum(len(part) for part in parts)))
            for part in parts:
                spill.add(part.tobytes())
        spill.flush()
        table = _table(rows)
        table["position"] += np.uint64(start - FRAME_BYTES - table.nbytes)
        file.write(0, (frame(_MAGIC, table.tobytes()),))
        file.sync()
    finally:
        file.close()


def _collect(runs: Sequence[Run], key: int, wanted: int) -> tuple[int, list[Entries]]:
    """The entries of one queue from `wanted` on, and the queue offset of the first."""
    parts: list[Entries] = []
    first = following = -1
    for run in runs:
        row = run.row(key)
        if row is None or row[0] + row[1] <= wanted:
            continue
        skip = max(0, wanted - row[0])
        if following >= 0 and row[0] != following:
            raise DerivedDamaged(f"{run.path} does not follow the run before it")
        if not parts:
            first = row[0] + skip
        following = row[0] + row[1]
        parts.append(run.read(row[2] + skip * ENTRY_BYTES, row[1] - skip))
    return first, parts
