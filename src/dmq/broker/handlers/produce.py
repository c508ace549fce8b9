"""PRODUCE: validate a batch, hand it to the writer, answer when its durability is reached."""

from __future__ import annotations

from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.session import Session
from dmq.broker.watching import ConsumedWatch
from dmq.errors import ConsumeTimeout, DMQError, InvalidRequest, NotInCluster, Unsupported
from dmq.model import check_name
from dmq.protocol.batch import unpack_batch
from dmq.protocol.frame import Frame
from dmq.protocol.producing import Durability, Produce, ProduceFlag, ProduceReply
from dmq.records import verify_batch
from dmq.records.attributes import ANY_QUEUE
from dmq.records.layout import COMPRESSED, ORDERED
from dmq.storage import visibility
from dmq.storage.appending import Batch, Placement

__all__ = ["produce"]

# What a client may say of its own records; the other flags are the broker's.
_FLAGS: Final = COMPRESSED | ORDERED
# As plain numbers: an operation on an enum costs more than all the rest of the checks.
_NOT_SERVED: Final = int(ProduceFlag.DUES | ProduceFlag.HALF)
_NAMED: Final = int(ProduceFlag.NAMED)
_CONSUMED_MS: Final = 30_000
# What a batch costs besides its records while it waits, so that a flood of tiny ones is bounded as well.
_BATCH_BYTES: Final = 1024


def produce(broker: Broker, session: Session, frame: Frame, asked: Produce) -> None:
    broker.check_running()
    if asked.durability == Durability.REPLICATED:
        raise NotInCluster("this broker has no replicas: ask for durability 'flushed'")
    if asked.flags & _NOT_SERVED:
        raise Unsupported("this broker does not take delayed or transactional messages")
    if asked.topic.startswith("%"):
        raise InvalidRequest("names that begin with % are DMQ's own: choose another topic")
    if asked.durability == Durability.CONSUMED and not asked.group:
        raise InvalidRequest("durability 'consumed' needs the name of the group whose ack is waited for")
    topic = broker.topic(asked.topic)
    if asked.durability == Durability.CONSUMED:
        check_name(asked.group, "group")
        broker.consumption(topic, asked.group).watches.check_room()
    batch = unpack_batch(frame.body, asked.count, asked.keys)
    verify_batch(
        batch.data,
        batch.lengths,
        asked.topic,
        body_bytes_max=broker.store.settings.body_bytes_max,
        flags_allowed=_FLAGS,
    )
    stored = Batch(
        topic=asked.topic,
        queue=broker.choose_queue(topic) if asked.queue == ANY_QUEUE else asked.queue,
        data=batch.data,
        lengths=batch.lengths,
        hash_index=batch.hash_index,
        hashes=batch.hashes,
        producer_id=asked.producer_id,
        producer_epoch=asked.producer_epoch,
        first_sequence=asked.first_sequence,
        named=bool(asked.flags & _NAMED),
        address=session.address16,
        port=session.port,
        received_at_ms=broker.clock.now_ms(),
    )

    def done(placements: list[Placement], error: DMQError | None) -> None:
        if error is not None:
            broker.counters["errors"] += 1
            session.refuse(frame, error)
            return
        placement = placements[0]
        if placement.duplicate:
            broker.counters["duplicates"] += 1
        else:
            broker.counters["messages_in"] += asked.count
            broker.counters["bytes_in"] += len(batch.data)
        if asked.durability == Durability.CONSUMED:
            _wait_until_consumed(broker, session, frame, asked, placement)
        else:
            session.answer(frame, _reply(placement, asked.durability))

    wanted = visibility.Durability.STORED if asked.durability <= Durability.STORED else visibility.Durability.FLUSHED
    broker.writer.submit([stored], wanted, done, size=len(batch.data) + _BATCH_BYTES)


def _reply(placement: Placement, durability: Durability) -> ProduceReply:
    return ProduceReply(placement.queue, placement.first_offset, placement.unit_start, durability, placement.duplicate)


def _wait_until_consumed(broker: Broker, session: Session, frame: Frame, asked: Produce, placement: Placement) -> None:
    """Answer once the group has acked every message of the batch (D-20)."""
    timeout_ms = asked.timeout_ms or _CONSUMED_MS

    def answer(was_consumed: bool) -> None:
        if was_consumed:
            session.answer(frame, _reply(placement, Durability.CONSUMED))
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
    consumption.watch(
        ConsumedWatch(placement.queue, placement.first_offset, placement.count, broker.now_ms + timeout_ms, answer)
    )
