"""A registry in ZooKeeper: the `Registry` of a broker, over kazoo.

kazoo has threads of its own, which write, read and ping. Here each of its clients stands for one session (`_Link`):
when that is over, the client is dropped and another begins. So nothing that was meant for one session is ever sent in
the next, and nothing is sent twice. The event loop hands requests over and is told of answers, and never waits for a
thread.

What always holds: a write is one multi, sent once, in the order of the calls. One that was sent and not answered within
half a session is `WriteUnknown`. ZooKeeper settles it: a connection that takes a session over ends the one before it,
or has its requests refused. A session is kept alive only while the event loop turns. After each new connection and each
new session, and every hour, watches say that anything may have changed. Reads go forwards from one session to the next
as well: a server that is behind what this client has seen is not used.

Entries are nodes, and versions are those of ZooKeeper's data. A subtree is watched by one persistent recursive watch,
which ZooKeeper has since 3.6, and kazoo has not: the request is added here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from kazoo import exceptions
from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, int_struct, write_string
from kazoo.protocol.serialization import Watch as WatchEvent
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry

from dmq.clock import Clock, SystemClock
from dmq.duration import parse_duration
from dmq.errors import DMQError, InvalidName, InvalidSettings, RegistryDown, SessionExpired, WriteUnknown
from dmq.event_log import EventLog, foreign_log
from dmq.net.address import ServerAddress, parse_address
from dmq.registry.registry import (
    ROOT,
    SESSION_SECONDS,
    Check,
    Create,
    Delete,
    Entry,
    Operation,
    Put,
    Reason,
    check_path,
    check_write,
    conflict,
    parent_of,
    unknown_entry,
)
from dmq.registry.tenure import Tenure
from dmq.registry.watch import Watch, Watches

__all__ = ["DEFAULT_PORT", "ZooKeeperClient", "ZooKeeperUrl", "parse_zookeeper"]

log = EventLog(__name__)

DEFAULT_PORT: Final = 2181
PULL_SECONDS: Final = 3600.0
SESSION_SECONDS_MIN: Final = 1.0
SESSION_SECONDS_MAX: Final = 60.0
_UNDER_WAY_MAX: Final = 128  # kazoo wakes its thread by a byte a request, through a socket that takes some 270
_HEARD_MAX: Final = 1024
_PREFIXES_MAX: Final = 256
_PAUSE_SECONDS_MIN: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 1.0
_LOOK_SECONDS: Final = 1.0
_ADD_WATCH: Final = 106
_RECURSIVE: Final = 1
_NUMBERS: Final = (1 << 64) - 1
_CONTAINER: Final = 1 << 63  # what ZooKeeper writes where the session of an ephemeral node stands

# What kazoo logs is told by our own lines; what it did not expect is worth its trace.
_kazoo_log = foreign_log(f"{__name__}.kazoo")


class ZooKeeperUrl(NamedTuple):
    """What a URL says: who serves, below which path the cluster is, and how long a session lives without a sign."""

    addresses: tuple[ServerAddress, ...]
    root: str
    session_seconds: float


def parse_zookeeper(url: str) -> ZooKeeperUrl:
    """The ensemble of `zk://h1:2181,h2:2181/dmq`, or `zk://h1/dmq?session=4s`.

    Raises:
        InvalidSettings: it is no such URL.
    """
    scheme, found, rest = url.strip().partition("://")
    expected = "write zk://host1:2181,host2:2181/dmq, with the path below which this cluster is to be"
    if not found or scheme.lower() != "zk" or "@" in rest:
        raise InvalidSettings(f"{url!r} names no ZooKeeper: {expected}", url=url)
    place, _, query = rest.partition("?")
    hosts, _, path = place.partition("/")
    try:
        addresses = [parse_address(part, DEFAULT_PORT) for part in hosts.split(",")]
        root = check_path("/" + unquote(path.rstrip("/")))
    except InvalidSettings as error:
        raise InvalidSettings(f"{url!r}: {error.detail['address']!r} is no address: {expected}", url=url) from error
    except InvalidName as error:
        raise InvalidSettings(f"{url!r}: {error.message}", url=url) from error
    if root == ROOT:
        raise InvalidSettings(f"{url!r} names no path: {expected}", url=url)
    options = dict(parse_qsl(query, keep_blank_values=True))
    seconds: float | None = SESSION_SECONDS
    if "session" in options:
        seconds = parse_duration(options.pop("session"))
    if options or seconds is None or not SESSION_SECONDS_MIN <= seconds <= SESSION_SECONDS_MAX:
        raise InvalidSettings(
            f"{url!r}: the one option is session, from {SESSION_SECONDS_MIN:g}s to {SESSION_SECONDS_MAX:g}s: write "
            "?session=4s, or leave it out",
            url=url,
        )
    return ZooKeeperUrl(tuple(dict.fromkeys(addresses)), root, seconds)


# --- what kazoo lacks -------------------------------------------------------------------------------------------------


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


class _Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection thread, with the watch above and a session that lives no longer than the event loop turns."""

    def __init__(self, link: _Link, client: KazooClient) -> None:
        super().__init__(client, client._conn_retry.copy(), logger=_kazoo_log)
        self._link = link

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception as error:
            log.warning("a connection to ZooKeeper failed in a way that was not expected", error=repr(error))
        finally:
            self._link.ended()

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        if not self._link.is_loop_turning():
            raise exceptions.ConnectionDropped("the event loop stands still")
        read_timeout, connect_timeout = super()._connect(host, hostip, port)
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


class _Link:
    """One session: a client of kazoo, and the way from its threads to the event loop.

    Parameters:
        zxid: the last change that was seen before.

    Attributes:
        is_connected: on the event loop; as of what kazoo's threads have told it.
        number: of the connection, within the session.
        watched: prefixes that this connection watches.
        room: for requests under way.
    """

    def __init__(self, owner: ZooKeeperClient, hosts: str, session_seconds: float, zxid: int) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        handler = SequentialThreadingHandler()
        retry = KazooRetry(
            max_tries=-1, delay=_PAUSE_SECONDS_MIN, max_delay=_PAUSE_SECONDS_MAX, sleep_func=handler.sleep_func
        )
        self._kazoo = KazooClient(
            hosts=hosts,
            timeout=session_seconds,
            handler=handler,
            connection_retry=retry,
            command_retry=retry.copy(),
            logger=_kazoo_log,
        )
        self._kazoo._connection = _Connection(self, self._kazoo)
        self._kazoo.last_zxid = zxid
        self._kazoo.add_listener(self._hear_state)
        self._patience = session_seconds / 2
        self._turned_at = time.monotonic()
        self._heard: dict[str, None] = {}
        self._heard_lock = threading.Lock()
        self._zxid = zxid
        self.is_connected = False
        self.number = 0
        self.watched: set[str] = set()
        self.room = asyncio.Semaphore(_UNDER_WAY_MAX)
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


# --- the client -------------------------------------------------------------------------------------------------------


class ZooKeeperClient:
    """Made by `ZooKeeperClient.open`.

    Parameters:
        session_seconds: asked for; a server may grant another time.

    Attributes:
        session_seconds: as granted.
        timeout: seconds after which a read is given up and a write is unknown; None is half a session.
    """

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        *,
        session_seconds: float = SESSION_SECONDS,
        clock: Clock | None = None,
        timeout: float | None = None,
        pull_seconds: float = PULL_SECONDS,
    ) -> None:
        assert addresses
        self._addresses = [*addresses]
        self._asked_seconds = session_seconds
        self._clock = clock or SystemClock()
        self._pull_seconds = pull_seconds
        self._watches = Watches()
        self._tenure = Tenure(session_seconds)
        self._link: _Link | None = None
        self._zxid = 0
        self._changed = asyncio.Event()  # the link is another one, or connected, or not
        self._is_closed = False
        self._pause = _PAUSE_SECONDS_MIN
        self._why = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._looker: asyncio.Task[None] | None = None
        self.session_seconds = session_seconds
        self.timeout = timeout

    @classmethod
    async def open(
        cls,
        addresses: Sequence[ServerAddress],
        *,
        session_seconds: float = SESSION_SECONDS,
        clock: Clock | None = None,
        timeout: float | None = None,
        pull_seconds: float = PULL_SECONDS,
    ) -> ZooKeeperClient:
        """A client with a session.

        Raises:
            RegistryDown: no server gives it one within the timeout.
        """
        client = cls(
            addresses, session_seconds=session_seconds, clock=clock, timeout=timeout, pull_seconds=pull_seconds
        )
        client._begin()
        try:
            await client._ready(asyncio.get_running_loop().time() + client._patience)
        except BaseException:
            await client.close()
            raise
        client._spawn(client._pull())
        return client

    # --- the contract -----------------------------------------------------------------------------------------------

    @property
    def session(self) -> int:
        return self._tenure.session

    @property
    def deadline(self) -> float:
        return self._tenure.deadline

    async def read(self, path: str) -> Entry | None:
        return await self._read(check_path(path), asyncio.get_running_loop().time() + self._patience)

    async def _read(self, path: str, until: float) -> Entry | None:
        try:
            value, stat = await self._ask(lambda kazoo: kazoo.get_async(path), path, until)
        except exceptions.NoNodeError:
            return None
        owner = stat.ephemeralOwner & _NUMBERS
        return Entry(path, value or b"", stat.version, 0 if owner == _CONTAINER else owner)

    async def children(self, path: str) -> list[Entry]:
        check_path(path)
        until = asyncio.get_running_loop().time() + self._patience
        try:
            names = await self._ask(lambda kazoo: kazoo.get_children_async(path), path, until)
        except exceptions.NoNodeError:
            raise unknown_entry(path) from None
        above = "" if path == ROOT else path
        names = sorted(names)
        entries: list[Entry] = []
        for start in range(0, len(names), _UNDER_WAY_MAX):
            until = asyncio.get_running_loop().time() + self._patience
            part = names[start : start + _UNDER_WAY_MAX]
            found = await asyncio.gather(*(self._read(f"{above}/{name}", until) for name in part))
            entries += [entry for entry in found if entry is not None]  # the others have gone since
        return entries

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        check_write(operations)
        operations = tuple(operations)
        link = await self._take_room(asyncio.get_running_loop().time() + self._patience)
        # No turn of the loop between here and the sending: the session is the link's.
        session, sent_at = self.session, self._clock.boottime()
        answer = link.send(lambda kazoo: _transaction(kazoo, operations))
        try:
            async with asyncio.timeout(self._patience):
                results = await answer
        except (TimeoutError, exceptions.ConnectionLoss, exceptions.ConnectionClosedError):
            raise _unanswered() from None
        except exceptions.SessionExpiredError:
            self.session_over(link)
            raise SessionExpired(
                "nothing was written: ZooKeeper has not heard this client for longer than its session lives; its "
                "ephemeral entries are gone, and must be created again",
                session=session,
            ) from None
        except exceptions.KazooException as error:
            raise _failure(error, operations[0].path) or WriteUnknown(
                f"a write to ZooKeeper failed on the way ({error!r}): settle it by another write that is answered, and "
                "then read"
            ) from error
        for index, (operation, result) in enumerate(zip(operations, results, strict=True)):
            if isinstance(result, Exception) and not isinstance(result, exceptions.RolledBackError):
                raise _refusal(index, operation, result)
        self._tenure.answered(operations, session, sent_at)
        return tuple(_version(operation, result) for operation, result in zip(operations, results, strict=True))

    def watch(self, prefix: str) -> Watch:
        watch = self._watches.open(check_path(prefix))
        link = self._link
        if link is not None and link.is_connected:
            self._spawn(self._keep_watching(link, link.number))
        return watch

    async def close(self) -> None:
        """End the session if a server can be told at once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._changed.set()
        link, self._link = self._link, None
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if link is not None:
            over = link.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await over.wait()
        self._tenure.end()

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        return self.session_seconds / 2 if self.timeout is None else self.timeout

    async def _ready(self, until: float) -> _Link:
        """The link, once it is connected.

        Raises:
            RegistryDown: it is not by then.
        """
        try:
            async with asyncio.timeout_at(until):
                while not (self._is_closed or (self._link is not None and self._link.is_connected)):
                    self._look()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self._is_closed:
            raise RegistryDown("this client of the registry is closed: open another one")
        if self._link is None or not self._link.is_connected:
            raise RegistryDown(self._why or _nobody_answers(self._addresses))
        return self._link

    async def _take_room(self, until: float) -> _Link:
        """The link, with room for one more request.

        Raises:
            RegistryDown: there is none by then, and nothing was sent.
        """
        while True:
            link = await self._ready(until)
            try:
                async with asyncio.timeout_at(until):
                    await link.room.acquire()
            except TimeoutError:
                raise RegistryDown(
                    f"ZooKeeper has left {_UNDER_WAY_MAX} requests unanswered: check that its disk and its members "
                    "keep up"
                ) from None
            if link is self._link and link.is_connected:
                return link
            link.room.release()

    async def _ask(self, start: Callable[[KazooClient], Any], path: str, until: float) -> Any:
        """Ask something that changes nothing, again if the connection is lost.

        Raises:
            RegistryDown: nobody answers.
            KazooException: what ZooKeeper answered.
        """
        while True:
            link = await self._take_room(until)
            try:
                async with asyncio.timeout_at(until):
                    return await link.send(start)
            except (exceptions.ConnectionLoss, exceptions.SessionExpiredError):
                await asyncio.sleep(0)
            except TimeoutError:
                raise RegistryDown(self._why or _nobody_answers(self._addresses)) from None
            except exceptions.NoNodeError:
                raise
            except exceptions.KazooException as error:
                raise _failure(error, path) or RegistryDown(f"ZooKeeper cannot read {path}: {error!r}") from error

    # --- what kazoo's threads have told -----------------------------------------------------------------------------

    def connected(self, link: _Link, session: int, session_seconds: float, address: str) -> None:
        """A server has given us a session, or goes on with the one we have."""
        if link is not self._link or self._is_closed:
            return
        if session != self.session:
            self.session_seconds = session_seconds
            self._tenure = Tenure(session_seconds)
            self._tenure.begin(session)
            self._watches.add_all()
            log.info("session with ZooKeeper", address=address, session=f"{session:x}", seconds=session_seconds)
        link.is_connected = True
        link.number += 1
        link.watched = set()
        self._pause = _PAUSE_SECONDS_MIN
        self._why = ""
        self._changed.set()
        self._spawn(self._keep_watching(link, link.number))

    def disconnected(self, link: _Link) -> None:
        if link is self._link and link.is_connected:
            link.is_connected = False
            self._changed.set()
            self._look()
            log.info("connection to ZooKeeper lost", once_for=id(self))

    def session_over(self, link: _Link) -> None:
        """The session is over, or no server could say: begin another one."""
        if link is not self._link or self._is_closed:
            return
        if self.session:
            log.warning("the session with ZooKeeper is over", session=f"{self.session:x}")
        link.is_connected = False
        self._zxid = max(self._zxid, link.zxid)
        self._link = None
        self._tenure.end()
        self._changed.set()
        link.close()
        self._spawn(self._begin_again())

    def changed(self, link: _Link, paths: dict[str, None]) -> None:
        if link is self._link:
            self._watches.add(paths)

    def anything_changed(self, link: _Link) -> None:
        if link is self._link:
            self._watches.add_all()

    # --- sessions and watches ---------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self) -> None:
        hosts = [*map(str, self._addresses)]
        self._link = _Link(self, ",".join(hosts), self._asked_seconds, self._zxid)

    async def _begin_again(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSE_SECONDS_MAX)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        self._begin()

    async def _pull(self) -> None:
        while True:
            await asyncio.sleep(self._pull_seconds)
            self._watches.add_all()

    async def _keep_watching(self, link: _Link, number: int) -> None:
        """Have this connection watch what is to be watched; until it does, say that anything may have changed."""
        while link is self._link and link.is_connected and link.number == number:
            prefixes = self._watches.prefixes
            if len(link.watched.union(prefixes)) > _PREFIXES_MAX:
                prefixes = [ROOT]  # they are not taken back one by one
            try:
                for prefix in prefixes:
                    if ROOT not in link.watched and prefix not in link.watched:
                        until = asyncio.get_running_loop().time() + self._patience
                        async with asyncio.timeout_at(until):
                            await link.room.acquire()
                            await link.add_watch(prefix)
                        link.watched.add(prefix)
            except (exceptions.ConnectionLoss, exceptions.SessionExpiredError):
                return  # the next connection asks
            except (TimeoutError, exceptions.KazooException) as error:
                log.warning("ZooKeeper does not take a watch: 3.6 or newer is needed", once_for=id(self), error=error)
                self._watches.add_all()
                await asyncio.sleep(self._patience)
                continue
            # What changed before it was watched may have gone unnoticed.
            self._watches.add_all()
            return

    # --- why nobody answers -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out why there is no connection, while somebody waits for one."""
        if self._looker is None or self._looker.done():
            self._looker = asyncio.create_task(self._look_around())
            self._tasks.add(self._looker)
            self._looker.add_done_callback(self._tasks.discard)

    async def _look_around(self) -> None:
        await asyncio.sleep(_PAUSE_SECONDS_MIN)  # most outages are shorter
        link = self._link
        if link is not None and link.is_connected:
            return
        zxid = max(self._zxid, 0 if link is None else link.zxid)
        found = await asyncio.gather(*(asyncio.to_thread(_state_of, address, zxid) for address in self._addresses))
        sentences = "; ".join(f"{address} {state}" for address, state in zip(self._addresses, found, strict=True))
        self._why = f"no ZooKeeper server takes this client: {sentences}"


# --- requests and answers ---------------------------------------------------------------------------------------------


def _transaction(kazoo: KazooClient, operations: Sequence[Operation]) -> Any:
    """Send a multi."""
    transaction = kazoo.transaction()
    for operation in operations:
        match operation:
            case Check(path, version):
                transaction.check(path, _any(version))
            case Create(path, value, ephemeral):
                transaction.create(path, value, ephemeral=ephemeral)
            case Put(path, value, version):
                transaction.set_data(path, value, _any(version))
            case Delete(path, version):
                transaction.delete(path, _any(version))
    return transaction.commit_async()


def _any(version: int | None) -> int:
    return -1 if version is None else version


def _version(operation: Operation, result: Any) -> int | None:
    if isinstance(operation, Create):
        return 0
    return int(result.version) if isinstance(operation, Put) else None


def _refusal(index: int, operation: Operation, error: Exception) -> DMQError:
    """Why an operation, and with it the write, was not carried out."""
    path = operation.path
    match error:
        case exceptions.NodeExistsError():
            return conflict(index, path, Reason.EXISTS)
        case exceptions.NoNodeError():
            return conflict(index, parent_of(path) if isinstance(operation, Create) else path, Reason.ABSENT)
        case exceptions.BadVersionError():
            return conflict(index, path, Reason.VERSION)
        case exceptions.NotEmptyError():
            return conflict(index, path, Reason.CHILDREN)
        case exceptions.NoChildrenForEphemeralsError():
            return conflict(index, parent_of(path), Reason.EPHEMERAL)
    return _failure(error, path) or RegistryDown(f"nothing was written: ZooKeeper refuses {path}: {error!r}")


def _failure(error: Exception, path: str) -> DMQError | None:
    """The error that ZooKeeper answered, if it means that nothing was done."""
    match error:
        case exceptions.NoAuthError() | exceptions.AuthFailedError():
            return RegistryDown(
                f"ZooKeeper gives this broker no right to {path}: its ACL is for others; look with 'getAcl {path}' in "
                "zkCli.sh, and give read, write, create and delete to the brokers with setAcl",
                path=path,
            )
        case exceptions.BadArgumentsError():
            return InvalidName(
                f"ZooKeeper takes no path {path!r}: use letters, digits and signs of the basic plane of Unicode",
                path=path,
            )
        case exceptions.QuotaExceededError():
            return RegistryDown(
                f"a quota of ZooKeeper is used up at {path}: look with 'listquota' in zkCli.sh, and raise it", path=path
            )
        case exceptions.SessionMovedError():
            return RegistryDown("the session has moved to another ZooKeeper server: ask again")
        case exceptions.ThrottledOpError():
            return RegistryDown("ZooKeeper has too much to do and put a request off: ask again")
        case exceptions.NotReadOnlyCallError():
            return RegistryDown(
                "this ZooKeeper server serves reads only, since it has lost its quorum: start the others"
            )
    return None


def _unanswered() -> WriteUnknown:
    return WriteUnknown(
        "ZooKeeper did not answer a write, which may have been carried out, or still will be: settle it by another "
        "write that is answered, and then read"
    )


def _nobody_answers(addresses: Sequence[ServerAddress]) -> str:
    return (
        f"no ZooKeeper server answers at {', '.join(map(str, addresses))}: check that they run, that more than half of "
        "the ensemble does, and the addresses"
    )


def _state_of(address: ServerAddress, zxid: int) -> str:
    """What a server says of itself, as the end of a sentence with what to do. Blocks."""
    try:
        with socket.create_connection(address, _LOOK_SECONDS) as connection:
            connection.settimeout(_LOOK_SECONDS)
            connection.sendall(b"srvr")
            said = b""
            while len(said) < 4096 and (part := connection.recv(4096)):
                said += part
    except TimeoutError:
        return "does not answer: check whether it is overloaded or stopped"
    except OSError as error:
        return f"is not reached ({error.strerror or error}): check that it runs, and the address"
    return _told(said.decode("utf-8", "replace"), zxid)


def _told(said: str, zxid: int) -> str:
    lines = dict(line.partition(": ")[::2] for line in said.splitlines())
    if "not currently serving" in said:
        return "has no quorum: start the other servers of its ensemble"
    if lines.get("Mode") == "read-only":
        return "serves reads only, since it has no quorum: start the other servers of its ensemble"
    with contextlib.suppress(ValueError):
        if int(lines.get("Zxid", ""), 16) < zxid:
            return (
                "has older data than this broker has seen: it lags behind, or was restored from an old copy; in that "
                "case restart the brokers"
            )
    if "Mode" in lines:
        return "runs, and gives no session: check its log, and its limits of connections (maxClientCnxns)"
    return "is no ZooKeeper server, or does not allow the command srvr: check the address"
