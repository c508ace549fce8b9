"""A move: a copy of a message's record under another topic (retry, delay, commit, dead letter, resend, replay).

What always holds: the copy carries the original's body bytes, key, tag, properties, expiry and every attribute this
version does not know, and the id, topic, queue, offsets and send time that the message had first, and the first error
said of it, however often it is moved. Its own send time restarts. Any record a client may send can be moved: room is
kept for what moving adds. `moved_many` does the same for a run of records that were never moved, a few microseconds
each: each record that comes out has the very bytes that `moved_record(…, is_placed=False)` makes of it under the topic
it already names. A record whose body stands in a block is made plain before it is moved.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dmq.errors import InvalidMessage
from dmq.model import MessageId
from dmq.records import attributes as attrs
from dmq.records import layout
from dmq.records.attributes import Attributes, encode_attributes, read_entries
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.records.columns import decode_columns
from dmq.records.layout import Buffer
from dmq.records.view import RecordView

__all__ = ["REASON_BYTES_MAX", "DeadReason", "moved_many", "moved_record", "shorten"]

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
_FEW_RECORDS: Final = 8
_U16: Final = layout.U16.pack
_MOVED_HEAD: Final = np.dtype(
    [
        ("length", ">u4"),
        ("magic", ">u2"),
        ("flags", "u1"),
        ("tag_hash", ">u2"),
        ("priority", "u1"),
        ("stamp", f"V{layout.STAMP.size}"),
        ("sent", ">u8"),
        ("times", f"V{layout.TIMES.size}"),
        ("crc", ">u8"),
        ("body_size", ">u4"),
    ]
)
_SIGNED: Final = np.dtype([("magic", ">u2"), ("flags", "u1"), ("tag_hash", ">u2"), ("priority", "u1"), ("sent", ">u8")])
# Entries that a user sends and a move copies as they are; attributes with any other are looked at one by one.
_PLAIN: Final = frozenset((attrs.KEY, attrs.TAG, attrs.EXPIRES_AT, attrs.COMPRESSION, attrs.PROPERTY))

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
    assert not record.in_block, "a record is made plain before it is moved"
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


# --- many at once -----------------------------------------------------------------------------------------------------


def moved_many(
    buffer: Buffer,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    producer_id: int,
    sequences: npt.NDArray[np.uint64],
    sent_at_ms: int,
) -> list[bytes]:
    """Copies of records of one producer and one topic, for that topic, with the broker's fields zero.

    Parameters:
        buffer: where they stand.
        starts, lengths: where in it.
        producer_id, sequences: their ids.
        sent_at_ms: the copies' send time.

    Raises:
        InvalidMessage: attributes of one would not fit.
        RecordCorrupt: one cannot be read.
    """
    if len(starts) < _FEW_RECORDS:
        return [
            _moved_one(buffer, start, producer_id, sequence, sent_at_ms=sent_at_ms)
            for start, sequence in zip(starts.tolist(), sequences.tolist(), strict=True)
        ]
    columns = decode_columns(buffer, starts, lengths)
    flags = columns.flags & np.uint8(0xFF & ~layout.IPV6) | np.uint8(layout.MOVED)
    topic = bytes(buffer[int(columns.topic_at[0]) : int(columns.app_at[0]) - 1])
    origins = _origins(columns, topic, producer_id, sequences)
    added_size = origins.itemsize
    added = origins.tobytes()
    signed = np.empty(len(starts), _SIGNED)
    signed["magic"], signed["flags"], signed["sent"] = layout.MAGIC, flags, sent_at_ms
    signed["tag_hash"], signed["priority"] = columns.tag_hash, columns.priority
    heads_signed = signed.tobytes()
    view = bytes(buffer)
    pieces: list[bytes] = []
    crcs: list[int] = []
    grown: list[int] = []
    raw = kept = b""
    head_at = added_at = 0
    for body_at, names_at, attributes_at, size in zip(
        columns.body_at.tolist(),
        (columns.topic_at - 1).tolist(),
        columns.attributes_at.tolist(),
        columns.attributes_size.tolist(),
        strict=True,
    ):
        before = view[attributes_at : attributes_at + size]
        if before != raw:  # those of neighbours are often the same
            raw, kept = before, _kept(before)
        total = added_size + len(kept)
        if total > layout.ATTRIBUTES_BYTES_MAX:
            raise InvalidMessage(f"a moved record's attributes would take {total} bytes, over 65,535")
        more = _U16(total) + added[added_at : added_at + added_size] + kept
        names = view[names_at : attributes_at - 2]
        crcs.append(crc32c(more, crc32c(names, crc32c(heads_signed[head_at : head_at + _SIGNED.itemsize]))))
        grown.append(total - size)
        pieces.append(view[body_at:names_at] + names + more)
        head_at += _SIGNED.itemsize
        added_at += added_size
    heads = np.zeros(len(starts), _MOVED_HEAD)
    for name in ("magic", "flags", "tag_hash", "priority", "sent"):
        heads[name] = signed[name]
    heads["length"] = columns.length.astype(np.int64) + np.array(grown)
    heads["crc"] = np.array(crcs, np.uint64) << np.uint64(32) | columns.crc & np.uint64(0xFFFF_FFFF)
    heads["body_size"] = columns.body_size
    fixed = heads.tobytes()
    step = _MOVED_HEAD.itemsize
    return [fixed[at : at + step] + piece for at, piece in zip(range(0, len(fixed), step), pieces, strict=True)]


def _moved_one(buffer: Buffer, start: int, producer_id: int, sequence: int, sent_at_ms: int) -> bytes:
    record = RecordView(buffer, start)
    return moved_record(
        record, record.topic, sent_at_ms=sent_at_ms, message_id=MessageId(producer_id, sequence), is_placed=False
    )


def _kept(raw: bytes) -> bytes:
    """Of a record's attributes, those that a first move copies."""
    at, end, seen = 0, len(raw), 0
    while at < end - 2:
        kind = raw[at]
        if kind not in _PLAIN or (kind != attrs.PROPERTY and seen >> kind & 1):
            break
        seen |= 1 << kind
        at += 3 + (raw[at + 1] << 8 | raw[at + 2])
    if at == end:
        return raw
    return b"".join(attrs.entry(kind, value) for kind, value in attrs.read_entries(raw) if kind not in NOT_COPIED)


def _origins(columns: Any, topic: bytes, producer_id: int, sequences: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """The attributes that a first move adds, for each record, in the order of their kinds."""
    kind = np.dtype(
        [
            ("id_head", "V3"),
            ("producer", ">u8"),
            ("sequence", ">u8"),
            ("topic", f"V{3 + len(topic)}"),
            ("sent_head", "V3"),
            ("sent", ">u8"),
            ("offset_head", "V3"),
            ("offset", ">u8"),
        ]
    )
    table = np.empty(len(sequences), kind)
    table["id_head"] = np.void(attrs.ENTRY.pack(attrs.MESSAGE_ID, 16))
    table["producer"] = producer_id
    table["sequence"] = sequences
    table["topic"] = np.void(attrs.entry(attrs.ORIGINAL_TOPIC, topic))
    table["sent_head"] = np.void(attrs.ENTRY.pack(attrs.ORIGINAL_SEND_TIME, 8))
    table["sent"] = columns.send_time_ms
    table["offset_head"] = np.void(attrs.ENTRY.pack(attrs.ORIGINAL_JOURNAL_OFFSET, 8))
    table["offset"] = columns.journal_offset
    return table
