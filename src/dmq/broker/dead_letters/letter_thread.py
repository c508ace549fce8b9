"""The thread that talks to the database of dead letters, behind an interface of coroutines.

SQLAlchemy is heavy, so it is imported in that thread, and when it is first needed: a broker without dead letters never
loads it.

What always holds: one call at a time reaches the database; the loop never waits for it; no more than `waiting_max`
calls wait, and beyond that they are refused with `Busy`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from dmq.errors import BrokerStopping, Busy, DatabaseDown, DMQError
from dmq.event_log import EventLog

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["LetterThread", "open_letters"]

log = EventLog(__name__)

_WAITING_MAX: Final = 256
_AGAIN_MS: Final = 100

T = TypeVar("T")


def open_letters(url: str) -> DeadLetterStore:
    """The store at a URL; not connected yet."""
    from dmq.deadletters.store import DeadLetterStore

    return DeadLetterStore(url)


class LetterThread:
    """The thread of one broker.

    Parameters:
        make: makes the store; called in the thread, and again if it failed.
        on_back: called on the loop when the database answers again, or for the first time.
    """

    def __init__(
        self,
        make: Callable[[], DeadLetterStore],
        on_back: Callable[[], None] = lambda: None,
        *,
        waiting_max: int = _WAITING_MAX,
    ) -> None:
        self._make = make
        self._on_back = on_back
        self._waiting_max = waiting_max
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="dmq-sql")
        self._store: DeadLetterStore | None = None
        self._was_up = False
        self._is_closed = False
        self.waiting = 0
        self.error: DMQError | None = None  # why it is down
        self.failures = 0
        self._down_since = 0.0

    @property
    def is_down(self) -> bool:
        return self.error is not None

    async def call(self, work: Callable[[DeadLetterStore], T]) -> T:
        """Do something with the store.

        Raises:
            DatabaseDown: the database cannot be used; nothing was done.
            Busy: too many calls wait.
        """
        if self._is_closed:
            raise BrokerStopping("the broker is stopping: use another one, or this one when it is back")
        if self.waiting >= self._waiting_max:
            raise Busy(f"{self.waiting} calls wait for the database of dead letters", retry_after_ms=_AGAIN_MS)
        self.waiting += 1
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        except DMQError as error:
            if isinstance(error, DatabaseDown) or self._store is None:
                self._went_down(error)
            raise
        finally:
            self.waiting -= 1
        self._came_back()
        return result

    def _run(self, work: Callable[[DeadLetterStore], T]) -> T:
        if self._store is None:
            store = self._make()
            store.open()
            self._store = store
        return work(self._store)

    def _went_down(self, error: DMQError) -> None:
        self.failures += 1
        if self.error is None:
            self._down_since = time.monotonic()
            if self._was_up:
                log.error("the database of dead letters is gone: they wait in the journal", error=error.message)
            else:  # also where none is set, as in a shard by default
                log.warning("dead letters wait in the journal: no database takes them", error=error.message)
        self.error = error

    def _came_back(self) -> None:
        if self.error is not None:
            seconds = round(time.monotonic() - self._down_since, 1)
            log.warning("the database of dead letters is back", seconds=seconds, failures=self.failures)
        if self.error is not None or not self._was_up:
            self.error, self._was_up = None, True
            self._on_back()

    async def close(self) -> None:
        """End what is under way, and let go of the database."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._threads, self._end)
        self._threads.shutdown(wait=False)

    def drop(self) -> None:
        """Let go of the database when what is under way has ended, without waiting for that."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.submit(self._end)
            self._threads.shutdown(wait=False)

    def _end(self) -> None:
        if self._store is not None:
            self._store.close()
