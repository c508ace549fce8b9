"""The report of a member: where it stands, for people, metrics and the CLI."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["FollowerReport", "MemberReport", "Role"]


class Role(StrEnum):
    """What a member is doing."""

    STARTING = "starting"
    FOLLOWING = "following"
    WAITING = "waiting"  # for a leader, or to be allowed to stand
    STANDING = "standing"
    LEADING = "leading"
    PARKED = "parked"  # its journal has diverged, or the registry is another one or an old copy: a person decides
    STOPPED = "stopped"


class FollowerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A follower, as its leader sees it. `skew_seconds`: its clock is ahead of the leader's."""

    broker: str
    replica: int
    flushed: int
    seconds_behind: float
    is_in_sync: bool
    is_connected: bool
    skew_seconds: float = 0.0


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """A member, as it sees itself.

    Attributes:
        epoch: that it leads or follows; of the record otherwise.
        leader: the broker that leads, as the registry says; empty if that is not known.
        revision: of the record.
        obstacle: why it does not stand, or does not go on.
        right: why it may serve, if it leads.
        cuts: how often it has cut what is not part of the shard's history since this process began.
        damaged: ranges of its journal that cannot be read.
        mended: how many it has mended since this process began.
        is_serving: it leads, the start of its epoch is committed, and its broker was made.
    """

    broker: str
    shard: str
    role: Role
    replica: int = 0
    epoch: int = 0
    leader: str = ""
    leader_address: str = ""
    start: int = 0
    committed: int = 0
    end: int = 0
    flushed: int = 0
    members: tuple[str, ...] = ()
    in_sync: tuple[str, ...] = ()
    min_in_sync: int = 0
    followers: tuple[FollowerReport, ...] = ()
    revision: int = 0
    doubtful: bool = False
    obstacle: str = ""
    right: str = ""
    is_serving: bool = False
    is_registry_down: bool = False
    cuts: int = 0
    damaged: int = 0
    mended: int = 0
