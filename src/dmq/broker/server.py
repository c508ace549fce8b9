"""A broker as a server: the store opened, the ports listening, the signals caught.

The server owns the listener and the dispatcher; the Broker comes and goes (`open_broker`, `close_broker`) while
connections stay open. Where the settings name a shard, the server is a member of it (`shard_process`), and that makes
and drops the Broker.

What always holds: it listens on loopback unless told that another address is meant (`insecure`); it begins to listen
only once the store is open, a member before that; a stop, by signal or by `stop`, drains first, and a member hands
over; a store that failed ends the process with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dmq.broker.broker import Broker
from dmq.broker.dead_letters.dead_letters import drop_spent_topics
from dmq.broker.dead_letters.letter_thread import open_letters
from dmq.broker.diagnostics.disk_report import disk_refusal
from dmq.broker.diagnostics.exposition import Exposition, standby_metrics
from dmq.broker.diagnostics.status_page import StatusPage
from dmq.broker.diagnostics.telnet import TelnetServer
from dmq.broker.runtime.service_manager import ServiceManager
from dmq.broker.shard_process import ShardProcess, ShardWays
from dmq.broker.wire.commands import COMMANDS
from dmq.broker.wire.connection import hello
from dmq.broker.wire.dispatcher import Dispatcher
from dmq.clock import Clock, SystemClock
from dmq.deadletters.url import MEMORY, check_url, default_url, is_file
from dmq.errors import BrokerStopping, StoreFailed
from dmq.event_log import EventLog, tell_suppressed
from dmq.net.address import ServerAddress, check_address, is_loopback
from dmq.net.pages import MakePage, Page, PageServer
from dmq.net.server import ConnectionLimits, Server
from dmq.settings import Settings
from dmq.storage.files import Files, OsFiles
from dmq.storage.store import MessageStore
from dmq.version import __version__

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore
    from dmq.registry.registry import Registry

__all__ = ["BrokerServer", "run"]

log = EventLog(__name__)

_SWEEP_SECONDS = 1.0
# A writer thread beside a busy loop waits for the interpreter's lock; a shorter turn lets it in sooner.
_SWITCH_SECONDS = 1e-4
_NO_BROKER = Page("no broker\n", 503)
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class BrokerServer:
    """One broker with its ports.

    Parameters:
        settings: ports may be 0, to take any that is free.
        files: where the data goes; the settings' directory if left out.
        insecure: other addresses than loopback are meant.
        letters: makes the store of dead letters; by default it is where the settings say, or in memory if files are.
        status_port: serve a status page for people on this port; None for none.

    Attributes:
        open_registry: as of `ShardWays`, for a member of a shard; set it before the start.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        insecure: bool = False,
        status_port: int | None = None,
        letters: Callable[[], DeadLetterStore] | None = None,
    ) -> None:
        check_address(settings.broker.host, insecure)
        self._settings = settings
        self._insecure = insecure
        self._clock = clock or SystemClock()
        self._files = files
        self._letters = letters
        self.open_registry: Callable[[str], Awaitable[Registry]] | None = None
        self._status_port = status_port
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_at = 0.0
        self._pages: list[PageServer] = []
        self._exposition: Exposition | None = None
        self.port = 0
        self.member: ShardProcess | None = None
        self._host = ""
        self.metrics_port = 0
        self.status_port = 0
        self.telnet_port = 0

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return self.dispatcher.address

    @property
    def broker(self) -> Broker:
        """The Broker that serves now.

        Raises:
            BrokerStopping: there is none.
        """
        found = self.dispatcher.broker
        if found is None:
            raise BrokerStopping("this server has no broker right now")
        return found

    async def start(self) -> None:
        """Open the store and the ports.

        Raises:
            DirectoryInUse, WrongFormat, PortTaken, …: nothing is left open.
        """
        settings = self._settings.broker
        self.dispatcher = Dispatcher(self._settings, self._clock, COMMANDS, hello)
        self._server = Server(
            self.dispatcher,
            self._clock,
            ConnectionLimits(
                connections_max=settings.connections_max,
                output_bytes_max=settings.output_bytes_max,
                hello_seconds=settings.hello_seconds,
                partial_seconds=settings.partial_seconds,
                partial_bytes_max=settings.partial_bytes_max,
                silence_seconds=3 * settings.heartbeat_seconds,
            ),
            outbox=self.dispatcher.outbox,
        )
        self._telnet = TelnetServer(lambda: self.dispatcher.broker)
        if self._settings.shard.name is not None:
            self.member = self._make_member()
        else:
            self.open_broker()
        try:
            await self._listen()
            if self.member is not None:
                await self.member.start(ServerAddress(self._host, self.port))
        except BaseException:
            await self.stop(0.0)
            raise
        self._sweep()
        if self.member is None:
            self._start_letters()

    def _make_member(self) -> ShardProcess:
        """This server as a member of a shard. Dead letters in one machine's file would be out of the others' reach."""
        settings = self._settings.broker
        letters, url = self._letters, settings.dead_letters_url
        if letters is None and url is not None and (not is_file(url) or is_loopback(settings.host)):
            letters = self._settled_letters()
        files = self._files or OsFiles(settings.data)
        ways = ShardWays(files, letters, self.open_registry, self._insecure)
        return ShardProcess(self._settings, self.dispatcher, ways)

    def open_broker(self) -> None:
        """Open the store and serve it; clients that are connected are served by it from now on.

        Raises:
            DirectoryInUse, WrongFormat, …: the store cannot be opened.
        """
        settings = self._settings.broker
        letters = self._letters or self._settled_letters()
        store = MessageStore(
            self._files or OsFiles(settings.data),
            self._settings.store,
            self._clock,
            checkpoint_inline=False,
            new_epoch=True,
        )
        drop_spent_topics(store)
        broker = Broker(store, settings, self._clock, self.dispatcher, letters=letters)
        self.dispatcher.attach(broker)
        broker.begin_scrub()
        if self._sweeper is not None:
            self._start_letters()

    async def close_broker(self, drain_seconds: float = 0.0) -> None:
        """Drain the Broker and close the store; connections stay open, and are served again by the next Broker."""
        broker = self.broker
        await broker.stop(drain_seconds)
        self.dispatcher.detach()
        broker.channels.end(self.dispatcher.no_broker())

    def _start_letters(self) -> None:
        self.broker.dead_letters.start(at_once=self._settings.broker.dead_letters_url is not None)

    async def _listen(self) -> None:
        settings = self._settings.broker
        self._host, self.port = await self._server.listen(settings.host, settings.port)
        self.dispatcher.address = f"{self._host}:{self.port}"
        pages: dict[str, MakePage] = {
            "/metrics": self._metrics,
            "/metrics/detail": self._metrics_detail,
            "/healthz": lambda _: self._health(),
            "/readyz": lambda _: self._readiness(),
        }
        self.metrics_port = await self._serve_pages(settings.metrics_port, pages)
        if settings.telnet_port is not None:
            self.telnet_port = await self._telnet.listen(settings.host, settings.telnet_port)
        if self._status_port is not None:
            page = StatusPage(lambda: self.broker)
            self.status_port = await self._serve_pages(
                self._status_port, {"/": lambda _: Page(page(), kind="text/html; charset=utf-8")}
            )

    def _settled_letters(self) -> Callable[[], DeadLetterStore]:
        """Where the settings say that dead letters are kept; SQLite in the data directory if they say nothing.

        Raises:
            InvalidSettings: the URL can never work.
        """
        settings = self._settings.broker
        if settings.dead_letters_url is not None:
            url = check_url(settings.dead_letters_url)
        elif self._files is not None and not isinstance(self._files, OsFiles):
            url = MEMORY
        else:
            url = default_url(settings.data)
        return lambda: open_letters(url)

    async def _serve_pages(self, port: int, pages: dict[str, MakePage]) -> int:
        server = PageServer(pages)
        in_force = await server.listen(self._settings.broker.host, port)
        self._pages.append(server)
        return in_force

    async def _metrics(self, asked: Mapping[str, str]) -> Page:
        exposition = self._exposition_now()
        if exposition is None and self.member is not None:
            return Page(await standby_metrics(self.dispatcher), kind=_METRICS)
        return _NO_BROKER if exposition is None else Page(await exposition.metrics(), kind=_METRICS)

    async def _metrics_detail(self, asked: Mapping[str, str]) -> Page:
        exposition = self._exposition_now()
        return _NO_BROKER if exposition is None else Page(await exposition.detail(asked), kind=_METRICS)

    def _exposition_now(self) -> Exposition | None:
        broker = self.dispatcher.broker
        if broker is None:
            return None
        if self._exposition is None or self._exposition.broker is not broker:
            self._exposition = Exposition(broker)
        return self._exposition

    def _health(self) -> Page:
        broker = self.dispatcher.broker
        if broker is not None and broker.store.has_failed:
            return Page("the store failed\n", 503)
        return Page("ok\n")

    def _readiness(self) -> Page:
        broker = self.dispatcher.broker
        if self.member is not None:
            is_ready, words = self.member.readiness
            if not is_ready or broker is None:
                return Page(f"{words}\n", 200 if is_ready else 503)
        if broker is None:
            return _NO_BROKER
        if broker.readiness.is_stopping or broker.store.has_failed:
            return Page("stopping\n", 503)
        if broker.readiness.is_draining:
            return Page("drained\n", 503)
        if refusal := disk_refusal(broker):
            return Page(f"{refusal}\n", 503)
        return Page("ready\n")

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        before, self._swept_at = self._swept_at, loop.time()
        # Had we stood still ourselves, what came meanwhile must be read before anybody is called silent.
        if self._swept_at - before < 2 * _SWEEP_SECONDS:
            self._server.sweep()
        tell_suppressed()
        self._sweeper = loop.call_later(_SWEEP_SECONDS, self._sweep)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, close everything; a member hands over first."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._server.stop_listening()
        settings, broker = self._settings.broker, self.dispatcher.broker
        try:
            if self.member is not None:
                await self.member.stop(hand_over=not self.member.failed.is_set())
            elif broker is not None:
                await broker.stop(settings.drain_seconds if drain_seconds is None else drain_seconds)
        finally:
            await self.dispatcher.finish()
            await self._server.close()
            await self._telnet.close()
            for pages in self._pages:
                await pages.close()

    async def abort(self) -> None:
        """Cut every connection and serve nobody any more; the store is left as it is, as when the process dies."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._server.abort()
        if self.dispatcher.broker is not None:
            await self.dispatcher.broker.end_scrub()
            await self.dispatcher.broker.dead_letters.close()
        await self._telnet.close()
        for pages in self._pages:
            await pages.close()

    async def serve(
        self, on_ready: Callable[[BrokerServer], None] | None = None, *, settings_file: str | None = None
    ) -> None:
        """Start, wait for a signal, for an operator's word or for a failure, stop.

        Parameters:
            settings_file: where the settings came from, for the log.

        Raises:
            StoreFailed: the store failed while serving.
        """
        await self.start()
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        reasons: list[str] = []

        def signalled(number: signal.Signals) -> None:
            reasons.append(number.name)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, signalled, number)
        self._tell_start(settings_file)
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(self)
        manager = ServiceManager()
        manager.ready()
        served = self.member or self.broker
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for event in (stop, served.stop_asked, served.failed)
        ]
        ended = [self.member.ended] if self.member is not None else []
        await asyncio.wait([*waits, *ended], return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        has_failed = served.failed.is_set()
        reasons.append(
            "the store failed" if has_failed else "the member failed" if _is_over(ended) else "dmq broker drain --stop"
        )
        manager.stopping()
        broker = self.dispatcher.broker
        leased = 0 if broker is None else broker.channels.out
        log.info("broker stopping", reason=reasons[0], clients=len(self.dispatcher), leased=leased)
        began = time.monotonic()
        # Nothing can be finished on a store that failed.
        await self.stop(0.0 if has_failed else None)
        for task in ended:
            if not task.cancelled():
                task.result()
        if has_failed:
            raise StoreFailed("the store failed while serving: check the disk, then start again")
        log.info("broker stopped", reason=reasons[0], pid=os.getpid(), seconds=round(time.monotonic() - began, 3))

    def _tell_start(self, settings_file: str | None) -> None:
        settings = self._settings.broker
        host = self.address.rpartition(":")[0]
        log.info(
            "broker started",
            version=__version__,
            name=settings.name if self.member is None else self.member.broker,
            data=os.path.abspath(settings.data),
            settings=settings_file and os.path.abspath(settings_file),
            clients=self.address,
            shard=None if self.member is None else self.member.shard,
            members=None if self.member is None else self.member.network.address,
            metrics=f"{host}:{self.metrics_port}",
            telnet=f"{host}:{self.telnet_port}" if self.telnet_port else None,
            status=f"{host}:{self.status_port}" if self.status_port else None,
            pid=os.getpid(),
            python=platform.python_version(),
            loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        )


def _is_over(tasks: Sequence[asyncio.Task[None]]) -> bool:
    return any(task.done() for task in tasks)


def run(main: Callable[[], object]) -> None:
    """Run a broker's coroutine on the fastest loop there is."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    coroutine = main()
    assert asyncio.iscoroutine(coroutine)
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(coroutine)
