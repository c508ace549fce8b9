"""Copies of messages that failed: `moved_record` for retries and dead letters, a few microseconds each.

A group that fails does so with many messages at a time, and what their copies say is mostly the same for all of them.
So that part is encoded once (`CopyPlan`), and each record is taken apart and put together without decoding its values.

What always holds: a copy says what `moved_record` would have made it say; a copy out of the topic itself names the
place there, one out of a retry topic keeps the place it names already. A record that cannot be read raises.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec
from crc32c import crc32c

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.attributes import Attributes, encode_attributes
from dmq.records.builder import BLANK_STAMP, BLANK_TIMES, HEAD, name_bytes
from dmq.records.move import shorten

__all__ = ["Copied", "CopyPlan", "Failed", "Released", "copy_record", "read_failed", "release_record"]

# Written anew by every move.
_OF_ONE_MOVE: Final = frozenset(
    (attrs.DUE_AT, attrs.TARGET_TOPIC, attrs.TARGET_QUEUE, attrs.ATTEMPT, attrs.GROUP, attrs.REASON, attrs.REASON_CODE)
)
_PLACE: Final = frozenset((attrs.ORIGINAL_TOPIC, attrs.ORIGINAL_QUEUE, attrs.ORIGINAL_QUEUE_OFFSET))
# Only a record that was moved speaks for its origin: on any other these are a client's invention.
_OF_MOVED: Final = _PLACE | {
    attrs.MESSAGE_ID,
    attrs.ORIGINAL_SEND_TIME,
    attrs.ORIGINAL_JOURNAL_OFFSET,
    attrs.FIRST_ERROR,
    attrs.ATTEMPTS_BEFORE,
}
_OURS: Final = _OF_ONE_MOVE | _OF_MOVED
_OF_SCHEDULE: Final = frozenset((attrs.DUE_AT, attrs.TARGET_TOPIC, attrs.TARGET_QUEUE))

_ID_HEAD: Final = attrs.ENTRY.pack(attrs.MESSAGE_ID, 16)
_SENT_HEAD: Final = attrs.ENTRY.pack(attrs.ORIGINAL_SEND_TIME, 8)
_JOURNAL_HEAD: Final = attrs.ENTRY.pack(attrs.ORIGINAL_JOURNAL_OFFSET, 8)
_OFFSET_HEAD: Final = attrs.ENTRY.pack(attrs.ORIGINAL_QUEUE_OFFSET, 8)
_SEND_TIME: Final = slice(layout.SEND_TIME_AT, layout.SEND_TIME_AT + 8)
_JOURNAL_OFFSET: Final = slice(layout.JOURNAL_OFFSET_AT, layout.JOURNAL_OFFSET_AT + 8)
_QUEUE_OFFSET: Final = slice(layout.QUEUE_OFFSET_AT, layout.QUEUE_OFFSET_AT + 8)
_NUMBER: Final = struct.Struct(">BHQ")
_ATTEMPT: Final = struct.Struct(">BHI")
_PARTS: Final = struct.Struct(">I")
_FRONT: Final = slice(layout.MAGIC_AT, layout.JOURNAL_OFFSET_AT)


class CopyPlan:
    """What all copies of one move have in common.

    Parameters:
        topic: where the copies go.
        sent_at_ms: their send time.
        place: topic and queue the originals stand in, if that is the place users know; None in a retry topic.
        says: what the move says of itself, as in `moved_record`, but for the attempt.
        error: what is kept as the first error of those that had none.
    """

    __slots__ = ("_fronts", "_said", "attributes", "error", "place", "sent_bytes", "topic")

    def __init__(
        self,
        topic: str,
        sent_at_ms: int,
        place: tuple[str, int] | None,
        *,
        says: Attributes,
        error: str = "",
    ) -> None:
        self.topic = name_bytes("topic", topic)
        self.sent_bytes = layout.U64.pack(sent_at_ms)
        self.place = place
        self.attributes = encode_attributes(
            msgspec.structs.replace(
                says,
                reason=None if says.reason is None else shorten(says.reason),
                original_topic=None if place is None else place[0],
                original_queue=None if place is None else place[1],
            )
        )
        self.error = encode_attributes(Attributes(first_error=shorten(error))) if error else b""
        self._said: dict[tuple[int, bool], bytes] = {}
        self._fronts: dict[bytes, tuple[bytes, int]] = {}

    def said(self, attempt: int, has_error: bool) -> bytes:
        """What a copy says of this move."""
        found = self._said.get((attempt, has_error))
        if found is None:
            found = _ATTEMPT.pack(attrs.ATTEMPT, 4, attempt) + self.attributes + (b"" if has_error else self.error)
            self._said[attempt, has_error] = found
        return found

    def front(self, before: bytes) -> tuple[bytes, int]:
        """Bytes 4 to 54 of a copy whose original has these from 4 to 9, and the checksum over what counts of them."""
        found = self._fronts.get(before)
        if found is None:
            flags = before[layout.FLAGS_AT - layout.MAGIC_AT] & ~layout.IPV6 | layout.MOVED
            mine = before[:2] + bytes((flags,)) + before[3:]
            head = b"".join((mine, BLANK_STAMP, self.sent_bytes, BLANK_TIMES))
            found = self._fronts[before] = (head, crc32c(self.sent_bytes, crc32c(mine)))
        return found


class Failed(NamedTuple):
    """A record that is about to be moved, taken apart."""

    raw: bytes
    names_at: int  # of the app's length; the topic is replaced
    attributes_at: int
    kept: bytes  # entries that every copy keeps
    key: bytes | None
    message_id: bytes | None  # of one that was moved
    attempts: int  # made before it came where it is now
    attempts_before: int  # made before somebody resent it from the dead letters
    has_error: bool
    expires_at_ms: int | None


class Copied(NamedTuple):
    """A copy, and what an index needs to know of it."""

    record: bytes
    message_id: bytes
    key: bytes | None


def read_failed(raw: bytes, *, is_retry: bool) -> Failed:
    """Take a record apart.

    Parameters:
        raw: the record, verified.
        is_retry: it stands in a retry topic, so it names its place and the attempts made.

    Raises:
        RecordCorrupt: its parts do not add up.
    """
    try:
        topic_at = layout.BODY_AT + _PARTS.unpack_from(raw, layout.BODY_SIZE_AT)[0]
        names_at = topic_at + 1 + raw[topic_at]
        business_at = names_at + 1 + raw[names_at]
        attributes_at = business_at + 1 + raw[business_at]
        at = attributes_at + 2
        size = raw[at - 2] << 8 | raw[at - 1]
    except (IndexError, struct.error) as error:
        raise RecordCorrupt("a record's parts reach past its end") from error
    end = at + size
    if end != len(raw):
        raise RecordCorrupt("a record's parts do not add up to its length")
    key = message_id = None
    attempts = before = 0
    has_error = False
    expires_at_ms = None
    is_moved = bool(raw[layout.FLAGS_AT] & layout.MOVED)
    dropped = (_OF_ONE_MOVE if is_retry else _OF_ONE_MOVE | _PLACE) if is_moved else _OURS
    pieces: list[bytes] = []
    first = at  # of the entries that are kept and not taken yet
    while at < end - 2:
        kind = raw[at]
        value_at = at + 3
        following = value_at + (raw[at + 1] << 8 | raw[at + 2])
        if kind == attrs.KEY:
            key = raw[value_at:following]
        elif kind == attrs.EXPIRES_AT:
            expires_at_ms = int.from_bytes(raw[value_at:following], "big")
        elif kind in _OURS:
            if kind in dropped:
                pieces.append(raw[first:at])
                first = following
            if is_moved:
                if kind == attrs.MESSAGE_ID:
                    message_id = raw[value_at:following]
                elif kind == attrs.FIRST_ERROR:
                    has_error = True
                elif kind == attrs.ATTEMPTS_BEFORE:
                    before = int.from_bytes(raw[value_at:following], "big")
                elif kind == attrs.ATTEMPT and is_retry:
                    attempts = int.from_bytes(raw[value_at:following], "big")
        at = following
    if at != end:
        raise RecordCorrupt("a record's attributes do not add up to its length")
    pieces.append(raw[first:end])
    kept = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Failed(
        raw,
        names_at,
        attributes_at,
        kept,
        key=key,
        message_id=message_id,
        attempts=attempts,
        attempts_before=before,
        has_error=has_error,
        expires_at_ms=expires_at_ms,
    )


def copy_record(
    failed: Failed, plan: CopyPlan, message_id: bytes, attempt: int, expires_at_ms: int | None = None
) -> Copied:
    """A copy of a record, with the broker's fields zero.

    Parameters:
        message_id: for a record that carries none.
        attempt: how many attempts were made of it by now.
        expires_at_ms: when it expires, if it does not say that itself.

    Raises:
        InvalidMessage: its attributes would not fit.
    """
    raw = failed.raw
    if failed.message_id is None:
        sent, journal = raw[_SEND_TIME], raw[_JOURNAL_OFFSET]
        origin = b"".join((_ID_HEAD, message_id, _SENT_HEAD, sent, _JOURNAL_HEAD, journal))
    else:
        origin, message_id = b"", failed.message_id
    if plan.place is not None:
        origin = b"".join((origin, _OFFSET_HEAD, raw[_QUEUE_OFFSET]))
    if expires_at_ms is not None and failed.expires_at_ms is None:
        origin += _NUMBER.pack(attrs.EXPIRES_AT, 8, expires_at_ms)
    said = plan.said(attempt, failed.has_error)
    size = len(failed.kept) + len(origin) + len(said)
    if size > layout.ATTRIBUTES_BYTES_MAX:
        raise InvalidMessage(f"a moved record's attributes would take {size} bytes, over 65,535")
    # The key stands first where a message has nothing else, and stays there: readers look for it in that place.
    names = raw[failed.names_at : failed.attributes_at]
    tail = b"".join((plan.topic, names, layout.U16.pack(size), failed.kept, origin, said))
    head, seed = plan.front(raw[_FRONT])
    (body_size,) = _PARTS.unpack_from(raw, layout.BODY_SIZE_AT)
    fixed = HEAD.pack(
        HEAD.size + body_size + len(tail),
        head,
        # Of the body it is taken over, not computed: damage must not get a fresh seal.
        crc32c(tail, seed) << 32 | _PARTS.unpack_from(raw, layout.CRC_AT + 4)[0],
        body_size,
    )
    body = raw[layout.BODY_AT : layout.BODY_AT + body_size]
    return Copied(b"".join((fixed, body, tail)), message_id, failed.key)


class Released(NamedTuple):
    """A copy that leaves the schedule for its target."""

    record: bytes
    topic: bytes
    queue: int
    message_id: bytes
    key: bytes | None


def release_record(raw: bytes, sent_at_ms: int) -> Released | None:
    """The copy of a scheduled retry for the topic it names as its target; None if it names none.

    It says what it said, but for when it was due and where.

    Raises:
        RecordCorrupt: its parts do not add up.
    """
    (body_size,) = _PARTS.unpack_from(raw, layout.BODY_SIZE_AT)
    topic_at = layout.BODY_AT + body_size
    names_at = topic_at + 1 + raw[topic_at]
    business_at = names_at + 1 + raw[names_at]
    attributes_at = business_at + 1 + raw[business_at]
    at = first = attributes_at + 2
    end = len(raw)
    target = message_id = key = None
    queue = attrs.ANY_QUEUE
    pieces: list[bytes] = []
    while at < end - 2:
        kind = raw[at]
        value_at = at + 3
        following = value_at + (raw[at + 1] << 8 | raw[at + 2])
        if kind in _OF_SCHEDULE:
            pieces.append(raw[first:at])
            first = following
            if kind == attrs.TARGET_TOPIC:
                target = raw[value_at:following]
            elif kind == attrs.TARGET_QUEUE:
                queue = raw[value_at]
        elif kind == attrs.MESSAGE_ID:
            message_id = raw[value_at:following]
        elif kind == attrs.KEY:
            key = raw[value_at:following]
        at = following
    if at != end:
        raise RecordCorrupt("a record's attributes do not add up to its length")
    if target is None or message_id is None:
        return None
    pieces.append(raw[first:end])
    entries = b"".join(pieces)
    size = layout.U16.pack(len(entries))
    tail = b"".join((bytes((len(target),)), target, raw[names_at:attributes_at], size, entries))
    front, sent = raw[_FRONT], layout.U64.pack(sent_at_ms)
    crc = crc32c(tail, crc32c(sent, crc32c(front[:2] + bytes((front[2] & ~layout.IPV6,)) + front[3:])))
    fixed = HEAD.pack(
        HEAD.size + body_size + len(tail),
        b"".join((front, BLANK_STAMP, sent, BLANK_TIMES)),
        crc << 32 | _PARTS.unpack_from(raw, layout.CRC_AT + 4)[0],
        body_size,
    )
    body = raw[layout.BODY_AT : topic_at]
    return Released(b"".join((fixed, body, tail)), target, queue, message_id, key=key)
