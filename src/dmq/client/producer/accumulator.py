"""The accumulator: messages gather into batches, and batches take their turn. Pure, but for a producer's lock outside.

A lane gathers messages that may share a batch: one topic, one durability, one due or not, one fixed queue or any. A
lone message leaves at once; while a batch is under way the next gathers, so batches grow with the load by themselves.
A lane puts a second batch under way as soon as it is worth it, not before: small batches side by side would cost more
than they gain. It goes to another queue if the lane is for any, else behind the first one.

What always holds:
- A queue has at most `OVERLAP_MAX` batches of a stream under way, fewer than the broker remembers, in the order of
  their numbers. So the sequence numbers of one producer rise within each queue, which is what a broker needs to
  recognise a batch that comes again: each batch behind the first names the one before it (`may_go`), and the broker
  refuses it if that one is not the last it has. A stream is one durability (and delayed or prepared messages, whose
  queues at the broker all topics share): each has a producer id of its own, so that a slow one holds up nobody.
- A batch leaves behind another only while all of the queue go their first way undisturbed. One that has to go out again
  waits until it is the first of its queue.
- Numbers are given when a batch leaves, without gaps inside it, and stay with it however often it is sent. Only one
  that is certainly stored nowhere gets others, with another place.
- A batch is in one lane from its first message to its end, unless its messages are divided anew by other slots.
- Bytes and messages that are not settled stay within the window. One message larger than the window may be alone in it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any, Final, NamedTuple, TypeAlias

from dmq.client.producer.numbered_sender import NumberedBatch
from dmq.client.producer.outcome import Outcome, Wakeable
from dmq.client.producer.retry_policy import History
from dmq.errors import ConsumeTimeout, OutOfRetries
from dmq.model import Durability, Message, place_shard

__all__ = [
    "CROWD_MIN",
    "LONE",
    "SECOND_BYTES_MIN",
    "SECOND_MESSAGES_MIN",
    "Accumulator",
    "Draft",
    "Lane",
    "LaneKey",
    "Lone",
    "SendBatch",
    "Stream",
]

BATCH_BYTES_MAX: Final = 1 << 20
BATCH_MESSAGES_MAX: Final = 4096
MESSAGE_BYTES: Final = 128  # what a message costs beside its body, for the window: record head, names, objects
# What makes a batch that gathers worth sending beside another. What a batch costs as such is that of some hundred
# messages on each side, and one that waits for an answer to come loses nothing.
SECOND_BYTES_MIN: Final = 512 << 10
SECOND_MESSAGES_MIN: Final = 2048
RESERVED_BYTES: Final = 32 << 10  # of the window, for a batch of a flood of sends
RESERVED_MESSAGES: Final = RESERVED_BYTES // MESSAGE_BYTES
CROWD_MIN: Final = 4  # messages that gather while others are under way: many threads send
OVERLAP_MAX: Final = 4  # batches of a stream under way to one queue; and of a lane that still gather

_Bytes: TypeAlias = bytes  # a batch has an attribute of that name
_U64: Final = 0xFFFF_FFFF_FFFF_FFFF


class LaneKey(NamedTuple):
    """What messages must share to share a batch."""

    topic: str
    queue: int  # its place; -1 is any, and less is one queue of whichever shard
    durability: Durability
    is_delayed: bool = False
    group: str = ""  # whose ack a `consumed` send waits for; of a prepared message, the producer group
    is_half: bool = False  # prepared, for a transaction
    slots_version: int = 0  # by which its place was chosen, in a cluster; 0 if it is not bound to one

    @property
    def is_aside(self) -> bool:
        """Whether the broker keeps the messages apart at first, whatever their topic."""
        return self.is_delayed or self.is_half


class SendBatch(Outcome, NumberedBatch):
    """Messages that go together, from the first one gathered to the answer."""

    is_plain = True  # as long as all have a body and at most a key: they then are two columns
    has_extras = False
    bytes = 0
    count = 0
    room = 0  # bytes that are reserved for it and not used: `bytes` has them until it leaves, see `Accumulator.reserve`
    reserved_messages = 0
    pairs: list[_Bytes | str | None] = []  # body, key, body, key …: what took of that room; each batch has its own
    is_sealed = False
    is_worth_a_look = False
    is_attended = False  # somebody is interested who does not read
    carrier = 0  # the thread that took it last from where it waited
    # once it leaves
    queue = -1
    key_count = 0
    # its way through the network, see `dmq.client.producer.sender`
    sent_at: float | None = None  # for the first time
    deadline: float | None = None
    moves = 0  # to another broker
    moved_at = 0.0  # for the first time
    is_stalled = False  # it waits for a leader of its shard
    turns = 0  # how often it got another place
    resends = 0
    previous_sequence: int | None = None  # of the message before it in its queue, if that one may be under way
    is_tried = False  # it went out, or was about to
    is_out = False  # it went out once, and nothing has disturbed it: others may follow
    is_held = False  # it waits until those before it in its queue have ended
    is_refreshed = False  # its topic was asked for anew
    # when its sender was told that its outcome is not known, and asks again
    is_kept = False  # its bytes outlive an end that tells nothing, see `Sender.resume`
    asked_again_at = 0.0
    again: SendBatch | None = None  # the same messages on their way once more
    parts: Sequence[tuple[SendBatch, int]] = ()
    parent: SendBatch | None = None  # whose messages it has, of those
    tasks: Any = None  # the waiter of the tasks of an event loop that wait for it, which they share

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

    @property
    def shard(self) -> int:
        return place_shard(max(0, self.queue))

    def hold_lane(self, pump: Callable[[Lane], None]) -> None:
        """Hold what gathers behind it until all threads that stand in line, if they are many, have been woken.

        Most of them send again before they let the next one run.
        """
        if self.count >= CROWD_MIN and self.has_line:
            lane = self.lane
            lane.is_held = True
            if not self.follow(lambda: lane.let_go(pump)):
                lane.is_held = False

    def drop_messages(self) -> None:
        """Let go of what was encoded; not of messages that may have to be divided anew, by other slots."""
        if not self.lane.key.slots_version or self.is_done:
            self.messages, self.bodies, self.keys, self.extras = [], [], [], []

    def divided(self, lanes: Sequence[Lane]) -> list[SendBatch]:
        """Its messages in batches of other lanes, one lane for each message. Nothing of it was stored."""
        self.turns += 1  # what was about to be done to it later would send it beside its parts
        batches: dict[int, SendBatch] = {}
        parts: list[tuple[SendBatch, int]] = []
        for at, (message, lane) in enumerate(zip(self.messages, lanes, strict=True)):
            batch = batches.get(id(lane))
            if batch is None:
                batch = batches[id(lane)] = SendBatch(lane)
                batch.parent, batch.deadline = self, self.deadline
                batch.is_attended, batch.is_kept, batch.has_extras = True, self.is_kept, self.has_extras
            batch.add_message(message)
            if self.has_extras:
                batch.extras.append(self.extras[at])
            if self.dues:
                batch.dues.append(self.dues[at])
            batch.count += 1
            batch.bytes += len(message.body) + MESSAGE_BYTES
            parts.append((batch, batch.count - 1))
        self.parts = parts
        self.messages, self.extras, self.body = [], [], None
        return [*batches.values()]

    @property
    def is_unknown(self) -> bool:
        """Whether its messages may be stored, for all its senders know."""
        return not self.is_done or (
            self.error is not None
            and not isinstance(self.error, ConsumeTimeout)
            and (self.is_unanswered or isinstance(self.error, OutOfRetries))
        )

    def reopened(self) -> SendBatch:
        """The same messages with the same numbers, to be sent once more; this batch lets go of their bytes."""
        again = self.again = SendBatch(self.lane)
        again.queue, again.producer_id, again.first_sequence = self.queue, self.producer_id, self.first_sequence
        again.block_bytes = self.block_bytes
        again.count, again.bytes, again.key_count, again.has_extras = (
            self.count, self.bytes, self.key_count, self.has_extras
        )  # fmt: skip
        again.body, self.body = self.body, None
        again.messages, again.extras, again.dues = self.messages, self.extras, self.dues
        again.broker = self.broker
        again.is_unanswered = again.is_attended = again.is_kept = True
        return again

    @property
    def history(self) -> History:
        """What happened to it so far, for the retry policy."""
        return History(
            refusals=self.refusals,
            moves=self.moves,
            is_unanswered=self.is_unanswered,
            is_pinned=self.lane.key.queue >= 0,
            is_refreshed=self.is_refreshed,
            deadline=self.deadline,
        )

    @property
    def is_large(self) -> bool:
        return self.count >= SECOND_MESSAGES_MIN or self.bytes >= SECOND_BYTES_MIN


class Stream:
    """All batches of one producer id."""

    __slots__ = ("lanes", "next_sequence", "producer_id", "under_way")

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.next_sequence = 0
        self.under_way: dict[tuple[str, int], list[SendBatch]] = {}  # by topic and queue, in the order they left
        self.lanes: dict[str, list[Lane]] = {}


class Lone(NamedTuple):
    """A message that is under way without a batch."""

    queue: int
    sequence: int
    size: int  # for the window


class Lane:
    """Batches with one key, in order: those that are ready, and the one that gathers."""

    __slots__ = (
        "carrier", "gathering", "has_offsets", "is_closed", "is_crowded", "is_held", "key", "lone", "place", "ready",
        "stalled", "stand_in", "stream", "turn", "under_way",
    )  # fmt: skip

    def __init__(self, key: LaneKey, stream: Stream, turn: int) -> None:
        self.key = key
        self.place = "" if key.is_aside else key.topic  # whose queues its batches take at the broker
        self.has_offsets = not key.is_aside and key.durability != Durability.NONE
        self.stream = stream
        self.turn = turn
        self.ready: deque[SendBatch] = deque()
        self.gathering: SendBatch | None = None
        self.under_way = 0
        self.stalled = 0  # of those under way: they wait for a leader of their shard, and others do not wait for them
        self.is_closed = False  # nothing leaves it any more: the topic has other slots
        self.is_crowded = False  # the last batch that gathered has several messages
        self.is_held = False  # what gathers waits for threads that are on their way back with more
        self.lone: Lone | None = None  # the message without a batch that is under way
        self.carrier = 0  # the thread whose message that is
        self.stand_in: SendBatch | None = None  # its batch after all, if anybody asked for it

    @property
    def is_idle(self) -> bool:
        return not self.ready and self.gathering is None

    @property
    def is_free(self) -> bool:
        """Nothing waits or is under way in it."""
        return not self.under_way and self.gathering is None and not self.ready

    def let_go(self, pump: Callable[[Lane], None]) -> None:
        """Hold nothing any longer, and send it."""
        self.is_held = False
        pump(self)

    def offered(self) -> SendBatch | None:
        """What would go next, if it is worth going now."""
        if self.ready:
            return self.ready[0]
        batch, beside = self.gathering, self.under_way - self.stalled
        if batch is None:
            return None
        # A large one costs less, and is worth sending beside those under way.
        if batch.count >= SECOND_MESSAGES_MIN or batch.bytes >= SECOND_BYTES_MIN:
            return batch if beside < OVERLAP_MAX or self.key.durability is Durability.CONSUMED else None
        # A `consumed` batch takes as long as its consumer: waiting for it would not be gathering but standing still.
        if self.is_held or (beside > 0 and self.key.durability is not Durability.CONSUMED):
            return None
        return batch


class Draft(NamedTuple):
    """A message that was checked and knows its lane, but is not in it yet."""

    lane: Lane
    message: Message
    size: int  # for the window
    due_ms: int = 0  # when it is due; 0 is at once
    extra: bytes = b""  # attributes of our own
    is_plain: bool = False  # it is known to have a body and at most a key, and nothing of the above


class Accumulator:
    """The messages of one producer that are not settled.

    Parameters:
        window_bytes: how many bytes of them there may be.
        window_messages: how many of them there may be.
        seed: of the producer id and of the first queue; random if not given.
    """

    def __init__(self, window_bytes: int, window_messages: int, *, seed: int | None = None) -> None:
        self.window_bytes = window_bytes
        self._window_messages = window_messages
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._producer_id = self._random.getrandbits(64)
        self.streams: dict[tuple[Durability, bool, bool], Stream] = {}
        self._lanes: dict[LaneKey, Lane] = {}
        self.unsettled_batches: dict[SendBatch, None] = {}
        self.charged: dict[SendBatch, None] = {}  # what counts in the window
        self.bytes = 0
        self.messages = 0
        self.waiters: deque[Wakeable] = deque()  # for room in the window
        self.gatherer: Any = None  # the compiled loop that has the room of a batch, see `dmq.client.producer.core`

    # --- the window -------------------------------------------------------------------------------------------------

    def has_room(self, size: int, count: int) -> bool:
        """Whether so much more fits into the window."""
        fits = self.bytes + size <= self.window_bytes and self.messages + count <= self._window_messages
        return fits or self.messages == 0

    def why_full(self) -> str:
        """Why there is no room, and what to do, for a user."""
        return (
            f"the producer's window is full: {self.messages} messages, {self.bytes} bytes are not settled yet; wait "
            "for some of them, or widen window_bytes"
        )

    def release(self, batch: SendBatch) -> list[Wakeable]:
        """A batch is settled: its room is free, and those who wait for some are returned to be woken."""
        if self.charged.pop(batch, batch) is batch:
            return []  # it was free before
        self.bytes -= batch.bytes
        self.messages -= batch.count
        if not self.waiters:
            return []
        waiters = [*self.waiters]
        self.waiters.clear()
        return waiters

    # --- gathering --------------------------------------------------------------------------------------------------

    def lane(self, key: LaneKey) -> Lane:
        """The lane of a key."""
        lane = self._lanes.get(key)
        if lane is None:
            kind = (key.durability, key.is_delayed, key.is_half)
            stream = self.streams.get(kind)
            if stream is None:
                # 0 is nobody's id.
                producer_id = (self._producer_id + len(self.streams)) & _U64 or 1 << 63
                stream = self.streams[kind] = Stream(producer_id)
            lane = Lane(key, stream, self._random.getrandbits(16))
            stream.lanes.setdefault(key.topic, []).append(lane)
            self._lanes[key] = lane
        return lane

    def append(self, draft: Draft) -> SendBatch:
        """Put a message into the batch that gathers; it is the last one there. The window was asked before.

        `SendBatch.is_worth_a_look` says afterwards whether the lane may now have something to send that it had not
        before; if it has not, the end of what is under way will look again.
        """
        lane, message, size, due_ms, extra, is_plain = draft
        if lane.gathering is not None and lane.gathering.reserved_messages:
            self._return_room(lane.gathering)
        batch = self._gathering(lane, size)
        if is_plain and batch.is_plain:
            batch.bodies.append(message.body)
            batch.keys.append(message.key)
        else:
            batch.add_message(message)
        if extra and not batch.has_extras:
            batch.has_extras = True
            batch.extras = [b""] * batch.count
        if batch.has_extras:
            batch.extras.append(extra)
        if lane.key.is_delayed:
            batch.dues.append(due_ms)
        self._count_one(lane, batch, size)
        return batch

    def append_plain(self, lane: Lane, body: bytes, key: str | None, size: int) -> SendBatch | None:
        """`append` for a message that has a body and at most a key, and is not delayed; None if it has no room."""
        batch = lane.gathering
        if batch is not None and batch.reserved_messages:
            self._return_room(batch)
        if not self.has_room(size, 1):
            return None
        batch = self._gathering(lane, size)
        if batch.is_plain:
            batch.bodies.append(body)
            batch.keys.append(key)
        else:
            batch.add_message(Message(body, key))
            if batch.has_extras:
                batch.extras.append(b"")
        self._count_one(lane, batch, size)
        # Others may have come since the last look, into room that was reserved.
        batch.is_worth_a_look = lane.offered() is not None
        return batch

    def reserve(self, batch: SendBatch) -> None:
        """Give a batch that gathers plain messages room for some more, which it then takes without asking.

        Not where the window or the batch is nearly full: each message then asks for its room.
        """
        if (
            batch.is_plain
            and batch.bytes + RESERVED_BYTES <= BATCH_BYTES_MAX
            and batch.count + RESERVED_MESSAGES <= BATCH_MESSAGES_MAX
            and self.bytes + RESERVED_BYTES <= self.window_bytes // 2
            and self.messages + RESERVED_MESSAGES <= self._window_messages // 2
        ):
            batch.pairs = []
            batch.room = RESERVED_BYTES
            batch.bytes += RESERVED_BYTES
            batch.reserved_messages = batch.count + RESERVED_MESSAGES
            self.bytes += RESERVED_BYTES
            self.messages += RESERVED_MESSAGES

    def _return_room(self, batch: SendBatch) -> None:
        """Give back what a batch has not used of its room, and put what has used it with the others."""
        if self.gatherer is not None and self.gatherer.batch is batch:
            self.gatherer.close()
        # No call among these three, so that an exception of a signal's handler finds all of them done, or none.
        batch.bodies += batch.pairs[::2]  # type: ignore[arg-type]
        batch.keys += batch.pairs[1::2]  # type: ignore[arg-type]
        batch.pairs = []
        self.bytes -= batch.room
        batch.bytes -= batch.room
        self.messages -= batch.reserved_messages - batch.count
        batch.room = batch.reserved_messages = 0

    # --- one message, without a batch -------------------------------------------------------------------------------

    def take_lone(self, lane: Lane, size: int, queues: int) -> Lone | None:
        """Have one message leave at once, without a batch: its queue and its number.

        None if anything is in its way: messages or batches of its lane, a full window, or queues that are all taken.

        Parameters:
            lane: one for any queue.
            queues: how many the topic has, all of them reachable; in a cluster, ~place of the one place to take.
        """
        if lane.under_way or lane.gathering is not None or lane.ready:
            return None
        if (self.bytes + size > self.window_bytes or self.messages >= self._window_messages) and self.messages:
            return None
        stream, place, turn = lane.stream, lane.place, lane.turn
        under_way, queue, sequence = stream.under_way, turn % queues, stream.next_sequence
        if queues < 0:
            queue = ~queues
        if (place, queue) in under_way:
            turn = _turn(lane, range(queues), overlaps=False)
            if turn < 0:
                return None
            queue = turn % queues
        lane.carrier = get_ident()
        stream.next_sequence = sequence + 1
        under_way[place, queue] = LONE
        lone = lane.lone = Lone(queue, sequence, size)
        lane.turn, lane.under_way = turn + 1, 1
        self.bytes += size
        self.messages += 1
        return lone

    def end_lone(self, lane: Lane, lone: Lone) -> bool:
        """The lone message of a lane is stored; False if somebody waits for that: then its batch ends instead."""
        stream, place = lane.stream, lane.place
        if (
            lane.stand_in is not None or lane.gathering is not None or lane.ready or self.waiters
            or len(stream.lanes[place]) > 1
        ):  # fmt: skip
            return False
        del stream.under_way[place, lone[0]]
        lane.lone = None
        lane.under_way -= 1  # a large batch may have left beside it
        self.bytes -= lone[2]
        self.messages -= 1
        return True

    def take_batch(self, batch: SendBatch, queues: int) -> bool:
        """Have a batch made elsewhere leave at once, with queue and numbers; False where `take_lone` gives None."""
        lane, stream, place = batch.lane, batch.lane.stream, batch.lane.place
        queue = lane.turn % queues if queues > 0 else ~queues
        if (
            lane.under_way or lane.gathering is not None or lane.ready or (place, queue) in stream.under_way
            or not self.has_room(batch.bytes, batch.count)
        ):  # fmt: skip
            return False
        batch.queue, batch.is_sealed, batch.is_tried = queue, True, True
        self._number(batch, stream)
        stream.under_way[place, queue] = [batch]
        lane.turn, lane.under_way = lane.turn + 1, 1
        self.unsettled_batches[batch] = self.charged[batch] = None
        self.bytes += batch.bytes
        self.messages += batch.count
        return True

    def end_batch(self, batch: SendBatch) -> bool:
        """A batch that `take_batch` let go is stored; False if somebody waits for that: then `finished` says who."""
        lane = batch.lane
        stream, place = lane.stream, lane.place
        if lane.gathering is not None or lane.ready or self.waiters or len(stream.lanes[place]) > 1:
            return False
        del stream.under_way[place, batch.queue], self.unsettled_batches[batch], self.charged[batch]
        lane.under_way -= 1
        self.bytes -= batch.bytes
        self.messages -= batch.count
        return True

    def take_stand_in(self, lane: Lane) -> SendBatch:
        """The batch that the lone message of a lane is from now on: under way, with the same numbers."""
        batch = self._stand_in(lane)
        lane.lone = lane.stand_in = None
        return batch

    def _stand_in(self, lane: Lane) -> SendBatch:
        batch, lone = lane.stand_in, lane.lone
        if batch is None:
            assert lone is not None
            batch = lane.stand_in = SendBatch(lane)
            batch.count, batch.is_sealed, batch.is_tried, batch.sent_at = 1, True, True, 0.0
            batch.producer_id = lane.stream.producer_id
            batch.queue, batch.first_sequence, batch.bytes = lone
            batch.carrier = lane.carrier
            lane.stream.under_way[lane.place, batch.queue] = [batch]
            self.unsettled_batches[batch] = self.charged[batch] = None
        return batch

    def _gathering(self, lane: Lane, size: int) -> SendBatch:
        """The batch of a lane that has room for so much more."""
        batch = lane.gathering
        if batch is None or batch.bytes + size > BATCH_BYTES_MAX or batch.count >= BATCH_MESSAGES_MAX:
            self.seal(lane)
            batch = lane.gathering = SendBatch(lane)
            self.unsettled_batches[batch] = self.charged[batch] = None
        return batch

    def _count_one(self, lane: Lane, batch: SendBatch, size: int) -> None:
        count = batch.count = batch.count + 1
        total = batch.bytes = batch.bytes + size
        self.bytes += size
        self.messages += 1
        batch.is_worth_a_look = (
            not lane.under_way or count == 1 or count == SECOND_MESSAGES_MIN or total >= SECOND_BYTES_MIN > total - size
        )

    def seal(self, lane: Lane) -> None:
        """Let nothing more into the batch that gathers."""
        batch = self._take_gathering(lane)
        if batch is not None:
            lane.ready.append(batch)

    def _take_gathering(self, lane: Lane) -> SendBatch | None:
        """The batch that gathers; from now on it takes no more messages."""
        batch, lane.gathering = lane.gathering, None
        if batch is not None:
            batch.is_sealed = True
            if batch.reserved_messages:
                self._return_room(batch)
            lane.is_crowded = batch.count >= CROWD_MIN
        return batch

    def add(self, batch: SendBatch) -> None:
        """Put a batch that was made elsewhere at the end of its lane. The window was asked before."""
        lane = batch.lane
        self.seal(lane)
        batch.is_sealed = True
        lane.ready.append(batch)
        self.unsettled_batches[batch] = self.charged[batch] = None
        self.bytes += batch.bytes
        self.messages += batch.count

    def withdraw(self, batch: SendBatch) -> bool:
        """Take back a batch that has not left; False if it has."""
        lane, batch.carrier = batch.lane, get_ident()
        if lane.gathering is batch:
            self._take_gathering(lane)
            return True
        if batch in lane.ready:
            lane.ready.remove(batch)
            return True
        return False

    # --- leaving ----------------------------------------------------------------------------------------------------

    def next_batch(self, lane: Lane, queues: Sequence[int], *, overlaps: bool = False) -> SendBatch | None:
        """The batch of this lane that leaves now, with its queue and its numbers; None if none does.

        Parameters:
            queues: that a message for any queue may go to now.
            overlaps: the broker takes batches that name the one before.
        """
        batch = lane.offered()
        if batch is None or lane.is_closed:
            return None
        key, under_way, topic = lane.key, lane.stream.under_way, lane.place
        is_first = batch.first_sequence < 0
        overlaps = overlaps and is_first and not key.is_half
        queue = key.queue if is_first else batch.queue
        if queue >= 0:
            if (topic, queue) in under_way and not (overlaps and _may_follow(under_way[topic, queue])):
                return None
        else:
            turn = _turn(lane, queues, overlaps=overlaps)
            if turn < 0:
                return None
            lane.turn = turn + 1
            queue = queues[turn % len(queues)]
        batch.carrier = get_ident()
        if lane.gathering is batch:
            self._take_gathering(lane)
        else:
            lane.ready.popleft()
        batch.queue = queue
        if is_first:
            self._number(batch, lane.stream)
        if key.durability != Durability.NONE:
            under_way.setdefault((topic, queue), []).append(batch)
            lane.under_way += 1
        return batch

    def may_go(self, batch: SendBatch, *, overlaps: bool) -> bool:
        """Whether a batch that has left its lane may go out now; if not, it is held until it is the first of its queue.

        Parameters:
            overlaps: the broker takes batches that name the one before.
        """
        lane = batch.lane
        self._resume(batch)
        batches = lane.stream.under_way.get((lane.place, batch.queue))
        batch.previous_sequence, batch.is_held = None, False
        if batches is None or batches[0] is batch:
            return True
        before = batches[batches.index(batch) - 1]
        if overlaps and before.is_out and not batch.is_tried:
            batch.previous_sequence = before.first_sequence + before.count - 1
            return True
        batch.is_held = True
        return False

    def stall(self, batch: SendBatch) -> None:
        """A batch waits for a leader of its shard: its lane goes on, where its messages may go to other shards."""
        lane = batch.lane
        is_under_way = batch in lane.stream.under_way.get((lane.place, batch.queue), ())
        if lane.key.queue < 0 and is_under_way and not batch.is_stalled:
            batch.is_stalled = True
            lane.stalled += 1

    @staticmethod
    def _resume(batch: SendBatch) -> None:
        if batch.is_stalled:
            batch.is_stalled = False
            batch.lane.stalled -= 1

    def _number(self, batch: SendBatch, stream: Stream) -> None:
        batch.producer_id, batch.carrier = stream.producer_id, get_ident()
        first = stream.next_sequence
        stream.next_sequence = first + batch.count  # before it has them: numbers are never given twice
        batch.first_sequence = first

    def finished(self, batch: SendBatch) -> list[Lane]:
        """A batch will not be sent any more: its queue is free. The lanes that may have waited for that."""
        self._resume(batch)
        lane = batch.lane
        place = (lane.place, batch.queue)
        batches = lane.stream.under_way.get(place, ())
        if batch in batches:
            lane.under_way -= 1
            if len(batches) == 1:
                del lane.stream.under_way[place]
            else:
                lane.stream.under_way[place].remove(batch)
        self.unsettled_batches.pop(batch, None)
        if not lane.place:
            return [other for lanes in lane.stream.lanes.values() for other in lanes if not other.is_idle]
        return [other for other in lane.stream.lanes[lane.key.topic] if not other.is_idle]

    def put_back(self, batch: SendBatch) -> tuple[list[Lane], SendBatch | None]:
        """A batch that is stored nowhere is to get another place, and other numbers: it is the next one of its lane.

        Its numbers rise in the place it gets, as those of others do that went there meanwhile.

        Returns:
            The lanes that may have waited for the place that it had, and the batch that was held behind it.
        """
        lanes, released = self.finished(batch), self.released(batch)
        self.unsettled_batches[batch] = None
        self._unnumber(batch)
        batch.lane.ready.appendleft(batch)
        return (lanes if batch.lane in lanes else [*lanes, batch.lane]), released

    @staticmethod
    def first_under_way(batch: SendBatch) -> SendBatch:
        """The first batch under way to the queue of a batch, which may be this one."""
        return batch.lane.stream.under_way.get((batch.lane.place, batch.queue), (batch,))[0]

    @staticmethod
    def released(batch: SendBatch) -> SendBatch | None:
        """The batch that was held and may go now that this one, which is finished, has ended."""
        batches = batch.lane.stream.under_way.get((batch.lane.place, batch.queue))
        if batches is None or not batches[0].is_held:
            return None
        batches[0].is_held = False
        return batches[0]

    def move(self, batch: SendBatch, lane: Lane) -> None:
        """Put a batch that is stored nowhere, and waits nowhere, at the end of another lane."""
        self.finished(batch)
        self.unsettled_batches[batch] = None
        self._unnumber(batch)
        self.seal(lane)
        batch.lane = lane
        lane.ready.append(batch)

    @staticmethod
    def _unnumber(batch: SendBatch) -> None:
        batch.queue = batch.first_sequence = -1
        batch.sent_at = batch.previous_sequence = None
        batch.is_tried = batch.is_out = batch.is_held = False
        batch.turns += 1

    @staticmethod
    def left(lane: Lane) -> list[SendBatch]:
        """What has left a lane and is not settled, in the order of the numbers."""
        batches = lane.stream.under_way.values() if lane.under_way else ()
        found = [batch for group in batches for batch in group if batch.lane is lane]
        return sorted(found, key=lambda batch: batch.first_sequence)

    def lanes_by(self, topic: str, version: int) -> list[Lane]:
        """The lanes of messages of a topic that are bound to a place by other slots than those of this version."""
        found = [lane for stream in self.streams.values() for lane in stream.lanes.get(topic, ())]
        return [lane for lane in found if lane.key.slots_version not in (0, version)]

    def take_waiting(self, lane: Lane) -> list[SendBatch]:
        """What waits in a lane, in order; it has nothing any more."""
        self.seal(lane)
        batches = [*lane.ready]
        lane.ready.clear()
        return batches

    def drop_lane(self, lane: Lane) -> None:
        """Forget a lane that has nothing, and gets nothing any more."""
        if self._lanes.get(lane.key) is lane and lane.is_free:
            del self._lanes[lane.key]
            lane.stream.lanes[lane.key.topic].remove(lane)

    def lanes(self) -> list[Lane]:
        return [*self._lanes.values()]

    def waiting_lanes(self) -> list[Lane]:
        """All lanes that have something to send."""
        return [lane for lane in self._lanes.values() if not lane.is_idle]

    def unsettled(self) -> Iterator[SendBatch]:
        """All batches that are not settled, oldest first; messages without one get theirs."""
        for lane in self._lanes.values():
            if lane.lone is not None:
                self._stand_in(lane)
        return iter([*self.unsettled_batches])


def _may_follow(batches: Sequence[SendBatch]) -> bool:
    """Whether one more batch may leave behind those that are under way to a queue."""
    return len(batches) < OVERLAP_MAX and all(batch.is_out for batch in batches)


def _turn(lane: Lane, queues: Sequence[int], *, overlaps: bool) -> int:
    """The turn whose queue the next batch of a lane for any queue takes, a free one if there is; -1 if none does."""
    under_way, topic, count = lane.stream.under_way, lane.place, len(queues)
    best, fewest = -1, OVERLAP_MAX
    for turn in range(lane.turn, lane.turn + count):
        batches = under_way.get((topic, queues[turn % count]))
        if batches is None:
            return turn
        if overlaps and len(batches) < fewest and _may_follow(batches):
            best, fewest = turn, len(batches)
    return best


LONE: Final = [SendBatch(Lane(LaneKey("", -1, Durability.STORED), Stream(0), 0))]
"""What is under way to a queue while a lone message is: nothing may follow, and nothing waits for its turn there."""
