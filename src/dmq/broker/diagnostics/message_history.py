"""The history of one message: everything the journal, the cursors and the database of dead letters have of it.

Events are not indexed, so units are read from the message on and searched for the events that concern it
(`find_events`); most messages are settled shortly after they were stored.

What always holds: looking changes nothing; the disk is read through `DiskReads`, and the journal is searched in a
thread, within a bound on bytes and time; an answer says what was not searched. A unit that fails its checksum says
nothing; events come in the order of the journal.

The life of a message as steps, in the order they happened. Pure code.

What always holds: every step is of a record or an event of the journal, of a row of dead letters, or of a lease that is
out now; what nobody keeps is not among them, and is said in `NOT_KEPT`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.disk_report import dropped_sentence
from dmq.broker.diagnostics.explanation import moment
from dmq.errors import DMQError, RecordCorrupt, UnknownMessage
from dmq.model import HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, SYSTEM_PREFIX, MessageId
from dmq.records import Attributes, DeadReason
from dmq.storage.journal.unit import HEADER_BYTES, ROW, ROW_BYTES, Header, Unit, is_intact, parse_unit, read_header
from dmq.storage.queries import Queries
from dmq.storage.state.derived import event_of
from dmq.storage.state.events import (
    DelaysDone,
    Event,
    Outcome,
    PositionSet,
    Settled,
    TransactionEnded,
    TransactionsEnded,
    unpack_offsets,
)

__all__ = [
    "NOT_KEPT",
    "Copy",
    "Leased",
    "Letter",
    "Life",
    "SeenEvent",
    "Step",
    "Wanted",
    "covers",
    "find_events",
    "look_up",
    "steps_of",
]

_CHUNK: Final = 1 << 20
_SEARCH_BYTES: Final = 256 << 20
_SEARCH_SECONDS: Final = 10.0
_LETTERS_MAX: Final = 100
_COPIES_MAX: Final = 1000  # of one that is retried for ever: the first, and the last ones


class Copy(NamedTuple):
    """One record of the message."""

    topic: str
    topic_id: int
    queue: int
    offset: int
    journal_offset: int
    stored_at_ms: int
    sent_at_ms: int
    app: str = ""
    tag: str | None = None
    is_moved: bool = False
    due_ms: int = 0  # 0: it has none
    is_pending: bool = False  # it waits in the schedule for its time
    target: str = ""  # the topic it was sent to, or goes to when it is due
    group: str = ""
    attempt: int = 0  # how many were made before it was written
    error: str = ""
    reason_code: int = 0
    expires_ms: int | None = None
    damage: str = ""  # why nobody can read it

    @property
    def is_users(self) -> bool:
        """Whether it stands in a topic of a user, for consumers to have."""
        return not self.topic.startswith(SYSTEM_PREFIX)


class Letter(NamedTuple):
    """What the database of dead letters has of it."""

    topic: str
    group: str
    reason: str
    error: str
    attempts: int
    dead_at_ms: int
    state: str
    changed_at_ms: int
    changed_by: str


class Life(NamedTuple):
    """All that is kept of one message."""

    message_id: MessageId
    copies: list[Copy]
    events: list[SeenEvent]
    letters: list[Letter]
    is_complete: bool
    notes: list[str]

    @property
    def topic(self) -> str:
        """The topic it was sent to."""
        for copy in self.copies:
            if copy.is_users:
                return copy.topic
        named = next(
            (copy.target for copy in self.copies if copy.target and not copy.target.startswith(SYSTEM_PREFIX)), ""
        )
        return named or next((letter.topic for letter in self.letters), "")


async def look_up(broker: Broker, message_id: MessageId, *, is_thorough: bool) -> Life:
    """Everything there is.

    Parameters:
        is_thorough: search all of the journal within the bounds; else only until it is known how each group that is
            done with the message settled it.

    Raises:
        UnknownMessage: there is nothing.
    """
    broker.writer.hurry()
    copies = await broker.reads.ask(lambda: _copies(broker.store.queries, message_id))
    notes = [
        f"its record at offset {copy.offset} of queue {copy.queue} of {copy.topic} was stored damaged: {copy.damage}"
        for copy in copies
        if copy.damage
    ]
    letters: list[Letter] = []
    if not copies or any(copy.reason_code for copy in copies):
        try:
            letters = await _letters(broker, message_id)
        except DMQError as error:
            notes.append(f"the database of dead letters cannot be asked: {error.message}")
    if not copies and not letters:
        if notes:
            raise UnknownMessage(f"no message {message_id} is in the journal, and {notes[0]}", id=str(message_id))
        dropped = dropped_sentence(broker)
        raise UnknownMessage(
            f"no message {message_id} is kept: check the id; it may never have been stored, or retention has taken it"
            + (f" ({dropped})" if dropped else ""),
            id=str(message_id),
        )
    events, is_complete = await _events(broker, message_id, copies, is_thorough)
    return Life(message_id, copies, events, letters, is_complete=is_complete, notes=notes)


def _copies(queries: Queries, message_id: MessageId) -> list[Copy]:
    places = queries.places(message_id=message_id)
    if len(places) > _COPIES_MAX:
        places = [places[0], *places[1 - _COPIES_MAX :]]
    parts, _ = queries.gather(places)
    found = []
    for part in parts:
        topic = queries.topic_by_id(part.row.topic_id)
        for index, journal_offset in enumerate(part.offsets.tolist()):
            if topic is None or part.message_id(index) != message_id:
                continue
            record = part.record(index)
            said = record.attributes
            due_ms = int(part.dues[index]) if len(part.dues) else 0
            target = ""
            if topic.name in (SCHEDULE_TOPIC, HALF_TOPIC):
                target = (said.target_topic or said.original_topic or "") if part.is_moved else record.topic
            elif part.is_moved:
                target = said.original_topic or ""
            found.append(
                Copy(
                    topic.name,
                    topic.id,
                    record.queue,
                    record.queue_offset,
                    journal_offset=int(journal_offset),
                    stored_at_ms=int(part.times[index]),
                    sent_at_ms=said.original_send_time_ms or record.send_time_ms,
                    app=record.app,
                    tag=said.tag,
                    is_moved=part.is_moved,
                    due_ms=due_ms,
                    is_pending=topic.name == SCHEDULE_TOPIC and _is_pending(queries, due_ms, int(journal_offset)),
                    target=target,
                    group=said.group or "",
                    attempt=_attempts(said),
                    error=said.reason or "",
                    reason_code=said.reason_code or 0,
                    expires_ms=said.expires_at_ms,
                    damage=part.corrupt.get(int(journal_offset), ""),
                )
            )
    return sorted(found, key=lambda copy: copy.journal_offset)


def _attempts(said: Attributes) -> int:
    # A dead letter counts what was before it was resent; a retry does not, and has as many again.
    before = 0 if said.reason_code else said.attempts_before or 0
    return before + (said.attempt or 0)


def _is_pending(queries: Queries, due_ms: int, journal_offset: int) -> bool:
    following = queries.delays_after(due_ms, journal_offset - 1, 1)
    return bool(following) and following[0].offset == journal_offset


async def _letters(broker: Broker, message_id: MessageId) -> list[Letter]:
    from dmq.deadletters.letter import LetterFilter

    page = await broker.dead_letters.page(LetterFilter(message_ids=(message_id,), state=""), 0, _LETTERS_MAX, False)
    return [
        Letter(
            row.topic,
            row.group,
            row.reason,
            row.last_error,
            attempts=row.attempts,
            dead_at_ms=row.dead_at_ms,
            state=row.state,
            changed_at_ms=row.changed_at_ms or 0,
            changed_by=row.changed_by or "",
        )
        for row in page.letters
    ]


# --- events -----------------------------------------------------------------------------------------------------------


async def _events(
    broker: Broker, message_id: MessageId, copies: list[Copy], is_thorough: bool
) -> tuple[list[SeenEvent], bool]:
    """What the journal has of how it was settled, and whether all that was asked for was searched."""
    places: dict[tuple[int, int], list[int]] = {}
    for copy in copies:
        if copy.is_users or copy.topic.startswith(RETRY_PREFIX):
            places.setdefault((copy.topic_id, copy.queue), []).append(copy.offset)
    aside = [copy for copy in copies if copy.topic in (SCHEDULE_TOPIC, HALF_TOPIC)]
    questions = _questions(broker.store.queries, places)
    has_ended = any(not copy.is_pending for copy in aside)
    if not questions and not has_ended:
        return [], True
    scheduled = frozenset(copy.journal_offset for copy in aside if copy.topic == SCHEDULE_TOPIC)
    wanted = Wanted(places, scheduled, message_id.to_bytes())

    def is_answered(seen: list[SeenEvent]) -> bool:
        if is_thorough or has_ended:
            return False
        for each in seen:
            questions.difference_update(_answered(each, places))
        return not questions

    return await _search(broker, wanted, copies[0].journal_offset, is_answered)


_Question = tuple[str, int, int, int]  # how did a group settle what stands at topic id, queue and offset?


def _questions(queries: Queries, places: Mapping[tuple[int, int], list[int]]) -> set[_Question]:
    found: set[_Question] = set()
    for (topic_id, queue), offsets in places.items():
        topic = queries.topic_by_id(topic_id)
        if topic is None:
            continue
        for group in queries.groups_at(topic_id):
            position = queries.position(group, topic.name, queue)
            if position is not None:
                found |= {(group, topic_id, queue, at) for at in offsets if position.is_settled(at)}
    return found


def _answered(seen: SeenEvent, places: Mapping[tuple[int, int], list[int]]) -> set[_Question]:
    match seen.event:
        case Settled(group, topic_id, queue):
            offsets = [at for at in places.get((topic_id, queue), ()) if covers(seen.event, at)]
        case PositionSet(group, topic_id, queue, to):
            offsets = [at for at in places.get((topic_id, queue), ()) if at < to]
        case _:
            return set()
    return {(group, topic_id, queue, at) for at in offsets}


async def _search(
    broker: Broker, wanted: Wanted, start: int, is_answered: Callable[[list[SeenEvent]], bool]
) -> tuple[list[SeenEvent], bool]:
    queries, loop = broker.store.queries, asyncio.get_running_loop()
    deadline = loop.time() + _SEARCH_SECONDS
    found: list[SeenEvent] = []
    at = begin = await broker.reads.ask(lambda: queries.unit_start(start))
    while at < queries.visible:
        if at - begin > _SEARCH_BYTES or loop.time() > deadline:
            return found, False
        try:
            raw, following = await broker.reads.ask(partial(queries.read_units, at, _CHUNK))
        except DMQError:
            return found, False  # damaged: what follows cannot be relied on to be all
        if not raw:
            break
        seen = await broker.reads.work(partial(find_events, raw, wanted))
        found += seen
        at = following
        if is_answered(seen):
            break
    return found, True


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


class Wanted(NamedTuple):
    """What the events must be about."""

    places: Mapping[tuple[int, int], Sequence[int]]  # by topic id and queue, the offsets it has there
    journal_offsets: frozenset[int]  # of records in the schedule
    message_id: bytes


class SeenEvent(NamedTuple):
    """An event, and when it was stored."""

    stored_at_ms: int
    event: Event


def covers(event: Settled, offset: int) -> bool:
    """Whether an event settles an offset of its queue."""
    at = offset - event.start
    if not 0 <= at < event.count:
        return False
    return not event.bitmap or (at >> 3 < len(event.bitmap) and bool(event.bitmap[at >> 3] >> (at & 7) & 1))


def find_events(raw: bytes | memoryview, wanted: Wanted) -> list[SeenEvent]:
    """The events of whole units, one after another, that concern the message.

    What a position was set to is among them whatever its queue holds of the message: it may pass over it.
    """
    found: list[SeenEvent] = []
    at = 0
    while (header := read_header(raw, at)) is not None and at + header.length <= len(raw):
        part = memoryview(raw)[at : at + header.length]
        at += header.length
        if not _has_events(header, part) or not is_intact(header, part):
            continue
        try:
            unit = parse_unit(header, part)
            found += [SeenEvent(header.stored_at_ms, event) for event in _events_in(unit) if _concerns(event, wanted)]
        except RecordCorrupt:
            continue
    return found


def _has_events(header: Header, part: memoryview) -> bool:
    """Whether any batch of the unit is one of events; most units of a busy journal have none."""
    start = HEADER_BYTES + 4 * header.records
    rows = ROW.iter_unpack(part[start : start + ROW_BYTES * header.batches])
    return any(row[4] == 0 for row in rows)


def _events_in(unit: Unit) -> Iterator[Event]:
    first = 0
    for row in unit.rows:
        if row.topic_id == 0:
            for index in range(first, first + row.records):
                yield event_of(unit, index)
        first += row.records


def _concerns(event: Event, wanted: Wanted) -> bool:
    match event:
        case Settled(_, topic_id, queue):
            return any(covers(event, offset) for offset in wanted.places.get((topic_id, queue), ()))
        case PositionSet(_, topic_id, queue):
            return (topic_id, queue) in wanted.places
        case DelaysDone(offsets):
            return bool(wanted.journal_offsets) and not wanted.journal_offsets.isdisjoint(
                unpack_offsets(offsets).tolist()
            )
        case TransactionEnded(message_id):
            return message_id == wanted.message_id
        case TransactionsEnded(message_ids):
            step = range(0, len(message_ids), 16)
            return any(message_ids[at : at + 16] == wanted.message_id for at in step)
    return False
