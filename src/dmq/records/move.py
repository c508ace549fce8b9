"""A move: a copy of a message's record under another topic (retry, delay, commit, dead letter, resend, replay).

What always holds: the copy carries the original's body bytes, key, tag, properties, expiry and every attribute this
version does not know, and the id, topic, queue, offsets and send time that the message had first, and the first error
said of it, however often it is moved. Its own send time restarts. Any record a client may send can be moved: room is
kept for what moving adds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, TypeAlias

import msgspec

from dmq.errors import InvalidMessage
from dmq.model import MessageId
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.attributes import Attributes, encode_attributes, read_entries
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.records.view import RecordView

__all__ = ["REASON_BYTES_MAX", "DeadReason", "moved_record", "shorten"]

REASON_BYTES_MAX: Final = 1024
_ELLIPSIS: Final = "…".encode()

# What a move says of itself; the next move says it anew or not at all.
_OF_ONE_MOVE: Final = frozenset(
    (attrs.DUE_AT, attrs.TARGET_TOPIC, attrs.TARGET_QUEUE, attrs.ATTEMPT, attrs.GROUP, attrs.REASON, attrs.REASON_CODE)
)
_ORIGINALS: Final = (
    attrs.MESSAGE_ID,
    attrs.ORIGINAL_TOPIC,
    attrs.ORIGINAL_QUEUE,
    attrs.ORIGINAL_SEND_TIME,
    attrs.ORIGINAL_QUEUE_OFFSET,
    attrs.ORIGINAL_JOURNAL_OFFSET,
    attrs.FIRST_ERROR,
    attrs.ATTEMPTS_BEFORE,
)

_Entry: TypeAlias = tuple[int, bytes]  # kind, value

_SAYS_NOTHING: Final = Attributes()

# What a first move does not take over from a client.
NOT_COPIED: Final = _OF_ONE_MOVE | frozenset(_ORIGINALS)


STORED_DAMAGED: Final = "its record was stored damaged"  # how the reason of a CORRUPT dead letter begins


class DeadReason(IntEnum):
    """Why a message is a dead letter. The numbers are part of the stored format."""

    RETRIES_EXHAUSTED = 1
    EXPIRED = 2
    RATE_LIMITED = 3
    STORE_FAILED = 4
    REJECTED = 5
    CORRUPT = 6  # its record was stored damaged


def moved_record(
    record: RecordView,
    topic: str,
    *,
    sent_at_ms: int,
    message_id: MessageId | None = None,
    says: Attributes = _SAYS_NOTHING,
    is_placed: bool = True,
) -> bytes:
    """A copy of a record for another topic, with the broker's fields zero.

    Parameters:
        record: what to move; `verify` it first if its bytes are not trusted yet.
        topic: where the copy goes.
        sent_at_ms: the copy's send time.
        message_id: the message's id; may be left out if the record was moved before and so carries it.
        says: what this move says of itself: `due_at_ms`, when the copy is due, and `target_topic` and `target_queue`,
            where it goes then (`ANY_QUEUE` leaves the choice open); `attempt`, the number of this attempt, and `group`,
            for whom it is kept; `reason`, why it was moved, the text of its last error, cut, visibly, to 1,024 bytes of
            UTF-8, and `reason_code`, of a dead letter, a `DeadReason`; `first_error`, the text of an error, cut as well
            and kept unless an earlier move brought one; `attempts_before`, of a message that is resent: the attempts it
            had, so that it gets as many again.
        is_placed: the record stands in a queue of its own topic, so that its queue and offset are the message's; not
            so in the schedule and among half messages.

    Raises:
        InvalidMessage: it has no id, or its attributes would not fit.
        RecordCorrupt: its attributes cannot be read.
    """
    entries = [(kind, value) for kind, value in read_entries(record.attribute_bytes) if kind not in _OF_ONE_MOVE]
    if says.attempts_before is not None:
        entries = [(kind, value) for kind, value in entries if kind != attrs.ATTEMPTS_BEFORE]
    entries, origin = _with_origin(record, entries, message_id, is_placed)
    had_error = any(kind == attrs.FIRST_ERROR for kind, _ in entries)
    first_error = None if says.first_error is None or had_error else shorten(says.first_error)
    move = msgspec.structs.replace(
        says, reason=None if says.reason is None else shorten(says.reason), first_error=first_error
    )
    kept = b"".join(attrs.entry(kind, value) for kind, value in entries)
    return _rebuilt(record, topic, sent_at_ms, encode_attributes(origin) + encode_attributes(move) + kept)


def _with_origin(
    record: RecordView, entries: list[_Entry], message_id: MessageId | None, is_placed: bool
) -> tuple[list[_Entry], Attributes]:
    """Which entries of a record its copy keeps, and what is to be added about where the message was first."""
    present = {kind for kind, _ in entries}
    if record.moved and attrs.MESSAGE_ID in present:
        # A message that was delayed or prepared at first gets its place only now.
        is_first = is_placed and attrs.ORIGINAL_QUEUE not in present and attrs.ORIGINAL_QUEUE_OFFSET not in present
        return entries, Attributes(
            original_queue=record.queue if is_first else None,
            original_queue_offset=record.queue_offset if is_first else None,
        )
    if message_id is None:
        raise InvalidMessage("a record that was never moved carries no id: pass the message's id to move it")
    # Only a record marked as moved speaks for its origin: on any other such entries are a client's invention.
    return [(kind, value) for kind, value in entries if kind not in _ORIGINALS], Attributes(
        message_id=message_id,
        original_topic=record.topic,
        original_queue=record.queue if is_placed else None,
        original_send_time_ms=record.send_time_ms,
        original_queue_offset=record.queue_offset if is_placed else None,
        original_journal_offset=record.journal_offset,
    )


def _rebuilt(record: RecordView, topic: str, sent_at_ms: int, encoded: bytes) -> bytes:
    """The record under another topic and with other attributes."""
    if len(encoded) > layout.ATTRIBUTES_BYTES_MAX:
        raise InvalidMessage(f"a moved record's attributes would take {len(encoded)} bytes, over 65,535")
    _, app, business_id = record.name_bytes
    return build_record(
        record_head(record.flags & ~layout.IPV6 | layout.MOVED, record.tag_hash, record.priority),
        sent_at_ms=sent_at_ms,
        body=record.raw_body,
        body_crc=record.crc & 0xFFFF_FFFF,  # taken over, not computed: damage to the body must not get a fresh seal
        names=name_bytes("topic", topic) + bytes((len(app),)) + app + bytes((len(business_id),)) + business_id,
        attributes=encoded,
    )


def shorten(text: str) -> str:
    """The text if it takes at most 1,024 bytes of UTF-8, else as much of it as fits with an ellipsis.

    What has no UTF-8 form is replaced: a reason often is the text of somebody else's error.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) > REASON_BYTES_MAX:
        raw = raw[: REASON_BYTES_MAX - len(_ELLIPSIS)].decode("utf-8", "ignore").encode() + _ELLIPSIS
    return raw.decode()
