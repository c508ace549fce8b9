"""The record of a shard, built anew from what its members say, when the registry is an old copy or lacks it. Pure code.

Every member keeps the newest record that it has seen. If one of them leads, its record is the one: nobody else can have
been elected. If nobody does, the journals decide: of all members, the one that goes furthest in the newest epoch has
everything that was acknowledged, as after an election. With members missing that is sure only if fewer are missing than
have every acknowledged message.

What always holds: the revision is above every one that a member has seen, and the epoch not below any in a journal; a
loss that is possible is accepted by a person, and the record says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dmq.errors import DMQError, InvalidSettings, ShardConflict
from dmq.protocol.cluster.member import MemberState
from dmq.registry.contents import ShardContent, decode_content

__all__ = ["rebuilt_record"]


def rebuilt_record(
    shard: str, states: Sequence[MemberState], found: ShardContent | None, *, accept_loss: bool
) -> ShardContent | None:
    """The record as it should be; None if that of the registry is as new as any.

    Parameters:
        states: what members say, one for each.
        found: what the registry has.

    Raises:
        InvalidSettings: they are not members of one shard.
        ShardConflict: something may be lost, and that is not accepted.
    """
    if len({(one.cluster, one.shard, one.journal) for one in states}) != 1:
        told = "; ".join(f"{one.broker}: shard {one.shard} of cluster {one.cluster}" for one in states)
        raise InvalidSettings(f"these are not members of one shard: {told}")
    base = max((*filter(None, map(_kept, states)), *filter(None, [found])), key=_revision, default=None)
    if base is None:
        base = ShardContent(number=0, members={one.broker: one.replica for one in states})
    seen = max(one.revision for one in states)
    if found is not None and found.revision >= max(seen, base.revision):
        return None
    answered = [one for one in states if base.members.get(one.broker) == one.replica]
    if not answered:
        known = ", ".join(base.members)
        raise InvalidSettings(f"none of them is a member of shard {shard!r} by its last record, which has {known}")
    newest = max(one.last_epoch for one in answered)
    leading = [one for one in answered if one.role == "leading" and one.last_epoch == newest >= base.epoch]
    base = msgspec.structs.replace(
        base,
        journal=states[0].journal,
        revision=max(seen, base.revision) + 1,
        epoch=max(base.epoch, newest),
        lives=base.lives | {one.replica: max(one.life, base.lives.get(one.replica, 0)) for one in answered},
        marks=base.marks | {one.replica: one.mark for one in answered if one.mark},
    )
    if leading:
        (leader,) = leading[:1]
        in_sync = base.in_sync if (base.leader, base.epoch) == (leader.replica, newest) else [leader.replica]
        return msgspec.structs.replace(base, leader=leader.replica, in_sync=in_sync)
    best = max(answered, key=lambda one: (one.last_epoch, one.end, not one.is_doubtful, one.replica == base.leader))
    why = _possible_loss(base, answered, newest)
    if why and not accept_loss:
        raise ShardConflict(
            f"nothing was changed: shard {shard} would be led by {best.broker}, and {why}. Start them and name them, "
            "too, or say --accept-loss",
            shard=shard,
        )
    unsafe = base.epoch + 1 if why else base.unsafe
    return msgspec.structs.replace(base, leader=None, in_sync=[best.replica], unsafe=unsafe)


def _possible_loss(record: ShardContent, answered: Sequence[MemberState], newest: int) -> str:
    """What may be lost if the furthest of those that answered leads; nothing if nothing can be."""
    heard = {one.broker for one in answered}
    missing = [name for name in record.members if name not in heard]
    if not missing:
        return ""
    if record.asynchronous:
        leader = next((name for name, one in record.members.items() if one == record.leader), "the leader")
        return "" if leader in heard and newest <= record.epoch else f"{leader} may have more, which did not answer"
    # A member may have joined a place that is free in this record, since the last ones are noted a moment later.
    sure = sum(not one.is_doubtful for one in answered)
    if max(record.replicas, len(record.members)) - sure < record.min_in_sync:
        return ""
    return f"{', '.join(missing)} may have acknowledged messages that it lacks, and did not answer"


def _kept(state: MemberState) -> ShardContent | None:
    if not state.record:
        return None
    try:
        return decode_content(ShardContent, state.record, f"the record that {state.broker} keeps")
    except DMQError:
        return None


def _revision(record: ShardContent) -> int:
    return record.revision
