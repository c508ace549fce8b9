"""The feed: what of its journal a leader has sent to one follower, and what it sends next. Without I/O.

What always holds: bytes go out in the order of the journal and once for each connection; no more than `WINDOW_BYTES`
are sent that the follower has not confirmed to have; a frame without bytes goes out when nothing else did for a while,
so that promises go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from dmq.protocol.cluster.replication import JOURNAL_BYTES_MAX, Journal
from dmq.storage.files import Buffer
from dmq.storage.journal.unit import read_header
from dmq.storage.replica import LastUnit

__all__ = ["Feed", "Standpoint"]

WINDOW_BYTES: Final = 8 << 20
IDLE_SECONDS: Final = 0.5


class Standpoint(NamedTuple):
    """Where the leader stands when it sends."""

    epoch: int
    end: int
    committed: int
    first: int


class Feed:
    """One follower's share.

    Parameters:
        read: whole units from an offset on, at least one, up to so many bytes; see `MessageStore.journal_bytes`.
        start: where the follower goes on, at the start of a unit.
        before: of the unit that ends there; None if that is not known.
    """

    def __init__(self, read: Callable[[int, int], Buffer], start: int, before: LastUnit | None) -> None:
        self._read = read
        self._next = start
        self._before = before
        self._held = memoryview(b"")  # of units that were read, what is not sent yet
        self._confirmed = start
        self._sent_at = float("-inf")

    @property
    def next_offset(self) -> int:
        """Where the next frame begins."""
        return self._next

    def confirmed(self, end: int) -> None:
        """The follower has everything below, on disk or not."""
        self._confirmed = max(self._confirmed, end)

    def frames(self, standpoint: Standpoint, now: float) -> Iterator[tuple[Journal, Buffer]]:
        """What to send now."""
        while self._next < standpoint.end and self._next - self._confirmed < WINDOW_BYTES:
            before: LastUnit | None = None
            if not self._held:
                before = self._before
                self._held = memoryview(self._read(self._next, JOURNAL_BYTES_MAX))
                self._before = _last_of(self._held)
            body, self._held = self._held[:JOURNAL_BYTES_MAX], self._held[JOURNAL_BYTES_MAX:]
            frame = self._frame(standpoint, now, before)
            self._next += len(body)
            self._sent_at = now
            yield frame, body
        if now - self._sent_at >= IDLE_SECONDS:
            yield self.sign(standpoint, now)

    def sign(self, standpoint: Standpoint, now: float) -> tuple[Journal, Buffer]:
        """A frame without bytes, to be sent at once: it tells what is committed, and asks for a promise."""
        self._sent_at = now
        return self._frame(standpoint, now, None), b""

    def _frame(self, standpoint: Standpoint, now: float, before: LastUnit | None) -> Journal:
        return Journal(
            epoch=standpoint.epoch,
            start=self._next,
            committed=standpoint.committed,
            first=standpoint.first,
            sent=now,
            before=None if before is None else (before.epoch, before.crc),
        )


def _last_of(units: memoryview) -> LastUnit | None:
    """The last unit of some whole ones."""
    at, last = 0, None
    while (header := read_header(units, at)) is not None:
        last = LastUnit(header.epoch, header.crc)
        at += header.length
        if at >= len(units):
            break
    return last
