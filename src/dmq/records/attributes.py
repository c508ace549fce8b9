"""A record's attributes: a list of entries, each `kind u8 · length u16 · value`.

    1 key, UTF-8                  7 original send time, u64 ms    13 compression: codec u8 · size uncompressed u32
    2 tag, UTF-8                  8 due at, u64 ms                14 reason, UTF-8
    3 expires at, u64 ms          9 target topic, UTF-8           15 original queue offset, u64
    4 message id, 16 bytes       10 target queue, u8, 255 = any   16 original journal offset, u64
    5 original topic, UTF-8      11 attempt, u32                0x80 user property: key size u8 · key · value, UTF-8
    6 original queue, u8         12 group, UTF-8                 17 code of the reason, u8
                                                                 18 first error, UTF-8
                                                                 19 attempts before it was resent, u32
                                                                 20 replay it came back with, UTF-8
                                                                 21 mark: what its sender had sent so far, u64
                                                                 22 sequence of its transaction's first message, u64

What always holds: a kind below 0x80 occurs at most once, a property key too; properties keep their order. A reader
skips kinds it does not know, and a move copies them: a newer writer loses nothing to an older broker.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dmq.errors import InvalidMessage, RecordCorrupt
from dmq.model import MessageId
from dmq.records.layout import ATTRIBUTES_BYTES_MAX, NAME_BYTES_MAX, USER_ATTRIBUTES_BYTES_MAX

__all__ = ["ANY_QUEUE", "Attributes", "decode_attributes", "encode_attributes", "read_entries"]

KEY: Final = 1
TAG: Final = 2
EXPIRES_AT: Final = 3
MESSAGE_ID: Final = 4
ORIGINAL_TOPIC: Final = 5
ORIGINAL_QUEUE: Final = 6
ORIGINAL_SEND_TIME: Final = 7
DUE_AT: Final = 8
TARGET_TOPIC: Final = 9
TARGET_QUEUE: Final = 10
ATTEMPT: Final = 11
GROUP: Final = 12
COMPRESSION: Final = 13
REASON: Final = 14
ORIGINAL_QUEUE_OFFSET: Final = 15
ORIGINAL_JOURNAL_OFFSET: Final = 16
REASON_CODE: Final = 17
FIRST_ERROR: Final = 18
ATTEMPTS_BEFORE: Final = 19
REPLAY: Final = 20
MARK: Final = 21
TRANSACTION: Final = 22
PROPERTY: Final = 0x80

ANY_QUEUE: Final = 255

ENTRY: Final = struct.Struct(">BH")
_COMPRESSION: Final = struct.Struct(">BI")

MESSAGE_ID_BYTES: Final = 16

_TEXT: Final = "text"
_ID: Final = "id"
_FIELDS: Final[dict[int, tuple[str, str | int]]] = {  # kind -> (field of Attributes, its bytes or how to read it)
    KEY: ("key", _TEXT),
    TAG: ("tag", _TEXT),
    EXPIRES_AT: ("expires_at_ms", 8),
    MESSAGE_ID: ("message_id", _ID),
    ORIGINAL_TOPIC: ("original_topic", _TEXT),
    ORIGINAL_QUEUE: ("original_queue", 1),
    ORIGINAL_SEND_TIME: ("original_send_time_ms", 8),
    DUE_AT: ("due_at_ms", 8),
    TARGET_TOPIC: ("target_topic", _TEXT),
    TARGET_QUEUE: ("target_queue", 1),
    ATTEMPT: ("attempt", 4),
    GROUP: ("group", _TEXT),
    REASON: ("reason", _TEXT),
    ORIGINAL_QUEUE_OFFSET: ("original_queue_offset", 8),
    ORIGINAL_JOURNAL_OFFSET: ("original_journal_offset", 8),
    REASON_CODE: ("reason_code", 1),
    FIRST_ERROR: ("first_error", _TEXT),
    ATTEMPTS_BEFORE: ("attempts_before", 4),
    REPLAY: ("replay", _TEXT),
    MARK: ("mark", 8),
    TRANSACTION: ("transaction", 8),
}


# What `shape_of` says of a value that has no fixed size.
TEXT_SHAPE: Final = -1
PROPERTY_SHAPE: Final = -2
ANY_SHAPE: Final = -3


def shape_of(kind: int) -> int:
    """How many bytes the value of a kind takes; below 0 if it is a text, a property, or of a kind we do not know."""
    if kind == PROPERTY:
        return PROPERTY_SHAPE
    if kind == COMPRESSION:
        return _COMPRESSION.size
    shape = _FIELDS[kind][1] if kind in _FIELDS else ANY_SHAPE
    if isinstance(shape, int):
        return shape
    return TEXT_SHAPE if shape == _TEXT else MESSAGE_ID_BYTES


class Attributes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the attributes of one record say; None where they say nothing."""

    key: str | None = None
    tag: str | None = None
    expires_at_ms: int | None = None
    message_id: MessageId | None = None
    original_topic: str | None = None
    original_queue: int | None = None
    original_send_time_ms: int | None = None
    original_queue_offset: int | None = None
    original_journal_offset: int | None = None
    due_at_ms: int | None = None
    target_topic: str | None = None
    target_queue: int | None = None
    attempt: int | None = None
    group: str | None = None
    reason: str | None = None
    reason_code: int | None = None  # of a dead letter, see `dmq.records.move.DeadReason`
    first_error: str | None = None
    attempts_before: int | None = None  # what it had used up when it was resent from the dead letters
    replay: str | None = None  # the id of the replay that brought it; true only of records with the flag REPLAYED
    mark: int | None = (
        None  # a checksum over all a named producer had sent until then, see `dmq.pipeline.sink.data_writer`
    )
    transaction: int | None = None  # of a further half message: the sequence of the first one of its transaction
    codec: int = 0
    raw_size: int | None = None
    properties: dict[str, str] = {}
    unknown: tuple[tuple[int, bytes], ...] = ()


def encode_attributes(attributes: Attributes) -> bytes:
    """The bytes of the attributes, without the u16 in front of them.

    Raises:
        InvalidMessage: a value does not fit its entry, or all of them together do not fit a record.
    """
    parts = []
    for kind, (name, shape) in _FIELDS.items():
        value = getattr(attributes, name)
        if value is not None:
            parts.append(entry(kind, _encode_value(name, shape, value)))
    if attributes.codec:
        parts.append(compression_entry(attributes.codec, attributes.raw_size or 0))
    parts.append(property_entries(attributes.properties))
    parts.extend(entry(kind, value) for kind, value in attributes.unknown)
    encoded = b"".join(parts)
    if len(encoded) > ATTRIBUTES_BYTES_MAX:
        raise InvalidMessage(f"attributes take {len(encoded)} bytes; at most {ATTRIBUTES_BYTES_MAX} fit in a record")
    return encoded


def entry(kind: int, value: bytes) -> bytes:
    """One entry.

    Raises:
        InvalidMessage: the value is too long for its u16.
    """
    if len(value) > ATTRIBUTES_BYTES_MAX:
        raise InvalidMessage(f"attribute {kind} takes {len(value)} bytes; at most {ATTRIBUTES_BYTES_MAX} fit")
    return ENTRY.pack(kind, len(value)) + value


def text_entry(kind: int, name: str, text: str) -> bytes:
    """One entry that holds a text.

    Raises:
        InvalidMessage: it is not text, cannot be UTF-8, or is too long.
    """
    return entry(kind, utf8(name, text))


def compression_entry(codec: int, raw_size: int) -> bytes:
    """The entry that says how the body was compressed, and to which size it must expand."""
    return ENTRY.pack(COMPRESSION, _COMPRESSION.size) + _COMPRESSION.pack(codec, raw_size)


def property_entries(properties: Mapping[str, str]) -> bytes:
    """The entries of user properties, in the mapping's order.

    Raises:
        InvalidMessage: a key or value is not text, or too short or long, or they are too long together.
    """
    if not isinstance(properties, Mapping):
        raise InvalidMessage(f"properties map names to texts, as in {{'k': 'v'}}, not {properties!r:.80}")
    parts = []
    size = 0
    for key, value in properties.items():
        raw = utf8("property key", key)
        if not 1 <= len(raw) <= NAME_BYTES_MAX:
            raise InvalidMessage(f"a property key takes 1 to {NAME_BYTES_MAX} bytes of UTF-8, not {len(raw)}")
        text = utf8(f"property {key!r}", value)
        size += 4 + len(raw) + len(text)
        if size > USER_ATTRIBUTES_BYTES_MAX:
            raise too_large_together(size)
        parts.append(ENTRY.pack(PROPERTY, 1 + len(raw) + len(text)) + bytes((len(raw),)) + raw + text)
    return b"".join(parts)


def too_large_together(size: int) -> InvalidMessage:
    """The error for user attributes over their limit."""
    return InvalidMessage(
        f"key, tag and properties take {size} bytes or more together; "
        f"at most {USER_ATTRIBUTES_BYTES_MAX} are allowed: put large data in the body",
        size=size,
        limit=USER_ATTRIBUTES_BYTES_MAX,
    )


def utf8(name: str, text: Any) -> bytes:
    """The text as UTF-8.

    Raises:
        InvalidMessage: it is not text, or one that has no UTF-8 form (a lone surrogate).
    """
    if not isinstance(text, str):
        raise InvalidMessage(f"{name} must be text, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{name} cannot be written as UTF-8: {error.reason} at {error.start}") from error


def read_entries(raw: bytes) -> list[tuple[int, bytes]]:
    """Part attributes into (kind, value), in their order, without looking into the values.

    Raises:
        RecordCorrupt: the lengths do not add up, or one of our kinds occurs twice.
    """
    entries = []
    at, end, seen = 0, len(raw), 0
    while at < end:
        if end - at < 3:
            raise RecordCorrupt(f"attributes end inside the head of an entry at byte {at}")
        kind, size = ENTRY.unpack_from(raw, at)
        at += 3
        if size > end - at:
            raise RecordCorrupt(f"attribute {kind} at byte {at - 3} claims {size} bytes, {end - at} are left")
        if kind < PROPERTY:
            if seen >> kind & 1:
                raise RecordCorrupt(f"attribute {kind} occurs twice")
            seen |= 1 << kind
        entries.append((kind, raw[at : at + size]))
        at += size
    return entries


def decode_attributes(raw: bytes) -> Attributes:
    """Read attributes back.

    Raises:
        RecordCorrupt: the bytes are not well-formed attributes.
    """
    values: dict[str, Any] = {}
    properties: dict[str, str] = {}
    unknown = []
    for kind, value in read_entries(raw):
        known = _FIELDS.get(kind)
        if kind == KEY:  # the one that readers ask for most
            values["key"] = _text(kind, value)
        elif known is not None:
            values[known[0]] = _decode_value(kind, known[1], value)
        elif kind == PROPERTY:
            key, text = _decode_property(value)
            if key in properties:
                raise RecordCorrupt(f"property {key!r} occurs twice")
            properties[key] = text
        elif kind == COMPRESSION:
            if len(value) != _COMPRESSION.size:
                raise RecordCorrupt(f"attribute {kind} has {len(value)} bytes instead of {_COMPRESSION.size}")
            values["codec"], values["raw_size"] = _COMPRESSION.unpack(value)
        else:
            unknown.append((kind, value))
    return Attributes(properties=properties, unknown=tuple(unknown), **values)


def _encode_value(name: str, shape: str | int, value: Any) -> bytes:
    if shape == _TEXT:
        return utf8(name, value)
    try:
        raw: bytes = value.to_bytes() if shape == _ID else value.to_bytes(shape, "big")
    except OverflowError as error:
        raise InvalidMessage(f"{name} {value} does not fit its attribute") from error
    return raw


def _decode_value(kind: int, shape: str | int, value: bytes) -> str | int | MessageId:
    if shape == _TEXT:
        return _text(kind, value)
    size = MESSAGE_ID_BYTES if shape == _ID else shape
    if len(value) != size:
        raise RecordCorrupt(f"attribute {kind} has {len(value)} bytes instead of {size}")
    return MessageId.from_bytes(value) if shape == _ID else int.from_bytes(value, "big")


def _decode_property(value: bytes) -> tuple[str, str]:
    if not value or not 1 <= value[0] < len(value):
        raise RecordCorrupt("a property's key is empty or longer than its entry")
    cut = 1 + value[0]
    return _text(PROPERTY, value[1:cut]), _text(PROPERTY, value[cut:])


def _text(kind: int, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RecordCorrupt(f"attribute {kind} is not UTF-8: {error.reason} at {error.start}") from error
