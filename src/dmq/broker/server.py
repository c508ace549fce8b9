"""A broker as a server: the store opened, the ports listening, the signals caught.

What always holds: it listens on loopback unless told that another address is meant (`insecure`); ports are open only
while the store is; a stop, by signal or by `stop`, drains first; a store that failed ends the process with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dmq.broker.broker import Broker
from dmq.broker.dead_letters.dead_letters import open_letters
from dmq.broker.diagnostics.metrics import exposition
from dmq.broker.diagnostics.status_page import StatusPage
from dmq.broker.diagnostics.telnet import TelnetServer
from dmq.broker.wire.commands import HANDLERS
from dmq.broker.wire.connection import hello
from dmq.clock import Clock, SystemClock
from dmq.deadletters.url import MEMORY, check_url, default_url
from dmq.errors import NotAllowed, StoreFailed
from dmq.net.pages import Page, PageServer
from dmq.net.server import ConnectionLimits, Server
from dmq.settings import Settings
from dmq.storage.files import Files, OsFiles
from dmq.storage.store import MessageStore

if TYPE_CHECKING:
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["BrokerServer", "run"]

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
# A writer thread beside a busy loop waits for the interpreter's lock; a shorter turn lets it in sooner.
_SWITCH_SECONDS = 1e-4


def check_address(host: str, insecure: bool) -> None:
    """Refuse to listen where strangers can reach us, unless that is meant.

    Raises:
        NotAllowed: the address is not loopback.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not insecure:
        raise NotAllowed(
            f"{host} is not loopback, and there is no authentication yet: anybody who reaches it could read and write "
            "everything; say --insecure if that is meant",
            host=host,
        )


class BrokerServer:
    """One broker with its ports.

    Parameters:
        settings: ports may be 0, to take any that is free.
        files: where the data goes; the settings' directory if left out.
        insecure: other addresses than loopback are meant.
        letters: makes the store of dead letters; by default it is where the settings say, or in memory if files are.
        status: serve a status page for people on this port; None for none.
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
        self._clock = clock or SystemClock()
        self._files = files
        self._letters = letters
        self._status_port = status_port
        self._sweeper: asyncio.TimerHandle | None = None
        self._swept_at = 0.0
        self.port = 0
        self.metrics_port = 0
        self.status_port = 0
        self.telnet_port = 0

    async def start(self) -> None:
        """Open the store and the ports.

        Raises:
            DirectoryInUse, WrongFormat, PortTaken, …: nothing is left open.
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
        self.broker = Broker(store, settings, self._clock, HANDLERS, hello, letters)
        self._server = Server(
            self.broker,
            self._clock,
            ConnectionLimits(
                connections_max=settings.connections_max,
                output_bytes_max=settings.output_bytes_max,
                hello_seconds=settings.hello_seconds,
                partial_seconds=settings.partial_seconds,
                partial_bytes_max=settings.partial_bytes_max,
                silence_seconds=3 * settings.heartbeat_seconds,
            ),
            outbox=self.broker.outbox,
        )
        self._pages: list[PageServer] = []
        self._telnet = TelnetServer(self.broker)
        try:
            host, self.port = await self._server.listen(settings.host, settings.port)
            self.broker.address = f"{host}:{self.port}"
            self.metrics_port = await self._serve_pages(
                settings.metrics_port,
                {
                    "/metrics": lambda: Page(exposition(self.broker)),
                    "/healthz": self._health,
                    "/readyz": self._readiness,
                },
            )
            if settings.telnet_port is not None:
                self.telnet_port = await self._telnet.listen(settings.host, settings.telnet_port)
            if self._status_port is not None:
                page = StatusPage(self.broker)
                self.status_port = await self._serve_pages(
                    self._status_port, {"/": lambda: Page(page(), kind="text/html; charset=utf-8")}
                )
        except BaseException:
            await self.stop(0.0)
            raise
        self._sweep()
        self.broker.dead_letters.start(at_once=settings.dead_letters_url is not None)

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

    async def _serve_pages(self, port: int, pages: dict[str, Callable[[], Page]]) -> int:
        server = PageServer(pages)
        in_force = await server.listen(self._settings.broker.host, port)
        self._pages.append(server)
        return in_force

    def _health(self) -> Page:
        if self.broker.store.has_failed:
            return Page("the store failed\n", 503)
        return Page("ok\n")

    def _readiness(self) -> Page:
        if self.broker.is_stopping or self.broker.store.has_failed:
            return Page("stopping\n", 503)
        if self.broker.is_draining:
            return Page("drained\n", 503)
        return Page("ready\n")

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        before, self._swept_at = self._swept_at, loop.time()
        # Had we stood still ourselves, what came meanwhile must be read before anybody is called silent.
        if self._swept_at - before < 2 * _SWEEP_SECONDS:
            self._server.sweep()
        self._sweeper = loop.call_later(_SWEEP_SECONDS, self._sweep)

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain, close everything."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._server.stop_listening()
        settings = self._settings.broker
        try:
            await self.broker.stop(settings.drain_seconds if drain_seconds is None else drain_seconds)
        finally:
            await self._server.close()
            await self._telnet.close()
            for pages in self._pages:
                await pages.close()

    async def abort(self) -> None:
        """Cut every connection and serve nobody any more; the store is left as it is, as when the process dies."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._server.abort()
        await self.broker.dead_letters.close()
        await self._telnet.close()
        for pages in self._pages:
            await pages.close()

    async def serve(self, on_ready: Callable[[BrokerServer], None] | None = None) -> None:
        """Start, wait for a signal, for an operator's word or for a failure, stop.

        Raises:
            StoreFailed: the store failed while serving.
        """
        await self.start()
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        gc.collect()
        gc.freeze()
        if on_ready is not None:
            on_ready(self)
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self.broker.stop_asked, self.broker.failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        # Nothing can be finished on a store that failed.
        await self.stop(0.0 if self.broker.store.has_failed else None)
        if self.broker.store.has_failed:
            raise StoreFailed("the store failed while serving: check the disk, then start again")


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
