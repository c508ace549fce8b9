"""A link: one session with ZooKeeper, which is one client of kazoo, and the way from its threads to the event loop.

kazoo by itself would go on with a new session, and send in it what was meant for the one before. Here a client ends
with its session. The session lives no longer than the event loop turns: kazoo's thread asks it before each ping.

kazoo lacks persistent recursive watches, which ZooKeeper has since 3.6: the request is added here, and events are read
past kazoo's own watchers. It also tries servers in any order, with the patience of a whole session for each: here the
one that was lost last comes last, and none takes more than its share of a session, which so moves to another server in
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from kazoo import exceptions
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, int_struct, write_string
from kazoo.protocol.serialization import Watch as WatchEvent
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from dmq.event_log import EventLog, foreign_log

__all__ = ["PAUSE_SECONDS_MAX", "PAUSE_SECONDS_MIN", "UNDER_WAY_MAX", "Link", "LinkOptions", "LinkOwner"]

log = EventLog(__name__)

UNDER_WAY_MAX: Final = 128  # kazoo wakes its thread by a byte a request, through a socket that takes some 270
PAUSE_SECONDS_MIN: Final = 0.05
PAUSE_SECONDS_MAX: Final = 1.0
_CONNECT_SECONDS_MIN: Final = 0.5
_HEARD_MAX: Final = 1024
_ADD_WATCH: Final = 106
_RECURSIVE: Final = 1
_NUMBERS: Final = (1 << 64) - 1

# What kazoo logs is told by our own lines; what it did not expect is worth its trace.
_kazoo_log = foreign_log(f"{__name__}.kazoo")


class LinkOptions(NamedTuple):
    """What a session is asked for with.

    Attributes:
        hosts: "host:port", separated by commas.
        zxid: the last change that was seen before.
    """

    hosts: str
    session_seconds: float
    credentials: str | None
    zxid: int


class LinkOwner(Protocol):
    """What a link tells, on the event loop."""

    def connected(self, link: Link, session: int, session_seconds: float, address: str) -> None:
        """A server has given us a session, or goes on with the one we have."""
        ...

    def disconnected(self, link: Link) -> None: ...

    def refused(self, link: Link) -> None:
        """A server does not take our credentials."""
        ...

    def session_over(self, link: Link) -> None:
        """The session is over, or no server could say."""
        ...

    def changed(self, link: Link, paths: dict[str, None]) -> None: ...

    def anything_changed(self, link: Link) -> None: ...


class _AddWatch:
    """Ask to be told of every change to a node and to what is below it, for as long as the connection lives."""

    type = _ADD_WATCH

    def __init__(self, path: str) -> None:
        self._path = path

    def serialize(self) -> bytes:
        return bytes(write_string(self._path) + int_struct.pack(_RECURSIVE))

    @staticmethod
    def deserialize(_buffer: bytes, _offset: int) -> bool:
        return True


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, which do not wait for one server as long as a session lives."""

    def __init__(self, connect_seconds: float) -> None:
        super().__init__()
        self._connect_seconds = connect_seconds

    def create_connection(self, *arguments: Any, **options: Any) -> Any:
        options["timeout"] = min(options["timeout"], self._connect_seconds)
        return super().create_connection(*arguments, **options)


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection thread, with the watch above and a session that lives no longer than the event loop turns."""

    def __init__(self, link: Link, client: KazooClient) -> None:
        super().__init__(client, client._conn_retry.copy(), logger=_kazoo_log)
        self._link = link
        self._last: tuple[str, int] | None = None

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception as error:
            log.warning("a connection to ZooKeeper failed in a way that was not expected", error=repr(error))
        finally:
            self._link.ended()

    def _expand_client_hosts(self) -> list[tuple[str, str, int]]:
        found: list[tuple[str, str, int]] = super()._expand_client_hosts()
        return sorted(found, key=lambda one: (one[0], one[2]) == self._last)  # the one that was lost, last

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        if not self._link.is_loop_turning():
            raise exceptions.ConnectionDropped("the event loop stands still")
        self._last = host, port
        try:
            read_timeout, connect_timeout = super()._connect(host, hostip, port)
        except exceptions.AuthFailedError:
            self._link.refused()
            raise
        # kazoo keeps what the server granted to itself, and tells two thirds of it.
        self._link.connected(self.client._session_id, read_timeout * 1.5 / 1000, f"{host}:{port}")
        return read_timeout, connect_timeout

    def _send_ping(self, connect_timeout: float) -> None:
        if self._link.is_loop_turning():
            super()._send_ping(connect_timeout)
        elif not self.client._stopped.is_set():
            # As `KazooClient.stop` does it, but for waiting until this thread has ended.
            self.client._stopped.set()
            self.client._queue.append((CloseInstance, None))
            self._write_sock.send(b"\0")

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        event, _ = WatchEvent.deserialize(buffer, offset)
        self._link.heard(event.path)


class Link:
    """One session.

    Attributes:
        is_connected: on the event loop; as of what kazoo's threads have told it.
        number: of the connection, within the session.
        watched: prefixes that this connection watches.
        room: for requests under way.
    """

    def __init__(self, owner: LinkOwner, options: LinkOptions) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        servers = options.hosts.count(",") + 1
        handler = _Handler(max(_CONNECT_SECONDS_MIN, options.session_seconds / 2 / servers))
        retry = KazooRetry(
            max_tries=-1, delay=PAUSE_SECONDS_MIN, max_delay=PAUSE_SECONDS_MAX, sleep_func=handler.sleep_func
        )
        is_known = options.credentials is not None
        self._kazoo = KazooClient(
            hosts=options.hosts,
            timeout=options.session_seconds,
            handler=handler,
            connection_retry=retry,
            command_retry=retry.copy(),
            auth_data=[("digest", options.credentials)] if is_known else None,
            default_acl=CREATOR_ALL_ACL if is_known else None,
            logger=_kazoo_log,
        )
        self._kazoo._connection = _Connection(self, self._kazoo)
        self._kazoo.last_zxid = options.zxid
        self._kazoo.add_listener(self._hear_state)
        self._patience = options.session_seconds / 2
        self._turned_at = time.monotonic()
        self._heard: dict[str, None] = {}
        self._heard_lock = threading.Lock()
        self._zxid = options.zxid
        self.is_connected = False
        self.number = 0
        self.watched: set[str] = set()
        self.room = asyncio.Semaphore(UNDER_WAY_MAX)
        self._kazoo.start_async()

    @property
    def zxid(self) -> int:
        """The last change that was seen."""
        return max(self._zxid, int(self._kazoo.last_zxid))

    # --- on the event loop ------------------------------------------------------------------------------------------

    def send(self, start: Callable[[KazooClient], Any]) -> asyncio.Future[Any]:
        """Send a request, for which there is room; the future has the answer."""
        future: asyncio.Future[Any] = self._loop.create_future()
        number = self.number
        start(self._kazoo).rawlink(lambda result: self._post(self._settle, future, result, number))
        return future

    def _settle(self, future: asyncio.Future[Any], result: Any, number: int) -> None:
        self.room.release()
        if number == self.number and isinstance(result.exception, exceptions.ConnectionLoss):
            self._owner.disconnected(self)  # kazoo says so a moment later; until then all would go into its queue
        if future.done():
            return
        if result.exception is not None:
            future.set_exception(result.exception)
        else:
            future.set_result(result.value)

    def add_watch(self, prefix: str) -> asyncio.Future[Any]:
        def start(kazoo: KazooClient) -> Any:
            result = kazoo.handler.async_result()
            kazoo._call(_AddWatch(prefix), result)
            return result

        return self.send(start)

    def drop(self) -> None:
        """Give the connection up, not the session: its server does not answer, and another one may."""
        taken = self._kazoo._connection._socket
        with contextlib.suppress(OSError, AttributeError):  # it is gone already
            taken.shutdown(socket.SHUT_RDWR)

    def take_heard(self) -> None:
        with self._heard_lock:
            paths, self._heard = self._heard, {}
        if len(paths) > _HEARD_MAX:
            self._owner.anything_changed(self)
        else:
            self._owner.changed(self, paths)

    def close(self) -> asyncio.Event:
        """End the session if a server can be told, and the threads, now or soon; the event is set then."""
        over = asyncio.Event()

        def stop() -> None:
            with contextlib.suppress(Exception):  # a thread that does not end in time ends later
                self._kazoo.stop()
                self._kazoo._safe_close()
                self._kazoo.close()
            self._post(over.set)

        threading.Thread(target=stop, name="zookeeper-close", daemon=True).start()
        return over

    # --- on kazoo's threads -----------------------------------------------------------------------------------------

    def _post(self, work: Callable[..., None], *arguments: Any) -> None:
        """Have the event loop do something; nothing if that is over."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *arguments)

    def _hear_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self._zxid = self.zxid  # kazoo forgets it with the session
            self._kazoo._stopped.set()  # or it would go on with a session of its own
            self.ended()
        elif state == KazooState.SUSPENDED:
            self._post(self._owner.disconnected, self)

    def connected(self, session: int, session_seconds: float, address: str) -> None:
        self._patience = session_seconds / 2
        self._post(self._owner.connected, self, session & _NUMBERS, session_seconds, address)

    def refused(self) -> None:
        self._post(self._owner.refused, self)

    def ended(self) -> None:
        self._post(self._owner.session_over, self)

    def heard(self, path: str) -> None:
        with self._heard_lock:
            is_told = bool(self._heard)
            if len(self._heard) <= _HEARD_MAX:
                self._heard[path] = None
        if not is_told:
            self._post(self.take_heard)

    def is_loop_turning(self) -> bool:
        """Whether the event loop has turned within half a session. Asks it each time, for the next."""
        is_late = time.monotonic() - self._turned_at > self._patience
        turned = threading.Event()

        def turn() -> None:
            self._turned_at = time.monotonic()
            turned.set()

        self._post(turn)
        # A process that was stopped, and goes on, has a loop that turns as soon as it is let.
        return not is_late or turned.wait(self._patience / 8)
