"""Dead letters as a client sees them, and the conversations about them. Pure.

What always holds: a letter is named by its number; a message's id names all of its letters that wait. Many letters are
resent or deleted in small steps, so that no request takes long and a rate is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias, TypeVar

from dmq.client.admin.calls import Call
from dmq.client.arguments import any_name, check_whole
from dmq.errors import DMQError, InvalidRequest, InvalidSettings, UnknownMessage
from dmq.model import MessageId
from dmq.protocol import Command, Header, decode_response, unpack_records
from dmq.protocol.dead_letters import (
    PAGE_MAX,
    DeadLetterDelete,
    DeadLetterFilter,
    DeadLetterInfo,
    DeadLetterList,
    DeadLetterListReply,
    DeadLetterReply,
    DeadLetterResend,
)
from dmq.protocol.status import ErrorHeader, error_from_status
from dmq.records import ANY_QUEUE, decompress

__all__ = ["DeadLetter", "DeadLetterOutcome", "LetterName", "letter_filter", "listed", "named", "settle", "steps"]

_BODY_BYTES_MAX: Final = 64 << 20
_LIMIT_MAX: Final = 1 << 31
_TOGETHER: Final = 100
_STEPS_A_SECOND: Final = 5


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that could not be consumed or stored, and why."""

    number: int
    id: MessageId
    topic: str
    queue: int | None  # None if it never was stored
    offset: int | None
    group: str  # empty if it never was stored
    reason: str
    attempts: int
    first_error: str
    last_error: str
    body: bytes
    body_bytes: int
    key: str | None
    tag: str | None
    business_id: str | None
    priority: int
    properties: Mapping[str, str]
    app: str
    sent_at_ms: int
    dead_at_ms: int
    state: str
    changed_by: str  # who resent or deleted it
    changed_at_ms: int
    broker: str

    @classmethod
    def of(cls, info: DeadLetterInfo, body: bytes) -> DeadLetter:
        was_stored = info.queue != ANY_QUEUE
        return cls(
            info.number,
            MessageId.from_bytes(info.message_id),
            info.topic,
            info.queue if was_stored else None,
            info.offset if was_stored else None,
            info.group,
            info.reason,
            info.attempts,
            info.first_error,
            info.last_error,
            decompress(info.codec, info.body_bytes, body, _BODY_BYTES_MAX) if info.codec and body else body,
            info.body_bytes,
            info.key,
            info.tag,
            info.business_id,
            info.priority,
            info.properties,
            info.app,
            info.sent_at_ms,
            info.dead_at_ms,
            info.state,
            info.changed_by,
            info.changed_at_ms,
            info.broker,
        )


@dataclass(frozen=True, slots=True)
class DeadLetterOutcome:
    """Whether one letter was resent or deleted, or the error."""

    number: int
    error: DMQError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


T = TypeVar("T")
LetterName: TypeAlias = DeadLetter | MessageId | int | str


def _time_ms(at: datetime | None) -> int:
    if at is None:
        return 0
    if not isinstance(at, datetime):
        raise InvalidSettings(f"a moment is a datetime with a time zone, not {at!r}")
    if at.tzinfo is None:
        raise InvalidSettings("a moment needs a time zone: datetime.now(timezone.utc), for example")
    return max(0, int(at.timestamp() * 1000))


def letter_filter(
    topic: str | None,
    group: str | None,
    reason: str | None,
    *,
    state: str = "waiting",
    since: datetime | None = None,
    until: datetime | None = None,
) -> DeadLetterFilter:
    """Which dead letters are meant; None or an empty text means any.

    Raises:
        InvalidSettings: a moment is not a datetime with a time zone, or a name is not text.
    """
    named = any_name("topic", topic), any_name("group", group), any_name("reason", reason).upper()
    return DeadLetterFilter(*named, _time_ms(since), until_ms=_time_ms(until), state=state)


def _pages(wanted: DeadLetterFilter, limit: int | None, bodies: bool) -> Call[list[DeadLetter]]:
    found: list[DeadLetter] = []
    after = 0
    while limit is None or len(found) < limit:
        size = PAGE_MAX if limit is None else min(PAGE_MAX, limit - len(found))
        frame = yield Command.DEAD_LETTER_LIST, DeadLetterList(wanted, after, size, bodies)
        reply: DeadLetterListReply = decode_response(frame)
        lengths, data = unpack_records(frame.body, len(reply.letters))
        at = 0
        for info, length in zip(reply.letters, map(int, lengths), strict=True):
            found.append(DeadLetter.of(info, bytes(data[at : at + length])))
            at += length
        if not reply.more or not reply.letters:
            break
        after = reply.letters[-1].number
    return found


def listed(
    wanted: DeadLetterFilter, limit: int | None, ids: Iterable[LetterName] | None, *, bodies: bool
) -> Call[list[DeadLetter]]:
    """Dead letters that a filter lets through, oldest first; only some of them if ids are given."""
    if limit is not None:
        check_whole("limit", limit, 0, _LIMIT_MAX)
    if ids is None:
        return (yield from _pages(wanted, limit, bodies))
    numbers, message_ids = _parts(ids)
    found: dict[int, DeadLetter] = {}
    for part in _chunks(numbers):
        for letter in (yield from _pages(_with(wanted, numbers=part), None, bodies)):
            found[letter.number] = letter
    for some in _chunks(message_ids):
        for letter in (yield from _pages(_with(wanted, message_ids=[m.to_bytes() for m in some]), None, bodies)):
            found[letter.number] = letter
    return [found[number] for number in sorted(found)][:limit]


def _with(base: DeadLetterFilter, numbers: Sequence[int] = (), message_ids: Sequence[bytes] = ()) -> DeadLetterFilter:
    return DeadLetterFilter(
        base.topic,
        base.group,
        base.reason,
        base.since_ms,
        until_ms=base.until_ms,
        state=base.state,
        message_ids=[*message_ids],
        numbers=[*numbers],
    )


def named(
    ids: Iterable[LetterName] | None,
    topic: str | None,
    group: str | None,
    reason: str | None,
) -> Call[list[int]]:
    """The numbers of letters: those with these ids, or all that wait and match the other parameters.

    Raises:
        InvalidRequest: neither ids nor anything else was given, which would mean all letters there are; or an id is
            not one.
    """
    if ids is None:
        if not (topic or group or reason):
            raise InvalidRequest("say which dead letters: their ids, or topic=, group= or reason=")
        found = yield from _pages(letter_filter(topic, group, reason), None, False)
        return [letter.number for letter in found]
    numbers, message_ids = _parts(ids)
    if message_ids or topic or group or reason:
        wanted = letter_filter(topic, group, reason)
        if topic or group or reason:
            kept: list[int] = []
            for part in _chunks(numbers):
                kept += [letter.number for letter in (yield from _pages(_with(wanted, numbers=part), None, False))]
            numbers = kept
        for some in _chunks(message_ids):
            raw = [message_id.to_bytes() for message_id in some]
            letters = yield from _pages(_with(wanted, message_ids=raw), None, False)
            missing = {*some} - {letter.id for letter in letters}
            if missing:
                raise UnknownMessage(f"message {next(iter(missing))} has no dead letter that waits")
            numbers += [letter.number for letter in letters]
    return [*dict.fromkeys(numbers)]


def _parts(ids: Iterable[LetterName]) -> tuple[list[int], list[MessageId]]:
    """Numbers of letters, and ids of messages."""
    numbers: list[int] = []
    message_ids: list[MessageId] = []
    for given in [ids] if isinstance(ids, str | int | MessageId | DeadLetter) else ids:
        if isinstance(given, DeadLetter):
            numbers.append(given.number)
        elif isinstance(given, MessageId):
            message_ids.append(given)
        elif isinstance(given, str) and not given.isdecimal():
            try:
                message_ids.append(MessageId.parse(given))
            except ValueError as error:
                raise InvalidRequest(f"{error}; a dead letter's number will do as well") from None
        elif not isinstance(given, bool) and 0 < int(given) < 1 << 63:
            numbers.append(int(given))
        else:
            raise InvalidRequest(f"{given!r} names no dead letter: use it itself, its number, or its message's id")
    return numbers, message_ids


def _chunks(items: Sequence[T]) -> Iterator[list[T]]:
    for at in range(0, len(items), PAGE_MAX):
        yield [*items[at : at + PAGE_MAX]]


def steps(numbers: Sequence[int], rate: float | None) -> Iterator[tuple[list[int], float]]:
    """Numbers in small parts, and how many seconds each part is to take at least.

    Raises:
        InvalidSettings: the rate is not above 0.
    """
    if rate is not None and not rate > 0:
        raise InvalidSettings(f"rate is a number of letters a second above 0, or None, not {rate!r}")
    size = _TOGETHER if rate is None else max(1, min(_TOGETHER, int(rate / _STEPS_A_SECOND)))
    for at in range(0, len(numbers), size):
        part = [*numbers[at : at + size]]
        yield part, 0.0 if rate is None else len(part) / rate


def settle(numbers: list[int], *, delete: bool) -> Call[list[DeadLetterOutcome]]:
    """Resend some letters, or delete them."""
    asked: tuple[Command, Header] = (
        (Command.DEAD_LETTER_DELETE, DeadLetterDelete(numbers))
        if delete
        else (Command.DEAD_LETTER_RESEND, DeadLetterResend(numbers))
    )
    reply: DeadLetterReply = decode_response((yield asked))
    return [
        DeadLetterOutcome(
            one.number, error_from_status(one.status, ErrorHeader(one.message, {})) if one.status else None
        )
        for one in reply.outcomes
    ]
