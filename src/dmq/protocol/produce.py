"""Headers of what producers say: PRODUCE and the transactions around it.

One PRODUCE carries one batch, for one queue, at one durability. A request with a list of batches was weighed and left
out: 100 connections with one message each would pay for the list and gain nothing, and a flood gains nothing either,
since frames that go out together are written together and the broker merges whatever arrives in one turn. What a
list would cost is that a slow durability, a full queue or one bad batch holds up or fails its neighbours.

What always holds: the header says how the body divides (`dmq.protocol.batch`), so nothing in the body is
self-describing and nothing there is believed before it was added up.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Annotated

from msgspec import Meta

from dmq.model import Durability
from dmq.protocol.header import LIST_MAX, U32, U64, Amount, Bits, Header, Id, Name, OptionalName, Queue, Text

__all__ = [
    "Produce",
    "ProduceFlag",
    "ProduceReply",
    "ProducerState",
    "ProducerStates",
    "ProducerStatesReply",
    "QueueSequence",
    "TransactionCheck",
    "TransactionEnd",
    "TransactionEndReply",
    "TransactionInfo",
    "TransactionJoin",
    "TransactionList",
    "TransactionListReply",
    "TransactionOutcome",
    "TransactionRefusal",
    "TransactionSpan",
]


class ProduceFlag(IntFlag):
    """Bits of `Produce.flags`."""

    NAMED = 0x01  # the producer id is a name that comes back (spool, Spark, replay): never forget its sequence numbers
    DUES = 0x02  # the body has a column of due times: the batch goes to the delay store
    HALF = 0x04  # the messages are prepared: invisible until TRANSACTION_END
    EXPIRING = 0x08  # some of the messages expire: delivery has to look
    REPLAYED = 0x10  # the messages were stored before and come back: their records carry their ids
    JOINED = 0x20  # HALF: some belong to transactions that were begun before; their records say to which
    BLOCKS = 0x40  # bodies stand in blocks behind the records; only with the feature of that name


class Produce(Header, frozen=True):
    """Client to broker. Body: see `dmq.protocol.batch.pack_batch`.

    The frame's flag RESEND says that the batch went out before (UP_PRODUCER_RESEND). It then has the same
    producer, epoch, sequence, count and queue, and gets the first one's place if that one arrived.
    """

    topic: Name
    queue: Queue  # ANY_QUEUE lets the broker choose; a batch sent again then may be stored twice
    count: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]  # messages
    keys: U32  # how many of them have a key
    producer_id: U64
    producer_epoch: U32
    first_sequence: U64
    durability: Durability = Durability.FLUSHED
    flags: Bits = 0
    group: OptionalName = ""  # CONSUMED: whose ack to wait for; HALF: the producer group that can be asked
    timeout_ms: U32 = 0  # CONSUMED: for how long; 0 is the broker's default
    previous_sequence: U64 | None = None  # of the producer's last message before these in the queue; none is any
    slots_version: U32 = 0  # reserved: the version of the topic's division by which the queue was chosen; 0 is none


class ProduceReply(Header, frozen=True):
    """Where the batch went: message `i` has queue offset `first_offset + i`. For a delayed or half batch, 0."""

    queue: Queue
    first_offset: Amount
    journal_offset: Amount  # of the unit that holds the batch
    durability: Durability  # reached
    is_duplicate: bool = False  # it was there already; this is the first one's place
    shard: U32 = 0  # which shard has it; 0 is a broker that is in none
    epoch: U32 = 0  # of the shard's leader


class ProducerStates(Header, frozen=True):
    """Client to broker: how far these producers have come in a topic. Answered once what they wrote is flushed."""

    topic: Name
    producer_ids: Annotated[list[U64], Meta(min_length=1, max_length=1024)]
    is_delayed: bool = False  # of what they sent with due times; the queues then are those of the schedule


class QueueSequence(Header, frozen=True):
    """How far a producer has come in one queue."""

    queue: Queue
    next_sequence: U64  # behind its last message


class ProducerState(Header, frozen=True):
    """One producer that is remembered."""

    producer_id: U64
    producer_epoch: U32
    queues: Annotated[list[QueueSequence], Meta(max_length=LIST_MAX)] = []


class ProducerStatesReply(Header, frozen=True):
    """Those that are remembered, in the order in which they were asked for."""

    producers: Annotated[list[ProducerState], Meta(max_length=1024)] = []


class TransactionOutcome(IntEnum):
    """What is to become of half messages."""

    ROLLBACK = 0
    COMMIT = 1


class TransactionSpan(Header, frozen=True):
    """Some half messages with sequences that follow each other."""

    first_sequence: U64
    count: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]


class TransactionEnd(Header, frozen=True):
    """Client to broker: commit or roll back half messages of one producer, all in one unit.

    One of an older epoch than the producer's last is refused. One that comes again is answered as the first was.
    """

    producer_id: U64
    producer_epoch: U32
    first_sequence: U64
    count: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]
    outcome: TransactionOutcome
    topic: OptionalName = ""
    others: Annotated[list[TransactionSpan], Meta(max_length=10_000)] = []  # more of the same producer


class TransactionRefusal(Header, frozen=True):
    """One that did not end as asked, and why; the texts of many are left out."""

    sequence: U64
    status: Annotated[int, Meta(ge=0, le=0xFFFF)]
    message: Text = ""


class TransactionEndReply(Header, frozen=True):
    """All ended as asked but for these."""

    refused: Annotated[list[TransactionRefusal], Meta(max_length=LIST_MAX)] = []


class TransactionJoin(Header, frozen=True):
    """Client to broker: this connection can be asked about half messages of a producer group, or no longer."""

    group: Name
    leaves: bool = False


class TransactionCheck(Header, frozen=True):
    """Broker to any live producer of the group, one-way: what became of this one? Answered with TRANSACTION_END.

    Body: the half message's record.
    """

    message_id: Id
    group: Name
    topic: Name
    attempt: U32 = 1
    producer_epoch: U32 = 0


class TransactionList(Header, frozen=True):
    """Ask which transactions are open, oldest first."""

    topic: OptionalName = ""
    after: bytes = b""  # `next` of the page before
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class TransactionInfo(Header, frozen=True):
    """One open transaction."""

    message_id: Id
    topic: Name
    group: OptionalName
    begun_at_ms: Amount
    checks: U32 = 0
    error: Text = ""


class TransactionListReply(Header, frozen=True):
    """One page; `next` is empty on the last."""

    transactions: Annotated[list[TransactionInfo], Meta(max_length=10_000)]
    next: bytes = b""
