"""Wires between real processes: everything they say to each other passes here, and a test says who hears whom.

Each process is reached by others at the port of a wire. Which member has connected to another one is found in `/proc`,
so that one direction between two of them can be blocked and all others left alone. What is blocked is held back and not
dropped, as TCP would repeat it; when it is mended, a connection goes on, or is reset.

The wires are a process of their own (`python -m tests.integration.shard.wires`), which a test tells lines of JSON: the
threads of a load would hold them up.

What always holds: bytes arrive in order and unchanged, or not at all.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dmq.testing.processes import read_line
from tests.clock_offset import VARIABLE
from tests.patience import PATIENCE_S

CLIENT = "client"
REGISTRY = "registry"
_CHUNK_BYTES = 64 << 10

Way = tuple[str, str]  # from whom, to whom


class Wires:
    """The wires of one test.

    Parameters:
        folder: of the shard, whose members are known by the files of their clocks there.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.shard.wires", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, command: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        line = read_line(self._process.stdout, _deadline())
        assert line is not None, "the wires do not answer"
        return json.loads(line)

    def add(self, to: str, port: int, *, by: str | None = None) -> int:
        """A wire to a port of this machine; returns the one where it begins.

        Parameters:
            to: who is reached.
            by: who connects; found out if None.
        """
        return int(self._ask("add", to, port, by))

    def block(self, ways: Iterable[Way]) -> None:
        """Nothing is carried these ways."""
        self._ask("block", [*ways])

    def mend(self, *, reset: bool = False) -> None:
        """Everything is carried again.

        Parameters:
            reset: every connection ends instead of going on.
        """
        self._ask("mend", reset)

    def head(self, way: Way) -> bytes:
        """The first that was said this way on the newest connection."""
        return base64.b64decode(self._ask("head", *way))


def _deadline() -> float:
    return time.monotonic() + PATIENCE_S


# --- the process ------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One connection through a wire."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter


class Exchange:
    """Carries what passes the wires."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._servers: list[asyncio.Server] = []
        self._lines: set[Line] = set()
        self._blocked: set[Way] = set()
        self._mended = asyncio.Event()
        self._heads: dict[Way, bytes] = {}

    async def answer(self, command: str, *arguments: Any) -> object:
        """Do what the test says."""
        match command:
            case "add":
                return await self._add(*arguments)
            case "block":
                self._blocked |= {(one, other) for one, other in arguments[0]}
            case "mend":
                self._blocked.clear()
                self._mended.set()
                self._mended = asyncio.Event()
                if arguments[0]:
                    self._reset()
            case "head":
                return base64.b64encode(self._heads.get((arguments[0], arguments[1]), b"")).decode()
        return None

    def _reset(self) -> None:
        for line in self._lines:
            line.near.transport.abort()
            line.far.transport.abort()

    async def _add(self, to: str, port: int, by: str | None) -> int:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                near, far = (writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
                who = by or self._who(near, far)
                if who is not None:  # else it has gone again
                    await self._carry_all((who, to), port, reader, writer)
            writer.transport.abort()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _carry_all(self, way: Way, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._free(way)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        line = Line(writer, far_writer)
        self._lines.add(line)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(way, reader, far_writer))
                group.create_task(self._carry((way[1], way[0]), far_reader, writer))
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
                self._heads[way], is_first = data, False
            await self._free(way)
            sink.write(data)
            await sink.drain()
        raise ConnectionResetError  # one side is gone, so the other goes too

    async def _free(self, way: Way) -> None:
        while way in self._blocked:
            await self._mended.wait()

    def _who(self, near: int, far: int) -> str | None:
        """The member whose socket has a port, connected to another one."""
        inode = _inode_of(near, far)
        return next((name for name, pid in self._members() if inode in _sockets_of(pid)), None)

    def _members(self) -> Iterator[tuple[str, int]]:
        """Processes that were started with the clock of a member: its own, and the one that it was forked from."""
        wanted = f"{VARIABLE}={self._folder}/".encode()
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                for setting in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if setting.startswith(wanted):
                        yield Path(setting.decode()).stem, int(pid)


def _inode_of(near: int, far: int) -> str:
    ends = (f":{near:04X}", f":{far:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
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


async def main(folder: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    exchange = Exchange(folder)
    while line := await reader.readline():
        print(json.dumps(await exchange.answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
