"""Threads that wait for the disk, so that the event loop does not.

What always holds: work is begun in the order it was given, on at most as many threads as were allowed; the end of each
piece of work is told on the event loop, once, with its error or None.

An executor of the standard library would do the same with three futures and as many turns of the loop for each flush,
and a client that sends one flushed message at a time would wait for all of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TypeVar

__all__ = ["DiskThreads"]

_THREADS: Final = 2

T = TypeVar("T")
Work = tuple[Callable[[], None], Callable[[BaseException | None], None]]


class DiskThreads:
    """The threads of one journal writer; made on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads_max: int = _THREADS) -> None:
        self._loop = loop
        self._threads_max = threads_max
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def run(self, work: Callable[[], None], finished: Callable[[BaseException | None], None]) -> None:
        """Do some work in a thread; `finished` is called on the loop afterwards."""
        if self._busy >= len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._serve, name=f"dmq-disk_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._busy += 1
        self._waiting.put((work, finished))

    async def wait_for(self, work: Callable[[], T], /) -> T:
        """Do some work in a thread, and wait for what it returns or raises; who stops waiting does not stop it."""
        ended: asyncio.Future[T] = self._loop.create_future()
        returned: list[T] = []

        def finished(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(returned[0]) if error is None else ended.set_exception(error)

        self.run(lambda: returned.append(work()), finished)
        return await ended

    def _serve(self) -> None:
        while (given := self._waiting.get()) is not None:
            work, finished = given
            error: BaseException | None = None
            try:
                work()
            except BaseException as failure:
                error = failure
            try:
                self._loop.call_soon_threadsafe(self._tell, finished, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            # Nothing of it is kept alive while waiting for more.
            del given, work, finished, error

    def _tell(self, finished: Callable[[BaseException | None], None], error: BaseException | None) -> None:
        self._busy -= 1
        finished(error)

    def end(self) -> None:
        """The threads end after what is under way; nothing may be given any more."""
        for _ in self._threads:
            self._waiting.put(None)

    def close(self) -> None:
        """`end`, and wait for it."""
        self.end()
        for thread in self._threads:
            thread.join()
