"""Sending numbered batches: each until it is stored, several at a time, one of a lane.

A lane is a queue as one producer sees it. Its next batch leaves when the one before is stored, so that the numbers in
it rise whatever breaks; other lanes go on meanwhile, and so does whoever makes the next batch.

What always holds: a batch goes out with the same numbers and bytes until it is stored, or has failed for good; after
`drain`, all are stored. One that somebody else has stored under our numbers is an error, since its rows may be others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from dmq.client.connection.router import Router
from dmq.errors import Busy, DMQError, NotConnected, SequenceConflict, ServerError, TimedOut
from dmq.protocol import Buffer, Command, Flag, Frame, decode_response
from dmq.protocol.produce import Produce, ProduceReply

__all__ = ["Lane", "LaneSender"]

WINDOW_BYTES: Final = 16 << 20
PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 2.0
_TICK_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 30.0


class Lane(NamedTuple):
    """Whose numbers rise together."""

    producer_id: int
    queue: int


class _Piece:
    """A batch on its way."""

    __slots__ = ("body", "deadline", "due_at", "error", "header", "is_resent", "pause", "size")

    def __init__(self, header: Produce, body: list[Buffer], deadline: float) -> None:
        self.header = header
        self.body = body
        self.size = sum(map(len, body))
        self.deadline = deadline
        self.due_at: float | None = None  # when it is to be sent again
        self.is_resent = False
        self.pause = PAUSE_MIN
        self.error: DMQError | None = None  # the last

    @property
    def lane(self) -> Lane:
        return Lane(self.header.producer_id, self.header.queue)


class LaneSender:
    """See the module. For one thread.

    Parameters:
        timeout: seconds in which a batch must be stored.
    """

    def __init__(self, router: Router, timeout: float) -> None:
        self._router = router
        self._timeout = timeout
        self._changed = threading.Condition()  # guards all below
        self._under_way: dict[Lane, _Piece] = {}
        self._bytes = 0
        self._failed: DMQError | None = None

    def send(self, header: Produce, body: list[Buffer]) -> None:
        """Send a batch once its lane is free and the window has room; returns before it is stored.

        Raises:
            DMQError: a batch could not be stored, this or one before.
        """
        piece = _Piece(header, body, time.monotonic() + self._timeout)
        self._wait(lambda: piece.lane not in self._under_way and self._bytes < WINDOW_BYTES)
        piece.deadline = time.monotonic() + self._timeout
        with self._changed:
            self._under_way[piece.lane] = piece
            self._bytes += piece.size
        self._submit(piece)

    def drain(self) -> None:
        """Wait until all is stored. Raises as `send` does."""
        self._wait(lambda: not self._under_way)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        # Whoever brings rows may have taken long, and nothing was sent again meanwhile: that is not the broker's fault.
        patience = time.monotonic() + min(self._timeout, _PATIENCE_SECONDS)
        for piece in self._under_way.copy().values():
            piece.deadline = max(piece.deadline, patience)
        while True:
            with self._changed:
                again = self._due()
                if self._failed is None and not again and not is_done():
                    self._changed.wait(self._nap())
                    again = self._due()
                if self._failed is not None:
                    raise self._failed
                if not again and is_done():
                    return
            for piece in again:
                self._submit(piece)

    def _nap(self) -> float:
        """Until something is to be sent again, or may be too late."""
        now = time.monotonic()
        moments = [piece.due_at for piece in self._under_way.values() if piece.due_at is not None]
        return max(0.001, min([_TICK_SECONDS, *(moment - now for moment in moments)]))

    def _due(self) -> list[_Piece]:
        """What is to be sent again now; fails if something has not been stored for too long."""
        now = time.monotonic()
        due = []
        for piece in self._under_way.values():
            if now >= piece.deadline:
                why = "" if piece.error is None else f" ({piece.error.message})"
                self._failed = self._failed or TimedOut(
                    f"{piece.header.count} rows for topic {piece.header.topic!r} were not stored within "
                    f"{self._timeout:g} s{why}; raise option 'dmq.timeout', or look at the broker"
                )
            elif piece.due_at is not None and now >= piece.due_at:
                piece.due_at = None
                due.append(piece)
        return due

    # --- out and back -----------------------------------------------------------------------------------------------

    def _submit(self, piece: _Piece) -> None:
        try:
            header = piece.header
            connection = self._router.pool_for(header.topic, header.queue).connection(piece.deadline)
            connection.submit(
                Command.PRODUCE,
                header,
                piece.body,
                on_answer=lambda answer: self._answered(piece, answer),
                flags=Flag.RESEND if piece.is_resent else 0,
                attended=True,
            )
        except (NotConnected, Busy) as error:
            with self._changed:
                self._later(piece, error)
        except DMQError as error:
            with self._changed:
                self._failed = self._failed or error

    def _answered(self, piece: _Piece, answer: Frame | DMQError) -> None:
        """Called by whoever reads the connection."""
        with self._changed:
            try:
                if isinstance(answer, DMQError):
                    piece.is_resent = True
                    raise answer
                self._stored(piece, decode_response(answer))
            except DMQError as error:
                piece.is_resent = piece.is_resent or isinstance(error, ServerError)  # it may be stored after all
                if error.retriable or isinstance(error, NotConnected):
                    self._later(piece, error)
                else:
                    self._failed = self._failed or error
            self._changed.notify_all()

    def _stored(self, piece: _Piece, reply: ProduceReply) -> None:
        if reply.is_duplicate and not piece.is_resent:
            raise SequenceConflict(
                f"another attempt of the same task writes to topic {piece.header.topic!r} at the same time: this one "
                "stops, and is tried again by Spark"
            )
        del self._under_way[piece.lane]
        self._bytes -= piece.size

    def _later(self, piece: _Piece, error: DMQError) -> None:
        piece.error = error
        pause = error.retry_after
        if pause is None:
            pause, piece.pause = piece.pause, min(2 * piece.pause, PAUSE_MAX)
        piece.due_at = time.monotonic() + pause
