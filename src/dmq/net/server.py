"""A listening server: accepts connections, bounds their number, and ends those that stall.

What always holds: at most `connections_max` connections; one that does not say hello in time, leaves a frame half
sent, or is silent for three heartbeats is closed. Frames that were begun a while ago and are not whole take at most
`partial_bytes_max` together: beyond that those that began first end with their connections.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from dmq.clock import Clock
from dmq.errors import Busy, CannotListen, DMQError, PortTaken
from dmq.event_log import EventLog
from dmq.net.connection import Connection, Peer, WriteCoalescer
from dmq.protocol.commands import error_frame
from dmq.protocol.frame import Chunks

__all__ = ["ConnectionLimits", "Server", "listen", "translate_listen_error"]

log = EventLog(__name__)

_PARTIAL_SECONDS_MIN: Final = 1.0  # one that began after this may just be on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What the connections of a server may take, in number, bytes and time."""

    connections_max: int
    output_bytes_max: int
    hello_seconds: float
    partial_seconds: float
    partial_bytes_max: int
    silence_seconds: float


class Server:
    def __init__(
        self, peer: Peer, clock: Clock, limits: ConnectionLimits, *, outbox: WriteCoalescer | None = None
    ) -> None:
        self._peer = peer
        self._outbox = outbox or WriteCoalescer()
        self._chunks = Chunks()
        self._clock = clock
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._is_closing = False
        self.connections: set[Connection] = set()
        self.refused = 0

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begin to accept; returns the address in force.

        Raises:
            PortTaken: somebody else listens there.
        """
        self._server = await listen(self._make, host, port)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    def _make(self) -> Connection:
        return Connection(
            self._peer,
            self._clock,
            self._limits.output_bytes_max,
            self._track,
            outbox=self._outbox,
            chunks=self._chunks,
        )

    def _track(self, connection: Connection, is_there: bool) -> None:
        if not is_there:
            self.connections.discard(connection)
            return
        self.connections.add(connection)
        if self._is_closing:
            connection.abort()
        elif len(self.connections) > (most := self._limits.connections_max):
            self.refused += 1
            log.warning(
                "connection refused",
                once_for="connections_max",
                reason=f"broker.connections_max = {most} are open",
                address=connection.whence,
            )
            connection.send(error_frame(Busy(f"{most} connections are open, which is the limit")))
            connection.close()

    def sweep(self) -> None:
        """Close what stalls; called every second or so."""
        now = self._clock.monotonic()
        partial: list[tuple[float, int, Connection]] = []
        for connection in list(self.connections):
            if connection.heard != connection.heard_before:
                connection.heard_before, connection.heard_at = connection.heard, now
            connection.is_silent = now - connection.heard_at > self._limits.silence_seconds
            since = connection.parser.pending_since
            reason = self._stall(connection, since, now)
            if reason:
                log.info(
                    "stalled connection closed",
                    once_for=(connection.address[0], reason),
                    reason=reason,
                    address=connection.whence,
                )
                connection.abort()
            elif since is not None and now - since > _PARTIAL_SECONDS_MIN:
                partial.append((since, connection.parser.pending_bytes, connection))
        self._bound(partial)

    def _stall(self, connection: Connection, since: float | None, now: float) -> str:
        """Why a connection is to be closed; empty if it is not."""
        limits = self._limits
        if since is not None and not connection.is_stalled and now - since > limits.partial_seconds:
            return f"half a frame for {limits.partial_seconds:g} s"
        if connection.session is None and now - connection.opened_at > limits.hello_seconds:
            return f"no hello within {limits.hello_seconds:g} s"
        return f"silent for {limits.silence_seconds:g} s" if connection.is_silent else ""

    def _bound(self, partial: list[tuple[float, int, Connection]]) -> None:
        """Of frames that are half here, with when they began and how much is here, keep no more than may be."""
        over = sum(size for _, size, _ in partial) - self._limits.partial_bytes_max
        if over <= 0:
            return
        for _, size, connection in sorted(partial, key=itemgetter(0)):
            log.warning(
                "connection closed: half-sent frames take too much",
                once_for=connection.address[0],
                limit_bytes=self._limits.partial_bytes_max,
                address=connection.whence,
            )
            connection.abort()
            over -= size
            if over <= 0:
                return

    def stop_listening(self) -> None:
        """Accept nobody any more."""
        server = self._server
        if server is None or not server.is_serving():
            return
        loop = asyncio.get_running_loop()
        if not isinstance(loop, asyncio.SelectorEventLoop):
            server.close()
            return
        # asyncio 3.11 fails on a peer that it has accepted if the server closes before the peer has its transport, and
        # leaves the socket open: so the server closes some turns after the last was accepted.
        for sock in server.sockets:
            loop.remove_reader(sock.fileno())
        loop.call_soon(loop.call_soon, loop.call_soon, server.close)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        self._is_closing = True
        self.stop_listening()
        await _turns()
        for connection in list(self.connections):
            connection.close()
        for _ in range(100):
            if not self.connections:
                break
            await asyncio.sleep(0.01)
        await self.abort()

    async def abort(self) -> None:
        """Stop listening and cut every connection."""
        self._is_closing = True
        self.stop_listening()
        for connection in list(self.connections):
            connection.abort()
        await _turns()
        if self._server is not None:
            await self._server.wait_closed()


async def _turns() -> None:
    """Let the loop turn some times, since it may end with the call.

    A peer that was accepted a moment ago gets a connection two turns later, and is cut then; an aborted connection
    closes its socket in the turn after.
    """
    for _ in range(6):
        await asyncio.sleep(0)


async def listen(make: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> asyncio.Server:
    """A listening socket.

    Raises:
        PortTaken, CannotListen.
    """
    try:
        return await asyncio.get_running_loop().create_server(make, host, port, backlog=4096, reuse_address=True)
    except OSError as error:
        raise translate_listen_error(error, host, port) from error


def translate_listen_error(error: OSError, host: str, port: int) -> DMQError:
    """Why listening failed, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return PortTaken(
            f"port {port} on {host} is taken: stop the program that has it, or choose another port",
            host=host,
            port=port,
        )
    # asyncio puts the address into the system's words; the reason stands behind it.
    reason = (error.strerror or str(error)).rpartition("): ")[2]
    return CannotListen(
        f"cannot listen on {host}:{port} ({reason}): choose an address of this machine, and a port you may use",
        host=host,
        port=port,
    )
