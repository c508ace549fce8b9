"""Wires between real processes: everything they say to each other passes here, and a test says who hears whom.

Each process is reached by others at the port of a wire. Who has connected is found in `/proc`, so that one direction
between two of them can be blocked and all others left alone. What is blocked is held back and not dropped, as TCP would
repeat it; when it is mended, a connection goes on, or is reset.

What always holds: bytes arrive in order and unchanged, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

CLIENT = "client"
REGISTRY = "registry"
_CHUNK_BYTES = 64 << 10
_START_SECONDS = 30.0

Way = tuple[str, str]  # from whom, to whom


class Line(NamedTuple):
    """One connection through a wire."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter


class Wires:
    """The wires of one test, on a thread of their own.

    Attributes:
        pids: of the processes that connect, by their names; asked for each connection.
    """

    def __init__(self) -> None:
        self.pids: Callable[[], Mapping[str, int]] = dict
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._lines: set[Line] = set()
        self._blocked: set[Way] = set()
        self._mended = asyncio.Event()
        self.delays: dict[Way, float] = {}
        self.heads: dict[Way, bytes] = {}  # the first that was said on the newest connection

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mend()
        self._call(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, to: str, port: int, *, by: str | None = None) -> int:
        """A wire to a port of this machine; returns the one where it begins.

        Parameters:
            to: who is reached.
            by: who connects; found out if None.
        """
        return asyncio.run_coroutine_threadsafe(self._add(to, port, by), self._loop).result(_START_SECONDS)

    def block(self, ways: Iterable[Way]) -> None:
        """Nothing is carried these ways."""
        wanted = {*ways}
        self._call(lambda: self._blocked.update(wanted))

    def mend(self, *, reset: bool = False) -> None:
        """Everything is carried again.

        Parameters:
            reset: every connection ends instead of going on.
        """

        def work() -> None:
            self._blocked.clear()
            self._mended.set()
            self._mended = asyncio.Event()
            if reset:
                self._reset()

        self._call(work)

    def reset(self) -> None:
        """Every connection ends."""
        self._call(self._reset)

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(_START_SECONDS)

    def _reset(self) -> None:
        for line in self._lines:
            line.near.transport.abort()
            line.far.transport.abort()

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        self._reset()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _add(self, to: str, port: int, by: str | None) -> int:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                who = by or self._who(writer.get_extra_info("peername")[1])
                await self._carry_all(who, to, port, reader, writer)
            writer.transport.abort()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _carry_all(
        self, who: str, to: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._free((who, to))
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        line = Line(writer, far_writer)
        self._lines.add(line)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry((who, to), reader, far_writer))
                group.create_task(self._carry((to, who), far_reader, writer))
        except* OSError:
            pass
        finally:
            self._lines.discard(line)
            writer.transport.abort()
            far_writer.transport.abort()

    async def _carry(self, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        is_first = True
        while data := await source.read(_CHUNK_BYTES):
            if is_first:
                self.heads[way], is_first = data, False
            if delay := self.delays.get(way):
                await asyncio.sleep(delay)
            await self._free(way)
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError  # one side is gone, so the other goes too

    async def _free(self, way: Way) -> None:
        while way in self._blocked:
            await self._mended.wait()

    def _who(self, port: int) -> str:
        """The process whose socket has a port."""
        inode = _inode_of(port)
        return next((name for name, pid in self.pids().items() if inode in _sockets_of(pid)), CLIENT)


def _inode_of(port: int) -> str:
    ending = f":{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(ending):
            return fields[9]
    return ""


def _sockets_of(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{number}")
            if target.startswith("socket:["):
                yield target[8:-1]
