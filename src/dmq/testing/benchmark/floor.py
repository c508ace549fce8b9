"""The floor: the least that a server has to do with messages, and a bare socket that drives it.

The server is a process of its own, `python -m dmq.testing.benchmark.floor`: forty lines on uvloop that append frames to
a file, ack each, give them back when asked, and push each to the sockets that listen. It checks nothing, indexes
nothing and forgets everything when the last socket closes. It says its port and ends with its stdin.

    frame:  kind u32 | size u32 | size bytes
    bytes of a frame that is appended:  count u32 | count lengths, u32 each | count bodies
    ack:  where in the file it begins, u64

What always holds: the two sides share nothing with DMQ but the interpreter. Frames are made out of the bodies, and
bodies cut out of frames, within the timed part: a client of ours is given bodies and gives bodies, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, Self, cast

from dmq.testing.benchmark.baselines import Child, child, run_until_stdin_ends

__all__ = ["Floor"]

_HEAD: Final = struct.Struct("<II")
_PLACE: Final = struct.Struct("<QQ")
_CLOCK: Final = struct.Struct("<d")
_COUNT: Final = struct.Struct("<I")
_ACK: Final = struct.Struct("<Q")
_APPEND: Final = 1
_READ: Final = 2
_LISTEN: Final = 3
_RECEIVE_BYTES: Final = 64 * 1024


class Floor:
    """A running server, and what a bare socket can do with it."""

    def __init__(self, started: Child) -> None:
        self._port = started.port
        self.pid = started.pid

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Self]:
        with child("dmq.testing.benchmark.floor") as started:
            yield cls(started)

    def _connected(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def produce(self, groups: Sequence[Sequence[bytes]]) -> float:
        """The seconds in which every group of bodies was sent as one frame and acked, one after the other."""
        with self._connected() as sock:
            began = time.perf_counter()
            for group in groups:
                sock.sendall(_frame(group))
                _ack(sock)
            return time.perf_counter() - began

    def consume(self, groups: Sequence[Sequence[bytes]]) -> float:
        """The seconds in which every frame was asked for, received, cut into its bodies and acked, one after the other.

        The ack is a small frame that the server appends, since a broker has to remember it, too.
        """
        with self._connected() as sock:
            requests = []
            for group in groups:
                frame = _frame(group)
                sock.sendall(frame)
                requests.append((_HEAD.pack(_READ, _PLACE.size) + _PLACE.pack(_ack(sock), len(frame)), len(frame)))
            touched = 0
            began = time.perf_counter()
            for request, size in requests:
                sock.sendall(request)
                for body in _bodies(sock.recv(size, socket.MSG_WAITALL)):
                    touched += len(body)
                sock.sendall(_frame((request[_HEAD.size :],)))
                _ack(sock)
            taken = time.perf_counter() - began
        if touched != sum(sum(map(len, group)) for group in groups):
            raise RuntimeError("the floor gave back something else than it got")
        return taken

    def window(self, bodies: Sequence[bytes], size: int) -> float:
        """The seconds in which all bodies were acked, one in a frame, so many at most under way on one socket."""
        with self._connected() as sock:
            began = time.perf_counter()
            sent = acked = 0  # acked in bytes: one may arrive in two pieces
            for body in bodies:
                while sent - acked // _ACK.size >= size:
                    acked += _more(len(sock.recv(_RECEIVE_BYTES)))
                sock.sendall(_frame((body,)))
                sent += 1
            while sent * _ACK.size > acked:
                acked += _more(len(sock.recv(_RECEIVE_BYTES)))
            return time.perf_counter() - began

    def relay(self, bodies: Sequence[bytes], pace: Callable[[Callable[[int], None]], None]) -> list[float]:
        """Seconds from just before each send to its arrival at a socket that listens.

        Parameters:
            pace: calls what it is given for every number of a body, when its time has come.
        """
        taken: list[float] = []
        with self._connected() as sender, self._connected() as listener:
            listener.sendall(_HEAD.pack(_LISTEN, 0))
            _ack(listener)
            threads = [
                threading.Thread(target=_listen, args=(listener, len(bodies), taken), daemon=True),
                threading.Thread(target=_discard, args=(sender,), daemon=True),
            ]
            for thread in threads:
                thread.start()

            def send(number: int) -> None:
                clock = _CLOCK.pack(time.perf_counter())
                sender.sendall(_frame((clock + bodies[number][_CLOCK.size :],)))

            pace(send)
            threads[0].join(30.0)
            sender.shutdown(socket.SHUT_RDWR)
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
        if len(taken) < len(bodies):
            raise RuntimeError(f"the floor relayed {len(taken)} of {len(bodies)} frames")
        return taken


def _frame(bodies: Sequence[bytes]) -> bytes:
    data = b"".join(bodies)
    lengths = struct.pack(f"<{len(bodies) + 1}I", len(bodies), *map(len, bodies))
    return b"".join((_HEAD.pack(_APPEND, len(lengths) + len(data)), lengths, data))


def _bodies(frame: bytes) -> list[bytes]:
    (count,) = _COUNT.unpack_from(frame, _HEAD.size)
    at = _HEAD.size + _COUNT.size
    bodies = []
    end = at + count * _COUNT.size
    for length in struct.unpack_from(f"<{count}I", frame, at):
        begin, end = end, end + length
        bodies.append(frame[begin:end])
    return bodies


def _ack(sock: socket.socket) -> int:
    ack = sock.recv(_ACK.size, socket.MSG_WAITALL)
    _more(len(ack))
    return int(_ACK.unpack(ack)[0])


def _more(received: int) -> int:
    if not received:
        raise RuntimeError("the floor is gone")
    return received


def _discard(sock: socket.socket) -> None:
    """Read the acks, which nobody waits for."""
    with contextlib.suppress(OSError):
        while sock.recv(_RECEIVE_BYTES):
            pass


def _listen(sock: socket.socket, count: int, taken: list[float]) -> None:
    parts = b""
    while len(taken) < count:
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            return
        parts += data
        at = 0
        while len(parts) - at >= _HEAD.size:
            end = at + _HEAD.size + _HEAD.unpack_from(parts, at)[1]
            if end > len(parts):
                break
            (body,) = _bodies(parts[at:end])
            taken.append(time.perf_counter() - _CLOCK.unpack_from(body)[0])
            at = end
        parts = parts[at:]


# --- the process ------------------------------------------------------------------------------------------------------


class _Server(asyncio.Protocol):
    fd: ClassVar[int]
    end: ClassVar[int] = 0
    peers: ClassVar[set[_Server]] = set()
    listeners: ClassVar[set[_Server]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.received = bytearray()
        self.peers.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.peers.discard(self)
        self.listeners.discard(self)
        if not self.peers:
            os.ftruncate(self.fd, 0)
            _Server.end = 0

    def data_received(self, data: bytes) -> None:
        received = self.received
        received += data
        at = 0
        while len(received) - at >= _HEAD.size:
            kind, size = _HEAD.unpack_from(received, at)
            end = at + _HEAD.size + size
            if end > len(received):
                break
            if kind == _READ:
                place, size = _PLACE.unpack_from(received, at + _HEAD.size)
                self.transport.write(os.pread(self.fd, size, place))
            else:
                place = self.end
                if kind == _LISTEN:
                    self.listeners.add(self)
                else:
                    frame = bytes(memoryview(received)[at:end])
                    _Server.end += os.pwrite(self.fd, frame, place)
                    for listener in self.listeners:
                        listener.transport.write(frame)
                self.transport.write(_ACK.pack(place))
            at = end
        del received[:at]


async def _serve() -> None:
    with tempfile.TemporaryFile() as file:
        _Server.fd = file.fileno()
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    run_until_stdin_ends(_serve)
