"""Lanes, and the batches that move along them. Pure, but for a producer's lock outside.

What always holds: a batch is in one lane from its first message to its end; its numbers, once given, stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from dmq.client.futures import Fate
from dmq.client.session import Pending
from dmq.client.url import Address
from dmq.model import Message
from dmq.protocol import Buffer
from dmq.protocol.producing import Durability

__all__ = ["SECOND_BYTES_MIN", "SECOND_MESSAGES_MIN", "Batch", "Lane", "LaneKey", "Stream"]

SECOND_BYTES_MIN: Final = 64 << 10  # what makes a batch worth sending beside another
SECOND_MESSAGES_MIN: Final = 256

_Bytes: TypeAlias = bytes  # a batch has an attribute of that name


class LaneKey(NamedTuple):
    """What messages must share to share a batch."""

    topic: str
    queue: int  # -1 is any
    durability: Durability
    is_delayed: bool = False
    group: str = ""  # whose ack a `consumed` send waits for; of a prepared message, the producer group
    is_half: bool = False  # prepared, for a transaction

    @property
    def is_aside(self) -> bool:
        """Whether the broker keeps the messages apart at first, whatever their topic."""
        return self.is_delayed or self.is_half


class Batch(Fate):
    """Messages that go together, from the first one gathered to the answer."""

    is_plain = True  # as long as all have a body and at most a key: they then are two columns
    has_extras = False
    bytes = 0
    count = 0
    is_sealed = False
    is_worth_a_look = False
    is_attended = False  # somebody is interested who does not read
    # once it leaves
    queue = -1
    body: Sequence[Buffer] | None = None  # encoded
    key_count = 0
    # its way through the network, see `dmq.client.sender`
    sent_at: float | None = None
    deadline: float | None = None
    broker: Address | None = None
    pending: Pending | None = None
    refusals = 0
    moves = 0
    resends = 0
    is_unanswered = False
    is_refreshed = False
    last_error: Exception | None = None

    def __init__(self, lane: Lane) -> None:
        self.topic = lane.key.topic
        self.lane = lane
        self.has_offsets = lane.has_offsets
        self.bodies: list[_Bytes] = []
        self.keys: list[str | None] = []
        self.messages: list[Message] = []  # if they are not plain
        self.extras: list[_Bytes] = []  # attributes of our own, one for each message if any has some
        self.dues: list[int] = []

    def add_message(self, message: Message) -> None:
        """Put a message of any kind at the end."""
        if self.is_plain:
            self.is_plain = False
            self.messages = [Message(*pair) for pair in zip(self.bodies, self.keys, strict=True)]
            self.bodies, self.keys = [], []
        self.messages.append(message)

    def drop_messages(self) -> None:
        """Let go of what was encoded."""
        self.messages, self.bodies, self.keys, self.extras = [], [], [], []

    @property
    def is_large(self) -> bool:
        return self.count >= SECOND_MESSAGES_MIN or self.bytes >= SECOND_BYTES_MIN


class Stream:
    """All batches of one producer id."""

    __slots__ = ("busy", "lanes", "next_sequence", "producer_id")

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.next_sequence = 0
        self.busy: set[tuple[str, int]] = set()
        self.lanes: dict[str, list[Lane]] = {}


class Lane:
    """Batches with one key, in order: those that are ready, and the one that gathers."""

    __slots__ = ("gathering", "has_offsets", "key", "ready", "stream", "turn", "under_way")

    def __init__(self, key: LaneKey, stream: Stream, turn: int) -> None:
        self.key = key
        self.has_offsets = not key.is_aside and key.durability != Durability.NONE
        self.stream = stream
        self.turn = turn
        self.ready: deque[Batch] = deque()
        self.gathering: Batch | None = None
        self.under_way = 0

    @property
    def is_idle(self) -> bool:
        return not self.ready and self.gathering is None

    def offered(self) -> Batch | None:
        """What would go next, if it is worth going now."""
        if self.ready:
            return self.ready[0]
        batch = self.gathering
        # A `consumed` batch takes as long as its consumer: waiting for it would not be gathering but standing still.
        if batch is None or (self.under_way and not batch.is_large and self.key.durability != Durability.CONSUMED):
            return None
        return batch
