"""Loads: what is moved in one turn of the loop, gathered into as few units as it fits.

Everything that fails in one turn, of all groups, shares a unit: the events that settle messages where they were, and
the copies that go on. The topics they go to are made first where they are missing.

What always holds: a load is written whole, or none of it; each move of it is concluded once, when its unit is visible
or when it could not be written.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.cursor import Cursor
from dmq.broker.delivery.lease import Redelivery
from dmq.broker.journal.journal import Journal
from dmq.broker.retry.copy_batch import CopyBatch
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import Busy, DMQError
from dmq.event_log import EventLog
from dmq.model import Durability, TopicConfig
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import Event, Settled

__all__ = ["Load", "Loads", "Move"]

log = EventLog(__name__)

_AGAIN_MS: Final = 1000
_UNIT_BYTES: Final = 1 << 20


class Move(NamedTuple):
    """What was set aside of one queue until its unit is visible."""

    channel: Channel
    key: int
    cursor: Cursor
    entry: Redelivery
    messages: int
    is_dead: bool


class Load:
    """One unit to be."""

    def __init__(self) -> None:
        self.events: list[Settled] = []
        self.copies: dict[tuple[str, int], CopyBatch] = {}
        self.topics: dict[str, TopicConfig] = {}
        self.moves: list[Move] = []
        self.size = 0

    def batch_for(self, topic: str, queue: int) -> CopyBatch:
        """The copies that go to a queue."""
        found = self.copies.get((topic, queue))
        if found is None:
            found = self.copies[topic, queue] = CopyBatch(topic, queue)
        return found


class Loads:
    """The loads of one broker, one for each durability."""

    def __init__(self, journal: Journal, runtime: Runtime, catalog: Catalog) -> None:
        self._store = journal.store
        self._writer = journal.writer
        self._runtime = runtime
        self._catalog = catalog
        self._loads: dict[Durability, Load] = {}
        self.fragment = 0
        """Which fragment of the schedule delayed copies go to; another one for each load."""
        self._loop = asyncio.get_running_loop()

    def load(self, durability: Durability) -> Load:
        """The unit that is being gathered; written at the end of this turn of the loop, or when it is full."""
        load = self._loads.get(durability)
        if load is not None and load.size >= _UNIT_BYTES:
            self._send(durability)
            load = None
        if load is None:
            if not self._loads:
                self._loop.call_soon(self.flush)
            load = self._loads[durability] = Load()
            self.fragment = (self.fragment + 1) % self._store.settings.fragment
        return load

    def flush(self) -> None:
        """Hand what was gathered to the writer."""
        for durability in [*self._loads]:
            self._send(durability)

    def _send(self, durability: Durability) -> None:
        load = self._loads.pop(durability)
        missing = {name: config for name, config in load.topics.items() if self._catalog.lacks(name, config)}
        if missing:
            self._runtime.tasks.run(self._create(load, durability, missing), lambda error: self._failed(load, error))
        else:
            self._write(load, durability)

    async def _create(self, load: Load, durability: Durability, missing: dict[str, TopicConfig]) -> None:
        for name, config in missing.items():
            await self._catalog.see_to_topic(name, config)
        self._write(load, durability)

    def _write(self, load: Load, durability: Durability) -> None:
        items: list[Batch | Event] = [*load.events, *(batch.batch() for batch in load.copies.values())]
        try:
            self._writer.submit(
                items, durability, lambda _, error: self._written(load, error), size=load.size, atomic=True
            )
        except Busy as error:
            self._written(load, error)

    def _failed(self, load: Load, error: BaseException) -> None:
        self._written(load, error if isinstance(error, DMQError) else DMQError(str(error)))

    def _written(self, load: Load, error: DMQError | None) -> None:
        now_ms = self._runtime.clock.now_ms
        if error is not None:
            tell = log.info if error.retriable else log.error
            tell("messages could not be moved", once_for=(), count=len(load.moves), error=error)
        for move in load.moves:
            channel = move.channel
            move.cursor.conclude(move.entry, now_ms, None if error is None else now_ms + _AGAIN_MS)
            if error is None:
                if move.is_dead:
                    channel.count_moved(move.messages, is_dead=True)
                else:
                    channel.count_moved(move.messages, is_dead=False)
            channel.selection.mark(move.key)
            channel.pump_soon()
