"""PRODUCE: validate a batch, hand it to the writer, answer when its durability is reached.

PRODUCE of messages that come back from the archive: under their own ids, marked, and once.

What always holds: only a named producer may send them, to a queue it names, so that a batch that comes again is known;
none of them becomes a dead letter for being refused: whoever replays tries again.

PRODUCER_STATES: how far producers have come, so that one that begins again can skip what is stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.delivery.waiters import ConsumedWatch
from dmq.broker.journal.writer import Submission
from dmq.broker.wire.delays import produce_delayed
from dmq.broker.wire.rate_limits import check_can_produce, over_limit
from dmq.broker.wire.session import Session
from dmq.broker.wire.transactions import produce_half
from dmq.errors import Busy, ConsumeTimeout, DMQError, InvalidRequest, NotInCluster, StorageError
from dmq.model import RESULT_PREFIX, SCHEDULE_TOPIC, SYSTEM_PREFIX, Durability, MessageId, check_name
from dmq.protocol.batch import Batch as PackedBatch
from dmq.protocol.batch import unpack_batch
from dmq.protocol.commands import produce_answer
from dmq.protocol.frame import Frame, Kind
from dmq.protocol.produce import (
    Produce,
    ProduceFlag,
    ProduceReply,
    ProducerState,
    ProducerStates,
    ProducerStatesReply,
    QueueSequence,
)
from dmq.records import DeadReason, RecordView
from dmq.records.attributes import ANY_QUEUE
from dmq.records.columns import BatchRules, batch_rules, check_batch
from dmq.records.layout import COMPRESSED, MOVED, ORDERED, REPLAYED
from dmq.records.replay import ids_of_replayed, merged_hashes
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.state.state import Topic

__all__ = ["produce", "produce_replayed", "producer_states"]


_FLAGS: Final = COMPRESSED | ORDERED | MOVED | REPLAYED
_BATCH_BYTES: Final = 1024  # what a batch costs beside its records while it waits


@lru_cache(256)
def _rules(topic: str, body_bytes_max: int) -> BatchRules:
    return batch_rules(topic, body_bytes_max=body_bytes_max, flags_allowed=_FLAGS)


def produce_replayed(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    """Store a batch of replayed messages, and answer when it is as safe as asked.

    Raises:
        InvalidRequest, InvalidMessage, UnknownTopic, NotAllowed, RateLimited: it is not taken.
    """
    _check(asked)
    topic = broker.topic(asked.topic)
    check_can_produce(topic)
    packed = unpack_batch(frame.body, asked.count, asked.keys)
    check_batch(packed.data, packed.lengths, _rules(asked.topic, broker.store.settings.body_bytes_max))
    hash_index, hashes = merged_hashes(ids_of_replayed(packed.data, packed.lengths), packed.hash_index, packed.hashes)
    batch = Batch(
        topic=asked.topic,
        queue=asked.queue,
        data=packed.data,
        lengths=packed.lengths,
        hash_index=hash_index,
        hashes=hashes,
        producer_id=asked.producer_id,
        producer_epoch=asked.producer_epoch,
        first_sequence=asked.first_sequence,
        named=True,
        moved=True,
        address=session.address16,
        port=session.port,
        received_at_ms=broker.clock.now_ms(),
    )
    if broker.limits.rules and (over := over_limit(broker, asked.topic, batch)) is not None:
        raise over[0]

    def done(placements: list[Placement], error: DMQError | None) -> None:
        if error is not None:
            broker.counters["errors"] += 1
            session.refuse(frame, error)
            return
        placement = placements[0]
        if placement.duplicate:
            broker.counters["duplicates"] += 1
        else:
            broker.counters["messages_in"] += placement.count
            broker.counters["bytes_in"] += len(packed.data)
        session.answer(
            frame,
            ProduceReply(
                placement.queue,
                placement.first_offset,
                placement.unit_start,
                asked.durability,
                placement.duplicate,
            ),
        )

    durability = Durability.STORED if asked.durability <= Durability.STORED else Durability.FLUSHED
    broker.writer.submit([batch], durability, done, size=len(packed.data) + _BATCH_BYTES)


def _check(asked: Produce) -> None:
    if asked.topic.startswith(SYSTEM_PREFIX):
        raise InvalidRequest("names that begin with % are DMQ's own: choose another topic")
    if asked.flags & (ProduceFlag.DUES | ProduceFlag.HALF | ProduceFlag.EXPIRING):
        raise InvalidRequest("replayed messages are neither delayed nor prepared, and do not expire")
    if not asked.flags & ProduceFlag.NAMED or not asked.producer_id or asked.queue == ANY_QUEUE:
        raise InvalidRequest(
            "replayed messages are sent by a named producer to a queue it names: else they cannot be told from others "
            "when they come again"
        )
    if asked.durability in (Durability.NONE, Durability.CONSUMED):
        raise InvalidRequest("a replay is answered when it is stored: ask for durability 'flushed'")


# What a client may say of its own records; the other flags are the broker's.
_PRODUCE_FLAGS: Final = COMPRESSED | ORDERED
# As plain numbers: an operation on an enum costs more than all the rest of the checks.
_ASIDE: Final = int(ProduceFlag.DUES | ProduceFlag.HALF | ProduceFlag.REPLAYED)
_HALF: Final = int(ProduceFlag.HALF)
_REPLAYED: Final = int(ProduceFlag.REPLAYED)
_NAMED: Final = int(ProduceFlag.NAMED)
_EXPIRING: Final = int(ProduceFlag.EXPIRING)
_STORED_ASKED: Final = int(Durability.STORED)
_CONSUMED: Final = int(Durability.CONSUMED)
_REPLICATED: Final = int(Durability.REPLICATED)
_REQUEST: Final = int(Kind.REQUEST)
_STORED: Final = Durability.STORED
_FLUSHED: Final = Durability.FLUSHED
_CONSUMED_MS: Final = 30_000
# What a batch costs besides its records while it waits, so that a flood of tiny ones is bounded as well.
_PRODUCE_BATCH_BYTES: Final = 1024


def produce(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    broker.check_running()
    if asked.durability == _REPLICATED:
        raise NotInCluster("this broker has no replicas: ask for durability 'flushed'")
    if asked.flags & _ASIDE:
        if asked.flags & _REPLAYED:
            produce_replayed(broker, session, frame, asked)
        else:
            (produce_half if asked.flags & _HALF else produce_delayed)(broker, session, frame, asked)
        return
    if asked.topic.startswith(SYSTEM_PREFIX) and not asked.topic.startswith(RESULT_PREFIX):
        raise InvalidRequest("names that begin with % are DMQ's own: choose another topic")
    if asked.durability == _CONSUMED and not asked.group:
        raise InvalidRequest("durability 'consumed' needs the name of the group whose ack is waited for")
    topic = broker.topic(asked.topic)
    if not topic.config.can_produce:
        check_can_produce(topic)
    if asked.durability == _CONSUMED:
        check_name(asked.group, "group")
        broker.consumption(topic, asked.group).watches.check_room()
    batch = unpack_batch(frame.body, asked.count, asked.keys)
    check_batch(batch.data, batch.lengths, _produce_rules(asked.topic, broker.store.settings.body_bytes_max))
    stored = Batch(
        topic=asked.topic,
        queue=_any_queue(broker, topic, batch) if asked.queue == ANY_QUEUE else asked.queue,
        data=batch.data,
        lengths=batch.lengths,
        hash_index=batch.hash_index,
        hashes=batch.hashes,
        producer_id=asked.producer_id,
        producer_epoch=asked.producer_epoch,
        first_sequence=asked.first_sequence,
        named=bool(asked.flags & _NAMED),
        expiring=bool(asked.flags & _EXPIRING),
        address=session.address16,
        port=session.port,
        received_at_ms=broker.clock.now_ms(),
        room=frame.room,
    )
    if broker.limits.rules and (over := over_limit(broker, asked.topic, stored)) is not None:
        error, is_dead_letter = over
        if not is_dead_letter:
            raise error
        broker.dead_letters.instead(stored, DeadReason.RATE_LIMITED, error, lambda why: session.refuse(frame, why))
        return
    broker.writer.put(_Produced(broker, session, frame, asked, stored))


def _any_queue(broker: Broker, topic: Topic, batch: PackedBatch) -> int:
    """A queue for a producer that leaves it to us; one that knew nothing of priorities sends few that differ."""
    if topic.config.priority:
        return min(RecordView(batch.data, 0, int(batch.lengths[0])).priority, topic.config.queues - 1)
    return broker.choose_queue(topic)


@lru_cache(1024)
def _produce_rules(topic: str, body_bytes_max: int) -> BatchRules:
    return batch_rules(topic, body_bytes_max=body_bytes_max, flags_allowed=_PRODUCE_FLAGS)


class _Produced(Submission):
    """A batch on its way into the journal, and who waits for it."""

    __slots__ = ("_asked", "_broker", "_frame", "_session")

    def __init__(self, broker: Broker, session: Session, frame: Frame, asked: Produce, batch: Batch) -> None:
        self.items = (batch,)
        self.durability = _STORED if asked.durability <= _STORED_ASKED else _FLUSHED
        self.size = len(batch.data) + _PRODUCE_BATCH_BYTES
        self.atomic = False
        self._broker = broker
        self._session = session
        self._frame = frame
        self._asked = asked

    def done(self, placements: list[Placement], error: DMQError | None) -> None:
        counters, frame = self._broker.counters, self._frame
        if error is not None:
            counters["errors"] += 1
            if isinstance(error, StorageError) and self._broker.settings.dead_letter_store_failures:
                (batch,) = self.items
                assert isinstance(batch, Batch)
                self._broker.dead_letters.instead(batch, DeadReason.STORE_FAILED, error, self._refuse)
            else:
                self._refuse(error)
            return
        placement = placements[0]
        if placement.duplicate:
            counters["duplicates"] += 1
        else:
            counters["messages_in"] += placement.count
            counters["bytes_in"] += self.size - _PRODUCE_BATCH_BYTES
        durability = self._asked.durability
        if durability == _CONSUMED:
            _wait_until_consumed(self._broker, self._session, frame, self._asked, placement)
        elif frame.kind == _REQUEST:
            self._session.connection.send(
                produce_answer(
                    frame.correlation,
                    placement.queue,
                    placement.first_offset,
                    placement.unit_start,
                    durability,
                    placement.duplicate,
                )
            )

    def _refuse(self, error: DMQError) -> None:
        self._session.refuse(self._frame, error)


def _wait_until_consumed(broker: Broker, session: Session, frame: Frame, asked: Produce, placement: Placement) -> None:
    """Answer once the group has acked every message of the batch (D-20)."""
    timeout_ms = asked.timeout_ms or _CONSUMED_MS

    def answer(was_consumed: bool) -> None:
        if was_consumed:
            reply = ProduceReply(
                placement.queue, placement.first_offset, placement.unit_start, Durability.CONSUMED, placement.duplicate
            )
            session.answer(frame, reply)
            return
        session.refuse(
            frame,
            ConsumeTimeout(
                f"group {asked.group!r} did not ack within {timeout_ms} ms; the message is stored and stays",
                topic=asked.topic,
                queue=placement.queue,
                offset=placement.first_offset,
                count=placement.count,
            ),
        )

    consumption = broker.consumption(broker.topic(asked.topic), asked.group)

    def was_moved(offset: int) -> bool:
        wanted = MessageId(asked.producer_id, asked.first_sequence + offset - placement.first_offset)
        return any(
            found.record.moved and found.record.attributes.group == asked.group
            for found in broker.store.queries.find(message_id=wanted)
        )

    consumption.watch(
        ConsumedWatch(placement.queue, placement.first_offset, placement.count, broker.now_ms + timeout_ms, answer),
        was_moved,
    )


_AGAIN_MS: Final = 20


def producer_states(broker: Broker, session: Session, frame: Frame, asked: ProducerStates) -> None:
    """What is not flushed is not said: whoever skips it would be sure of messages that a power cut can take."""
    topic, store = broker.topic(asked.topic), broker.store
    if asked.is_delayed:
        topic = store.queries.topic(SCHEDULE_TOPIC)
    states = []
    for producer_id in asked.producer_ids:
        epoch = store.queries.producer_epoch(producer_id)
        if epoch is None:
            continue
        places = store.queries.producer_places(producer_id, topic)
        if any(place.unit_end > store.queries.flushed for place in places.values()):
            raise Busy("what the producer wrote is being flushed: ask again in a moment", retry_after_ms=_AGAIN_MS)
        queues = [QueueSequence(queue, place.first_sequence + place.count) for queue, place in sorted(places.items())]
        states.append(ProducerState(producer_id, epoch, queues))
    session.answer(frame, ProducerStatesReply(states))
