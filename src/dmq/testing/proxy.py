"""A TCP proxy that does to connections what networks do: it cuts, stalls, delays, and loses one direction.

Two threads carry each connection, one a direction, with a small buffer in between and nothing else: a side that does
not read holds up the side that writes, as on a wire.

What always holds: bytes arrive in order and unchanged, or not at all; a cut may fall anywhere within a frame; after
`close` no thread and no socket of the proxy is left.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

__all__ = ["ChaosProxy"]

_CHUNK_BYTES: Final = 16 << 10
_CONNECT_SECONDS: Final = 5.0
# Closing with this set sends a reset, and drops what was not sent: a cut, not a farewell.
_RESET: Final = struct.pack("ii", 1, 0)


class _Line:
    """One connection through the proxy: two sockets, two directions."""

    def __init__(self, client: socket.socket, target: socket.socket) -> None:
        self.client = client
        self.target = target
        self._ends = threading.Lock()
        self._is_cut = False

    def cut(self) -> None:
        """Reset both sides."""
        with self._ends:
            if self._is_cut:
                return
            self._is_cut = True
        for sock in (self.client, self.target):
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                # Wakes the threads that read and write there; closing alone would not.
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # that side was gone already

    def close(self) -> None:
        self.client.close()
        self.target.close()


class ChaosProxy:
    """Listens on loopback and carries connections to a target, until told otherwise.

    Parameters:
        target: host and port it carries to; nobody needs to listen there yet.
        port: where it listens; 0 takes any free one.
    """

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self.delay_seconds = 0.0
        """How long each piece is held back, in both directions."""
        self._to_target = threading.Event()
        self._to_client = threading.Event()
        self.resume()
        self._state = threading.Lock()
        self._lines: list[_Line] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self.accepted = 0
        self._accepter = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._accepter.start()

    @property
    def url(self) -> str:
        return f"dmq://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._lines)

    # --- what a test does to connections ----------------------------------------------------------------------------

    def cut(self, count: int | None = None, rng: random.Random | None = None) -> int:
        """Break connections, all or a number of them; returns how many."""
        with self._state:
            lines = [*self._lines]
        if count is not None and count < len(lines):
            lines = (rng or random.Random()).sample(lines, count)
        for line in lines:
            line.cut()
        return len(lines)

    def stall(self, *, to_target: bool = True, to_client: bool = True) -> None:
        """Carry nothing in these directions until `resume`, without closing anything: a one-way cut, or both."""
        if to_target:
            self._to_target.clear()
        if to_client:
            self._to_client.clear()

    def resume(self) -> None:
        """Carry on in both directions."""
        self._to_target.set()
        self._to_client.set()

    # --- carrying ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                target = socket.create_connection(self._target, _CONNECT_SECONDS)
            except OSError:
                client.close()
                continue
            for sock in (client, target):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = _Line(client, target)
            threads = [
                threading.Thread(target=self._carry, args=(line, client, target, self._to_target), daemon=True),
                threading.Thread(target=self._carry, args=(line, target, client, self._to_client), daemon=True),
            ]
            with self._state:
                self.accepted += 1
                self._lines.append(line)
                self._threads = [thread for thread in self._threads if thread.is_alive()] + threads
                is_closed = self._is_closed
            for thread in threads:
                thread.start()
            if is_closed:
                line.cut()

    def _carry(self, line: _Line, source: socket.socket, sink: socket.socket, may_go: threading.Event) -> None:
        pause = threading.Event()
        try:
            for data in self._pieces(source, may_go is self._to_target):
                if self.delay_seconds:
                    pause.wait(self.delay_seconds)
                may_go.wait()
                sink.sendall(data)
        except OSError:
            pass  # one side is gone, so the other goes too
        line.cut()
        with self._state:
            is_last = line not in self._lines
            if not is_last:
                self._lines.remove(line)
        if is_last:  # the other direction has ended before
            line.close()

    def _pieces(self, source: socket.socket, is_to_target: bool) -> Iterator[bytes]:
        """What to carry of what comes from a side; for those who change it."""
        while data := source.recv(_CHUNK_BYTES):
            yield data

    def close(self) -> None:
        """Cut everything and listen no more."""
        with self._state:
            self._is_closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed before
        self._listener.close()
        self._accepter.join()
        self.resume()
        self.cut()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
