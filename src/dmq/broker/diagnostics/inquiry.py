"""Questions about one message: what happened to it, and why it is not consumed.

What always holds: asking changes nothing; an answer says where the journal was not searched to its end.

Where a message stands in each group: from what is known of its life and from the groups as they are now.

What always holds: looking changes nothing; a group is judged by the last place the message has in it, so one that
failed is looked for among the retries, and one that was given up among the dead letters.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.broker.broker import Broker
from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.group import MemberState, group_of
from dmq.broker.delivery.lease import Lease, Redelivery
from dmq.broker.diagnostics.explanation import (
    Dead,
    Facts,
    Out,
    Reason,
    Retry,
    SettledHow,
    explain,
    label,
    moment,
    paragraph,
    until,
)
from dmq.broker.diagnostics.message_history import NOT_KEPT, Copy, Leased, Life, Step, covers, look_up, steps_of
from dmq.broker.schedule.release_unit import topic_since
from dmq.model import (
    DLQ_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_PREFIX,
    MessageId,
    parse_broadcast_name,
    retry_topic_name,
)
from dmq.protocol.message_history import STEPS_MAX
from dmq.records import DeadReason
from dmq.storage.state.events import PositionSet, Settled
from dmq.storage.state.positions import Position
from dmq.storage.state.state import Topic

__all__ = ["Trace", "Why", "trace", "unsettled_before", "why"]

_UNSEARCHED: Final = (
    "the journal was searched for its first 256 MiB after the message, or for ten seconds, and no further"
)


class Trace(NamedTuple):
    """What happened to a message, and what is missing there."""

    steps: list[Step]
    notes: list[str]
    is_complete: bool


class Why(NamedTuple):
    """Why a message is not consumed: in a word, in a paragraph, and for each group."""

    state: str
    text: str
    reasons: list[Reason]
    is_complete: bool


async def trace(broker: Broker, message_id: MessageId, group: str = "") -> Trace:
    """What happened to a message, step by step.

    Parameters:
        group: only what is of this group.

    Raises:
        UnknownMessage: nothing is kept of it.
    """
    life = await look_up(broker, message_id, is_thorough=True)
    topic = broker.store.queries.find_topic(life.topic)
    steps = steps_of(life, [] if topic is None else leases_of(broker, life, topic))
    if group:
        steps = [step for step in steps if group_of(step.group) in ("", group)]
    steps = [step._replace(group=label(step.group)) for step in steps]
    notes = [*life.notes, NOT_KEPT]
    if not life.is_complete:
        notes.append(_UNSEARCHED)
    if life.copies and life.copies[0].is_moved:
        notes.append("the record it was first stored as is gone: retention took it, and with it what came before")
    if len(steps) > STEPS_MAX:
        notes.append(f"only the last {STEPS_MAX} of {len(steps)} steps are shown")
    return Trace(steps[-STEPS_MAX:], notes, life.is_complete)


async def why(broker: Broker, message_id: MessageId, group: str = "") -> Why:
    """Why a message is not consumed, by a group or by any.

    Raises:
        UnknownMessage: nothing is kept of it.
    """
    life = await look_up(broker, message_id, is_thorough=False)
    state, about = _about(broker, life)
    reasons: list[Reason] = []
    topic = broker.store.queries.find_topic(life.topic)
    if state == "stored" and topic is not None:
        reasons = _reasons(broker, life, topic, group)
        if not reasons:
            about += _nobody(topic.name, group)
    return Why(state, paragraph(about, reasons), reasons, life.is_complete)


def _reasons(broker: Broker, life: Life, topic: Topic, group: str) -> list[Reason]:
    now_ms = broker.clock.now_ms
    chosen = [name for name in groups_at(broker, topic) if group in ("", name, group_of(name))][:STEPS_MAX]
    facts = (facts_of(broker, life, topic, name) for name in chosen)
    return [explain(each, now_ms) for each in facts if each is not None]


def _nobody(topic: str, group: str) -> str:
    if group:
        return f" Group {group!r} does not consume topic {topic!r}: check its name, or start a consumer of it."
    return f" No group consumes topic {topic!r}, so nobody gets it; it waits as long as it is kept."


def _about(broker: Broker, life: Life) -> tuple[str, str]:
    """What has become of the message itself, before any group comes in."""
    name, topic = f"Message {life.message_id}", life.topic
    here = [copy for copy in life.copies if copy.is_users]
    if here:
        copy = here[-1]
        place = f"queue {copy.queue} of topic {copy.topic!r}, at offset {copy.offset}"
        return "stored", f"{name} is stored in {place}, since {moment(copy.stored_at_ms)}."
    aside = [copy for copy in life.copies if copy.topic in (SCHEDULE_TOPIC, HALF_TOPIC)]
    if aside and aside[-1].is_pending and not aside[-1].target.startswith(SYSTEM_PREFIX):
        due_ms = aside[-1].due_ms
        when = f"{until(due_ms, broker.clock.now_ms)}, at {moment(due_ms)}"
        if topic_since(broker.store.queries, topic, life.copies[0].journal_offset) is None:
            return "delayed", (
                f"{name} is delayed, and topic {topic!r}, which it was sent to, was deleted since: it becomes a dead "
                f"letter {when}."
            )
        return "delayed", f"{name} is delayed: it comes into topic {topic!r} {when}."
    half = broker.store.queries.half(life.message_id.to_bytes())
    if half is not None:
        who = f"producer group {half.group!r}" if half.group else "its producer"
        checks = broker.transactions.times_asked(life.message_id.to_bytes())
        return "prepared", (
            f"{name} belongs to a transaction that is open since {moment(half.stored_at_ms)}: nobody gets it before "
            f"{who} commits it. It was asked about it {checks} times so far."
        )
    ended = [step for step in steps_of(life) if step.what in ("cancelled", "rolled back", "given up")]
    if ended:
        return ended[-1].what, f"{name} was {ended[-1].what} at {moment(ended[-1].at_ms)}: nobody gets it."
    dead = [copy for copy in life.copies if copy.reason_code]
    if life.letters or dead:
        return "dead", _dead(life, name)
    if topic and broker.store.queries.find_topic(topic) is not None:
        return "stored", f"{name} was stored in topic {topic!r}, and retention has taken the record it had there."
    return "gone", f"{name} was for topic {topic!r}, which is no more."


def _dead(life: Life, name: str) -> str:
    if not life.letters:
        copy = next(copy for copy in reversed(life.copies) if copy.reason_code)
        return f"{name} is a dead letter since {moment(copy.stored_at_ms)}: {copy.error}."
    row = life.letters[-1]
    return (
        f"{name} is a dead letter since {moment(row.dead_at_ms)} ({row.reason}: {row.error}), and {row.state} there; "
        "nobody gets it unless it is resent."
    )


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
