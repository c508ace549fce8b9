"""The election: who stands, in which order, and the one write that decides. Pure code.

A shard has no leader while its entry `/leader` is absent. Then members of the in-sync set stand: they ask each other
how far their journals go, and the furthest writes first. The write is one transaction that creates `/leader` and puts
the shard's record in the version that was read, so at most one wins an epoch, and a winner knows that nobody changed
the set since it looked.

What always holds: only a member of the recorded set stands, with its promise over, and after it has stopped following;
the new epoch is higher than the record's and than any in its own journal; the new set is not smaller than `min_in_sync`
as long as the old one was not; a write whose answer is not known counts as lost, and before its member stands again it
deletes its own `/leader` in a write that is answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from dmq.registry.contents import ShardContent, hex_id

__all__ = ["Obstacle", "Situation", "Standing", "delay_of", "has_compared", "obstacle", "won_record"]

STEP_SECONDS: Final = 0.2  # between those that stand, the furthest first
SKEW_SECONDS: Final = 5.0  # a clock that is further off makes its member the last to stand


class Standing(msgspec.Struct, frozen=True):
    """How far the journal of a member goes, as it says when it is asked."""

    replica: int
    last_epoch: int
    end: int
    skew_seconds: float = 0.0
    is_doubtful: bool = False


class Obstacle(StrEnum):
    """Why a member does not stand now."""

    NONE = "none"
    LED = "the shard has a leader"
    NOT_IN_SYNC = "it is not in the in-sync set"
    PROMISED = "it has promised not to"
    FOLLOWING = "it still follows"
    DOUBTFUL = "its tail was cut or damaged, and no other in-sync member shows that nothing committed is missing"
    DAMAGED = (
        "its journal has damage that it could not read when it opened: another member must give it the bytes first"
    )
    LEADER_DAMAGED = (
        "the leader's journal is damaged where this member goes on, and no other member has given it these bytes"
    )
    UNSETTLED = "an earlier write of its own is not settled"
    DRAINED = "it is drained"
    OLD_REGISTRY = "the registry's record is older than one that it has seen"


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What a member knows when it asks itself whether to stand.

    Attributes:
        is_led: `/leader` is there.
        is_promised: its promise is not over.
        is_following: it still takes a leader's units.
        is_doubtful: see `storage.upkeep.identity.Membership`.
        has_compared: see the function of that name.
        has_holes: what it derived from its journal lacks what could not be read: see `storage.upkeep.damage`.
        is_unsettled: a write of its own has no answer, and no later one has.
        revision_seen: the highest revision of the record that it has seen.
        is_drained: it is not to lead until it is put back in use.
    """

    replica: int
    record: ShardContent
    is_led: bool
    is_promised: bool
    is_following: bool
    is_doubtful: bool
    has_compared: bool
    has_holes: bool = False
    is_unsettled: bool = False
    revision_seen: int = 0
    is_drained: bool = False


def obstacle(situation: Situation) -> Obstacle:
    """What keeps a member from standing; NONE if nothing does."""
    record, own = situation.record, hex_id(situation.replica)
    checks = (
        (record.revision < situation.revision_seen, Obstacle.OLD_REGISTRY),
        (situation.is_led, Obstacle.LED),
        (own not in record.in_sync, Obstacle.NOT_IN_SYNC),
        (situation.is_drained, Obstacle.DRAINED),
        (situation.is_unsettled, Obstacle.UNSETTLED),
        (situation.is_promised, Obstacle.PROMISED),
        (situation.is_following, Obstacle.FOLLOWING),
        (
            situation.is_doubtful and not situation.has_compared and record.in_sync != [own],
            Obstacle.DOUBTFUL,
        ),
        # It would give offsets to messages that others have already.
        (situation.has_holes and record.in_sync != [own], Obstacle.DAMAGED),
    )
    return next((why for is_so, why in checks if is_so), Obstacle.NONE)


def has_compared(own: Standing, others: Iterable[Standing], record: ShardContent) -> bool:
    """Whether a doubtful member knows that it lacks nothing that was committed.

    It does if a member of the set that is not doubtful goes no further. If all are doubtful, as after a loss of power,
    all of them must have said how far they go: what one of them has lost, another one may have.

    Parameters:
        others: what other members have said.
    """
    in_set = [other for other in others if hex_id(other.replica) in record.in_sync and other.replica != own.replica]
    if any((other.last_epoch, other.end) > (own.last_epoch, own.end) for other in in_set):
        return False
    is_all = {hex_id(other.replica) for other in in_set} >= {*record.in_sync} - {hex_id(own.replica)}
    return is_all or any(not other.is_doubtful for other in in_set)


def delay_of(own: Standing, others: Iterable[Standing]) -> float:
    """How long a member waits before it writes: nothing if its journal goes furthest, a step for each before it."""
    everybody = sorted([own, *others], key=_order)
    return STEP_SECONDS * everybody.index(own)


def _order(standing: Standing) -> tuple[bool, int, int, int]:
    """The furthest first; among equals the smaller id, so that all give the same answer."""
    is_skewed = abs(standing.skew_seconds) > SKEW_SECONDS
    return is_skewed, -standing.last_epoch, -standing.end, standing.replica


def won_record(record: ShardContent, replica: int, last_epoch: int, registered: Iterable[int]) -> ShardContent:
    """The record as the member that stands wants to write it.

    Parameters:
        record: as it was read; it is put with a check of its version.
        last_epoch: the newest epoch in its own journal.
        registered: replica ids of members that are there.
    """
    own = hex_id(replica)
    there = {hex_id(other) for other in registered} | {own}
    kept = [other for other in record.in_sync if other in there]
    # Who is not there leaves the set, but never so many that fewer than the least are left: they could not be elected.
    for other in record.in_sync:
        if len(kept) >= record.least:
            break
        if other not in kept:
            kept.append(other)
    return msgspec.structs.replace(
        record,
        revision=record.revision + 1,
        leader=own,
        epoch=max(record.epoch, last_epoch) + 1,
        in_sync=sorted(kept),
    )
