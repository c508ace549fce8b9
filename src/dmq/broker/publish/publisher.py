"""The publisher: takes a batch of messages from a producer, and says when it is as safe as asked.

One way for all kinds of messages: plain ones go to their topic; delayed ones to the schedule until they are due (R-10);
half messages are kept apart, invisible, until their transaction ends (R-09); replayed ones come back from the archive
under their own ids, marked, and once.

What always holds: a request that `publish` took is answered once, by `done`; one that it did not take raises. Replayed
messages come only from a named producer, to a queue it names, so that a batch that comes again is known. Only plain
messages become dead letters for being refused: a delayed one has a due time, a half message a transaction, which a dead
letter has not, and a replay is tried again by the one who runs it.

How far producers have come, so that one that begins again can skip what is stored.

What always holds: a state that is not flushed is not told: a producer that skips it would be sure of messages that a
power cut can take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.dead_letters.dead_letters import DeadLetters
from dmq.broker.delivery.channels import Channels
from dmq.broker.delivery.waiters import ConsumedWatch
from dmq.broker.journal.journal import Journal
from dmq.broker.journal.shard_writer import unanswered
from dmq.broker.journal.writer import Submission
from dmq.broker.publish.rate_limits import RateLimits
from dmq.broker.schedule.delays import Delays, schedule_queue
from dmq.broker.schedule.transactions import Transactions
from dmq.errors import (
    Busy,
    ConsumeTimeout,
    DMQError,
    InvalidRequest,
    NotAllowed,
    NotInCluster,
    StaleRoute,
    StorageError,
)
from dmq.model import HALF_TOPIC, RESULT_PREFIX, SCHEDULE_TOPIC, SYSTEM_PREFIX, Durability, MessageId, check_name
from dmq.protocol.batch import Batch as PackedBatch
from dmq.protocol.produce import Produce, ProduceFlag, ProducerState, ProducerStates, QueueSequence
from dmq.records import DeadReason, RecordView
from dmq.records.attributes import ANY_QUEUE
from dmq.records.check import BatchRules, batch_rules, check_batch
from dmq.records.layout import COMPRESSED, MOVED, ORDERED, REPLAYED
from dmq.records.replay import ids_of_replayed, merged_hashes
from dmq.storage.journal.unit import NO_ADDRESS
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.journal.unit_writer import Lone
from dmq.storage.queries import Queries
from dmq.storage.state.events import Event
from dmq.storage.state.state import Topic

__all__ = ["BATCH_BYTES", "PublishRequest", "Published", "Publisher", "states_of"]

Published = Callable[["PublishRequest", Placement | None, DMQError | None], None]

# As plain numbers: an operation on an enum costs more than all the rest of the checks.
_ASIDE: Final = int(ProduceFlag.DUES | ProduceFlag.HALF)
_SPECIAL: Final = _ASIDE | int(ProduceFlag.REPLAYED)
_DUES: Final = int(ProduceFlag.DUES)
_HALF: Final = int(ProduceFlag.HALF)
_REPLAYED: Final = int(ProduceFlag.REPLAYED)
_BLOCKS: Final = int(ProduceFlag.BLOCKS)
_NAMED: Final = int(ProduceFlag.NAMED)
_EXPIRING: Final = int(ProduceFlag.EXPIRING)
_STORED_ASKED: Final = int(Durability.STORED)
_FLUSHED_ASKED: Final = int(Durability.FLUSHED)
_CONSUMED: Final = int(Durability.CONSUMED)
_REPLICATED: Final = int(Durability.REPLICATED)
_STORED: Final = Durability.STORED
_FLUSHED: Final = Durability.FLUSHED
_CONSUMED_MS: Final = 30_000
_HELD_MS: Final = 200
# What a batch costs besides its records while it waits, so that a flood of tiny ones is bounded as well.
BATCH_BYTES: Final = 1024


@lru_cache(1024)
def _rules(topic: str, body_bytes_max: int, check_crc: bool) -> BatchRules:
    """What a producer may say of its own records; the other flags are the broker's."""
    flags = COMPRESSED | ORDERED
    return batch_rules(topic, body_bytes_max=body_bytes_max, flags_allowed=flags, check_crc=check_crc)


@lru_cache(256)
def _replay_rules(topic: str, body_bytes_max: int, check_crc: bool) -> BatchRules:
    flags = COMPRESSED | ORDERED | MOVED | REPLAYED
    return batch_rules(topic, body_bytes_max=body_bytes_max, flags_allowed=flags, check_crc=check_crc)


class PublishRequest(Submission):
    """A batch of one producer on its way into the journal.

    Parameters:
        asked: topic, queue, producer, durability and kind.
        batch: the records, encoded, and their columns.
        address, port: where the producer is, as units keep it.

    Attributes:
        room: as of the store's `Batch`; the caller may set it.
        check_crc: whether to check the records' own checksums; the caller sets it to False if another one, over the
            frame they came in, was right.
        context: what the caller needs to answer; it may set it to anything.
    """

    __slots__ = (
        "_done",
        "_half_ids",
        "_publisher",
        "address",
        "asked",
        "batch",
        "check_crc",
        "context",
        "port",
        "room",
    )
    # Set when it is taken.
    _publisher: Publisher
    _done: Published
    _half_ids: list[bytes]

    context: Any
    is_sent = True

    def __init__(self, asked: Produce, batch: PackedBatch, address: bytes = NO_ADDRESS, port: int = 0) -> None:
        self.asked = asked
        self.batch = batch
        self.address = address
        self.port = port
        self.room: memoryview | None = None
        self.check_crc = True
        self.durability = _STORED if asked.durability <= _STORED_ASKED else _FLUSHED
        self.size = len(batch.data) + BATCH_BYTES
        self.atomic = False

    @property
    def is_early(self) -> bool:  # type: ignore[override]
        """What is delayed or prepared is counted on once it is visible."""
        return self.durability is _STORED and not self.asked.flags & _ASIDE

    def done(self, placements: list[Placement], error: DMQError | None) -> None:
        if error is not None:
            self._publisher._failed(self, error)
            return
        placement = placements[-1]
        publisher, asked = self._publisher, self.asked
        if placement.duplicate:
            publisher.duplicates += 1
        else:
            publisher.count(asked.topic, placement.count, self.size - BATCH_BYTES)
        if asked.flags & _ASIDE:
            if asked.flags & _HALF:
                publisher._transactions.opened(self._half_ids)
            self._done(self, msgspec.structs.replace(placement, queue=ANY_QUEUE, first_offset=0), None)
        elif asked.durability == _CONSUMED:
            publisher._wait_until_consumed(self, placement)
        else:
            self._done(self, placement, None)

    def refuse(self, error: DMQError) -> None:
        """Tell the producer that it did not work."""
        self._done(self, None, error)


class Publisher:
    """Takes messages for one broker.

    Attributes:
        messages_in, bytes_in: what was stored.
        by_topic: the same by topic, messages and bytes.
        duplicates: batches that were stored before.
    """

    def __init__(
        self,
        journal: Journal,
        channels: Channels,
        limits: RateLimits,
        delays: Delays,
        transactions: Transactions,
        dead_letters: DeadLetters,
    ) -> None:
        self._store = journal.store
        self._queries = journal.queries
        self._writer = journal.writer
        self._channels = channels
        self._catalog: Catalog = channels.catalog
        self.choose_queue = self._catalog.choose_queue
        self._clock = channels.runtime.clock
        self.wall_ms = self._clock.wall.now_ms
        self._readiness = channels.runtime.readiness
        self._rate_limits = limits
        self._limits = limits.limits
        self._delays = delays
        self._transactions = transactions
        self._dead_letters = dead_letters
        self._body_bytes_max = journal.store.settings.body_bytes_max
        self.takes_blocks = journal.store.settings.takes_blocks
        self._keeps_failed = channels.settings.dead_letter_store_failures
        self.messages_in = 0
        self.bytes_in = 0
        self.by_topic: dict[str, list[int]] = {}
        self.duplicates = 0

    def topic_changed(self, topic: Topic) -> None:
        """Nothing that is counted depends on the settings of a topic."""

    def topic_deleted(self, name: str, error: DMQError) -> None:
        """What was counted for it is gone with it."""
        self.by_topic.pop(name, None)

    def publish(self, request: PublishRequest, done: Published) -> None:
        """Store a batch.

        Parameters:
            done: called once, on the loop, with the request: and with the batch's place when it is as safe as asked, or
                with an error. A delayed or half message has no queue and no offset yet.

        Raises:
            Later: the topic is being made, or changed: publish again when that is done.
            BrokerStopping, NotInCluster, InvalidRequest, InvalidMessage, RecordCorrupt, UnknownTopic, NotAllowed,
                RateLimited, LimitReached, Busy, NotLeader, NotEnoughReplicas: it is not taken.
        """
        asked, packed = request.asked, request.batch
        name, queue, flags = asked.topic, asked.queue, asked.flags
        special = flags & _SPECIAL
        if name not in self._queries.derived.state.topics:
            self._check_asked(asked)
            self._check_content(request)  # what is refused creates no topic
        topic = self.admit(asked)
        if asked.durability == _CONSUMED:
            self._check_watch(topic, asked.group)
        self._check_content(request)
        hash_index, hashes = packed.hash_index, packed.hashes
        before: Sequence[Event] = ()
        if special:
            request.room = None
            if flags & _REPLAYED:
                ids = ids_of_replayed(packed.data, packed.lengths)
                hash_index, hashes = merged_hashes(ids, hash_index, hashes)
            else:
                name, before = self._set_aside(request)
                queue = schedule_queue(asked.producer_id, queue)
        elif queue == ANY_QUEUE:
            queue = self._any_queue(topic, packed)
        batch = Batch(
            topic=name,
            queue=queue,
            data=packed.data,
            lengths=packed.lengths,
            hash_index=hash_index,
            hashes=hashes,
            dues=packed.dues,
            producer_id=asked.producer_id,
            producer_epoch=asked.producer_epoch,
            first_sequence=asked.first_sequence,
            previous_sequence=asked.previous_sequence,
            named=(flags & _NAMED) != 0,
            moved=(flags & _REPLAYED) != 0,
            expiring=(flags & _EXPIRING) != 0,
            address=request.address,
            port=request.port,
            received_at_ms=self.wall_ms(),
            block_bytes=packed.block_bytes,
            room=request.room,
        )
        self.begin(request, (*before, batch) if before else (batch,), done)
        if self._limits.rules and not self._passes(request, batch):
            return
        self._writer.put(request)

    def admit(self, asked: Produce) -> Topic:
        """Whether a producer may send, whatever it sends: the one place that says so. Changes nothing.

        Returns:
            The topic it sends to.

        Raises:
            Later, BrokerStopping, NotInCluster, InvalidRequest, UnknownTopic, NotAllowed: as `publish`.
            NotLeader, NotEnoughReplicas: in a shard, what is written would not be committed.
        """
        name, readiness = asked.topic, self._readiness
        if (
            readiness.is_stopping or readiness.is_draining or asked.flags & _SPECIAL
            or asked.durability > _FLUSHED_ASKED or name[0] == SYSTEM_PREFIX or readiness.leadership is not None
        ):  # fmt: skip
            self._check_asked(asked)
        topic = self._catalog.topic(name)
        if not topic.config.can_produce:
            raise _switched_off(topic)
        return topic

    def has_limits(self, topic: str) -> bool:
        """Whether a limit has to be asked before something is sent to a topic."""
        limits = self._limits
        return bool(limits.rules) and (limits.has_apps or (topic, "") in limits.rules)

    def rules(self, topic: str, check_crc: bool) -> BatchRules:
        """What holds for the records of plain messages."""
        return _rules(topic, self._body_bytes_max, check_crc)

    def begin(self, request: PublishRequest, items: Sequence[Batch | Event], done: Published) -> None:
        """A request is taken: it is answered by `done`."""
        request.items, request._publisher, request._done = items, self, done

    def late(self, asked: Produce, lone: Lone, done: Published, context: Any) -> PublishRequest:
        """The request of a plain message that the straight path has taken and cannot bring to its end."""
        topic, queue, data, key_hash, producer_id, epoch, sequence, received_at_ms, sender = lone
        index, hashes = ((0,), (key_hash,)) if key_hash else ((), ())
        packed = PackedBatch(data, (len(data),), index, hashes, dues=())
        request = PublishRequest(asked, packed, sender.address, sender.port)
        request.context = context
        batch = Batch(
            topic=topic,
            queue=queue,
            data=data,
            lengths=(len(data),),
            hash_index=index,
            hashes=hashes,
            producer_id=producer_id,
            producer_epoch=epoch,
            first_sequence=sequence,
            address=sender.address,
            port=sender.port,
            received_at_ms=received_at_ms,
        )
        self.begin(request, (batch,), done)
        return request

    def late_batch(
        self, asked: Produce, packed: PackedBatch, batch: Batch, done: Published, context: Any
    ) -> PublishRequest:
        """`late` for a batch."""
        request = PublishRequest(asked, packed, batch.address, batch.port)
        request.room, request.check_crc, request.context = batch.room, False, context
        self.begin(request, (batch,), done)
        return request

    def count(self, topic: str, messages: int, size: int) -> None:
        """Messages were stored."""
        self.messages_in += messages
        self.bytes_in += size
        try:
            counts = self.by_topic[topic]
        except KeyError:
            counts = self.by_topic[topic] = [0, 0]
        counts[0] += messages
        counts[1] += size

    def _check_asked(self, asked: Produce) -> None:
        self._readiness.check_running()
        leadership = self._readiness.leadership
        if leadership is not None:
            leadership.check_open()
            leadership.check_writable()
            self._check_slot(asked)
        elif asked.durability == _REPLICATED:
            raise NotInCluster("this broker has no replicas: ask for durability 'flushed'")
        _check(asked)

    def _check_slot(self, asked: Produce) -> None:
        """Raises StaleRoute if a producer goes by slots that are others now, unless it sends again what is stored."""
        topic, authority = self._catalog.find(asked.topic), self._catalog.authority
        is_held = asked.slots_version > 0 and authority is not None and authority.is_held(asked.topic)
        if topic is None or not (is_held or topic.is_removed or 0 < asked.slots_version < topic.slots_version):
            return
        stored, queue = topic, asked.queue
        if asked.flags & _ASIDE:
            aside = self._catalog.find(HALF_TOPIC if asked.flags & _HALF else SCHEDULE_TOPIC)
            assert aside is not None
            stored, queue = aside, schedule_queue(asked.producer_id, queue)
        if self._queries.is_resent(
            stored,
            queue,
            asked.producer_id,
            asked.producer_epoch,
            first_sequence=asked.first_sequence,
            count=asked.count,
        ):
            return
        if is_held and not topic.is_removed and asked.slots_version >= topic.slots_version:
            raise Busy(
                f"the slots of topic {topic.name!r} are about to change, and ordered messages wait until it is "
                "consumed: send again shortly",
                retry_after_ms=_HELD_MS,
            )
        why = "takes no more messages in this shard" if topic.is_removed else "has other slots now"
        raise StaleRoute(
            f"topic {topic.name!r} {why}: nothing was written; ask for its route, and send there",
            topic=topic.name,
            slots_version=topic.slots_version,
        )

    # --- steps ------------------------------------------------------------------------------------------------------

    def _check_content(self, request: PublishRequest) -> None:
        """Raises if a batch cannot be taken, whatever its topic is."""
        asked, packed = request.asked, request.batch
        rules = _replay_rules if asked.flags & _REPLAYED else _rules
        if asked.flags & _BLOCKS and (asked.flags & _SPECIAL or not self.takes_blocks):
            raise InvalidRequest(
                "only plain messages have their bodies in blocks, and only if this broker takes blocks: send each body "
                "in its record"
            )
        check_batch(
            packed.data,
            packed.lengths,
            rules(asked.topic, self._body_bytes_max, request.check_crc),
            packed.block_bytes,
        )
        if asked.flags & _DUES:
            self._delays.check_due(int(max(packed.dues)))

    def _check_watch(self, topic: Topic, group: str) -> None:
        """Raises if a producer cannot wait for the acks of a group."""
        check_name(group, "group")
        self._channels.channel(topic, group).watches.check_room()

    def _any_queue(self, topic: Topic, batch: PackedBatch) -> int:
        """A queue for a producer that leaves it to us; one that knew nothing of priorities sends few that differ."""
        if topic.config.priority:
            return min(RecordView(batch.data, 0, int(batch.lengths[0])).priority, topic.config.queues - 1)
        return self._catalog.choose_queue(topic)

    def _set_aside(self, request: PublishRequest) -> tuple[str, list[Event]]:
        """The topic that delayed or half messages wait in, and the events before them."""
        if request.asked.flags & _HALF:
            request._half_ids, before = self._transactions.prepare(request.asked, request.batch)
            return HALF_TOPIC, before
        return SCHEDULE_TOPIC, []

    def _passes(self, request: PublishRequest, batch: Batch) -> bool:
        """Whether a batch is within its limits; if not, it is refused or becomes a dead letter."""
        over = self._rate_limits.over(request.asked.topic, batch)
        if over is None:
            return True
        error, is_dead_letter = over
        if not is_dead_letter or request.asked.flags & _SPECIAL:
            raise error
        self._dead_letters.instead(batch, DeadReason.RATE_LIMITED, error, request.refuse)
        return False

    def _failed(self, request: PublishRequest, error: DMQError) -> None:
        if isinstance(error, StorageError) and self._keeps_failed and not request.asked.flags & _SPECIAL:
            (batch,) = request.items
            assert isinstance(batch, Batch)
            self._dead_letters.instead(batch, DeadReason.STORE_FAILED, error, request.refuse)
        else:
            request.refuse(error)

    def _wait_until_consumed(self, request: PublishRequest, placement: Placement) -> None:
        """Answer once the group has acked every message of the batch (D-20)."""
        asked = request.asked
        timeout_ms = asked.timeout_ms or _CONSUMED_MS

        def answer(was_consumed: bool) -> None:
            if was_consumed:
                request._done(request, placement, None)
                return
            if self._readiness.is_stopping and self._readiness.leadership is not None:
                request.refuse(unanswered())  # the next leader knows whether it is acked
                return
            error = ConsumeTimeout(
                f"group {asked.group!r} did not ack within {timeout_ms} ms; the message is stored and stays",
                topic=asked.topic,
                queue=placement.queue,
                offset=placement.first_offset,
                count=placement.count,
            )
            request.refuse(error)

        def was_moved(offset: int) -> bool:
            wanted = MessageId(asked.producer_id, asked.first_sequence + offset - placement.first_offset)
            return any(
                found.record.moved and found.record.attributes.group == asked.group
                for found in self._queries.find(message_id=wanted)
            )

        channel = self._channels.channel(self._catalog.topic(asked.topic), asked.group)
        deadline_ms = self._clock.now_ms + timeout_ms
        watch = ConsumedWatch(
            placement.queue, placement.first_offset, placement.count, deadline_ms=deadline_ms, answer=answer
        )
        channel.watch(watch, was_moved)

    # --- producers --------------------------------------------------------------------------------------------------

    def states(self, asked: ProducerStates) -> list[ProducerState]:
        """How far producers have come, so that one that begins again can skip what is stored.

        Raises:
            UnknownTopic: there is no such topic.
            Busy: what they wrote is being flushed.
        """
        topic = self._catalog.topic(asked.topic)
        return states_of(self._queries, self._queries.topic(SCHEDULE_TOPIC) if asked.is_delayed else topic, asked)


def _check(asked: Produce) -> None:
    """Raises if a batch that is not a plain one, or of a system topic, asks for what cannot be."""
    flags, durability = asked.flags, asked.durability
    if asked.topic.startswith(SYSTEM_PREFIX) and (flags & _SPECIAL or not asked.topic.startswith(RESULT_PREFIX)):
        raise InvalidRequest("names that begin with % are DMQ's own: choose another topic")
    if flags & _SPECIAL:
        _check_special(asked)
    elif durability == _CONSUMED and not asked.group:
        raise InvalidRequest("durability 'consumed' needs the name of the group whose ack is waited for")


def _check_special(asked: Produce) -> None:
    """Raises InvalidRequest if a batch that is delayed, prepared or replayed asks for what cannot be."""
    flags = asked.flags
    if flags & _REPLAYED:
        if flags & (_DUES | _HALF | _EXPIRING):
            raise InvalidRequest("replayed messages are neither delayed nor prepared, and do not expire")
        if not flags & _NAMED or not asked.producer_id or asked.queue == ANY_QUEUE:
            raise InvalidRequest(
                "replayed messages are sent by a named producer to a queue it names: else they cannot be told from "
                "others when they come again"
            )
        if asked.durability in (Durability.NONE, Durability.CONSUMED):
            raise InvalidRequest("a replay is answered when it is stored: ask for durability 'flushed'")
        return
    if flags & _HALF:
        if flags & _DUES:
            raise InvalidRequest("a prepared message cannot be delayed: send it without a delay")
        check_name(asked.group, "producer group")
    if asked.durability == _CONSUMED:
        raise InvalidRequest("a delayed or prepared message is consumed later: ask for durability 'flushed'")


def _switched_off(topic: Topic) -> NotAllowed:
    return NotAllowed(
        f"topic {topic.name!r} takes no messages: producing is switched off; send when it is on again, which "
        f"'dmq topic update {topic.name} --produce' does",
        topic=topic.name,
    )


_AGAIN_MS: Final = 20


def states_of(queries: Queries, topic: Topic, asked: ProducerStates) -> list[ProducerState]:
    """The states of those producers that have written to a topic.

    Raises:
        Busy: what they wrote is being flushed.
    """
    states = []
    for producer_id in asked.producer_ids:
        epoch = queries.producer_epoch(producer_id)
        if epoch is None:
            continue
        places = queries.producer_places(producer_id, topic)
        if any(place.unit_end > queries.flushed for place in places.values()):
            raise Busy("what the producer wrote is being flushed: ask again in a moment", retry_after_ms=_AGAIN_MS)
        queues = [QueueSequence(queue, place.first_sequence + place.count) for queue, place in sorted(places.items())]
        states.append(ProducerState(producer_id, epoch, queues))
    return states
