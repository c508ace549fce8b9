"""Headers of what consumers say and hear: PULL, SUBSCRIBE, CONSUMER_PUSH, CREDIT, SETTLE, SEEK, POSITION, ASSIGN.

What always holds: a lease is named by (topic, group, queue, epoch, lease number), never by a connection, so a member
that lost its connection settles what it holds over the next one. Times are durations in milliseconds, because the two
clocks need not agree. Records come verbatim, as the journal has them: each says its own queue offset.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Annotated

from msgspec import Meta

from dmq.protocol.header import LIST_MAX, U16, U32, U64, Amount, Bits, Header, Name, OptionalName, Queue, Text

__all__ = [
    "Assign",
    "Credit",
    "GroupMembers",
    "Lease",
    "LeaseRef",
    "Outcome",
    "Point",
    "PointKind",
    "Position",
    "PositionReply",
    "Pull",
    "PullReply",
    "Push",
    "QueueMove",
    "QueuePosition",
    "Refusal",
    "Seek",
    "SeekReply",
    "Settle",
    "SettleReply",
    "Settlement",
    "Subscribe",
    "SubscribeFlag",
    "SubscribeReply",
    "SubscriptionEnded",
    "Unsubscribe",
]

Range = tuple[Amount, Annotated[int, Meta(ge=1, le=LIST_MAX)]]  # first queue offset, count
IdRun = tuple[Annotated[int, Meta(ge=1, le=LIST_MAX)], U64, U64]  # count, producer id, first sequence


class PointKind(IntEnum):
    """How a place in a queue is named."""

    EARLIEST = 0
    LATEST = 1
    OFFSET = 2  # value: a queue offset
    TIME = 3  # value: ms since 1970; the first message stored then or later
    BACK = 4  # value: ms; as TIME, so long before now


class Point(Header, frozen=True):
    """A place in a queue."""

    kind: PointKind = PointKind.EARLIEST
    value: Amount = 0


class LeaseRef(Header, frozen=True):
    """A lease that a member still holds from a connection before."""

    topic: Name
    queue: Queue
    epoch: U32
    lease: Amount


class Pull(Header, frozen=True):
    """Client to broker: a batch, now or within `wait_ms`."""

    topic: Name
    group: Name
    member: OptionalName = ""  # "" is the client id of the hello
    queue: Queue = 255  # ANY_QUEUE lets the broker choose
    max_messages: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 100
    max_bytes: U32 = 0  # 0 is the broker's default; one message always comes, however large
    wait_ms: U32 = 0
    lease_ms: U32 = 0  # 0 is the broker's default
    tags: Text = ""  # "a || b"; "" is all
    version: U32 = 0  # of the filter
    flags: Bits = 0  # SubscribeFlag
    start_from: Point = Point()  # where a new group begins
    parallel: U32 = 0  # messages of one queue that may be out at once; 0 means no limit
    max_attempts: U32 = 0  # 0 is for ever
    # With the first pull over a connection: the leases that the member holds. Its others go back untried: their answer
    # or their ack was lost with the connection before. None leaves them alone.
    holding: Annotated[list[LeaseRef], Meta(max_length=LIST_MAX)] | None = None


class Lease(Header, frozen=True):
    """A range of a queue handed to a member. It has gaps where the filter or an earlier ack left messages out."""

    queue: Queue
    epoch: U32
    lease: Amount  # its number
    first_offset: Amount
    end_offset: Amount  # one past the last
    count: U32  # messages of it in this frame
    attempt: Annotated[int, Meta(ge=1, le=0xFFFF_FFFF)]
    lease_ms: U32  # counted from when the frame was sent
    topic: OptionalName = ""  # if it is not the one asked for: the group's retry topic
    # Who sent the messages, in order, batch by batch; producer 0 stands for moved records, which carry their ids.
    ids: Annotated[list[IdRun], Meta(max_length=LIST_MAX)] = []
    # Rises when the group's position in this queue is set by hand: what comes from then on may have been here before.
    sought: Amount = 0


class PullReply(Header, frozen=True):
    """What was handed out; nothing after `wait_ms` without messages.

    Body: the records of all leases in order, see `dmq.protocol.batch.pack_records`.
    """

    leases: Annotated[list[Lease], Meta(max_length=LIST_MAX)] = []


class SubscribeFlag(IntFlag):
    """Bits of `Subscribe.flags` and `Pull.flags`."""

    ORDERED = 0x01  # one lease per queue at a time, failing messages in place
    BROADCAST = 0x02  # every member, named by its client id, gets everything


class Subscribe(Header, frozen=True):
    """Client to broker; the answer is SUBSCRIBE_ACK. After it, the broker pushes while the subscription has credit.

    Credit is what may be out unsettled, in messages and in bytes. Settling returns it. Sent again as itself after a
    reconnect, with the leases still held, so that only the others are handed out again.
    """

    subscription: U32  # chosen by the client, unique on its connection
    topic: Name
    group: Name
    member: OptionalName = ""
    tags: Text = ""
    version: U32 = 0
    prefetch_messages: U32 = 0  # 0 is the broker's default
    prefetch_bytes: U32 = 0
    lease_ms: U32 = 0
    batch: U32 = 0  # messages in one lease at most
    parallel: U32 = 0
    flags: Bits = 0
    start_from: Point = Point()
    max_attempts: U32 = 0
    queues: Annotated[list[Queue], Meta(max_length=255)] = []  # only these; none is all, as the broker spreads them
    holding: Annotated[list[LeaseRef], Meta(max_length=LIST_MAX)] = []
    # How the members divide the queues among themselves; "" lets the broker. With one, `queues` may be none at all, and
    # GROUP_MEMBERS follows.
    strategy: OptionalName = ""


class SubscribeReply(Header, frozen=True):
    """SUBSCRIBE_ACK: what is in force. The backlog follows after `offline_delay_ms`."""

    subscription: U32
    queues: U32  # of the topic
    prefetch_messages: U32
    prefetch_bytes: U32
    lease_ms: U32
    offline_delay_ms: U32 = 0
    lost: Annotated[list[LeaseRef], Meta(max_length=LIST_MAX)] = []  # those of `holding` that are gone


class Unsubscribe(Header, frozen=True):
    """Client to broker: no more pushes. Leases go back at once, or stay to be settled until they time out.

    A member that pulls has no subscription: it leaves by its names.
    """

    subscription: U32
    release: bool = True
    topic: OptionalName = ""
    group: OptionalName = ""
    member: OptionalName = ""


class SubscriptionEnded(Header, frozen=True):
    """Broker to client, one-way: this subscription gets nothing more. `status` says why, as in a response."""

    subscription: U32
    status: U16
    message: Text = ""


class GroupMembers(Header, frozen=True):
    """Broker to client, one-way: what a subscription with a strategy divides, now and whenever that changes."""

    subscription: U32
    queues: U32  # of the topic
    members: Annotated[list[Name], Meta(max_length=LIST_MAX)]  # that are connected


class Assign(Header, frozen=True):
    """Client to broker: from now on push of these queues only, or of none."""

    subscription: U32
    queues: Annotated[list[Queue], Meta(max_length=255)] = []


class Push(Header, frozen=True):
    """CONSUMER_PUSH, broker to client, one-way. Body as in PULL's answer."""

    subscription: U32
    leases: Annotated[list[Lease], Meta(max_length=LIST_MAX)]


class Credit(Header, frozen=True):
    """Client to broker, one-way: let so much more (or, below zero, less) be out unsettled from now on."""

    subscription: U32
    messages: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
    bytes: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0


class Outcome(IntEnum):
    """What a member says of messages it was handed."""

    ACK = 1
    NACK = 2  # again, after `delay_ms` or as the retry table says
    REJECT = 3  # never again: a dead letter
    EXTEND = 4  # not yet: the lease runs for `delay_ms` from now
    RELEASE = 5  # not touched: hand it to somebody else, at once or after `delay_ms`; the attempt does not count


class Settlement(Header, frozen=True):
    """One outcome for one lease, or for some ranges of it."""

    queue: Queue
    epoch: U32
    lease: Amount
    outcome: Outcome
    ranges: Annotated[list[Range], Meta(max_length=LIST_MAX)] = []  # none is the whole lease
    delay_ms: Annotated[int, Meta(ge=-1, le=(1 << 62))] = -1  # -1 leaves it to the broker
    reason: Text = ""
    topic: OptionalName = ""  # as in the lease


class Settle(Header, frozen=True):
    """Client to broker (UP_CONSUMER_ACK), as a request or one-way. Never sent again: leases time out."""

    topic: Name
    group: Name
    settlements: Annotated[list[Settlement], Meta(max_length=LIST_MAX)]
    member: OptionalName = ""


class Refusal(Header, frozen=True):
    """One settlement that did not count, by its index in the request; the texts of many are left out."""

    index: U32
    status: U16
    message: Text = ""


class SettleReply(Header, frozen=True):
    """Empty when all counted."""

    refused: Annotated[list[Refusal], Meta(max_length=LIST_MAX)] = []


class Seek(Header, frozen=True):
    """Client to broker: move a group's position. A dry run only says what would happen."""

    topic: Name
    group: Name
    to: Point
    queue: Queue = 255  # ANY_QUEUE is all of them
    dry_run: bool = False
    flags: Bits = 0  # SubscribeFlag: with BROADCAST, the place of this member


class QueueMove(Header, frozen=True):
    """From where to where a position was, or would be, moved."""

    queue: Queue
    before: Amount
    after: Amount


class SeekReply(Header, frozen=True):
    """One entry a queue."""

    moves: Annotated[list[QueueMove], Meta(max_length=255)]


class Position(Header, frozen=True):
    """Ask how far a group is, in one topic or in all it consumes."""

    group: Name
    topic: OptionalName = ""


class QueuePosition(Header, frozen=True):
    """A group in one queue. Lag is `next_offset - floor - settled`: what is out, and what is still to come."""

    topic: Name
    queue: Queue
    first_offset: Amount  # the oldest kept
    next_offset: Amount  # of the next message to be stored
    floor: Amount  # everything below is settled
    handed_out: Amount  # one past the last that was handed out
    settled: Amount = 0  # above the floor
    leased: Amount = 0
    oldest_ms: Amount = 0  # age of the oldest message that is not settled
    retrying: Amount = 0  # failed, and wait for another attempt; not part of the lag
    dropped: Amount = 0  # by retention, before the group had consumed them
    is_holding: bool = False  # retention waits for the group here


class PositionReply(Header, frozen=True):
    """One entry a queue."""

    positions: Annotated[list[QueuePosition], Meta(max_length=LIST_MAX)]
