"""Loads: what is moved in one turn of the loop, gathered into as few units as it fits.

Everything that fails in one turn, of all groups, shares a unit: the events that settle messages where they were, and
the copies that go on. The topics they go to are made first where they are missing.

What always holds: a load is written whole, or none of it; each move of it is concluded once, when its unit is visible
or when it could not be written.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.broker.changes import Later
from dmq.broker.consumption import Consumption
from dmq.broker.cursor import Cursor
from dmq.broker.moving import Parcel
from dmq.broker.redelivery import Redelivery
from dmq.errors import Busy, DMQError
from dmq.model import TopicConfig
from dmq.storage.appending import Batch
from dmq.storage.events import Event, Settled
from dmq.storage.visibility import Durability

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["Load", "Loads", "Move"]

log = logging.getLogger(__name__)

_AGAIN_MS: Final = 1000
_UNIT_BYTES: Final = 1 << 20


class Move(NamedTuple):
    """What was set aside of one queue until its unit is visible."""

    consumption: Consumption
    key: int
    cursor: Cursor
    entry: Redelivery
    messages: int
    is_dead: bool


class Load:
    """One unit to be."""

    def __init__(self) -> None:
        self.events: list[Settled] = []
        self.parcels: dict[tuple[str, int], Parcel] = {}
        self.topics: dict[str, TopicConfig] = {}
        self.moves: list[Move] = []
        self.size = 0

    def parcel(self, topic: str, queue: int) -> Parcel:
        found = self.parcels.get((topic, queue))
        if found is None:
            found = self.parcels[topic, queue] = Parcel(topic, queue)
        return found


class Loads:
    """See the module."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
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
            self.fragment = (self.fragment + 1) % self._broker.store.settings.fragment
        return load

    def flush(self) -> None:
        """Hand what was gathered to the writer."""
        for durability in [*self._loads]:
            self._send(durability)

    def _send(self, durability: Durability) -> None:
        load = self._loads.pop(durability)
        missing = {name: config for name, config in load.topics.items() if self._lacks(name, config)}
        if missing:
            self._broker.run(self._create(load, durability, missing), lambda error: self._failed(load, error))
        else:
            self._write(load, durability)

    def _lacks(self, name: str, config: TopicConfig) -> bool:
        found = self._broker.store.find_topic(name)
        return found is None or found.config.queues < config.queues

    async def _create(self, load: Load, durability: Durability, missing: dict[str, TopicConfig]) -> None:
        for name, config in missing.items():
            await self.see_to_topic(name, config)
        self._write(load, durability)

    async def see_to_topic(self, name: str, config: TopicConfig) -> None:
        """See that a topic of ours is there and has as many queues as asked for."""
        broker = self._broker
        while self._lacks(name, config):
            try:
                change = broker.changes.begin(("topic", name))
            except Later as later:
                done = self._loop.create_future()
                broker.changes.wait(later.change, done.set_result, 0)
                await done
                continue
            try:
                is_there = broker.store.find_topic(name) is not None
                event = (
                    broker.store.change(name, config) if is_there else broker.store.creation(name, config, system=True)
                )
                await broker.write([event])
            finally:
                broker.changes.end(change)

    def _write(self, load: Load, durability: Durability) -> None:
        items: list[Batch | Event] = [*load.events, *(parcel.batch() for parcel in load.parcels.values())]
        try:
            self._broker.writer.submit(
                items, durability, lambda _, error: self._written(load, error), size=load.size, atomic=True
            )
        except Busy as error:
            self._written(load, error)

    def _failed(self, load: Load, error: BaseException) -> None:
        self._written(load, error if isinstance(error, DMQError) else DMQError(str(error)))

    def _written(self, load: Load, error: DMQError | None) -> None:
        now_ms = self._broker.now_ms
        if error is not None:
            log.error("messages could not be moved", extra={"count": len(load.moves), "error": str(error)})
        for move in load.moves:
            consumption = move.consumption
            move.cursor.conclude(move.entry, now_ms, None if error is None else now_ms + _AGAIN_MS)
            if error is None:
                if move.is_dead:
                    consumption.dead += move.messages
                else:
                    consumption.retried += move.messages
            consumption.selection.mark(move.key)
            self._broker.pump_soon(consumption)
