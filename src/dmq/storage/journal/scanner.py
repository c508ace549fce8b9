"""The scanner: reading the journal unit by unit, and telling a torn tail from damage.

A unit that does not check out at offset X is a torn tail if nothing later proves that X had been durable: no later
valid unit says it was written when the journal was flushed beyond X. Otherwise it is damage, which is never cut.

Blocks that the disk refuses to read count as zeros, but only where that is sure to be no passing trouble, or where
nothing is lost by it: see `Scanner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from dmq.errors import Damaged, StorageError
from dmq.storage.files import Buffer, is_refusal, read_readable
from dmq.storage.journal.journal import Journal, SegmentRead
from dmq.storage.journal.unit import (
    HEADER_BYTES,
    UNIT_MAGIC,
    Header,
    Unit,
    is_intact,
    parse_unit,
    read_header,
    whole_units,
)

__all__ = ["Scanner", "UnitsRead", "units_at"]

_WINDOW: Final = 16 << 20
_SEARCH_WINDOW: Final = 4 << 20
_UNITS_MAX: Final = 1 << 16


class Scanner:
    """Reads units in order, a large window at a time.

    Parameters:
        passes: while the store is open, the ranges that may be passed over if the disk refuses them: what is not known
            to be damaged may be read a moment later. None while it is opened: all may be, but for a tail.

    """

    def __init__(self, journal: Journal, *, passes: Sequence[tuple[int, int]] | None = None) -> None:
        self.journal = journal
        self._passes = passes
        self._met_refusal = False
        self._window = b""
        self._window_at = 0

    def unit_at(self, offset: int) -> Unit | None:
        """The unit that begins at a journal offset, None if no valid one does."""
        header = self.header_at(offset)
        return None if header is None else parse_unit(header, self._bytes(offset, header.length))

    def header_at(self, offset: int) -> Header | None:
        """The header of the unit that begins at a journal offset, None if no valid one does."""
        header = read_header(self._bytes(offset, HEADER_BYTES))
        if header is None or header.start != offset or header.journal_id != self.journal.id:
            return None
        raw = self._bytes(offset, header.length)
        return header if len(raw) == header.length and is_intact(header, raw) else None

    def _bytes(self, offset: int, size: int) -> memoryview:
        """Up to `size` bytes; fewer only where the segment ends."""
        at = offset - self._window_at
        if at < 0 or at + size > len(self._window):
            self._window = self._read(offset, max(size, _WINDOW))
            self._window_at = offset
            at = 0
        return memoryview(self._window)[at : at + size]

    def _read(self, offset: int, size: int) -> bytes:
        refused: list[StorageError] = []
        data = read_readable(self.journal.read_available, offset, size, refused)
        self._met_refusal = self._met_refusal or bool(refused)
        return data

    def refusal(self, start: int, end: int) -> StorageError | None:
        """What the disk says of a range, if it refuses any of it."""
        refused: list[StorageError] = []
        if self._met_refusal:
            for segment in self.journal.segments:
                first, last = max(start, segment.start), min(end, segment.end)
                for at in range(first, last, _SEARCH_WINDOW):
                    read_readable(self.journal.read_available, at, min(_SEARCH_WINDOW, last - at), refused)
        return refused[0] if refused else None

    def check_passing(self, start: int, end: int) -> None:
        """Of a range without units: whether it may be passed over.

        Raises:
            StorageError: the disk refuses some of it, and may give it a moment later.
        """
        if self._passes is None or any(first <= start and end <= last for first, last in self._passes):
            return
        refusal = self.refusal(start, end)
        if refusal is not None:
            raise refusal

    def next_valid(self, offset: int) -> Header | None:
        """The header of the first valid unit at or after an offset."""
        for segment in self.journal.segments:
            if segment.end <= offset:
                continue
            at = max(offset, segment.start)
            while at < segment.end:
                chunk = self._read(at, _SEARCH_WINDOW)
                if not chunk:
                    break
                found = chunk.find(UNIT_MAGIC)
                while found >= 0:
                    header = self.header_at(at + found)
                    if header is not None:
                        return header
                    found = chunk.find(UNIT_MAGIC, found + 1)
                # The magic may lie across the edge of two chunks.
                at += max(1, len(chunk) - len(UNIT_MAGIC) + 1)
        return None

    def was_durable(self, offset: int) -> bool:
        """Whether a later unit proves that the journal had been flushed beyond an offset."""
        at = offset + 1
        while (header := self.next_valid(at)) is not None:
            if header.flushed_through > offset:
                return True
            at = header.start + header.length
        return False


class UnitsRead(NamedTuple):
    """Whole units of one segment that are to be read, in any thread.

    Attributes:
        is_checked: those that fail their checksums are found out.
    """

    read: SegmentRead
    offset: int
    journal_id: int
    is_checked: bool

    def run(self) -> Buffer:
        """The units, verbatim, at least one.

        Raises:
            Damaged: none can be read there; or one that can be, and fails its checksum.
        """
        read = self.read
        try:
            raw = _unit_or_more(read)
        except StorageError as error:
            if not is_refusal(error):
                raise
            raw = b""
        end = whole_units(raw, self.offset, _UNITS_MAX)
        if self.is_checked:
            end = self._sound(raw, end)
        if not end:
            raise Damaged(
                f"no unit can be read at journal offset {self.offset}", start=self.offset, end=self.offset + len(raw)
            )
        return memoryview(raw)[:end]

    def _sound(self, raw: bytes, end: int) -> int:
        """Up to where units check out."""
        at = 0
        while at < end:
            header = read_header(raw, at)
            if header is None or header.journal_id != self.journal_id or not is_intact(header, raw, at):
                break
            at += header.length
        return at


def _unit_or_more(read: SegmentRead) -> bytes:
    """Some units; where the disk refuses what is behind the first one, that alone."""
    try:
        raw = read.run()
    except StorageError as error:
        if not is_refusal(error):
            raise
        raw = read._replace(size=min(read.size, HEADER_BYTES)).run()
        header = read_header(raw)
        return raw if header is None else read._replace(size=header.length).run()
    header = read_header(raw)
    return read._replace(size=header.length).run() if header is not None and len(raw) < header.length else raw


def units_at(journal: Journal, offset: int, max_bytes: int) -> Buffer:
    """Whole units of one segment, verbatim and not verified, from one that starts at an offset: at least one.

    Empty at the end of the journal.

    Raises:
        Damaged: no unit starts there.
    """
    read = journal.plan_read(offset, max(max_bytes, HEADER_BYTES))
    try:
        raw = b"" if read is None else _unit_or_more(read)
    except StorageError as error:
        if not is_refusal(error):
            raise
        raw = b""
    end = whole_units(raw, offset, _UNITS_MAX)
    if not end and offset < journal.end:
        raise Damaged(f"no unit can be read at journal offset {offset}", start=offset, end=journal.end)
    return memoryview(raw)[:end]
