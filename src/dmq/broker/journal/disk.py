"""Threads that wait for the disk, so that the event loop does not.

What always holds: work is begun in the order it was given, on at most `_THREADS` threads; the end of each piece of work
is told on the event loop, once, with its error or None.

A pool of the standard library would do, with three futures and as many turns of the loop for each flush; somebody who
sends one flushed message at a time waits for all of them.

Whoever waits for more of the journal to become visible.

What always holds: no more wait than may; whoever waits is woken by every unit, and now and then without one, so that it
can look at the time.

Questions to the store that may need the disk, asked without letting the event loop wait for it.

The loop asks. Where bytes are missing the store says which; a thread reads those, and the loop asks again. So the store
has one owner, and a slow disk holds up nobody but whoever asked for what lies on it.

What always holds: what is asked is asked on the loop; a question is answered, or fails with the store's error. A
client's questions with large answers take turns, and the next is looked up only when it has taken the answer before; no
more than `asked_max` of these are open, an eighth of them of one client, and beyond that they are refused with `Busy`.
What a client asked that is gone is not looked up. However many ask for megabytes, only `BULK_MAX` are looked up at a
time, and after each the rest of the loop goes on: readers wait for each other, and producers for no more than those.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

from dmq.errors import Busy, NotConnected
from dmq.storage.file_pool import NeedsDisk, Prepared
from dmq.storage.queries import Queries

if TYPE_CHECKING:
    from dmq.broker.wire.session import Session

__all__ = ["Arrivals", "DiskReads", "DiskThreads"]


class Arrivals:
    """See the module."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._count = 0
        self._waiting: list[asyncio.Future[None]] = []

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Within this, somebody waits.

        Raises:
            Busy: too many do already.
        """
        if self._count >= self._waiting_max:
            raise Busy(f"{self._count} wait for the journal already: try again shortly", retry_after_ms=100)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    async def more(self) -> None:
        """Wait until more has become visible, or some time has passed."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def wake(self) -> None:
        """Have all look again."""
        woken, self._waiting = self._waiting, []
        for waiting in woken:
            if not waiting.done():
                waiting.set_result(None)


_THREADS: Final = 2

Work = tuple[Callable[[], None], Callable[[BaseException | None], None]]


class DiskThreads:
    """See the module; made on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def run(self, work: Callable[[], None], finished: Callable[[BaseException | None], None]) -> None:
        """Do some work in a thread; `finished` is called on the loop afterwards."""
        if self._busy >= len(self._threads) < _THREADS:
            thread = threading.Thread(target=self._serve, name=f"dmq-disk_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._busy += 1
        self._waiting.put((work, finished))

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

    def close(self) -> None:
        """Wait for what is under way; nothing may be given any more."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()


_READ_THREADS: Final = 4
_ASKED_MAX: Final = 256
_AGAIN_MS: Final = 50
_ROOM_SECONDS: Final = 0.01
_SHARE: Final = 8
BULK_MAX: Final = 2  # one waits for the disk while the other is answered
# A question about a tail that grows could miss a little more each time.
_ATTEMPTS_MAX: Final = 10_000

T = TypeVar("T")


class DiskReads:
    """See the module."""

    def __init__(self, queries: Queries, *, threads: int = _READ_THREADS, asked_max: int = _ASKED_MAX) -> None:
        self._queries = queries
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dmq-read")
        self._asked_max = asked_max
        self._serving = asyncio.Semaphore(BULK_MAX)
        self.asked = 0
        self.reads = 0

    @contextlib.asynccontextmanager
    async def turn(self, session: Session) -> AsyncIterator[None]:
        """Within this, a client's questions are looked up and answered, one request after the other.

        Raises:
            Busy: too many are asked already.
            NotConnected: the client is gone.
        """
        with self._counted(session):
            async with session.reading:
                while session.connection.is_open and not session.connection.is_writable:
                    await asyncio.sleep(_ROOM_SECONDS)
                if not session.connection.is_open:
                    raise NotConnected("the client is gone, nobody waits for the answer")
                yield

    @contextlib.asynccontextmanager
    async def bulk(self) -> AsyncIterator[None]:
        """Within this, within a turn, megabytes are looked up and answered: a few at a time of all clients."""
        async with self._serving:
            yield
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def _counted(self, session: Session) -> Iterator[None]:
        # No client may take all the room there is.
        if self.asked >= self._asked_max or session.asked >= max(1, self._asked_max // _SHARE):
            raise Busy(f"{self.asked} questions wait for the disk already: try again shortly", retry_after_ms=_AGAIN_MS)
        self.asked += 1
        session.asked += 1
        try:
            yield
        finally:
            self.asked -= 1
            session.asked -= 1

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question that changes nothing; large ones are asked in their `turn`."""
        prepared: Prepared = {}
        for _ in range(_ATTEMPTS_MAX):
            try:
                with self._queries.deferring(prepared):
                    return question()
            except NeedsDisk as need:
                missing = need
            prepared[missing.key] = await self._read(missing)
        return question()

    async def work(self, task: Callable[[], T]) -> T:
        """Do something in a thread that takes long and touches nothing of the store."""
        return await self._loop.run_in_executor(self._threads, task)

    async def _read(self, need: NeedsDisk) -> bytes | Exception:
        self.reads += 1
        with self._queries.lending():
            try:
                return await self._loop.run_in_executor(self._threads, self._queries.fetch, need)
            except Exception as error:  # the question decides what it means
                return error

    def close(self) -> None:
        """No more reads: those under way end, those that wait fail."""
        self._threads.shutdown(wait=True, cancel_futures=True)
