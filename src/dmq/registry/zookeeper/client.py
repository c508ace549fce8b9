"""A registry in ZooKeeper: the `Registry` of a broker.

The event loop hands requests over to the threads of a link and is told of answers, and never waits for a thread.

What always holds: a write is one multi, sent once, in the order of the calls, in the session of its link. One that was
sent and not answered within half a session is `WriteUnknown`. ZooKeeper settles it: a connection that takes a session
over ends the one before it, or has its requests refused. A server that leaves a request unanswered for so long is left
for another one. After each new connection and each new session, and every hour, watches say that anything may have
changed. Reads go forwards from one session to the next as well: a server that is behind what this client has seen is
not used, nor is one that has lost its quorum.

Entries are nodes, and versions are those of ZooKeeper's data. A subtree is watched by one persistent recursive watch.
With credentials, nodes are created for their creator alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from kazoo import exceptions
from kazoo.client import KazooClient
from kazoo.security import OPEN_ACL_UNSAFE, Permissions

from dmq.clock import Clock, SystemClock
from dmq.errors import RegistryDown, SessionExpired, WriteUnknown
from dmq.event_log import EventLog
from dmq.net.address import ServerAddress
from dmq.registry.registry import (
    ROOT,
    Entry,
    Operation,
    Trouble,
    check_path,
    check_write,
    unknown_entry,
)
from dmq.registry.tenure import Tenure
from dmq.registry.watch import Watch, Watches
from dmq.registry.zookeeper.ensemble import Ensemble
from dmq.registry.zookeeper.link import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, UNDER_WAY_MAX, Link, LinkOptions
from dmq.registry.zookeeper.multi import failure, refusal, send_multi, unanswered, version_of
from dmq.registry.zookeeper.server import ServerState, state_of

__all__ = ["ZooKeeperClient"]

log = EventLog(__name__)

PULL_SECONDS: Final = 3600.0
_CLOSE_SECONDS: Final = 1.0  # that the end of a session may take; then it ends by itself
_PREFIXES_MAX: Final = 256
_NEAR_SECONDS: Final = 0.05  # kazoo tells two thirds of what was granted, rounded
_NUMBERS: Final = (1 << 64) - 1
_CONTAINER: Final = 1 << 63  # what ZooKeeper writes where the session of an ephemeral node stands


class ZooKeeperClient:
    """Made by `ZooKeeperClient.open`.

    Parameters:
        ensemble: with the session that is asked for; a server may grant another one.

    Attributes:
        session_seconds: as granted.
        timeout: seconds after which a read is given up and a write is unknown; None is half a session.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        *,
        clock: Clock | None = None,
        timeout: float | None = None,
        pull_seconds: float = PULL_SECONDS,
    ) -> None:
        assert ensemble.addresses
        self._ensemble = ensemble
        self._addresses = ensemble.addresses
        self._user = None if ensemble.credentials is None else ensemble.credentials.partition(":")[0]
        self._clock = clock or SystemClock()
        self._pull_seconds = pull_seconds
        self._watches = Watches()
        self._tenure = Tenure(ensemble.session_seconds)
        self._link: Link | None = None
        self._zxid = 0
        self._changed = asyncio.Event()  # the link is another one, or connected, or not
        self._is_closed = False
        self._is_granted = False
        self._pause = PAUSE_SECONDS_MIN
        self._why = ""  # nobody answers
        self._refusal = ""  # nobody takes our credentials
        self._tasks: set[asyncio.Task[None]] = set()
        self._looker: asyncio.Task[None] | None = None
        self.session_seconds = ensemble.session_seconds
        self.timeout = timeout

    @classmethod
    async def open(
        cls,
        ensemble: Ensemble,
        *,
        clock: Clock | None = None,
        timeout: float | None = None,
        pull_seconds: float = PULL_SECONDS,
    ) -> ZooKeeperClient:
        """A client with a session.

        Raises:
            RegistryDown: no server gives it one within the timeout.
        """
        client = cls(ensemble, clock=clock, timeout=timeout, pull_seconds=pull_seconds)
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
        for start in range(0, len(names), UNDER_WAY_MAX):
            until = asyncio.get_running_loop().time() + self._patience
            part = names[start : start + UNDER_WAY_MAX]
            found = await asyncio.gather(*(self._read(f"{above}/{name}", until) for name in part))
            entries += [entry for entry in found if entry is not None]  # the others have gone since
        return entries

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        check_write(operations)
        operations = tuple(operations)
        link = await self._take_room(asyncio.get_running_loop().time() + self._patience)
        # No turn of the loop between here and the sending: the session is the link's.
        session, sent_at = self.session, self._clock.boottime()
        answer = link.send(lambda kazoo: send_multi(kazoo, operations))
        try:
            async with asyncio.timeout(self._patience):
                results = await answer
        except TimeoutError:
            self._leave(link)
            raise unanswered(operations) from None
        except (exceptions.ConnectionLoss, exceptions.ConnectionClosedError):
            raise unanswered(operations) from None
        except exceptions.SessionExpiredError:
            self.session_over(link)
            raise SessionExpired(
                "nothing was written: ZooKeeper has had no sign of this client for longer than its session lives; its "
                "ephemeral entries are gone, and must be created again",
                session=session,
            ) from None
        except exceptions.KazooException as error:
            raise failure(error, operations[0].path, self._user) or WriteUnknown(
                f"a write to ZooKeeper failed on the way ({error!r}): settle it by another write that is answered, and "
                "then read"
            ) from error
        for index, (operation, result) in enumerate(zip(operations, results, strict=True)):
            if isinstance(result, Exception) and not isinstance(result, exceptions.RolledBackError):
                raise refusal(index, operation, result, self._user)
        self._tenure.answered(operations, session, sent_at)
        return tuple(version_of(operation, result) for operation, result in zip(operations, results, strict=True))

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
                async with asyncio.timeout(min(self._patience, _CLOSE_SECONDS)):
                    await over.wait()
        self._tenure.end()

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        return self.session_seconds / 2 if self.timeout is None else self.timeout

    async def _ready(self, until: float) -> Link:
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
            raise self._down()
        return self._link

    async def _take_room(self, until: float) -> Link:
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
                    f"ZooKeeper has left {UNDER_WAY_MAX} requests unanswered: check that its disk and its members "
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
                self._leave(link)
                raise self._down() from None
            except exceptions.NoNodeError:
                raise
            except exceptions.KazooException as error:
                raise failure(error, path, self._user) or RegistryDown(
                    f"ZooKeeper cannot read {path}: {error!r}"
                ) from error

    # --- what kazoo's threads have told -----------------------------------------------------------------------------

    def connected(self, link: Link, session: int, session_seconds: float, address: str) -> None:
        """A server has given us a session, or goes on with the one we have."""
        if link is not self._link or self._is_closed:
            return
        if session_seconds != self.session_seconds or not self._is_granted:
            self.session_seconds = session_seconds
            self._is_granted = True
            self._tell_session()
        self._tenure.grant(session_seconds)
        if session != self.session:
            self._tenure.begin(session)
            self._watches.add_all()
            log.info("session with ZooKeeper", address=address, session=f"{session:x}", seconds=session_seconds)
        else:
            log.info("connected to ZooKeeper again", once_for=id(self), address=address, session=f"{session:x}")
        link.is_connected = True
        link.number += 1
        link.watched = set()
        self._pause = PAUSE_SECONDS_MIN
        self._why = self._refusal = ""
        self._changed.set()
        self._spawn(self._keep_watching(link, link.number))

    def disconnected(self, link: Link) -> None:
        if link is self._link and link.is_connected:
            link.is_connected = False
            self._changed.set()
            self._look()
            log.info("connection to ZooKeeper lost", once_for=id(self))

    def refused(self, link: Link) -> None:
        """A server does not take our credentials."""
        if link is self._link and not self._is_closed:
            self._refusal = (
                f"ZooKeeper does not take the credentials of user {self._user!r}: check that its servers know the "
                "scheme digest, and the user and password in the URL"
            )
            log.error("ZooKeeper does not take our credentials", once_for=id(self), user=self._user)

    def session_over(self, link: Link) -> None:
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

    def changed(self, link: Link, paths: dict[str, None]) -> None:
        if link is self._link:
            self._watches.add(paths)

    def anything_changed(self, link: Link) -> None:
        if link is self._link:
            self._watches.add_all()

    # --- sessions and watches ---------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _begin(self) -> None:
        hosts = ",".join(map(str, self._addresses))
        self._link = Link(
            self, LinkOptions(hosts, self._ensemble.session_seconds, self._ensemble.credentials, self._zxid)
        )

    async def _begin_again(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE_SECONDS_MAX)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        self._begin()

    async def _pull(self) -> None:
        while True:
            await asyncio.sleep(self._pull_seconds)
            self._watches.add_all()

    async def _keep_watching(self, link: Link, number: int) -> None:
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
        await asyncio.sleep(PAUSE_SECONDS_MIN)  # most outages are shorter
        link = self._link
        if link is not None and link.is_connected:
            return
        zxid = max(self._zxid, 0 if link is None else link.zxid)
        found = await self._server_states(zxid)
        sentences = "; ".join(f"{address} {state.sentence}" for address, state in found)
        self._why = f"no ZooKeeper server takes this client: {sentences}"

    async def _server_states(self, zxid: int) -> list[tuple[ServerAddress, ServerState]]:
        found = await asyncio.gather(*(asyncio.to_thread(state_of, address, zxid) for address in self._addresses))
        return [*zip(self._addresses, found, strict=True)]

    def _down(self) -> RegistryDown:
        return RegistryDown(self._refusal or self._why or _nobody_answers(self._addresses))

    def _leave(self, link: Link) -> None:
        """A server has left a request unanswered for too long: go to another one, if there is one."""
        if link is self._link and link.is_connected and len(self._addresses) > 1:
            log.warning("a ZooKeeper server does not answer: going to another one", once_for=id(self))
            link.drop()

    # --- for people -------------------------------------------------------------------------------------------------

    def _tell_session(self) -> None:
        found = _other_session(self._ensemble.session_seconds, self.session_seconds)
        if found is not None:
            log.warning(f"{found.what}: {found.advice}")

    async def troubles(self) -> list[Trouble]:
        """What is not as it should be, though the registry answers.

        Raises:
            RegistryDown: nobody answers.
        """
        found = _other_session(self._ensemble.session_seconds, self.session_seconds)
        troubles = [] if found is None else [found]
        states = await self._server_states(0)
        troubles += [
            Trouble(f"{address} {what}", advice or "look at its log")
            for address, state in states
            if not state.is_serving
            for what, _, advice in [state.sentence.partition(": ")]
        ]
        if self._user is not None:
            troubles += await self._open_nodes()
        return troubles

    async def _open_nodes(self) -> list[Trouble]:
        root, until = self._ensemble.root, asyncio.get_running_loop().time() + self._patience
        try:
            acls, _ = await self._ask(lambda kazoo: kazoo.get_acls_async(root), root, until)
        except exceptions.NoNodeError:
            return []
        if any(acl.id == OPEN_ACL_UNSAFE[0].id and acl.perms & ~Permissions.READ for acl in acls):
            return [
                Trouble(
                    f"{root} can be changed by everybody, though brokers come as user {self._user!r}",
                    f"it was created without credentials: 'setAcl -R {root} auth:{self._user}:cdrwa' in zkCli.sh, "
                    "after 'addauth digest', gives it to this user alone",
                )
            ]
        return []


def _other_session(asked: float, granted: float) -> Trouble | None:
    """A session of another length than was asked for."""
    if abs(granted - asked) < _NEAR_SECONDS:
        return None
    if granted > asked:
        return Trouble(
            f"ZooKeeper grants sessions of {granted:g} s where {asked:g} s were asked for, so a failover takes longer",
            f"set tickTime to {asked * 500:g} or less on its servers, or minSessionTimeout to {asked * 1000:g}",
        )
    return Trouble(
        f"ZooKeeper grants sessions of {granted:g} s where {asked:g} s were asked for, so a shorter pause ends one",
        f"set maxSessionTimeout to {asked * 1000:g} or more on its servers, or ask for ?session={granted:g}s",
    )


def _nobody_answers(addresses: Sequence[ServerAddress]) -> str:
    return (
        f"no ZooKeeper server answers at {', '.join(map(str, addresses))}: check that they run, that more than half of "
        "the ensemble does, and the addresses"
    )
