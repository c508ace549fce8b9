"""The client on an event loop: the twin of `dmq.client.client`.

What always holds: as there; one client belongs to one running loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from datetime import datetime, timedelta
from itertools import count
from types import TracebackType
from typing import Any, Final, Protocol, Self

from dmq.client.aio.admin import AioAdmin
from dmq.client.aio.consumer import AioConsumer
from dmq.client.aio.key_values import AioRegistry
from dmq.client.aio.producer import AioProducer
from dmq.client.aio.router import AioRouter
from dmq.client.arguments import check_timeout
from dmq.client.client import make_hello
from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import Listeners, OneBroker, OnEvent, OnException, RouteTable
from dmq.client.connection.url import parse_url
from dmq.client.consumer.options import ConsumerOptions
from dmq.client.producer.core import WINDOW_MESSAGES, Core, OnFull, ProducerOptions
from dmq.client.producer.routes import Routes
from dmq.client.producer.transaction_core import Transactions, check_options
from dmq.clock import SystemClock
from dmq.errors import NotConnected, Unsupported

__all__ = ["AioClient", "connect"]


class AioClosable(Protocol):
    """What a client closes before itself."""

    def close(self) -> Awaitable[None]: ...


class _Connecting:
    """What `connect` returns: to be awaited, or entered with `async with`."""

    def __init__(self, client: AioClient) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, AioClient]:
        return self._client.open().__await__()

    async def __aenter__(self) -> AioClient:
        return await self._client.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()


def connect(
    url: str,
    app: str = "dmq",
    client_id: str | None = None,
    reconnect: bool = True,
    timeout: float | None = None,
    on_exception: OnException | None = None,
    on_interrupted: OnEvent | None = None,
    on_resumed: OnEvent | None = None,
) -> _Connecting:
    """Connect to a broker: `client = await connect(…)`, or `async with connect(…) as client`.

    Parameters and errors as of `dmq.connect`. Listeners may be coroutine functions.
    """
    settings = PoolSettings(make_hello(app, client_id), SystemClock(), reconnect, check_timeout(timeout))
    listeners = Listeners(on_exception, on_interrupted, on_resumed)
    return _Connecting(AioClient(OneBroker(parse_url(url)), settings, listeners))


class AioClient:
    """A connection to a broker, kept up. Made by `dmq.aio.connect`."""

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners) -> None:
        self.app: Final = settings.hello.app
        self.listeners: Final = listeners
        self._table = table
        self._settings = settings
        self._clock = settings.clock
        self._routes = Routes()
        self._parts: list[AioClosable] = []
        self._subscriptions = count(1)
        self._router: AioRouter | None = None

    async def open(self) -> Self:
        """Connect.

        Raises:
            NotConnected: nobody answers.
        """
        self._router = AioRouter(self._table, self._settings, self.listeners)
        await self._router.open()
        return self

    @property
    def router(self) -> AioRouter:
        """What connects it to brokers.

        Raises:
            NotConnected: the client was not opened.
        """
        if self._router is None:
            raise NotConnected("the client is not connected: await connect(…) first")
        return self._router

    @property
    def admin(self) -> AioAdmin:
        return AioAdmin(self.router, self._settings.timeout)

    @property
    def registry(self) -> AioRegistry:
        return AioRegistry(self.admin)

    def producer(
        self,
        app: str | None = None,
        group: str | None = None,
        check: Callable[..., Any] | None = None,
        spool: str | None = None,
        timeout: float | None = 5.0,
        retries: int = 3,
        window_bytes: int = 32 << 20,
        on_full: OnFull = "block",
        compression: str = "auto",
        *,
        window_messages: int = WINDOW_MESSAGES,
        resend_after: Sequence[float] = (30.0, 60.0, 90.0),
    ) -> AioProducer:
        """A producer; parameters as of `dmq.client.client.Client.producer`."""
        if spool is not None:
            raise Unsupported(
                "the asyncio client keeps no spool: use a producer of dmq.connect() with its spool, and call it by "
                "asyncio.to_thread"
            )
        check_options(group, check)
        options = ProducerOptions(
            timeout=timeout,
            retries=retries,
            window_bytes=window_bytes,
            window_messages=window_messages,
            on_full=on_full,
            compression=compression,
            resend_after=resend_after,
        )
        core = Core.make(app or self.app, options, self._routes, self.router, clock=self._clock)
        transactions = None if group is None else Transactions(core, self.router, self._clock, group, check=check)
        producer = AioProducer(core, self.router, self.release, transactions)
        self.adopt(producer)
        return producer

    def consumer(
        self,
        topic: str,
        group: str,
        tags: str = "",
        ordered: bool = False,
        broadcast: bool = False,
        start_from: str | int | float | datetime | timedelta = "earliest",
        prefetch: int = 1000,
        batch: int = 10,
        parallel: int | None = None,
        lease: float = 30.0,
        max_attempts: int | None = 16,
        auto_ack: bool = False,
        version: int = 0,
        type: Any = None,
        *,
        prefetch_bytes: int | None = None,
        strategy: str | None = None,
    ) -> AioConsumer:
        """A consumer; parameters as of `dmq.client.client.Client.consumer`."""
        options = ConsumerOptions(
            topic, group, tags, ordered, broadcast, start_from, prefetch, batch, parallel, lease, max_attempts,
            auto_ack, version, type, prefetch_bytes, strategy,
        )  # fmt: skip
        consumer = AioConsumer(options, next(self._subscriptions), self.router, self._clock, self.release)
        self.adopt(consumer)
        return consumer

    def adopt(self, part: AioClosable) -> None:
        """Have it closed with the client."""
        self._parts.append(part)

    def release(self, part: AioClosable) -> None:
        """It was closed by itself."""
        if part in self._parts:
            self._parts.remove(part)

    async def close(self) -> None:
        """Close everything, the last made first."""
        while self._parts:
            await self._parts.pop().close()
        if self._router is not None:
            await self._router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
