"""The client: `async with dmq.aio.connect("dmq://127.0.0.1:9611", app="shop") as client`.

What always holds: closing a client closes its producers and consumers first, so that messages and acks that are on
their way arrive.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from datetime import datetime, timedelta
from itertools import count
from types import TracebackType
from typing import Any, Final, Protocol, Self, Unpack, overload

from dmq.client.aio.admin import AioAdmin
from dmq.client.aio.consumer import AioConsumer
from dmq.client.aio.producer import AioProducer
from dmq.client.aio.registry import AioRegistry
from dmq.client.aio.router import AioRouter
from dmq.client.arguments import check_timeout
from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import Listeners, OnEvent, OnException, RouteTable
from dmq.client.connection.session import make_hello
from dmq.client.connection.url import OneBroker, check_url, names_registry, parse_url
from dmq.client.consumer.message import T
from dmq.client.consumer.options import ConsumerOptions, Strategy, SubscribeOptions
from dmq.client.producer.core import WINDOW_MESSAGES, Core, OnFull, ProducerOptions
from dmq.client.producer.routes import Routes
from dmq.client.producer.transaction_core import Transactions, check_options
from dmq.clock import Clock, SystemClock
from dmq.errors import NotConnected, Unsupported
from dmq.model import check_name

__all__ = ["AioClient", "AioClosable", "connect"]

# twin: async
_NO_SPOOL: Final = (
    "the asyncio client keeps no spool: use a producer of dmq.connect() with its spool, and call it by "
    "asyncio.to_thread"
)
# twin: end


class AioClosable(Protocol):
    """What a client closes before itself."""

    def close(self) -> Awaitable[None]: ...


# twin: async
class _Connecting:
    """What `connect` returns: to be awaited, or entered with `async with`. The client is made then, on its loop."""

    def __init__(self, url: str, settings: PoolSettings, listeners: Listeners) -> None:
        self._url = url
        self._settings = settings
        self._listeners = listeners
        self._client: AioClient | None = None

    async def _open(self) -> AioClient:
        if names_registry(self._url):
            table = await asyncio.to_thread(OneBroker.at, self._url, self._settings.timeout)
        else:
            table = OneBroker(parse_url(self._url))
        self._client = AioClient(table, self._settings, self._listeners)
        return await self._client.open()

    def __await__(self) -> Generator[Any, None, AioClient]:
        return self._open().__await__()

    async def __aenter__(self) -> AioClient:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
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
    *,
    any_member: bool = False,
    clock: Clock | None = None,
) -> _Connecting:
    """Connect to a broker: `client = await connect(…)`, or `async with connect(…) as client`.

    Parameters and errors as of `dmq.connect`. Listeners may be coroutine functions.
    """
    settings = PoolSettings(
        make_hello(app, client_id), clock or SystemClock(), reconnect, check_timeout(timeout), any_member=any_member
    )
    check_url(url)
    return _Connecting(url, settings, Listeners(on_exception, on_interrupted, on_resumed))


# twin: blocking
# def connect(
#     url: str,
#     app: str = "dmq",
#     client_id: str | None = None,
#     reconnect: bool = True,
#     timeout: float | None = None,
#     on_exception: OnException | None = None,
#     on_interrupted: OnEvent | None = None,
#     on_resumed: OnEvent | None = None,
#     *,
#     any_member: bool = False,
#     clock: Clock | None = None,
# ) -> Client:
#     """Connect to a broker.
#
#     Parameters:
#         url: `dmq://host:port`, several hosts separated by commas. Of a cluster, any of its brokers or name servers:
#             the client finds the leaders of all shards from there, and follows them. `zk://host:2181/dmq` takes the
#             brokers that are registered in ZooKeeper below that path; it needs `dmq[zookeeper]`.
#         app: the name of this application.
#         client_id: the name of this process, if it has one that lasts.
#         reconnect: come back by itself when the connection breaks; without it, a broken connection closes the client.
#         timeout: how long to wait for a connection, now and whenever there is none. Without it, `connect` fails at
#             once if nobody answers, and later calls wait until the connection is back.
#         on_exception: called with the reason when the connection breaks, and when messages that a spool had accepted
#             are refused for good.
#         on_interrupted: called when there is no connection any more.
#         on_resumed: called when there is one again.
#         any_member: of a shard, stay with the first member that answers, though it may not lead: for what any member
#             answers, as `client.admin.shard`.
#         clock: for tests; the machine's if left out.
#
#     Raises:
#         NotConnected: nobody answers.
#         InvalidSettings, InvalidName: the URL or a name cannot be used.
#         VersionMismatch, NotAuthenticated: the broker refused us.
#     """
#     settings = PoolSettings(
#         make_hello(app, client_id), clock or SystemClock(), reconnect, check_timeout(timeout), any_member=any_member
#     )
#     listeners = Listeners(on_exception, on_interrupted, on_resumed)
#     return Client(OneBroker.at(url, settings.timeout), settings, listeners).open()
#
#
# twin: end
class AioClient:
    # twin: async
    """A connection to a broker, kept up, on one running loop. Made by `dmq.aio.connect`; a context manager.

    `client.admin` administrates the broker, `client.registry` is its key-value space, `client.app` is its own name.
    """

    # twin: blocking
    # """A connection to a broker, kept up. Made by `dmq.connect`. Thread-safe; a context manager.
    #
    # `client.admin` administrates the broker, `client.registry` is its key-value space, `client.app` is its own name.
    # """
    # twin: end

    def __init__(self, table: RouteTable, settings: PoolSettings, listeners: Listeners) -> None:
        self.app: Final = settings.hello.app
        self._listeners: Final = listeners
        self._clock = settings.clock
        self._routes = Routes()
        self._parts: list[AioClosable] = []
        self._subscriptions = count(1)
        self._router: Final = AioRouter(table, settings, listeners)
        self.admin: Final = AioAdmin(self._router, settings.timeout)
        self.registry: Final = AioRegistry(self.admin)

    async def open(self) -> Self:
        """Connect.

        Raises:
            NotConnected: nobody answers.
        """
        await self._router.open()
        return self

    # twin: async
    @property
    def client_id(self) -> str:
        """The name of this process, as the broker knows it.

        Raises:
            NotConnected: there is no connection now.
        """
        connection = self._router.home.current()
        if connection is None:
            raise self._router.closed_by or NotConnected("there is no connection now: ask again when it is back")
        return connection.client_id

    # twin: blocking
    # @property
    # def client_id(self) -> str:
    #     """The name of this process, as the broker knows it."""
    #     return self._router.home.connection().client_id
    #
    # twin: end
    def producer(
        self,
        app: str | None = None,
        group: str | None = None,
        check: Callable[..., Any] | None = None,
        spool: str | os.PathLike[str] | None = None,
        timeout: float | None = 5.0,
        retries: int = 3,
        window_bytes: int = 32 << 20,
        on_full: OnFull = "block",
        compression: str = "auto",
        *,
        window_messages: int = WINDOW_MESSAGES,
        resend_after: Sequence[float] = (30.0, 60.0, 90.0),
        straight: bool = True,
        # twin: blocking
        # spool_bytes_max: int = 1 << 30,
        # twin: end
    ) -> AioProducer:
        """A producer. One is enough for a process.

        Parameters:
            app: the name under which it sends; the client's own if left out.
            group: the producer group, for transactions: of all processes that can answer for each other's.
            check: called with a prepared message of the group whose transaction nobody ended; returns "commit",
                "rollback", or None if that is not known yet.
            spool: only in a blocking program: a directory of its own that keeps messages until a broker has them, also
                if the program is killed. A send then succeeds without one. Beyond `spool_bytes_max`, see `on_full`.
            timeout: seconds that bound a whole synchronous send; None waits for ever.
            retries: how often a refused message is tried again.
            window_bytes, window_messages: how much may be on its way.
            on_full: when the window is full, "block", "raise", or a function that is called with the topic and the
                message, which is then not sent.
            compression: "auto" compresses the small bodies of a batch together where that pays, and a body by itself
                from 4 KiB on; "lz4" and "zstd" try every body over 100 bytes with that codec; "none" never.
            resend_after: seconds after which an unanswered message is sent again.
            straight: a message sent by itself takes a shorter way, with the same result.

        Raises:
            InvalidSettings: a value makes no sense.
            DirectoryInUse: another producer has the spool.
            StorageError: the spool cannot be used; the message says why.
            Unsupported: transactions and a spool do not go together, nor a spool and asyncio.
        """
        self._check_open()
        check_options(group, check)
        options = ProducerOptions(
            timeout=timeout,
            retries=retries,
            window_bytes=window_bytes,
            window_messages=window_messages,
            on_full=on_full,
            compression=compression,
            resend_after=resend_after,
            straight=straight,
        )
        # twin: async
        if spool is not None:
            raise Unsupported(_NO_SPOOL)
        core = Core.make(check_name(app or self.app, "app"), options, self._routes, self._router, clock=self._clock)
        # twin: blocking
        # if group is not None and spool is not None:
        #     raise Unsupported("a transaction needs the broker's answer: leave spool or group out")
        # core = self._core(check_name(app or self.app, "app"), options, spool, spool_bytes_max)
        # twin: end
        transactions = None if group is None else Transactions(core, self._router, self._clock, group, check=check)
        producer = AioProducer(core, self._router, self._release, transactions)
        self._adopt(producer)
        return producer

    # twin: blocking
    # def _core(
    #     self, app: str, options: ProducerOptions, path: str | os.PathLike[str] | None, bytes_max: int
    # ) -> Core:
    #     if path is None:
    #         return Core.make(app, options, self._routes, self._router, clock=self._clock)
    #     # Which loads the journal, too, that other programs do not need.
    #     from dmq.client.spool.sender import make_core
    #     from dmq.client.spool.spool import Spool
    #
    #     spool = Spool.open(path, bytes_max, self._clock)
    #     spool.on_refused = lambda error: self._router.notify(self._listeners.exception, error)
    #     return make_core(spool, app, options, self._routes, links=self._router, clock=self._clock)
    #
    # twin: end
    @overload
    def consumer(
        self, topic: str, group: str, *, type: type[T], **options: Unpack[SubscribeOptions]
    ) -> AioConsumer[T]: ...

    @overload
    def consumer(
        self, topic: str, group: str, *, type: None = None, **options: Unpack[SubscribeOptions]
    ) -> AioConsumer[bytes]: ...

    @overload
    def consumer(
        self, topic: str, group: str, *, type: Any, **options: Unpack[SubscribeOptions]
    ) -> AioConsumer[Any]: ...

    def consumer(
        self,
        topic: str,
        group: str,
        tags: str | None = None,
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
        strategy: Strategy | None = None,
    ) -> AioConsumer[Any]:
        """A consumer: to iterate over, to `pull` from, or to `run` a handler with.

        Parameters:
            topic: what it consumes.
            group: with whom it shares the work.
            tags: only messages with one of these tags, "created || paid"; all if left out. Members of a group agree.
            ordered: one message of a queue after the other, also when one fails. Members of a group agree.
            broadcast: every member gets every message; needs `client_id` at `connect`.
            start_from: where a new group begins: "earliest", "latest", an offset, a datetime, seconds since 1970 as a
                float, or a time back from now, as a timedelta or as in "2h".
            prefetch: how many messages may be here unsettled.
            prefetch_bytes: the same in bytes; the broker's default if left out.
            batch: messages in one lease at most, if `parallel` or `ordered` makes leases count; else as many as suit.
            parallel: messages of one queue that may be out at once, in the whole group; None means no limit.
            lease: seconds after which a message that is not settled goes to another member.
            max_attempts: after so many it becomes a dead letter; None tries for ever.
            auto_ack: a message is acked when the next one is asked for.
            version: of the tags; a higher one replaces those of the group's other members.
            type: what `message.body` is an object of, instead of bytes; those are in `message.raw`.
            strategy: the members divide the queues among themselves, each queue to one of them: "average", "circle" or
                "consistent-hash". Left out, the broker gives every message to a member that can take it. Members of a
                group agree.

        Raises:
            InvalidSettings, InvalidName: a value makes no sense.
        """
        self._check_open()
        given = SubscribeOptions(
            tags=tags, ordered=ordered, broadcast=broadcast, start_from=start_from, prefetch=prefetch, batch=batch,
            parallel=parallel, lease=lease, max_attempts=max_attempts, auto_ack=auto_ack, version=version,
            prefetch_bytes=prefetch_bytes, strategy=strategy,
        )  # fmt: skip
        options = ConsumerOptions(topic, group, given, type=type)
        consumer: AioConsumer[Any] = AioConsumer(
            options, next(self._subscriptions), self._router, self._clock, released=self._release
        )
        self._adopt(consumer)
        return consumer

    def _check_open(self) -> None:
        error = self._router.closed_by
        if error is not None:
            raise type(error)(error.message, **error.detail)

    def _adopt(self, part: AioClosable) -> None:
        """Have a producer, a consumer or the like closed with the client."""
        self._parts.append(part)

    def _release(self, part: AioClosable) -> None:
        """Forget a part that was closed by itself."""
        if part in self._parts:
            self._parts.remove(part)

    async def close(self) -> None:
        """Close everything, the last made first."""
        while self._parts:
            await self._parts.pop().close()
        await self._router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
