"""The telnet port (D-11): a person with `telnet` or `nc` sees how the broker is. Read only.

What always holds: at most `connections_max` are served at a time; one that types nothing for `idle_seconds`, sends a
line without an end, or does not take its answer in time is closed; whoever talks HTTP is sent away.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.telnet_words import QUIT, answer, greeting
from dmq.net.lines import LineReader, LineTooLong
from dmq.net.server import translate_listen_error

__all__ = ["TelnetServer"]

log = logging.getLogger(__name__)

_CONNECTIONS_MAX: Final = 16
_IDLE_SECONDS: Final = 300.0
_WRITE_SECONDS: Final = 10.0
_READ_BYTES: Final = 1024
_PROMPT: Final = "> "
# A page that a person's browser was lured to could ask, too, and would get an answer on their behalf.
_HTTP: Final = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "CONNECT", "PATCH")


class TelnetServer:
    """See the module."""

    def __init__(
        self, broker: Broker, *, connections_max: int = _CONNECTIONS_MAX, idle_seconds: float = _IDLE_SECONDS
    ) -> None:
        self._broker = broker
        self._connections_max = connections_max
        self._idle_seconds = idle_seconds
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Begin to serve; returns the port in force.

        Raises:
            PortTaken, CannotListen.
        """
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_READ_BYTES)
        except OSError as error:
            raise translate_listen_error(error, host, port) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._serving) >= self._connections_max:
                await self._say(writer, f"{self._connections_max} connections are open here, which is the limit.\n")
                return
            self._serving.add(task)
            await self._serve(reader, writer)
        except (TimeoutError, OSError, LineTooLong):
            pass  # whoever was there is gone, asleep, or no person
        except asyncio.CancelledError:
            pass  # the broker stops
        except Exception:  # a defect here must harm nobody else
            log.exception("a telnet connection failed")
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = LineReader()
        await self._say(writer, greeting(self._broker) + _PROMPT)
        while True:
            async with asyncio.timeout(self._idle_seconds):
                data = await reader.read(_READ_BYTES)
            if not data:
                return
            found, replies = lines.feed(data)
            writer.write(replies)
            for line in found:
                word = line.split(maxsplit=1)[0] if line.split() else ""
                if word.lower() in QUIT or word in _HTTP:
                    return
                await self._say(writer, await answer(self._broker, line) + _PROMPT)
            if lines.is_over:
                return

    async def _say(self, writer: asyncio.StreamWriter, text: str) -> None:
        async with asyncio.timeout(_WRITE_SECONDS):
            writer.write(text.replace("\n", "\r\n").encode())
            await writer.drain()

    async def close(self) -> None:
        """Serve nobody any more."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        if self._server is not None:
            await self._server.wait_closed()
