"""The life of a message as steps, in the order they happened. Pure code.

What always holds: every step is of a record or an event of the journal, of a row of dead letters, or of a lease that is
out now; what nobody keeps is not among them, and is said in `NOT_KEPT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from dmq.broker.diagnostics.explanation import moment
from dmq.broker.diagnostics.message_history import Copy, Life
from dmq.model import HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC
from dmq.records import DeadReason
from dmq.storage.offline.event_search import covers
from dmq.storage.state.events import DelaysDone, Outcome, PositionSet, Settled, TransactionEnded, TransactionsEnded

__all__ = ["NOT_KEPT", "Leased", "Step", "steps_of"]

NOT_KEPT: Final = (
    "the journal does not keep when leases ran out, nor attempts that a consumer repeated by itself: such deliveries "
    "are missing here"
)
_ANY_QUEUE: Final = 255
_OUTCOMES: Final = {
    int(Outcome.ACKED): "acked",
    int(Outcome.RETRIED): "failed",
    int(Outcome.DEAD): "gave up",
    int(Outcome.EXPIRED): "expired",
    int(Outcome.SKIPPED): "passed over",
    int(Outcome.CARRIED): "carried",
}
_REASONS: Final = {int(reason): reason.name for reason in DeadReason}


class Step(NamedTuple):
    """One thing that happened."""

    at_ms: int
    what: str
    topic: str = ""
    queue: int = _ANY_QUEUE
    offset: int = 0
    group: str = ""
    member: str = ""
    attempt: int = 0
    note: str = ""


class Leased(NamedTuple):
    """A lease that has the message now."""

    copy: Copy
    group: str
    member: str
    since_ms: int
    until_ms: int
    attempt: int


def steps_of(life: Life, leases: Iterable[Leased] = ()) -> list[Step]:
    """All steps, by time. What follows from another step comes behind it, also where two clocks do not quite agree."""
    placed = _Order()
    before: Copy | None = None
    for copy in life.copies:
        stored_ms = placed.add(_stored(copy, before), placed.since.get(copy.group, 0) if copy.group else 0)
        _settled(life, copy, placed, stored_ms)
        before = copy
    for step in (*_ended(life), *_lettered(life), *map(_leased, leases)):
        placed.add(step, placed.since.get(step.group, 0))
    # First of all, whatever the producer's clock says.
    return [*_sent(life), *placed.steps()]


def _sent(life: Life) -> Iterator[Step]:
    if life.copies:
        first = life.copies[0]
        yield Step(first.sent_at_ms, "sent", life.topic, note=f"by app {first.app}" if first.app else "")


class _Order:
    """Steps with the time they sort by: their own, or that of what they follow from if that is later."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, Step]] = []
        self.since: dict[str, int] = {}  # by group, the time of the last thing it did

    def add(self, step: Step, not_before_ms: int) -> int:
        at_ms = max(step.at_ms, not_before_ms)
        self._steps.append((at_ms, len(self._steps), step))
        return at_ms

    def steps(self) -> list[Step]:
        return [step for _, _, step in sorted(self._steps, key=lambda item: item[:2])]


def _leased(leased: Leased) -> Step:
    copy = leased.copy
    note = f"is out now, until {moment(leased.until_ms)}"
    return Step(
        leased.since_ms,
        "delivered",
        copy.topic,
        copy.queue,
        offset=copy.offset,
        group=leased.group,
        member=leased.member,
        attempt=leased.attempt,
        note=note,
    )


def _lettered(life: Life) -> Iterator[Step]:
    for letter in life.letters:
        if not life.copies:
            yield Step(letter.dead_at_ms, "dead letter", letter.topic, group=letter.group, note=letter.reason)
        if letter.changed_at_ms and letter.state != "waiting":
            note = f"by {letter.changed_by}" if letter.changed_by else ""
            yield Step(letter.changed_at_ms, letter.state, letter.topic, group=letter.group, note=note)


def _stored(copy: Copy, before: Copy | None) -> Step:
    """What the record of a copy says happened."""
    at, place = copy.stored_at_ms, (copy.topic, copy.queue, copy.offset)
    if copy.topic == HALF_TOPIC:
        return Step(at, "prepared", *place, note=f"in a transaction, for topic {copy.target}")
    if copy.topic == SCHEDULE_TOPIC:
        if copy.target.startswith(RETRY_PREFIX):
            note = f"gets it again at {moment(copy.due_ms)}"
            return Step(at, "retry", *place, copy.group, attempt=copy.attempt, note=_with(note, copy.error))
        return Step(at, "delayed", *place, note=f"until {moment(copy.due_ms)}, for topic {copy.target}")
    if copy.topic.startswith(RETRY_PREFIX):
        return Step(at, "offered again", *place, copy.group, attempt=copy.attempt, note=copy.error)
    if copy.reason_code:
        note = _with(_REASONS.get(copy.reason_code, f"reason {copy.reason_code}"), copy.error)
        return Step(at, "dead letter", *place, copy.group, attempt=copy.attempt, note=note)
    note = ""
    if copy.is_moved and before is not None:
        note = {HALF_TOPIC: "committed", SCHEDULE_TOPIC: "its time had come"}.get(before.topic, "moved")
    return Step(at, "stored", *place, note=note)


def _with(note: str, error: str) -> str:
    return f"{note}: {error}" if error and error != note else note


def _settled(life: Life, copy: Copy, placed: _Order, stored_ms: int) -> None:
    """What groups did with a copy, in the order of the journal; a lease that ended says when it began."""
    place = (copy.topic, copy.queue, copy.offset)
    for seen in life.events:
        event = seen.event
        if not isinstance(event, Settled | PositionSet) or (event.topic_id, event.queue) != (copy.topic_id, copy.queue):
            continue
        since_ms = max(stored_ms, placed.since.get(event.group, 0))
        if isinstance(event, PositionSet):
            side = "behind" if event.offset > copy.offset else "at or before"
            note = f"at offset {event.offset}, {side} the message"
            since_ms = placed.add(Step(seen.stored_at_ms, "group placed", *place, event.group, note=note), since_ms)
        elif covers(event, copy.offset):
            is_expired = event.outcome == Outcome.EXPIRED  # found so when it was to be handed out: it was not
            attempt = copy.attempt if is_expired else copy.attempt + event.attempt
            where = (*place, event.group, event.member, attempt)
            if event.leased_at_ms and not is_expired:
                since_ms = placed.add(Step(event.leased_at_ms, "delivered", *where), since_ms)
            what = _OUTCOMES.get(event.outcome, f"outcome {event.outcome}")
            since_ms = placed.add(Step(event.settled_at_ms or seen.stored_at_ms, what, *where, event.error), since_ms)
        placed.since[event.group] = since_ms


def _ended(life: Life) -> Iterator[Step]:
    """Delays that were taken back, transactions that ended."""
    for seen in life.events:
        match seen.event:
            case DelaysDone(_, reason) if reason not in ("fired", "carried"):
                yield Step(seen.stored_at_ms, reason)
            case TransactionEnded(_, outcome) | TransactionsEnded(_, outcome):
                yield Step(seen.stored_at_ms, outcome)
