"""A real broker on a thread of its own, on files that a test can spoil."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

from dmq.broker.broker import Broker
from dmq.broker.server import BrokerServer
from dmq.clock import Clock
from dmq.settings import BrokerSettings, Settings, StoreSettings
from dmq.storage.files import Files
from dmq.testing import MemoryFiles

SECONDS = 60.0


class ServedBroker:
    """A broker with its server, on a thread of its own.

    Parameters:
        files: where the data goes.
        status_port: as of `BrokerServer`.
        store: settings of the store.
        clock: the broker's time; the machine's if left out.
        settings: of the broker, by name.
    """

    def __init__(
        self,
        files: Files | None = None,
        *,
        status_port: int | None = None,
        store: StoreSettings | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        self.files = files or MemoryFiles()
        self._status_port = status_port
        self._store = store or StoreSettings()
        self._clock = clock
        self._settings: dict[str, Any] = {
            "port": 0,
            "metrics_port": 0,
            "telnet_port": None,
            "drain_seconds": 1.0,
            **settings,
        }
        self._thread: threading.Thread | None = None
        self._drain_seconds: float | None = 0.0
        self._is_killed = False

    @property
    def url(self) -> str:
        return f"dmq://127.0.0.1:{self.server.port}"

    @property
    def broker(self) -> Broker:
        return self.server.broker

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="served-broker")
        self._thread.start()
        assert ready.wait(SECONDS), "the broker did not start"

    async def _serve(self, ready: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.server = BrokerServer(
            Settings(broker=BrokerSettings(**self._settings), store=self._store),
            files=self.files,
            clock=self._clock,
            status_port=self._status_port,
        )
        await self.server.start()
        self._settings["port"] = self.server.port
        ready.set()
        await self._stop.wait()
        await (self.server.abort() if self._is_killed else self.server.stop(self._drain_seconds))

    def kill(self) -> None:
        """End it as kill -9 does; what it leaves are `files.kill()`."""
        self.stop(is_killed=True)

    def stop(self, drain_seconds: float | None = 0.0, *, is_killed: bool = False) -> None:
        """End it cleanly."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._drain_seconds, self._is_killed = drain_seconds, is_killed
            self.loop.call_soon_threadsafe(self._stop.set)
            thread.join(SECONDS)
            assert not thread.is_alive(), "the broker does not stop"

    def restart(self) -> None:
        """End it and start it again, on the same port."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
