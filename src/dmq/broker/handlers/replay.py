"""PRODUCE of messages that come back from the archive: under their own ids, marked, and once.

What always holds: only a named producer may send them, to a queue it names, so that a batch that comes again is known;
none of them becomes a dead letter for being refused: whoever replays tries again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.handlers.limits import check_can_produce, over_limit
from dmq.broker.session import Session
from dmq.errors import DMQError, InvalidRequest
from dmq.protocol.batch import unpack_batch
from dmq.protocol.frame import Frame
from dmq.protocol.producing import Durability, Produce, ProduceFlag, ProduceReply
from dmq.records import ANY_QUEUE
from dmq.records.columns import BatchRules, batch_rules, check_batch
from dmq.records.layout import COMPRESSED, MOVED, ORDERED, REPLAYED
from dmq.records.replaying import ids_of_replayed, merged_hashes
from dmq.storage import visibility
from dmq.storage.appending import Batch, Placement

__all__ = ["produce_replayed"]

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

    durability = (
        visibility.Durability.STORED if asked.durability <= Durability.STORED else visibility.Durability.FLUSHED
    )
    broker.writer.submit([batch], durability, done, size=len(packed.data) + _BATCH_BYTES)


def _check(asked: Produce) -> None:
    if asked.topic.startswith("%"):
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
