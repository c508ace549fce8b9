"""One connection to a server of ours, on an event loop: requests and their answers, and what the server pushes.

What always holds: a request is answered once, or fails with `LinkLost` when the connection ends; nothing is sent before
the hello was answered; nothing is handed over after the end; a frame that fails its checksum ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected, ProtocolError
from dmq.net.address import ServerAddress
from dmq.protocol.commands import Command, decode_response, error_frame, request_head, response_head
from dmq.protocol.frame import Buffer, Frame, FrameParser, Kind, seal_whole
from dmq.protocol.header import Header
from dmq.protocol.session import FRAME_CRC, Heartbeat, Hello, HelloReply
from dmq.protocol.status import error_from_status
from dmq.version import __version__

__all__ = ["Link", "LinkLost"]

_HELLO: Final = 0xFFFF_FFFF
_APP: Final = "dmq"


class LinkLost(Exception):
    """The connection ended before the answer came."""


class Link(asyncio.BufferedProtocol):
    """Made by `Link.open`.

    Attributes:
        closed: why the connection has ended, once it has.
        heard_at: when bytes came last, on the monotonic clock.
    """

    def __init__(self, clock: Clock, peer: str, on_push: Callable[[Frame], None]) -> None:
        self._clock = clock
        self._peer = peer
        self._on_push = on_push
        self._parser = FrameParser(clock=clock)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Any, Buffer]]] = {}
        self._correlation = 0
        self._hello: asyncio.Future[HelloReply] = asyncio.get_running_loop().create_future()
        self._is_paused = False
        self.closed: asyncio.Future[DMQError] = asyncio.get_running_loop().create_future()
        self.heard_at = clock.monotonic()

    @classmethod
    async def open(
        cls,
        address: ServerAddress,
        owner: str,
        *,
        clock: Clock,
        peer: str,
        on_push: Callable[[Frame], None],
        frame_bytes_max: int = 0,
    ) -> Link:
        """Connect and say hello.

        Parameters:
            owner: who we are.
            peer: what the server is, for errors.
            on_push: hears the frames that the server sends by itself. What it raises ends the connection.
            frame_bytes_max: the largest frame to take from the server, if that is more than it takes itself.

        Raises:
            OSError: nobody answers there.
            DMQError: what the server answered.
        """
        hello = Hello(_APP, owner, software=f"dmq-python {__version__}", features=[FRAME_CRC])
        link = cls(clock, peer, on_push)
        await asyncio.get_running_loop().create_connection(lambda: link, address.host, address.port)
        try:
            assert link._transport is not None
            link._transport.write(seal_whole(request_head(Command.HELLO, hello, _HELLO)))
            reply = await link._hello
            parser = link._parser
            parser.frame_bytes_max = max(parser.frame_bytes_max, reply.limits.frame_bytes_max, frame_bytes_max)
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
        return (await self.exchange(command, header))[0]

    async def exchange(self, command: int, header: Header) -> tuple[Any, Buffer]:
        """The header and the body of the answer; see `request`."""
        if self._transport is None or self.closed.done():
            raise LinkLost
        self._correlation = self._correlation % (_HELLO - 1) + 1
        correlation = self._correlation
        future: asyncio.Future[tuple[Any, Buffer]] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = future
        try:
            self.send(request_head(command, header, correlation))
            return await future
        finally:
            self._waiting.pop(correlation, None)

    def send(self, frame: bytes) -> None:
        """Send a small frame that is whole; nothing happens if the connection has ended."""
        if self._transport is not None and not self.closed.done():
            self._transport.write(seal_whole(frame) if self._parser.is_checked else frame)

    @property
    def waiting_bytes(self) -> int:
        """Output that the server has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read."""
        return self._is_paused

    def pause(self) -> None:
        """Read nothing more for now: the server finds its output waiting."""
        if self._transport is not None and not (self._is_paused or self.closed.done()):
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and self._is_paused and not self.closed.done():
            self._is_paused = False
            self.heard_at = self._clock.monotonic()
            self._transport.resume_reading()

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
                if self.closed.done():
                    return
            if self._parser.error is not None:
                raise self._parser.error
        except DMQError as error:
            self.close(error)

    def eof_received(self) -> None:
        self.close(NotConnected(f"the {self._peer} closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(NotConnected(f"the connection to the {self._peer} broke ({exc or 'closed'})"))
        self._parser.drop()

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.RESPONSE:
            self._take_answer(frame)
        elif frame.kind == Kind.ONE_WAY:
            self._on_push(frame)
        elif frame.command == Command.HEARTBEAT:
            self.send(response_head(frame.command, Heartbeat(self._clock.now_ms()), frame.correlation))
        else:
            error = ProtocolError(f"a {self._peer} does not ask this of a client")
            self.send(error_frame(error, frame.command, frame.correlation))

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
            future.set_result((decode_response(frame), frame.body))
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
