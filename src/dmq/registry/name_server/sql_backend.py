"""What a name server serves from its database: one thread has the store, and the loop hands it requests.

What always holds: requests are carried out one at a time, those of one client in their order; beats and new sessions go
first, all beats that wait in one transaction, so that a storm of writes ends no session. A request that has waited for
half a session is not carried out any more: its client has given it up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias

from dmq.clock import Clock, SystemClock
from dmq.errors import Busy, DMQError
from dmq.event_log import EventLog
from dmq.protocol.cluster import registry as headers
from dmq.protocol.commands import Command
from dmq.protocol.header import Header
from dmq.registry.name_server.backend import News
from dmq.registry.name_server.sql_store import SqlStore, expired
from dmq.registry.name_server.wire import entry_header, operations_of
from dmq.registry.paths import DEFAULT_ROOT
from dmq.registry.registry import Entry, check_path, check_write

__all__ = ["SqlBackend"]

log = EventLog(__name__)

Answer: TypeAlias = Callable[[Header | BaseException], None]

_LOOK_SECONDS: Final = 0.5
_TRIM_SECONDS: Final = 60.0
_COUNT_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 5.0
_HANG_UP_SECONDS: Final = 8.0  # over all limits of the database and of the driver
_AGAIN_MS: Final = 100
_URGENT: Final = (Command.REGISTRY_SESSION, Command.REGISTRY_BEAT)
_CHANGING: Final = (Command.REGISTRY_WRITE, Command.REGISTRY_CLOSE)


class SqlBackend:
    """Made before the name server, which starts and stops it.

    Parameters:
        store: used by the backend's own thread only, from `start` to `stop`.
    """

    root: Final = DEFAULT_ROOT
    commands: Final = frozenset(
        {
            Command.REGISTRY_SESSION,
            Command.REGISTRY_BEAT,
            Command.REGISTRY_CLOSE,
            Command.REGISTRY_READ,
            Command.REGISTRY_CHILDREN,
            Command.REGISTRY_WRITE,
        }
    )
    meanings: Final = {
        "changes_total": "Changes of the registry, by all name servers of the database.",
        "expired_sessions_total": "Sessions that this name server has ended, since their clients were not heard.",
        "sessions": "Sessions that live, of all name servers of the database.",
        "entries": "Entries of the registry.",
        "database_up": "1 while the database answers.",
    }

    def __init__(self, store: SqlStore, clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(1, "registry")
        self._urgent: deque[Callable[[], None]] = deque()
        self._normal: deque[Callable[[], None]] = deque()
        self._is_look_put = False  # the thread's
        self._busy_since: float | None = None  # since when the thread is at what it does
        self._beats: deque[tuple[int, Answer]] = deque()
        self._seq = 0  # of the last change that is told; the thread's
        self._expired = 0
        self._counts = 0, 0
        self._reason = ""  # why the database cannot be used
        self._well_at = clock.monotonic()  # when it was used last
        self._tasks: list[asyncio.Task[None]] = []
        self._tell: Callable[[News], None] = lambda _: None

    @property
    def name(self) -> str:
        return self._store.shown

    async def start(self, tell: Callable[[News], None]) -> None:
        """Open the database.

        Raises:
            WrongFormat, InvalidSettings, DatabaseDown: it cannot be used.
        """
        self._tell = tell
        self._seq = await self._do(self._store.open)
        self._well_at = self._clock.monotonic()
        self._tasks = [asyncio.create_task(self._keep_looking()), asyncio.create_task(self._keep_hanging_up())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        self._store.close()

    @property
    def trouble(self) -> str:
        """Why the database cannot be used; empty if it can."""
        silent = self._clock.monotonic() - self._well_at
        if not self._reason and silent > _SILENT_SECONDS:
            return f"the database {self._store.shown} has not answered for {silent:.0f} s"
        return self._reason

    def figures(self) -> Mapping[str, int]:
        sessions, entries = self._counts
        return {
            "changes_total": self._seq,
            "expired_sessions_total": self._expired,
            "sessions": sessions,
            "entries": entries,
            "database_up": int(not self.trouble),
        }

    # --- requests ---------------------------------------------------------------------------------------------------

    def serve(self, command: int, asked: Any, answer: Answer) -> None:
        """Have a request carried out; `answer` is called on the loop, later.

        Raises:
            DMQError: it can never be.
        """
        loop = asyncio.get_running_loop()
        if command == Command.REGISTRY_BEAT:
            self._beats.append((asked.session, answer))
            self._put(lambda: self._carry_out_beats(loop), is_urgent=True)
            return
        work = self._work(command, asked)
        until = time.monotonic() + self._store.session_seconds / 2

        def carry_out() -> None:
            result: Header | BaseException
            try:
                result = _late() if time.monotonic() > until else work()
            except BaseException as error:
                result = error
            if command in _CHANGING and not self._is_look_put:
                # Behind what waits, so that one look does for many writes, and before what this client asks next.
                self._is_look_put = True
                self._put(lambda: self._look_at_once(loop), is_urgent=False)
            loop.call_soon_threadsafe(answer, result)

        self._put(carry_out, is_urgent=command in _URGENT)

    async def read(self, path: str) -> Entry | None:
        return await self._do(lambda: self._store.read(path))  # type: ignore[no-any-return]

    async def children(self, path: str) -> list[Entry]:
        """
        Raises:
            UnknownEntry: there is no such path.
        """
        entries: list[Entry] = []
        while True:
            after = entries[-1].path if entries else ""
            page = await self._do(partial(self._store.children, path, after, headers.PAGE_MAX))
            entries += page.entries
            if not page.more:
                return entries

    def _work(self, command: int, asked: Any) -> Callable[[], Header]:
        store = self._store
        match command:
            case Command.REGISTRY_SESSION:
                return lambda: headers.RegistrySessionReply(
                    store.open_session(asked.session, asked.owner), int(store.session_seconds * 1000), store.registry_id
                )
            case Command.REGISTRY_CLOSE:
                return lambda: _close(store, asked.session)
            case Command.REGISTRY_READ:
                path = check_path(asked.path)
                return lambda: headers.RegistryReadReply(
                    None if (found := store.read(path)) is None else entry_header(found)
                )
            case Command.REGISTRY_CHILDREN:
                path = check_path(asked.path)
                return lambda: _page(store, path, asked)
            case _:
                operations = operations_of(asked.operations)
                check_write(operations)
                return lambda: headers.RegistryWriteReply([*store.write(asked.session, asked.number, operations)])

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _put(self, work: Callable[[], None], *, is_urgent: bool) -> None:
        (self._urgent if is_urgent else self._normal).append(work)
        self._thread.submit(self._take)

    def _take(self) -> None:
        """The next thing to do: there is one for each call."""
        self._busy_since = time.monotonic()
        (self._urgent if self._urgent else self._normal).popleft()()
        self._busy_since = None

    def _carry_out_beats(self, loop: asyncio.AbstractEventLoop) -> None:
        beats = [self._beats.popleft() for _ in range(len(self._beats))]
        if not beats:
            return  # those before took them along
        results: list[tuple[Answer, Header | BaseException]]
        try:
            over = self._store.renew({session for session, _ in beats})
            results = [(answer, expired(session) if session in over else Header()) for session, answer in beats]
        except BaseException as error:
            results = [(answer, error) for _, answer in beats]
        loop.call_soon_threadsafe(_tell_all, results)

    def _look_at_once(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_look_put = False
        try:
            news = self._look()
        except DMQError:
            return  # looked for again soon
        loop.call_soon_threadsafe(self._tell, news)

    def _look(self) -> News:
        news = self._store.news(self._seq)
        self._seq = news.seq
        return news

    async def _do(self, work: Callable[[], Any]) -> Any:
        """Do something before what waits."""
        done: Future[Any] = Future()

        def carry_out() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._put(carry_out, is_urgent=True)
        return await asyncio.wrap_future(done)

    # --- changes and time -------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        """End sessions that are over, and look for what other name servers have changed."""
        pause = min(_LOOK_SECONDS, self._store.session_seconds / 8)
        trimmed_at = self._clock.monotonic()
        counted_at = float("-inf")
        while True:
            try:
                self._expired += await self._do(self._store.expire)
                self._tell(await self._do(self._look))
                now = self._clock.monotonic()
                if now - trimmed_at > _TRIM_SECONDS:
                    trimmed_at = now
                    await self._do(self._store.trim)
                if now - counted_at > _COUNT_SECONDS:
                    counted_at = now
                    self._counts = await self._do(self._store.count)
                self._is_well()
            except DMQError as error:
                self._is_ill(error)
            except Exception:
                log.exception("looking at the registry failed", once_for=())
            await asyncio.sleep(pause)

    async def _keep_hanging_up(self) -> None:
        """Not every driver has a limit for the time of an answer."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            since = self._busy_since
            if since is not None and time.monotonic() - since > _HANG_UP_SECONDS:
                log.warning("the database does not answer: its connection is given up", database=self._store.shown)
                self._store.interrupt()

    def _is_well(self) -> None:
        now = self._clock.monotonic()
        if self._reason:
            away = round(now - self._well_at, 1)
            log.info("the database answers again", database=self._store.shown, away_seconds=away)
        self._reason, self._well_at = "", now

    def _is_ill(self, error: DMQError) -> None:
        if not self._reason:
            log.warning("the database cannot be used: brokers go on, without changes", reason=error.message)
        self._reason = error.message


def _page(store: SqlStore, path: str, asked: headers.RegistryChildren) -> Header:
    page = store.children(path, asked.after, asked.limit)
    return headers.RegistryChildrenReply([*map(entry_header, page.entries)], page.more)


def _close(store: SqlStore, session: int) -> Header:
    store.close_session(session)
    return Header()


def _late() -> Busy:
    return Busy("the registry's database does not keep up, and nothing was done: ask again", retry_after_ms=_AGAIN_MS)


def _tell_all(results: list[tuple[Answer, Header | BaseException]]) -> None:
    for answer, result in results:
        answer(result)
