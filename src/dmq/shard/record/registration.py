"""The registration of a broker: its ephemeral entry, by which members and clients find it.

What always holds: the entry is one of our own session; one of a session that this process had before is replaced, one
of anybody else is waited for, since a process that was killed has one for as long as its session lives. One that
somebody deleted or spoiled by hand is written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from dmq.clock import Clock
from dmq.errors import RegistryConflict, RegistryDown, SessionExpired, UnknownEntry, WriteUnknown, WrongFormat
from dmq.event_log import EventLog
from dmq.registry.contents import NodeContent, decode_content, encode_content
from dmq.registry.registry import Create, Delete, Entry, Operation, Put, Reason
from dmq.shard.record.shard_view import ShardView

__all__ = ["Registration"]

log = EventLog(__name__)

_AGAIN_SECONDS: Final = 0.5
_REWRITE_SECONDS: Final = 30.0
_LOST_SECONDS: Final = 2.0  # after so long our own entry is in what we have read, unless somebody took it away


class Registration:
    """`/dmq/node/<broker>`.

    Parameters:
        content: what it says.
        load: of the broker, asked for at each write.
    """

    def __init__(
        self,
        view: ShardView,
        broker: str,
        content: NodeContent,
        clock: Clock,
        *,
        load: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._view = view
        self._broker = broker
        self._path = view.paths.node(broker)
        self._content = content
        self._clock = clock
        self._load = load
        self._session = 0  # in which it was created
        self._sessions: set[int] = set()  # in which we have tried to
        self._written_at = float("-inf")
        self._waiting_since: float | None = None  # for the entry of another session to go
        self._is_stopped = False

    @property
    def is_there(self) -> bool:
        return self._session != 0 and self._session == self._view.registry.session

    async def keep(self) -> None:
        """Create the entry, again with each new session, and write it now and then; for ever."""
        while True:
            if self._is_due and not self._is_stopped:
                try:
                    await self._write()
                except (RegistryDown, SessionExpired, UnknownEntry, WriteUnknown, WrongFormat) as error:
                    self._waiting_since = None
                    log.debug("broker not registered", broker=self._broker, error=error)
                except RegistryConflict as error:
                    await self._refused(error)
            await asyncio.sleep(_AGAIN_SECONDS)

    @property
    def _is_due(self) -> bool:
        age, view = self._clock.boottime() - self._written_at, self._view
        is_lost = age >= _LOST_SECONDS and not view.is_down and self._broker not in view.nodes
        return not self.is_there or age >= _REWRITE_SECONDS or is_lost

    async def _refused(self, error: RegistryConflict) -> None:
        view, reason = self._view, error.detail["reason"]
        if reason != Reason.ABSENT:
            log.debug("broker not registered", broker=self._broker, error=error)  # the next turn sees whose it is
        elif view.cluster is not None:
            log.error("the folder of brokers was deleted from the registry: creating it again", path=view.paths.nodes)
            try:
                await view.write([Create(view.paths.nodes, b"")])
            except (RegistryConflict, RegistryDown, SessionExpired, WriteUnknown, WrongFormat) as failure:
                log.debug("folder not created", error=failure)

    def _wait_for(self, entry: Entry) -> None:
        """Another session has the entry: say whose it seems to be, and how long that lasts at most."""
        now, seconds = self._clock.boottime(), self._view.registry.session_seconds
        since = self._waiting_since = now if self._waiting_since is None else self._waiting_since
        try:
            other = decode_content(NodeContent, entry.value, entry.path)
            is_last = other.replica == self._content.replica or other.address == self._content.address
            where = other.address
        except WrongFormat:
            is_last, where = False, "an address that cannot be read"
        if is_last and now - since <= 2 * seconds:
            log.info(
                "the session of this broker's last process is still registered",
                once_for=self._broker,
                broker=self._broker,
                waiting=f"up to {seconds:g} s",
            )
        else:
            log.warning(
                "another process is registered under this broker's name: give one of them another name",
                once_for=self._broker,
                broker=self._broker,
                at=where,
            )

    async def _write(self) -> None:
        view = self._view
        session, began_at = view.registry.session, self._clock.boottime()
        if not session:
            self._waiting_since = None  # no session ends while the registry does not answer
            return
        entry = await view.registry.read(self._path)
        value = encode_content(msgspec.structs.replace(self._content, load=self._load()))
        operations: list[Operation] = [Create(self._path, value, ephemeral=True)]
        if entry is None:
            if self.is_there:
                log.warning("somebody deleted this broker's entry: it is written again", broker=self._broker)
        elif entry.session == session:
            operations = [Put(self._path, value, entry.version)]
        elif entry.session in self._sessions or not entry.is_ephemeral:  # no process has one that is not
            operations.insert(0, Delete(self._path, entry.version))
        else:
            self._wait_for(entry)
            return
        self._sessions.add(session)
        await view.write(operations)
        if not self.is_there:
            log.info("broker registered", broker=self._broker, session=f"{session:x}")
        # Written in another session than it seemed, it is not there, and the next turn finds that out.
        self._session, self._written_at, self._waiting_since = session, began_at, None
        self._sessions = {session}

    def deletion(self) -> list[Operation]:
        """What takes the entry away along with something else, if it exists."""
        return [Delete(self._path, None)] if self.is_there else []

    def stop(self) -> None:
        """Write it no more."""
        self._is_stopped = True

    async def end(self) -> None:
        """Take the entry away, if the registry can be told."""
        try:
            entry = await self._view.read(self._path)
            if entry is not None and entry.session in self._sessions:
                await self._view.write([Delete(self._path, entry.version)])
        except (RegistryConflict, RegistryDown, SessionExpired, UnknownEntry, WriteUnknown) as error:
            log.debug("broker still registered", broker=self._broker, error=error)
