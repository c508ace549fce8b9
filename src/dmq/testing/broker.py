"""A broker for tests: the real one, in this process, on files in memory.

Everything a client can notice is the broker's own code: leases, redelivery, filters, durability. Only the disk is
memory, and the clock can be moved on: a retry in two hours is tested in a moment.

A blocking program enters it with `with` and takes clients from `connect`; an asyncio program enters it with `async
with` and takes them from `aio_connect`. Either way it runs in a thread of its own.

What always holds: it listens on loopback, on a port of its own that stays the same over restarts; `kill` leaves what a
killed process leaves, `stop` and `restart` what a clean end leaves; leaving the block closes the clients that it gave
out and leaves no thread behind.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import threading
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypedDict, Unpack

import msgspec

from dmq.broker.server import BrokerServer
from dmq.client.client import Client, connect
from dmq.client.connection.router import OnEvent, OnException
from dmq.deadletters.url import MEMORY
from dmq.event_log import EventLog
from dmq.settings import BrokerSettings, Settings
from dmq.testing.clock import ClientClock, FakeClock, RunningClock
from dmq.testing.disk.files import MemoryFiles

if TYPE_CHECKING:
    from dmq.client.aio.client import AioClient
    from dmq.deadletters.store import DeadLetterStore

__all__ = ["ConnectOptions", "TestBroker"]

log = EventLog(__name__)

# Clients beat by their own clock, so a broker whose time jumps must not miss them.
_PATIENCE_SECONDS: Final = 4_000_000.0
_THREAD_SECONDS: Final = 30.0

Setting: TypeAlias = bool | int | float | str | tuple[float, ...] | None


class ConnectOptions(TypedDict, total=False):
    """Options of `dmq.connect` and `dmq.aio.connect` beside URL, app and clock, which the broker gives."""

    client_id: str | None
    reconnect: bool
    timeout: float | None
    on_exception: OnException | None
    on_interrupted: OnEvent | None
    on_resumed: OnEvent | None


class _AioConnecting:
    """What `TestBroker.aio_connect` returns: to be awaited, or entered with `async with`."""

    def __init__(self, broker: TestBroker, app: str, options: ConnectOptions) -> None:
        self._broker = broker
        self._app = app
        self._options = options
        self._client: AioClient | None = None

    async def _open(self) -> AioClient:
        from dmq.client.aio.client import connect as aio_connect

        broker = self._broker
        clock = ClientClock(broker.clock)
        self._client = await aio_connect(broker.url, app=self._app, clock=clock, **self._options)
        broker.aio_clients.append(self._client)
        return self._client

    def __await__(self) -> Generator[Any, None, AioClient]:
        return self._open().__await__()

    async def __aenter__(self) -> AioClient:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


class TestBroker:
    """A broker to test with; a context manager, for `with` and `async with`, started when entered.

    Parameters:
        clock: the broker's time. Left out, it runs as ever, and `clock.advance` moves it on; a `FakeClock` stands
            still but for that, also for a pull that waits.
        settings: of the broker, by name, as in `lease_seconds=1.0`. Topics are created when first used unless
            `auto_create=False`.
    """

    __test__ = False  # not a class of tests, whatever its name

    def __init__(self, *, clock: FakeClock | None = None, **settings: Setting) -> None:
        defaults: dict[str, Any] = dict.fromkeys(
            ("heartbeat_seconds", "partial_seconds", "hello_seconds"), _PATIENCE_SECONDS
        )
        defaults |= {
            "port": 0,
            "metrics_port": 0,
            "telnet_port": None,
            "auto_create": True,
            "offline_delay_ms": 0,
            "drain_seconds": 1.0,
        }
        given: dict[str, Any] = dict(settings)
        self._settings = BrokerSettings(**defaults | given)
        self.clock: Final = RunningClock() if clock is None else clock
        self._files = MemoryFiles()
        self._letters: DeadLetterStore | None = None
        self._clients: list[Client] = []
        self.aio_clients: Final[list[AioClient]] = []
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: BrokerServer | None = None
        self._ending: asyncio.Future[Callable[[BrokerServer], Coroutine[Any, Any, None]]] | None = None
        self.port = 0

    # --- running ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, or start it again on what the last run left."""
        assert self._thread is None, "it is running"
        # Here and not in the broker's threads: pytest parses what is imported, and CPython 3.11 breaks when two
        # threads parse at once.
        importlib.import_module("dmq.deadletters.store")
        problems: list[BaseException] = []
        ready = threading.Event()
        thread = threading.Thread(target=self._run, args=(ready, problems), name="dmq-test-broker", daemon=True)
        thread.start()
        ready.wait()
        if problems:
            thread.join()
            raise problems[0]
        self._thread = thread

    def _run(self, ready: threading.Event, problems: list[BaseException]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except Exception as error:
            if ready.is_set():
                log.exception("the broker failed")
            problems.append(error)
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        server = BrokerServer(
            Settings(broker=self._settings), files=self._files, clock=self.clock, letters=self._keep_letters
        )
        await server.start()
        self._loop = asyncio.get_running_loop()
        self._ending = self._loop.create_future()
        self._server = server
        self.port = server.port
        self._settings = msgspec.structs.replace(self._settings, port=server.port)
        ready.set()
        end = await self._ending
        await end(server)

    def _keep_letters(self) -> DeadLetterStore:
        """Dead letters in memory, which outlive a run as a database does."""
        from dmq.deadletters.store import DeadLetterStore

        if self._letters is None:
            self._letters = DeadLetterStore(MEMORY, keep_open=True)
        return self._letters

    def _end(self, how: Callable[[BrokerServer], Coroutine[Any, Any, None]]) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        assert self._loop is not None
        assert self._ending is not None
        self._loop.call_soon_threadsafe(self._ending.set_result, how)
        thread.join(_THREAD_SECONDS)
        self._loop = self._ending = self._server = None

    def stop(self) -> None:
        """End it cleanly, as SIGTERM does. `start` brings it back with everything."""
        # A drain waits for a time that a clock which stands still never reaches.
        self._end(lambda server: server.stop(None if isinstance(self.clock, RunningClock) else 0.0))

    def kill(self) -> None:
        """End it as kill -9 does. `start` brings it back with all it had written."""
        before = self._files
        self._end(lambda server: server.abort())
        self._files = before.kill()

    def lose_power(self, rng: random.Random) -> None:
        """End it as a power loss does. `start` brings it back with what was flushed, and some of what was not."""
        before = self._files
        self._end(lambda server: server.abort())
        self._files = before.crash(rng)

    def restart(self) -> None:
        """`stop`, then `start` on the same port."""
        self.stop()
        self.start()

    # --- clients ----------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"dmq://127.0.0.1:{self.port}"

    def connect(self, app: str = "test", **options: Unpack[ConnectOptions]) -> Client:
        """A client, closed with the broker; options as of `dmq.connect`. Its wall clock is the broker's."""
        client = connect(self.url, app=app, clock=ClientClock(self.clock), **options)
        self._clients.append(client)
        return client

    def aio_connect(self, app: str = "test", **options: Unpack[ConnectOptions]) -> _AioConnecting:
        """A client of asyncio: `client = await broker.aio_connect()`, or with `async with`.

        Options as of `dmq.aio.connect`. Its wall clock is the broker's; leaving `async with` of the broker closes it.
        """
        return _AioConnecting(self, app, options)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.aio_clients:
            await self.aio_clients.pop().close()
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._clients:
            self._clients.pop().close()
        self._end(lambda server: server.stop(0.0))
        if self._letters is not None:
            self._letters.dispose()
