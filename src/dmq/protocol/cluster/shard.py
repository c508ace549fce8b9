"""Headers about shards, for people who operate them: SHARD_LIST to SHARD_DRAIN.

Any member of the cluster answers them on the port of clients, whether it leads or not. A shard of no name is that of
the member that was asked.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import U32, Amount, Header, Name, OptionalName, Text

__all__ = [
    "RANGES_MAX",
    "SHARDS_MAX",
    "SKEW_MS_MAX",
    "Severity",
    "ShardAdd",
    "ShardChange",
    "ShardCreate",
    "ShardDrain",
    "ShardFinding",
    "ShardHandover",
    "ShardList",
    "ShardListReply",
    "ShardMember",
    "ShardPromote",
    "ShardRemove",
    "ShardRepair",
    "ShardRepairReply",
    "ShardSet",
    "ShardShow",
    "ShardShowReply",
]

SHARDS_MAX: Final = 100  # in one answer
SKEW_MS_MAX: Final = 1_000_000_000
_MEMBERS_MAX: Final = 16
_FINDINGS_MAX: Final = 64
RANGES_MAX: Final = 1000

Count = Annotated[int, Meta(ge=1, le=7)]
Weight = Annotated[int, Meta(ge=0, le=10_000)]
Skew = Annotated[int, Meta(ge=-SKEW_MS_MAX, le=SKEW_MS_MAX)]


class Severity(IntEnum):
    """How much a finding matters."""

    OK = 0
    WARNING = 1  # it works, and something should be done
    PROBLEM = 2  # it does not work


class ShardFinding(Header, frozen=True):
    """What is to be known of a shard, and what to do about it."""

    severity: Severity
    what: Text
    advice: Text = ""


class ShardMember(Header, frozen=True):
    """One member of a shard.

    What only the member itself knows is none if it does not answer.
    """

    name: Name
    replica: Name  # 16 hexadecimal digits
    role: Name  # leader, follower, or what else it does; down if it does not run
    is_recorded: bool  # it stands in the in-sync set of the record, so it can be elected
    is_in_sync: bool  # and it runs
    is_registered: bool
    is_reached: bool  # it answers on the port for members
    address: Text = ""
    replication_address: Text = ""
    zone: Text = ""
    version: Text = ""
    epoch: U32 | None = None  # the newest one in its journal
    end: Amount | None = None
    committed: Amount | None = None
    lag: Amount | None = None  # bytes of the leader's journal that it has not
    promise_ms: U32 | None = None  # for how long it must not stand
    clock_skew_ms: Skew | None = None  # its clock is ahead of that of the member that was asked
    obstacle: Text = ""  # why it does not stand
    damaged: U32 = 0  # ranges of its journal
    is_drained: bool = False  # it does not lead until it is put back in use
    is_doubtful: bool = False  # its journal lost its end or was damaged, and it has not caught up since


class ShardShowReply(Header, frozen=True):
    """A shard: its record in the registry, and what its members say."""

    name: Name
    number: U32
    revision: Amount
    epoch: U32
    leader: OptionalName  # "" if there is none
    members: Annotated[list[ShardMember], Meta(max_length=_MEMBERS_MAX)]
    min_in_sync: Count
    replicas: Count
    state: Name
    unsafe: U32 = 0  # the epoch of the last promotion with loss
    findings: Annotated[list[ShardFinding], Meta(max_length=_FINDINGS_MAX)] = []  # the most important first
    weight: U32 = 100  # its share of the messages that may go to any shard
    is_asynchronous: bool = False  # what the leader alone has flushed is acknowledged


class ShardList(Header, frozen=True):
    """Ask for the shards, by name, from one name on."""

    after: OptionalName = ""
    limit: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] = SHARDS_MAX


class ShardListReply(Header, frozen=True):
    """`next` is what to ask for `after`; empty if these are all."""

    shards: Annotated[list[ShardShowReply], Meta(max_length=SHARDS_MAX)]
    next: OptionalName = ""


class ShardShow(Header, frozen=True):
    """Ask for one shard."""

    shard: OptionalName = ""


class ShardSet(Header, frozen=True):
    """Change the record of a shard; what is none stays."""

    shard: OptionalName = ""
    min_in_sync: Count | None = None
    replicas: Count | None = None
    remove: OptionalName = ""  # a member that is gone for good
    is_asynchronous: bool | None = None
    state: OptionalName = ""  # open, read-only or leaving
    weight: Weight | None = None


class ShardCreate(Header, frozen=True):
    """Make the record of a shard before its members are started."""

    shard: Name
    replicas: Count = 3
    min_in_sync: Count = 2


class ShardAdd(Header, frozen=True):
    """Have a place for a broker in a shard."""

    member: Name
    shard: OptionalName = ""


class ShardRemove(Header, frozen=True):
    """Take a member out of its shard, whether it runs or not; a leader hands over first."""

    member: Name
    shard: OptionalName = ""


class ShardDrain(Header, frozen=True):
    """Let a member lead no more, or again."""

    member: Name
    shard: OptionalName = ""
    undo: bool = False


class ShardPromote(Header, frozen=True):
    """Let a member lead that may lack what was acknowledged."""

    member: Name
    shard: OptionalName = ""
    accept_loss: bool = False  # without it nothing is done, and the error says what would be lost


class ShardHandover(Header, frozen=True):
    """Let another member lead; the leader is asked, and its best follower taken if none is named."""

    to: OptionalName = ""
    shard: OptionalName = ""


class ShardChange(Header, frozen=True):
    """What was done, and the shard as it is now."""

    done: Text
    shard: ShardShowReply


class ShardRepair(Header, frozen=True):
    """Mend what is damaged in the journal of the member that is asked, from the other members."""


class ShardRepairReply(Header, frozen=True):
    """Ranges of the journal; why those that are left are left.

    A large journal takes longer than an answer may: while the repair is under way, asking again waits for the same one.
    """

    member: Name
    mended: Annotated[list[tuple[Amount, Amount]], Meta(max_length=RANGES_MAX)]
    left: Annotated[list[tuple[Amount, Amount]], Meta(max_length=RANGES_MAX)] = []
    reason: Text = ""
    is_under_way: bool = False
