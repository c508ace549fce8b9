"""The registration of a broker: its ephemeral entry, by which members and clients find it.

What always holds: the entry is one of our own session; one of a session that this process had before is replaced, one
of anybody else is waited for, since a process that was killed has one for as long as its session lives.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dmq.clock import Clock
from dmq.errors import RegistryConflict, RegistryDown, SessionExpired, UnknownEntry, WriteUnknown
from dmq.event_log import EventLog
from dmq.registry.contents import NodeContent, encode_content
from dmq.registry.registry import Create, Delete, Operation, Put
from dmq.shard.record.shard_view import ShardView

__all__ = ["Registration"]

log = EventLog(__name__)

_AGAIN_SECONDS: Final = 0.5
_REWRITE_SECONDS: Final = 30.0


class Registration:
    """`/dmq/node/<broker>`.

    Parameters:
        content: what it says.
    """

    def __init__(self, view: ShardView, broker: str, content: NodeContent, clock: Clock) -> None:
        self._view = view
        self._broker = broker
        self._path = view.paths.node(broker)
        self._content = content
        self._clock = clock
        self._session = 0  # in which it was created
        self._sessions: set[int] = set()  # in which we have tried to
        self._written_at = float("-inf")
        self._is_stopped = False

    @property
    def is_there(self) -> bool:
        return self._session != 0 and self._session == self._view.registry.session

    async def keep(self) -> None:
        """Create the entry, again with each new session, and write it now and then; for ever."""
        while True:
            is_due = self._clock.boottime() - self._written_at >= _REWRITE_SECONDS
            if (is_due or not self.is_there) and not self._is_stopped:
                try:
                    await self._write()
                except (RegistryDown, SessionExpired, UnknownEntry, WriteUnknown) as error:
                    log.debug("broker not registered", broker=self._broker, error=error)
                except RegistryConflict as error:
                    log.warning(
                        "another broker of this name is registered: waiting for its session to end",
                        once_for=self._broker,
                        broker=self._broker,
                        error=error,
                    )
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _write(self) -> None:
        view, value = self._view, encode_content(self._content)
        session, began_at = view.registry.session, self._clock.boottime()
        if not session:
            return
        entry = await view.registry.read(self._path)
        operations: list[Operation] = [Create(self._path, value, ephemeral=True)]
        if entry is not None and entry.session == session:
            operations = [Put(self._path, value, entry.version)]
        elif entry is not None and entry.session in self._sessions:
            operations.insert(0, Delete(self._path, entry.version))
        self._sessions.add(session)
        await view.write(operations)
        if not self.is_there:
            log.info("broker registered", broker=self._broker, session=session)
        # Written in another session than it seemed, it is not there, and the next turn finds that out.
        self._session, self._written_at = session, began_at
        self._sessions = {session}

    def deletion(self) -> list[Operation]:
        """What takes the entry away along with something else, if it is there."""
        return [Delete(self._path, None)] if self.is_there else []

    def stop(self) -> None:
        """Write it no more."""
        self._is_stopped = True

    async def end(self) -> None:
        """Take the entry away, if the registry can be told."""
        try:
            entry = await self._view.registry.read(self._path)
            if entry is not None and entry.session in self._sessions:
                await self._view.write([Delete(self._path, entry.version)])
        except (RegistryConflict, RegistryDown, SessionExpired, UnknownEntry, WriteUnknown) as error:
            log.debug("broker still registered", broker=self._broker, error=error)
