"""A client of name servers: the `Registry` of a broker, over one connection at a time.

A task keeps the connection: it goes from one address to the next until a name server answers, goes on with the session
or begins another, watches what is watched, and beats. Everything is on the broker's event loop, the beats too: a loop
that stands still lets the session end. A name server that is gone, stands still or does not reach its database is left
for the next within half a session, so that the session goes on there. The only one is left after a whole session: on a
machine that is too busy another connection to it would take longer still.

What always holds: a write is sent once; one that was sent and not answered within half a session is `WriteUnknown`. A
read is asked again of the next name server until half a session is over. After each new connection and each new
session, and every `pull_seconds`, watches say that anything may have changed. A name server of another registry than
the first one is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any, Final

from dmq.clock import Clock, SystemClock
from dmq.errors import (
    Busy,
    DatabaseDown,
    DMQError,
    InvalidRequest,
    InvalidSettings,
    NotConnected,
    RegistryConflict,
    RegistryDown,
    SessionExpired,
    UnknownEntry,
    WriteUnknown,
)
from dmq.event_log import EventLog
from dmq.net.address import ServerAddress, parse_address
from dmq.net.link import Link, LinkLost
from dmq.protocol.cluster import registry as headers
from dmq.protocol.commands import Command, decode_request
from dmq.protocol.frame import Frame
from dmq.protocol.header import Header
from dmq.registry.name_server.wire import entry_of, operation_headers
from dmq.registry.registry import ROOT, SESSION_SECONDS, Entry, Operation, Trouble, check_path, check_write
from dmq.registry.tenure import Tenure
from dmq.registry.watch import Watch, Watches

__all__ = ["DEFAULT_PORT", "NameServerClient", "ServerAddress", "parse_name_servers"]

log = EventLog(__name__)

DEFAULT_PORT: Final = 9610
PULL_SECONDS: Final = 3600.0
_BEATS_A_SESSION: Final = 4
_TURNS: Final = 3  # of the loop, until what has arrived is taken, and who waits for it is told
_CLOSE_SECONDS: Final = 1.0  # that the end of a session may take; then it ends by itself
_PAUSE_SECONDS_MIN: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 1.0
_SETTLED: Final = (RegistryConflict, SessionExpired, UnknownEntry, InvalidRequest)


def parse_name_servers(url: str) -> list[ServerAddress]:
    """The name servers of `dmq://ns1:9610,ns2`.

    Raises:
        InvalidSettings: it is no such URL.
    """
    scheme, found, rest = url.strip().partition("://")
    expected = "write dmq://host:port, or dmq://host1:port1,host2 for several name servers"
    if not found or scheme.lower() != "dmq" or "/" in rest.rstrip("/") or "@" in rest:
        raise InvalidSettings(f"{url!r} names no name servers: {expected}", url=url)
    try:
        addresses = [parse_address(part, DEFAULT_PORT) for part in rest.rstrip("/").split(",")]
    except InvalidSettings as error:
        raise InvalidSettings(f"{url!r}: {error.detail['address']!r} is not an address: {expected}", url=url) from error
    return list(dict.fromkeys(addresses))


class NameServerClient:
    """Made by `NameServerClient.open`.

    Parameters:
        owner: who this is, for people who look into the database.

    Attributes:
        timeout: seconds after which a read is given up and a write is unknown; None is half a session.
        address: of the name server that is used; None while there is none.
        registry_id: of the registry that the name servers have; empty if they do not say.
    """

    def __init__(
        self,
        addresses: Sequence[ServerAddress],
        owner: str,
        *,
        clock: Clock | None = None,
        timeout: float | None = None,
        pull_seconds: float = PULL_SECONDS,
    ) -> None:
        assert addresses
        # In an order of our own: the clients of a name server that is gone do not all go to the same one.
        self._addresses = random.sample([*addresses], len(addresses))
        self._owner = owner
        self._clock = clock or SystemClock()
        self._pull_seconds = pull_seconds
        self._watches = Watches()
        self._tenure = Tenure(SESSION_SECONDS)
        self.registry_id = ""
        self.address: ServerAddress | None = None
        self._number = 0
        self._link: Link | None = None  # ready: with a session, and with what is watched
        self._changed = asyncio.Event()  # `_link` or the reason is another one
        self._is_closed = False
        self._why: DMQError = RegistryDown("no name server was asked yet")
        self._keeper: asyncio.Task[None] | None = None
        self.session_seconds = SESSION_SECONDS
        self.timeout = timeout

    @classmethod
    async def open(
        cls,
        addresses: Sequence[ServerAddress],
        owner: str,
        *,
        clock: Clock | None = None,
        timeout: float | None = None,
        pull_seconds: float = PULL_SECONDS,
    ) -> NameServerClient:
        """A client with a session.

        Raises:
            RegistryDown: no name server answers within the timeout.
        """
        client = cls(addresses, owner, clock=clock, timeout=timeout, pull_seconds=pull_seconds)
        client._keeper = asyncio.create_task(client._keep())
        try:
            await client._ready(asyncio.get_running_loop().time() + client._patience)
        except BaseException:
            await client.close()
            raise
        return client

    # --- the contract -----------------------------------------------------------------------------------------------

    @property
    def session(self) -> int:
        return self._tenure.session

    @property
    def deadline(self) -> float:
        return self._tenure.deadline

    async def read(self, path: str) -> Entry | None:
        reply: headers.RegistryReadReply = await self._ask(
            Command.REGISTRY_READ, headers.RegistryRead(check_path(path))
        )
        return None if reply.found is None else entry_of(reply.found)

    async def children(self, path: str) -> list[Entry]:
        check_path(path)
        entries: list[Entry] = []
        while True:
            after = entries[-1].path if entries else ""
            reply: headers.RegistryChildrenReply = await self._ask(
                Command.REGISTRY_CHILDREN, headers.RegistryChildren(path, after)
            )
            entries += map(entry_of, reply.entries)
            if not reply.more:
                return entries

    async def write(self, operations: Sequence[Operation]) -> tuple[int | None, ...]:
        check_write(operations)
        operations = tuple(operations)
        link = await self._ready(asyncio.get_running_loop().time() + self._patience)
        # No turn of the loop between here and the sending: numbers rise in the order of what is sent.
        self._number += 1
        session, sent_at = self.session, self._clock.boottime()
        asked = headers.RegistryWrite(session, self._number, operation_headers(operations))
        try:
            reply: headers.RegistryWriteReply = await _answer_of(link, Command.REGISTRY_WRITE, asked, self._patience)
        except (LinkLost, TimeoutError):
            raise _unanswered() from None
        except SessionExpired:
            self._session_ended(link, session)
            raise
        except (DatabaseDown, Busy) as error:
            self._leave(link, error)
            raise RegistryDown(f"nothing was written: {error.message}") from error
        except _SETTLED:
            raise
        except DMQError as error:
            raise WriteUnknown(f"a write to the registry failed on the way: {error.message}") from error
        self._tenure.answered(operations, session, sent_at)
        return tuple(reply.versions)

    def watch(self, prefix: str) -> Watch:
        watch = self._watches.open(check_path(prefix))
        link = self._link
        if link is not None and self._keeper is not None:
            self._keep_watching(link)
        return watch

    async def close(self) -> None:
        """End the session if a name server can be told at once, and the connection."""
        if self._is_closed:
            return
        self._is_closed = True
        link, session = self._link, self.session
        if link is not None and session:
            with contextlib.suppress(LinkLost, DMQError, TimeoutError):
                async with asyncio.timeout(min(self._patience, _CLOSE_SECONDS)):
                    await link.request(Command.REGISTRY_CLOSE, headers.RegistryClose(session))
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if link is not None:
            link.close(NotConnected("this client is closed"))
        self._tenure.end()
        self._set_link(None, RegistryDown("this client of the registry is closed: open another one"))

    async def troubles(self) -> list[Trouble]:
        """What is not as it should be: name servers that do not answer, or have another registry."""
        found = []
        for address in self._addresses if len(self._addresses) > 1 else ():
            try:
                link = await self._connect(address)
            except (OSError, TimeoutError, LinkLost, DMQError) as error:
                what = f"the name server at {address} is not used ({str(error) or type(error).__name__})"
                found.append(Trouble(what, "brokers use the others; start it, or take it out of the registry's URL"))
            else:
                link.close(NotConnected("it answers"))
        return found

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def _patience(self) -> float:
        return self.session_seconds / 2 if self.timeout is None else self.timeout

    async def _ready(self, until: float) -> Link:
        """The connection, once there is one.

        Raises:
            RegistryDown: there is none by then.
        """
        try:
            async with asyncio.timeout_at(until):
                while not (self._is_reached or self._is_closed):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self._link is None or not self._is_reached or self._is_closed:
            raise RegistryDown(self._why.message)
        return self._link

    @property
    def _is_reached(self) -> bool:
        return self._link is not None and not self._link.closed.done()

    async def _ask(self, command: int, header: Header) -> Any:
        """Ask something that changes nothing, of the next name server if one does not answer.

        Raises:
            RegistryDown: none does.
            DMQError: what a name server answered.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            link = await self._ready(until)
            try:
                return await _answer_of(link, command, header, until - loop.time())
            except LinkLost:
                await asyncio.sleep(0)
            except TimeoutError:
                raise RegistryDown("the name server does not answer: check that its database does") from None
            except (DatabaseDown, Busy) as error:
                if not self._leave(link, error):
                    raise RegistryDown(error.message) from error

    def _leave(self, link: Link, why: DMQError) -> bool:
        """A name server cannot serve: go to the next one, if there is another."""
        if len(self._addresses) == 1:
            return False
        link.close(NotConnected(why.message))
        return True

    # --- the connection ---------------------------------------------------------------------------------------------

    def _set_link(self, link: Link | None, why: DMQError | None = None) -> None:
        self._link = link
        if why is not None:
            self._why = why
        self._changed.set()

    async def _keep(self) -> None:
        """Keep a connection to one of the name servers."""
        pause = _PAUSE_SECONDS_MIN
        turn = 0
        while True:
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            try:
                link = await self._connect(address)
            except (OSError, TimeoutError, LinkLost, DMQError) as error:
                silence = f"no answer within {self._link_seconds:g} s"
                reason = str(error) or (silence if isinstance(error, TimeoutError) else type(error).__name__)
                self._set_link(None, self._nobody_answers(address, reason))
                log.warning("no name server answers", once_for=str(address), address=str(address), reason=reason)
            else:
                pause = _PAUSE_SECONDS_MIN
                self.address = address
                self._set_link(link)
                reason = await self._beat(link)
                self.address = None
                log.info("connection to a name server lost", address=str(address), reason=reason)
                self._set_link(None, RegistryDown(f"the connection to the name server at {address} is lost: {reason}"))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)

    def _nobody_answers(self, address: ServerAddress, reason: str) -> RegistryDown:
        """The error while no name server answers, the last one for this reason."""
        if len(self._addresses) == 1:
            return RegistryDown(f"no name server answers at {address} ({reason}): check that it runs, and its address")
        known = ", ".join(map(str, self._addresses))
        return RegistryDown(
            f"no name server answers at {known} ({address}: {reason}): check that they run, and their addresses"
        )

    @property
    def _beat_seconds(self) -> float:
        """How often the session is renewed, and how long that may take before another name server is asked."""
        return min(self._patience, self.session_seconds / _BEATS_A_SESSION)

    @property
    def _link_seconds(self) -> float:
        """How long a name server may take to begin a connection, or to answer a beat, before it is left."""
        if len(self._addresses) > 1:
            return self._beat_seconds
        return self.session_seconds if self.timeout is None else self.timeout

    async def _connect(self, address: ServerAddress) -> Link:
        async with asyncio.timeout(self._link_seconds):
            link = await Link.open(address, self._owner, clock=self._clock, peer="name server", on_push=self._hear)
            try:
                await self._begin_session(link)
                await self._ask_to_watch(link)
            except BaseException:
                link.close(NotConnected("no session could be begun"))
                raise
        return link

    async def _begin_session(self, link: Link) -> None:
        """Go on with our session on this connection, or begin another one."""
        asked = headers.RegistrySession(self._owner, self.session)
        reply: headers.RegistrySessionReply = await link.request(Command.REGISTRY_SESSION, asked)
        if self.registry_id and reply.registry and reply.registry != self.registry_id:
            raise RegistryDown(
                f"it serves the registry {reply.registry}, and this process has begun with {self.registry_id}: correct "
                "its --database, or take it out of the URL; if the database was lost, start the brokers again, then "
                "dmq cluster import --from-members"
            )
        self.registry_id = self.registry_id or reply.registry
        self.session_seconds = reply.session_ms / 1000
        self._tenure.adopt(self.session_seconds)
        if reply.session != self.session:
            self._tenure = Tenure(self.session_seconds)
            self._tenure.begin(reply.session)
            self._watches.add_all()

    def _session_ended(self, link: Link, session: int) -> None:
        """A name server said that our session is over."""
        if session == self.session and session:
            self._tenure.end()
            link.close(NotConnected("the session is over"))  # and another one begins with the next connection

    async def _beat(self, link: Link) -> str:
        """Let the session live on as long as the connection does; returns why it ended."""
        pulled_at = self._clock.monotonic()
        while not link.closed.done():
            # Not `wait_for`, which would cancel what others wait for.
            await asyncio.wait([link.closed], timeout=self.session_seconds / _BEATS_A_SESSION)
            session = self.session
            if link.closed.done() or not session:
                break
            if self._clock.monotonic() - pulled_at > self._pull_seconds:
                pulled_at = self._clock.monotonic()
                self._watches.add_all()
            try:
                await _answer_of(link, Command.REGISTRY_BEAT, headers.RegistryBeat(session), self._link_seconds)
            except SessionExpired:
                self._session_ended(link, session)
            except (DatabaseDown, Busy) as error:
                self._leave(link, error)  # if there is no other, it is there, and that is what a beat is to tell
            except (TimeoutError, LinkLost, DMQError) as error:
                link.close(NotConnected(str(error) or "a beat was not answered"))
        return link.closed.result().message if link.closed.done() else "closed"

    # --- watches ----------------------------------------------------------------------------------------------------

    def _hear(self, frame: Frame) -> None:
        if frame.command != Command.REGISTRY_CHANGED:
            return
        changed: headers.RegistryChanged = decode_request(frame)
        if changed.is_all:
            self._watches.add_all()
        else:
            self._watches.add(changed.paths)

    def _keep_watching(self, link: Link) -> None:
        """Ask for what is watched now; a connection on which that fails ends, and the next one asks again."""
        task = asyncio.create_task(self._ask_to_watch(link))

        def ended(done: asyncio.Task[None]) -> None:
            if not done.cancelled() and done.exception() is not None:
                link.close(NotConnected("what is watched could not be asked for"))

        task.add_done_callback(ended)

    async def _ask_to_watch(self, link: Link) -> None:
        prefixes = self._watches.prefixes
        if len(prefixes) > headers.PATHS_MAX:
            prefixes = [ROOT]
        await link.request(Command.REGISTRY_WATCH, headers.RegistryWatch(prefixes))
        # What changed before the name server knew may have gone unnoticed.
        self._watches.add_all()


async def _answer_of(link: Link, command: int, header: Header, seconds: float) -> Any:
    """What a name server answers. What has come while this process was not let run counts as in time.

    Raises:
        TimeoutError: nothing, by then.
        LinkLost, DMQError: as `Link.request`.
    """
    asked = asyncio.ensure_future(link.request(command, header))
    try:
        await asyncio.wait((asked,), timeout=max(0.0, seconds))
        for _ in range(_TURNS):
            if not asked.done():
                await asyncio.sleep(0)  # timers come before what has arrived
        if not asked.done():
            raise TimeoutError
        return asked.result()
    finally:
        asked.cancel()


def _unanswered() -> WriteUnknown:
    return WriteUnknown(
        "no name server answered a write, which may have been carried out, or still will be: settle it by another "
        "write that is answered, and then read"
    )
