"""Questions about one message: what happened to it, and why it is not consumed.

What always holds: asking changes nothing; an answer says where the journal was not searched to its end.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dmq.broker.broker import Broker
from dmq.broker.delivery.group import group_of
from dmq.broker.diagnostics.explanation import Reason, explain, label, moment, paragraph, until
from dmq.broker.diagnostics.message_history import Life, look_up
from dmq.broker.diagnostics.trace import NOT_KEPT, Step, steps_of
from dmq.broker.diagnostics.whereabouts import facts_of, groups_at, leases_of
from dmq.broker.schedule.release_unit import topic_since
from dmq.model import HALF_TOPIC, SCHEDULE_TOPIC, SYSTEM_PREFIX, MessageId
from dmq.protocol.message_history import STEPS_MAX
from dmq.storage.state.state import Topic

__all__ = ["Trace", "Why", "trace", "why"]

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
