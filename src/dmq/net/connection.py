"""One connection of a server: bytes to frames, frames to bytes, and bounds on both.

What always holds: frames are handed over in order, on the event loop; after `close` none is handed over any more. What
waits to be sent is bounded: with a little of it waiting a connection says that it takes no more pushes (`is_writable`),
and with `output_bytes_max` waiting it is not read from, and what was read is not handed over, until that has gone. A
peer that puts checksums behind its frames gets them behind ours, from the answer to its hello on.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from dmq.clock import Clock
from dmq.errors import DMQError, FrameCorrupt, ProtocolError
from dmq.event_log import EventLog
from dmq.protocol.commands import error_frame
from dmq.protocol.frame import Buffer, Chunks, Frame, FrameParser, Whole, frame_of, seal_frame, seal_whole

__all__ = ["Connection", "Peer", "WriteCoalescer"]

log = EventLog(__name__)

_JOIN_BYTES: Final = 64 * 1024
# The kernel has buffers of its own: more than this only waits here instead of in the journal.
_PUSH_BYTES: Final = 256 * 1024


class Peer(Protocol):
    """Who hears what happens on a connection."""

    def connected(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, frame: Frame) -> None: ...

    def refused(self, connection: Connection, error: DMQError) -> None:
        """What came is not a frame, or a damaged one: the connection ends."""
        ...

    def writable(self, connection: Connection) -> None:
        """Output has drained; more may be pushed."""
        ...

    def disconnected(self, connection: Connection) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """One socket, as frames in and frames out.

    Parameters:
        peer: who hears.
        output_bytes_max: how much may wait to be sent before nothing more is read.
        outbox: writes what was sent in a turn at its end.
        chunks: to receive into.
    """

    def __init__(
        self,
        peer: Peer,
        clock: Clock,
        output_bytes_max: int,
        track: Callable[[Connection, bool], None],
        outbox: WriteCoalescer,
        chunks: Chunks,
    ) -> None:
        self._peer = peer
        self._output_bytes_max = output_bytes_max
        self._track = track
        self._outbox = outbox
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1  # of a plain socket
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._unserved: deque[Frame] = deque()
        self.parser = FrameParser(clock=clock, chunks=chunks)
        # asyncio asks the parser itself where to read to
        self.get_buffer: Callable[[int], memoryview] = self.parser.get_buffer  # type: ignore[assignment]
        self.is_writable = True
        self.is_stalled = False  # nothing is read before the peer has taken its answers
        self.is_open = False
        self.opened_at = self.heard_at = clock.monotonic()  # heard: as the sweep that looks now and then has found
        self.heard = self.heard_before = 0  # how often bytes have come; and when the sweep looked
        self.is_silent = False  # it is closed because nothing was heard for too long
        self.address: tuple[str, int] = ("", 0)
        self.session: object | None = None  # the peer's own
        self.straight: Callable[[Whole], bool] | None = None  # takes a request before the peer; whether it has
        self.straight_batch: Callable[[Frame], bool] | None = None  # the same for one that is not small
        self.straight_command: int | None = None  # what these two are asked about alone; None: everything

    # --- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one only by its methods
        self._transport = transport
        high = min(self._output_bytes_max, _PUSH_BYTES)
        transport.set_write_buffer_limits(high=high, low=high // 4)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if transport.get_extra_info("sslcontext") is None:
                self._descriptor = sock.fileno()
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.address = (str(name[0]), int(name[1]))
        self.is_open = True
        self._track(self, True)
        self._peer.connected(self)

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += 1
        if self.straight is not None and not self._unserved and self.is_writable and self.is_open:
            whole = self.parser.take_whole(nbytes)
            if whole is not None:
                wanted = self.straight_command
                if (wanted is not None and whole[1] != wanted) or not self.straight(whole):
                    self._receive(frame_of(whole))
                return
        try:
            frames = self.parser.buffer_updated(nbytes)
        except (ProtocolError, FrameCorrupt) as error:
            self.refuse(error)
            return
        if len(frames) == 1 and self.is_writable and self.is_open and not self._unserved and not self.parser.error:
            self._receive(frames[0])  # as below, without the detour
            return
        self._unserved.extend(frames)
        self._serve()

    def _receive(self, frame: Frame) -> None:
        """Hand over a frame that came by itself."""
        batch, wanted = self.straight_batch, self.straight_command
        if batch is None or (wanted is not None and frame.command != wanted) or not batch(frame):
            self._peer.received(self, frame)

    def _serve(self) -> None:
        """Hand over what was read; a peer that does not read its answers does not get to ask more."""
        unserved = self._unserved
        while unserved and self.is_open:
            if not self.is_writable and self.waiting_bytes >= self._output_bytes_max:
                self._pause_reading()
                return
            self._peer.received(self, unserved.popleft())
        if self.parser.error is not None and self.is_open:
            self.refuse(self.parser.error)

    def _pause_reading(self) -> None:
        if not self.is_stalled and self._transport is not None and not self._transport.is_closing():
            self.is_stalled = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._transport is None or self._transport.is_closing():
            return
        if self.is_stalled:
            self._serve()
            if self._unserved:
                return
            self.is_stalled = False
            self._transport.resume_reading()
        self._peer.writable(self)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._pending.clear()
        self._unserved.clear()
        self.straight = self.straight_batch = None
        # We and the transport know each other, and may stay in memory until somebody collects such circles.
        self.parser.drop()
        self._track(self, False)
        self._peer.disconnected(self)

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, *buffers: Buffer) -> None:
        """Send one frame, in pieces, its head first; what is sent in one turn of the loop goes out together."""
        if not self.is_open:
            return
        if not self._pending:
            self._outbox.add(self)
        if len(buffers) == 1:  # most answers
            whole = seal_whole(buffers[0]) if self.parser.is_checked else buffers[0]
            self._pending.append(whole)
            self._pending_bytes += len(whole)
        else:
            pieces = seal_frame(*buffers) if self.parser.is_checked else buffers
            self._pending += pieces
            self._pending_bytes += sum(map(len, pieces))
        if self._pending_bytes >= _JOIN_BYTES:
            self.flush()

    def send_sealed(self, whole: bytes) -> None:
        """`send` for a small frame that has its checksum, on a connection that has them."""
        if self.is_open:
            if not self._pending:
                self._outbox.add(self)
            self._pending.append(whole)
            self._pending_bytes += len(whole)
            if self._pending_bytes >= _JOIN_BYTES:
                self.flush()

    def send_now(self, whole: bytes) -> None:
        """`send_sealed` for what nothing else has to wait for or go along with: the socket has it when this returns.

        uvloop's transport would write it when the turn is over, and the peer have it that much later.
        """
        transport = self._transport
        if self._pending:
            self.send_sealed(whole)
        elif self.is_open and transport is not None:
            if self._descriptor >= 0 and not transport.get_write_buffer_size() and not transport.is_closing():
                try:
                    sent = os.write(self._descriptor, whole)
                except OSError:
                    sent = 0  # it is full, or broken, which the transport finds out as ever
                if sent == len(whole):
                    return
                whole = whole[sent:]
            transport.write(whole)

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send a frame that has its checksum, in pieces, at once, and what waits before it."""
        if self.is_open:
            self._pending += pieces
            self.flush()

    def flush(self) -> None:
        """Hand what waits to the transport."""
        if self._pending and self._transport is not None and self.is_open:
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            if len(pending) == 1:
                self._transport.write(pending[0])
            else:
                self._transport.writelines(pending)

    @property
    def whence(self) -> str:
        """The peer's address, for the log."""
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def waiting_bytes(self) -> int:
        """Output that the peer has not taken yet."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + self._pending_bytes

    def refuse(self, error: DMQError) -> None:
        """Say why, then hang up."""
        log.warning(
            "connection refused" if self.session is None else "connection closed: it sent what is not a frame",
            once_for=self.address[0],
            reason=error.message,
            address=self.whence,
        )
        self._peer.refused(self, error)
        self.send(error_frame(error))
        self.close()

    def close(self) -> None:
        """Send what waits, then close."""
        if self.is_open and self._transport is not None:
            self.flush()
            self.is_open = False
            self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever waits."""
        if self._transport is not None:
            self.is_open = False
            self._transport.abort()


class Sending(Protocol):
    """A connection with something to send."""

    def flush(self) -> None: ...


class WriteCoalescer:
    """Joins what is sent in one turn of the event loop into one write for each connection; one for all of a server.

    What always holds: what is sent while it is held goes out when it is released, and costs no turn of its own.

    Attributes:
        is_held: set while much is about to be sent; `release` follows in the same turn.
    """

    __slots__ = ("_is_planned", "_waiting", "is_held")

    def __init__(self) -> None:
        self._waiting: list[Sending] = []
        self._is_planned = False
        self.is_held = False

    def add(self, connection: Sending) -> None:
        """The connection is flushed at the end of this turn."""
        self._waiting.append(connection)
        if not (self._is_planned or self.is_held):
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._flush_planned)

    def release(self) -> None:
        """Send what has gathered."""
        self.is_held = False
        self._flush()

    def _flush_planned(self) -> None:
        self._is_planned = False
        self._flush()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            # A message is pushed after its producer was answered, and leaves before: each write costs the next some
            # time, and the way of the message is the longer one.
            for connection in reversed(waiting):
                try:
                    connection.flush()
                except Exception:  # one transport that fails must not keep the others' answers
                    log.exception("sending failed", once_for=())
