"""The queue index: for every queue, where its messages stand in the journal.

Entries of the last units wait in memory; a checkpoint writes those of all queues as one sorted run; runs are merged
from time to time, and a queue that has gathered enough entries gets them in files of its own:
`queue/<topic>@<topic id>/<queue>/<first queue offset>.queue`, bare 22-byte entries.

What always holds: for each queue, files, then runs oldest to newest, then the frozen and the active tail hold its
entries in order, without a gap, from the first kept offset to the next one; `filed` says where files end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dmq.storage.file_pool import FilePool, remove_tree
from dmq.storage.files import Files
from dmq.storage.index.block_file import PIECE_ENTRIES, DerivedDamaged, merge_from, read_exactly
from dmq.storage.index.index_run import ENTRY_BYTES, ENTRY_DTYPE, Entries, Run, Tail, checksum, merge_runs, write_run
from dmq.storage.index.index_run import FOLDER as RUNS

__all__ = ["FOLDER", "Columns", "QueueIndex"]

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
        path = f"{RUNS}/{sequence:020d}.run"
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

        path = f"{RUNS}/{sequence:020d}.merged"
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
