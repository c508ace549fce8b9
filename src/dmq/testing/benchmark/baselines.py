"""Raw baselines: what this machine can do without DMQ, measured in the same run.

`echo` is a blocking process that answers so many bytes with 8; `floor`, a module of its own, is the least that a
message server has to do. Both run as processes of their own, say their port, and end with their stdin.

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
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, NamedTuple, Self

from dmq.testing.processes import read_line

__all__ = ["ANSWER_BYTES", "Child", "Echo", "child", "fdatasync_seconds", "run_until_stdin_ends"]

ANSWER_BYTES: Final = 8
_SIZE_BYTES: Final = 4


class Child(NamedTuple):
    """A process of a baseline."""

    port: int
    pid: int


@contextlib.contextmanager
def child(module: str) -> Iterator[Child]:
    """A process that runs a module for as long as it is needed, and said its port.

    Raises:
        RuntimeError: it did not start.
    """
    process = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = read_line(process.stdout, time.monotonic() + 30)
        if line is None:
            raise RuntimeError(f"the baseline {module} did not start")
        yield Child(int(line), process.pid)
    finally:
        process.communicate()


def run_until_stdin_ends(serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a server on the fastest event loop there is, until the process that started this one lets go of it."""
    _end_with_stdin()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve())
    else:
        uvloop.run(serve())


class Echo:
    """Round trips to a blocking process: so many bytes there, 8 back."""

    def __init__(self, port: int) -> None:
        self.port = port

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Self]:
        with child("dmq.testing.benchmark.baselines") as started:
            yield cls(started.port)

    def round_trips(self, count: int, size: int) -> list[float]:
        """The seconds of each of `count` round trips."""
        message = os.urandom(size)
        taken = []
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(size.to_bytes(_SIZE_BYTES, "big"))
            for _ in range(count):
                began = time.perf_counter()
                sock.sendall(message)
                if len(sock.recv(ANSWER_BYTES)) != ANSWER_BYTES:
                    raise RuntimeError("the echo is gone")
                taken.append(time.perf_counter() - began)
        return taken


def fdatasync_seconds(folder: str, count: int, size: int) -> list[float]:
    """The seconds of each of `count` small writes with an fdatasync, in a file that exists already."""
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


# --- the echo ---------------------------------------------------------------------------------------------------------


def _end_with_stdin() -> None:
    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock, contextlib.suppress(OSError):
                size = int.from_bytes(sock.recv(_SIZE_BYTES, socket.MSG_WAITALL), "big")
                while len(sock.recv(size, socket.MSG_WAITALL)) == size > 0:
                    sock.sendall(bytes(ANSWER_BYTES))


if __name__ == "__main__":
    _end_with_stdin()
    _answer()
