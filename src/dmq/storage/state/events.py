"""Events: the system records of the journal, everything the store must remember that is not a message.

An event is a record with the SYSTEM flag, in a batch with topic id 0; its body is one of the structs below in
MessagePack, as an array that begins with the event's number. Numbers and field order are part of the stored format:
fields may be added at the end, nothing may be renamed or moved.

What always holds: applying the events and batches of a journal in order to an empty state gives the state. Events name
topics by id, never by name, so that a topic created again is another topic.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from dmq.errors import RecordCorrupt
from dmq.model import TopicConfig

__all__ = [
    "Archived",
    "DelaysDone",
    "EpochStarted",
    "Event",
    "KeyPut",
    "LimitPut",
    "Outcome",
    "PositionDropped",
    "PositionSet",
    "Settled",
    "SnapshotTaken",
    "SubscriptionPut",
    "TopicDropped",
    "TopicPut",
    "TransactionEnded",
    "TransactionGroup",
    "TransactionsEnded",
    "TransactionsJoined",
    "decode_event",
    "encode_event",
    "pack_offsets",
    "unpack_offsets",
]


class Outcome(IntEnum):
    """What became of messages that were handed out (or never will be)."""

    ACKED = 1
    RETRIED = 2  # moved to the retry topic
    DEAD = 3  # moved to the dead letters
    EXPIRED = 4
    SKIPPED = 5  # passed over by an operator
    CARRIED = 6  # copied to the tail of its queue before its segment went


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all events."""


class TopicPut(_Event, frozen=True, tag=1):
    """A topic was created, or its settings changed. The id is new with every creation.

    In a cluster: which incarnation of the topic in the registry this is a slot of, and how its slots were when this was
    written; `is_removed` if this one takes no more messages.
    """

    topic_id: int
    name: str
    config: TopicConfig
    incarnation: int = 0  # 0: the registry has never known it
    slots_version: int = 0
    is_removed: bool = False


class TopicDropped(_Event, frozen=True, tag=2):
    """A topic was deleted, with its queues and all positions in it."""

    topic_id: int


class Settled(_Event, frozen=True, tag=3):
    """The dequeue log: a lease, or part of one, came to an end.

    `bitmap` marks which messages of the range this is about, lowest bit of the first byte first; empty means all.
    """

    group: str
    topic_id: int
    queue: int
    start: int
    count: int
    outcome: int = Outcome.ACKED
    bitmap: bytes = b""
    member: str = ""
    attempt: int = 1
    leased_at_ms: int = 0
    settled_at_ms: int = 0
    error: str = ""


class PositionSet(_Event, frozen=True, tag=4):
    """A group's position in a queue was set by hand or for the first time; everything settled above is forgotten."""

    group: str
    topic_id: int
    queue: int
    offset: int


class PositionDropped(_Event, frozen=True, tag=5):
    """A group, or its position in one topic, is no longer kept."""

    group: str
    topic_id: int | None = None


class DelaysDone(_Event, frozen=True, tag=6):
    """Delayed records, named by journal offset (see `pack_offsets`), were delivered, cancelled or carried forward."""

    offsets: bytes
    reason: str = "fired"


class TransactionEnded(_Event, frozen=True, tag=7):
    """A half message, named by its 16-byte message id, was committed, rolled back or given up."""

    message_id: bytes
    outcome: str


class TransactionsEnded(_Event, frozen=True, tag=11):
    """The same of many half messages: their ids, 16 bytes each, one after another."""

    message_ids: bytes
    outcome: str


class TransactionGroup(_Event, frozen=True, tag=12):
    """Half messages of this producer, from here on, can be asked about with the producers of a group."""

    producer_id: int
    group: str


class TransactionsJoined(_Event, frozen=True, tag=16):
    """Half messages that end with another one: pairs of ids, 16 bytes each, its own and that of the first."""

    pairs: bytes


class SubscriptionPut(_Event, frozen=True, tag=13):
    """What the members of a group agreed on in a topic, by a version above 0: it never falls."""

    group: str
    topic_id: int
    filter: str
    version: int
    is_ordered: bool = False


class LimitPut(_Event, frozen=True, tag=14):
    """How much a second may be sent to a topic, or by an app; one without numbers removes the limit."""

    topic_id: int  # 0: it is one of an app
    app: str = ""
    messages: int | None = None
    bytes: int | None = None
    policy: int = 0  # 0 refuse, 1 dead letter


class KeyPut(_Event, frozen=True, tag=15):
    """What a key of a namespace holds; without a value it is gone."""

    namespace: str
    key: str
    value: bytes | None = None
    expires_at_ms: int = 0  # 0: never


class EpochStarted(_Event, frozen=True, tag=8):
    """A leader (for a lone broker: a start after an unclean cut) began to write.

    `leader` is the replica id of the member that did; a lone broker has none.
    """

    epoch: int
    leader: int = 0


class SnapshotTaken(_Event, frozen=True, tag=9):
    """The whole state at this point, one part of `parts`; concatenated they are what `State.snapshot` gave."""

    part: int
    parts: int
    state: bytes


class Archived(_Event, frozen=True, tag=10):
    """The archive has taken everything below a journal offset."""

    offset: int


Event = (
    TopicPut
    | TopicDropped
    | Settled
    | PositionSet
    | PositionDropped
    | DelaysDone
    | TransactionEnded
    | EpochStarted
    | SnapshotTaken
    | Archived
    | TransactionsEnded
    | TransactionGroup
    | SubscriptionPut
    | LimitPut
    | KeyPut
    | TransactionsJoined
)

_decoder = msgspec.msgpack.Decoder(Event)
encode_event: Final[Callable[[Event], bytes]] = msgspec.msgpack.Encoder().encode
"""The body of the event's record."""


def decode_event(body: bytes | memoryview) -> Event:
    """The event a body holds.

    Raises:
        RecordCorrupt: it holds none that this version knows.
    """
    try:
        event: Event = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RecordCorrupt(f"a system record cannot be read: {error}; it may be a newer DMQ's") from error
    return event


def pack_offsets(offsets: npt.ArrayLike) -> bytes:
    """Journal offsets as big-endian u64, one after another."""
    return np.asarray(offsets, np.uint64).astype(">u8").tobytes()


def unpack_offsets(raw: bytes) -> npt.NDArray[np.uint64]:
    """The opposite of `pack_offsets`."""
    return np.frombuffer(raw, ">u8").astype(np.uint64)
