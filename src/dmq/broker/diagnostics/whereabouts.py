"""Where a message stands in each group: from what is known of its life and from the groups as they are now.

What always holds: looking changes nothing; a group is judged by the last place the message has in it, so one that
failed is looked for among the retries, and one that was given up among the dead letters.
"""

from __future__ import annotations

from dmq.broker.broker import Broker
from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.group import MemberState, group_of
from dmq.broker.delivery.lease import Lease, Redelivery
from dmq.broker.diagnostics.explanation import Dead, Facts, Out, Retry, SettledHow, label
from dmq.broker.diagnostics.message_history import Copy, Life
from dmq.broker.diagnostics.trace import Leased
from dmq.model import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX, parse_broadcast_name, retry_topic_name
from dmq.records import DeadReason
from dmq.storage.offline.event_search import covers
from dmq.storage.state.events import PositionSet, Settled
from dmq.storage.state.positions import Position
from dmq.storage.state.state import Topic

__all__ = ["facts_of", "groups_at", "leases_of", "unsettled_before"]

_REASONS = {int(reason): reason.name for reason in DeadReason}


def groups_at(broker: Broker, topic: Topic) -> list[str]:
    """The groups that consume a topic, the members of broadcast groups each for itself; by name."""
    live = {group for name, group in broker.channels.open if name == topic.name}
    kept = broker.store.queries.groups_at(topic.id)
    return sorted(
        group for group in live.union(kept) if not group.startswith(SYSTEM_PREFIX) or parse_broadcast_name(group)
    )


def unsettled_before(position: Position, first: int, offset: int) -> int:
    """How many messages below an offset are kept and not settled."""
    floor = max(position.floor, first)
    settled = sum(
        min(end, offset) - max(start, floor) for start, end in position.ranges if floor < end and start < offset
    )
    return max(0, offset - floor - settled)


def _last_place(life: Life, topic: Topic, group: str) -> Copy | None:
    """The last record of the message that is of a group."""
    retries = retry_topic_name(group, topic.id)
    mine = [
        copy
        for copy in life.copies
        if copy.topic in (topic.name, retries)
        or copy.target == retries
        or (copy.topic.startswith(DLQ_PREFIX) and copy.group == group_of(group))
    ]
    return mine[-1] if mine else None


def facts_of(broker: Broker, life: Life, topic: Topic, group: str) -> Facts | None:
    """What is known of the message in a group; None if the group never can have had it."""
    copy = _last_place(life, topic, group)
    if copy is None:
        return None
    facts = Facts(label(group), topic.name, copy.queue, copy.offset, tag=copy.tag, is_complete=life.is_complete)
    if copy.topic.startswith(DLQ_PREFIX):
        state = next((row.state for row in reversed(life.letters) if row.group == group_of(group)), "")
        reason = _REASONS.get(copy.reason_code, str(copy.reason_code))
        return facts._replace(dead=Dead(reason, copy.error, copy.stored_at_ms, copy.attempt, state=state))
    if copy.due_ms:
        return facts._replace(retry=Retry(copy.due_ms, copy.attempt, copy.error))
    live = broker.channels.open.get((topic.name, group))
    facts = _with_group(broker, facts, topic, group, live=live)
    is_retry = copy.topic.startswith(RETRY_PREFIX)
    if is_retry:
        facts = facts._replace(retry=Retry(0, copy.attempt, copy.error), is_matching=True)
    expires_ms = copy.expires_ms
    if expires_ms is None and topic.config.ttl_ms is not None and not is_retry:
        expires_ms = copy.stored_at_ms + topic.config.ttl_ms
    return _with_place(broker, facts._replace(expires_ms=expires_ms), life, copy, group=group, live=live)


def _with_group(broker: Broker, facts: Facts, topic: Topic, group: str, live: Channel | None) -> Facts:
    kept = broker.store.queries.subscription(group, topic.id)
    tags = "" if kept is None else kept.filter
    members = connected = silent = 0
    is_ordered = kept is not None and kept.is_ordered
    if live is not None:
        members = len(live.group.members)
        states = [member.state for member in live.group.members.values()]
        silent = states.count(MemberState.SILENT)
        connected = states.count(MemberState.ACTIVE) + silent
        if live.group.subscription is not None:
            tags, is_ordered = live.group.subscription.filter, live.group.subscription.is_ordered
    return facts._replace(
        tags=tags,
        is_matching=not tags or facts.tag in tags.split(" || "),
        members=members,
        connected=connected,
        silent=silent,
        is_ordered=is_ordered,
        can_consume=topic.config.can_consume,
        is_draining=broker.readiness.is_draining or broker.readiness.is_stopping,
    )


def _with_place(broker: Broker, facts: Facts, life: Life, copy: Copy, group: str, live: Channel | None) -> Facts:
    first = broker.store.queries.bounds(copy.topic, copy.queue)[0]
    position = broker.store.queries.position(group, copy.topic, copy.queue) or Position(first)
    claim: Lease | Redelivery | None = None
    if live is not None and (key := live.queue_of(copy.topic, copy.queue)) is not None:
        cursor = live.cursor(key)
        position, claim = cursor.position, cursor.claim_on(copy.offset)
    if position.is_settled(copy.offset) and claim is None:
        how, was_passed = _how(life, copy, group)
        return facts._replace(is_settled=True, how=how, was_passed=was_passed)
    facts = facts._replace(before=unsettled_before(position, first, copy.offset))
    if isinstance(claim, Lease):
        attempt, is_silent = claim.attempt + copy.attempt, claim.holder.is_silent
        out = Out(claim.holder.name, claim.leased_at_ms, claim.due_ms, attempt, is_silent=is_silent)
        return facts._replace(out=out)
    if isinstance(claim, Redelivery):
        return facts._replace(again_ms=claim.ready_at_ms, attempt=claim.attempt + copy.attempt)
    return facts


def _how(life: Life, copy: Copy, group: str) -> tuple[SettledHow | None, bool]:
    """The last thing the journal says of how a group was done with it, and whether it was put behind it."""
    how: SettledHow | None = None
    was_passed = False
    place = (group, copy.topic_id, copy.queue)
    for seen in life.events:
        event = seen.event
        if not isinstance(event, Settled | PositionSet) or (event.group, event.topic_id, event.queue) != place:
            continue
        if isinstance(event, PositionSet):
            was_passed = event.offset > copy.offset
            how = how if was_passed else None
        elif covers(event, copy.offset):
            at_ms = event.settled_at_ms or seen.stored_at_ms
            how = SettledHow(event.outcome, event.member, at_ms, event.attempt + copy.attempt, error=event.error)
    return how, was_passed


def leases_of(broker: Broker, life: Life, topic: Topic) -> list[Leased]:
    """The leases that have the message now."""
    found = []
    for group in groups_at(broker, topic):
        live = broker.channels.open.get((topic.name, group))
        retries = retry_topic_name(group, topic.id)
        for copy in life.copies:
            if (
                live is None
                or copy.topic not in (topic.name, retries)
                or (key := live.queue_of(copy.topic, copy.queue)) is None
            ):
                continue
            lease = live.cursor(key).claim_on(copy.offset)
            if isinstance(lease, Lease):
                attempt = lease.attempt + copy.attempt
                found.append(
                    Leased(copy, group, lease.holder.name, lease.leased_at_ms, until_ms=lease.due_ms, attempt=attempt)
                )
    return found
