"""Ports for servers that are to come back to them, each given to one process of the machine at a time.

What always holds: a port that this process took from `Ports` is not given to another one that asks here, also while
nobody listens on it: before its server has started, and while it is down.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from dmq.errors import PortTaken

__all__ = ["Ports", "free_port", "tidy_ports"]

_KEPT_MAX = 256  # a test needs some thirty at once


class Ports:
    """Some ports, shared by all processes that name the same file.

    A byte of the file stands for a port, and a lock on it for a claim, which ends with the process at the latest.

    Parameters:
        numbers: the ports.
        path: the file; made if it does not exist.
        kept_max: so many are claimed at most; who takes more gives back the oldest.
    """

    def __init__(self, numbers: Sequence[int], path: Path, *, kept_max: int = _KEPT_MAX) -> None:
        self._numbers = numbers
        self._path = path
        self._kept_max = kept_max
        self._mutex = threading.Lock()
        self._file: int | None = None  # never closed: that would end all claims
        self._claimed: deque[int] = deque()
        self._process = 0

    def take(self) -> int:
        """A port on which nobody listens, and which no other process has taken.

        Raises:
            PortTaken: there is none.
        """
        with self._mutex:
            if self._process != os.getpid():  # a fork does not inherit claims
                self._process = os.getpid()
                self._claimed.clear()
            if self._file is None:
                self._file = self._open()
            first = random.SystemRandom().randrange(len(self._numbers))
            for port in (*self._numbers[first:], *self._numbers[:first]):
                if port not in self._claimed and self._claims(self._file, port):
                    return port
        ends = f"{min(self._numbers)} to {max(self._numbers)}"
        raise PortTaken(f"all ports of {ends} are taken: stop the programs that have them")

    def tidy(self) -> None:
        """Give all ports back, and remove the file unless another process uses it: when a run ends."""
        with self._mutex, contextlib.suppress(OSError):
            file, self._file = self._file, None
            self._claimed.clear()
            if file is None:
                file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._path.unlink()
            finally:
                os.close(file)

    def _open(self) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            # A lock of the byte before the first port keeps `tidy` of others from removing the file.
            fcntl.lockf(file, fcntl.LOCK_SH, 1, 0)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), self._path.stat()):
                    return file
            os.close(file)  # it was removed meanwhile

    def _claims(self, file: int, port: int) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            return False
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            self._claimed.append(port)
            if len(self._claimed) > self._kept_max:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, self._claimed.popleft())
            return True
        fcntl.lockf(file, fcntl.LOCK_UN, 1, port)
        return False


# Below those that the system gives to outgoing connections: one of them might else have it when the server comes back.
_PORTS = Ports(range(20_000, 32_000), Path(tempfile.gettempdir()) / f"dmq-ports-{os.getuid()}")


def free_port() -> int:
    """A port for a server that is to come back to it; no other test, demo or benchmark of this machine gets it."""
    return _PORTS.take()


def tidy_ports() -> None:
    """Leave nothing of `free_port` behind, at the end of a run."""
    _PORTS.tidy()
