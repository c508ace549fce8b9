"""A name server: serves the registry of a database to brokers.

It keeps nothing of its own but connections: requests go to the one thread that has the database, in the order in which
they came, and answers come back from there. After each write, and now and then, it looks for changes and tells the
connections that watch.

What always holds: a connection is served only after its hello; every request gets exactly one answer; a connection has
at most `WAITING_MAX` requests that wait, and all together `WAITING_ALL_MAX`: more are answered BUSY. A connection that
does not take what it is told of changes is told later that anything may have changed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dmq.clock import Clock, SystemClock
from dmq.errors import Busy, DMQError, InvalidRequest, Unsupported
from dmq.event_log import EventLog, tell_suppressed
from dmq.net.address import check_address
from dmq.net.connection import Connection
from dmq.net.hello import Terms, accept_hello, answer_hello
from dmq.net.pages import Page, PageServer
from dmq.net.server import ConnectionLimits, Server
from dmq.protocol.cluster import registry as headers
from dmq.protocol.commands import Command, decode_request, error_frame, one_way_head, response_head
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.header import Header
from dmq.protocol.session import FRAME_CRC, Heartbeat
from dmq.registry.name_server.sql_store import News, SqlStore
from dmq.registry.name_server.wire import entry_header, operations_of
from dmq.registry.registry import check_path, check_write
from dmq.registry.watch import Watches
from dmq.version import __version__

__all__ = ["NameServer"]

log = EventLog(__name__)

WAITING_MAX: Final = 256
WAITING_ALL_MAX: Final = 4096
_NAME: Final = "nameserver"
_FRAME_BYTES_MAX: Final = 2 << 20
_HEARTBEAT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.5
_TRIM_SECONDS: Final = 60.0
_AGAIN_MS: Final = 100
_LIMITS: Final = ConnectionLimits(
    connections_max=20_000,
    output_bytes_max=8 << 20,
    hello_seconds=10.0,
    partial_seconds=10.0,
    partial_bytes_max=64 << 20,
    silence_seconds=3 * _HEARTBEAT_SECONDS,
)

_FIGURES: Final = {
    "connections": "Connections that are open.",
    "requests_total": "Requests that came.",
    "request_errors_total": "Requests that were answered with an error.",
    "waiting_requests": "Requests that wait for the database.",
    "changes_total": "Changes of the registry, by all name servers of the database.",
    "expired_sessions_total": "Sessions that this name server has ended, since their clients were not heard.",
}


class _Visitor:
    """One connection that said hello."""

    __slots__ = ("connection", "owner", "waiting", "watches")

    def __init__(self, connection: Connection, owner: str) -> None:
        self.connection = connection
        self.owner = owner
        self.waiting = 0
        self.watches = Watches()

    def tell(self) -> None:
        """Send what its watches have gathered, if it takes more."""
        if not (self.connection.is_open and self.connection.is_writable):
            return
        paths: dict[str, None] = {}
        is_all = False
        for changes in self.watches.take():
            paths.update(dict.fromkeys(changes.paths))
            is_all = is_all or changes.is_all
        if is_all or len(paths) > headers.PATHS_MAX:
            self._push(headers.RegistryChanged(is_all=True))
        elif paths:
            self._push(headers.RegistryChanged([*paths]))

    def _push(self, changed: headers.RegistryChanged) -> None:
        self.connection.send(one_way_head(Command.REGISTRY_CHANGED, changed))


class NameServer:
    """One name server over one database.

    Parameters:
        store: used by the server's own thread only, from `start` to `stop`.
        metrics_port: serve metrics and health there; None for none.
        insecure: another address than loopback is meant.
    """

    def __init__(
        self,
        store: SqlStore,
        *,
        host: str = "127.0.0.1",
        port: int = 9610,
        metrics_port: int | None = None,
        clock: Clock | None = None,
        insecure: bool = False,
    ) -> None:
        check_address(host, insecure)
        self._store = store
        self._host = host
        self._port = port
        self._metrics_port = metrics_port
        self._pages = PageServer({"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness})
        self._figures = dict.fromkeys(_FIGURES, 0)
        self._trouble = ""  # why the database cannot be used
        self._clock = clock or SystemClock()
        self._server = Server(self, self._clock, _LIMITS)
        self._thread = ThreadPoolExecutor(1, "registry")
        self._visitors: set[_Visitor] = set()
        self._waiting = 0
        self._seq = 0  # of the last change that is told; the thread's
        self._looker: asyncio.Task[None] | None = None
        self._handlers: dict[int, Callable[[_Visitor, Any], Callable[[], Header]]] = {
            Command.REGISTRY_SESSION: self._session,
            Command.REGISTRY_BEAT: self._beat,
            Command.REGISTRY_CLOSE: self._close,
            Command.REGISTRY_READ: self._read,
            Command.REGISTRY_CHILDREN: self._children,
            Command.REGISTRY_WRITE: self._write,
        }
        self.address = ""
        self.metrics_port = 0

    async def start(self) -> None:
        """Open the database and the port.

        Raises:
            WrongFormat, DatabaseDown, PortTaken, CannotListen: nothing is left open.
        """
        try:
            self._seq = await self._in_thread(self._store.open)
            host, port = await self._server.listen(self._host, self._port)
            if self._metrics_port is not None:
                self.metrics_port = await self._pages.listen(self._host, self._metrics_port)
        except BaseException:
            await self.stop()
            raise
        self.address = f"{host}:{port}"
        self._looker = asyncio.create_task(self._keep_looking())

    async def stop(self) -> None:
        """Close the connections and the database; sessions live on for a term."""
        if self._looker is not None:
            self._looker.cancel()
        await self._server.close()
        await self._pages.close()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
        self._store.close()

    async def serve(self, on_ready: Callable[[NameServer], None]) -> None:
        """Serve until SIGTERM or SIGINT."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await self.start()
        log.info("name server started", version=__version__, address=self.address)
        on_ready(self)
        await stopped.wait()
        await self.stop()
        log.info("name server stopped")

    # --- connections ------------------------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        pass

    def refused(self, connection: Connection, error: DMQError) -> None:
        pass

    def writable(self, connection: Connection) -> None:
        if isinstance(connection.session, _Visitor):
            connection.session.tell()

    def disconnected(self, connection: Connection) -> None:
        if isinstance(connection.session, _Visitor):
            self._visitors.discard(connection.session)

    def received(self, connection: Connection, frame: Frame) -> None:
        self._figures["requests_total"] += 1
        visitor = connection.session
        try:
            if isinstance(visitor, _Visitor):
                self._serve(visitor, frame)
            elif frame.command == Command.HELLO and frame.kind == Kind.REQUEST:
                self._greet(connection, frame)
            else:
                connection.refuse(InvalidRequest("say hello first"))
        except DMQError as error:
            self._refuse(connection, frame, error)
        except Exception as error:
            log.exception("a command failed", once_for=frame.command, command=frame.command)
            self._refuse(connection, frame, error)

    def _greet(self, connection: Connection, frame: Frame) -> None:
        greeting = accept_hello(connection, frame, "name server", frozenset({FRAME_CRC}))
        if greeting is None:
            return
        visitor = _Visitor(connection, greeting.client_id)
        connection.session = visitor
        self._visitors.add(visitor)
        terms = Terms(_NAME, self.address, _FRAME_BYTES_MAX, _LIMITS)
        answer_hello(connection, frame, greeting, terms, clock=self._clock)

    def _serve(self, visitor: _Visitor, frame: Frame) -> None:
        if frame.kind == Kind.RESPONSE:
            return
        asked = decode_request(frame)
        if frame.command == Command.HEARTBEAT:
            _answer(visitor, frame, Heartbeat(self._clock.now_ms()))
        elif frame.command == Command.REGISTRY_WATCH:
            visitor.watches = Watches()
            for prefix in asked.prefixes:
                visitor.watches.open(check_path(prefix))
            _answer(visitor, frame, Header())
        elif (handler := self._handlers.get(frame.command)) is not None:
            self._submit(visitor, frame, handler(visitor, asked))
        else:
            raise Unsupported(
                f"this is a name server, which does not serve {Command(frame.command).name}: ask a broker, whose port "
                "is 9611 by default"
            )

    def _refuse(self, connection: Connection, frame: Frame, error: BaseException) -> None:
        self._figures["request_errors_total"] += 1
        if frame.kind == Kind.REQUEST:
            connection.send(error_frame(error, frame.command, frame.correlation))

    # --- the thread that has the database ---------------------------------------------------------------------------

    def _submit(self, visitor: _Visitor, frame: Frame, work: Callable[[], Header]) -> None:
        if visitor.waiting >= WAITING_MAX or self._waiting >= WAITING_ALL_MAX:
            raise Busy("too many requests wait for the registry's database: ask again", retry_after_ms=_AGAIN_MS)
        visitor.waiting += 1
        self._waiting += 1
        is_write = frame.command in (Command.REGISTRY_WRITE, Command.REGISTRY_CLOSE)
        # From the thread's queue, so that requests are carried out in the order they came.
        future = self._thread.submit(self._carry_out, work, is_write)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._answered, visitor, frame, done.result()))

    def _carry_out(self, work: Callable[[], Header], is_write: bool) -> tuple[Header | BaseException, News | None]:
        """In the thread: a request, and what has changed."""
        answer: Header | BaseException
        news = None
        try:
            answer = work()
        except BaseException as error:
            answer = error
        try:
            if is_write:
                news = self._look()
        except DMQError:
            pass  # looked for again soon
        return answer, news

    def _answered(self, visitor: _Visitor, frame: Frame, result: tuple[Header | BaseException, News | None]) -> None:
        answer, news = result
        visitor.waiting -= 1
        self._waiting -= 1
        if news is not None:
            self._tell(news)
        if isinstance(answer, Header):
            _answer(visitor, frame, answer)
            return
        if not isinstance(answer, DMQError):
            log.error("a request failed", once_for=frame.command, command=frame.command, reason=repr(answer))
        self._refuse(visitor.connection, frame, answer)

    def _session(self, visitor: _Visitor, asked: headers.RegistrySession) -> Callable[[], Header]:
        def work() -> Header:
            session = self._store.open_session(asked.session, asked.owner)
            return headers.RegistrySessionReply(session, int(self._store.session_seconds * 1000))

        return work

    def _beat(self, visitor: _Visitor, asked: headers.RegistryBeat) -> Callable[[], Header]:
        def work() -> Header:
            self._store.renew(asked.session)
            return Header()

        return work

    def _close(self, visitor: _Visitor, asked: headers.RegistryClose) -> Callable[[], Header]:
        def work() -> Header:
            self._store.close_session(asked.session)
            return Header()

        return work

    def _read(self, visitor: _Visitor, asked: headers.RegistryRead) -> Callable[[], Header]:
        path = check_path(asked.path)

        def work() -> Header:
            found = self._store.read(path)
            return headers.RegistryReadReply(None if found is None else entry_header(found))

        return work

    def _children(self, visitor: _Visitor, asked: headers.RegistryChildren) -> Callable[[], Header]:
        path = check_path(asked.path)

        def work() -> Header:
            page = self._store.children(path, asked.after, asked.limit, headers.PAGE_BYTES_MAX)
            return headers.RegistryChildrenReply([*map(entry_header, page.entries)], page.more)

        return work

    def _write(self, visitor: _Visitor, asked: headers.RegistryWrite) -> Callable[[], Header]:
        operations = operations_of(asked.operations)
        check_write(operations)
        return lambda: headers.RegistryWriteReply([*self._store.write(asked.session, asked.number, operations)])

    # --- changes and time -------------------------------------------------------------------------------------------

    def _look(self) -> News:
        """In the thread: what is new."""
        news = self._store.news(self._seq)
        self._seq = news.seq
        return news

    def _tell(self, news: News) -> None:
        for visitor in self._visitors:
            if news.is_all:
                visitor.watches.add_all()
            else:
                visitor.watches.add(news.paths)
            visitor.tell()

    async def _keep_looking(self) -> None:
        """End sessions that are over, and look for what other name servers have changed."""
        pause = min(_LOOK_SECONDS, self._store.session_seconds / 8)
        trimmed_at = self._clock.monotonic()
        while True:
            try:
                self._figures["expired_sessions_total"] += await self._in_thread(self._store.expire)
                self._tell(await self._in_thread(self._look))
                if self._clock.monotonic() - trimmed_at > _TRIM_SECONDS:
                    trimmed_at = self._clock.monotonic()
                    await self._in_thread(self._store.trim)
                self._trouble = ""
            except DMQError as error:
                self._trouble = error.message
                log.warning("the registry cannot be looked at", once_for=error.code, reason=error.message)
            except Exception:
                log.exception("looking at the registry failed", once_for=())
            self._server.sweep()
            tell_suppressed()
            await asyncio.sleep(pause)

    def _metrics(self, _: Mapping[str, str]) -> Page:
        self._figures |= {
            "connections": len(self._server.connections),
            "waiting_requests": self._waiting,
            "changes_total": self._seq,
        }
        lines = []
        for name, what in _FIGURES.items():
            full = f"dmq_nameserver_{name}"
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# HELP {full} {what}\n# TYPE {full} {kind}\n{full} {self._figures[name]}\n")
        return Page("".join(lines), kind="text/plain; version=0.0.4; charset=utf-8")

    def _health(self, _: Mapping[str, str]) -> Page:
        return Page("ok\n")

    def _readiness(self, _: Mapping[str, str]) -> Page:
        return Page(f"{self._trouble}\n", 503) if self._trouble else Page("ready\n")

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _answer(visitor: _Visitor, frame: Frame, header: Header) -> None:
    if frame.kind == Kind.REQUEST:
        visitor.connection.send(response_head(frame.command, header, frame.correlation))
