"""The wire: a blocking client's socket, read by one thread at a time and written by any.

What always holds:
- No thread blocks in writing, and in reading only one that waits for the answer to its own request (`answer`). What
  the socket does not take is kept in order, and the thread that reads writes it.
- A thread that polls can be woken from any other.
- The socket is closed only by `dispose`, which the owner calls when nobody polls: never under a thread's hands.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from dmq.compiled import find
from dmq.protocol import Buffer

__all__ = ["JOIN_BYTES_MAX", "LONE_SECONDS", "OUT_BYTES_MAX", "POLL_SECONDS_MAX", "Wire", "why"]

OUT_BYTES_MAX: Final = 4 << 20
"""So much may be kept unsent; who adds beyond that waits."""
_SEND_BYTES: Final = 1 << 20  # asked of the kernel: a batch of `send_many` then leaves in one call
JOIN_BYTES_MAX: Final = 16 << 10  # below this one copy costs less than a list of pieces
_PIECES: Final = 64  # in one call
POLL_SECONDS_MAX: Final = 3600.0
LONE_SECONDS: Final = 1.0
"""How long `answer` waits. A message that is sent by itself must have its answer before it is sent again."""
_LONE_BYTES: Final = 4096  # read at a time for a lone answer
_NOW: Final = socket.MSG_DONTWAIT
_send_now: Final = find("send_now")
_receive_now: Final = find("receive_now")
# Both raise BlockingIOError if nothing could be done at once.
Calls: TypeAlias = tuple[Callable[[bytes], int], Callable[[memoryview], int]]


class Wire:
    """Takes over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        # It blocks, for `answer` alone: that saves a poll. All other calls ask not to wait.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(LONE_SECONDS), int(LONE_SECONDS % 1 * 1e6))
        )
        sock.settimeout(None)
        self.sock: Final = sock
        self._send, self._receive = calls_of(sock)
        self.descriptor: Final = sock.fileno()
        self.writing: Final = threading.Lock()
        self._out: deque[memoryview] = deque()
        self.out_bytes = 0
        """What is kept unsent."""
        self.is_disposed = False
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_in, select.POLLIN)
        self._wants_room = False  # whether the poll looks for room in the socket

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, buffers: Sequence[Buffer], size: int) -> bool:
        """Send, or keep what the socket does not take (see `out_bytes`); False if the connection is broken.

        Parameters:
            size: of all buffers together.
        """
        with self.writing:
            if self.is_disposed:
                return True  # who closed it has told everybody
            if self._out:
                self._keep(buffers, 0)
                return True
            try:
                if size <= JOIN_BYTES_MAX:
                    data = buffers[0]
                    if len(buffers) > 1 or type(data) is not bytes:
                        data = b"".join(buffers)
                    sent = self._send(data)
                else:
                    sent = self.sock.sendmsg(buffers, (), _NOW)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return False
            if sent < size:
                self._keep(buffers, sent)
            return True

    def _keep(self, buffers: Sequence[Buffer], sent: int) -> None:
        for buffer in buffers:
            if sent >= len(buffer):
                sent -= len(buffer)
                continue
            rest = memoryview(buffer)[sent:]
            sent = 0
            self._out.append(rest)
            self.out_bytes += len(rest)

    def keep_rest(self, frame: bytes, sent: int) -> None:
        """Keep what the socket did not take of a frame. Only for who has `writing`, and nothing was kept before."""
        self._keep((frame,), sent)

    def flush(self) -> OSError | None:
        """Send what was kept, as far as the socket takes it; the error if it is broken. Only for the reader."""
        with self.writing:
            try:
                while self._out:
                    pieces = [self._out[index] for index in range(min(len(self._out), _PIECES))]
                    sent = self.sock.sendmsg(pieces, (), _NOW)
                    self.out_bytes -= sent
                    while self._out and sent >= len(self._out[0]):
                        sent -= len(self._out.popleft())
                    if sent:
                        self._out[0] = self._out[0][sent:]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                return error
        return None

    # --- reading ----------------------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview) -> int:
        """What is here, into a buffer: how many bytes; 0 at the end. Raises BlockingIOError if nothing is."""
        return self._receive(buffer)

    def answer(self) -> bytes:
        """Wait for something to read, and read it, as far as it is small; empty at the end.

        Only for the thread that reads, which nobody can wake meanwhile. Raises BlockingIOError if nothing came.
        """
        return self.sock.recv(_LONE_BYTES)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> tuple[bool, bool]:
        """Wait so long for something to read, or for room to write if something was kept; which of the two there is.

        Only for the thread that reads. Another thread's `wake` ends it too.
        """
        if self._wants_room != bool(self._out):
            self._wants_room = not self._wants_room
            self._poll.modify(self.sock, select.POLLIN | (select.POLLOUT if self._wants_room else 0))
        is_readable = is_writable = False
        for descriptor, events in self._poll.poll(min(seconds, POLL_SECONDS_MAX) * 1000):
            if descriptor == self._wake_in:
                self._take_wakes()
                continue
            is_writable = bool(events & select.POLLOUT)
            is_readable = bool(events & ~select.POLLOUT)
        return is_readable, is_writable

    def register(self, poll: select.poll) -> tuple[int, int]:
        """Have a poll look at it as well, beside others: the descriptors by which. Only for the thread that reads."""
        poll.register(self.sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        poll.register(self._wake_in, select.POLLIN)
        return self.sock.fileno(), self._wake_in

    def meaning(self, descriptor: int, events: int) -> tuple[bool, bool]:
        """Whether what a poll has found is something to read, and room to write. Ends the calls of `wake`."""
        if descriptor == self._wake_in:
            self._take_wakes()
            return False, False
        return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)

    def wake(self) -> None:
        """Have the thread that polls look again."""
        with self.writing:
            if not self.is_disposed:
                try:
                    os.write(self._wake_out, b"\0")
                except BlockingIOError:
                    pass  # full, so it wakes anyway

    def _take_wakes(self) -> None:
        try:
            os.read(self._wake_in, 4096)
        except OSError:
            pass

    # --- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the connection; the thread that polls notices."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first

    def dispose(self) -> None:
        """Close the descriptors. Nobody may poll any more."""
        with self.writing:
            self.is_disposed = True
            self._out.clear()
            self.out_bytes = 0
            self._close()

    def abandon(self) -> None:
        """Close the descriptors of a forked child, where any lock may be held for ever."""
        self.is_disposed = True
        self._close()

    def _close(self) -> None:
        self._send, self._receive = plain_calls_of(self.sock)  # its number may soon be another file's
        self.sock.close()
        os.close(self._wake_in)
        os.close(self._wake_out)


def calls_of(sock: socket.socket) -> Calls:
    """How to send bytes and to receive some, without waiting and without letting another thread in between.

    A thread that gives the interpreter's lock away for a call that takes a few microseconds has it back when the next
    one lets go of it: with a thread that sends and one that reads, that is most of what a message takes.
    """
    if _send_now is None:
        return plain_calls_of(sock)
    return partial(_send_now, sock.fileno()), partial(_receive_now, sock.fileno())


def plain_calls_of(sock: socket.socket) -> Calls:
    """The same by the library, which lets other threads in."""
    return lambda data: sock.send(data, _NOW), lambda buffer: sock.recv_into(buffer, 0, _NOW)


def why(error: OSError) -> str:
    """What the system says of an error."""
    return error.strerror or str(error) or type(error).__name__
