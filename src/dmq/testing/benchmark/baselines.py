"""Raw baselines: what this machine can do without DMQ, measured in the same run.

`receive` is a process that only receives on loopback and writes to a file; `echo` is a bare event loop that sends back
what it gets. Each runs as `python -m dmq.testing.benchmark.baselines WHICH`, says its port, and ends with its stdin.

What always holds: the processes share nothing with DMQ but the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import cast

from dmq.testing.processes import read_line

__all__ = ["Echo", "Receiver", "fdatasync_seconds"]

_BUFFER_BYTES = 1 << 20


@contextlib.contextmanager
def _process(which: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dmq.testing.benchmark.baselines", which], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = read_line(process.stdout, time.monotonic() + 30)
        if line is None:
            raise RuntimeError(f"the baseline {which} did not start")
        yield int(line)
    finally:
        process.communicate()


class Receiver:
    """Bytes a second into a process that writes them to a file."""

    def __init__(self, port: int) -> None:
        self._port = port

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Receiver]:
        with _process("receive") as port:
            yield cls(port)

    def seconds(self, total_bytes: int, chunk_bytes: int) -> float:
        """How long it takes to get the bytes across, in chunks, until the other side has written them."""
        chunk = os.urandom(chunk_bytes)
        with socket.create_connection(("127.0.0.1", self._port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began = time.perf_counter()
            left = total_bytes
            while left > 0:
                sock.sendall(chunk if left >= chunk_bytes else chunk[:left])
                left -= chunk_bytes
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1)
            return time.perf_counter() - began


class Echo:
    """Round trips to a bare event loop."""

    def __init__(self, port: int) -> None:
        self._port = port

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Echo]:
        with _process("echo") as port:
            yield cls(port)

    def round_trips(self, count: int, size: int) -> list[float]:
        """The seconds of each of `count` round trips."""
        message = os.urandom(size)
        taken = []
        with socket.create_connection(("127.0.0.1", self._port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(count):
                began = time.perf_counter()
                sock.sendall(message)
                left = size
                while left:
                    received = len(sock.recv(left))
                    if not received:
                        raise RuntimeError("the echo is gone")
                    left -= received
                taken.append(time.perf_counter() - began)
        return taken


def fdatasync_seconds(folder: str, count: int, size: int) -> list[float]:
    """The seconds of each of `count` small writes with an fdatasync, in a file that is there already."""
    taken = []
    with tempfile.TemporaryFile(dir=folder) as file:
        fd = file.fileno()
        os.posix_fallocate(fd, 0, count * size)
        os.fsync(fd)
        data = os.urandom(size)
        for number in range(count):
            began = time.perf_counter()
            os.pwrite(fd, data, number * size)
            os.fdatasync(fd)
            taken.append(time.perf_counter() - began)
    return taken


# --- the processes ----------------------------------------------------------------------------------------------------


def _receive() -> None:
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryFile() as file:
        print(server.getsockname()[1], flush=True)
        while True:
            sock, _ = server.accept()
            with sock:
                while received := sock.recv_into(buffer):
                    os.write(file.fileno(), view[:received])
                file.seek(0)
                file.truncate()
                with contextlib.suppress(OSError):
                    sock.sendall(b".")


class _EchoProtocol(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _echo() -> None:
    server = await asyncio.get_running_loop().create_server(_EchoProtocol, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


def _main(which: str) -> None:
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    if which == "receive":
        _receive()
    try:
        import uvloop
    except ImportError:
        asyncio.run(_echo())
    else:
        uvloop.run(_echo())


if __name__ == "__main__":
    _main(sys.argv[1])
