"""One connection to a name server, on an event loop: requests and their answers, and what it tells by itself.

What always holds: a request is answered once, or fails with `LinkLost` when the connection ends; nothing is sent before
the hello was answered; a name server that is silent for three heartbeats is given up.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected, ProtocolError
from dmq.protocol.cluster.registry import RegistryChanged
from dmq.protocol.commands import Command, decode_request, decode_response, error_frame, request_head, response_head
from dmq.protocol.frame import Frame, FrameParser, Kind, seal_whole
from dmq.protocol.header import Header
from dmq.protocol.session import FRAME_CRC, Heartbeat, Hello, HelloReply
from dmq.protocol.status import error_from_status
from dmq.version import __version__

__all__ = ["Link", "LinkLost"]

_HELLO: Final = 0xFFFF_FFFF
_APP: Final = "dmq"
_SILENT_BEATS: Final = 3


class LinkLost(Exception):
    """The connection ended before the answer came."""


class Link(asyncio.BufferedProtocol):
    """Made by `Link.open`."""

    def __init__(self, clock: Clock, on_changed: Callable[[RegistryChanged], None]) -> None:
        self._clock = clock
        self._on_changed = on_changed
        self._parser = FrameParser(clock=clock)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._correlation = 0
        self._hello: asyncio.Future[HelloReply] = asyncio.get_running_loop().create_future()
        self.closed: asyncio.Future[DMQError] = asyncio.get_running_loop().create_future()
        """Why the connection has ended, once it has."""
        self.heard_at = clock.monotonic()

    @classmethod
    async def open(
        cls, host: str, port: int, owner: str, *, clock: Clock, on_changed: Callable[[RegistryChanged], None]
    ) -> Link:
        """Connect and say hello.

        Raises:
            OSError: nobody answers there.
            DMQError: what the server answered.
        """
        hello = Hello(_APP, owner, software=f"dmq-python {__version__}", features=[FRAME_CRC])
        link = cls(clock, on_changed)
        await asyncio.get_running_loop().create_connection(lambda: link, host, port)
        try:
            assert link._transport is not None
            link._transport.write(seal_whole(request_head(Command.HELLO, hello, _HELLO)))
            reply = await link._hello
            link._parser.frame_bytes_max = max(link._parser.frame_bytes_max, reply.limits.frame_bytes_max)
        except BaseException:
            link.close(NotConnected("the hello was not answered"))
            raise
        return link

    async def request(self, command: int, header: Header) -> Any:
        """The header of the answer.

        Raises:
            LinkLost: the connection ended before it came.
            DMQError: what the server answered.
        """
        if self._transport is None or self.closed.done():
            raise LinkLost
        self._correlation = self._correlation % (_HELLO - 1) + 1
        correlation = self._correlation
        future = self._waiting[correlation] = asyncio.get_running_loop().create_future()
        try:
            self._send(request_head(command, header, correlation))
            return await future
        finally:
            self._waiting.pop(correlation, None)

    def _send(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(seal_whole(frame) if self._parser.is_checked else frame)

    # --- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed.done():
            return
        self.heard_at = self._clock.monotonic()
        try:
            for frame in self._parser.buffer_updated(nbytes):
                self._take(frame)
            if self._parser.error is not None:
                raise self._parser.error
        except DMQError as error:
            self.close(error)

    def eof_received(self) -> None:
        self.close(NotConnected("the name server closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(NotConnected(f"the connection to the name server broke ({exc or 'closed'})"))

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.RESPONSE:
            self._take_answer(frame)
        elif frame.kind == Kind.ONE_WAY:
            if frame.command == Command.REGISTRY_CHANGED:
                self._on_changed(decode_request(frame))
        elif frame.command == Command.HEARTBEAT:
            self._send(response_head(frame.command, Heartbeat(self._clock.now_ms()), frame.correlation))
        else:
            error = ProtocolError("a name server does not ask this of a client")
            self._send(error_frame(error, frame.command, frame.correlation))

    def _take_answer(self, frame: Frame) -> None:
        if frame.command == Command.HELLO and not self._hello.done():
            try:
                reply: HelloReply = decode_response(frame)
                if (FRAME_CRC in reply.features) != self._parser.is_checked:
                    raise ProtocolError("the answer to the hello says one thing of checksums and does another")
            except DMQError as error:
                self._hello.set_exception(error)
            else:
                self._hello.set_result(reply)
            return
        if frame.command == Command.NONE and frame.status:
            raise error_from_status(frame.status, frame.header)
        future = self._waiting.pop(frame.correlation, None)
        if future is None or future.done():
            return  # the caller has given up on it
        try:
            future.set_result(decode_response(frame))
        except DMQError as error:
            future.set_exception(error)

    def close(self, reason: DMQError) -> None:
        """End the connection; does nothing the second time."""
        if self.closed.done():
            return
        self.closed.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
        if not self._hello.done():
            self._hello.set_exception(reason)
            self._hello.exception()  # retrieved, though nobody may wait for it
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(LinkLost())
