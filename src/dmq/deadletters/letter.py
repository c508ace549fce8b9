"""A dead letter: what is kept of a message that could not be consumed or stored, and the way from a record and back.

Pure code. What always holds: `record_of` gives back the message as it was, its id, key, tag, properties and every
attribute included, whatever the database does to texts: those are for people and for filters, and may be cut. A body
stands there as it was sent, unless it is so large that it is kept compressed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import lz4.block
import msgspec
import zstandard
from crc32c import crc32c

from dmq.errors import RecordCorrupt
from dmq.model import MessageId
from dmq.records import DeadReason, RecordView, read_entries
from dmq.records import attributes as attrs
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.records.compression import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD
from dmq.records.layout import COMPRESSED

__all__ = ["BODY_BYTES_PLAIN", "TEXT_CHARS_MAX", "DeadLetter", "LetterFilter", "LetterState", "letter_of", "record_of"]

# A larger body that was sent compressed stays so: databases have packets, and a row should fit into one.
BODY_BYTES_PLAIN: Final = 4 << 20
TEXT_CHARS_MAX: Final = 255
_REASONS: Final = {int(reason): reason.name for reason in DeadReason}


class LetterState(StrEnum):
    """What has become of a dead letter."""

    WAITING = "waiting"
    RESENT = "resent"
    DELETED = "deleted"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row. `number` is 0 until the database gave it one."""

    number: int = 0
    message_id: MessageId
    group: str  # empty: it never got as far as a group
    attempts: int
    broker: str
    topic: str  # where it was first
    queue: int | None
    offset: int | None
    key: str | None
    tag: str | None
    business_id: str | None
    app: str
    priority: int
    reason: str  # the name of a `DeadReason`
    first_error: str
    last_error: str
    properties: dict[str, str]
    body: bytes
    body_bytes: int  # as it was sent
    codec: int  # how `body` is compressed; 0: it is not
    sent_codec: int  # how it was compressed when it was sent
    flags: int
    tag_hash: int
    attributes: bytes
    sent_at_ms: int
    dead_at_ms: int
    state: str = LetterState.WAITING
    claimed_by: str | None = None
    changed_by: str | None = None
    changed_at_ms: int | None = None


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters; everything that is given must hold."""

    topic: str = ""
    group: str = ""
    reason: str = ""
    since_ms: int = 0  # by the time they became dead letters
    until_ms: int = 0
    state: str = LetterState.WAITING  # empty: any
    message_ids: tuple[MessageId, ...] = ()
    numbers: tuple[int, ...] = ()


def letter_of(record: RecordView, broker: str) -> DeadLetter:
    """The dead letter that a moved record of a dead-letter topic stands for.

    Raises:
        RecordCorrupt: the record cannot be read, or says not enough of itself.
    """
    record.verify()
    said = record.attributes
    if not record.moved or said.message_id is None or said.original_topic is None:
        raise RecordCorrupt("a dead letter's record does not say which message it was")
    was_stored = said.reason_code not in (DeadReason.RATE_LIMITED, DeadReason.STORE_FAILED)
    body, codec = record.raw_body, said.codec if record.compressed else CODEC_NONE
    size = (said.raw_size or 0) if codec else len(body)
    if codec and size <= BODY_BYTES_PLAIN:
        body, codec = record.body, CODEC_NONE
    kept = b"".join(
        attrs.entry(kind, value) for kind, value in read_entries(record.attribute_bytes) if kind != attrs.COMPRESSION
    )
    last_error = said.reason or ""
    return DeadLetter(
        message_id=said.message_id,
        group=said.group or "",
        attempts=said.attempt or 0,
        broker=broker,
        topic=said.original_topic,
        queue=said.original_queue if was_stored else None,
        offset=said.original_queue_offset if was_stored else None,
        key=said.key,
        tag=said.tag,
        business_id=record.business_id,
        app=record.app,
        priority=record.priority,
        reason=_REASONS.get(said.reason_code or DeadReason.REJECTED, DeadReason.REJECTED.name),
        first_error=said.first_error or last_error,
        last_error=last_error,
        properties=said.properties,
        body=body,
        body_bytes=size,
        codec=codec,
        sent_codec=said.codec if record.compressed else CODEC_NONE,
        flags=record.flags,
        tag_hash=record.tag_hash,
        attributes=kept,
        sent_at_ms=said.original_send_time_ms or record.send_time_ms,
        dead_at_ms=record.send_time_ms,
    )


def record_of(letter: DeadLetter) -> RecordView:
    """The message again, as a moved record that still has to be given its place: pass it to `moved_record`.

    It does not expire any more: who resends a message wants it delivered.
    """
    body, codec = letter.body, letter.codec
    if not codec and letter.sent_codec:
        codec, body = _compressed(letter.sent_codec, body)
    kept = [(kind, value) for kind, value in read_entries(letter.attributes) if kind != attrs.EXPIRES_AT]
    attributes = b"".join(attrs.entry(kind, value) for kind, value in kept)
    if codec:
        attributes += attrs.compression_entry(codec, letter.body_bytes)
    names = (name_bytes(what, name) for what, name in (("app", letter.app), ("business id", letter.business_id or "")))
    return RecordView(
        build_record(
            record_head(
                letter.flags | COMPRESSED if codec else letter.flags & ~COMPRESSED, letter.tag_hash, letter.priority
            ),
            sent_at_ms=letter.sent_at_ms,
            body=body,
            body_crc=crc32c(body),
            names=name_bytes("topic", letter.topic) + b"".join(names),
            attributes=attributes,
        )
    )


def _compressed(codec: int, body: bytes) -> tuple[int, bytes]:
    """The body compressed as it was, so that it takes no more room than before."""
    if codec == CODEC_LZ4:
        return codec, lz4.block.compress(body, store_size=False)
    if codec == CODEC_ZSTD:
        return codec, zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compress(body)
    return CODEC_NONE, body
