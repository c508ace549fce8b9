"""Turns: messages of one sequence go one at a time through a process, others beside them.

What always holds: there is a lock for a name only while somebody has it or waits for it, so there are never more locks
than threads or tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Hashable, Iterator

__all__ = ["AioTurns", "Turns"]


class Turns:
    """For threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[Hashable, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def of(self, name: Hashable) -> Iterator[None]:
        """Wait for the turn of a name, and have it for the block."""
        with self._mutex:
            lock, users = self._locks.get(name, (threading.Lock(), 0))
            self._locks[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._mutex:
                users = self._locks[name][1] - 1
                if users:
                    self._locks[name] = (lock, users)
                else:
                    del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)


class AioTurns:
    """For tasks of one event loop."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def of(self, name: Hashable) -> AsyncIterator[None]:
        """Wait for the turn of a name, and have it for the block."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[name][1] - 1
            if users:
                self._locks[name] = (lock, users)
            else:
                del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)
