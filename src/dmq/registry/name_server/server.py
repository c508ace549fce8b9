"""A name server: serves a registry to brokers, and to clients that ask for routes.

It keeps nothing of its own but connections: its backend carries requests out, and says what has changed, which is told
to the connections that watch.

What always holds: a connection is served only after its hello; every request gets exactly one answer; a connection has
at most `WAITING_MAX` requests that wait, and all together `WAITING_ALL_MAX`: more are answered BUSY. A connection that
does not take what it is told of changes is told later that anything may have changed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from dmq.clock import Clock, SystemClock
from dmq.errors import Busy, DMQError, InvalidRequest, Unsupported
from dmq.event_log import EventLog, tell_suppressed
from dmq.net.address import check_address
from dmq.net.connection import Connection
from dmq.net.hello import Terms, accept_hello, answer_hello
from dmq.net.pages import Page, PageServer
from dmq.net.server import ConnectionLimits, Server
from dmq.protocol.cluster import registry as headers
from dmq.protocol.cluster.route import TOPICS_MAX, Route, RouteChanged, RouteReply
from dmq.protocol.commands import Command, decode_request, error_frame, one_way_head, response_head
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.header import Header
from dmq.protocol.session import FRAME_CRC, Heartbeat
from dmq.registry.cluster_view import ClusterView, ViewChange
from dmq.registry.name_server.backend import Backend, News
from dmq.registry.name_server.local_registry import LocalRegistry
from dmq.registry.paths import Paths
from dmq.registry.registry import check_path
from dmq.registry.watch import Watches
from dmq.version import __version__

__all__ = ["NameServer"]

log = EventLog(__name__)

WAITING_MAX: Final = 256
WAITING_ALL_MAX: Final = 4096
_NAME: Final = "nameserver"
_FRAME_BYTES_MAX: Final = 2 << 20
_HEARTBEAT_SECONDS: Final = 10.0
_SWEEP_SECONDS: Final = 0.5
_AGAIN_MS: Final = 100
_LIMITS: Final = ConnectionLimits(
    connections_max=20_000,
    output_bytes_max=8 << 20,
    hello_seconds=10.0,
    partial_seconds=10.0,
    partial_bytes_max=64 << 20,
    silence_seconds=3 * _HEARTBEAT_SECONDS,
)

_MEANINGS: Final = {
    "connections": "Connections that are open.",
    "requests_total": "Requests that came.",
    "request_errors_total": "Requests that were answered with an error.",
    "waiting_requests": "Requests that wait for the database.",
    "writes_total": "Writes that were answered.",
    "write_seconds_total": "The time from when these came until their answers.",
}


class _Visitor:
    """One connection that said hello."""

    __slots__ = ("connection", "is_routed", "owner", "waiting", "watches")

    def __init__(self, connection: Connection, owner: str) -> None:
        self.connection = connection
        self.owner = owner
        self.waiting = 0
        self.is_routed = False  # it wants to hear of routes
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
    """One name server.

    Parameters:
        backend: what it serves; started and stopped with it.
        metrics_port: serve metrics and health there; None for none.
        insecure: another address than loopback is meant.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        host: str = "127.0.0.1",
        port: int = 9610,
        metrics_port: int | None = None,
        clock: Clock | None = None,
        insecure: bool = False,
    ) -> None:
        check_address(host, insecure)
        self._backend = backend
        self._host = host
        self._port = port
        self._metrics_port = metrics_port
        self._pages = PageServer({"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness})
        self._figures: dict[str, float] = dict.fromkeys(_MEANINGS, 0)
        self._clock = clock or SystemClock()
        self._server = Server(self, self._clock, _LIMITS)
        self._registry = LocalRegistry(backend)
        self._cluster = ClusterView(self._registry, Paths(backend.root), self._clock)
        self._cluster.listeners.append(self._routes_changed)
        self._visitors: set[_Visitor] = set()
        self._waiting = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""
        self.metrics_port = 0

    async def start(self) -> None:
        """Open the registry and the port.

        Raises:
            WrongFormat, InvalidSettings, DatabaseDown, PortTaken, CannotListen: nothing is left open.
        """
        try:
            await self._backend.start(self._tell)
            host, port = await self._server.listen(self._host, self._port)
            if self._metrics_port is not None:
                self.metrics_port = await self._pages.listen(self._host, self._metrics_port)
        except BaseException:
            await self.stop()
            raise
        self.address = f"{host}:{port}"
        self._tasks = [asyncio.create_task(work) for work in (self._keep_sweeping(), self._cluster.keep())]

    async def stop(self) -> None:
        """Close the connections and the registry; sessions live on for a term."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()
        await self._pages.close()
        await self._backend.stop()

    async def serve(self, on_ready: Callable[[NameServer], None], on_stop: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await self.start()
        log.info("name server started", version=__version__, address=self.address, registry=self._backend.name)
        on_ready(self)
        await stopped.wait()
        on_stop()
        connections = len(self._server.connections)
        await self.stop()
        log.info("name server stopped", connections=connections, writes=int(self._figures["writes_total"]))

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
        elif frame.command == Command.ROUTE:
            _answer(visitor, frame, self._routes(visitor, asked))
        elif frame.command in self._backend.commands:
            if visitor.waiting >= WAITING_MAX or self._waiting >= WAITING_ALL_MAX:
                raise Busy("too many requests wait for the registry: ask again", retry_after_ms=_AGAIN_MS)
            self._backend.serve(frame.command, asked, partial(self._answered, visitor, frame, self._clock.monotonic()))
            visitor.waiting += 1
            self._waiting += 1
        else:
            raise Unsupported(
                f"this is a name server, which does not serve {Command(frame.command).name}: ask a broker, whose port "
                "is 9611 by default"
            )

    def _refuse(self, connection: Connection, frame: Frame, error: BaseException) -> None:
        self._figures["request_errors_total"] += 1
        if frame.kind == Kind.REQUEST:
            connection.send(error_frame(error, frame.command, frame.correlation))

    def _routes(self, visitor: _Visitor, asked: Route) -> RouteReply:
        if not self._cluster.is_known:
            why = self._backend.trouble or "it has not read the cluster yet"
            raise Busy(f"this name server knows no routes, {why}: ask again", retry_after_ms=_AGAIN_MS)
        visitor.is_routed = visitor.is_routed or asked.is_watched
        return self._cluster.reply(asked.topics)

    def _routes_changed(self, change: ViewChange) -> None:
        topics = sorted(change.topics)
        if change.is_all or change.has_shards or len(topics) > TOPICS_MAX:
            topics = []
        head = one_way_head(Command.ROUTE_CHANGED, RouteChanged(topics))
        for visitor in self._visitors:
            if visitor.is_routed and visitor.connection.is_open:
                visitor.connection.send(head)

    def _answered(self, visitor: _Visitor, frame: Frame, came_at: float, answer: Header | BaseException) -> None:
        visitor.waiting -= 1
        self._waiting -= 1
        if frame.command == Command.REGISTRY_WRITE:
            self._figures["writes_total"] += 1
            self._figures["write_seconds_total"] += self._clock.monotonic() - came_at
        if isinstance(answer, Header):
            _answer(visitor, frame, answer)
            return
        if not isinstance(answer, DMQError):
            log.error("a request failed", once_for=frame.command, command=frame.command, reason=repr(answer))
        self._refuse(visitor.connection, frame, answer)

    # --- changes and figures ----------------------------------------------------------------------------------------

    def _tell(self, news: News) -> None:
        self._registry.tell(news)
        for visitor in self._visitors:
            if news.is_all:
                visitor.watches.add_all()
            else:
                visitor.watches.add(news.paths)
            visitor.tell()

    async def _keep_sweeping(self) -> None:
        while True:
            self._server.sweep()
            tell_suppressed()
            await asyncio.sleep(_SWEEP_SECONDS)

    def _metrics(self, _: Mapping[str, str]) -> Page:
        self._figures |= {"connections": len(self._server.connections), "waiting_requests": self._waiting}
        figures = {**self._figures, **self._backend.figures()}
        lines = []
        for name, what in {**_MEANINGS, **self._backend.meanings}.items():
            full = f"dmq_nameserver_{name}"
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# HELP {full} {what}\n# TYPE {full} {kind}\n{full} {figures[name]:.12g}\n")
        return Page("".join(lines), kind="text/plain; version=0.0.4; charset=utf-8")

    def _health(self, _: Mapping[str, str]) -> Page:
        return Page("ok\n")

    def _readiness(self, _: Mapping[str, str]) -> Page:
        trouble = self._backend.trouble
        return Page(f"{trouble}\n", 503) if trouble else Page("ready\n")


def _answer(visitor: _Visitor, frame: Frame, header: Header) -> None:
    if frame.kind == Kind.REQUEST:
        visitor.connection.send(response_head(frame.command, header, frame.correlation))
