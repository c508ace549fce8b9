"""The change of a shard's record that a person asks for: what the record should be then, or why it must not. Pure code.

What always holds: a change has the next revision; none makes the in-sync set smaller than `min_in_sync` but a promotion
with loss, which says so; a record that is older than one that a member has seen is not changed.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import msgspec

from dmq.errors import InvalidSettings, ShardConflict, UnknownEntry
from dmq.registry.contents import MEMBERS_MAX, REMOVED_MAX, ShardContent, ShardState
from dmq.shard.admin.overview import MemberView, Overview

__all__ = ["RecordChange", "changed_record", "check_expulsion", "difference", "known_member", "promoted_record"]


class RecordChange(NamedTuple):
    """What is to be changed in a record; None and "" leave it as it is.

    Attributes:
        remove: a member that is gone for good, and whose place is free for another one.
        asynchronous: what the leader alone has flushed is committed, and a failover needs a command.
        weight: its share of the messages that may go to any shard; 100 is usual.
        add: a broker for which there is to be a place.
        expel: a member that is to be one no more, whether it runs or not; its place goes, too.
        drain, undrain: a broker that is not to lead; one that may lead again.
    """

    min_in_sync: int | None = None
    replicas: int | None = None
    remove: str = ""
    asynchronous: bool | None = None
    state: ShardState | None = None
    weight: int | None = None
    add: str = ""
    expel: str = ""
    drain: str = ""
    undrain: str = ""


def changed_record(view: Overview, change: RecordChange) -> ShardContent | None:
    """The record with a change; None if it is so already.

    Raises:
        UnknownEntry, InvalidSettings, ShardConflict: it must not be.
    """
    before = view.record
    _check_current(view)
    wanted = msgspec.structs.replace(
        before,
        min_in_sync=before.min_in_sync if change.min_in_sync is None else change.min_in_sync,
        replicas=before.replicas if change.replicas is None else change.replicas,
        asynchronous=before.asynchronous if change.asynchronous is None else change.asynchronous,
        state=before.state if change.state is None else change.state,
        weight=before.weight if change.weight is None else change.weight,
    )
    if change.remove and change.remove in before.members:
        wanted = _without(wanted, _removable(view, change.remove))
    if change.expel and change.expel in before.members:
        if change.expel == view.leader:
            raise ShardConflict(
                f"{change.expel} leads shard {view.name}: another member must lead first", member=change.expel
            )
        wanted = _expelled(wanted, known_member(view, change.expel))
    if change.add:
        wanted = _with_place(wanted, change.add)
    if change.drain:
        wanted = _drained(view, wanted, change.drain)
    if change.undrain in wanted.drained:
        wanted = msgspec.structs.replace(wanted, drained=[one for one in wanted.drained if one != change.undrain])
    _check_numbers(before, wanted)
    return None if wanted == before else msgspec.structs.replace(wanted, revision=before.revision + 1)


def _check_numbers(before: ShardContent, wanted: ShardContent) -> None:
    least, most, members = wanted.min_in_sync, wanted.replicas, wanted.members
    if len(wanted.in_sync) < len(before.in_sync) and len(wanted.in_sync) < wanted.least:
        gone = ", ".join(name for name in before.members if name not in members)
        raise ShardConflict(
            f"without {gone} only {len(wanted.in_sync)} would be left in the in-sync set, and min_in_sync is "
            f"{least}: let another member catch up first, or lower --min-in-sync, too",
            in_sync=len(wanted.in_sync),
            min_in_sync=least,
        )
    if least > most:
        raise InvalidSettings(
            f"min_in_sync {least} is above replicas {most}: no send would ever be answered; choose at most {most}"
        )
    if len(members) > most:
        raise InvalidSettings(
            f"the shard has {len(members)} members ({', '.join(members)}), and replicas would be {most}: stop one and "
            "remove it (--remove) first"
        )


def _without(record: ShardContent, member: MemberView) -> ShardContent:
    gone = member.replica
    return msgspec.structs.replace(
        record,
        members={name: one for name, one in record.members.items() if name != member.name},
        in_sync=[one for one in record.in_sync if one != gone],
        lives={one: life for one, life in record.lives.items() if one != gone},
        marks={one: mark for one, mark in record.marks.items() if one != gone},
        drained=[name for name in record.drained if name != member.name],
    )


def _removable(view: Overview, name: str) -> MemberView:
    member = known_member(view, name)
    if member.runs or name == view.leader:
        raise ShardConflict(f"{name} runs: stop it first, or it joins again at once", member=name)
    return member


def check_expulsion(view: Overview, name: str) -> None:
    """Whether a member may be one no more, asked before a leader hands over for it.

    Raises:
        UnknownEntry, ShardConflict: it must not.
    """
    _check_current(view)
    _check_numbers(view.record, _expelled(view.record, known_member(view, name)))


def _expelled(record: ShardContent, member: MemberView) -> ShardContent:
    kept = islice(record.removed.items(), max(0, len(record.removed) + 1 - REMOVED_MAX), None)
    return msgspec.structs.replace(
        _without(record, member),
        removed={**dict(kept), member.replica: member.name},
        replicas=max(record.min_in_sync, record.replicas - 1),
    )


def _with_place(record: ShardContent, name: str) -> ShardContent:
    if name in record.members:
        return record
    replicas = max(record.replicas, len(record.members) + 1)
    if replicas > MEMBERS_MAX:
        raise InvalidSettings(
            f"a shard has at most {MEMBERS_MAX} members, and these are there: {', '.join(record.members)}; remove one "
            "first, or have another shard"
        )
    removed = {replica: broker for replica, broker in record.removed.items() if broker != name}
    return msgspec.structs.replace(record, replicas=replicas, removed=removed)


def _drained(view: Overview, record: ShardContent, name: str) -> ShardContent:
    known_member(view, name)
    able = [one for one in view.members if one.is_in_sync and one.node is not None]  # to be elected needs a session
    others = [one for one in able if one.name not in (name, *record.drained)]
    if name in record.drained:
        return record
    if not others:
        raise ShardConflict(
            f"without {name} nobody could lead shard {view.name}: no other member is in sync and not drained; bring "
            "one back first",
            member=name,
        )
    return msgspec.structs.replace(record, drained=sorted({*record.drained, name}))


def promoted_record(view: Overview, name: str, *, accept_loss: bool) -> ShardContent | None:
    """The record that lets a member lead alone; None if it is so already.

    Raises:
        UnknownEntry, ShardConflict: it must not be.
    """
    record, member = view.record, known_member(view, name)
    _check_current(view)
    if view.leader:
        raise ShardConflict(
            f"{name} leads already"
            if view.leader == name
            else f"{view.leader} leads shard {view.name} in epoch {record.epoch}: "
            f"dmq shard handover --to {name} lets {name} lead, and nothing is lost",
            leader=view.leader,
        )
    if member.node is None or member.is_replaced:
        why = "does not run" if member.node is None else "runs with another data directory than that of the record"
        raise ShardConflict(f"{name} {why}, and could not lead: start it, and ask again", member=name)
    if member.said is None:
        # It may just have died. The set would have it alone, and nobody else could be elected.
        raise ShardConflict(
            f"{name} does not answer at {member.node.replication_address}: check that it runs, and ask again",
            member=name,
        )
    if record.in_sync == [member.replica] and record.unsafe > record.epoch:
        return None
    if not accept_loss:
        raise ShardConflict(f"nothing was changed: {_loss(view, member, member.said.end)}", member=name)
    return msgspec.structs.replace(
        record, revision=record.revision + 1, in_sync=[member.replica], unsafe=max(record.unsafe, record.epoch + 1)
    )


def _loss(view: Overview, member: MemberView, end: int) -> str:
    """What the promotion of a member whose journal ends there would lose, as far as it can be known."""
    name = member.name
    if member.is_recorded:
        why = f", since {member.obstacle}" if member.obstacle else ""
        return (
            f"{name} is in the in-sync set, so it has everything that was acknowledged, and needs no promotion; it "
            f"does not lead yet{why}. With --accept-loss it leads alone, even if its journal lost something"
        )
    further = [
        f"{other.name} has {other.said.end - end:,} bytes more"
        for other in view.members
        if other.said is not None and other.said.end > end
    ]
    missing = ", ".join(one.name for one in view.in_set if one.said is None)
    unknown = (
        f"; what {missing} acknowledged after that is lost, and nobody here knows how much it is" if missing else ""
    )
    more = f"; {', '.join(further)}, which would be cut there" if further else ""
    return (
        f"{name} is not in the in-sync set, so it lacks messages that were acknowledged: its journal ends at "
        f"{end}{more}{unknown}. Start a member of the set instead, or say --accept-loss"
    )


def known_member(view: Overview, name: str) -> MemberView:
    member = view.member(name)
    if member is None:
        known = ", ".join(one.name for one in view.members) or "none"
        raise UnknownEntry(f"shard {view.name} has no member {name!r}: those it has: {known}", member=name)
    return member


def _check_current(view: Overview) -> None:
    if view.is_stale:
        raise ShardConflict(
            f"the registry is an old copy: it has revision {view.record.revision}, and a member has seen "
            f"{view.revision_seen}. Nothing is changed until its newest data is back, or dmq cluster "
            "import --from-members has rebuilt it"
        )


def difference(before: ShardContent, after: ShardContent) -> str:
    """What is in force now, in words."""
    parts = [f"min_in_sync is {after.min_in_sync}", f"replicas is {after.replicas}"]
    if (before.state, before.weight) != (after.state, after.weight):
        parts.append(f"it is {after.state}, with weight {after.weight}")
    if after.asynchronous:
        parts.append("it is asynchronous: what the leader alone has is acknowledged, and failover needs a command")
    elif before.asynchronous:
        parts.append("it is not asynchronous any more: sends wait until so many have caught up")
    parts += [f"{name} is not a member any more" for name in before.members if name not in after.members]
    return ", ".join(parts)
