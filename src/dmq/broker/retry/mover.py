"""The mover: messages that leave their queue without having been consumed, for a retry or for the dead letters.

The one place that makes such units: the event that settles a message where it was and the copy that goes on are written
together, so a message is never lost and never in two places (see `Load`).

Where a message goes (J-05, R-13):

- A retry goes to the schedule, due in the retry topic of its group and topic (ADR 9); one that is to be tried at once
  goes into the retry topic itself. It never blocks its queue.
- A message that has had its attempts, was rejected, or expired goes to `%DLQ%<group>`, and so does the stand-in of one
  that nobody can read.
- In an ordered group a message stays where it is and its queue waits; so it is for the members of a broadcast group,
  whose cursors are their own, but there nothing waits behind it.

What always holds: a message that is being moved is neither out nor settled until its unit is visible; if the unit
cannot be written, the message is handed out again.

Loads: what is moved in one turn of the loop, gathered into as few units as it fits.

Everything that fails in one turn, of all groups, shares a unit: the events that settle messages where they were, and
the copies that go on. The topics they go to are made first where they are missing.

What always holds: a load is written whole, or none of it; each move of it is concluded once, when its unit is visible
or when it could not be written.

Copy batches: copies of records that are moved, gathered as a batch for the queue they go to.

What always holds: a batch has a hash for the id of every copy and for every key, so that a message is found wherever it
went.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.delivery.channel import Channel, Failure
from dmq.broker.delivery.cursor import Cursor
from dmq.broker.delivery.group import group_of
from dmq.broker.delivery.lease import Lease, Ranges, Redelivery, mask_of_ranges
from dmq.broker.delivery.origin import Doomed, Origin, corrupt_origin, is_exhausted, read_origins
from dmq.broker.journal.journal import Journal
from dmq.broker.retry.policy import RETRY_TABLE, parse_retry_table, wait_ms
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import Busy, DMQError, InvalidSettings, RecordCorrupt
from dmq.event_log import EventLog
from dmq.model import DRAIN_GROUP, SCHEDULE_TOPIC, Durability, TopicConfig, dead_letter_topic_name, retry_topic_name
from dmq.offset_runs import mask_runs, offset_runs
from dmq.records import DeadReason, find_corrupt
from dmq.records.attributes import Attributes
from dmq.records.copy import CopyPlan, copy_record
from dmq.records.hashes import id_hashes
from dmq.records.move import STORED_DAMAGED
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import Event, Outcome, Settled

__all__ = ["Mover"]

log = EventLog(__name__)

_NO_ANSWER: Final = "nothing was heard of the last attempt: its lease ran out, or its consumer died"
_EXPIRED: Final = "it expired before it was consumed"


class _Place(NamedTuple):
    """The lease that messages are moved out of."""

    channel: Channel
    key: int
    cursor: Cursor
    lease: Lease

    @property
    def name(self) -> tuple[str, int] | None:
        """Topic and queue, if it is not a retry topic: its messages know where they came from."""
        return None if self.channel.is_retry(self.key) else (self.channel.topic.name, self.key)

    def expiry(self, origin: Origin) -> int | None:
        """When a message of a topic with a time to live expires; its copy has to say so itself."""
        ttl_ms = self.channel.topic.config.ttl_ms
        return None if ttl_ms is None or self.channel.is_retry(self.key) else origin.stored_at_ms + ttl_ms


class _Verdict(NamedTuple):
    """Why messages become dead letters."""

    reason: DeadReason
    error: str
    outcome: Outcome = Outcome.DEAD


class Mover:
    """Moves what fails in all channels of a broker.

    Parameters:
        table: the broker's retry table, as a person wrote it.

    Raises:
        InvalidSettings: the table cannot be read.
    """

    def __init__(self, journal: Journal, runtime: Runtime, catalog: Catalog, table: str) -> None:
        self._queries = journal.queries
        self._clock = runtime.clock
        self._table = parse_retry_table(table)
        self._tables: dict[str, tuple[int, ...] | None] = {}
        self._loads = Loads(journal, runtime, catalog)

    def flush(self) -> None:
        """Hand what was gathered in this turn to the writer."""
        self._loads.flush()

    # --- what consumers say -----------------------------------------------------------------------------------------

    def nack(self, channel: Channel, key: int, failure: Failure) -> None:
        """Messages of a lease failed.

        Raises:
            LeaseLost: the lease is gone.
        """
        cursor = channel.cursor(key)
        lease = cursor.find(failure.epoch, failure.lease)
        place = _Place(channel, key, cursor, lease)
        now_ms = self._clock.now_ms
        verdict = _Verdict(DeadReason.RETRIES_EXHAUSTED, failure.error)
        if failure.error.startswith(RecordCorrupt.code):
            failure = self._bury_corrupt_of(place, failure, now_ms)
            if not failure.ranges:
                return
        if channel.keeps_in_place:
            if is_exhausted(lease.attempt, channel.max_attempts):
                self._bury_in_place(place, failure.ranges, verdict, now_ms)
            else:
                delay_ms = wait_ms(lease.attempt, failure.delay_ms, self._table_of(channel))
                cursor.nack(failure.epoch, failure.lease, failure.ranges, now_ms, delay_ms=delay_ms)
                channel.selection.mark(key)
            return
        made = lease.attempt
        origins = self._without_corrupt(place, self._origins(place, failure.ranges, now_ms), made, now_ms)
        dead = [origin for origin in origins if is_exhausted(origin.failed.attempts + made, channel.max_attempts)]
        if dead:
            self._bury(place, dead, verdict, made, now_ms=now_ms)
            if len(dead) == len(origins):
                return
            gone = {origin.offset for origin in dead}
            origins = [origin for origin in origins if origin.offset not in gone]
        if origins:
            self._retry(place, origins, failure, now_ms)

    def reject(self, channel: Channel, key: int, failure: Failure) -> None:
        """Messages of a lease that no attempt will help.

        Raises:
            LeaseLost: the lease is gone.
        """
        cursor = channel.cursor(key)
        place = _Place(channel, key, cursor, cursor.find(failure.epoch, failure.lease))
        now_ms = self._clock.now_ms
        if failure.error.startswith(RecordCorrupt.code):
            failure = self._bury_corrupt_of(place, failure, now_ms)
            if not failure.ranges:
                return
        made = place.lease.attempt
        origins = self._without_corrupt(place, self._origins(place, failure.ranges, now_ms), made, now_ms)
        verdict = _Verdict(DeadReason.REJECTED, failure.error or "REJECTED")
        self._bury(place, origins, verdict, made, now_ms=now_ms)

    def bury_doomed(self, channel: Channel, key: int, lease: Lease, doomed: Doomed, now_ms: int) -> None:
        """Messages that were about to be handed out, and must not be."""
        place = _Place(channel, key, channel.cursor(key), lease)
        # This hand-out does not take place, so it is not an attempt.
        made = lease.attempt - 1
        expired = _Verdict(DeadReason.EXPIRED, _EXPIRED, Outcome.EXPIRED)
        self._bury(place, doomed.expired, expired, made, now_ms=now_ms)
        exhausted = _Verdict(DeadReason.RETRIES_EXHAUSTED, _NO_ANSWER)
        self._bury(place, doomed.exhausted, exhausted, made, now_ms=now_ms)
        self._without_corrupt(place, doomed.corrupt, made, now_ms)

    def _without_corrupt(self, place: _Place, origins: Sequence[Origin], made: int, now_ms: int) -> Sequence[Origin]:
        """Bury those that nobody can read; returns the others."""
        bad = [origin for origin in origins if origin.corrupt]
        for why in dict.fromkeys(origin.corrupt for origin in bad):
            alike = [origin for origin in bad if origin.corrupt == why]
            channel, queue = place.channel, place.channel.place(place.key)[1]
            log.error(
                "a damaged record became a dead letter",
                once_for=(channel.topic.name, queue, channel.group.name),
                topic=channel.topic.name,
                queue=queue,
                offset=alike[0].offset,
                group=channel.group.name,
                count=len(alike),
                reason=why,
            )
            self._bury(place, alike, _Verdict(DeadReason.CORRUPT, f"{STORED_DAMAGED}: {why}"), made, now_ms=now_ms)
        return [origin for origin in origins if not origin.corrupt] if bad else origins

    def _bury_corrupt_of(self, place: _Place, failure: Failure, now_ms: int) -> Failure:
        """A consumer says that records came damaged: bury what is so here as well; the failure of the others.

        What is right here was damaged on the way, and is delivered again as any other message that failed.
        """
        origins = [_checked(origin) for origin in self._origins(place, failure.ranges, now_ms)]
        others = self._without_corrupt(place, origins, place.lease.attempt, now_ms)
        return failure._replace(ranges=list(offset_runs([origin.offset for origin in others])))

    def _bury_in_place(self, place: _Place, ranges: Ranges | None, verdict: _Verdict, now_ms: int) -> None:
        """Dead letters of an ordered or broadcast group; what lies behind them in order goes back untried."""
        origins = self._origins(place, ranges, now_ms)
        cursor, lease = place.cursor, place.lease
        self._bury(place, origins, verdict, lease.attempt, now_ms=now_ms)
        if cursor.ordered and lease.mask and origins:
            first = origins[0].offset
            behind = [(start, stop) for start, stop in mask_runs(lease.start, lease.mask) if stop > first]
            if behind:
                cursor.nack(lease.epoch, lease.number, behind, now_ms, was_tried=False)

    # --- copies -----------------------------------------------------------------------------------------------------

    def _origins(self, place: _Place, ranges: Ranges | None, now_ms: int) -> list[Origin]:
        """The records that are to be moved. What cannot be read goes back: its next hand-out passes it over."""
        channel, key, cursor, lease = place
        bits = lease.mask if ranges is None else lease.mask & mask_of_ranges(ranges, lease.start, lease.stop)
        if not bits:
            return []
        topic, queue = channel.place(key)
        out = list(mask_runs(lease.start, bits))
        origins, missing = read_origins(self._queries, topic, queue, out, is_retry=channel.is_retry(key))
        if missing:
            cursor.nack(lease.epoch, lease.number, missing, now_ms, was_tried=False)
            channel.selection.mark(key)
        return origins

    def _table_of(self, channel: Channel) -> tuple[int, ...] | None:
        """The retry table in force: the topic's own, or the broker's."""
        text = channel.topic.config.properties.get(RETRY_TABLE)
        if text is None:
            return self._table
        if text not in self._tables:
            try:
                self._tables[text] = parse_retry_table(text)
            except InvalidSettings as error:
                log.error("a topic's retry table is not used", topic=channel.topic.name, error=error)
                self._tables[text] = self._table
        return self._tables[text]

    def _retry(self, place: _Place, origins: Sequence[Origin], failure: Failure, now_ms: int) -> None:
        load = self._loads.load(Durability.STORED)
        channel, key, _, lease = place
        group, queue = channel.group.name, channel.place(key)[1]
        target = retry_topic_name(group, channel.topic.id)
        load.topics[target] = TopicConfig(queues=channel.topic.config.queues, carry_for=group)
        sent_at_ms = self._clock.wall.now_ms()
        table = self._table_of(channel)
        plans: dict[int, tuple[CopyPlan, CopyBatch]] = {}
        for origin in origins:
            made = origin.failed.attempts + lease.attempt
            delay_ms = wait_ms(made, failure.delay_ms, table)
            due_ms = None if delay_ms == 0 else now_ms + delay_ms
            found = plans.get(delay_ms)
            if found is None:
                plan = CopyPlan(
                    target if due_ms is None else SCHEDULE_TOPIC,
                    sent_at_ms,
                    place.name,
                    error=failure.error,
                    says=Attributes(
                        due_at_ms=due_ms,
                        target_topic=None if due_ms is None else target,
                        target_queue=None if due_ms is None else queue,
                        group=group,
                        reason=failure.error or None,
                    ),
                )
                where = (target, queue) if due_ms is None else (SCHEDULE_TOPIC, self._loads.fragment)
                found = plans[delay_ms] = (plan, load.batch_for(*where))
            plan, batch = found
            load.size += batch.add(origin, plan, made, due_ms, expires_at_ms=place.expiry(origin))
        self._set_aside(
            load, place, origins, _Verdict(DeadReason.REJECTED, failure.error, Outcome.RETRIED), now_ms=now_ms
        )

    def _bury(self, place: _Place, origins: Sequence[Origin], verdict: _Verdict, made: int, *, now_ms: int) -> None:
        if not origins:
            return
        load = self._loads.load(Durability.FLUSHED)
        group = group_of(place.channel.group.name)
        topic = dead_letter_topic_name(group)
        load.topics[topic] = TopicConfig(queues=1, carry_for=DRAIN_GROUP)
        plan = CopyPlan(
            topic,
            self._clock.wall.now_ms(),
            place.name,
            error=verdict.error,
            says=Attributes(group=group, reason=verdict.error or verdict.reason.name, reason_code=verdict.reason),
        )
        batch = load.batch_for(topic, 0)
        for origin in origins:
            attempts = origin.failed.attempts_before + origin.failed.attempts + made
            load.size += batch.add(origin, plan, attempts, None, expires_at_ms=None)
        self._set_aside(load, place, origins, verdict, now_ms=now_ms)

    def _set_aside(self, load: Load, place: _Place, origins: Sequence[Origin], verdict: _Verdict, now_ms: int) -> None:
        channel, key, cursor, lease = place
        ranges = list(offset_runs([origin.offset for origin in origins]))
        outcome = verdict.outcome
        aside = cursor.set_aside(lease.epoch, lease.number, ranges, outcome, now_ms=now_ms, error=verdict.error)
        assert aside is not None, "what was read is out"
        entry, events = aside
        load.events += events
        is_dead = outcome != Outcome.RETRIED
        load.moves.append(Move(channel, key, cursor, entry, messages=len(origins), is_dead=is_dead))


def _checked(origin: Origin) -> Origin:
    """The origin of a record, or of its stand-in if it fails its checksums."""
    raw = origin.failed.raw
    why = origin.corrupt or find_corrupt(raw, np.zeros(1, np.int64), np.array([len(raw)])).get(0)
    if not why or origin.corrupt:
        return origin
    return corrupt_origin(origin.offset, raw, origin.message_id, why, is_retry=bool(origin.failed.attempts))


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


class CopyBatch:
    """Copies for one queue, on their way into a unit."""

    def __init__(self, topic: str, queue: int) -> None:
        self._topic = topic
        self._queue = queue
        self._records: list[bytes] = []
        self._ids: list[bytes] = []
        self._keys: list[tuple[int, bytes]] = []
        self._dues: list[int] = []
        self._is_expiring = False

    def add(self, origin: Origin, plan: CopyPlan, attempt: int, due_ms: int | None, expires_at_ms: int | None) -> int:
        """Add a copy; returns its size."""
        copied = copy_record(origin.failed, plan, origin.message_id, attempt, expires_at_ms=expires_at_ms)
        if copied.key is not None:
            self._keys.append((len(self._records), copied.key))
        self._records.append(copied.record)
        self._ids.append(copied.message_id)
        if due_ms is not None:
            self._dues.append(due_ms)
        if expires_at_ms is not None or origin.failed.expires_at_ms is not None:
            self._is_expiring = True
        return len(copied.record)

    def batch(self) -> Batch:
        """All of them as one batch of moved records."""
        pairs = np.frombuffer(b"".join(self._ids), ">u8").reshape(-1, 2).astype(np.uint64)
        hashes = np.empty(len(pairs) + len(self._keys), np.uint64)
        producers = pairs[:, 0]
        for producer in np.unique(producers).tolist():
            mine = np.flatnonzero(producers == np.uint64(producer))
            hashes[mine] = id_hashes(producer, pairs[mine, 1])
        hashes[len(pairs) :] = [crc32c(key) << 32 | zlib.crc32(key) or 1 for _, key in self._keys]
        index = np.empty(len(hashes), np.uint32)
        index[: len(pairs)] = np.arange(len(pairs), dtype=np.uint32)
        index[len(pairs) :] = [at for at, _ in self._keys]
        order = np.argsort(index, kind="stable")
        return Batch(
            topic=self._topic,
            queue=self._queue,
            data=b"".join(self._records),
            lengths=np.fromiter(map(len, self._records), np.uint32, len(self._records)),
            hash_index=index[order],
            hashes=hashes[order],
            dues=self._dues,
            moved=True,
            expiring=self._is_expiring,
        )
