"""Why a message has not been consumed by a group, or that it was, in a sentence. Pure code: facts in, words out.

What always holds: of several reasons that hold at once, the one comes first that has to go away first; nothing is
guessed, and where the journal does not say how a message was settled, the sentence says that.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from dmq.model import parse_broadcast_name
from dmq.storage.state.events import Outcome

__all__ = ["Dead", "Facts", "Out", "Reason", "Retry", "SettledHow", "explain", "label", "moment", "paragraph", "until"]

_GROUPS_SHOWN = 10


class Out(NamedTuple):
    """A lease that has the message."""

    member: str
    since_ms: int
    until_ms: int
    attempt: int
    is_silent: bool = False  # the member gives no sign of life


class Retry(NamedTuple):
    """The message failed and waits for another attempt; `due_ms` 0: it is on offer already."""

    due_ms: int
    attempts: int
    error: str


class Dead(NamedTuple):
    """The message is a dead letter."""

    reason: str
    error: str
    at_ms: int
    attempts: int
    state: str = ""  # what has become of it in the database, if that was asked


class SettledHow(NamedTuple):
    """What the journal says of how it was settled."""

    outcome: int
    member: str
    at_ms: int
    attempt: int
    error: str


class Facts(NamedTuple):
    """What is known of one message in one group."""

    group: str
    topic: str
    queue: int
    offset: int
    is_settled: bool = False
    how: SettledHow | None = None
    was_passed: bool = False  # the group was put behind it, by hand or when it began
    out: Out | None = None
    again_ms: int | None = None  # it was given back, and is handed out again from then on
    attempt: int = 1  # that its next hand-out will be
    retry: Retry | None = None
    dead: Dead | None = None
    before: int = 0  # messages before it that are not settled
    members: int = 0
    connected: int = 0
    silent: int = 0  # members that are connected and give no sign of life
    tags: str = ""  # the group's filter
    tag: str | None = None  # the message's
    is_matching: bool = True
    is_ordered: bool = False
    can_consume: bool = True
    is_draining: bool = False
    expires_ms: int | None = None
    is_complete: bool = True  # the journal was searched to its end


class Reason(NamedTuple):
    """The state in a word for programs, and the sentence for people."""

    group: str
    state: str
    text: str


def label(group: str) -> str:
    """What people call a group."""
    alone = parse_broadcast_name(group)
    return group if alone is None else f"{alone[0]} (broadcast to {alone[1]})"


def moment(at_ms: int) -> str:
    """A moment for people, in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def until(at_ms: int, now_ms: int) -> str:
    """How far off a moment is: `in 12.5 s`."""
    seconds = max(0, at_ms - now_ms) / 1000
    if seconds < 120:
        return f"in {seconds:.1f} s"
    return f"in {seconds / 60:.0f} min" if seconds < 7200 else f"in {seconds / 3600:.1f} h"


def explain(facts: Facts, now_ms: int) -> Reason:
    """The reason that holds for a group."""
    state, text = _explain(facts, now_ms)
    return Reason(facts.group, state, f"Group {facts.group!r} {text}.")


def _explain(facts: Facts, now_ms: int) -> tuple[str, str]:
    if facts.dead is not None:
        return "dead", _dead(facts.dead)
    if facts.retry is not None and facts.retry.due_ms:
        retry = facts.retry
        return "retrying", (
            f"failed at it in attempt {retry.attempts}{_quoted(retry.error)}, and gets it again "
            f"{until(retry.due_ms, now_ms)}, at {moment(retry.due_ms)}"
        )
    if facts.is_settled:
        return _settled(facts)
    if facts.out is not None:
        out = facts.out
        return "leased", (
            f"has it: it is leased to member {out.member!r} since {moment(out.since_ms)}, attempt {out.attempt}, and "
            f"is handed out again if nothing is heard of it by {moment(out.until_ms)} ({until(out.until_ms, now_ms)})"
            + ("; the member gives no sign of life" if out.is_silent else "")
        )
    return _waiting(facts, now_ms)


def _quoted(error: str) -> str:
    return f" ({error})" if error else ""


def _dead(dead: Dead) -> str:
    words = (
        f"does not get it: it is a dead letter since {moment(dead.at_ms)}, {dead.reason} after {dead.attempts} "
        f"attempts{_quoted(dead.error)}"
    )
    if dead.state:
        words += f"; among the dead letters it is {dead.state}"
    return words


def _settled(facts: Facts) -> tuple[str, str]:
    how = facts.how
    if how is not None:
        who = f" by member {how.member!r}" if how.member else ""
        if how.outcome == Outcome.ACKED:
            return "consumed", f"has consumed it: acked{who} at {moment(how.at_ms)}, attempt {how.attempt}"
        if how.outcome == Outcome.SKIPPED:
            return _skipped(facts, how)
        if how.outcome == Outcome.EXPIRED:
            return "expired", f"does not get it: it expired before it was handed out, at {moment(how.at_ms)}"
        if how.outcome == Outcome.RETRIED:
            return "retrying", f"failed at it{who} at {moment(how.at_ms)}{_quoted(how.error)}, and gets it again"
        return "dead", f"gave it up{who} at {moment(how.at_ms)}{_quoted(how.error)}"
    if not facts.is_matching:
        return "filtered", _filtered(facts)
    if facts.was_passed:
        return "passed", "was put behind it: it began later, or its position was set, so it does not get it"
    searched = "no longer has a record of how" if facts.is_complete else "was not searched far enough to say how"
    return "settled", f"is done with it, but the journal {searched}"


def _skipped(facts: Facts, how: SettledHow) -> tuple[str, str]:
    if how.error == "filtered":
        return "filtered", _filtered(facts)
    if how.error == "gone":
        return "gone", "did not get it: retention took it before the group came to it"
    return "skipped", f"passed it over at {moment(how.at_ms)}{_quoted(how.error)}"


def _filtered(facts: Facts) -> str:
    tag = "no tag" if facts.tag is None else f"the tag {facts.tag!r}"
    return f"does not want it: it consumes {facts.tags or 'other tags'!r}, and the message has {tag}"


def _waiting(facts: Facts, now_ms: int) -> tuple[str, str]:
    place = f"queue {facts.queue} of {facts.topic}"
    if not facts.is_matching:
        return "filtered", f"{_filtered(facts)}; it is passed over when the group comes to it"
    if facts.is_draining:
        return "draining", "waits: the broker is drained and hands nothing out until it is put back in use"
    if not facts.can_consume:
        return "off", f"waits: consuming of topic {facts.topic!r} is switched off"
    expired = facts.expires_ms is not None and facts.expires_ms <= now_ms
    if expired:
        return "expired", "does not get it: it has expired, and becomes a dead letter when the group comes to it"
    if not facts.members:
        return "no members", f"has no members: nobody consumes {place}, where {_before(facts.before)}"
    if not facts.connected:
        return "no members", f"has {facts.members} members, none of which is connected"
    if facts.silent == facts.connected:
        return "silent", (
            f"waits: all its connected members ({facts.silent}) are silent, and get nothing until they give a sign of "
            "life: see whether their processes are stopped or hang"
        )
    if facts.again_ms is not None:
        when = f"{until(facts.again_ms, now_ms)}" if facts.again_ms > now_ms else "as soon as a member takes it"
        return "again", f"had it and gave it back; it is handed out again {when}, as attempt {facts.attempt}"
    if facts.retry is not None:
        return "retrying", (
            f"failed at it in attempt {facts.retry.attempts}{_quoted(facts.retry.error)}, and gets it again as soon "
            f"as a member takes it ({_before(facts.before)})"
        )
    order = ", and the group consumes in order" if facts.is_ordered and facts.before else ""
    return "waiting", f"has not come to it yet: in {place} {_before(facts.before)}{order}"


def _before(count: int) -> str:
    if not count:
        return "it is next"
    return f"{count:,} message{'' if count == 1 else 's'} stand{'s' if count == 1 else ''} before it"


def paragraph(about: str, reasons: list[Reason]) -> str:
    """Everything in one paragraph."""
    shown = " ".join([about, *(reason.text for reason in reasons[:_GROUPS_SHOWN])])
    more = len(reasons) - _GROUPS_SHOWN
    return f"{shown} {more} more groups: ask for one of them." if more > 0 else shown
