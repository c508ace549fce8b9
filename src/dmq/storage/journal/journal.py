"""The journal: segments named by the offset they start at, written at one end, read anywhere, and kept in memory.

What always holds: bytes below `end` are never changed; a segment is flushed before the next one begins, so only the
last can have a torn tail; a failed write leaves nothing behind (the file is cut back to `end`); after a failed flush
nothing is written any more and the flush is not tried again.

Segments may leave a gap between them where damage was found: a range no unit can be read from.

The flush policy: whether the event loop flushes for a lone request itself, or a thread does.

The way to a thread and back costs a lone request as much as a flush on a quick disk, and there is nothing to gather
meanwhile. But the loop must not wait long: heartbeats and all other clients wait with it.

Pure code. What always holds: the loop flushes only while flushes took less than a millisecond on average, the last ones
counting most, so that one that is late now and then changes nothing; after one that took the loop over 20 ms, threads
flush for fifty times as long, so that the loop spends at most a fiftieth of its time in such flushes.

The window cache: ranges of the journal known to be good, units just written and units read and verified.

What always holds: a window holds whole units, one after another without a gap; all windows together take at most
`bytes_max` of memory, with what it costs to keep a buffer as such, but for the one used last.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from dmq.errors import Damaged, DMQError, ForeignFile, StorageError, StoreFailed
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Buffer, File, Files

__all__ = [
    "FOLDER",
    "FlushPolicy",
    "FlushTicket",
    "Journal",
    "Segment",
    "SegmentRead",
    "WindowCache",
    "list_segments",
    "segment_path",
]

FOLDER: Final = "journal"
_NAME: Final = re.compile(r"(\d{20})\.journal")


# A segment that has grown so large takes space for what follows, so much at a time.
_RESERVE_FROM_BYTES: Final = 1 << 20
_RESERVE_BYTES: Final = 4 << 20
_NEVER: Final = 1 << 63


def segment_path(start: int) -> str:
    return f"{FOLDER}/{start:020d}.journal"


class Segment:
    """One file of the journal."""

    __slots__ = ("newest_ms", "size", "start", "stored_at_ms")

    def __init__(self, start: int, size: int, stored_at_ms: int = 0) -> None:
        self.start = start
        self.size = size
        self.stored_at_ms = stored_at_ms  # of its first unit
        self.newest_ms: int | None = None  # of its last unit, if it was ended by retention

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def path(self) -> str:
        return segment_path(self.start)


class SegmentRead(NamedTuple):
    """Bytes of one segment that are to be read, in any thread."""

    files: Files
    path: str
    position: int
    size: int

    def run(self) -> bytes:
        """Read them, by a file of its own; fewer where the segment was cut or has gone since."""
        try:
            file = self.files.open(self.path)
        except FileNotFoundError:
            return b""
        try:
            return file.read(self.position, self.size)
        finally:
            file.close()


def list_segments(files: Files) -> list[Segment]:
    """The segments a directory has, in order.

    Raises:
        ForeignFile: something else stands among them.
    """
    segments = []
    for name in files.listdir(FOLDER):
        match = _NAME.fullmatch(name)
        path = f"{FOLDER}/{name}"
        if match is None or files.is_dir(path):
            raise ForeignFile(
                f"{files.describe(path)} does not belong into a journal: move it elsewhere and start again", path=path
            )
        segments.append(Segment(int(match[1]), files.size(path)))
    for before, after in itertools.pairwise(segments):
        if before.end > after.start:
            raise ForeignFile(
                f"{files.describe(after.path)} overlaps the segment before it, so it is another journal's: "
                "move it elsewhere and start again",
                path=after.path,
            )
    return segments


class Journal:
    """The segments, with the last one open for writing."""

    def __init__(self, files: Files, pool: FilePool, journal_id: int, segments: list[Segment]) -> None:
        self.files = files
        self.id = journal_id  # in every unit, so that another journal's are not taken for ours
        self._pool = pool
        self.segments = segments
        self._starts = [segment.start for segment in segments]
        self._tail: File | None = None
        self._retired: File | None = None
        self._tail_dirty = False  # bytes beyond `end` may stand in the tail file
        self._reserve_from = _RESERVE_FROM_BYTES  # a unit that ends behind this place has space taken for it first
        self.end = segments[-1].end if segments else 0
        self.flushed = 0
        self.failure: StorageError | None = None

    @property
    def start(self) -> int:
        return self.segments[0].start if self.segments else 0

    @property
    def tail(self) -> Segment:
        return self.segments[-1]

    # --- writing ----------------------------------------------------------------------------------------------------

    def open_tail(self) -> None:
        """Open the last segment for writing."""
        self._tail = self.files.open(self.tail.path, write=True)
        self._reserve_from = _RESERVE_FROM_BYTES

    def append(self, buffer: Buffer) -> None:
        """Write one unit at the end; it is in the page cache when this returns.

        Raises:
            StorageError: nothing of it was kept.
        """
        if self.failure is not None:
            raise self.failure
        assert self._tail is not None
        segment = self.segments[-1]
        if self._tail_dirty:
            self._cut_back()
        if segment.size + len(buffer) > self._reserve_from:
            self._reserve(self._tail, segment.size, len(buffer))
        try:
            self._tail.write(segment.size, (buffer,))
        except StorageError:
            self._tail_dirty = True
            try:
                self._cut_back()
            except StorageError:
                # Harmless for now: the next write cuts first, and a restart finds an invalid unit at the tail.
                pass
            raise
        segment.size += len(buffer)
        self.end = segment.start + segment.size

    def _reserve(self, tail: File, size: int, more: int) -> None:
        """Take space for what comes next in a segment of a size, as far as the system and the disk can give it."""
        end = -(-(size + more) // _RESERVE_BYTES) * _RESERVE_BYTES
        # Without it each page of a write is given its own: a third of what the write takes. Not asked twice if refused.
        self._reserve_from = end if tail.reserve(size, end) else _NEVER

    def _cut_back(self) -> None:
        assert self._tail is not None
        self._tail.truncate(self.segments[-1].size)
        self._tail_dirty = False
        self._reserve_from = self.segments[-1].size  # the space went as well

    def flush_target(self) -> tuple[File, int]:
        """The file to sync, possibly in another thread, and the offset that is durable once that is done."""
        self.check()
        assert self._tail is not None
        return self._tail, self.end

    def flush_failed(self, error: DMQError) -> StoreFailed:
        """Stop for good: which pages reached the disk is unknown, and syncing again would not tell."""
        failure = StoreFailed(
            f"flushing the journal failed ({error}), so nothing more is acknowledged: "
            "check the disk, then start again; what was acknowledged is safe"
        )
        self.failure = failure
        return failure

    def look(self) -> None:
        """See that the file which takes the next unit still has its name.

        Raises:
            StoreFailed: it was removed or moved: what is written there is gone with this process.
        """
        self.check()
        path = self.segments[-1].path
        try:
            self.files.size(path)
        except FileNotFoundError:
            self.failure = StoreFailed(
                f"{self.files.describe(path)} was removed or moved while it was in use, so nothing more is "
                "acknowledged: put the directory back where it was, or restore it from a replica or a backup, then "
                "start again"
            )
            raise self.failure from None
        except StorageError:
            return  # the next write or flush tells

    def check(self) -> None:
        """Raises StoreFailed if a flush has failed before, or the file is gone."""
        if self.failure is not None:
            raise self.failure

    def roll(self, start: int, first_unit: Buffer, stored_at_ms: int) -> None:
        """Begin a new segment with its first unit, all of it durable when this returns.

        `flushed` must have reached `end` before.
        """
        self.check()
        path = segment_path(start)
        file = self.files.open(path, create=True, write=True)
        try:
            file.truncate(0)
            file.write(0, (first_unit,))
        except StorageError:
            file.close()
            self._unbegin(path)
            raise
        try:
            file.sync()
            self.files.sync_dir(FOLDER)
        except StorageError as error:
            file.close()
            with contextlib.suppress(StorageError):
                # The next start makes it anew: an entry whose flush failed may never become durable.
                self.files.unlink(path)
            raise self.flush_failed(error) from error
        if self._retired is not None:
            self._retired.close()
        # A flush in another thread may still be using the old tail.
        self._retired, self._tail = self._tail, file
        self._tail_dirty = False
        self._reserve_from = _RESERVE_FROM_BYTES
        segment = Segment(start, len(first_unit), stored_at_ms)
        self.segments.append(segment)
        self._starts.append(start)
        self.end = self.flushed = segment.end

    def _unbegin(self, path: str) -> None:
        """Remove a segment that could not be begun, for good: the one before it may grow past where this one starts."""
        try:
            self.files.unlink(path)
            self.files.sync_dir(FOLDER)
        except StorageError as error:
            raise self.flush_failed(error) from error

    def drop_first(self, count: int) -> None:
        """Remove the oldest segments; the last one always stays.

        Each is gone for good before the next one goes, so that no crash leaves a hole among those that are left.
        """
        gone = self.segments[:count]
        assert count < len(self.segments)
        del self.segments[:count]
        del self._starts[:count]
        for segment in gone:
            self._pool.drop(segment.path)
            self.files.unlink(segment.path)
            self.files.sync_dir(FOLDER)

    # --- recovery ---------------------------------------------------------------------------------------------------

    def forget_reads(self, segment: Segment) -> None:
        """Close the file for reading; it is about to change."""
        self._pool.drop(segment.path)

    def shorten(self, segment: Segment, size: int) -> None:
        """The segment was cut."""
        segment.size = size
        self.end = self.segments[-1].end

    def grew(self, segment: Segment, size: int) -> None:
        """The end of a segment that was missing was put back."""
        segment.size = size
        self.end = self.segments[-1].end

    def put_back(self, segment: Segment) -> None:
        """A segment that was missing was put back."""
        at = bisect_right(self._starts, segment.start)
        self.segments.insert(at, segment)
        self._starts.insert(at, segment.start)

    def forget(self, segment: Segment) -> None:
        """The segment was removed."""
        at = self.segments.index(segment)
        del self.segments[at]
        del self._starts[at]
        self.end = self.segments[-1].end if self.segments else 0

    # --- reading ----------------------------------------------------------------------------------------------------

    def segment_at(self, offset: int) -> Segment | None:
        """The segment an offset lies in."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0 or offset >= self.segments[at].end:
            return None
        return self.segments[at]

    def read_available(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from one segment; fewer where it ends, or was cut behind our back."""
        segment = self.segment_at(offset)
        if segment is None:
            return b""
        try:
            return self._pool.read(segment.path, offset - segment.start, min(size, segment.end - offset))
        except FileNotFoundError:
            return b""

    def plan_read(self, offset: int, size: int) -> SegmentRead | None:
        """As `read_available`, for another thread to read; None where no segment has the offset."""
        segment = self.segment_at(offset)
        if segment is None:
            return None
        return SegmentRead(self.files, segment.path, offset - segment.start, min(size, segment.end - offset))

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from one segment.

        Raises:
            Damaged: the segment does not have them.
        """
        data = self.read_available(offset, size)
        if len(data) == size:
            return data
        raise Damaged(
            f"the journal has no bytes {offset}-{offset + size}: a segment was cut or removed; "
            "restore it from a replica or a backup",
            start=offset,
            end=offset + size,
        )

    def close(self) -> None:
        for file in (self._tail, self._retired):
            if file is not None:
                file.close()
        self._tail = self._retired = None


class FlushTicket:
    """A flush under way: `run` blocks for the disk and changes nothing else."""

    __slots__ = ("_file", "_journal", "end")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._file, self.end = journal.flush_target()

    def run(self) -> None:
        try:
            self._file.sync()
        except StorageError as error:
            # The file may be closed by now, its segment being long flushed and full. Any other error counts: the kernel
            # tells of a lost page once, and another flush of the segment may have got that answer.
            if error.detail.get("errno") != errno.EBADF or self._journal.flushed < self.end:
                raise


_QUICK_SECONDS: Final = 0.001
_VERY_QUICK_SECONDS: Final = 0.0003
_WEIGHT: Final = 1 / 8  # of the last flush in the average
_COUNTED_SECONDS_MAX: Final = 0.1  # what a flush counts at most: after one, threads take about twenty
_UNKNOWN_SECONDS: Final = 0.008  # the average to begin with: sixteen quick flushes show that a disk is quick
_STALL_SECONDS: Final = 0.02
_REST: Final = 50
_REST_SECONDS_MAX: Final = 10.0


class FlushPolicy:
    """The policy of one journal; a disk has to show first that it is quick."""

    __slots__ = ("_average", "_rests_until")

    def __init__(self) -> None:
        self._average = _UNKNOWN_SECONDS
        self._rests_until = 0.0

    def is_for_loop(self, now: float, *, is_lone: bool = True) -> bool:
        """Whether the loop may flush, at a moment of a monotonic clock.

        Parameters:
            is_lone: for one request; if others wait meanwhile, the disk has to be quicker.
        """
        return self._average <= (_QUICK_SECONDS if is_lone else _VERY_QUICK_SECONDS) and now >= self._rests_until

    def flushed(self, seconds: float, now: float, *, on_loop: bool) -> None:
        """A flush took so long."""
        self._average += (min(seconds, _COUNTED_SECONDS_MAX) - self._average) * _WEIGHT
        if on_loop and seconds > _STALL_SECONDS:
            self._rests_until = now + min(_REST * seconds, _REST_SECONDS_MAX)


_WINDOW_BYTES: Final = 1 << 20
_PASSING_MAX: Final = 3
_NOTHING: Final[Mapping[int, str]] = MappingProxyType({})
# What a buffer takes beside its bytes: the object, its place in the lists, rounding. A lone message is a unit of some
# 200 bytes, so a cache that counted only those would take twice its bound.
_BUFFER_BYTES: Final = 160


class _Window:
    __slots__ = ("buffers", "corrupt", "end", "has_blocks", "start", "starts")

    def __init__(self, start: int, buffer: Buffer, corrupt: Mapping[int, str] = _NOTHING) -> None:
        self.start = start
        self.corrupt = corrupt
        self.has_blocks = False
        self.end = start + len(buffer)
        self.starts = [start]
        self.buffers: list[Buffer] = [buffer]

    @property
    def cost(self) -> int:
        """How many bytes of memory it takes."""
        return self.end - self.start + _BUFFER_BYTES * len(self.buffers)

    def get(self, start: int, end: int) -> memoryview | None:
        at = bisect_right(self.starts, start) - 1
        buffer = self.buffers[at]
        base = self.starts[at]
        if end - base > len(buffer):
            return None
        return memoryview(buffer)[start - base : end - base]


class WindowCache:
    """Keeps windows of the journal, the longest unused dropped first.

    Attributes:
        gave_blocks: whether bytes that `get` gave since this was set to False are of a window with body blocks.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._starts: list[int] = []
        self._windows: OrderedDict[int, _Window] = OrderedDict()
        self._tail: _Window | None = None
        self._passing: deque[int] = deque()
        self._corrupt = 0  # windows that have some
        self.gave_blocks = False

    @property
    def has_corrupt(self) -> bool:
        """Whether any window has records that cannot be read."""
        return self._corrupt > 0

    def corrupt(self, start: int, end: int) -> Mapping[int, str]:
        """The records in [start, end), which lies within one window, that cannot be read, by journal offset, and why.

        To be asked right after the bytes: the window may go with the next ones that come.
        """
        if not self._corrupt:
            return _NOTHING
        at = bisect_right(self._starts, start) - 1
        found = self._windows[self._starts[at]].corrupt if at >= 0 else _NOTHING
        return {offset: why for offset, why in found.items() if start <= offset < end}

    def get(self, start: int, end: int) -> memoryview | None:
        """The bytes [start, end) of the journal, which lie within one unit, if they are here."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        window = self._windows[self._starts[at]]
        if end > window.end:
            return None
        self._windows.move_to_end(window.start)
        if window.has_blocks:
            self.gave_blocks = True
        return window.get(start, end)

    def units_from(self, offset: int, max_bytes: int) -> list[Buffer]:
        """Whole units from one that starts at an offset on, as far as one window has them: none if it is not here.

        At least one, and no more than so many bytes beyond that. Looking changes nothing of how long they stay.
        """
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return []
        window = self._windows[self._starts[at]]
        if offset >= window.end:
            return []
        at = bisect_right(window.starts, offset) - 1
        buffer, base = window.buffers[at], window.starts[at]
        if base == offset and len(window.buffers) == at + 1:  # the last one, as most are
            return [buffer]
        found: list[Buffer] = [buffer if base == offset else memoryview(buffer)[offset - base :]]
        size = len(found[0])
        for buffer in window.buffers[at + 1 :]:
            size += len(buffer)
            if size > max_bytes:
                break
            found.append(buffer)
        return found

    def around(self, start: int, end: int) -> tuple[int, memoryview] | None:
        """The whole buffer that has the bytes [start, end), and where it begins, if it is here."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return None
        window = self._windows[self._starts[at]]
        if end > window.end:
            return None
        self._windows.move_to_end(window.start)
        at = bisect_right(window.starts, start) - 1
        return window.starts[at], memoryview(window.buffers[at])

    def put(
        self,
        start: int,
        buffer: Buffer,
        *,
        passing: bool = False,
        corrupt: Mapping[int, str] = _NOTHING,
        has_blocks: bool = False,
    ) -> None:
        """Whole, verified units that begin at an offset.

        Parameters:
            corrupt: the records in them that cannot be read, by journal offset, and why.
            has_blocks: bodies of some of them may stand in blocks.
            passing: they are read one after another, so earlier ones of this kind will hardly be wanted again: only
                the last few stay. Thus reading a backlog leaves what was just written where it is, and takes the same
                memory again and again, which the processor still has at hand.
        """
        if start in self._windows:
            self._drop(start)
        window = _Window(start, buffer, corrupt)
        window.has_blocks = has_blocks
        self._insert(window)
        if passing:
            self._passing.append(start)
            if len(self._passing) > _PASSING_MAX:
                gone = self._passing.popleft()
                if gone in self._windows and gone not in self._passing:
                    self._drop(gone)

    def put_tail(self, start: int, buffer: Buffer, *, has_blocks: bool = False) -> None:
        """A unit that was just written; small ones gather in one window."""
        tail = self._tail
        if tail is not None and tail.end == start and tail.end - tail.start < _WINDOW_BYTES:
            tail.starts.append(start)
            tail.buffers.append(buffer)
            tail.end += len(buffer)
            self._bytes += len(buffer) + _BUFFER_BYTES
            self._windows.move_to_end(tail.start)
            if self._bytes > self._bytes_max:
                self._shrink()
        else:
            tail = self._tail = _Window(start, buffer)
            self._insert(tail)
        if has_blocks:
            tail.has_blocks = True

    def _insert(self, window: _Window) -> None:
        self._starts.insert(bisect_right(self._starts, window.start), window.start)
        self._windows[window.start] = window
        self._corrupt += bool(window.corrupt)
        self._bytes += window.cost
        self._shrink()

    def _shrink(self) -> None:
        while self._bytes > self._bytes_max and len(self._windows) > 1:
            self._drop(next(iter(self._windows)))

    def _drop(self, start: int) -> None:
        window = self._windows.pop(start)
        self._corrupt -= bool(window.corrupt)
        self._starts.remove(start)
        self._bytes -= window.cost
        if window is self._tail:
            self._tail = None

    def clear(self) -> None:
        self._starts.clear()
        self._windows.clear()
        self._tail = None
        self._passing.clear()
        self._bytes = 0
        self._corrupt = 0
