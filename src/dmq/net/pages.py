"""A tiny HTTP server for pages a machine or a person reads: metrics, health, status. GET only, one answer each.

What always holds: a request is at most 8 KiB and must arrive within a few seconds; nothing is read from a body; the
loop does other work after each part of a page.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from dmq.errors import DMQError, InvalidRequest
from dmq.net.server import translate_listen_error

__all__ = ["MakePage", "Page", "PageServer"]

_REQUEST_BYTES_MAX: Final = 8192
_REQUEST_SECONDS: Final = 5.0
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Unavailable"}


class Page(NamedTuple):
    """What is answered.

    Attributes:
        text: all of it, or its parts, which are written one by one.
    """

    text: str | Sequence[str]
    status: int = 200
    kind: str = "text/plain; charset=utf-8"


# Takes what stands behind the question mark.
MakePage: TypeAlias = Callable[[Mapping[str, str]], Page | Awaitable[Page]]


class PageServer:
    """Serves functions as pages, by path."""

    def __init__(self, pages: dict[str, MakePage]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to serve; returns the port in force.

        Raises:
            PortTaken, CannotListen.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES_MAX)
        except OSError as error:
            raise translate_listen_error(error, host, port) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                page = await self._page(head)
                parts = [part.encode() for part in ((page.text,) if isinstance(page.text, str) else page.text)]
                reason = _REASONS.get(page.status, "")
                writer.write(
                    f"HTTP/1.1 {page.status} {reason}\r\nContent-Type: {page.kind}\r\n"
                    f"Content-Length: {sum(map(len, parts))}\r\nConnection: close\r\n\r\n".encode()
                )
                for part in () if head.startswith(b"HEAD ") else parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, or asked for too much
        finally:
            writer.close()

    async def _page(self, head: bytes) -> Page:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3:
            return Page("this is an HTTP page\n", 400)
        if words[0] not in (b"GET", b"HEAD"):
            return Page("only GET is answered here\n", 405)
        path, _, query = words[1].decode("latin-1").partition("?")
        make = self._pages.get(path)
        if make is None:
            return Page("there is no such page: " + ", ".join(sorted(self._pages)) + "\n", 404)
        try:
            made = make(dict(parse_qsl(query)))
            return await made if inspect.isawaitable(made) else made
        except InvalidRequest as error:
            return Page(f"{error.message}\n", 400)
        except DMQError as error:
            return Page(f"{error.message}\n", 503)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
