"""Moves: messages that leave their queue without having been consumed, for a retry or for the dead letters.

The one place that makes such units: what settles a message where it was and the copy that goes on are written
together, so a message is never lost and never in two places (see `loads`).

Where a message goes (J-05, R-13):

- A retry goes to the schedule, due in the retry topic of its group and topic (ADR 9); one that is to be tried at once
  goes into the retry topic itself. It never blocks its queue.
- What has had its attempts, was rejected, or expired goes to `%DLQ%<group>`.
- In an ordered group a message stays where it is and its queue waits; so it is for the members of a broadcast group,
  whose cursors are their own, but there nothing waits behind it.

What always holds: what is being moved is neither out nor settled until its unit is visible; if that cannot be written,
it is handed out again.

Loads: what is moved in one turn of the loop, gathered into as few units as it fits.

Everything that fails in one turn, of all groups, shares a unit: the events that settle messages where they were, and
the copies that go on. The topics they go to are made first where they are missing.

What always holds: a load is written whole, or none of it; each move of it is concluded once, when its unit is visible
or when it could not be written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.broker.catalog.changes import Later
from dmq.broker.delivery.bitmap import Ranges, mask_of_ranges
from dmq.broker.delivery.channel import RETRY, Consumption, Doomed
from dmq.broker.delivery.cursor import Cursor
from dmq.broker.delivery.lease import Lease, Redelivery
from dmq.broker.retry.policy import is_exhausted, parse_retry_table, wait_ms
from dmq.broker.retry.record_copy import Origin, Parcel, read_origins
from dmq.errors import Busy, DMQError, InvalidSettings
from dmq.model import (
    DRAIN_GROUP,
    SCHEDULE_TOPIC,
    Durability,
    TopicConfig,
    dead_letter_topic_name,
    parse_broadcast_name,
    retry_topic_name,
    retry_topic_parts,
)
from dmq.offset_runs import mask_runs, offset_runs
from dmq.records import DeadReason
from dmq.records.copy import CopyPlan
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.queries import Queries
from dmq.storage.state.events import Event, Outcome, Settled
from dmq.storage.state.state import Topic

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["Load", "Loads", "Move", "Moves", "checked_config", "retry_topics"]

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
        found = self._broker.store.queries.find_topic(name)
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
                is_there = broker.store.queries.find_topic(name) is not None
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


RETRY_TABLE: Final = "retry_table"  # the property of a topic
_NO_ANSWER: Final = "nothing was heard of the last attempt: its lease ran out, or its consumer died"
_EXPIRED: Final = "it expired before it was consumed"


class Moves:
    """See the module.

    Raises:
        InvalidSettings: the retry table of the settings is none.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._table = parse_retry_table(broker.settings.retry_table)
        self._tables: dict[str, tuple[int, ...] | None] = {}
        self._loads = Loads(broker)

    # --- what consumers say -----------------------------------------------------------------------------------------

    def nack(
        self,
        consumption: Consumption,
        key: int,
        epoch: int,
        number: int,
        ranges: Ranges | None,
        delay_ms: int,
        error: str,
    ) -> None:
        """Messages of a lease failed.

        Parameters:
            delay_ms: until their next attempt; below 0 the table says.

        Raises:
            LeaseLost: the lease is gone.
        """
        cursor = consumption.cursor(key)
        lease = cursor.find(epoch, number)
        now_ms = self._broker.now_ms
        attempts_max = consumption.max_attempts
        if consumption.keeps_in_place:
            if is_exhausted(lease.attempt, attempts_max):
                self._bury_in_place(consumption, key, cursor, lease, ranges, DeadReason.RETRIES_EXHAUSTED, error)
            else:
                cursor.nack(
                    epoch, number, ranges, now_ms, wait_ms(lease.attempt, delay_ms, self._table_of(consumption))
                )
                consumption.selection.mark(key)
            return
        origins = self._origins(consumption, key, cursor, lease, ranges)
        dead = [origin for origin in origins if is_exhausted(origin.failed.attempts + lease.attempt, attempts_max)]
        if dead:
            self._bury(consumption, key, cursor, lease, dead, DeadReason.RETRIES_EXHAUSTED, error, now_ms)
            if len(dead) == len(origins):
                return
            gone = {origin.offset for origin in dead}
            origins = [origin for origin in origins if origin.offset not in gone]
        if origins:
            self._retry(consumption, key, cursor, lease, origins, delay_ms, error, now_ms)

    def reject(
        self, consumption: Consumption, key: int, epoch: int, number: int, ranges: Ranges | None, error: str
    ) -> None:
        """Messages of a lease that no attempt will help.

        Raises:
            LeaseLost: the lease is gone.
        """
        cursor = consumption.cursor(key)
        lease = cursor.find(epoch, number)
        origins = self._origins(consumption, key, cursor, lease, ranges)
        self._bury(
            consumption, key, cursor, lease, origins, DeadReason.REJECTED, error or "REJECTED", self._broker.now_ms
        )

    def bury_doomed(self, consumption: Consumption, key: int, lease: Lease, doomed: Doomed, now_ms: int) -> None:
        """Messages that were about to be handed out, and must not be."""
        cursor = consumption.cursor(key)
        for reason, outcome, origins in (
            (DeadReason.EXPIRED, Outcome.EXPIRED, doomed.expired),
            (DeadReason.RETRIES_EXHAUSTED, Outcome.DEAD, doomed.exhausted),
        ):
            error = _EXPIRED if reason is DeadReason.EXPIRED else _NO_ANSWER
            # This hand-out does not take place, so it is no attempt.
            self._bury(consumption, key, cursor, lease, origins, reason, error, now_ms, outcome, made=lease.attempt - 1)

    def _bury_in_place(
        self,
        consumption: Consumption,
        key: int,
        cursor: Cursor,
        lease: Lease,
        ranges: Ranges | None,
        reason: DeadReason,
        error: str,
    ) -> None:
        """Dead letters of an ordered or broadcast group; what lies behind them in order goes back untried."""
        now_ms = self._broker.now_ms
        origins = self._origins(consumption, key, cursor, lease, ranges)
        self._bury(consumption, key, cursor, lease, origins, reason, error, now_ms)
        if cursor.ordered and lease.mask and origins:
            first = origins[0].offset
            behind = [(start, stop) for start, stop in mask_runs(lease.start, lease.mask) if stop > first]
            if behind:
                cursor.nack(lease.epoch, lease.number, behind, now_ms, was_tried=False)

    # --- copies -----------------------------------------------------------------------------------------------------

    def _origins(
        self, consumption: Consumption, key: int, cursor: Cursor, lease: Lease, ranges: Ranges | None
    ) -> list[Origin]:
        """The records that are to be moved. What cannot be read goes back: its next hand-out passes it over."""
        bits = lease.mask if ranges is None else lease.mask & mask_of_ranges(ranges, lease.start, lease.stop)
        if not bits:
            return []
        topic, queue = consumption.place(key)
        origins, missing = read_origins(
            self._broker.store.queries,
            topic,
            queue,
            list(mask_runs(lease.start, bits)),
            is_retry=consumption.is_retry(key),
        )
        if missing:
            cursor.nack(lease.epoch, lease.number, missing, self._broker.now_ms, was_tried=False)
            consumption.selection.mark(key)
        return origins

    def _table_of(self, consumption: Consumption) -> tuple[int, ...] | None:
        """The retry table in force: the topic's own, or the broker's."""
        text = consumption.topic.config.properties.get(RETRY_TABLE)
        if text is None:
            return self._table
        if text not in self._tables:
            try:
                self._tables[text] = parse_retry_table(text)
            except InvalidSettings as error:
                log.error("a topic's retry table is not used: %s", error, extra={"topic": consumption.topic.name})
                self._tables[text] = self._table
        return self._tables[text]

    def _retry(
        self,
        consumption: Consumption,
        key: int,
        cursor: Cursor,
        lease: Lease,
        origins: Sequence[Origin],
        asked_ms: int,
        error: str,
        now_ms: int,
    ) -> None:
        load = self._loads.load(Durability.STORED)
        group, queue = consumption.group.name, consumption.place(key)[1]
        target = retry_topic_name(group, consumption.topic.id)
        config = TopicConfig(queues=consumption.topic.config.queues, carry_for=group)
        load.topics[target] = config
        sent_at_ms = self._broker.clock.now_ms()
        table = self._table_of(consumption)
        plans: dict[int, tuple[CopyPlan, Parcel]] = {}
        for origin in origins:
            made = origin.failed.attempts + lease.attempt
            delay_ms = wait_ms(made, asked_ms, table)
            found = plans.get(delay_ms)
            if found is None:
                is_now = delay_ms == 0
                plan = CopyPlan(
                    target if is_now else SCHEDULE_TOPIC,
                    sent_at_ms,
                    _place(consumption, key),
                    due_at_ms=None if is_now else now_ms + delay_ms,
                    target_topic=None if is_now else target,
                    target_queue=None if is_now else queue,
                    group=group,
                    reason=error or None,
                    error=error,
                )
                parcel = load.parcel(target, queue) if is_now else load.parcel(SCHEDULE_TOPIC, self._loads.fragment)
                found = plans[delay_ms] = (plan, parcel)
            plan, parcel = found
            due_ms = None if delay_ms == 0 else now_ms + delay_ms
            load.size += parcel.add(origin, plan, made, due_ms, _expiry(consumption, key, origin))
        self._set_aside(load, consumption, key, cursor, lease, origins, Outcome.RETRIED, error, now_ms)

    def _bury(
        self,
        consumption: Consumption,
        key: int,
        cursor: Cursor,
        lease: Lease,
        origins: Sequence[Origin],
        reason: DeadReason,
        error: str,
        now_ms: int,
        outcome: Outcome = Outcome.DEAD,
        made: int | None = None,
    ) -> None:
        if not origins:
            return
        load = self._loads.load(Durability.FLUSHED)
        group = consumption.group.name
        alone = parse_broadcast_name(group)
        name = group if alone is None else alone[0]
        topic = dead_letter_topic_name(name)
        load.topics[topic] = TopicConfig(queues=1, carry_for=DRAIN_GROUP)
        plan = CopyPlan(
            topic,
            self._broker.clock.now_ms(),
            _place(consumption, key),
            group=name,
            reason=error or reason.name,
            reason_code=reason,
            error=error,
        )
        parcel = load.parcel(topic, 0)
        for origin in origins:
            attempts = (
                origin.failed.attempts_before + origin.failed.attempts + (lease.attempt if made is None else made)
            )
            load.size += parcel.add(origin, plan, attempts, None, None)
        self._set_aside(load, consumption, key, cursor, lease, origins, outcome, error, now_ms)

    def _set_aside(
        self,
        load: Load,
        consumption: Consumption,
        key: int,
        cursor: Cursor,
        lease: Lease,
        origins: Sequence[Origin],
        outcome: Outcome,
        error: str,
        now_ms: int,
    ) -> None:
        ranges = list(offset_runs([origin.offset for origin in origins]))
        aside = cursor.set_aside(lease.epoch, lease.number, ranges, outcome, now_ms, error)
        assert aside is not None, "what was read is out"
        entry, events = aside
        load.events += events
        load.moves.append(Move(consumption, key, cursor, entry, len(origins), outcome != Outcome.RETRIED))

    # --- units ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand what was gathered to the writer."""
        self._loads.flush()

    async def see_to_topic(self, name: str, config: TopicConfig) -> None:
        """See that a topic of ours is there and has as many queues as asked for."""
        await self._loads.see_to_topic(name, config)

    def arrived(self, name: str, queue: int) -> None:
        """Messages came into a retry topic: offer them to their group, if anybody is there."""
        parts = retry_topic_parts(name)
        topic = None if parts is None else self._broker.store.queries.topic_by_id(parts[1])
        consumption = None if parts is None or topic is None else self._broker.consumptions.get((topic.name, parts[0]))
        if consumption is None or topic is None or consumption.topic.id != topic.id:
            return
        before = consumption.retry_topic
        if before is None or queue >= before.config.queues:
            consumption.set_retry_topic(self._broker.store.queries.topic(name))
        consumption.selection.mark(queue + RETRY)
        self._broker.pump_soon(consumption)


def checked_config(config: TopicConfig) -> TopicConfig:
    """Settings of a topic, if its retry table is one.

    Raises:
        InvalidSettings: it is none.
    """
    table = config.properties.get(RETRY_TABLE)
    if table is not None:
        parse_retry_table(table)
    return config


def retry_topics(queries: Queries, *, group: str | None = None, topic_id: int | None = None) -> list[Topic]:
    """The retry topics of a group, of a topic, or of both."""
    found = []
    for topic in queries.topics():
        parts = retry_topic_parts(topic.name)
        if parts is not None and group in (None, parts[0]) and topic_id in (None, parts[1]):
            found.append(topic)
    return found


def _place(consumption: Consumption, key: int) -> tuple[str, int] | None:
    return None if consumption.is_retry(key) else (consumption.topic.name, key)


def _expiry(consumption: Consumption, key: int, origin: Origin) -> int | None:
    """When a message of a topic with a time to live expires; its copy has to say so itself."""
    ttl_ms = consumption.topic.config.ttl_ms
    return None if ttl_ms is None or consumption.is_retry(key) else origin.stored_at_ms + ttl_ms
