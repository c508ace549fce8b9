"""Work that may wait for the disk, so that the event loop does not: threads, and questions to the store.

`DiskThreads` do what flushes. What always holds: work is begun in the order it was given, on at most as many threads as
were allowed; the end of each piece of work is told on the event loop, once, with its error or None. An executor of the
standard library would do the same with three futures and as many turns of the loop for each flush, and a client that
sends one flushed message at a time would wait for all of them.

`DiskReads` are questions to the store that may need the disk. The loop asks. Where bytes are missing the store says
which; a thread reads those, and the loop asks again. So the store has one owner, and a slow disk delays only the
questions about what lies on it.

What always holds: every question is asked on the loop, and is answered or fails with the store's error. The questions
of one client with large answers take turns, and the next is looked up only when the client has taken the answer before;
no more than `asked_max` of these are open, an eighth of them of one client, and beyond that they are refused with
`Busy`. Questions of a client that is gone are not looked up. However many ask for megabytes, only `BULK_MAX` are looked
up at a time, and after each the rest of the loop goes on: readers wait for each other, and producers for no more than
those.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from dmq.errors import Busy, Damaged, DMQError, NotConnected
from dmq.storage.file_pool import NeedsDisk, Prepared
from dmq.storage.queries import Queries

__all__ = ["Asker", "DiskReads", "DiskThreads"]

_THREADS: Final = 2

T = TypeVar("T")
Work = tuple[Callable[[], None], Callable[[BaseException | None], None]]


class DiskThreads:
    """The threads of one journal writer; made on the event loop's thread.

    Attributes:
        took: how many seconds the work took whose end is being told.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads_max: int = _THREADS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._monotonic = monotonic
        self.took = 0.0
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
            began = self._monotonic()
            try:
                work()
            except BaseException as failure:
                error = failure
            took = self._monotonic() - began
            try:
                self._loop.call_soon_threadsafe(self._tell, finished, error, took)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            # Nothing of it is kept alive while waiting for more.
            del given, work, finished, error

    def _tell(self, finished: Callable[[BaseException | None], None], error: BaseException | None, took: float) -> None:
        self._busy -= 1
        self.took = took
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


_READ_THREADS: Final = 4
_ASKED_MAX: Final = 256
_AGAIN_MS: Final = 50
_ROOM_SECONDS: Final = 0.01
_SHARE: Final = 8
BULK_MAX: Final = 2  # one waits for the disk while the other is answered
# A question about a tail that grows could miss a little more each time.
_ATTEMPTS_MAX: Final = 10_000


class Asker(Protocol):
    """A client as far as its questions go."""

    reading: asyncio.Lock  # held while one of its questions is answered
    asked: int  # its questions with large answers that are open

    @property
    def is_open(self) -> bool:
        """Whether it is still there."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether it takes its answers."""
        ...


class DiskReads:
    """The questions of one broker.

    Parameters:
        threads: how many read from the disk at once.
        asked_max: how many questions with large answers may be open.
    """

    def __init__(self, queries: Queries, *, threads: int = _READ_THREADS, asked_max: int = _ASKED_MAX) -> None:
        self._queries = queries
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dmq-read")
        self._asked_max = asked_max
        self._serving = asyncio.Semaphore(BULK_MAX)
        self.asked = 0
        self.reads = 0
        self.check_serving: Callable[[], None] | None = None
        """In a shard: raises if its leader may not answer any more."""

    @contextlib.asynccontextmanager
    async def turn(self, asker: Asker) -> AsyncIterator[None]:
        """Within this, a client's questions are looked up and answered, one request after the other.

        Raises:
            Busy: too many are asked already.
            NotConnected: the client is gone.
        """
        with self._counted(asker):
            async with asker.reading:
                while asker.is_open and not asker.is_writable:
                    await asyncio.sleep(_ROOM_SECONDS)
                if not asker.is_open:
                    raise NotConnected("the client is gone, nobody waits for the answer")
                yield

    @contextlib.asynccontextmanager
    async def bulk(self) -> AsyncIterator[None]:
        """Within this, within a turn, megabytes are looked up and answered: a few at a time of all clients."""
        async with self._serving:
            yield
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def _counted(self, asker: Asker) -> Iterator[None]:
        # No client may take all the room there is.
        if self.asked >= self._asked_max or asker.asked >= max(1, self._asked_max // _SHARE):
            raise Busy(f"{self.asked} questions wait for the disk already: try again shortly", retry_after_ms=_AGAIN_MS)
        self.asked += 1
        asker.asked += 1
        try:
            yield
        finally:
            self.asked -= 1
            asker.asked -= 1

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question that changes nothing; large ones are asked in their `turn`.

        Raises:
            NotLeader: we may not answer any more.
        """
        prepared: Prepared = {}
        for _ in range(_ATTEMPTS_MAX):
            try:
                with self._queries.deferring(prepared):
                    answer = self._answer(question)
                break
            except NeedsDisk as need:
                missing = need
            prepared[missing.key] = await self._read(missing)
        else:
            answer = self._answer(question)
        if self.check_serving is not None:
            self.check_serving()
        return answer

    async def ask_many(self, questions: Sequence[Callable[[], T]]) -> list[T]:
        """The answers to some small questions: what any of them needs is read in one go, by one thread.

        Raises:
            NotLeader: we may not answer any more.
        """
        prepared: Prepared = {}
        answers: dict[int, T] = {}
        for _ in range(_ATTEMPTS_MAX):
            missing: dict[Any, NeedsDisk] = {}
            with self._queries.deferring(prepared):
                for number, question in enumerate(questions):
                    if number not in answers:
                        try:
                            answers[number] = self._answer(question)
                        except NeedsDisk as need:
                            missing[need.key] = need
            if not missing:
                break
            prepared |= zip(missing, await self._read_all([*missing.values()]), strict=True)
        else:
            answers = {number: self._answer(question) for number, question in enumerate(questions)}
        if self.check_serving is not None:
            self.check_serving()
        return [answers[number] for number in range(len(questions))]

    def _answer(self, question: Callable[[], T]) -> T:
        """What the store says; damage that another member may mend, or that may pass, is not an answer yet."""
        try:
            return question()
        except Damaged as error:
            start, end = error.detail.get("start", 0), error.detail.get("end", 0)
            if not self._queries.may_be_mended(start, end):
                raise
            why = "are damaged here, and come from another member"
            if error.detail.get("may_pass"):
                why = "are refused by the disk, and asked for again"
            raise Busy(f"journal bytes {start}-{end} {why}: try again shortly", retry_after_ms=_AGAIN_MS) from error

    async def work(self, task: Callable[[], T]) -> T:
        """Do something in a thread that takes long and touches nothing of the store."""
        return await self._loop.run_in_executor(self._threads, task)

    async def _read(self, need: NeedsDisk) -> bytes | Exception:
        self.reads += 1
        with self._queries.lending():
            return await self._loop.run_in_executor(self._threads, self._fetched, need)

    async def _read_all(self, needs: list[NeedsDisk]) -> list[bytes | Exception]:
        self.reads += len(needs)
        with self._queries.lending():
            return await self._loop.run_in_executor(self._threads, lambda: [*map(self._fetched, needs)])

    def _fetched(self, need: NeedsDisk) -> bytes | Exception:
        try:
            return self._queries.fetch(need)
        except Exception as error:  # the question decides what it means
            return error

    def drop(self, refusal: DMQError) -> None:
        """Nothing is answered any more: every question fails with this error."""

        def refuse() -> None:
            raise refusal

        self.check_serving = refuse

    def close(self) -> None:
        """No more reads: those under way end, those that wait fail."""
        self._threads.shutdown(wait=True, cancel_futures=True)
