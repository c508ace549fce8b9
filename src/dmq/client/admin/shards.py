"""The conversations about shards, and what they return.

What always holds: any member is asked, whether it leads or not, but a hand-over is asked of the leader, and a repair of
the member whose journal is to be mended.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmq.client.admin.calls import Call
from dmq.errors import InvalidSettings
from dmq.model import check_name
from dmq.protocol import Command, decode_response
from dmq.protocol.cluster import shard as headers

__all__ = [
    "RepairReport",
    "ShardChange",
    "ShardFinding",
    "ShardMember",
    "ShardReport",
    "added",
    "changed",
    "created",
    "drained",
    "handed_over",
    "listed",
    "promoted",
    "removed",
    "repaired",
    "shown",
]

REPLICAS_MAX = 7
WEIGHT_MAX = 10_000
STATES = ("open", "read-only", "leaving")


@dataclass(frozen=True, slots=True)
class ShardFinding:
    """What is to be known of a shard, and what to do about it."""

    severity: str  # ok, warning or problem
    what: str
    advice: str

    @classmethod
    def of(cls, found: headers.ShardFinding) -> ShardFinding:
        return cls(found.severity.name.lower(), found.what, found.advice)


@dataclass(frozen=True, slots=True)
class ShardMember:
    """One member of a shard. What only the member itself knows is None if it did not answer."""

    name: str
    role: str  # leader, follower, or what else it does: waiting, standing, parked; down if it does not run
    is_in_sync: bool  # it runs, and has everything that is acknowledged
    is_electable: bool  # it is recorded as in sync: it has everything that is acknowledged, and may not run
    is_registered: bool
    is_reached: bool
    replica: str
    address: str
    replication_address: str
    zone: str
    version: str
    epoch: int | None
    end: int | None
    committed: int | None
    lag: int | None  # bytes of the leader's journal that it has not
    promise: float | None  # seconds for which it must not stand
    clock_skew: float | None  # seconds by which its clock is ahead
    obstacle: str  # why it does not stand
    damaged: int  # ranges of its journal
    is_drained: bool  # it does not lead until it is put back in use
    is_doubtful: bool  # its journal lost its end or was damaged, and it has not caught up since

    @classmethod
    def of(cls, info: headers.ShardMember) -> ShardMember:
        return cls(
            name=info.name,
            role=info.role,
            is_in_sync=info.is_in_sync,
            is_electable=info.is_recorded,
            is_registered=info.is_registered,
            is_reached=info.is_reached,
            replica=info.replica,
            address=info.address,
            replication_address=info.replication_address,
            zone=info.zone,
            version=info.version,
            epoch=info.epoch,
            end=info.end,
            committed=info.committed,
            lag=info.lag,
            promise=None if info.promise_ms is None else info.promise_ms / 1000,
            clock_skew=None if info.clock_skew_ms is None else info.clock_skew_ms / 1000,
            obstacle=info.obstacle,
            damaged=info.damaged,
            is_drained=info.is_drained,
            is_doubtful=info.is_doubtful,
        )


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A shard, its members, and what is to be known of it, the most important first."""

    name: str
    number: int
    revision: int
    epoch: int
    leader: str | None
    members: tuple[ShardMember, ...]
    min_in_sync: int
    replicas: int
    state: str
    unsafe_epoch: int  # of the last promotion with loss; 0 for none
    findings: tuple[ShardFinding, ...]
    weight: int  # its share of the messages that may go to any shard
    is_asynchronous: bool  # what the leader alone has flushed is acknowledged

    @property
    def in_sync(self) -> tuple[str, ...]:
        """The names of the members that are in sync."""
        return tuple(member.name for member in self.members if member.is_in_sync)

    @property
    def health(self) -> str:
        """The severity of the most important finding: ok, warning or problem."""
        return self.findings[0].severity if self.findings else "ok"

    @classmethod
    def of(cls, info: headers.ShardShowReply) -> ShardReport:
        return cls(
            name=info.name,
            number=info.number,
            revision=info.revision,
            epoch=info.epoch,
            leader=info.leader or None,
            members=tuple(map(ShardMember.of, info.members)),
            min_in_sync=info.min_in_sync,
            replicas=info.replicas,
            state=info.state,
            unsafe_epoch=info.unsafe,
            findings=tuple(map(ShardFinding.of, info.findings)),
            weight=info.weight,
            is_asynchronous=info.is_asynchronous,
        )


@dataclass(frozen=True, slots=True)
class ShardChange:
    """What was done, in words, and the shard as it is now."""

    done: str
    shard: ShardReport

    @classmethod
    def of(cls, reply: headers.ShardChange) -> ShardChange:
        return cls(reply.done, ShardReport.of(reply.shard))


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Ranges of a member's journal that were damaged, and why some are left."""

    member: str
    mended: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]
    reason: str


def listed() -> Call[list[ShardReport]]:
    found: list[ShardReport] = []
    after = ""
    while True:
        reply: headers.ShardListReply = decode_response((yield Command.SHARD_LIST, headers.ShardList(after)))
        found += map(ShardReport.of, reply.shards)
        after = reply.next
        if not after:
            return found


def shown(name: str) -> Call[ShardReport]:
    asked = headers.ShardShow(_optional(name, "shard"))
    info: headers.ShardShowReply = decode_response((yield Command.SHARD_SHOW, asked))
    return ShardReport.of(info)


def changed(asked: headers.ShardSet) -> Call[ShardChange]:
    _check_counts(min_in_sync=asked.min_in_sync, replicas=asked.replicas)
    if asked.weight is not None and (type(asked.weight) is not int or not 0 <= asked.weight <= WEIGHT_MAX):
        raise InvalidSettings(f"weight is a number from 0 to {WEIGHT_MAX}, not {asked.weight!r}")
    if asked.state not in ("", *STATES):
        raise InvalidSettings(f"state is one of {', '.join(STATES)}, not {asked.state!r}")
    _optional(asked.shard, "shard")
    _optional(asked.remove, "broker")
    if asked == headers.ShardSet(asked.shard):
        raise InvalidSettings(
            "there is nothing to change: give min_in_sync=, replicas=, weight=, state=, asynchronous= or remove="
        )
    return ShardChange.of(decode_response((yield Command.SHARD_SET, asked)))


def created(name: str, replicas: int, min_in_sync: int) -> Call[ShardChange]:
    _check_counts(min_in_sync=min_in_sync, replicas=replicas)
    asked = headers.ShardCreate(check_name(name, "shard"), replicas, min_in_sync)
    return ShardChange.of(decode_response((yield Command.SHARD_CREATE, asked)))


def added(member: str, shard: str) -> Call[ShardChange]:
    asked = headers.ShardAdd(check_name(member, "broker"), _optional(shard, "shard"))
    return ShardChange.of(decode_response((yield Command.SHARD_ADD, asked)))


def removed(member: str, shard: str) -> Call[ShardChange]:
    asked = headers.ShardRemove(check_name(member, "broker"), _optional(shard, "shard"))
    return ShardChange.of(decode_response((yield Command.SHARD_REMOVE, asked)))


def drained(member: str, shard: str, *, undo: bool) -> Call[ShardChange]:
    asked = headers.ShardDrain(check_name(member, "broker"), _optional(shard, "shard"), undo)
    return ShardChange.of(decode_response((yield Command.SHARD_DRAIN, asked)))


def promoted(member: str, shard: str, *, accept_loss: bool) -> Call[ShardChange]:
    asked = headers.ShardPromote(check_name(member, "broker"), _optional(shard, "shard"), accept_loss)
    return ShardChange.of(decode_response((yield Command.SHARD_PROMOTE, asked)))


def handed_over(shard: str, to: str) -> Call[ShardChange]:
    asked = headers.ShardHandover(_optional(to, "broker"), _optional(shard, "shard"))
    return ShardChange.of(decode_response((yield Command.SHARD_HANDOVER, asked)))


def repaired() -> Call[RepairReport]:
    while True:
        reply: headers.ShardRepairReply = decode_response((yield Command.SHARD_REPAIR, headers.ShardRepair()))
        if not reply.is_under_way:
            break
    return RepairReport(reply.member, tuple(reply.mended), tuple(reply.left), reply.reason)


def _check_counts(**counts: int | None) -> None:
    for label, value in counts.items():
        if value is not None and (type(value) is not int or not 0 < value <= REPLICAS_MAX):
            raise InvalidSettings(f"{label} is a number from 1 to {REPLICAS_MAX}, not {value!r}")


def _optional(name: str, kind: str) -> str:
    return name and check_name(name, kind)
