"""Headers of replication: what the members of a shard say to each other, on a port of their own.

A follower connects to its leader and says how far it is (FOLLOW); the leader then pushes its journal (JOURNAL), and the
follower confirms what it has (CONFIRM). Members ask each other how far they are before an election (STANDING), a leader
hands over to a follower (HANDOVER), and a member fetches bytes that its own disk lost (REPAIR).
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import U32, Amount, Header, Name, OptionalName, Text

__all__ = [
    "JOURNAL_BYTES_MAX",
    "Confirm",
    "Follow",
    "FollowReply",
    "Handover",
    "Journal",
    "Repair",
    "RepairReply",
    "Standing",
    "StandingReply",
]

JOURNAL_BYTES_MAX: Final = 1 << 20  # of journal in one frame
_EPOCHS_MAX: Final = 64
_FOLLOWERS_MAX: Final = 16

Replica = Annotated[int, Meta(ge=0)]
# An epoch, the replica id of its leader, and the journal offset at which it began.
Row = tuple[U32, Replica, Amount]


class Follow(Header, frozen=True):
    """A member wants the leader's journal: how far its own goes, and its newest epochs."""

    cluster: Name
    shard: Name
    journal_id: Annotated[int, Meta(ge=0)]
    replica: Replica
    epoch: U32  # of the leader that it asks for, as the registry has it
    end: Amount
    epochs: Annotated[list[Row], Meta(max_length=_EPOCHS_MAX)] = []
    life: Amount = 0  # of its directory; 0 of a member that does not tell it


class FollowReply(Header, frozen=True):
    """Up to where both journals are equal, None if no epoch tells; where the leader's begins; what is committed."""

    epoch: U32
    common: Amount | None
    first: Amount
    committed: Amount
    unsafe: U32 = 0  # the epoch of the last promotion with loss; 0 for none


class Journal(Header, frozen=True):
    """Body: bytes of the leader's journal from `start` on; a unit may go on in the next frame.

    `before` has the epoch and the checksum of the unit before `start`, if one ends there. `sent` is a time of the
    leader's, which a confirmation echoes.
    """

    epoch: U32
    start: Amount
    committed: Amount
    first: Amount
    sent: float
    before: tuple[U32, U32] | None = None


class Confirm(Header, frozen=True):
    """What a follower has, and its promise not to stand for a while. `sent` is of the last frame that it heard."""

    epoch: U32
    flushed: Amount
    end: Amount
    sent: float
    now_ms: Amount = 0  # its wall clock; 0 of an older one


class Standing(Header, frozen=True):
    """Ask a member how far its journal goes, before an election."""

    cluster: Name
    shard: Name
    replica: Replica
    now_ms: Amount


class StandingReply(Header, frozen=True):
    """How far it goes, and its clock. From `role` on it is for people who look at the shard."""

    replica: Replica
    last_epoch: U32
    end: Amount
    now_ms: Amount
    is_in_sync: bool = True
    role: OptionalName = ""
    committed: Amount = 0
    promise_ms: U32 = 0  # for how long it must not stand
    revision: Amount = 0  # the highest one of the record that it has seen
    right: OptionalName = ""  # why it may serve if it leads
    obstacle: Text = ""  # why it does not stand, or does nothing at all
    damaged: U32 = 0  # ranges of its journal
    is_doubtful: bool = False  # it may lack what it has confirmed: others do not compare with it alone
    is_full: bool = False  # its disk takes no more of the journal
    silent_ms: Amount = 0  # since it last heard a leader, if it does not lead
    stalled_ms: Amount = 0  # how long the oldest waits of what it wrote as a leader and is not committed
    keeping_up: Annotated[list[Replica], Meta(max_length=_FOLLOWERS_MAX)] = []  # who follows it and does, if it leads


class Handover(Header, frozen=True):
    """A leader that gives up asks its best follower to stand now."""

    epoch: U32


class Repair(Header, frozen=True):
    """Ask a member for committed bytes of the journal."""

    cluster: Name
    shard: Name
    journal_id: Annotated[int, Meta(ge=0)]
    start: Amount
    end: Amount


class RepairReply(Header, frozen=True):
    """Body: the bytes from `start` on, as many as it has of them."""

    start: Amount
    end: Amount
