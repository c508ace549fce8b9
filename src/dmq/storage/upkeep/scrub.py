"""The scrub: looks through a whole journal for what cannot be read, a piece at a time, before anybody needs it.

`Scrub` is where it has got to, and what comes next; `Piece` is read and checked in any thread. Each unit has to match
its checksum, bear this journal's id and its own offset, begin where the one before it ends, and be of no older epoch
than that. `ScrubPlace` is what a directory keeps of it over restarts, and `ScrubSchedule` says when the next piece is
due: when as large a share of the round's time is over as there is of the journal before it. So a round takes that time
however large the journal is, and a byte that retention takes sooner was looked at before that.

What always holds: looking changes nothing; nothing is called damaged that may only have been read in the wrong place,
while it was written over, or after it had gone; what a piece takes is bounded, by its size and that of one unit. What
was in the page cache of the machine is checked there, and stays there; all else is read from the disk.
"""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple, TypeAlias

import msgspec

from dmq.errors import StorageError
from dmq.storage.files import File, Files, read_readable
from dmq.storage.journal.journal import Journal, SegmentRead
from dmq.storage.journal.unit import HEADER_BYTES, ROW, ROW_BYTES, UNIT_MAGIC, Header, is_intact, read_header

__all__ = [
    "PIECE_BYTES",
    "SCRUB",
    "Piece",
    "Range",
    "Scrub",
    "ScrubPlace",
    "ScrubSchedule",
    "Seen",
]

Range: TypeAlias = tuple[int, int]

PIECE_BYTES: Final = 256 << 10  # a disk reads it in a moment, and small units in it are checked in a few milliseconds
SCRUB: Final = "scrub"  # the file of a directory's place
_BLOCK: Final = 4096
_ANEW_MAX: Final = 2
_REST: Final = 9  # times as long as a piece took, until the next one


class Seen(NamedTuple):
    """What was found in a piece.

    Attributes:
        at: where to go on.
        epoch: of the last unit.
        damaged: ranges that have come to their ends.
        open_from: where damage begins of which no end was found yet; None if there is none.
        topic_ids: that the damaged units seem to have messages of; what says so may be damaged itself.
        size: how much was read.
    """

    at: int
    epoch: int
    damaged: list[Range]
    open_from: int | None
    topic_ids: frozenset[int]
    size: int

    @property
    def first_damaged(self) -> int | None:
        """Where the first damage begins."""
        return self.damaged[0][0] if self.damaged else self.open_from


class Piece(NamedTuple):
    """Some of a journal, to be looked at in any thread.

    Attributes:
        read: the bytes; None where no segment has them.
        offset: where they begin, and a unit does, unless `open_from` says where damage began before.
        limit: where the segment ends, or what is to be looked at of it.
        epoch: of the unit before.
        topic_ids: that the damage which began before seems to have messages of.
        begins_segment: nothing stands before it in its segment.
    """

    read: SegmentRead | None
    offset: int
    limit: int
    journal_id: int
    epoch: int
    open_from: int | None
    topic_ids: frozenset[int]
    begins_segment: bool

    def run(self) -> Seen:
        """Look at it.

        Raises:
            WrongFormat: a newer DMQ wrote it.
            StorageError: it cannot be read for another reason than a bad disk.
        """
        if self.read is None:
            start = self.offset if self.open_from is None else self.open_from
            return Seen(self.limit, self.epoch, [(start, self.limit)], None, topic_ids=self.topic_ids, size=0)
        try:
            file = self.read.files.open(self.read.path)
        except FileNotFoundError:
            return _Look(self, None).run(self.read.size)
        try:
            return _Look(self, file).run(self.read.size)
        finally:
            file.close()


class _Look:
    """One look at one piece; places in it are counted from its beginning."""

    def __init__(self, piece: Piece, file: File | None) -> None:
        self._piece = piece
        self._file = file
        self._limit = piece.limit - piece.offset
        self._epoch = piece.epoch
        self._raw = b""
        self._topic_ids = {*piece.topic_ids}

    def run(self, size: int) -> Seen:
        piece = self._piece
        self._have(size)
        at, damaged, open_from = 0, list[Range](), piece.open_from
        while open_from is not None or at < min(size, self._limit):
            if open_from is None:
                header = self._unit(at)
                if header is not None:
                    self._epoch = header.epoch
                    at += header.length
                    continue
                open_from = piece.offset + at
                self._note_topics(at)
                at += 1
            is_found, at = self._next_unit(at)
            if not is_found and at < self._limit:
                break  # it may begin in the next piece
            damaged.append((open_from, piece.offset + at))
            open_from = None
        topic_ids = frozenset(self._topic_ids)
        return Seen(piece.offset + at, self._epoch, damaged, open_from, topic_ids=topic_ids, size=len(self._raw))

    def _have(self, size: int) -> bool:
        """Read on until so much is here; False if the segment does not have it."""
        lacking = min(size, self._limit) - len(self._raw)
        if lacking > 0 and self._file is not None:
            read = self._piece.read
            assert read is not None
            self._raw += read_readable(self._file.read_aside, read.position + len(self._raw), lacking)
        return len(self._raw) >= size

    def _unit(self, at: int) -> Header | None:
        """The header of the unit that stands at a place, if one does."""
        if not self._have(at + HEADER_BYTES):
            return None
        header, piece = read_header(self._raw, at), self._piece
        if header is None or header.start != piece.offset + at or header.journal_id != piece.journal_id:
            return None
        if header.epoch < self._epoch or at + header.length > self._limit or not self._have(at + header.length):
            return None
        return header if is_intact(header, self._raw, at) else None

    def _next_unit(self, at: int) -> tuple[bool, int]:
        """Whether a unit stands in what was read from a place on, and where; or where to look on."""
        found = self._raw.find(UNIT_MAGIC, at)
        while found >= 0:
            if self._unit(found) is not None:
                return True, found
            found = self._raw.find(UNIT_MAGIC, found + 1)
        read = self._piece.read
        is_short = self._file is None or read is None or len(self._raw) < min(read.size, self._limit)
        if is_short or len(self._raw) >= self._limit:
            return False, self._limit
        return False, max(at, len(self._raw) - len(UNIT_MAGIC) + 1)  # it may lie across the edge of two pieces

    def _note_topics(self, at: int) -> None:
        """What the table of a damaged unit says, as far as it stands in what was read."""
        header = read_header(self._raw, at)
        if header is not None:
            first = at + HEADER_BYTES + 4 * header.records
            rows = self._raw[first : first + ROW_BYTES * header.batches]
            whole = rows[: len(rows) // ROW_BYTES * ROW_BYTES]
            self._topic_ids |= {row[4] for row in ROW.iter_unpack(whole)}


class Scrub:
    """Where the look through a journal has got to; of its owner's thread.

    Parameters:
        at: where it begins: a journal offset at which a unit began once.

    Attributes:
        at: where it goes on.
    """

    def __init__(self, journal: Journal, at: int = 0) -> None:
        self._journal = journal
        self._epoch = 0
        self._open_from: int | None = None
        self._topic_ids: frozenset[int] = frozenset()  # of that damage
        self._begun_anew: tuple[int, int] = (-1, 0)  # a segment, and how often that was because a place was in doubt
        self.at = at

    def next(self, end: int, max_bytes: int = PIECE_BYTES) -> Piece | None:
        """The next piece below a journal offset, to be `run` and then given to `saw`; None if that is reached."""
        journal = self._journal
        if self.at < journal.start:  # retention took what was to be next, or it begins
            self._go_on_at(journal.start)
        if self.at >= end:
            return None
        segment = journal.segment_at(self.at)
        if segment is None:
            limit = min((one.start for one in journal.segments if one.start > self.at), default=end)
        else:
            limit = min(segment.end, end)
        return Piece(
            journal.plan_read(self.at, min(max(max_bytes, HEADER_BYTES), limit - self.at)),
            self.at,
            limit,
            journal_id=journal.id,
            epoch=self._epoch,
            open_from=self._open_from,
            topic_ids=self._topic_ids,
            begins_segment=segment is None or segment.start == self.at,
        )

    @property
    def place(self) -> int:
        """Where one that begins anew goes on, so that nothing is left out."""
        return self.at if self._open_from is None else self._open_from

    def _go_on_at(self, at: int) -> None:
        self.at, self._epoch, self._open_from, self._topic_ids = at, 0, None, frozenset()

    def saw(self, piece: Piece, seen: Seen) -> list[Range]:
        """Go on behind a piece; returns what of it is damaged.

        Nothing is, yet, where the very place at which it begins is in doubt: the journal may have been cut and written
        anew since, or the place may be of another copy of it. Then all of its segment comes once more, twice at most.
        """
        first = seen.first_damaged
        is_beginning = first == piece.offset and not piece.begins_segment
        if is_beginning and (segment := self._journal.segment_at(piece.offset)) is not None:
            last, times = self._begun_anew
            times = times if last == segment.start else 0
            if times < _ANEW_MAX:
                self._begun_anew = segment.start, times + 1
                self._go_on_at(segment.start)
                return []
        self.at, self._epoch, self._open_from = seen.at, seen.epoch, seen.open_from
        self._topic_ids = frozenset() if seen.open_from is None else seen.topic_ids
        return seen.damaged


class ScrubPlace(msgspec.Struct, kw_only=True):
    """Where a directory's scrub has got to, as it is kept over restarts.

    Attributes:
        at: the journal offset to go on at.
        began_ms: when the round began.
        ended_ms: when the last whole round ended; 0 if none has.
    """

    at: int = 0
    began_ms: int = 0
    ended_ms: int = 0

    @classmethod
    def read(cls, files: Files) -> ScrubPlace:
        """That of a directory; the beginning if it has none, or one that cannot be read."""
        with contextlib.suppress(FileNotFoundError, StorageError, msgspec.DecodeError):
            file = files.open(SCRUB)
            try:
                return msgspec.json.decode(file.read(0, _BLOCK), type=cls)
            finally:
                file.close()
        return cls()

    def write(self, files: Files) -> None:
        """Keep it. A crash leaves this one or the one before; losing both costs a round that begins anew.

        Raises:
            StorageError: it could not be written, as on a full disk.
        """
        path = f"{SCRUB}.tmp"
        file = files.open(path, create=True, write=True)
        try:
            file.truncate(0)
            file.write(0, (msgspec.json.encode(self),))
        finally:
            file.close()
        files.rename(path, SCRUB)


class ScrubSchedule:
    """When a directory's scrub goes on. Pure.

    Parameters:
        round_seconds: that a round is to take.
        bytes_per_second: at most.
    """

    def __init__(self, round_seconds: float, bytes_per_second: int) -> None:
        self._round_ms = round_seconds * 1000
        self._bytes_per_second = bytes_per_second

    @staticmethod
    def progress(place: ScrubPlace, start: int, end: int) -> float:
        """The share of a journal from one offset to another that the round has behind it."""
        return 1.0 if place.at >= end else max(0, place.at - start) / (end - start)

    def resume(self, place: ScrubPlace, start: int, end: int, now_ms: int) -> None:
        """Go on after a stop, or when the clock was set back: time in which nothing was looked at does not count."""
        in_time = now_ms - int(self.progress(place, start, end) * self._round_ms)
        if not in_time <= place.began_ms <= now_ms:
            place.began_ms = in_time

    def wait_seconds(self, place: ScrubPlace, start: int, end: int, now_ms: int) -> float:
        """Until the piece at a place is due, or the next round where all has been looked at; 0 if it is."""
        due_ms = place.began_ms + self.progress(place, start, end) * self._round_ms
        return max(0.0, due_ms - now_ms) / 1000

    def is_over(self, place: ScrubPlace, now_ms: int) -> bool:
        """Whether the round has had its time."""
        return now_ms - place.began_ms >= self._round_ms

    def rest_seconds(self, size: int, seconds: float) -> float:
        """Until the next piece at the earliest, after one of so many bytes that took so long.

        A disk or a loop that is busy makes a piece take longer, and so is left alone for longer.
        """
        return max(size / self._bytes_per_second, _REST * seconds)
