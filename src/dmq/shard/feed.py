"""The feed: what of its journal a leader has sent to one follower, and what it sends next. Without I/O.

Units that were just written go out from memory, the same frame to all followers that are level. What is not in memory
any more is read from segments by another thread, ahead of need, at a pace that leaves the leader its own work (`Pace`):
its owner asks for `reading`, has it run, and gives the result back.

What always holds: bytes go out in the order of the journal and once for each connection; no more than `WINDOW_BYTES`
are sent that the follower has not confirmed to have; no more than `AHEAD_BYTES` and one read wait to be sent; a frame
without bytes goes out when nothing else did for a while, so that promises go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from dmq.protocol.cluster.replication import JOURNAL_BYTES_MAX, Journal
from dmq.storage.files import Buffer
from dmq.storage.journal.scanner import UnitsRead
from dmq.storage.journal.unit import read_header, split_units
from dmq.storage.replica import LastUnit
from dmq.storage.store import MessageStore

__all__ = ["Feed", "Pace", "Reading", "Standpoint"]

WINDOW_BYTES: Final = 8 << 20
IDLE_SECONDS: Final = 0.5
AHEAD_BYTES: Final = 4 << 20
READ_BYTES: Final = 4 << 20
# A little less than a frame may have: one that is received then fits the buffer that its beginning makes the receiver
# get, and is not moved again.
_FRAME_BYTES: Final = JOURNAL_BYTES_MAX - (4 << 10)
_NOTHING: Final = memoryview(b"")


class Standpoint(NamedTuple):
    """Where the leader stands when it sends."""

    epoch: int
    end: int
    committed: int
    first: int


class Pace:
    """How fast segments are read for followers while the leader writes; one for all of its followers.

    The more the leader writes, the less it reads for others: they share its loop, and on a test machine its disk. A
    follower that is not level after a while gets more than the leader writes, whatever that costs.

    What always holds: a leader that writes next to nothing is not held back; no follower stays behind for ever.
    """

    BYTES_A_SECOND: Final = 128 << 20  # while next to nothing is written; with each byte written, four fewer
    _GIVEN_WAY: Final = 4
    BYTES_A_SECOND_MIN: Final = 24 << 20
    PATIENT_SECONDS: Final = 60.0
    TIMES: Final = 1.25  # what the leader writes itself, for a follower that was behind for so long
    _LEVEL_SECONDS: Final = 5.0  # without a read: nobody is behind
    _IDLE_RATE: Final = 64 << 10  # bytes a second: who writes less has time for others
    LOOK_SECONDS: Final = 0.5

    def __init__(self) -> None:
        self._at = float("-inf")
        self._end = 0
        self._rate = 0.0
        self._free_at = self._spent_at = self._behind_since = float("-inf")

    def wrote(self, end: int, now: float) -> None:
        """The leader's journal goes so far."""
        passed = now - self._at
        if passed >= self.LOOK_SECONDS:
            rate = (end - self._end) / passed
            self._rate = rate if self._at == float("-inf") else (self._rate + rate) / 2
            self._at, self._end = now, end

    @property
    def read_bytes(self) -> int:
        """How much is read at a time: less while the leader writes, which then waits less for it."""
        return READ_BYTES if self._rate < self._IDLE_RATE else READ_BYTES // 4

    def delay(self, now: float) -> float:
        """How long to wait before the next read."""
        return max(0.0, self._free_at - now)

    def spend(self, size: int, now: float) -> None:
        """So much is about to be read."""
        start = max(self._free_at, now)
        if start - self._spent_at >= self._LEVEL_SECONDS:
            self._behind_since = start
        self._spent_at = start
        if self._rate >= self._IDLE_RATE:
            limit = max(self.BYTES_A_SECOND_MIN, self.BYTES_A_SECOND - self._GIVEN_WAY * self._rate)
            if start - self._behind_since >= self.PATIENT_SECONDS:
                limit = max(limit, self.TIMES * self._rate)
            self._free_at = start + size / limit


class Piece(NamedTuple):
    """Some whole units, and the last of them."""

    units: memoryview
    last: LastUnit | None


class Tail:
    """Units that were just written, a frame's worth of them, put together once for all followers."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._range = (-1, -1)
        self._piece: Piece | None = None

    def piece(self, start: int, end: int) -> Piece | None:
        """The units from an offset on; None if they are not in memory.

        Parameters:
            end: of the journal.
        """
        if self._range == (start, end):
            return self._piece
        units = self._store.units_in_memory(start, _FRAME_BYTES)
        if not units:
            return None
        whole = memoryview(units[0] if len(units) == 1 else b"".join(units))
        self._range, self._piece = (start, end), Piece(whole, read_last(units[-1]))
        return self._piece

    def forget(self) -> None:
        """More was written, or some time has passed: nobody asks for these units again."""
        self._range, self._piece = (-1, -1), None


class Reading(NamedTuple):
    """Units that are to be read for a follower: `run` it in any thread, and give `Feed.was_read` what it returns."""

    plan: UnitsRead

    def run(self) -> list[Piece]:
        """Raises Damaged if no unit can be read there."""
        return _pieces(self.plan.run())


class Feed:
    """One follower's share.

    Parameters:
        start: where the follower goes on, at the start of a unit.
        before: of the unit that ends there; None if that is not known.
        pace, tail: of the leader, for all of its followers.
        reads_ahead: the owner carries out `reading`; without it, the disk is read where it is needed.

    Attributes:
        next_offset: where the next frame begins.
        checked_to: units below, as well as the first ones, are checked when they are read: what the follower refused
            the last time may be damaged here.
    """

    def __init__(
        self,
        store: MessageStore,
        start: int,
        before: LastUnit | None,
        *,
        pace: Pace,
        tail: Tail | None = None,
        reads_ahead: bool = False,
    ) -> None:
        self._store = store
        self._pace = pace
        self._tail = tail or Tail(store)
        self._reads_ahead = reads_ahead
        self.next_offset = self.checked_to = start
        self._before = before
        self._held = _NOTHING  # of units that were taken up, what is not sent yet
        self._ahead: deque[Piece] = deque()
        self._ahead_bytes = 0
        self._is_reading = False
        self._is_first = True
        self._confirmed = start
        self._sent_at = float("-inf")

    def confirmed(self, end: int) -> None:
        """The follower has everything below, on disk or not."""
        if end > self._confirmed:
            self._confirmed = end

    def frames(self, standpoint: Standpoint, now: float) -> Iterator[tuple[Journal, Buffer]]:
        """What to send now.

        Raises:
            Damaged: a unit cannot be read.
        """
        while self.next_offset < standpoint.end and self.next_offset - self._confirmed < WINDOW_BYTES:
            before: LastUnit | None = None
            if not self._held:
                piece = self._piece(standpoint.end)
                if piece is None:
                    break  # it is to be read first
                before, self._before = self._before, piece.last
                self._held = piece.units
            body = self._held
            if len(body) > _FRAME_BYTES:
                body, self._held = body[:_FRAME_BYTES], body[_FRAME_BYTES:]
            else:
                self._held = _NOTHING
            frame = self._frame(standpoint, now, before)
            self.next_offset += len(body)
            self._sent_at = now
            yield frame, body
        if now - self._sent_at >= IDLE_SECONDS:
            yield self.sign(standpoint, now)

    def last_frame(self, standpoint: Standpoint, now: float) -> tuple[Journal, Buffer] | None:
        """All that is left for a follower that is level, as one frame from memory; None if `frames` has to say what."""
        start, end = self.next_offset, standpoint.end
        if self._held or self._ahead or self._is_reading or start >= end or start - self._confirmed >= WINDOW_BYTES:
            return None
        piece = self._tail.piece(start, end)
        if piece is None or len(piece.units) != end - start or end - start > _FRAME_BYTES:
            return None
        before, self._before = self._before, piece.last
        frame = self._frame(standpoint, now, before)
        self.next_offset = end
        self._sent_at = now
        return frame, piece.units

    def _piece(self, end: int) -> Piece | None:
        """The units that follow: those that were read ahead, else from memory, else from the disk."""
        if self._ahead:
            piece = self._ahead.popleft()
            self._ahead_bytes -= len(piece.units)
            return piece
        if self._is_reading:
            return None  # what is read goes on right here: taken from memory, it would go out twice
        recent = self._tail.piece(self.next_offset, end)
        if recent is not None or self._reads_ahead:
            return recent
        self._ahead.extend(_pieces(self._store.journal_bytes(self.next_offset, _FRAME_BYTES)))
        self._ahead_bytes = sum(len(piece.units) for piece in self._ahead)
        return self._piece(end)

    # --- reading ahead ----------------------------------------------------------------------------------------------

    def reading(self, standpoint: Standpoint, now: float, *, is_awaited: bool = False) -> tuple[Reading, float] | None:
        """What to read next for this follower, and after how many seconds; None while there is nothing to read.

        Parameters:
            is_awaited: commits wait for this follower, so it is not held back.

        Raises:
            Damaged: it cannot be read.
        """
        tip = self.next_offset + len(self._held) + self._ahead_bytes
        if (
            tip >= standpoint.end
            or self._is_reading
            or not self._reads_ahead
            or self._ahead_bytes >= AHEAD_BYTES
            or tip - self._confirmed >= WINDOW_BYTES
            or self._store.units_in_memory(tip, 1)
        ):
            return None
        is_checked = self._is_first or tip < self.checked_to
        plan = self._store.plan_units(tip, self._pace.read_bytes, is_checked=is_checked)
        self._is_first = False
        self._is_reading = True
        if is_awaited:
            return Reading(plan), 0.0
        delay = self._pace.delay(now)
        self._pace.spend(plan.read.size, now)
        return Reading(plan), delay

    def was_read(self, pieces: list[Piece]) -> None:
        """A reading is done; without pieces, it failed."""
        self._is_reading = False
        self._ahead.extend(pieces)
        self._ahead_bytes += sum(len(piece.units) for piece in pieces)

    # --- frames -----------------------------------------------------------------------------------------------------

    def sign(self, standpoint: Standpoint, now: float) -> tuple[Journal, Buffer]:
        """A frame without bytes, to be sent at once: it tells what is committed, and asks for a promise."""
        self._sent_at = now
        return self._frame(standpoint, now, None), b""

    def _frame(self, standpoint: Standpoint, now: float, before: LastUnit | None) -> Journal:
        return Journal(
            epoch=standpoint.epoch,
            start=self.next_offset,
            committed=standpoint.committed,
            first=standpoint.first,
            sent=now,
            before=None if before is None else (before.epoch, before.crc),
        )


def read_last(units: Buffer) -> LastUnit | None:
    """The last of some whole units."""
    header = read_header(units)
    if header is not None and header.length < len(units):
        (_, at), *_ = split_units(memoryview(units), len(units))
        header = read_header(units, at)
    return None if header is None else LastUnit(header.epoch, header.crc)


def _pieces(units: Buffer) -> list[Piece]:
    """Whole units, a frame at a time."""
    pieces = []
    for piece, last_at in split_units(memoryview(units), _FRAME_BYTES):
        header = read_header(piece, last_at)
        pieces.append(Piece(piece, None if header is None else LastUnit(header.epoch, header.crc)))
    return pieces
